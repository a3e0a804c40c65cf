"""All episodes of one lease at once, with a retry budget; finished ones leave as they finish."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from r3async.config import EpisodeConfig
from r3async.engines.base import Engine
from r3async.envs.base import EnvironmentFactory
from r3async.episodes.chat import ChatRenderer
from r3async.episodes.loop import EpisodeError, EpisodeTask, PromptTooLong, failed_trajectory, play_episode
from r3async.records import Trajectory
from r3async.scheduling.admission import GroupLease
from r3async.scheduling.failures import FailureBudget


class GroupPlayer:
    """Plays leases. `deliver` takes each finished trajectory; `report(event, **fields)` hears of failed tries.

    `play` plays one episode in place of an environment that `factory` makes.
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
        failures: FailureBudget | None = None,
    ):
        self._failures = failures or FailureBudget(0.0)
        self._factory, self._engine, self._renderer, self._settings = factory, engine, renderer, settings
        self._generator_id, self._deliver, self._report = generator_id, deliver, report
        self.playing = 0
        """Episodes that have begun and not ended. One that waits to be sent has ended."""
        self._play_episode = play or self._play_environment

    async def play(self, lease: GroupLease) -> None:
        """Returns when every episode of the lease was delivered. All of its turns go to this player's engine.

        An episode that fails is tried again `episode.retries` times. Then a trajectory without turns stands for it
        (`failed_trajectory`), or, where `failures` allows no more, the last error is raised and the other episodes of the
        lease are cancelled. A first prompt that is too long is an error at once.
        """
        async with asyncio.TaskGroup() as tasks:
            for index in lease.episode_indices:
                tasks.create_task(self.play_one(EpisodeTask(lease.group_index, index, lease.task_seed)))

    async def play_one(self, task: EpisodeTask) -> None:
        """One episode of a lease, tried again if it fails; see `play`."""
        self.playing += 1
        try:
            trajectory = await self._tried(task)
        finally:
            self.playing -= 1
        await self._deliver(trajectory)

    async def _tried(self, task: EpisodeTask) -> Trajectory:
        for attempt in range(self._settings.retries + 1):
            try:
                trajectory = await self._play_episode(task)
                self._failures.ended(failed=False)
                return trajectory
            except PromptTooLong:
                raise
            except Exception as error:
                self._report("episode_failed", episode=task.trajectory_id, attempt=attempt + 1, error=repr(error))
                if attempt < self._settings.retries:
                    continue
                if self._failures.ended(failed=True):
                    raise EpisodeError(
                        f"episode {task.trajectory_id} failed {attempt + 1} times (episode.retries = {self._settings.retries}), "
                        f"and {self._failures.describe()} (supervise.max_failed_fraction = {self._failures.limit:g}); the last "
                        f"time: {error!r}"
                    ) from error
                self._report("episode_given_up", episode=task.trajectory_id, error=repr(error))
                return failed_trajectory(
                    task,
                    self._engine.routing,
                    self._renderer.end_id,
                    generator_id=self._generator_id,
                    at=time.time(),
                )
        raise AssertionError("every try returns or raises")

    async def _play_environment(self, task: EpisodeTask) -> Trajectory:
        assert self._factory is not None
        return await play_episode(
            task, self._factory(), self._engine, self._renderer, self._settings, generator_id=self._generator_id
        )
