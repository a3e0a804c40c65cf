"""All episodes of one lease at once, with a retry budget; finished ones leave as they finish."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from r3async.config import EpisodeConfig
from r3async.engines.base import Engine
from r3async.envs.base import EnvironmentFactory
from r3async.episodes.chat import ChatRenderer
from r3async.episodes.loop import EpisodeError, EpisodeTask, PromptTooLong, play_episode
from r3async.records import Trajectory
from r3async.scheduling.admission import GroupLease


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
    ):
        self._factory, self._engine, self._renderer, self._settings = factory, engine, renderer, settings
        self._generator_id, self._deliver, self._report = generator_id, deliver, report
        self.playing = 0
        """Episodes that have begun and not ended. One that waits to be sent has ended."""
        self._play_episode = play or self._play_environment

    async def play(self, lease: GroupLease) -> None:
        """Returns when every episode of the lease was delivered. All of its turns go to this player's engine.

        An episode that fails is tried again `episode.retries` times; then the last error is raised and the other
        episodes of the lease are cancelled. A first prompt that is too long is not tried again.
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
                return await self._play_episode(task)
            except PromptTooLong:
                raise
            except Exception as error:
                self._report("episode_failed", episode=task.trajectory_id, attempt=attempt + 1, error=repr(error))
                if attempt == self._settings.retries:
                    raise EpisodeError(
                        f"episode {task.trajectory_id} failed {attempt + 1} times (episode.retries = "
                        f"{self._settings.retries}); the last time: {error!r}"
                    ) from error
        raise AssertionError("every try returns or raises")

    async def _play_environment(self, task: EpisodeTask) -> Trajectory:
        assert self._factory is not None
        return await play_episode(
            task, self._factory(), self._engine, self._renderer, self._settings, generator_id=self._generator_id
        )
