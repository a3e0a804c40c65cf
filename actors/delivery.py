"""Weights in transfer: how the learner copies and writes them, how it offers them to the conductor, and by which
transport they travel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from r3async.config import LOOPBACK_HOST, Config, ConfigError, is_loopback_host
from r3async.config.serving import bracket_ipv6, strip_brackets
from r3async.data.versions import Lineage
from r3async.learner import LearnerError
from r3async.record.timeline import Timeline
from r3async.weights.manifest import WeightManifest
from r3async.weights.nccl import NcclReceiver, NcclSender
from r3async.weights.probe import make_probe_pair
from r3async.weights.tcp import PartServer, TcpReceiver, TcpServer
from r3async.weights.version_folder import default_weights_directory
from r3async.weights.version_store import DeltaVersionStore, SharedMemoryReceiver, VersionStore
from r3async.weights.weight_transfer import TransferOffer, WeightReceiver, WeightSender
from r3async.world import EventReporter, WorkerThread, World, ignore_event
from r3async.world.curve_keys import ClientKeys, ServerKeys
from r3async.world.disk_retries import DiskRetrier
from r3async.world.real import REAL_WORLD

if TYPE_CHECKING:
    from .ranks import LocalRank, RemoteRanks

_WILDCARD_HOSTS = ("*", "0.0.0.0", "::")
SENDER_HINT = (
    "a host of the learner sends its part of a version to nobody: a sender that does not answer there is replaced, and a "
    "network that carries nothing is waited for"
)
WRITE_DISK_HINT = "the run waits, and nothing is lost: free bytes there, or file descriptors of this process"


class Published(msgspec.Struct, frozen=True):
    """A version of the weights that engines may install.

    Attributes:
        publication: The offer of the version, with which engines fetch it.
        scores: float32 `[2, 2, T - 1]`: the learner's scores of both texts of `make_probe_pair` with exactly these
            weights, at temperature 1 and at the run's temperature. None if they were not requested.
        seconds: Seconds that it took to write the version.
    """

    publication: TransferOffer
    scores: np.ndarray | None = None
    seconds: float = 0.0

    @property
    def version(self) -> int:
        return self.publication.manifest.version


@dataclass
class VersionWriter:
    """The learner's writer of versions. It copies the weights between two steps and writes the copy beside the steps
    that follow. At most one copy waits.

    A disk that does not take a version is tried again until it does.

    Attributes:
        torch_lane: Thread that makes the calls of `ranks`.
        writer_lane: Thread that writes.
        probe_tokens: int32 `[T]`: tokens of the probe's text (`r3async.actors.installer.probe_generator`). None: no
            probe.
        write_seconds: Seconds that writing one version may take.
        server: Serves what is written to other hosts, if there are any.
        remote_ranks: The ranks, if they are on several hosts, which serve what is written there.
        report_event: Called when the wait for a disk begins and ends.
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
        self._watching: asyncio.Task[None] | None = None
        self._write_done = asyncio.Event()
        self._write_done.set()

    def collect_metrics(self) -> dict[str, float]:
        """Return the number of peers that the server has refused, as a metric."""
        return {"weights/strangers": 0 if self.server is None else self.server.refused_peers.total()}

    @property
    def is_writing(self) -> bool:
        """True while a version for the engines is not written yet."""
        return not self._write_done.is_set()

    async def copy_weights(self, version: int, *, with_probe_scores: bool) -> None:
        """Copy the current weights as `version`, for `write_version`, as soon as the version before is written. With
        `with_probe_scores`, they also score the probe's text. Raises `TimeoutError` if the version before was not
        written within `write_seconds`, unless a disk does not take it."""
        while self.is_writing:
            try:
                await asyncio.wait_for(self._write_done.wait(), self.write_seconds)
            except TimeoutError as error:
                if self.disk_wait.current_wait is None:  # otherwise wait for the disk, however long it takes
                    raise TimeoutError(
                        f"version {version} has to wait for version {version - 1}, which was not written within "
                        f"{self.write_seconds:g} s (weights.write_timeout)"
                    ) from error
        await self.torch_lane.run(self.ranks.snapshot_weights, version)
        self._copied_version = version
        self._write_done.clear()
        self._copied_scores = await self.score_probe() if with_probe_scores else None

    async def score_probe(self) -> np.ndarray | None:
        """Score the probe's texts with the current weights, as `Published.scores` has them. Returns None if there is no
        probe."""
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
        """Write the copy to where engines find it. Versions in `versions_in_use`, which engines are reading, stay."""
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
            self._write_done.set()  # no step waits for it any more, whether or not it succeeded
        return Published(TransferOffer(named, parts), scores, self._clock() - began)

    async def _write_with_timeout(self, versions_in_use: Sequence[int]) -> TransferOffer:
        with self.timeline.measure_span("write", version=self._copied_version):
            writing = self.writer_lane.run(self.ranks.write_version, versions_in_use)
            return await asyncio.wait_for(writing, self.write_seconds)

    async def _offer_to_hosts(self, manifest: WeightManifest, parts: list[Any]) -> list[Any]:
        return parts if self.server is None else [self.server.offer_version(manifest, *parts)]

    def begin_watching(self) -> None:
        """Begin to watch the senders on the learner's other hosts, if there are any."""
        if self.server is not None and self.remote_ranks is not None:
            self._watching = asyncio.create_task(self._watch_senders(self.server, self.remote_ranks))

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
            self.report_event("weights_go_on", host=host, sender=endpoint, replaced=endpoint != silent.endpoint)

    async def save_model_directory(self, manifest: WeightManifest, model: Path, directory: Path) -> None:
        """Write a version whose file is on the learner's hosts as a model directory, with the configuration and
        tokenizer of the start `model`. Raises `OSError` or `TimeoutError`."""
        # Loads torch, which this process has by now.
        from r3async.learner.model_directory import copy_version_file, save_version_as_model

        copy_version: Callable[[Path], None]
        if self.remote_ranks is None:
            copy_version = partial(copy_version_file, Path(manifest.path))
        else:
            parts = [] if self.server is None else self.server.list_parts(manifest)
            copy_version = partial(self.remote_ranks.join_parts, parts)
        writing = self.writer_lane.run(
            save_version_as_model, directory, model, copy_version, self.config.generator.dtype
        )
        await asyncio.wait_for(writing, self.write_seconds)

    async def close(self) -> None:
        """Stop serving versions. Idempotent."""
        if self._watching is not None:
            self._watching.cancel()
        if self.server is not None:
            await self.server.close()


class UnsetSender:
    """The `WeightSender` before `set_weight_transport`. Publishing raises `LearnerError`."""

    def publish_tensors(
        self, version: int, tensors: Mapping[str, Any], dtype: Any, versions_in_use: Collection[int] = ()
    ) -> TransferOffer:
        raise LearnerError(f"version {version} cannot be written: its transport is not chosen yet")

    def announce_version(self, manifest: WeightManifest) -> TransferOffer:
        raise LearnerError(f"version {manifest.version} cannot be sent: its transport is not chosen yet")

    def close(self) -> None:
        pass


def build_weight_sender(config: Config, backend: str, world: World = REAL_WORLD) -> WeightSender:
    """Return the learner's end of the transport `backend`."""
    if backend == "nccl":
        weights = config.weights
        limit = partial(weights.resolve_install_timeout, first=True)
        host = config.transport.host
        if _is_wildcard(host):
            host = world.actors.host_address(config.cluster.interface)
        return NcclSender(get_weights_directory(config), host, weights.bucket_bytes, limit)
    if backend == "tcp":
        return DeltaVersionStore(get_weights_directory(config), config.weights.bucket_bytes, world)
    return VersionStore(get_weights_directory(config), bucket_bytes=config.weights.bucket_bytes, world=world)


def build_weight_server(config: Config, backend: str, keys: ServerKeys, world: World = REAL_WORLD) -> TcpServer | None:
    """Return the server from which other hosts fetch versions; None if `backend` has none."""
    if backend != "tcp":
        return None
    return TcpServer(
        bracket_ipv6(config.transport.host), keys, world, public_endpoint=partial(resolve_endpoint, config, world)
    )


def with_reachable_host(config: Config, world: World, known_host: str = "") -> Config:
    """Return the configuration with `known_host`, or else the address by which other hosts reach this one, in the place
    of an unset `transport.host`. Raises `ConnectionError` if `cluster.interface` does not exist."""
    if config.transport.host:
        return config
    address = known_host or world.actors.host_address(config.cluster.interface)
    return msgspec.structs.replace(config, transport=msgspec.structs.replace(config.transport, host=address))


def with_loopback_host(config: Config) -> Config:
    """Return the configuration with loopback in the place of an unset `transport.host`, for a run on one host."""
    if config.transport.host:
        return config
    return msgspec.structs.replace(config, transport=msgspec.structs.replace(config.transport, host=LOOPBACK_HOST))


def _is_wildcard(host: str) -> bool:
    return strip_brackets(host) in _WILDCARD_HOSTS


def _select_wildcard(address: str) -> str:
    """Return the host that stands for all interfaces of the family of `address`."""
    return "[::]" if ":" in address else "0.0.0.0"


def build_part_server(config: Config, keys: ServerKeys, world: World = REAL_WORLD) -> PartServer:
    """Return the server of another host of the learner, from which engines fetch its parts of versions."""

    address = bracket_ipv6(world.actors.host_address(config.cluster.interface))

    def reached_at(bound: str) -> str:
        return f"tcp://{address}:{bound.rpartition(':')[2]}"

    return PartServer(_select_wildcard(address), keys, world, public_endpoint=reached_at)


def resolve_endpoint(config: Config, world: World, endpoint: str) -> str:
    """Return the address at which other hosts reach a socket that is bound at `endpoint` of `transport.host`. A
    wildcard is replaced by this host's address."""
    if not _is_wildcard(config.transport.host):
        return endpoint
    return f"tcp://{bracket_ipv6(world.actors.host_address(config.cluster.interface))}:{endpoint.rpartition(':')[2]}"


def build_weight_receiver(
    config: Config, backend: str, generator_id: str, share: str, keys: ClientKeys, world: World = REAL_WORLD
) -> WeightReceiver:
    """Return a generator's end of the transport `backend`. `share` names what all generators of one start of the run
    share on a host."""
    if backend == "nccl":
        return NcclReceiver(generator_id)
    if backend == "tcp":
        if is_loopback_host(config.transport.host):
            host = name = LOOPBACK_HOST
        else:
            name = bracket_ipv6(world.actors.host_address(config.cluster.interface))
            host = _select_wildcard(name)
        if not config.weights.relay:
            host = ""
        return TcpReceiver(get_weights_directory(config), share, generator_id, keys, host=host, name=name, world=world)
    return SharedMemoryReceiver()


def get_weights_directory(config: Config) -> Path:
    """Return the directory of files of weights on this host."""
    return Path(config.weights.directory or default_weights_directory())


def choose_weight_backend(
    config: Config,
    hosts: Collection[str],
    learner_gpus: Sequence[str] = (),
    engine_gpus: Sequence[Sequence[str]] = (),
    rank_hosts: Collection[str] = (),
) -> str:
    """Return the transport of weights for a learner and generators: `weights.backend`, with "auto" resolved.

    Args:
        hosts: Hosts of the learner and the generators.
        learner_gpus: GPU of the rank that sends; empty on CPU.
        engine_gpus: GPUs of each engine; empty on CPU.
        rank_hosts: Hosts of the learner's ranks.

    Raises `ConfigError` if the transport cannot reach them all.
    """
    backend = config.weights.backend
    if backend not in ("auto", "tcp") and len(set(rank_hosts)) > 1:
        raise ConfigError(
            f'weights.backend="{backend}" takes weights from one host, and the learner\'s ranks are on '
            f'{", ".join(sorted(set(rank_hosts)))}, each with a part of them: set weights.backend="tcp"'
        )
    if backend == "nccl":
        _check_nccl(config, hosts, learner_gpus, engine_gpus)
    if backend == "shared_memory" and len(hosts) > 1:
        raise ConfigError(
            f"learner and generators are on different hosts ({', '.join(sorted(hosts))}), which share no memory: set "
            'weights.backend="tcp"'
        )
    if backend == "auto":
        # If other hosts can reach the learner, their generators may join later.
        return "tcp" if len(hosts) > 1 or _is_open_to_others(config, hosts) else "shared_memory"
    return backend


def _is_open_to_others(config: Config, hosts: Collection[str]) -> bool:
    """Return True if other hosts can reach the learner of a run on these hosts."""
    host = config.transport.host
    return not is_loopback_host(host) if host else len(hosts) > 1


def check_learner_reachable(config: Config, learner: str, engines: Collection[str]) -> None:
    """Raise `ConfigError` if engines are on other hosts than the `learner` and cannot reach it from there."""
    if set(engines) - {learner} and is_loopback_host(config.transport.host):
        raise ConfigError(
            f"engines are on other hosts than the learner, who is reached at `transport.host` = {config.transport.host!r} on "
            "its own host alone: leave it out, or set it to the address of an interface of the learner's host"
        )


def check_can_join(config: Config, backend: str, hosts: Collection[str], host: str) -> None:
    """Raise `ValueError` if a generator that joins a run on `host` cannot receive weights by the run's `backend`."""
    if backend == "nccl":
        raise ValueError('with weights.backend="nccl" the fleet is what it was at the start: set weights.backend="tcp"')
    if host in hosts:
        return
    if is_loopback_host(config.transport.host):
        raise ValueError(
            f"it is on host {host}, which does not reach the learner at transport.host = {config.transport.host!r}, as in a "
            'run that began on one host: start it with transport.host="0.0.0.0"'
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
        raise ConfigError(
            f'weights.backend="nccl" sends from GPU to GPU, but there is no CUDA for {" and ".join(without)}: set '
            'weights.backend="auto"'
        )
    if shared := set(learner_gpus) & {gpu for gpus in engine_gpus for gpu in gpus}:
        raise ConfigError(
            f"learner and an engine share GPU {min(shared)}, on which NCCL cannot be both ends (weights.backend): set "
            'weights.backend="shared_memory", or give them GPUs of their own'
        )
    if len(hosts) > 1 and (is_loopback_host(config.transport.host) or _is_wildcard(config.transport.host)):
        raise ConfigError(
            f'weights.backend="nccl" meets engines of other hosts at transport.host = "{config.transport.host}", where '
            "they cannot find it: leave it out, or name an interface of the learner's host"
        )
    if _is_open_to_others(config, hosts) and not config.transport.trusted_network:
        raise ConfigError(
            'weights.backend="nccl" knows no keys: at a transport.host that others reach it needs '
            'transport.trusted_network=true; or set weights.backend="tcp"'
        )


def zero_delivery_metrics() -> dict[str, float]:
    """Return the metrics of a delivery for a step whose weights were never delivered: all are 0."""
    timing = ("weight_update", "weight_transfer", "weight_load", "engine_pause")
    return {f"timing/{name}_seconds": 0.0 for name in timing} | {"weights/paused_share": 0.0, "weights/bytes": 0.0}
