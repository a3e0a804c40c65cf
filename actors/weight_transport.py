"""The transport by which a run's weights travel: the rules that choose it, and its two ends."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from r3async.config import LOOPBACK_HOST, Config, ConfigError, is_loopback_host
from r3async.config.serving import bracket_ipv6, replace_host, strip_brackets
from r3async.learner import LearnerError
from r3async.weights.interfaces import TransferOffer, WeightReceiver, WeightSender
from r3async.weights.manifest import WeightManifest
from r3async.weights.nccl import NcclReceiver, NcclSender
from r3async.weights.tcp import PartServer, TcpReceiver, TcpServer
from r3async.weights.version_folder import default_weights_directory
from r3async.weights.version_store import DeltaVersionStore, SharedMemoryReceiver, VersionStore
from r3async.world import World
from r3async.world.curve_keys import ClientKeys, ServerKeys
from r3async.world.real import REAL_WORLD

_WILDCARD_HOSTS = ("*", "0.0.0.0", "::")
SENDER_HINT = (
    "a host of the learner sends its part of a version to nobody: a sender that does not answer "
    "there is replaced, and a network that carries nothing is waited for"
)


class UnsetSender:
    """The `WeightSender` before `set_weight_transport`. Publishing raises `LearnerError`."""

    def publish_tensors(
        self,
        version: int,
        tensors: Mapping[str, Any],
        dtype: Any,
        versions_in_use: Collection[int] = (),
    ) -> TransferOffer:
        raise LearnerError(f"version {version} cannot be written: its transport is not chosen yet")

    def announce_version(self, manifest: WeightManifest) -> TransferOffer:
        raise LearnerError(
            f"version {manifest.version} cannot be sent: its transport is not chosen yet"
        )

    def close(self) -> None:
        pass


def build_weight_sender(config: Config, backend: str, world: World = REAL_WORLD) -> WeightSender:
    """Return the learner's end of the transport `backend`."""
    if backend == "nccl":
        host = config.transport.host
        if _is_wildcard(host):
            host = world.actors.host_address(config.cluster.interface)
        return NcclSender(
            get_weights_directory(config), host, config.weights, config.supervise.limits
        )
    if backend == "tcp":
        return DeltaVersionStore(get_weights_directory(config), config.weights.bucket_bytes, world)
    return VersionStore(
        get_weights_directory(config), bucket_bytes=config.weights.bucket_bytes, world=world
    )


def build_weight_server(
    config: Config, backend: str, keys: ServerKeys, world: World = REAL_WORLD
) -> TcpServer | None:
    """Return the server from which other hosts fetch versions; None if `backend` has none."""
    if backend != "tcp":
        return None
    return TcpServer(
        bracket_ipv6(config.transport.host),
        keys,
        world,
        public_host=_select_public_host(config, world),
    )


def with_reachable_host(config: Config, world: World, known_host: str = "") -> Config:
    """Return the configuration with `known_host`, or else the address by which other hosts reach
    this one, in the place of an unset `transport.host`. Raises `ConnectionError` if
    `cluster.interface` does not exist."""
    if config.transport.host:
        return config
    address = known_host or world.actors.host_address(config.cluster.interface)
    return msgspec.structs.replace(
        config, transport=msgspec.structs.replace(config.transport, host=address)
    )


def with_loopback_host(config: Config) -> Config:
    """Return the configuration with loopback in the place of an unset `transport.host`, for a
    run on one host."""
    if config.transport.host:
        return config
    return msgspec.structs.replace(
        config, transport=msgspec.structs.replace(config.transport, host=LOOPBACK_HOST)
    )


def _is_wildcard(host: str) -> bool:
    return strip_brackets(host) in _WILDCARD_HOSTS


def _select_wildcard(address: str) -> str:
    """Return the host that stands for all interfaces of the family of `address`."""
    return "[::]" if ":" in address else "0.0.0.0"


def build_part_server(config: Config, keys: ServerKeys, world: World = REAL_WORLD) -> PartServer:
    """Return the server of another host of the learner, from which engines fetch its
    parts of versions."""
    address = bracket_ipv6(world.actors.host_address(config.cluster.interface))
    return PartServer(_select_wildcard(address), keys, world, address)


def resolve_endpoint(config: Config, world: World, endpoint: str) -> str:
    """Return the address at which other hosts reach a socket that is bound at `endpoint` of
    `transport.host`. A wildcard is replaced by this host's address."""
    host = _select_public_host(config, world)
    return replace_host(endpoint, host) if host else endpoint


def _select_public_host(config: Config, world: World) -> str:
    """Return this host's address if `transport.host` is a wildcard, and "" if others reach a socket
    where it is bound."""
    if not _is_wildcard(config.transport.host):
        return ""
    return bracket_ipv6(world.actors.host_address(config.cluster.interface))


def build_weight_receiver(
    config: Config,
    backend: str,
    generator_id: str,
    share: str,
    keys: ClientKeys,
    world: World = REAL_WORLD,
) -> WeightReceiver:
    """Return a generator's end of the transport `backend`. `share` names what all generators of one
    start of the run share on a host."""
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
        return TcpReceiver(
            get_weights_directory(config),
            share,
            generator_id,
            keys,
            host=host,
            name=name,
            world=world,
        )
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
    """Return the transport of weights for a learner and generators: `weights.backend`, with
    "auto" resolved.

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
            f'weights.backend="{backend}" takes weights from one host, and the learner\'s ranks '
            f"are on {', '.join(sorted(set(rank_hosts)))}, each with a part of them: set "
            'weights.backend="tcp"'
        )
    if backend == "nccl":
        _check_nccl(config, hosts, learner_gpus, engine_gpus)
    if backend == "shared_memory" and len(hosts) > 1:
        raise ConfigError(
            f"learner and generators are on different hosts ({', '.join(sorted(hosts))}), which "
            'share no memory: set weights.backend="tcp"'
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
    """Raise `ConfigError` if engines are on other hosts than the `learner` and cannot
    reach it from there."""
    if set(engines) - {learner} and is_loopback_host(config.transport.host):
        raise ConfigError(
            "engines are on other hosts than the learner, who is reached at `transport.host` = "
            f"{config.transport.host!r} on its own host alone: leave it out, or set it to the "
            "address of an interface of the learner's host"
        )


def check_can_join(config: Config, backend: str, hosts: Collection[str], host: str) -> None:
    """Raise `ValueError` if a generator that joins a run on `host` cannot receive weights by the
    run's `backend`."""
    if backend == "nccl":
        raise ValueError(
            'with weights.backend="nccl" the fleet is what it was at the start: set '
            'weights.backend="tcp"'
        )
    if host in hosts:
        return
    if is_loopback_host(config.transport.host):
        raise ValueError(
            f"it is on host {host}, which does not reach the learner at transport.host = "
            f"{config.transport.host!r}, as in a run that began on one host: start it with "
            'transport.host="0.0.0.0"'
        )
    if backend == "shared_memory":
        raise ValueError(
            f"it is on host {host}, which shares no memory with the learner's: set "
            'weights.backend="tcp"'
        )


def _check_nccl(
    config: Config,
    hosts: Collection[str],
    learner_gpus: Sequence[str],
    engine_gpus: Sequence[Sequence[str]],
) -> None:
    without = [] if learner_gpus else ["the learner"]
    if not engine_gpus or not all(engine_gpus):
        without.append("an engine")
    if without:
        raise ConfigError(
            'weights.backend="nccl" sends from GPU to GPU, but there is no CUDA for '
            f'{" and ".join(without)}: set weights.backend="auto"'
        )
    shared = set(learner_gpus) & {gpu for gpus in engine_gpus for gpu in gpus}
    if shared:
        raise ConfigError(
            f"learner and an engine share GPU {min(shared)}, on which NCCL cannot be both ends "
            '(weights.backend): set weights.backend="shared_memory", or give them GPUs of their own'
        )
    if len(hosts) > 1 and (
        is_loopback_host(config.transport.host) or _is_wildcard(config.transport.host)
    ):
        raise ConfigError(
            'weights.backend="nccl" meets engines of other hosts at transport.host = '
            f'"{config.transport.host}", where they cannot find it: leave it out, or name an '
            "interface of the learner's host"
        )
    if _is_open_to_others(config, hosts) and not config.transport.trusted_network:
        raise ConfigError(
            'weights.backend="nccl" knows no keys: at a transport.host that others reach it needs '
            'transport.trusted_network=true; or set weights.backend="tcp"'
        )
