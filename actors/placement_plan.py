"""The placement of a run's processes: seats on hosts, bundles of resources, and generators without
the run's files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import msgspec

from r3async.actors.weight_transport import (
    check_learner_reachable,
    choose_weight_backend,
    with_loopback_host,
)
from r3async.config import Config, ConfigError
from r3async.world import ClusterNode, InsufficientResourcesError, ResourceBundle

GPU_SHARE_UNITS = 10_000
"""Number of parts of a GPU in which Ray counts."""


class PlacementError(ConfigError):
    """The hosts cannot hold the run. The message says what it needs, what they have
    and what to change."""


class ResourceDemand(msgspec.Struct, frozen=True):
    """The resources that a run needs.

    Attributes:
        ranks: Number of the learner's ranks.
        ranks_per_host: Number of neighbouring ranks that must share a host.
        engines: Number of engines.
        devices_per_engine: Number of GPUs of one engine.
        colocate: The setting `generator.colocate`.
    """

    ranks: int
    ranks_per_host: int
    engines: int
    devices_per_engine: int
    colocate: str = "off"

    @staticmethod
    def from_config(config: Config, engines: bool = True) -> ResourceDemand:
        """Return the demand of a run with this configuration. `engines` is False for supervised
        training, which has none."""
        parallel = config.learner.parallel
        generator = config.generator
        count = generator.count if engines else 0
        return ResourceDemand(
            parallel.world_size,
            parallel.tp,
            count,
            count_engine_devices(config),
            generator.colocate,
        )


def count_engine_devices(config: Config) -> int:
    """Return the number of devices that one engine is divided among."""
    args = config.generator.engine_args
    return int(args.get("tensor_parallel_size", 1)) * int(args.get("data_parallel_size", 1))


class BundleShare(msgspec.Struct, frozen=True):
    """The seat of one actor: the number of its `bundle` in the layout, and how much of the bundle's
    GPUs it gets, which is a fraction if others are on the same GPU."""

    bundle: int
    gpus: float


class ProcessLayout(msgspec.Struct, frozen=True):
    """The places of all processes of a run.

    Attributes:
        bundles: Bundles of resources, which name their hosts by `ClusterNode.node_id`.
        learner: Seat of the actor that receives and packs. With one rank it is that rank, and
            `ranks` is empty.
        ranks: Seats of the ranks.
        engines: Seats of the engines.
    """

    bundles: list[ResourceBundle]
    learner: BundleShare
    ranks: list[BundleShare]
    engines: list[BundleShare]

    @property
    def gpu_count(self) -> int:
        return int(sum(bundle.gpus for bundle in self.bundles))

    @property
    def shares_gpus(self) -> bool:
        """True if engines are on GPUs of ranks."""
        return any(seat.gpus % 1 for seat in self.engines)

    def host_of(self, seat: BundleShare) -> str:
        return self.bundles[seat.bundle].node_id

    def rank_hosts(self) -> list[str]:
        """Return the host of each rank."""
        return [self.host_of(seat) for seat in self.ranks or [self.learner]]

    def describe_hosts(self, names: Sequence[ClusterNode]) -> list[str]:
        """Return one line of text for each host that is used."""
        ranks = self.rank_hosts()
        engines = [self.host_of(seat) for seat in self.engines]
        lines = []
        for node in names:
            here = (
                [f"{_format_ranges('rank', ranks, node.node_id)} of the learner"]
                if node.node_id in ranks
                else []
            )
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
    return f"{what}{'s' if len(at) > 1 else ''} {', '.join(parts)}"


class FreeResources:
    """The resources that are left on each host while processes are placed."""

    def __init__(self, nodes: Sequence[ClusterNode], on_gpus: bool):
        self.nodes = nodes
        self.on_gpus = on_gpus
        self.free_cpus = [int(node.free_cpus) for node in nodes]
        self.free_gpus = [int(node.free_gpus) for node in nodes]

    def count_free_processes(self, index: int) -> int:
        """Return how many processes of one device each still fit on a host."""
        return (
            min(self.free_cpus[index], self.free_gpus[index])
            if self.on_gpus
            else self.free_cpus[index]
        )

    def take_bundle(self, index: int, devices: int = 1, processes: int = 1) -> ResourceBundle:
        """Take a bundle from a host. The bundle does not move to another host."""
        self.free_cpus[index] -= processes
        self.free_gpus[index] -= devices * self.on_gpus
        return ResourceBundle(processes, devices * self.on_gpus, self.nodes[index].node_id)

    def count_free_engines(self, width: int, index: int) -> int:
        """Return how many engines of `width` devices each still fit on a host."""
        return (
            min(self.free_gpus[index] // width, self.free_cpus[index])
            if self.on_gpus
            else self.free_cpus[index]
        )

    def host_indices(self) -> range:
        return range(len(self.nodes))


def plan_layout(demand: ResourceDemand, nodes: Sequence[ClusterNode]) -> ProcessLayout:
    """Plan a place for every process on what is free of `nodes`. Raises `PlacementError`
    if there is none."""
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
    """Plan the places of a run that starts, like `plan_layout`. Raises
    `InsufficientResourcesError`, with what is free where, if the hosts could hold the run but
    others use what it needs."""
    plan_layout(demand, [with_all_free(node) for node in nodes])
    try:
        return plan_layout(demand, nodes)
    except PlacementError as error:
        raise InsufficientResourcesError(
            f"the cluster could hold the run, but others use it: {error}"
        ) from error


def with_all_free(node: ClusterNode) -> ClusterNode:
    """Return the host as it is when nobody uses it."""
    return replace(node, free_cpus=node.cpus, free_gpus=node.gpus)


def _plan_separate(
    demand: ResourceDemand, nodes: Sequence[ClusterNode], on_gpus: bool
) -> ProcessLayout:
    hosts = FreeResources(nodes, on_gpus)
    at = _pack_ranks(demand, hosts)
    alone = demand.ranks == 1
    # The actor that receives and packs is on the host of the first rank, whose bundle has one
    # more process for it.
    bundles = [
        hosts.take_bundle(index, 1, 1 if alone or rank else 2) for rank, index in enumerate(at)
    ]
    share = float(on_gpus)
    ranks = [BundleShare(index, share) for index in range(demand.ranks)]
    engines = []
    for bundle in _place_engines(demand, hosts, at):
        engines.append(BundleShare(len(bundles), bundle.gpus))
        bundles.append(bundle)
    return ProcessLayout(
        bundles, ranks[0] if alone else BundleShare(0, 0.0), [] if alone else ranks, engines
    )


def _place_engines(
    demand: ResourceDemand, hosts: FreeResources, at: Sequence[int]
) -> Iterator[ResourceBundle]:
    for engine in range(demand.engines):
        places = [
            index
            for index in hosts.host_indices()
            if hosts.count_free_engines(demand.devices_per_engine, index) > 0
        ]
        if not places:
            raise PlacementError(_explain_unplaced_engine(demand, hosts, engine))
        if hosts.on_gpus:
            best = min(places, key=lambda index: (index not in at, index))
        else:
            best = min(places, key=lambda index: (-hosts.free_cpus[index], index))
        taken = hosts.take_bundle(best, demand.devices_per_engine)
        yield ResourceBundle(taken.cpus, taken.gpus, taken.node_id, can_move=True)


def plan_engine(
    demand: ResourceDemand, nodes: Sequence[ClusterNode], home: Sequence[str]
) -> ResourceBundle:
    """Plan a place for one more engine, preferably on one of the hosts `home`. Raises
    `InsufficientResourcesError`, with what is free where, if there is none."""
    hosts = FreeResources(nodes, any(node.gpus for node in nodes))
    at = [index for index, node in enumerate(nodes) if node.node_id in home]
    try:
        (bundle,) = _place_engines(msgspec.structs.replace(demand, engines=1), hosts, at)
    except PlacementError as error:
        devices = (
            f"{demand.devices_per_engine} {_device_word(hosts.on_gpus, demand.devices_per_engine)}"
        )
        needs = f"{devices}{' of one host' if demand.devices_per_engine > 1 else ''}"
        raise InsufficientResourcesError(
            f"another engine needs {needs} ({_describe_all_free(nodes)}): add a host, or ask for "
            "fewer generators"
        ) from error
    return bundle


def _pack_ranks(demand: ResourceDemand, hosts: FreeResources) -> list[int]:
    """Return the host of each rank, as an index in `hosts.nodes`. Raises `PlacementError`."""
    left = demand.ranks
    out = list[int]()
    together = demand.ranks_per_host
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
                key=lambda i: (
                    -min(after[i], demand.engines),
                    _is_remote_host(hosts, i),
                    -after[i],
                    usable[i],
                    i,
                ),
            )
        else:
            best = min(
                hosts.host_indices(),
                key=lambda i: (-usable[i], _is_remote_host(hosts, i), i),
                default=-1,
            )
        if best < 0 or not usable[best]:
            raise PlacementError(_explain_unplaced_ranks(demand, hosts))
        count = min(left, usable[best])
        out += [best] * count
        free[best] -= count + first * _receiver_takes_rank(hosts, best)
        left -= count
    return out


def _is_remote_host(hosts: FreeResources, index: int) -> bool:
    """Return True if a host is not the one where the run is started, which has its directory."""
    return not hosts.nodes[index].is_local


def _receiver_takes_rank(hosts: FreeResources, index: int) -> int:
    """Return 1 if the actor that receives takes the place of a rank on a host, else 0."""
    return int(not hosts.on_gpus or hosts.free_cpus[index] <= hosts.free_gpus[index])


def _count_engines_after(
    demand: ResourceDemand, hosts: FreeResources, free: Sequence[int], index: int, count: int
) -> int:
    """Return how many engines fit on all hosts after `count` ranks are put on the host `index`."""
    width = demand.devices_per_engine if hosts.on_gpus else 1
    return sum((left - count * (i == index)) // width for i, left in enumerate(free))


def _explain_unplaced_ranks(demand: ResourceDemand, hosts: FreeResources) -> str:
    device = _device_word(hosts.on_gpus, demand.ranks)
    if demand.ranks_per_host > max(
        (hosts.count_free_processes(index) for index in hosts.host_indices()), default=0
    ):
        return (
            f"{demand.ranks_per_host} tensor-parallel ranks of the learner need "
            f"{demand.ranks_per_host} {device} of one host ({_describe_all_free(hosts.nodes)}): "
            "lower `learner.parallel.tp`"
        )
    return (
        f"the learner's {demand.ranks} ranks need {demand.ranks} {device} "
        f"({_describe_all_free(hosts.nodes)}): lower `learner.parallel`, or add hosts"
    )


def _explain_unplaced_engine(demand: ResourceDemand, hosts: FreeResources, engine: int) -> str:
    wide = demand.devices_per_engine > 1 and hosts.on_gpus
    needs = f" of {demand.devices_per_engine} GPUs on one host" if wide else ""
    lower = "`generator.count`" + (
        " or `generator.engine_args.tensor_parallel_size`" if wide else ""
    )
    share = ', set `generator.colocate` = "share"' if hosts.on_gpus and not wide else ""
    return (
        f"beside the learner's ranks ({demand.ranks}) there is a place for {engine} of "
        f"{demand.engines} engines{needs} ({_describe_all_free(hosts.nodes)}): lower "
        f"{lower}{share}, or add hosts"
    )


def _plan_colocated(demand: ResourceDemand, nodes: Sequence[ClusterNode]) -> ProcessLayout:
    """Plan a layout in which engine e is on the GPU of rank e modulo the number of ranks. Raises
    `PlacementError`."""
    if demand.devices_per_engine > 1:
        raise PlacementError(
            f'`generator.colocate` = "{demand.colocate}": an engine over '
            f"{demand.devices_per_engine} GPUs cannot be on those of the ranks: "
            "set `generator.engine_args.tensor_parallel_size` = 1, or colocate=off"
        )
    hosts = FreeResources(nodes, True)
    at = _pack_ranks(demand, hosts)
    alone = demand.ranks == 1
    here = [len(range(rank, demand.engines, demand.ranks)) for rank in range(demand.ranks)]
    bundles = [
        hosts.take_bundle(index, 1, 1 + here[rank] + (not alone and not rank))
        for rank, index in enumerate(at)
    ]
    if any(cpus < 0 for cpus in hosts.free_cpus):
        raise PlacementError(
            f"{demand.engines} engines beside the ranks need a CPU each "
            f"({_describe_all_free(nodes)})"
        )
    ranks = [BundleShare(rank, _gpu_share(1 + here[rank])) for rank in range(demand.ranks)]
    engines = [ranks[engine % demand.ranks] for engine in range(demand.engines)]
    return ProcessLayout(
        bundles, ranks[0] if alone else BundleShare(0, 0.0), [] if alone else ranks, engines
    )


def _gpu_share(count: int) -> float:
    """Return the share of a GPU that each of `count` processes gets."""
    return GPU_SHARE_UNITS // count / GPU_SHARE_UNITS


def _device_word(gpus: bool, count: int) -> str:
    return ("GPU" if gpus else "CPU") + ("s" if count != 1 else "")


def _describe_all_free(nodes: Sequence[ClusterNode]) -> str:
    """Describe what is free, of how much, on each host."""
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
    """Describe what is free on a host."""

    def of(free: float, total: float, what: str) -> str:
        return f"{total:g} {what}" if free == total else f"{free:g} of {total:g} {what} free"

    both = [of(node.free_gpus, node.gpus, "GPUs")] if node.gpus else ["no GPU"]
    return ", ".join([*both, of(node.free_cpus, node.cpus, "CPUs")])


# -- what travels between the places ---------------------------------------------------------------


def with_transport_host(config: Config, layout: ProcessLayout) -> Config:
    """Return the configuration of a run with this layout: an unset `transport.host` stays unset if
    the run has several hosts, where the learner takes the address of its own
    (`weight_transport.with_reachable_host`), and is loopback if it has one."""
    return (
        with_loopback_host(config)
        if len({bundle.node_id for bundle in layout.bundles}) == 1
        else config
    )


def check_transfers(config: Config, layout: ProcessLayout) -> None:
    """Check that trajectories reach the learner of a run with this layout, and its weights the
    engines. Raises `ConfigError` with the setting.

    The plan and the start call it for the hosts that they choose. When engine and learner are
    loaded, the conductor checks the transport of the weights again, with the devices that they see.
    """
    config = with_transport_host(config, layout)
    ranks = layout.rank_hosts()
    engines = [layout.host_of(seat) for seat in layout.engines]
    check_learner_reachable(config, ranks[0], engines)

    def gpus_of(seat: BundleShare) -> list[str]:
        return [f"{seat.bundle} of the layout"] if layout.bundles[seat.bundle].gpus else []

    sender = layout.ranks[0] if layout.ranks else layout.learner
    hosts = {*ranks, *engines}
    engine_gpus = [gpus_of(seat) for seat in layout.engines]
    choose_weight_backend(config, hosts, gpus_of(sender), engine_gpus, ranks)


# -- supposed hosts --------------------------------------------------------------------------------

SUPPOSED_CPUS = 1024
"""Number of CPUs of a supposed host, so large that CPUs never decide."""


def make_supposed_hosts(count: int, gpus: int) -> list[ClusterNode]:
    """Return `count` equal and free hosts with `gpus` GPUs each."""
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


def find_smallest_layout(
    demand: ResourceDemand, gpus_per_node: int
) -> tuple[ProcessLayout, list[ClusterNode]]:
    """Return a layout on the smallest sufficient number of hosts with `gpus_per_node` GPUs each,
    and these hosts. Raises `PlacementError` if no number of them suffices."""
    fewest = -(-demand.ranks // gpus_per_node)
    most = demand.ranks + demand.engines
    for count in range(max(1, fewest), max(1, fewest, most) + 1):
        nodes = make_supposed_hosts(count, gpus_per_node)
        try:
            return plan_layout(demand, nodes), nodes
        except PlacementError as error:
            refused = error
    raise refused
