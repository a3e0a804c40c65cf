"""The writer of versions: how the learner copies and writes its weights, and offers them to the
conductor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from r3async.actors.weight_transport import SENDER_HINT, get_weights_directory
from r3async.config import Config
from r3async.data.versions import Lineage
from r3async.learner import LearnerError
from r3async.record.timeline import Timeline
from r3async.weights.interfaces import TransferOffer
from r3async.weights.manifest import BASE_VERSION, AdapterFormat, WeightManifest
from r3async.weights.probe import make_probe_pair
from r3async.weights.tcp import TcpServer
from r3async.world import EventReporter, WorkerThread, World, ignore_event
from r3async.world.disk_retries import DiskRetrier

if TYPE_CHECKING:
    from r3async.actors.rank_actor import LocalRank
    from r3async.actors.ranks import RemoteRanks


WRITE_DISK_HINT = (
    "the run waits, and nothing is lost: free bytes there, or file descriptors of this process"
)


class Published(msgspec.Struct, frozen=True):
    """A version of the weights that engines may install.

    Attributes:
        publication: The offer of the version, with which engines fetch it.
        scores: float32 `[2, 2, T - 1]`: the learner's scores of both texts of `make_probe_pair`
            with exactly these weights, at temperature 1 and at the run's temperature. None if they
            were not requested.
        seconds: Seconds that it took to write the version.
        base: With the first version of adapters, the offer of the weights that they are added to.
    """

    publication: TransferOffer
    scores: np.ndarray | None = None
    seconds: float = 0.0
    base: TransferOffer | None = None

    @property
    def version(self) -> int:
        return self.publication.manifest.version


@dataclass
class VersionPublisher:
    """The learner's writer of versions. It copies the weights between two steps and writes the copy
    beside the steps that follow. At most one copy waits.

    A disk that does not take a version is tried again until it does.

    Attributes:
        torch_lane: Thread that makes the calls of `ranks`.
        writer_lane: Thread that writes.
        probe_tokens: int32 `[T]`: tokens of the probe's text
            (`r3async.actors.generator_probe.probe_generator`). None: no probe.
        write_seconds: Seconds that writing one version may take.
        server: Serves what is written to other hosts, if there are any.
        remote_ranks: The ranks, if they are on several hosts, which serve what is written there.
        report_event: Called when the wait for a disk begins and ends.
        carried: Names of tensors of the start model that versions do not have.
    """

    world: World
    config: Config
    lineage: Lineage
    timeline: Timeline
    ranks: LocalRank | RemoteRanks
    torch_lane: WorkerThread
    writer_lane: WorkerThread
    probe_tokens: np.ndarray | None
    write_seconds: float
    server: TcpServer | None = None
    remote_ranks: RemoteRanks | None = None
    report_event: EventReporter = ignore_event
    carried: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._clock = self.world.clock.monotonic
        self.disk_wait = DiskRetrier(
            self.world,
            self.report_event,
            "weights_stalled",
            "weights_go_on",
            directory=str(get_weights_directory(self.config)),
        )
        self._copied_version = -1
        """Version of the copy; -1 before the first."""
        self._copied_scores: np.ndarray | None = None
        """Scores of the probe's text with the copy; None if they were not requested."""
        self._adapter_format: AdapterFormat | None = None
        """Form of the versions, if these have adapters alone."""
        self._watching: asyncio.Task[None] | None = None
        self._write_done = asyncio.Event()
        self._write_done.set()

    def collect_metrics(self) -> dict[str, float]:
        """Return the number of peers that the server has refused, as a metric."""
        return {
            "weights/strangers": 0 if self.server is None else self.server.refused_peers.total()
        }

    @property
    def is_writing(self) -> bool:
        """True while a version for the engines is not written yet."""
        return not self._write_done.is_set()

    async def copy_weights(self, version: int, *, with_probe_scores: bool) -> None:
        """Copy the current weights as `version`, for `write_version`, as soon as the version before
        is written. With `with_probe_scores`, they also score the probe's text. Raises
        `TimeoutError` if the version before was not written within `write_seconds`, unless a disk
        does not take it."""
        while self.is_writing:
            try:
                await asyncio.wait_for(self._write_done.wait(), self.write_seconds)
            except TimeoutError as error:
                # Otherwise wait for the disk, however long it takes.
                if self.disk_wait.current_wait is None:
                    raise TimeoutError(
                        f"version {version} has to wait for version {version - 1}, which was not "
                        f"written within {self.write_seconds:g} s (supervise.patience)"
                    ) from error
        await self.torch_lane.run(self.ranks.snapshot_weights, version)
        self._copied_version = version
        self._write_done.clear()
        self._copied_scores = await self.score_probe() if with_probe_scores else None

    async def score_probe(self) -> np.ndarray | None:
        """Score the probe's texts with the current weights, as `Published.scores` has them. Returns
        None if there is no probe."""
        if self.probe_tokens is None:
            return None
        temperature = self.config.episode.temperature
        scores = []
        for text in make_probe_pair(self.probe_tokens):
            plain = await self.torch_lane.run(self.ranks.score_tokens, text)
            same = temperature == 1.0
            tempered = (
                plain
                if same
                else await self.torch_lane.run(self.ranks.score_tokens, text, temperature)
            )
            scores.append([plain, tempered])
        return np.asarray(scores)

    async def write_version(self, versions_in_use: Sequence[int] = ()) -> Published:
        """Write the copy to where engines find it. Versions in `versions_in_use`, which engines
        are reading, stay."""
        began = self._clock()
        scores = self._copied_scores
        try:
            offer = await self._write_and_offer(versions_in_use)
        finally:
            self._write_done.set()  # no step waits for it any more, whether or not it succeeded
        return Published(offer, scores, self._clock() - began)

    async def publish_base(self) -> TransferOffer:
        """Copy and write the start model's weights, to which versions of adapters are added.
        Engines install them first."""
        await self.torch_lane.run(self.ranks.snapshot_weights, BASE_VERSION)
        offer = await self._write_and_offer(())
        self._adapter_format = AdapterFormat(self.config.learner.lora.rank, offer.manifest.digest)
        return offer

    async def _write_and_offer(self, versions_in_use: Sequence[int]) -> TransferOffer:
        written = await self.disk_wait.run_with_retries(
            WRITE_DISK_HINT, self._write_with_timeout, versions_in_use
        )
        named = msgspec.structs.replace(
            written.manifest,
            lineage=self.lineage.number,
            carried=self.carried,
            adapter=self._adapter_format,
        )
        parts = await self.disk_wait.run_with_retries(
            WRITE_DISK_HINT, self._offer_to_hosts, named, written.transport_data
        )
        return TransferOffer(named, parts)

    async def _write_with_timeout(self, versions_in_use: Sequence[int]) -> TransferOffer:
        with self.timeline.measure_span("write", version=self._copied_version):
            writing = self.writer_lane.run(self.ranks.write_version, versions_in_use)
            return await asyncio.wait_for(writing, self.write_seconds)

    async def _offer_to_hosts(self, manifest: WeightManifest, parts: list[Any]) -> list[Any]:
        return parts if self.server is None else [self.server.offer_version(manifest, *parts)]

    def begin_watching(self) -> None:
        """Begin to watch the senders on the learner's other hosts, if there are any."""
        if self.server is not None and self.remote_ranks is not None:
            self._watching = asyncio.create_task(
                self._watch_senders(self.server, self.remote_ranks)
            )

    async def _watch_senders(self, server: TcpServer, ranks: RemoteRanks) -> None:
        """Replace senders that send nothing and do not answer. Engines wait meanwhile."""
        while True:
            silent = await server.silent_parts.get()
            parts = server.list_remote_parts(silent.endpoint)
            if not parts:  # replaced, or no longer needed
                continue
            self.report_event("weights_stalled", sender=silent.endpoint, hint=SENDER_HINT)
            try:
                host, endpoint = await self.writer_lane.run(ranks.revive_sender, parts)
            except LearnerError:  # its rank was lost, which ends the step
                return
            server.move_parts(silent.endpoint, endpoint)
            self.report_event(
                "weights_go_on", host=host, sender=endpoint, replaced=endpoint != silent.endpoint
            )

    async def save_model_directory(
        self, manifest: WeightManifest, model: Path, directory: Path
    ) -> None:
        """Write a version whose file is on the learner's hosts as a model directory, with the
        configuration and tokenizer of the start `model`. Raises `OSError`, `TimeoutError`, or
        `LearnerError` for a version that has no weights."""
        if manifest.adapter is not None:
            raise LearnerError(
                'it has adapters alone (`learner.lora.deliver` = "adapter"); `r3async export` '
                "merges those of a checkpoint"
            )
        # Loads torch, which this process has by now.
        from r3async.learner.model_directory import copy_version_file, save_version_as_model

        copy_version: Callable[[Path], None]
        if self.remote_ranks is None:
            copy_version = partial(copy_version_file, Path(manifest.path))
        else:
            parts = [] if self.server is None else self.server.list_parts(manifest)
            copy_version = partial(self.remote_ranks.join_parts, parts)
        writing = self.writer_lane.run(
            save_version_as_model,
            directory,
            model,
            copy_version,
            self.config.generator.dtype,
            manifest.carried,
        )
        await asyncio.wait_for(writing, self.write_seconds)

    async def close(self) -> None:
        """Stop serving versions. Idempotent."""
        if self._watching is not None:
            self._watching.cancel()
        if self.server is not None:
            await self.server.close()
