"""Versions of the weights at the learner: copied between two steps, written beside those that follow."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from r3async.actors.delivery import Published
from r3async.actors.ranks import LocalLearner, RankedLearner
from r3async.config import Config
from r3async.data.versions import Lineage
from r3async.record.timeline import Timeline
from r3async.world import Lane, World


@dataclass
class Publishing:
    """One copy waits at most. `torch` makes the calls of `backend`, and `writer` writes. `watched` int32 `[T]`: a text that each
    version scores (`r3async.actors.installer.probe`); None: none does."""

    world: World
    config: Config
    lineage: Lineage
    timeline: Timeline
    backend: LocalLearner | RankedLearner
    torch: Lane
    writer: Lane
    watched: np.ndarray | None

    def __post_init__(self) -> None:
        self._clock = self.world.clock.monotonic
        self._copied = -1
        """Version of the copy."""
        self._scores: np.ndarray | None = None
        """Its, if a text is watched."""
        self._nothing_to_write = asyncio.Event()
        self._nothing_to_write.set()

    @property
    def writing(self) -> bool:
        """A version that engines are to have is not written yet."""
        return not self._nothing_to_write.is_set()

    async def copy(self, version: int) -> None:
        """Copy the current weights as `version`, for `write`, as soon as the version before them is written."""
        limit = self.config.weights.write_timeout
        try:
            await asyncio.wait_for(self._nothing_to_write.wait(), limit)
        except TimeoutError as error:
            raise TimeoutError(
                f"version {version} has to wait for version {version - 1}, which was not written within "
                f"{limit:g} s (weights.write_timeout)"
            ) from error
        await self.torch.run(self.backend.snapshot, version)
        self._copied = version
        self._nothing_to_write.clear()
        if self.watched is not None:
            plain = await self.torch.run(self.backend.score, self.watched)
            temperature = self.config.episode.temperature
            same = temperature == 1.0
            tempered = plain if same else await self.torch.run(self.backend.score, self.watched, temperature)
            self._scores = np.stack([plain, tempered])

    async def write(self, reading: Sequence[int] = ()) -> Published:
        """Write the copy where engines find it. Versions that engines are `reading` stay."""
        began, scores = self._clock(), self._scores
        try:
            with self.timeline.span("write", version=self._copied):
                writing = self.writer.run(self.backend.write, reading)
                publication = await asyncio.wait_for(writing, self.config.weights.write_timeout)
        finally:
            self._nothing_to_write.set()  # whatever became of it, no step waits for it any more
        named = msgspec.structs.replace(publication.manifest, lineage=self.lineage.number)
        return Published(msgspec.structs.replace(publication, manifest=named), scores, self._clock() - began)
