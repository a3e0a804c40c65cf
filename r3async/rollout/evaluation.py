"""Evaluation: fixed tasks that training never poses, played by the policy, by an oracle or blindly; and what came of them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from r3async.config import (
    DATASET,
    Config,
    ConfigError,
    EnvConfig,
    EpisodeConfig,
    EvaluationConfig,
    ServingConfig,
    check_kept,
    environments,
    parts_of,
    posed,
    secret_settings,
)
from r3async.data.records import Trajectory
from r3async.envs import (
    Action,
    Environment,
    EnvironmentFactory,
    HasOracle,
    HasRandomAnswer,
    Message,
    StepResult,
    sum_by_name,
)
from r3async.envs.dataset import DatasetFactory, held_out, is_dataset, same_rows, shared_prompts
from r3async.envs.factory import environment_factory
from r3async.envs.mix import MixedFactory, evaluate_each
from r3async.rollout.agents.agents import OUTSIDE, agent_player, is_agent, make_agent
from r3async.rollout.chat import ChatRenderer
from r3async.rollout.engines import Engine
from r3async.rollout.episode import EpisodeTask, close_environment
from r3async.rollout.group import GroupPlayer
from r3async.rollout.outcomes import Evaluation, Outcome, joined, outcome_of, summarize_outcomes
from r3async.schedule.difficulty import NO_SIZE
from r3async.schedule.tasks import Cursor, evaluation_seed
from r3async.world import World
from r3async.world.real import REAL

Policy = Literal["oracle", "random"]


class EvaluationTask(EpisodeTask, frozen=True):
    """An episode of no lease; `group_index` counts tasks, and `episode_index` from 1 the episodes of one. Its id is no training
    trajectory's."""

    @property
    def trajectory_id(self) -> str:
        return f"evaluation{self.group_index:06d}e{self.episode_index}"


def evaluated(config: Config, settings: EvaluationConfig) -> EnvConfig:
    """The environment that a set plays (`EvaluationConfig.each`): its `env`, or the one that is trained if that has no name, with
    the rows that `data.eval` keeps from training."""
    return settings.env if settings.env.name else held_out(config.env)


async def count_tasks(factory: EnvironmentFactory | None) -> int | None:
    """How many tasks the environment has (`Environment`). None: it draws them at random, or an agent does."""
    if factory is None:
        return None
    environment = factory()
    try:
        return getattr(environment, "size", None)
    finally:
        await close_environment(environment)


async def task_counts(factory: EnvironmentFactory | None) -> tuple[int | None, ...]:
    """Of each environment of a mix, or of the only one."""
    parts = list(factory.parts.values()) if isinstance(factory, MixedFactory) else [factory]
    return tuple([await count_tasks(part) for part in parts])


def evaluation_tasks(
    env: EnvConfig, size: int | None, settings: EvaluationConfig, trained: EnvConfig | None = None
) -> list[EvaluationTask]:
    """`settings.samples` episodes of each of the first `settings.episodes` tasks of the list that `settings.seed` stands for: the
    longer list begins with the shorter.

    `size`: of `env`, from `count_tasks`. With one, there are no more tasks than that, each once: a task that is posed twice would
    weigh twice. Without, task seeds are numbers that training never draws. `trained`: the environment that a run trains, if
    there is a run. Raises `ConfigError` if that poses the same tasks.
    """
    refuse_trained_tasks(env, size, trained)
    if size is None:
        seeds = [evaluation_seed(settings.seed, i) for i in range(settings.episodes)]
    else:
        order = Cursor(evaluation_seed(settings.seed, 0), size)
        seeds = [order.task_seed(i) for i in range(min(settings.episodes, size))]
    # Index 0 of a group would keep a preview, for nobody.
    samples = range(1, settings.samples + 1)
    return [EvaluationTask(i, sample, seed) for i, seed in enumerate(seeds) for sample in samples]


def drop_long_prompts(factory: EnvironmentFactory, renderer: ChatRenderer, settings: EpisodeConfig) -> int:
    """Have a dataset pose no prompt of more than `episode.max_prompt_tokens`; returns how many it had. 0 for other environments,
    which do not know their prompts. Raises `ConfigError` if nothing is left, or the chat template refuses a prompt."""
    if isinstance(factory, MixedFactory):
        own = {label: posed(label, entry, settings).episode for label, entry in factory.entries.items()}
        return sum(drop_long_prompts(part, renderer, own[label]) for label, part in factory.parts.items())
    if not isinstance(factory, DatasetFactory):
        return 0
    most = settings.max_prompt_tokens

    def length(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> int:
        text = renderer.render(messages, tools)
        at_most = len(text.encode())  # a token stands for a byte at least
        return at_most if at_most <= most else len(renderer.encode(text))

    return factory.fit(length, most)


def refuse_trained_tasks(env: EnvConfig, size: int | None, trained: EnvConfig | None) -> None:
    """Raise `ConfigError` if the tasks of `env`, which are `size`, are those that `trained` poses: it poses all that it has."""
    if size is None or trained is None or not _same_tasks(env, trained):
        return
    keep = "keep some from training with `data.eval`, as 0.05, a number or a file, set `evaluation.every` = 0, or " * (
        env.name == DATASET
    )
    raise ConfigError(
        f"`env.name` = {env.name!r} has {size} tasks, and the run trains on all of them, so none is left to evaluate: {keep}name "
        "others with `evaluation.env` (for `r3async eval` also --env). The directory of a run's model has no training tasks: "
        "`r3async eval RUN/model --env NAME` plays these all the same"
    )


def refuse_shared_prompts(env: EnvConfig, trained: EnvConfig) -> None:
    """Raise `ConfigError` if a row that `env` evaluates poses a prompt that a row of `trained` poses too. Reads the rows of both,
    if they are datasets; whole datasets that are the same are `refuse_trained_tasks`'s."""
    for part in parts_of(trained).values():
        refuse_shared_prompts(env, part)
    if not (is_dataset(env) and is_dataset(trained)) or same_rows(env, trained):
        return
    shared = shared_prompts(env, trained)
    if shared:
        raise ConfigError(
            f"{len(shared)} rows of {env.name!r}, which are evaluated, pose a prompt that is trained, such as {shared[0].where}: "
            "name their file as `data.eval`, which leaves those prompts out of training, or take them out of one of the two"
        )


def _same_tasks(env: EnvConfig, trained: EnvConfig) -> bool:
    """Rows are the same in one file, whatever is asked of them; another environment's arguments may choose its tasks."""
    if parts := parts_of(trained):
        return any(_same_tasks(env, part) for part in parts.values())
    if is_dataset(env) and is_dataset(trained):
        return same_rows(env, trained)
    return (env.name, env.args) == (trained.name, trained.args)


def check_environment(config: Config) -> None:
    """Raise `ConfigError` for an environment, or an agent, that cannot be used in this run, to train or to evaluate."""
    for setting, secret in secret_settings(config).items():
        check_kept(secret, setting)
    config = evaluate_each(config)
    _check_loads(config.env)
    if config.schedule.difficulty.active and not any(_check_loads(each.env) for each in environments(config)):
        raise ConfigError(NO_SIZE)
    for settings in config.evaluation.each().values() if config.evaluation.every else ():
        env = evaluated(config, settings)
        size = _check_loads(env)
        refuse_trained_tasks(env, size, config.env)
        refuse_shared_prompts(env, config.env)
        if env.name == OUTSIDE:
            raise ConfigError(
                f'`env.name` = "{OUTSIDE}" cannot be evaluated, since nobody has to come: set `evaluation.env.name` to '
                "something that plays by itself, or `evaluation.every` = 0"
            )
    if not is_agent(config.env):
        return
    if config.env.name == OUTSIDE and not config.serving.enabled:
        raise ConfigError(f'`env.name` = "{OUTSIDE}" needs `serving.enabled = true`: nobody could take an episode')
    if not config.model.path:
        raise ConfigError(
            f"`env.name` = {config.env.name!r} has no oracle to warm a new model up with: give a trained one with `model.path`"
        )


def _check_loads(env: EnvConfig) -> int | None:
    """How many tasks it has, if that is known. Raises `ConfigError` if it cannot be made."""
    if is_agent(env):
        make_agent(env)
        return None
    return getattr(environment_factory(env)(), "size", None)


async def evaluate_all(
    config: Config,
    factory: Callable[[EnvConfig], Awaitable[EnvironmentFactory | None]],
    engine: Engine,
    renderer: ChatRenderer,
    *,
    trained: EnvConfig | None,
    generator_id: str = "",
    report: Callable[..., object] = lambda event, **fields: None,
    progress: Callable[[Outcome], object] = lambda outcome: None,
    world: World = REAL,
) -> Evaluation:
    """The sets of `config.evaluation`, one after the other; see `evaluate`. `factory(env)`: None for an agent."""
    sets = {}
    for name, settings in config.evaluation.each().items():
        env = evaluated(config, settings)
        sets[name] = await evaluate(
            env,
            await factory(env),
            engine,
            renderer,
            next((each.episode for each in environments(config) if each.label == name), config.episode),
            config.serving,
            settings,
            trained=trained,
            concurrency=config.generator.concurrency,
            generator_id=generator_id,
            report=report,
            progress=progress,
            world=world,
        )
    return joined(sets)


async def evaluate(
    env: EnvConfig,
    factory: EnvironmentFactory | None,
    engine: Engine,
    renderer: ChatRenderer,
    episode: EpisodeConfig,
    serving: ServingConfig,
    settings: EvaluationConfig,
    *,
    trained: EnvConfig | None,
    concurrency: int,
    generator_id: str = "",
    report: Callable[..., object] = lambda event, **fields: None,
    progress: Callable[[Outcome], object] = lambda outcome: None,
    world: World = REAL,
) -> Evaluation:
    """Play one set (`EvaluationConfig.each`), at most `concurrency` episodes at once. `factory`: of `env`; None for an agent.
    `trained`: see `evaluation_tasks`, which may raise `ConfigError`.

    An episode that fails is tried again `episode.retries` times; then what it failed with is raised and the others are cancelled.
    `report(event, **fields)` gets failed attempts, `progress` each outcome.
    """
    if settings.temperature == 0:
        episode = msgspec.structs.replace(episode, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
    elif settings.temperature is not None:
        episode = msgspec.structs.replace(episode, temperature=settings.temperature)
    tasks = evaluation_tasks(env, await count_tasks(factory), settings, trained)
    outcomes: list[Outcome] = []

    async def deliver(trajectory: Trajectory) -> None:
        outcomes.append(outcome_of(trajectory))
        progress(outcomes[-1])

    clock = world.clock
    began = clock.monotonic()
    # The door for agents from outside stays the run's own.
    private = msgspec.structs.replace(serving, enabled=False, port=0)
    async with agent_player(
        env, engine, renderer, episode, private, generator_id=generator_id, report=report, world=world
    ) as play:
        player = GroupPlayer(
            factory=factory,
            engine=engine,
            renderer=renderer,
            settings=episode,
            generator_id=generator_id,
            deliver=deliver,
            report=report,
            play=play,
            clock=clock.time,
        )
        capacity = asyncio.Semaphore(concurrency)

        async def one(task: EpisodeTask) -> None:
            async with capacity:
                await player.play_one(task)

        async with asyncio.TaskGroup() as group:
            for task in tasks:
                group.create_task(one(task))
    return summarize_outcomes(outcomes, clock.monotonic() - began, settings.pass_reward)


async def evaluate_without_model(
    env: EnvConfig,
    factory: EnvironmentFactory,
    policy: Policy,
    settings: EvaluationConfig,
    *,
    trained: EnvConfig | None = None,
    max_turns: int,
    progress: Callable[[Outcome], object] = lambda outcome: None,
) -> Evaluation:
    """The same tasks under the environment's oracle, or under its random answers: what its rewards mean.

    Raises `ConfigError` if the environment has no such policy, and see `evaluation_tasks`.
    """
    began = time.monotonic()
    outcomes = []
    for task in evaluation_tasks(env, await count_tasks(factory), settings, trained):
        environment = factory()
        try:
            results, reason = await _play_policy(environment, env.name, policy, task, max_turns)
        finally:
            await close_environment(environment)
        metrics = sum_by_name([result.metrics for result in results])
        reward = sum(result.reward for result in results)
        outcomes.append(Outcome(reward, len(results), reason, metrics=metrics, task=task.task_seed))
        progress(outcomes[-1])
    return summarize_outcomes(outcomes, time.monotonic() - began, settings.pass_reward)


async def _play_policy(
    env: Environment, name: str, policy: Policy, task: EvaluationTask, max_turns: int
) -> tuple[list[StepResult], str]:
    """What came of the turns, and why it ended."""
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
        result = await env.step(Action(answer))
        results.append(result)
        if result.done:
            return results, "env_done"
    return results, "turns"
