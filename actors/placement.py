"""Where the processes of a run go: seats on hosts, bundles of resources, and generators without the run's files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from r3async.checkpoint.directory import read_run_starts
from r3async.config import Config, ConfigError
from r3async.rollout.engine import TENSOR_NAMES_FILE
from r3async.world import (
    ActorOptions,
    ClusterNode,
    Files,
    InsufficientResourcesError,
    Reservation,
    ResourceBundle,
    World,
)
from r3async.world.files import make_directory, read_file, replace_file

from .process import RunFailed

# Where the processes of a run go: which hosts the learner's ranks and the engines are on, or why they cannot be.
#
# Pure. `--dry-run`, `r3async cluster` and the run ask the same function, `plan_layout`: on hosts that are supposed, on those
# that a cluster has, and on what is free there.
#
# 1. A rank has a GPU of its own, an engine as many as it is divided among, all on one host.
# 2. Tensor-parallel ranks, which are next to each other, are on one host. Ranks are packed: on as few hosts as possible, in their
# order, so that those of a pipeline stage are neighbours too.
# 3. Of hosts that serve the ranks equally well, those are taken that leave every engine a place; then that where the run is
# started, which has its directory; then those that leave most engines a place.
# 4. Engines are on the learner's hosts first, where its weights are, then on the others, one host after the other.
# 5. With `generator.colocate` an engine is on a rank's GPU: "sleep" always, "share" where there are too few GPUs for both.
# 6. On hosts without GPUs the same with CPUs, one for each process; engines then spread.


GPU_SHARE_UNITS = 10_000
"""Ray counts in so many parts of a GPU."""


class PlacementError(ConfigError):
    """The hosts cannot hold the run. Says what it needs, what they have and what to change."""


class ResourceDemand(msgspec.Struct, frozen=True):
    """What a run needs. `ranks_per_host`: neighbouring ranks that must share a host. `devices_per_engine`: GPUs of one
    engine. `colocate`: see `generator.colocate`."""

    ranks: int
    ranks_per_host: int
    engines: int
    devices_per_engine: int
    colocate: str = "off"

    @staticmethod
    def from_config(config: Config, engines: bool = True) -> ResourceDemand:
        """`engines`: none for supervised training."""
        parallel, generator = config.learner.parallel, config.generator
        count = generator.count if engines else 0
        return ResourceDemand(parallel.world_size, parallel.tp, count, count_engine_devices(config), generator.colocate)


def count_engine_devices(config: Config) -> int:
    """Devices that one engine is divided among."""
    args = config.generator.engine_args
    return int(args.get("tensor_parallel_size", 1)) * int(args.get("data_parallel_size", 1))


class BundleShare(msgspec.Struct, frozen=True):
    """Of one actor: `bundle` of the layout, and how much of its GPUs: a share where others are on the same one."""

    bundle: int
    gpus: float


class ProcessLayout(msgspec.Struct, frozen=True):
    """`learner`: of the actor that receives and packs; with one rank it is that rank, and `ranks` is empty. `bundles` name their
    hosts by `Node.key`."""

    bundles: list[ResourceBundle]
    learner: BundleShare
    ranks: list[BundleShare]
    engines: list[BundleShare]

    @property
    def gpu_count(self) -> int:
        return int(sum(bundle.gpus for bundle in self.bundles))

    @property
    def shares_gpus(self) -> bool:
        """Engines are on GPUs of ranks."""
        return any(seat.gpus % 1 for seat in self.engines)

    def host_of(self, seat: BundleShare) -> str:
        return self.bundles[seat.bundle].node_id

    def rank_hosts(self) -> list[str]:
        """The host of each rank."""
        return [self.host_of(seat) for seat in self.ranks or [self.learner]]

    def describe_hosts(self, names: Sequence[ClusterNode]) -> list[str]:
        """A line for each host that is used."""
        ranks, engines = self.rank_hosts(), [self.host_of(seat) for seat in self.engines]
        lines = []
        for node in names:
            here = [f"{_format_ranges('rank', ranks, node.node_id)} of the learner"] if node.node_id in ranks else []
            if node.node_id in engines:
                here.append(
                    _format_ranges("engine", engines, node.node_id)
                    + (" on the ranks' GPUs" if self.shares_gpus else "")
                )
            if here:
                lines.append(f"{node.name}: {'; '.join(here)}")
        return lines


def _format_ranges(what: str, hosts: Sequence[str], key: str) -> str:
    at = [index for index, host in enumerate(hosts) if host == key]
    parts = []
    for _, run in groupby(enumerate(at), lambda pair: pair[1] - pair[0]):
        places = [place for _, place in run]
        parts.append(str(places[0]) if len(places) == 1 else f"{places[0]}-{places[-1]}")
    return f"{what}{'s' * (len(at) > 1)} {', '.join(parts)}"


class FreeResources:
    """What is left on each host while processes are given places."""

    def __init__(self, nodes: Sequence[ClusterNode], on_gpus: bool):
        self.nodes, self.on_gpus = nodes, on_gpus
        self.free_cpus = [int(node.free_cpus) for node in nodes]
        self.free_gpus = [int(node.free_gpus) for node in nodes]

    def count_free_processes(self, index: int) -> int:
        """Processes of one device each that still fit."""
        return min(self.free_cpus[index], self.free_gpus[index]) if self.on_gpus else self.free_cpus[index]

    def take_bundle(self, index: int, devices: int = 1, processes: int = 1) -> ResourceBundle:
        """A bundle there, which does not move."""
        self.free_cpus[index] -= processes
        self.free_gpus[index] -= devices * self.on_gpus
        return ResourceBundle(processes, devices * self.on_gpus, self.nodes[index].node_id)

    def count_free_engines(self, width: int, index: int) -> int:
        """How many of `width` devices still fit there."""
        return min(self.free_gpus[index] // width, self.free_cpus[index]) if self.on_gpus else self.free_cpus[index]

    def host_indices(self) -> range:
        return range(len(self.nodes))


def plan_layout(demand: ResourceDemand, nodes: Sequence[ClusterNode]) -> ProcessLayout:
    """Give every process a place on what is free of `nodes`. Raises `PlacementError`."""
    on_gpus = any(node.gpus for node in nodes)
    if demand.colocate == "sleep" and on_gpus:
        return _plan_colocated(demand, nodes)
    try:
        return _plan_separate(demand, nodes, on_gpus)
    except PlacementError:
        if demand.colocate != "share" or not on_gpus:
            raise
    return _plan_colocated(demand, nodes)


def plan_free_layout(demand: ResourceDemand, nodes: Sequence[ClusterNode]) -> ProcessLayout:
    """The same for a run that starts. Raises `InsufficientResourcesError`, with what is free where, if others have what it
    needs of the hosts."""
    plan_layout(demand, [with_all_free(node) for node in nodes])
    try:
        return plan_layout(demand, nodes)
    except PlacementError as error:
        raise InsufficientResourcesError(f"the cluster could hold the run, but others use it: {error}") from error


def with_all_free(node: ClusterNode) -> ClusterNode:
    """The host as it is when nobody uses it."""
    return replace(node, free_cpus=node.cpus, free_gpus=node.gpus)


def _plan_separate(demand: ResourceDemand, nodes: Sequence[ClusterNode], on_gpus: bool) -> ProcessLayout:
    hosts = FreeResources(nodes, on_gpus)
    at = _pack_ranks(demand, hosts)
    alone = demand.ranks == 1
    # The actor that receives and packs is on the host of the first rank, whose bundle has a process more for it.
    bundles = [hosts.take_bundle(index, 1, 1 if alone or rank else 2) for rank, index in enumerate(at)]
    share = float(on_gpus)
    ranks = [BundleShare(index, share) for index in range(demand.ranks)]
    engines = []
    for bundle in _place_engines(demand, hosts, at):
        engines.append(BundleShare(len(bundles), bundle.gpus))
        bundles.append(bundle)
    return ProcessLayout(bundles, ranks[0] if alone else BundleShare(0, 0.0), [] if alone else ranks, engines)


def _place_engines(demand: ResourceDemand, hosts: FreeResources, at: Sequence[int]) -> Iterator[ResourceBundle]:
    for engine in range(demand.engines):
        places = [
            index for index in hosts.host_indices() if hosts.count_free_engines(demand.devices_per_engine, index) > 0
        ]
        if not places:
            raise PlacementError(_explain_unplaced_engine(demand, hosts, engine))
        if hosts.on_gpus:
            best = min(places, key=lambda index: (index not in at, index))
        else:
            best = min(places, key=lambda index: (-hosts.free_cpus[index], index))
        taken = hosts.take_bundle(best, demand.devices_per_engine)
        yield ResourceBundle(taken.cpus, taken.gpus, taken.node_id, can_move=True)


def plan_engine(demand: ResourceDemand, nodes: Sequence[ClusterNode], home: Sequence[str]) -> ResourceBundle:
    """A place for one engine more, rather on one of the hosts `home`. Raises `InsufficientResourcesError`, with what is
    free where."""
    hosts = FreeResources(nodes, any(node.gpus for node in nodes))
    at = [index for index, node in enumerate(nodes) if node.node_id in home]
    try:
        (bundle,) = _place_engines(msgspec.structs.replace(demand, engines=1), hosts, at)
    except PlacementError as error:
        devices = f"{demand.devices_per_engine} {_device_word(hosts.on_gpus, demand.devices_per_engine)}"
        needs = f"{devices}{' of one host' if demand.devices_per_engine > 1 else ''}"
        raise InsufficientResourcesError(
            f"another engine needs {needs} ({_describe_all_free(nodes)}): add a host, or ask for fewer generators"
        ) from error
    return bundle


def _pack_ranks(demand: ResourceDemand, hosts: FreeResources) -> list[int]:
    """The host of each rank: the index in `hosts.nodes`."""
    left, out, together = demand.ranks, list[int](), demand.ranks_per_host
    free = [hosts.count_free_processes(index) for index in hosts.host_indices()]
    while left:
        first = not out and demand.ranks > 1
        usable = [
            max(0, count - first * _receiver_takes_rank(hosts, i)) // together * together
            for i, count in enumerate(free)
        ]
        enough = [i for i in hosts.host_indices() if usable[i] >= left]
        if enough:
            after = {i: _count_engines_after(demand, hosts, free, i, left) for i in enough}
            best = min(
                enough,
                key=lambda i: (-min(after[i], demand.engines), _is_remote_host(hosts, i), -after[i], usable[i], i),
            )
        else:
            best = min(hosts.host_indices(), key=lambda i: (-usable[i], _is_remote_host(hosts, i), i), default=-1)
        if best < 0 or not usable[best]:
            raise PlacementError(_explain_unplaced_ranks(demand, hosts))
        count = min(left, usable[best])
        out += [best] * count
        free[best] -= count + first * _receiver_takes_rank(hosts, best)
        left -= count
    return out


def _is_remote_host(hosts: FreeResources, index: int) -> bool:
    """It is not the host where the run is started, which has its directory."""
    return not hosts.nodes[index].is_local


def _receiver_takes_rank(hosts: FreeResources, index: int) -> int:
    """Whether the actor that receives takes the place of a rank there."""
    return int(not hosts.on_gpus or hosts.free_cpus[index] <= hosts.free_gpus[index])


def _count_engines_after(
    demand: ResourceDemand, hosts: FreeResources, free: Sequence[int], index: int, count: int
) -> int:
    """Engines that fit when `count` ranks are put there."""
    width = demand.devices_per_engine if hosts.on_gpus else 1
    return sum((left - count * (i == index)) // width for i, left in enumerate(free))


def _explain_unplaced_ranks(demand: ResourceDemand, hosts: FreeResources) -> str:
    device = _device_word(hosts.on_gpus, demand.ranks)
    if demand.ranks_per_host > max((hosts.count_free_processes(index) for index in hosts.host_indices()), default=0):
        return (
            f"{demand.ranks_per_host} tensor-parallel ranks of the learner need {demand.ranks_per_host} {device} of one host "
            f"({_describe_all_free(hosts.nodes)}): lower `learner.parallel.tp`"
        )
    return (
        f"the learner's {demand.ranks} ranks need {demand.ranks} {device} ({_describe_all_free(hosts.nodes)}): lower "
        "`learner.parallel`, or add hosts"
    )


def _explain_unplaced_engine(demand: ResourceDemand, hosts: FreeResources, engine: int) -> str:
    wide = demand.devices_per_engine > 1 and hosts.on_gpus
    needs = f" of {demand.devices_per_engine} GPUs on one host" if wide else ""
    lower = "`generator.count`" + (" or `generator.engine_args.tensor_parallel_size`" if wide else "")
    share = ', set `generator.colocate` = "share"' if hosts.on_gpus and not wide else ""
    return (
        f"beside the learner's ranks ({demand.ranks}) there is a place for {engine} of {demand.engines} engines{needs} "
        f"({_describe_all_free(hosts.nodes)}): lower {lower}{share}, or add hosts"
    )


def _plan_colocated(demand: ResourceDemand, nodes: Sequence[ClusterNode]) -> ProcessLayout:
    """Engine number e is on the GPU of rank e modulo the number of ranks."""
    if demand.devices_per_engine > 1:
        raise PlacementError(
            f'`generator.colocate` = "{demand.colocate}": an engine over {demand.devices_per_engine} GPUs cannot be on those '
            "of the ranks: "
            "set `generator.engine_args.tensor_parallel_size` = 1, or colocate=off"
        )
    hosts = FreeResources(nodes, True)
    at = _pack_ranks(demand, hosts)
    alone = demand.ranks == 1
    here = [len(range(rank, demand.engines, demand.ranks)) for rank in range(demand.ranks)]
    bundles = [hosts.take_bundle(index, 1, 1 + here[rank] + (not alone and not rank)) for rank, index in enumerate(at)]
    if any(cpus < 0 for cpus in hosts.free_cpus):
        raise PlacementError(f"{demand.engines} engines beside the ranks need a CPU each ({_describe_all_free(nodes)})")
    ranks = [BundleShare(rank, _gpu_share(1 + here[rank])) for rank in range(demand.ranks)]
    engines = [ranks[engine % demand.ranks] for engine in range(demand.engines)]
    return ProcessLayout(bundles, ranks[0] if alone else BundleShare(0, 0.0), [] if alone else ranks, engines)


def _gpu_share(count: int) -> float:
    """Of a GPU, for each of `count` processes."""
    return GPU_SHARE_UNITS // count / GPU_SHARE_UNITS


def _device_word(gpus: bool, count: int) -> str:
    return ("GPU" if gpus else "CPU") + "s" * (count != 1)


def _describe_all_free(nodes: Sequence[ClusterNode]) -> str:
    """What is free, of how much, on each host."""
    if not nodes:
        return "there is no host"
    alike = [(describe_free(node), node.name) for node in nodes]
    parts = []
    for text, group in groupby(sorted(alike), lambda pair: pair[0]):
        names = [name for _, name in group]
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        parts.append(f"{shown}: {text}")
    return "; ".join(parts)


def describe_free(node: ClusterNode) -> str:
    """What is free of a host."""

    def of(free: float, total: float, what: str) -> str:
        return f"{total:g} {what}" if free == total else f"{free:g} of {total:g} {what} free"

    both = [of(node.free_gpus, node.gpus, "GPUs")] if node.gpus else ["no GPU"]
    return ", ".join([*both, of(node.free_cpus, node.cpus, "CPUs")])


# -- hosts that are only supposed --------------------------------------------------------------------------------------

SUPPOSED_CPUS = 1024
"""Of a supposed host: CPUs do not decide there."""


def make_supposed_hosts(count: int, gpus: int) -> list[ClusterNode]:
    """So many hosts that are alike and free, with so many GPUs each."""
    return [
        ClusterNode(
            f"host-{i}",
            f"host {i + 1}",
            SUPPOSED_CPUS,
            gpus,
            SUPPOSED_CPUS,
            gpus,
            memory_bytes=0.0,
            accelerator_type="",
        )
        for i in range(count)
    ]


def find_smallest_layout(demand: ResourceDemand, gpus_per_node: int) -> tuple[ProcessLayout, list[ClusterNode]]:
    """On as few hosts of so many GPUs as will do. Raises `PlacementError` where no number of them does."""
    fewest = -(-demand.ranks // gpus_per_node)
    most = demand.ranks + demand.engines
    for count in range(max(1, fewest), max(1, fewest, most) + 1):
        nodes = make_supposed_hosts(count, gpus_per_node)
        try:
            return plan_layout(demand, nodes), nodes
        except PlacementError as error:
            refused = error
    raise refused


# Gives the processes of a run their places on a cluster: the rules above say which, and the world reserves them.


WRITE_LANE, CHECKPOINT_LANE = "write", "checkpoint"
"""The threads of a rank's own for `write_version` and `write_checkpoint`. Another one makes every other call."""


def rank_placement(config: Config) -> ActorOptions:
    """Of a rank that is an actor, beside whoever starts it."""
    return ActorOptions(
        config.learner.threads, max_concurrency=1, concurrency_groups=(WRITE_LANE, CHECKPOINT_LANE), same_node=True
    )


@dataclass(frozen=True)
class RunPlacements:
    """`learner`, and `ranks` if they are actors of their own; `engines` of generators. `layout`: what was planned."""

    layout: ProcessLayout
    reservation: Reservation
    learner: ActorOptions
    ranks: list[ActorOptions]
    engines: list[ActorOptions]


def reserve_placements(world: World, config: Config, with_engines: bool = True) -> RunPlacements:
    """Reserve them, within `cluster.wait_seconds`. Blocking. `with_engines`: none for supervised training. Raises
    `PlacementError` at once if the cluster cannot hold the run, and `RunFailed` if others use it."""
    demand = ResourceDemand.from_config(config, with_engines)
    made: list[ProcessLayout] = []

    def plan(nodes: Sequence[ClusterNode]) -> list[ResourceBundle]:
        made.append(plan_free_layout(demand, nodes))
        return made[-1].bundles

    seconds = config.cluster.wait_seconds
    try:
        reservation = world.actors.reserve_bundles(plan, seconds)
    except InsufficientResourcesError as error:
        raise RunFailed(f"{error} (waited {seconds:g} s, cluster.wait_seconds)") from error
    layout = made[-1]

    def at(placement: ActorOptions, seat: BundleShare) -> ActorOptions:
        return replace(placement, gpus=seat.gpus, same_node=False, reserved_bundle=(reservation, seat.bundle))

    generator = config.generator
    playing = ActorOptions(generator.threads, max_restarts=generator.max_restarts)
    return RunPlacements(
        layout,
        reservation,
        at(ActorOptions(config.learner.threads), layout.learner),
        [at(rank_placement(config), seat) for seat in layout.ranks],
        [at(playing, seat) for seat in layout.engines],
    )


# Generators on a host that does not see the files of the run: what they are given of its model, and who gets their events.
#
# Nothing of a run needs a file system that its hosts share but what the learner writes, if its ranks are on several hosts. A host
# without the model's directory gets everything in it but the weights, which come as any version does: the engine begins with
# made-up ones, and plays when those of the run are installed and verified.


WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"})
"""Suffixes of what is not sent."""
MAX_MODEL_FILES_BYTES = 512 * 2**20
"""Of all that is sent."""


class RemoteModelFiles(NamedTuple):
    """A model directory at `path` of the host where the run was started. `files_ref`: what `Actors.put` returned for the
    files in it that are no weights."""

    path: str
    files_ref: Any


def publish_model_files(world: World, path: Path) -> RemoteModelFiles:
    """For hosts that do not have it. Raises `RunFailed` if it is too large for a model without its weights."""
    files, given, total = world.files, dict[str, bytes](), 0
    for name in files.list_names(path):
        found = files.stat(path / name)
        if found is None or found.is_directory or Path(name).suffix in WEIGHT_SUFFIXES:
            continue
        given[name] = read_file(path / name, files=files)
        if (total := total + len(given[name])) > MAX_MODEL_FILES_BYTES:
            raise RunFailed(
                f"{path} has more than {MAX_MODEL_FILES_BYTES:,} bytes beside its weights: is it a model directory?"
            )
    if TENSOR_NAMES_FILE not in given and (names := _tensor_names(path, world)):
        given[TENSOR_NAMES_FILE] = msgspec.json.encode(names)
    return RemoteModelFiles(str(path), world.actors.put(given))


def _tensor_names(path: Path, world: World) -> list[str]:
    if not any(name.endswith(".safetensors") for name in world.files.list_names(path)):
        return []
    from r3async.rollout.vllm.engine import read_tensor_names

    return sorted(read_tensor_names(path))


def fetch_model_files(world: World, model: str | RemoteModelFiles, run_dir: Path) -> str:
    """The directory of the model on this host. Blocking."""
    if isinstance(model, str):
        return model
    files, path = world.files, Path(model.path)
    if files.stat(path / "config.json") is not None:
        return model.path
    here = run_dir / "model-of-the-run"
    make_directory(here, files=files)
    for name, data in world.actors.get(model.files_ref).items():
        replace_file(here / name, data, files=files)
    return str(here)


def shares_run_directory(run_dir: Path, lineage: int, files: Files) -> bool:
    """Whether this host sees the directory in which that start of the run was noted before any of its processes began."""
    starts = read_run_starts(run_dir, files=files) or []
    return starts[-1:] != [] and starts[-1].lineage == lineage


def check_shares_run_directory(info: Mapping[str, Any], run_dir: Path) -> None:
    """Raises `RunFailed` if the learner, by what it reported of itself, would write where nobody finds it."""
    if not info.get("sees_run", True):
        raise RunFailed(
            f"the learner is on host {info['host']}, which does not see {run_dir.absolute()}, where the run was started and "
            "its records and checkpoints are: start the run on that host, or put its directory where both see it (--runs)"
        )
