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

from r3async.config import Config, ConfigError, is_loopback_host
from r3async.config.rollout import bracket_ipv6
from r3async.data.versions import Lineage
from r3async.learner import LearnerError
from r3async.record.timeline import Timeline
from r3async.weights.fetch import TcpReceiver, TcpServer
from r3async.weights.manifest import WeightManifest
from r3async.weights.nccl import NcclReceiver, NcclSender
from r3async.weights.probe import make_probe_pair
from r3async.weights.publish import (
    DeltaVersionStore,
    SharedMemoryReceiver,
    TransferOffer,
    VersionStore,
    WeightReceiver,
    WeightSender,
    default_weights_directory,
)
from r3async.world import WorkerThread, World
from r3async.world.files import DiskRetrier
from r3async.world.real import REAL_WORLD
from r3async.world.sockets import ClientKeys, ServerKeys

if TYPE_CHECKING:
    from .ranks import LocalRank, RemoteRanks

_WILDCARD_HOSTS = ("*", "0.0.0.0", "::")
WRITE_DISK_HINT = "the run waits, and nothing is lost: free bytes there, or file descriptors of this process"


class Published(msgspec.Struct, frozen=True):
    """A version that engines may install. `scores` float32 `[2, 2, T - 1]`: the learner's of each of `make_probe_pair`, with
    these very weights, at temperature 1 and at the run's (None if nobody asked for them). `seconds`: how long it took to
    write."""

    publication: TransferOffer
    scores: np.ndarray | None = None
    seconds: float = 0.0

    @property
    def version(self) -> int:
        return self.publication.manifest.version


@dataclass
class VersionWriter:
    """Versions at the learner: copied between two steps, written beside those that follow. One copy waits at most.

    `torch_lane` makes the calls of `ranks`, and `writer_lane` writes. A disk that does not take a version is tried again
    until it does, and `report_event` is told when that begins and ends. `probe_tokens` int32 `[T]`: the tokens of the probe's
    text (`r3async.actors.installer.probe_generator`); None: there is no probe. `write_seconds`: that one version may take to be
    written. `server` gives what is written to other hosts, if any."""

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
    report_event: Callable[..., object] = lambda event, **facts: None

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
        """Version of the copy."""
        self._copied_scores: np.ndarray | None = None
        """Its, if it has any."""
        self._write_done = asyncio.Event()
        self._write_done.set()

    def collect_metrics(self) -> dict[str, float]:
        """Metrics."""
        return {"weights/strangers": 0 if self.server is None else self.server.refused_peers.total()}

    @property
    def is_writing(self) -> bool:
        """A version that engines are to have is not written yet."""
        return not self._write_done.is_set()

    async def copy_weights(self, version: int, *, with_probe_scores: bool) -> None:
        """Copy the current weights as `version`, for `write_version`, as soon as the version before them is written. With
        `with_probe_scores`, they score the probe's text."""
        while self.is_writing:
            try:
                await asyncio.wait_for(self._write_done.wait(), self.write_seconds)
            except TimeoutError as error:
                if self.disk_wait.current_wait is None:  # else the disk is waited for, however long it takes
                    raise TimeoutError(
                        f"version {version} has to wait for version {version - 1}, which was not written within "
                        f"{self.write_seconds:g} s (weights.write_timeout)"
                    ) from error
        await self.torch_lane.run(self.ranks.snapshot_weights, version)
        self._copied_version = version
        self._write_done.clear()
        self._copied_scores = await self.score_probe() if with_probe_scores else None

    async def score_probe(self) -> np.ndarray | None:
        """See `Published.scores`, of the weights as they are now."""
        if self.probe_tokens is None:
            return None
        temperature = self.config.episode.temperature
        scores = []
        for text in make_probe_pair(self.probe_tokens):
            plain = await self.torch_lane.run(self.ranks.score_tokens, text)
            same = temperature == 1.0
            tempered = plain if same else await self.torch_lane.run(self.ranks.score_tokens, text, temperature)
            scores.append([plain, tempered])
        return np.asarray(scores)

    async def write_version(self, versions_in_use: Sequence[int] = ()) -> Published:
        """Write the copy where engines find it. Versions that engines are `versions_in_use` stay."""
        began, scores = self._clock(), self._copied_scores
        try:
            publication = await self.disk_wait.run_with_retries(
                WRITE_DISK_HINT, self._write_with_timeout, versions_in_use
            )
            named = msgspec.structs.replace(publication.manifest, lineage=self.lineage.number)
            parts = await self.disk_wait.run_with_retries(
                WRITE_DISK_HINT, self._offer_to_hosts, named, publication.transport_data
            )
        finally:
            self._write_done.set()  # whether or not it succeeded, no step waits for it any more
        return Published(TransferOffer(named, parts), scores, self._clock() - began)

    async def _write_with_timeout(self, versions_in_use: Sequence[int]) -> TransferOffer:
        with self.timeline.measure_span("write", version=self._copied_version):
            writing = self.writer_lane.run(self.ranks.write_version, versions_in_use)
            return await asyncio.wait_for(writing, self.write_seconds)

    async def _offer_to_hosts(self, manifest: WeightManifest, parts: list[Any]) -> list[Any]:
        return parts if self.server is None else [self.server.offer_version(manifest, *parts)]

    async def save_model_directory(self, manifest: WeightManifest, model: Path, directory: Path) -> None:
        """Write a version whose file is here as a model directory, with configuration and tokenizer of the start `model`. Raises
        `OSError` or `TimeoutError`."""
        from r3async.learner.state import save_version_as_model  # loads torch, which this process has by now

        writing = self.writer_lane.run(
            save_version_as_model, directory, model, Path(manifest.path), self.config.generator.dtype
        )
        await asyncio.wait_for(writing, self.write_seconds)

    async def close(self) -> None:
        """Nothing is served any more. Idempotent."""
        if self.server is not None:
            await self.server.close()


class UnsetSender:
    """The `WeightSender` before `set_weight_transport`."""

    def publish_tensors(
        self, version: int, tensors: Mapping[str, Any], dtype: Any, versions_in_use: Collection[int] = ()
    ) -> TransferOffer:
        raise LearnerError(f"version {version} cannot be written: its transport is not chosen yet")

    def announce_version(self, manifest: WeightManifest) -> TransferOffer:
        raise LearnerError(f"version {manifest.version} cannot be sent: its transport is not chosen yet")

    def close(self) -> None:
        pass


def build_weight_sender(config: Config, backend: str, world: World = REAL_WORLD) -> WeightSender:
    """The learner's end of `backend`."""
    if backend == "nccl":
        weights = config.weights
        limit = partial(weights.resolve_install_timeout, first=True)
        return NcclSender(get_weights_directory(config), config.transport.host, weights.bucket_bytes, limit)
    if backend == "tcp":
        return DeltaVersionStore(get_weights_directory(config), config.weights.bucket_bytes, world)
    return VersionStore(get_weights_directory(config), bucket_bytes=config.weights.bucket_bytes, world=world)


def build_weight_server(config: Config, backend: str, keys: ServerKeys, world: World = REAL_WORLD) -> TcpServer | None:
    """What gives versions to other hosts, if `backend` has any such thing."""
    if backend != "tcp":
        return None
    return TcpServer(
        bracket_ipv6(config.transport.host), keys, world, public_endpoint=partial(resolve_endpoint, config, world)
    )


def resolve_endpoint(config: Config, world: World, endpoint: str) -> str:
    """Where others reach what is bound at `endpoint` of `transport.host`: a wildcard is this host's address."""
    if config.transport.host not in _WILDCARD_HOSTS:
        return endpoint
    return f"tcp://{bracket_ipv6(world.actors.host_address(config.cluster.interface))}:{endpoint.rpartition(':')[2]}"


def build_weight_receiver(
    config: Config, backend: str, generator_id: str, share: str, keys: ClientKeys, world: World = REAL_WORLD
) -> WeightReceiver:
    """A generator's end of `backend`. `share`: what all generators of a start of the run call it."""
    if backend == "nccl":
        return NcclReceiver(generator_id)
    if backend == "tcp":
        local = is_loopback_host(config.transport.host)
        host, name = (
            ("127.0.0.1", "127.0.0.1") if local else ("0.0.0.0", world.actors.host_address(config.cluster.interface))
        )
        if not config.weights.relay:
            host = ""
        return TcpReceiver(get_weights_directory(config), share, generator_id, keys, host=host, name=name, world=world)
    return SharedMemoryReceiver()


def get_weights_directory(config: Config) -> Path:
    """Where files of weights live on this host."""
    return Path(config.weights.directory or default_weights_directory())


def choose_weight_backend(
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
        return "tcp" if len(hosts) > 1 or not is_loopback_host(config.transport.host) else "shared_memory"
    return backend


def check_learner_reachable(config: Config, learner: str, engines: Collection[str]) -> None:
    """Raises `ConfigError` if engines are on other hosts than the `learner`, where they cannot reach it."""
    if set(engines) - {learner} and is_loopback_host(config.transport.host):
        raise ConfigError(
            f"engines are on other hosts than the learner, who is reached at `transport.host` = {config.transport.host!r} on "
            'its own host alone: set transport.host="0.0.0.0", or the address of one of its interfaces'
        )


def check_can_join(config: Config, backend: str, hosts: Collection[str], host: str) -> None:
    """Raises `ValueError` if weights do not reach a generator that joins a run, on `host`, by its `backend`."""
    if backend == "nccl":
        raise ValueError('with weights.backend="nccl" the fleet is what it was at the start: set weights.backend="tcp"')
    if host in hosts:
        return
    if is_loopback_host(config.transport.host):
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
    if len(hosts) > 1 and (is_loopback_host(config.transport.host) or config.transport.host in _WILDCARD_HOSTS):
        raise ValueError(
            f'weights.backend="nccl" meets engines of other hosts at transport.host = "{config.transport.host}", where '
            "they cannot find it: name an interface of the learner's host"
        )
    if not (is_loopback_host(config.transport.host) or config.transport.trusted_network):
        raise ValueError(
            'weights.backend="nccl" knows no keys: at a transport.host that others reach it needs '
            'transport.trusted_network=true; or set weights.backend="tcp"'
        )


def zero_delivery_metrics() -> dict[str, float]:
    """The figures of a step whose weights were never delivered."""
    names = ("update_seconds", "transfer_seconds", "load_seconds", "pause_seconds", "paused_share", "bytes")
    return {f"weights/{name}": 0.0 for name in names}
