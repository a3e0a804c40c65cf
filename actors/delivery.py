"""Weights in transfer: copied and written by the learner, handed to the conductor, and how they travel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from r3async.config import Config, ConfigError, is_loopback
from r3async.config.generation import in_url
from r3async.data.versions import Lineage
from r3async.learner import LearnerError
from r3async.record.timeline import Timeline
from r3async.weights.manifest import WeightManifest
from r3async.weights.nccl import NcclReceiver, NcclSender
from r3async.weights.probe import probe_texts
from r3async.weights.publish import (
    Publication,
    Publisher,
    SharedMemoryReceiver,
    WeightReceiver,
    WeightSender,
    default_directory,
)
from r3async.weights.sending import DeltaPublisher
from r3async.weights.tcp import TcpReceiver, TcpServer
from r3async.world import Lane, World
from r3async.world.disk_waits import DiskWait
from r3async.world.keys import ClientKeys, ServerKeys
from r3async.world.real import REAL

if TYPE_CHECKING:
    from r3async.actors.ranked import RankedLearner
    from r3async.actors.ranks import LocalLearner

_WILDCARDS = ("*", "0.0.0.0", "::")
DISK_HINT = "the run waits, and nothing is lost: free bytes there, or file descriptors of this process"


class Published(msgspec.Struct, frozen=True):
    """A version that engines may install. `scores` float32 `[2, 2, T - 1]`: the learner's of each of `probe_texts`, with these
    very weights, at temperature 1 and at the run's (None if nobody asked for them). `seconds`: how long it took to write."""

    publication: Publication
    scores: np.ndarray | None = None
    seconds: float = 0.0

    @property
    def version(self) -> int:
        return self.publication.manifest.version


@dataclass
class Publishing:
    """Versions at the learner: copied between two steps, written beside those that follow. One copy waits at most.

    `torch` makes the calls of `backend`, and `writer` writes. A disk that does not take a version is tried again until it does,
    and `report` is told when that begins and ends. `watched` int32 `[T]`: the tokens of the probe's text
    (`r3async.actors.probing.probe`); None: there is no probe. `write_seconds`: that one version may take to be written. `server`
    gives what is written to other hosts, if any."""

    world: World
    config: Config
    lineage: Lineage
    timeline: Timeline
    backend: LocalLearner | RankedLearner
    torch: Lane
    writer: Lane
    watched: np.ndarray | None
    write_seconds: float
    server: TcpServer | None = None
    report: Callable[..., object] = lambda event, **facts: None

    def __post_init__(self) -> None:
        self._clock = self.world.clock.monotonic
        self.disk = DiskWait(
            self.world, self.report, "weights_stalled", "weights_go_on", directory=str(directory(self.config))
        )
        self._copied = -1
        """Version of the copy."""
        self._scores: np.ndarray | None = None
        """Its, if it has any."""
        self._nothing_to_write = asyncio.Event()
        self._nothing_to_write.set()

    def figures(self) -> dict[str, float]:
        """Metrics."""
        return {"weights/strangers": 0 if self.server is None else self.server.refused.total()}

    @property
    def writing(self) -> bool:
        """A version that engines are to have is not written yet."""
        return not self._nothing_to_write.is_set()

    async def copy(self, version: int, *, scored: bool) -> None:
        """Copy the current weights as `version`, for `write`, as soon as the version before them is written. With `scored`, they
        score the probe's text."""
        while self.writing:
            try:
                await asyncio.wait_for(self._nothing_to_write.wait(), self.write_seconds)
            except TimeoutError as error:
                if self.disk.waits is None:  # else the disk is waited for, however long it takes
                    raise TimeoutError(
                        f"version {version} has to wait for version {version - 1}, which was not written within "
                        f"{self.write_seconds:g} s (weights.write_timeout)"
                    ) from error
        await self.torch.run(self.backend.snapshot, version)
        self._copied = version
        self._nothing_to_write.clear()
        self._scores = await self.score() if scored else None

    async def score(self) -> np.ndarray | None:
        """See `Published.scores`, of the weights as they are now."""
        if self.watched is None:
            return None
        temperature = self.config.episode.temperature
        scores = []
        for text in probe_texts(self.watched):
            plain = await self.torch.run(self.backend.score, text)
            same = temperature == 1.0
            tempered = plain if same else await self.torch.run(self.backend.score, text, temperature)
            scores.append([plain, tempered])
        return np.asarray(scores)

    async def write(self, reading: Sequence[int] = ()) -> Published:
        """Write the copy where engines find it. Versions that engines are `reading` stay."""
        began, scores = self._clock(), self._scores
        try:
            publication = await self.disk.insist(DISK_HINT, self._write, reading)
            named = msgspec.structs.replace(publication.manifest, lineage=self.lineage.number)
            parts = await self.disk.insist(DISK_HINT, self._offer, named, publication.parts)
        finally:
            self._nothing_to_write.set()  # whether or not it succeeded, no step waits for it any more
        return Published(Publication(named, parts), scores, self._clock() - began)

    async def _write(self, reading: Sequence[int]) -> Publication:
        with self.timeline.span("write", version=self._copied):
            writing = self.writer.run(self.backend.write, reading)
            return await asyncio.wait_for(writing, self.write_seconds)

    async def _offer(self, manifest: WeightManifest, parts: list[Any]) -> list[Any]:
        return parts if self.server is None else [self.server.offer(manifest, *parts)]

    async def keep(self, manifest: WeightManifest, model: Path, directory: Path) -> None:
        """Write a version whose file is here as a model directory, with configuration and tokenizer of the start `model`. Raises
        `OSError` or `TimeoutError`."""
        from r3async.learner.state import save_version  # loads torch, which this process has by now

        writing = self.writer.run(save_version, directory, model, Path(manifest.path), self.config.generator.dtype)
        await asyncio.wait_for(writing, self.write_seconds)

    async def close(self) -> None:
        """Nothing is served any more. Idempotent."""
        if self.server is not None:
            await self.server.close()


class NoSender:
    """The `WeightSender` before `publish_through`."""

    def send(self, version: int, tensors: Mapping[str, Any], dtype: Any, reading: Collection[int] = ()) -> Publication:
        raise LearnerError(f"version {version} cannot be written: its transport is not chosen yet")

    def announce(self, manifest: WeightManifest) -> Publication:
        raise LearnerError(f"version {manifest.version} cannot be sent: its transport is not chosen yet")

    def close(self) -> None:
        pass


def sender(config: Config, backend: str, world: World = REAL) -> WeightSender:
    """The learner's end of `backend`."""
    if backend == "nccl":
        weights = config.weights
        limit = partial(weights.install_seconds, first=True)
        return NcclSender(directory(config), config.transport.host, weights.bucket_bytes, limit)
    if backend == "tcp":
        return DeltaPublisher(directory(config), config.weights.bucket_bytes, world)
    return Publisher(directory(config), bucket_bytes=config.weights.bucket_bytes, world=world)


def server(config: Config, backend: str, keys: ServerKeys, world: World = REAL) -> TcpServer | None:
    """What gives versions to other hosts, if `backend` has any such thing."""
    if backend != "tcp":
        return None
    return TcpServer(in_url(config.transport.host), keys, world, announced=partial(announced, config, world))


def announced(config: Config, world: World, endpoint: str) -> str:
    """Where others reach what is bound at `endpoint` of `transport.host`: a wildcard is this host's address."""
    if config.transport.host not in _WILDCARDS:
        return endpoint
    return f"tcp://{in_url(world.actors.address(config.cluster.interface))}:{endpoint.rpartition(':')[2]}"


def receiver(
    config: Config, backend: str, generator_id: str, share: str, keys: ClientKeys, world: World = REAL
) -> WeightReceiver:
    """A generator's end of `backend`. `share`: what all generators of a start of the run call it."""
    if backend == "nccl":
        return NcclReceiver(generator_id)
    if backend == "tcp":
        local = is_loopback(config.transport.host)
        host, name = (
            ("127.0.0.1", "127.0.0.1") if local else ("0.0.0.0", world.actors.address(config.cluster.interface))
        )
        if not config.weights.relay:
            host = ""
        return TcpReceiver(directory(config), share, generator_id, keys, host=host, name=name, world=world)
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
            'weights.backend="tcp"'
        )
    if backend == "auto":
        # Where others reach the learner, generators of other hosts may join later.
        return "tcp" if len(hosts) > 1 or not is_loopback(config.transport.host) else "shared_memory"
    return backend


def check_reach(config: Config, learner: str, engines: Collection[str]) -> None:
    """Raises `ConfigError` if engines are on other hosts than the `learner`, where they cannot reach it."""
    if set(engines) - {learner} and is_loopback(config.transport.host):
        raise ConfigError(
            f"engines are on other hosts than the learner, who is reached at `transport.host` = {config.transport.host!r} on "
            'its own host alone: set transport.host="0.0.0.0", or the address of one of its interfaces'
        )


def joins(config: Config, backend: str, hosts: Collection[str], host: str) -> None:
    """Raises `ValueError` if weights do not reach a generator that joins a run, on `host`, by its `backend`."""
    if backend == "nccl":
        raise ValueError('with weights.backend="nccl" the fleet is what it was at the start: set weights.backend="tcp"')
    if host in hosts:
        return
    if is_loopback(config.transport.host):
        raise ValueError(
            f"it is on host {host}, which does not reach the learner at transport.host = {config.transport.host!r}: set "
            "transport.host to an address of the learner's host"
        )
    if backend == "shared_memory":
        raise ValueError(f'it is on host {host}, which shares no memory with the learner\'s: set weights.backend="tcp"')


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
            'transport.trusted_network=true; or set weights.backend="tcp"'
        )


def no_delivery() -> dict[str, float]:
    """The figures of a step whose weights were never delivered."""
    names = ("update_seconds", "transfer_seconds", "load_seconds", "pause_seconds", "paused_share", "bytes")
    return {f"weights/{name}": 0.0 for name in names}
