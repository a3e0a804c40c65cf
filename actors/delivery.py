"""Weights in transfer: copied and written by the learner, handed to the conductor, and a transport that crosses hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from r3async.actors.process import ProcessLost
from r3async.config import Config, is_loopback
from r3async.data.versions import Lineage
from r3async.record.timeline import Timeline
from r3async.weights.nccl import NcclReceiver, NcclSender
from r3async.weights.publish import (
    EncodedWeights,
    Publication,
    Publisher,
    SharedMemoryReceiver,
    VersionFolder,
    WeightManifest,
    WeightReceiver,
    WeightSender,
    default_directory,
)
from r3async.world import ActorLost, Actors, Lane, World
from r3async.world.real import REAL

if TYPE_CHECKING:
    import torch

    from r3async.actors.ranks import LocalLearner, RankedLearner

_WILDCARDS = ("*", "0.0.0.0", "::")


class Published(msgspec.Struct, frozen=True):
    """A version that engines may install. `scores` float32 `[2, T - 1]`: the learner's of the probe's text, with these very
    weights, at temperature 1 and at the run's (None if nobody asked for them). `seconds`: how long it took to write."""

    publication: Publication
    scores: np.ndarray | None = None
    seconds: float = 0.0

    @property
    def version(self) -> int:
        return self.publication.manifest.version


@dataclass
class Publishing:
    """Versions at the learner: copied between two steps, written beside those that follow. One copy waits at most.

    `torch` makes the calls of `backend`, and `writer` writes. `watched` int32 `[T]`: the probe's text
    (`r3async.actors.installer.probe`); None: there is no probe."""

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
        """Its, if it has any."""
        self._nothing_to_write = asyncio.Event()
        self._nothing_to_write.set()

    @property
    def writing(self) -> bool:
        """A version that engines are to have is not written yet."""
        return not self._nothing_to_write.is_set()

    async def copy(self, version: int, *, scored: bool) -> None:
        """Copy the current weights as `version`, for `write`, as soon as the version before them is written. With `scored`, they
        score the probe's text."""
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
        self._scores = await self.score() if scored else None

    async def score(self) -> np.ndarray | None:
        """See `Published.scores`, of the weights as they are now."""
        if self.watched is None:
            return None
        plain = await self.torch.run(self.backend.score, self.watched)
        temperature = self.config.episode.temperature
        same = temperature == 1.0
        tempered = plain if same else await self.torch.run(self.backend.score, self.watched, temperature)
        return np.stack([plain, tempered])

    async def write(self, reading: Sequence[int] = ()) -> Published:
        """Write the copy where engines find it. Versions that engines are `reading` stay."""
        began, scores = self._clock(), self._scores
        try:
            with self.timeline.span("write", version=self._copied):
                writing = self.writer.run(self.backend.write, reading)
                publication = await asyncio.wait_for(writing, self.config.weights.write_timeout)
        finally:
            self._nothing_to_write.set()  # whether or not it succeeded, no step waits for it any more
        named = msgspec.structs.replace(publication.manifest, lineage=self.lineage.number)
        return Published(msgspec.structs.replace(publication, manifest=named), scores, self._clock() - began)


def sender(config: Config, backend: str, world: World = REAL) -> WeightSender:
    """The learner's end of `backend`."""
    if backend == "nccl":
        weights = config.weights
        return NcclSender(directory(config), config.transport.host, weights.bucket_bytes, weights.install_timeout)
    if backend == "object_store":
        return ObjectStoreSender(config.weights.bucket_bytes, world.actors)
    return Publisher(directory(config), bucket_bytes=config.weights.bucket_bytes, world=world)


def receiver(config: Config, backend: str, generator_id: str, world: World = REAL) -> WeightReceiver:
    """A generator's end of `backend`."""
    if backend == "nccl":
        return NcclReceiver(generator_id)
    if backend == "object_store":
        return ObjectStoreReceiver(directory(config), world)
    return SharedMemoryReceiver()


def directory(config: Config) -> Path:
    """Where files of weights live on this host."""
    return Path(config.weights.directory or default_directory())


def choose_backend(
    config: Config, hosts: Collection[str], learner_gpus: Sequence[str] = (), engine_gpus: Sequence[Sequence[str]] = ()
) -> str:
    """`weights.backend` for a learner and generators on these `hosts`, with these GPUs: that of the rank that sends, and those
    of each engine, none on CPU. Raises `ValueError` if it cannot reach them all."""
    backend = config.weights.backend
    if backend == "nccl":
        _check_nccl(config, hosts, learner_gpus, engine_gpus)
    if backend == "shared_memory" and len(hosts) > 1:
        raise ValueError(
            f"learner and generators are on different hosts ({', '.join(sorted(hosts))}), which share no memory: set "
            'weights.backend="object_store"'
        )
    if backend == "auto":
        return "object_store" if len(hosts) > 1 else "shared_memory"
    return backend


def _check_nccl(
    config: Config, hosts: Collection[str], learner_gpus: Sequence[str], engine_gpus: Sequence[Sequence[str]]
) -> None:
    without = [] if learner_gpus else ["the learner"]
    if not engine_gpus or not all(engine_gpus):
        without.append("an engine")
    if without:
        raise ValueError(
            f'weights.backend="nccl" sends from GPU to GPU, but there is no CUDA for {" and ".join(without)}: set '
            'weights.backend="auto"'
        )
    if shared := set(learner_gpus) & {gpu for gpus in engine_gpus for gpu in gpus}:
        raise ValueError(
            f"learner and an engine share GPU {min(shared)}, on which NCCL cannot be both ends (weights.backend): set "
            'weights.backend="shared_memory", or give them GPUs of their own'
        )
    if len(hosts) > 1 and (is_loopback(config.transport.host) or config.transport.host in _WILDCARDS):
        raise ValueError(
            f'weights.backend="nccl" meets engines of other hosts at transport.host = "{config.transport.host}", where '
            "they cannot find it: name an interface of the learner's host"
        )
    if not (is_loopback(config.transport.host) or config.transport.trusted_network):
        raise ValueError(
            'weights.backend="nccl" knows no keys: at a transport.host that others reach it needs '
            'transport.trusted_network=true; or set weights.backend="object_store"'
        )


class ObjectStoreSender:
    """Shares a version with the cluster's processes, a bucket at a time.

    Who holds a bucket is counted: a version lives as long as the conductor has it, or an engine reads it.
    """

    def __init__(self, bucket_bytes: int, actors: Actors = REAL.actors):
        self._bucket_bytes, self._actors = bucket_bytes, actors

    def send(
        self, version: int, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, reading: Collection[int] = ()
    ) -> Publication:
        encoded = EncodedWeights(version, tensors, dtype, self._bucket_bytes)
        parts = [self._actors.put(bucket) for bucket in _buckets(encoded, self._bucket_bytes)]
        return Publication(encoded.manifest(""), parts)

    def close(self) -> None:
        """The buckets go with this process, which owns them."""


class ObjectStoreReceiver:
    """Writes the buckets of a version into a file of this host as they come: one bucket is held at a time.

    Each generator has a file of its own, that of the version which it fetched last.
    """

    def __init__(self, directory: Path, world: World = REAL):
        self._actors, self._clock = world.actors, world.clock.monotonic
        self._folder = VersionFolder(directory, keep=1, world=world)

    def fetch(self, manifest: WeightManifest, parts: Sequence[Any], timeout: float) -> WeightManifest:
        deadline = self._clock() + timeout

        def arriving() -> Iterator[memoryview]:
            for part in parts:
                try:
                    yield memoryview(self._actors.get(part, timeout=max(0.0, deadline - self._clock())))
                except TimeoutError as error:
                    raise TimeoutError(
                        f"version {manifest.version} did not arrive within {timeout:g} s (weights.install_timeout)"
                    ) from error
                except ActorLost as error:  # its owner: this is not the generator's loss, nor its fault
                    raise ProcessLost(f"version {manifest.version} could not be fetched: {error}") from error

        path = self._folder.write(manifest.version, manifest.nbytes, arriving())
        return msgspec.structs.replace(manifest, path=str(path))

    def close(self) -> None:
        self._folder.close()


def _buckets(parts: Iterator[Any] | EncodedWeights, size: int) -> Iterator[np.ndarray]:
    """The parts laid end to end, uint8, in buckets of about `size` bytes: at most two parts' worth."""
    held: list[np.ndarray] = []
    count = 0
    for part in parts:
        data = np.frombuffer(part, np.uint8)
        if held and count + len(data) > size:
            yield np.concatenate(held)
            held, count = [], 0
        held.append(data)
        count += len(data)
    if held:
        yield np.concatenate(held)


def no_delivery() -> dict[str, float]:
    """The figures of a step whose weights were never delivered."""
    names = ("update_seconds", "transfer_seconds", "load_seconds", "pause_seconds", "paused_share", "bytes")
    return {f"weights/{name}": 0.0 for name in names}
