"""Evaluation on fixed tasks that training never poses, played by the policy, by an
oracle or at random."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from r3async.config import (
    DATASET_ENV,
    Config,
    ConfigError,
    EnvConfig,
    EpisodeConfig,
    EvaluationConfig,
    collect_secrets,
    parse_mix_entries,
    refuse_lost_secret,
    resolve_env,
    resolve_envs,
)
from r3async.envs import (
    Action,
    Environment,
    EnvironmentFactory,
    HasOracle,
    HasRandomAnswer,
    Message,
    StepResult,
    sum_episode_metrics,
)
from r3async.envs.dataset import DatasetFactory
from r3async.envs.factory import build_environment_factory
from r3async.envs.mix import MixedEnvironmentFactory, add_default_evaluation_sets
from r3async.envs.seeding import seed_global_generators
from r3async.envs.task_splits import (
    find_shared_prompts,
    has_same_rows,
    is_dataset,
    select_held_out_rows,
)
from r3async.rollout.agent_player import open_agent_player
from r3async.rollout.agents import OUTSIDE_AGENT, is_agent, make_agent
from r3async.rollout.episode import EpisodeTask, close_environment
from r3async.rollout.evaluation_results import (
    EpisodeOutcome,
    Evaluation,
    join_sets,
    summarize_outcomes,
    summarize_trajectory,
)
from r3async.rollout.lease_player import RetryingPlayer
from r3async.rollout.play_context import PlayContext
from r3async.rollout.renderer import ChatRenderer
from r3async.schedule.difficulty import NO_SIZE_MESSAGE
from r3async.schedule.tasks import TaskCursor, evaluation_seed
from r3async.world import World
from r3async.world.real import REAL_WORLD

BaselinePolicy = Literal["oracle", "random"]


class EvaluationTask(EpisodeTask, frozen=True):
    """One episode of an evaluation, which belongs to no lease.

    `group_index` counts tasks, `episode_index` counts a task's episodes from 1. Its id is never
    that of a training trajectory.
    """

    @property
    def trajectory_id(self) -> str:
        return f"evaluation{self.group_index:06d}e{self.episode_index}"


def resolve_evaluation_env(config: Config, settings: EvaluationConfig) -> EnvConfig:
    """Return the environment that a set (`EvaluationConfig.resolve_sets`) plays.

    This is the set's `env`; or, if that has no name, the trained environment with the rows that
    `data.eval` keeps from training.
    """
    return settings.env if settings.env.name else select_held_out_rows(config.env)


async def count_tasks(factory: EnvironmentFactory | None) -> int | None:
    """Return how many tasks the environment has (`Environment`); None if it draws them at random,
    and for an agent."""
    if factory is None:
        return None
    environment = factory()
    try:
        return getattr(environment, "size", None)
    finally:
        await close_environment(environment)


async def count_tasks_by_part(factory: EnvironmentFactory | None) -> tuple[int | None, ...]:
    """Return the task counts (`count_tasks`) of each environment of a mix, or of the only one."""
    parts = (
        list(factory.factories.values())
        if isinstance(factory, MixedEnvironmentFactory)
        else [factory]
    )
    return tuple([await count_tasks(part) for part in parts])


def build_evaluation_tasks(
    env: EnvConfig,
    task_count: int | None,
    settings: EvaluationConfig,
    trained_env: EnvConfig | None = None,
) -> list[EvaluationTask]:
    """Return the episodes of an evaluation: `settings.samples_per_task` of each of the first
    `settings.tasks` tasks.

    The tasks come from the list that `settings.seed` selects, of which a longer one begins with the
    shorter. Raises `ConfigError` if `trained_env` poses the same tasks.

    Args:
        task_count: The tasks of `env`, from `count_tasks`. If known, there are no more tasks than
            that, each once, since a task that is posed twice would weigh twice. If None, task seeds
            are numbers that training never draws.
        trained_env: The environment that the run trains, if there is a run.
    """
    refuse_trained_tasks(env, task_count, trained_env)
    if task_count is None:
        seeds = [evaluation_seed(settings.seed, i) for i in range(settings.tasks)]
    else:
        order = TaskCursor(evaluation_seed(settings.seed, 0), task_count)
        seeds = [order.pick_task(i) for i in range(min(settings.tasks, task_count))]
    # Episodes count from 1: number 0 of a group would keep a preview, which nobody reads.
    samples = range(1, settings.samples_per_task + 1)
    return [EvaluationTask(i, sample, seed) for i, seed in enumerate(seeds) for sample in samples]


def drop_long_prompts(
    factory: EnvironmentFactory, renderer: ChatRenderer, settings: EpisodeConfig
) -> int:
    """Drop a dataset's prompts of more than `episode.max_prompt_tokens` tokens and return how
    many there were.

    Returns 0 for other environments, which do not know their prompts. Raises `ConfigError` if
    nothing is left, or if the chat template refuses a prompt.
    """
    if isinstance(factory, MixedEnvironmentFactory):
        own = {
            label: resolve_env(label, entry, settings).episode
            for label, entry in factory.entry_configs.items()
        }
        return sum(
            drop_long_prompts(part, renderer, own[label])
            for label, part in factory.factories.items()
        )
    if not isinstance(factory, DatasetFactory):
        return 0
    most = settings.max_prompt_tokens

    def count_tokens(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> int:
        text = renderer.render(messages, tools)
        at_most = len(text.encode())  # a token stands for at least one byte
        return at_most if at_most <= most else len(renderer.encode(text))

    return factory.drop_long_prompts(count_tokens, most)


def refuse_trained_tasks(
    env: EnvConfig, task_count: int | None, trained_env: EnvConfig | None
) -> None:
    """Raise `ConfigError` if the `task_count` tasks of `env` are those of `trained_env`.

    A run poses all tasks that its environment has.
    """
    if task_count is None or trained_env is None or not _has_same_tasks(env, trained_env):
        return
    keep = (
        (
            "keep some from training with `data.eval`, as 0.05, a number or a file, set "
            "`evaluation.every_steps` = 0, or "
        )
        if env.name == DATASET_ENV
        else ""
    )
    raise ConfigError(
        f"`env.name` = {env.name!r} has {task_count} tasks, and the run trains on all of them, "
        f"so none is left to evaluate: {keep}name "
        "others with `evaluation.env` (for `r3async eval` also --env). The directory of a "
        "run's model has no training tasks: `r3async eval RUN/model --env NAME` evaluates on "
        "these all the same"
    )


def refuse_shared_prompts(env: EnvConfig, trained_env: EnvConfig) -> None:
    """Raise `ConfigError` if a row that `env` evaluates poses a prompt that a row of
    `trained_env` poses too.

    Reads the rows of both, if they are datasets. Identical datasets are left to
    `refuse_trained_tasks`.
    """
    for part in parse_mix_entries(trained_env).values():
        refuse_shared_prompts(env, part)
    if not (is_dataset(env) and is_dataset(trained_env)) or has_same_rows(env, trained_env):
        return
    shared = find_shared_prompts(env, trained_env)
    if shared:
        raise ConfigError(
            f"{len(shared)} rows of {env.name!r}, which are evaluated, have a prompt that is "
            f"trained, such as {shared[0].location}: "
            "name their file as `data.eval`, which leaves those prompts out of training, or take "
            "them out of one of the two"
        )


def _has_same_tasks(env: EnvConfig, trained_env: EnvConfig) -> bool:
    """Return True if both environments pose the same tasks.

    Datasets do if they have the same rows, whatever their other arguments; the arguments of other
    environments may choose their tasks.
    """
    parts = parse_mix_entries(trained_env)
    if parts:
        return any(_has_same_tasks(env, part) for part in parts.values())
    if is_dataset(env) and is_dataset(trained_env):
        return has_same_rows(env, trained_env)
    return (env.name, env.args) == (trained_env.name, trained_env.args)


def check_environment(config: Config) -> None:
    """Raise `ConfigError` for an environment or an agent that this run cannot train
    or evaluate with."""
    for setting, secret in collect_secrets(config).items():
        refuse_lost_secret(secret, setting)
    config = add_default_evaluation_sets(config)
    _load_task_count(config.env)
    if config.schedule.difficulty.is_active and not any(
        _load_task_count(each.env) for each in resolve_envs(config)
    ):
        raise ConfigError(NO_SIZE_MESSAGE)
    for settings in (
        config.evaluation.resolve_sets().values() if config.evaluation.every_steps else ()
    ):
        env = resolve_evaluation_env(config, settings)
        size = _load_task_count(env)
        refuse_trained_tasks(env, size, config.env)
        refuse_shared_prompts(env, config.env)
        if env.name == OUTSIDE_AGENT:
            raise ConfigError(
                f'`env.name` = "{OUTSIDE_AGENT}" cannot be evaluated, since nobody has to come: '
                "set `evaluation.env.name` to something that runs by itself, or "
                "`evaluation.every_steps` = 0"
            )
    if not is_agent(config.env):
        return
    if config.env.name == OUTSIDE_AGENT and not config.serving.enabled:
        raise ConfigError(
            f'`env.name` = "{OUTSIDE_AGENT}" needs `serving.enabled = true`: nobody '
            "could take an episode"
        )
    if not config.model.path:
        raise ConfigError(
            f"`env.name` = {config.env.name!r} has no oracle to warm a new model up with: give a "
            "trained one with `model.path`"
        )


def _load_task_count(env: EnvConfig) -> int | None:
    """Return how many tasks the environment has, if known. Raises `ConfigError` if it
    cannot be constructed."""
    if is_agent(env):
        make_agent(env)
        return None
    return getattr(build_environment_factory(env)(), "size", None)


@dataclass(frozen=True)
class EvaluationPlayer:
    """A player of evaluations on one engine.

    Attributes:
        make_factory: `make_factory(env)` returns the factory of an environment, or
            None for an agent.
        trained_env: The environment that the run trains; see `build_evaluation_tasks`.
        progress: Gets each outcome.
    """

    config: Config
    context: PlayContext
    make_factory: Callable[[EnvConfig], Awaitable[EnvironmentFactory | None]]
    trained_env: EnvConfig | None
    progress: Callable[[EpisodeOutcome], object] = lambda outcome: None
    world: World = REAL_WORLD

    async def play_sets(self) -> Evaluation:
        """Play the sets of `config.evaluation` one after the other; see `play_set`."""
        episodes = {each.label: each.episode for each in resolve_envs(self.config)}
        sets = {}
        for name, settings in self.config.evaluation.resolve_sets().items():
            env = resolve_evaluation_env(self.config, settings)
            sets[name] = await self.play_set(env, settings, episodes.get(name, self.config.episode))
        return join_sets(sets)

    async def play_set(
        self, env: EnvConfig, settings: EvaluationConfig, episode: EpisodeConfig
    ) -> Evaluation:
        """Play one set, at most `generator.concurrency` episodes at once.

        An episode that fails is retried `episode.retries` times; then its error is raised and the
        others are cancelled. Raises `ConfigError` where `build_evaluation_tasks` does.
        """
        if settings.temperature == 0:
            episode = msgspec.structs.replace(
                episode, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0
            )
        elif settings.temperature is not None:
            episode = msgspec.structs.replace(episode, temperature=settings.temperature)
        factory = await self.make_factory(env)
        tasks = build_evaluation_tasks(env, await count_tasks(factory), settings, self.trained_env)
        outcomes: list[EpisodeOutcome] = []
        clock = self.world.clock
        began = clock.monotonic()
        async with open_agent_player(
            env,
            episode,
            # The run's endpoint for outside agents is not opened a second time.
            msgspec.structs.replace(self.config.serving, enabled=False, port=0),
            self.context,
            world=self.world,
        ) as play_episode:
            player = RetryingPlayer(self.context, episode, factory, play_episode=play_episode)
            capacity = asyncio.Semaphore(self.config.generator.concurrency)

            async def play_task(task: EpisodeTask) -> None:
                async with capacity:
                    played = await player.play(task)
                outcomes.append(summarize_trajectory(played.trajectory))
                self.progress(outcomes[-1])

            async with asyncio.TaskGroup() as group:
                for task in tasks:
                    group.create_task(play_task(task))
        return summarize_outcomes(outcomes, clock.monotonic() - began, settings.pass_reward)


async def evaluate_without_model(
    env: EnvConfig,
    factory: EnvironmentFactory,
    policy: BaselinePolicy,
    settings: EvaluationConfig,
    *,
    trained_env: EnvConfig | None = None,
    max_turns: int,
    progress: Callable[[EpisodeOutcome], object] = lambda outcome: None,
) -> Evaluation:
    """Play the tasks of a set with the environment's oracle or its random answers, as a baseline
    for its rewards.

    Raises `ConfigError` if the environment has no such policy, and where
    `build_evaluation_tasks` does.
    """
    began = time.monotonic()
    outcomes = []
    for task in build_evaluation_tasks(env, await count_tasks(factory), settings, trained_env):
        seed_global_generators(task.task_seed)
        environment = factory()
        try:
            results, reason = await _play_baseline(environment, env.name, policy, task, max_turns)
        finally:
            await close_environment(environment)
        metrics = sum_episode_metrics([result.metrics for result in results])
        reward = sum(result.reward for result in results)
        outcomes.append(
            EpisodeOutcome(reward, len(results), reason, metrics=metrics, task_seed=task.task_seed)
        )
        progress(outcomes[-1])
    return summarize_outcomes(outcomes, time.monotonic() - began, settings.pass_reward)


async def _play_baseline(
    env: Environment, name: str, policy: BaselinePolicy, task: EvaluationTask, max_turns: int
) -> tuple[list[StepResult], str]:
    """Play one episode and return the results of its turns and the stop reason."""
    seed_global_generators(task.task_seed)
    await env.reset(task.task_seed)
    rng = random.Random(f"random/{task.task_seed}/{task.episode_index}")
    results: list[StepResult] = []
    while len(results) < max_turns:
        if policy == "oracle" and isinstance(env, HasOracle):
            answer = env.oracle()
        elif policy == "random" and isinstance(env, HasRandomAnswer):
            answer = env.random_answer(rng)
        else:
            wanted = "oracle()" if policy == "oracle" else "random_answer(rng)"
            raise ConfigError(f"`--policy {policy}`: the environment {name!r} has no {wanted}")
        seed_global_generators(task.task_seed, len(results) + 1)
        result = await env.step(Action(answer))
        results.append(result)
        if result.done:
            return results, "env_done"
    return results, "turns"
