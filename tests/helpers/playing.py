"""Episodes of a lease, played as a generator plays them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from r3async.rollout.episode import EpisodeTask, PlayedEpisode, RetryingPlayer


async def play_lease(
    player: RetryingPlayer, group: int, task_seed: int, episodes: Sequence[int]
) -> list[PlayedEpisode]:
    """Return the episodes in the order in which they ended."""
    played = []

    async def play(task: EpisodeTask) -> None:
        played.append(await player.play(task))

    async with asyncio.TaskGroup() as tasks:
        for index in episodes:
            tasks.create_task(play(EpisodeTask(group, index, task_seed)))
    return played
