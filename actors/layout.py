"""Where the processes of a run go: which hosts the learner's ranks and the engines are on, or why they cannot be.

Pure. `--dry-run`, `r3async cluster` and the run ask the same function, `lay_out`: on hosts that are supposed, on those that a
cluster has, and on what is free there.

1. A rank has a GPU of its own, an engine as many as it is divided among, all on one host.
2. Tensor-parallel ranks, which are next to each other, are on one host. Ranks are packed: on as few hosts as possible, in their
   order, so that those of a pipeline stage are neighbours too.
3. Of hosts that serve the ranks equally well, those are taken that leave every engine a place; then that where the run is
   started, which has its directory; then those that leave most engines a place.
4. Engines are on the learner's hosts first, where its weights are, then on the others, one host after the other.
5. With `generator.colocate` an engine is on a rank's GPU: "sleep" always, "share" where there are too few GPUs for both.
6. On hosts without GPUs the same with CPUs, one for each process; engines then spread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import msgspec

from r3async.config import Config, ConfigError
from r3async.world import Bundle, Node, NotFree

SHARE_DIGITS = 10_000
"""Ray counts in so many parts of a GPU."""


class Unplaceable(ConfigError):
    """The hosts cannot hold the run. Says what it needs, what they have and what to change."""


class Demand(msgspec.Struct, frozen=True):
    """What a run needs. `together`: neighbouring ranks that must share a host. `width`: GPUs of one engine. `colocate`: see
    `generator.colocate`."""

    ranks: int
    together: int
    engines: int
    width: int
    colocate: str = "off"

    @staticmethod
    def of(config: Config, engines: bool = True) -> Demand:
        """`engines`: none for supervised training."""
        parallel, generator = config.learner.parallel, config.generator
        count = generator.count if engines else 0
        return Demand(parallel.world, parallel.tp, count, engine_width(config), generator.colocate)


def engine_width(config: Config) -> int:
    """Devices that one engine is divided among."""
    args = config.generator.engine_args
    return int(args.get("tensor_parallel_size", 1)) * int(args.get("data_parallel_size", 1))


class Seat(msgspec.Struct, frozen=True):
    """Of one actor: `bundle` of the layout, and how much of its GPUs: a share where others are on the same one."""

    bundle: int
    gpus: float


class Layout(msgspec.Struct, frozen=True):
    """`learner`: of the actor that receives and packs; with one rank it is that rank, and `ranks` is empty. `bundles` name their
    hosts by `Node.key`."""

    bundles: list[Bundle]
    learner: Seat
    ranks: list[Seat]
    engines: list[Seat]

    @property
    def gpus(self) -> int:
        return int(sum(bundle.gpus for bundle in self.bundles))

    @property
    def shared(self) -> bool:
        """Engines are on GPUs of ranks."""
        return any(seat.gpus % 1 for seat in self.engines)

    def host(self, seat: Seat) -> str:
        return self.bundles[seat.bundle].node

    def training(self) -> list[str]:
        """The host of each rank."""
        return [self.host(seat) for seat in self.ranks or [self.learner]]

    def describe(self, names: Sequence[Node]) -> list[str]:
        """A line for each host that is used."""
        ranks, engines = self.training(), [self.host(seat) for seat in self.engines]
        lines = []
        for node in names:
            here = [f"{_span('rank', ranks, node.key)} of the learner"] if node.key in ranks else []
            if node.key in engines:
                here.append(_span("engine", engines, node.key) + (" on the ranks' GPUs" if self.shared else ""))
            if here:
                lines.append(f"{node.name}: {'; '.join(here)}")
        return lines


def _span(what: str, hosts: Sequence[str], key: str) -> str:
    at = [index for index, host in enumerate(hosts) if host == key]
    parts = []
    for _, run in groupby(enumerate(at), lambda pair: pair[1] - pair[0]):
        places = [place for _, place in run]
        parts.append(str(places[0]) if len(places) == 1 else f"{places[0]}-{places[-1]}")
    return f"{what}{'s' * (len(at) > 1)} {', '.join(parts)}"


class Hosts:
    """What is left on each host while processes are given places."""

    def __init__(self, nodes: Sequence[Node], gpus: bool):
        self.nodes, self.on_gpus = nodes, gpus
        self.cpus = [int(node.free_cpus) for node in nodes]
        self.gpus = [int(node.free_gpus) for node in nodes]

    def free(self, index: int) -> int:
        """Processes of one device each that still fit."""
        return min(self.cpus[index], self.gpus[index]) if self.on_gpus else self.cpus[index]

    def take(self, index: int, devices: int = 1, processes: int = 1) -> Bundle:
        """A bundle there, which does not move."""
        self.cpus[index] -= processes
        self.gpus[index] -= devices * self.on_gpus
        return Bundle(processes, devices * self.on_gpus, self.nodes[index].key)

    def engines(self, width: int, index: int) -> int:
        """How many of `width` devices still fit there."""
        return min(self.gpus[index] // width, self.cpus[index]) if self.on_gpus else self.cpus[index]

    def all(self) -> range:
        return range(len(self.nodes))


def lay_out(demand: Demand, nodes: Sequence[Node]) -> Layout:
    """Give every process a place on what is free of `nodes`. Raises `Unplaceable`."""
    on_gpus = any(node.gpus for node in nodes)
    if demand.colocate == "sleep" and on_gpus:
        return _colocated(demand, nodes)
    try:
        return _apart(demand, nodes, on_gpus)
    except Unplaceable:
        if demand.colocate != "share" or not on_gpus:
            raise
    return _colocated(demand, nodes)


def lay_out_free(demand: Demand, nodes: Sequence[Node]) -> Layout:
    """The same for a run that starts. Raises `NotFree`, with what is free where, if others have what it needs of the hosts."""
    lay_out(demand, [whole(node) for node in nodes])
    try:
        return lay_out(demand, nodes)
    except Unplaceable as error:
        raise NotFree(f"the cluster could hold the run, but others use it: {error}") from error


def whole(node: Node) -> Node:
    """The host as it is when nobody uses it."""
    return replace(node, free_cpus=node.cpus, free_gpus=node.gpus)


def _apart(demand: Demand, nodes: Sequence[Node], on_gpus: bool) -> Layout:
    hosts = Hosts(nodes, on_gpus)
    at = _pack_ranks(demand, hosts)
    alone = demand.ranks == 1
    # The actor that receives and packs is on the host of the first rank, whose bundle has a process more for it.
    bundles = [hosts.take(index, 1, 1 if alone or rank else 2) for rank, index in enumerate(at)]
    share = float(on_gpus)
    ranks = [Seat(index, share) for index in range(demand.ranks)]
    engines = []
    for bundle in _engine_bundles(demand, hosts, at):
        engines.append(Seat(len(bundles), bundle.gpus))
        bundles.append(bundle)
    return Layout(bundles, ranks[0] if alone else Seat(0, 0.0), [] if alone else ranks, engines)


def _engine_bundles(demand: Demand, hosts: Hosts, at: Sequence[int]) -> Iterator[Bundle]:
    for engine in range(demand.engines):
        places = [index for index in hosts.all() if hosts.engines(demand.width, index) > 0]
        if not places:
            raise Unplaceable(_no_engine(demand, hosts, engine))
        if hosts.on_gpus:
            best = min(places, key=lambda index: (index not in at, index))
        else:
            best = min(places, key=lambda index: (-hosts.cpus[index], index))
        taken = hosts.take(best, demand.width)
        yield Bundle(taken.cpus, taken.gpus, taken.node, moves=True)


def lay_out_engine(demand: Demand, nodes: Sequence[Node], home: Sequence[str]) -> Bundle:
    """A place for one engine more, rather on one of the hosts `home`. Raises `NotFree`, with what is free where."""
    hosts = Hosts(nodes, any(node.gpus for node in nodes))
    at = [index for index, node in enumerate(nodes) if node.key in home]
    try:
        (bundle,) = _engine_bundles(msgspec.structs.replace(demand, engines=1), hosts, at)
    except Unplaceable as error:
        needs = f"{demand.width} {_device(hosts.on_gpus, demand.width)}{' of one host' if demand.width > 1 else ''}"
        raise NotFree(
            f"another engine needs {needs} ({_has(nodes)}): add a host, or ask for fewer generators"
        ) from error
    return bundle


def _pack_ranks(demand: Demand, hosts: Hosts) -> list[int]:
    """The host of each rank: the index in `hosts.nodes`."""
    left, out, together = demand.ranks, list[int](), demand.together
    free = [hosts.free(index) for index in hosts.all()]
    while left:
        first = not out and demand.ranks > 1
        usable = [max(0, count - first * _receives(hosts, i)) // together * together for i, count in enumerate(free)]
        enough = [i for i in hosts.all() if usable[i] >= left]
        if enough:
            after = {i: _engines_after(demand, hosts, free, i, left) for i in enough}
            best = min(enough, key=lambda i: (-min(after[i], demand.engines), _away(hosts, i), -after[i], usable[i], i))
        else:
            best = min(hosts.all(), key=lambda i: (-usable[i], _away(hosts, i), i), default=-1)
        if best < 0 or not usable[best]:
            raise Unplaceable(_no_ranks(demand, hosts))
        count = min(left, usable[best])
        out += [best] * count
        free[best] -= count + first * _receives(hosts, best)
        left -= count
    return out


def _away(hosts: Hosts, index: int) -> bool:
    """It is not the host where the run is started, which has its directory."""
    return not hosts.nodes[index].home


def _receives(hosts: Hosts, index: int) -> int:
    """Whether the actor that receives takes the place of a rank there."""
    return int(not hosts.on_gpus or hosts.cpus[index] <= hosts.gpus[index])


def _engines_after(demand: Demand, hosts: Hosts, free: Sequence[int], index: int, count: int) -> int:
    """Engines that fit when `count` ranks are put there."""
    width = demand.width if hosts.on_gpus else 1
    return sum((left - count * (i == index)) // width for i, left in enumerate(free))


def _no_ranks(demand: Demand, hosts: Hosts) -> str:
    device = _device(hosts.on_gpus, demand.ranks)
    if demand.together > max((hosts.free(index) for index in hosts.all()), default=0):
        return (
            f"{demand.together} tensor-parallel ranks of the learner need {demand.together} {device} of one host "
            f"({_has(hosts.nodes)}): lower `learner.parallel.tp`"
        )
    return (
        f"the learner's {demand.ranks} ranks need {demand.ranks} {device} ({_has(hosts.nodes)}): lower `learner.parallel`, or "
        "add hosts"
    )


def _no_engine(demand: Demand, hosts: Hosts, engine: int) -> str:
    wide = demand.width > 1 and hosts.on_gpus
    needs = f" of {demand.width} GPUs on one host" if wide else ""
    lower = "`generator.count`" + (" or `generator.engine_args.tensor_parallel_size`" if wide else "")
    share = ', set `generator.colocate` = "share"' if hosts.on_gpus and not wide else ""
    return (
        f"beside the learner's ranks ({demand.ranks}) there is a place for {engine} of {demand.engines} engines{needs} "
        f"({_has(hosts.nodes)}): lower {lower}{share}, or add hosts"
    )


def _colocated(demand: Demand, nodes: Sequence[Node]) -> Layout:
    """Engine number e is on the GPU of rank e modulo the number of ranks."""
    if demand.width > 1:
        raise Unplaceable(
            f'`generator.colocate` = "{demand.colocate}": an engine over {demand.width} GPUs cannot be on those of the ranks: '
            "set `generator.engine_args.tensor_parallel_size` = 1, or colocate=off"
        )
    hosts = Hosts(nodes, True)
    at = _pack_ranks(demand, hosts)
    alone = demand.ranks == 1
    here = [len(range(rank, demand.engines, demand.ranks)) for rank in range(demand.ranks)]
    bundles = [hosts.take(index, 1, 1 + here[rank] + (not alone and not rank)) for rank, index in enumerate(at)]
    if any(cpus < 0 for cpus in hosts.cpus):
        raise Unplaceable(f"{demand.engines} engines beside the ranks need a CPU each ({_has(nodes)})")
    ranks = [Seat(rank, _part(1 + here[rank])) for rank in range(demand.ranks)]
    engines = [ranks[engine % demand.ranks] for engine in range(demand.engines)]
    return Layout(bundles, ranks[0] if alone else Seat(0, 0.0), [] if alone else ranks, engines)


def _part(count: int) -> float:
    """Of a GPU, for each of `count` processes."""
    return SHARE_DIGITS // count / SHARE_DIGITS


def _device(gpus: bool, count: int) -> str:
    return ("GPU" if gpus else "CPU") + "s" * (count != 1)


def _has(nodes: Sequence[Node]) -> str:
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


def describe_free(node: Node) -> str:
    """What is free of a host."""

    def of(free: float, total: float, what: str) -> str:
        return f"{total:g} {what}" if free == total else f"{free:g} of {total:g} {what} free"

    both = [of(node.free_gpus, node.gpus, "GPUs")] if node.gpus else ["no GPU"]
    return ", ".join([*both, of(node.free_cpus, node.cpus, "CPUs")])


# -- hosts that are only supposed --------------------------------------------------------------------------------------

MANY_CPUS = 1024
"""Of a supposed host: CPUs do not decide there."""


def supposed_hosts(count: int, gpus: int) -> list[Node]:
    """So many hosts that are alike and free, with so many GPUs each."""
    return [
        Node(f"host-{i}", f"host {i + 1}", MANY_CPUS, gpus, MANY_CPUS, gpus, memory=0.0, accelerator="")
        for i in range(count)
    ]


def hosts_needed(demand: Demand, gpus_per_node: int) -> tuple[Layout, list[Node]]:
    """On as few hosts of so many GPUs as will do. Raises `Unplaceable` where no number of them does."""
    fewest = -(-demand.ranks // gpus_per_node)
    most = demand.ranks + demand.engines
    for count in range(max(1, fewest), max(1, fewest, most) + 1):
        nodes = supposed_hosts(count, gpus_per_node)
        try:
            return lay_out(demand, nodes), nodes
        except Unplaceable as error:
            refused = error
    raise refused
