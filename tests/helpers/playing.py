"""Episodes of a lease, played as a generator plays them, and a generator of which a test makes the parts."""

import asyncio
from collections.abc import Sequence
from typing import Any

from r3async.actors.generator import GeneratorActor
from r3async.config import EpisodeConfig
from r3async.rollout.episode import EpisodeTask
from r3async.rollout.lease_player import PlayedEpisode, RetryingPlayer
from r3async.rollout.play_context import PlayContext
from r3async.rollout.renderer import ChatRenderer


def make_player(
    factory: Any,
    engine: Any,
    chat: ChatRenderer,
    settings: EpisodeConfig,
    reports: list[tuple[str, dict[str, Any]]],
    **options: Any,
) -> RetryingPlayer:
    """Return the player of generator "g", which appends each event and its facts to `reports`."""
    return RetryingPlayer(
        PlayContext(engine, chat, "g", lambda event, **facts: reports.append((event, facts))),
        settings,
        factory,
        **options,
    )


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


class GeneratorOnEngine(GeneratorActor):
    """A generator that plays on this engine with this chat renderer, and loads none."""

    def __init__(self, engine: Any, chat: ChatRenderer, *args: Any):
        super().__init__(*args)
        self.engine, self.chat = engine, chat

    def make_engine(self, model_path: str, seed: int) -> Any:
        return self.engine

    def make_renderer(self, model_path: str) -> ChatRenderer:
        return self.chat
