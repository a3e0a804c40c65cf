"""All episodes of one lease at once, with retry budgets; finished ones leave as they finish."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from r3async.config import EpisodeConfig
from r3async.data.records import Trajectory
from r3async.envs import EnvironmentFactory
from r3async.envs.raised import Raised, describe_raised, repeats
from r3async.rollout.chat import ChatRenderer
from r3async.rollout.engines import Engine, EngineError
from r3async.rollout.episode import (
    EngineAborted,
    EpisodeError,
    EpisodePlayer,
    EpisodeTask,
    PromptTooLong,
    failed_trajectory,
)
from r3async.rollout.held_up import HeldUp
from r3async.schedule.admission import GroupLease
from r3async.schedule.tasks import By, EpisodeEnd
from r3async.world.real import REAL

MOST_TRACED = 1000
"""Different errors of one player whose tracebacks are told."""


class GroupPlayer:
    """Plays leases. `deliver` takes each finished trajectory; `report(event, **fields)` gets failed attempts.

    `play` plays one episode in place of an environment that `factory` makes. `over(end)` gets each episode that is over,
    and decides how many may fail for good; without it, the first one that does is raised. `clock`: unix seconds. `limits`: of a
    task, by its seed; the `settings` unless named.
    """

    def __init__(
        self,
        *,
        factory: EnvironmentFactory | None,
        engine: Engine,
        renderer: ChatRenderer,
        settings: EpisodeConfig,
        generator_id: str,
        deliver: Callable[[Trajectory], Awaitable[None]],
        report: Callable[..., object],
        play: Callable[[EpisodeTask], Awaitable[Trajectory]] | None = None,
        over: Callable[[EpisodeEnd], None] | None = None,
        clock: Callable[[], float] = REAL.clock.time,
        limits: Callable[[int], EpisodeConfig] | None = None,
    ):
        self._retries: dict[By, int] = {"environment": settings.retries, "engine": settings.engine_retries}
        self._over, self._clock, self._held_up = over, clock, HeldUp(report, clock)
        self._factory, self._engine, self._renderer, self._settings = factory, engine, renderer, settings
        self._limits = limits or (lambda task_seed: settings)
        self._generator_id, self._deliver, self._report = generator_id, deliver, report
        self.playing = 0
        """Episodes that have begun and not ended. One that waits to be sent has ended."""
        self.ended = 0
        """Tries at an episode that are over, whether or not they failed."""
        self.active: set[tuple[int, int]] = set()
        """Group and index of each episode that has begun and was not handed over."""
        self._traced: set[tuple[str, str]] = set()
        """Errors whose tracebacks were reported."""
        self._play_episode = play or self._play_environment

    def play(self, lease: GroupLease) -> Coroutine[Any, Any, None]:
        """Returns when every episode of the lease was delivered. All of its turns go to this player's engine. They count as
        `playing` from the call on, also before it is awaited.

        An episode in which the environment fails is played again from its beginning, `episode.retries` times, but not once more
        where the user's code raised twice at one place. What the engine fails at is asked again within the episode
        (`EngineCalls`), `episode.engine_retries` times. A first prompt that is too long fails at once. Then a trajectory without
        turns stands for it (`failed_trajectory`); or, without `over`, `EpisodeError` is raised with the last error's traceback,
        and the other episodes of the lease are cancelled.
        """
        tasks = [EpisodeTask(lease.group_index, index, lease.task_seed) for index in lease.episode_indices]
        for task in tasks:
            self._begin(task)
        return self._play_all(tasks)

    async def _play_all(self, tasks: Sequence[EpisodeTask]) -> None:
        async with asyncio.TaskGroup() as group:
            for task in tasks:
                group.create_task(self._play_begun(task))

    async def play_one(self, task: EpisodeTask) -> None:
        """One episode of a lease, tried again if it fails; see `play`."""
        self._begin(task)
        await self._play_begun(task)

    def _begin(self, task: EpisodeTask) -> None:
        self.playing += 1
        self.active.add((task.group_index, task.episode_index))

    async def _play_begun(self, task: EpisodeTask) -> None:
        try:
            try:
                trajectory = await self._tried(task)
            finally:
                self.playing -= 1
            await self._deliver(trajectory)
        finally:
            self.active.discard((task.group_index, task.episode_index))

    async def _tried(self, task: EpisodeTask) -> Trajectory:
        tries, before = dict.fromkeys(self._retries, 0), None
        while True:
            try:
                trajectory = await self._play_episode(task)
                self._ended(task)
                return trajectory
            except Exception as error:
                who: By = "engine" if engine_failed(error) else "environment"
                raised, allowed = describe_raised(error), self._retries[who]
                # The engine was asked again already: what it cannot answer now, it cannot from the beginning.
                tries[who] += allowed + 1 if who == "engine" else 1
                again = tries[who] <= allowed and not isinstance(error, PromptTooLong)
                if again and not repeats(error, raised, before):
                    self._failed("episode_failed", task, who, tries[who], raised)
                    before = raised
                    continue
                failure = f"{raised.line}; {_budget(who, tries[who], allowed)}\n{raised.trace}"
                if self._over is None:
                    self._failed("episode_failed", task, who, tries[who], raised)
                    if isinstance(error, PromptTooLong):
                        raise
                    told = f"task seed {task.task_seed}, {task.trajectory_id}, {who}: {failure}"
                    raise EpisodeError(told) from error
                self._failed("episode_abandoned", task, who, tries[who], raised)
                self._ended(task, who, failure)
                return failed_trajectory(
                    task,
                    self._engine.routing,
                    self._renderer.end_id,
                    generator_id=self._generator_id,
                    at=self._clock(),
                )
            finally:
                self.ended += 1

    def _failed(self, event: str, task: EpisodeTask, who: By, tries: int, raised: Raised) -> None:
        """A try at an episode failed. The traceback of each error is told once."""
        known = (raised.error, raised.place) in self._traced
        if not known and len(self._traced) < MOST_TRACED:
            self._traced.add((raised.error, raised.place))
        self._report(
            event,
            task_seed=task.task_seed,
            group=task.group_index,
            by=who,
            error=raised.error,
            **({"place": raised.place} if raised.place else {}),
            episode=task.trajectory_id,
            attempt=tries,
            **({} if known else {"exception": raised.trace}),
        )

    def _ended(self, task: EpisodeTask, failed_by: By | None = None, error: str = "") -> None:
        if self._over is not None:
            self._over(EpisodeEnd(task.group_index, task.episode_index, task.task_seed, failed_by, error))

    async def _play_environment(self, task: EpisodeTask) -> Trajectory:
        assert self._factory is not None
        return await EpisodePlayer(
            task,
            self._factory(),
            self._engine,
            self._renderer,
            self._limits(task.task_seed),
            generator_id=self._generator_id,
            clock=self._clock,
            report=self._report,
            held_up=self._held_up,
        ).play()


def engine_failed(error: BaseException | None) -> bool:
    """Whether the engine is what failed, and not the environment."""
    while error is not None:
        if isinstance(error, (EngineError, EngineAborted)):
            return True
        error = error.__cause__
    return False


def _budget(who: By, tries: int, retries: int) -> str:
    setting = "episode.engine_retries" if who == "engine" else "episode.retries"
    return f"{tries} {'try' if tries == 1 else 'tries'} ({setting} = {retries})"
