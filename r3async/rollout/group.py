"""All episodes of one lease at once, with retry budgets; finished ones leave as they finish."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from r3async.config import EpisodeConfig
from r3async.data.records import Trajectory
from r3async.envs import EnvironmentFactory
from r3async.envs.raised import ErrorSummary, is_repeated_error, summarize_error
from r3async.rollout.chat import ChatRenderer
from r3async.rollout.engines import Engine, EngineError
from r3async.rollout.episode import (
    EngineAbortError,
    EpisodeError,
    EpisodePlayer,
    EpisodeTask,
    PromptTooLongError,
    build_failed_trajectory,
)
from r3async.rollout.held_up import BlockingDetector
from r3async.schedule.admission import GroupLease
from r3async.schedule.tasks import EpisodeEnd, FailureSource
from r3async.world.real import REAL_WORLD

MAX_REPORTED_TRACEBACKS = 1000
"""Different errors of one player whose tracebacks are told."""


class GroupPlayer:
    """Plays leases. `deliver_trajectory` takes each finished trajectory; `report(event, **fields)` gets failed attempts.

    `play_episode` plays one episode in place of an environment that `factory` makes. `on_episode_end(end)` gets each episode
    that is over, and decides how many may fail for good; without it, the first one that does is raised. `clock`: unix seconds.
    `settings_of_task`: of a task, by its seed; the `settings` unless named.
    """

    def __init__(
        self,
        *,
        factory: EnvironmentFactory | None,
        engine: Engine,
        renderer: ChatRenderer,
        settings: EpisodeConfig,
        generator_id: str,
        deliver_trajectory: Callable[[Trajectory], Awaitable[None]],
        report: Callable[..., object],
        play_episode: Callable[[EpisodeTask], Awaitable[Trajectory]] | None = None,
        on_episode_end: Callable[[EpisodeEnd], None] | None = None,
        clock: Callable[[], float] = REAL_WORLD.clock.time,
        settings_of_task: Callable[[int], EpisodeConfig] | None = None,
    ):
        self._retry_budgets: dict[FailureSource, int] = {
            "environment": settings.retries,
            "engine": settings.engine_retries,
        }
        self._on_episode_end, self._clock, self._blocking_detector = (
            on_episode_end,
            clock,
            BlockingDetector(report, clock),
        )
        self._factory, self._engine, self._renderer, self._settings = factory, engine, renderer, settings
        self._settings_of_task = settings_of_task or (lambda task_seed: settings)
        self._generator_id, self._deliver_trajectory, self._report = generator_id, deliver_trajectory, report
        self.playing_count = 0
        """Episodes that have begun and not ended. One that waits to be sent has ended."""
        self.attempt_count = 0
        """Tries at an episode that are over, whether or not they failed."""
        self.active_episodes: set[tuple[int, int]] = set()
        """Group and index of each episode that has begun and was not handed over."""
        self._reported_errors: set[tuple[str, str]] = set()
        """Errors whose tracebacks were reported."""
        self._play_episode = play_episode or self._play_environment

    def play_lease(self, lease: GroupLease) -> Coroutine[Any, Any, None]:
        """Returns when every episode of the lease was delivered. All of its turns go to this player's engine. They count as
        `playing_count` from the call on, also before it is awaited.

        An episode in which the environment fails is played again from its beginning, `episode.retries` times, but not once more
        where the user's code raised twice at one place. What the engine fails at is asked again within the episode
        (`RetryingEngine`), `episode.engine_retries` times. A first prompt that is too long fails at once. Then a trajectory
        without turns stands for it (`build_failed_trajectory`); or, without `on_episode_end`, `EpisodeError` is raised with
        the last error's traceback, and the other episodes of the lease are cancelled.
        """
        tasks = [EpisodeTask(lease.group_index, index, lease.task_seed) for index in lease.episode_indices]
        for task in tasks:
            self._count_begun(task)
        return self._play_tasks(tasks)

    async def _play_tasks(self, tasks: Sequence[EpisodeTask]) -> None:
        async with asyncio.TaskGroup() as group:
            for task in tasks:
                group.create_task(self._play_and_deliver(task))

    async def play_task(self, task: EpisodeTask) -> None:
        """One episode of a lease, tried again if it fails; see `play_episode`."""
        self._count_begun(task)
        await self._play_and_deliver(task)

    def _count_begun(self, task: EpisodeTask) -> None:
        self.playing_count += 1
        self.active_episodes.add((task.group_index, task.episode_index))

    async def _play_and_deliver(self, task: EpisodeTask) -> None:
        try:
            try:
                trajectory = await self._play_with_retries(task)
            finally:
                self.playing_count -= 1
            await self._deliver_trajectory(trajectory)
        finally:
            self.active_episodes.discard((task.group_index, task.episode_index))

    async def _play_with_retries(self, task: EpisodeTask) -> Trajectory:
        tries, before = dict.fromkeys(self._retry_budgets, 0), None
        while True:
            try:
                trajectory = await self._play_episode(task)
                self._report_end(task)
                return trajectory
            except Exception as error:
                who: FailureSource = "engine" if is_engine_failure(error) else "environment"
                raised, allowed = summarize_error(error), self._retry_budgets[who]
                # The engine was asked again already: what it cannot answer now, it cannot from the beginning.
                tries[who] += allowed + 1 if who == "engine" else 1
                again = tries[who] <= allowed and not isinstance(error, PromptTooLongError)
                if again and not is_repeated_error(error, raised, before):
                    self._report_failure("episode_failed", task, who, tries[who], raised)
                    before = raised
                    continue
                failure = f"{raised.line}; {_describe_budget(who, tries[who], allowed)}\n{raised.trace}"
                if self._on_episode_end is None:
                    self._report_failure("episode_failed", task, who, tries[who], raised)
                    if isinstance(error, PromptTooLongError):
                        raise
                    told = f"task seed {task.task_seed}, {task.trajectory_id}, {who}: {failure}"
                    raise EpisodeError(told) from error
                self._report_failure("episode_abandoned", task, who, tries[who], raised)
                self._report_end(task, who, failure)
                return build_failed_trajectory(
                    task,
                    self._engine.routing,
                    self._renderer.eos_token_id,
                    generator_id=self._generator_id,
                    at=self._clock(),
                )
            finally:
                self.attempt_count += 1

    def _report_failure(
        self, event: str, task: EpisodeTask, failed_by: FailureSource, attempts: int, raised: ErrorSummary
    ) -> None:
        """A try at an episode failed. The traceback of each error is told once."""
        known = (raised.error, raised.place) in self._reported_errors
        if not known and len(self._reported_errors) < MAX_REPORTED_TRACEBACKS:
            self._reported_errors.add((raised.error, raised.place))
        self._report(
            event,
            task_seed=task.task_seed,
            group=task.group_index,
            by=failed_by,
            error=raised.error,
            **({"place": raised.place} if raised.place else {}),
            episode=task.trajectory_id,
            attempt=attempts,
            **({} if known else {"exception": raised.trace}),
        )

    def _report_end(self, task: EpisodeTask, failed_by: FailureSource | None = None, error: str = "") -> None:
        if self._on_episode_end is not None:
            self._on_episode_end(EpisodeEnd(task.group_index, task.episode_index, task.task_seed, failed_by, error))

    async def _play_environment(self, task: EpisodeTask) -> Trajectory:
        assert self._factory is not None
        return await EpisodePlayer(
            task,
            self._factory(),
            self._engine,
            self._renderer,
            self._settings_of_task(task.task_seed),
            generator_id=self._generator_id,
            clock=self._clock,
            report=self._report,
            blocking_detector=self._blocking_detector,
        ).play_episode()


def is_engine_failure(error: BaseException | None) -> bool:
    """Whether the engine is what failed, and not the environment."""
    while error is not None:
        if isinstance(error, (EngineError, EngineAbortError)):
            return True
        error = error.__cause__
    return False


def _describe_budget(failed_by: FailureSource, tries: int, retries: int) -> str:
    setting = "episode.engine_retries" if failed_by == "engine" else "episode.retries"
    return f"{tries} {'try' if tries == 1 else 'tries'} ({setting} = {retries})"
