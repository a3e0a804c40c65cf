"""Which tasks evaluation plays: those of `[evaluation]`, in the run and by `r3async eval`, and never one that is trained."""

from __future__ import annotations

from r3async.config import Config, ConfigError, EnvConfig
from r3async.envs.base import EnvironmentFactory
from r3async.envs.dataset import find
from r3async.rollout.episode import EpisodeTask, close_environment
from r3async.schedule.cursor import Cursor
from r3async.schedule.seeds import evaluation_seed

_DATASET = "dataset:"


class EvaluationTask(EpisodeTask, frozen=True):
    """An episode of no lease; `group_index` counts them. Its id is no training trajectory's."""

    @property
    def trajectory_id(self) -> str:
        return f"evaluation{self.group_index:06d}"


def evaluated(config: Config) -> EnvConfig:
    """The environment that evaluation plays: `evaluation.env`, or the one that is trained if that has no name."""
    return config.evaluation.env if config.evaluation.env.name else config.env


async def count_tasks(factory: EnvironmentFactory | None) -> int | None:
    """How many tasks the environment says it has (`HasSize`). None: it draws them at random, or an agent does."""
    if factory is None:
        return None
    environment = factory()
    try:
        return getattr(environment, "size", None)
    finally:
        await close_environment(environment)


def evaluation_tasks(
    env: EnvConfig, size: int | None, seed: int, episodes: int, trained: EnvConfig | None = None
) -> list[EvaluationTask]:
    """The first `episodes` of the endless list of tasks that `seed` stands for: the longer list begins with the shorter.

    `size`: of `env`, from `count_tasks`. With one, each task is posed once before any is posed again; without, task seeds are
    numbers that training never draws. `trained`: the environment that a run trains, if there is a run. Raises `ConfigError` if
    that poses the same tasks.
    """
    refuse_trained_tasks(env, size, trained)
    if size is None:
        seeds = [evaluation_seed(seed, i) for i in range(episodes)]
    else:
        order = Cursor(evaluation_seed(seed, 0), size)
        seeds = [order.task_seed(i) for i in range(episodes)]
    # Index 0 of a group would keep a preview of what was said, for nobody.
    return [EvaluationTask(i, 1, task_seed) for i, task_seed in enumerate(seeds)]


def refuse_trained_tasks(env: EnvConfig, size: int | None, trained: EnvConfig | None) -> None:
    """Raise `ConfigError` if the tasks of `env`, which are `size`, are those that `trained` poses: it poses all that it has."""
    if size is None or trained is None or not _same_tasks(env, trained):
        return
    raise ConfigError(
        f"`env.name` = {env.name!r} has {size} tasks, and the run trains on all of them, so none is left to evaluate: name "
        "others with `evaluation.env` (for `r3async eval` also --env). The directory of a run's model has no training tasks: "
        "`r3async eval RUN/model --env NAME` plays these all the same"
    )


def _same_tasks(env: EnvConfig, trained: EnvConfig) -> bool:
    """Rows are the same in one file, whatever is asked of them; another environment's arguments may choose its tasks."""
    if env.name.startswith(_DATASET) and trained.name.startswith(_DATASET):
        return find(env.name.removeprefix(_DATASET)).samefile(find(trained.name.removeprefix(_DATASET)))
    return (env.name, env.args) == (trained.name, trained.args)
