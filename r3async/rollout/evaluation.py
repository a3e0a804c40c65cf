"""Evaluation: fixed tasks that training never poses, played by the policy, by an oracle or blindly; and what came of them."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import numpy as np

from r3async.config import Config, ConfigError, EnvConfig, EpisodeConfig, ServingConfig, check_kept, secret_settings
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
from r3async.envs.dataset import DatasetFactory, held_out, is_dataset, same_rows
from r3async.envs.factory import environment_factory
from r3async.rollout.agents.agents import OUTSIDE, agent_player, is_agent, make_agent
from r3async.rollout.chat import ChatRenderer
from r3async.rollout.engines import Engine
from r3async.rollout.episode import EpisodeTask, close_environment
from r3async.rollout.group import GroupPlayer
from r3async.schedule.tasks import Cursor, evaluation_seed
from r3async.world import World
from r3async.world.real import REAL

Policy = Literal["oracle", "random"]


class EvaluationTask(EpisodeTask, frozen=True):
    """An episode of no lease; `group_index` counts them. Its id is no training trajectory's."""

    @property
    def trajectory_id(self) -> str:
        return f"evaluation{self.group_index:06d}"


def evaluated(config: Config) -> EnvConfig:
    """The environment that evaluation plays: `evaluation.env`, or the one that is trained if that has no name, with the rows that
    `data.eval` keeps from training."""
    return config.evaluation.env if config.evaluation.env.name else held_out(config.env)


async def count_tasks(factory: EnvironmentFactory | None) -> int | None:
    """How many tasks the environment has (`Environment`). None: it draws them at random, or an agent does."""
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
    # Index 0 of a group would keep a preview, for nobody.
    return [EvaluationTask(i, 1, task_seed) for i, task_seed in enumerate(seeds)]


def drop_long_prompts(factory: EnvironmentFactory, renderer: ChatRenderer, settings: EpisodeConfig) -> int:
    """Have a dataset pose no prompt of more than `episode.max_prompt_tokens`; returns how many it had. 0 for other environments,
    which do not know their prompts. Raises `ConfigError` if nothing is left, or the chat template refuses a prompt."""
    if not isinstance(factory, DatasetFactory):
        return 0
    most = settings.max_prompt_tokens

    def length(messages: Sequence[Message]) -> int:
        text = renderer.render(messages)
        at_most = len(text.encode())  # a token stands for a byte at least
        return at_most if at_most <= most else len(renderer.encode(text))

    return factory.fit(length, most)


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
    if is_dataset(env) and is_dataset(trained):
        return same_rows(env, trained)
    return (env.name, env.args) == (trained.name, trained.args)


def check_environment(config: Config) -> None:
    """Raise `ConfigError` for an environment, or an agent, that cannot be used in this run, to train or to evaluate."""
    for setting, secret in secret_settings(config).items():
        check_kept(secret, setting)
    played = evaluated(config) if config.evaluation.every else config.env
    for env in [config.env] if played is config.env else [config.env, played]:
        if is_agent(env):
            make_agent(env)
        else:
            factory = environment_factory(env)
            if config.evaluation.every and env is played:
                refuse_trained_tasks(env, getattr(factory(), "size", None), config.env)
    if config.evaluation.every and played.name == OUTSIDE:
        raise ConfigError(
            f'`env.name` = "{OUTSIDE}" cannot be evaluated, since nobody has to come: set `evaluation.env.name` to something '
            "that plays by itself, or `evaluation.every` = 0"
        )
    if not is_agent(config.env):
        return
    if config.env.name == OUTSIDE and not config.serving.enabled:
        raise ConfigError(f'`env.name` = "{OUTSIDE}" needs `serving.enabled = true`: nobody could take an episode')
    if not config.model.path:
        raise ConfigError(
            f"`env.name` = {config.env.name!r} has no oracle to warm a new model up with: give a trained one with `model.path`"
        )


class Outcome(msgspec.Struct, frozen=True):
    """What came of one episode. `tokens` were sampled; versions are those that sampled them, -1 if nobody knows; `metrics`: what
    the environment told."""

    reward: float
    turns: int
    stop_reason: str
    tokens: int = 0
    version_min: int = -1
    version_max: int = -1
    metrics: dict[str, float] = {}


class Evaluation(msgspec.Struct, frozen=True):
    """What came of all. `reward_error` is the standard error of the mean, None of a single episode; `stop_reasons` has
    `[episodes, mean reward]` of each; tokens and turns are means of an episode."""

    episodes: int
    reward_mean: float
    reward_error: float | None
    reward_min: float
    reward_max: float
    turns_mean: float
    tokens_mean: float
    version_min: int
    version_max: int
    stop_reasons: dict[str, tuple[int, float]]
    seconds: float
    metrics: dict[str, float] = {}
    """Means of what the environment told, over the episodes that told it: rewards by name are among them."""


def summarize_outcomes(outcomes: Sequence[Outcome], seconds: float) -> Evaluation:
    rewards = np.array([o.reward for o in outcomes], np.float64)
    n = len(rewards)
    told = sorted({name for o in outcomes for name in o.metrics})
    by_reason = {
        reason: [o.reward for o in outcomes if o.stop_reason == reason]
        for reason in sorted({o.stop_reason for o in outcomes})
    }
    return Evaluation(
        episodes=n,
        reward_mean=float(rewards.mean()),
        reward_error=float(rewards.std(ddof=1) / math.sqrt(n)) if n > 1 else None,
        reward_min=float(rewards.min()),
        reward_max=float(rewards.max()),
        turns_mean=float(np.mean([o.turns for o in outcomes])),
        tokens_mean=float(np.mean([o.tokens for o in outcomes])),
        version_min=min(o.version_min for o in outcomes),
        version_max=max(o.version_max for o in outcomes),
        stop_reasons={reason: (len(r), float(np.mean(r))) for reason, r in by_reason.items()},
        seconds=seconds,
        metrics={name: float(np.mean([o.metrics[name] for o in outcomes if name in o.metrics])) for name in told},
    )


def outcome_of(trajectory: Trajectory) -> Outcome:
    versions = [s.table["policy_version"][s.table["loss_mask"]] for s in trajectory.samples]
    return Outcome(
        reward=trajectory.reward,
        turns=len(trajectory.turns),
        stop_reason=trajectory.stop_reason,
        tokens=sum(turn.stop - turn.start for turn in trajectory.turns),
        version_min=int(min(v.min() for v in versions)),
        version_max=int(max(v.max() for v in versions)),
        metrics=trajectory.metrics,
    )


async def evaluate(
    env: EnvConfig,
    factory: EnvironmentFactory | None,
    engine: Engine,
    renderer: ChatRenderer,
    episode: EpisodeConfig,
    serving: ServingConfig,
    *,
    episodes: int,
    seed: int,
    trained: EnvConfig | None,
    concurrency: int,
    generator_id: str = "",
    report: Callable[..., object] = lambda event, **fields: None,
    progress: Callable[[Outcome], object] = lambda outcome: None,
    world: World = REAL,
) -> Evaluation:
    """Play the tasks of `seed`, at most `concurrency` at once. `factory`: of `env`; None for an agent. `trained`: see
    `evaluation_tasks`, which may raise `ConfigError`.

    An episode that fails is tried again `episode.retries` times; then what it failed with is raised and the others are cancelled.
    `report(event, **fields)` gets failed attempts, `progress` each outcome.
    """
    tasks = evaluation_tasks(env, await count_tasks(factory), seed, episodes, trained)
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
    return summarize_outcomes(outcomes, clock.monotonic() - began)


async def evaluate_without_model(
    env: EnvConfig,
    factory: EnvironmentFactory,
    policy: Policy,
    *,
    episodes: int,
    seed: int,
    trained: EnvConfig | None = None,
    max_turns: int,
    progress: Callable[[Outcome], object] = lambda outcome: None,
) -> Evaluation:
    """The same tasks under the environment's oracle, or under its random answers: what its rewards mean.

    Raises `ConfigError` if the environment has no such policy, and see `evaluation_tasks`.
    """
    began = time.monotonic()
    outcomes = []
    for task in evaluation_tasks(env, await count_tasks(factory), seed, episodes, trained):
        environment = factory()
        try:
            results, reason = await _play_policy(environment, env.name, policy, task.task_seed, max_turns)
        finally:
            await close_environment(environment)
        metrics = sum_by_name([result.metrics for result in results])
        outcomes.append(Outcome(sum(result.reward for result in results), len(results), reason, metrics=metrics))
        progress(outcomes[-1])
    return summarize_outcomes(outcomes, time.monotonic() - began)


async def _play_policy(
    env: Environment, name: str, policy: Policy, task_seed: int, max_turns: int
) -> tuple[list[StepResult], str]:
    """What came of the turns, and why it ended."""
    await env.reset(task_seed)
    rng = random.Random(f"random/{task_seed}")
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
