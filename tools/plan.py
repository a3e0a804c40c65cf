"""`r3async train … --dry-run`: everything that can be known of a run before it starts, and whether that fits together; and
`r3async cluster`: what a run needs beside what a Ray cluster has."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from r3async.config import Config, ConfigError
from r3async.data.model_shape import ModelShape, RoutingShape
from r3async.data.records import SCHEMA
from r3async.schedule.admission import age_bound, slots_of
from r3async.schedule.groups import HEADER_BYTES, largest_buffer
from r3async.tools.memory import (
    GIB,
    GPU_PARAMETERS,
    WIDTH,
    EngineMemory,
    RankMemory,
    adapted,
    check_trained,
    engine_memory,
    rank_memory,
    shape_of,
)

CPU_HEAD_DIM = 32
"""Values of a head, at least, that vLLM's attention on CPU takes."""
ADDED_BY_LEARNER = ("episode", "place", "advantages", "loss_weights", "old_logprobs", "reference_logprobs")
PUBLISHED_VERSIONS = 2
ENGINE_SHARE = 0.9
"""Of a GPU's memory that vLLM takes, unless `generator.engine_args.gpu_memory_utilization` says otherwise."""


class Process(msgspec.Struct, frozen=True):
    """Processes of one kind. `gpus` of each."""

    role: str
    count: int
    cpus: int
    gpus: int
    what: str


class Plan(msgspec.Struct, frozen=True):
    """What a run is made of. Bytes are at most: every episode as long as it may be."""

    model: str
    source: str
    parameters: int
    active: int
    device: str
    processes: list[Process]
    slots: int
    staleness_bound: int
    episodes_per_step: int
    tokens_per_step: int
    wire_bytes_per_token: int
    wire_bytes_per_step: int
    buffer_bytes: int
    version_bytes: int
    rank: RankMemory
    engine: EngineMemory
    notes: list[str]

    @property
    def gpus(self) -> int:
        return sum(p.count * p.gpus for p in self.processes)

    @property
    def cpus(self) -> int:
        return sum(p.count * p.cpus for p in self.processes)


def wire_bytes(routing: RoutingShape | None) -> int:
    """Bytes of one token on the wire, from the schema: every column that an engine's side fills."""
    sizes = {"layers": routing.layers, "top_k": routing.top_k} if routing else {}
    total = 0
    for column in SCHEMA.columns.values():
        if column.name in ADDED_BY_LEARNER or (column.optional and routing is None) or column.sets:
            continue
        wide = column.inner and routing is not None and routing.num_experts > 256
        dtype = np.dtype(column.dtypes[-1 if wide else 0])
        total += math.prod(sizes[d] for d in column.inner) * dtype.itemsize
    return total


def make_plan(config: Config) -> Plan:
    """Work a run out. Raises `ConfigError`, naming the setting and the fix, for what cannot run."""
    from r3async.rollout.evaluation import check_environment
    from r3async.tools.rows import describe_rows

    check_environment(config)
    shape, source = shape_of(config)
    check_trained(shape, config.learner)
    on_gpus = shape.parameters > GPU_PARAMETERS
    rank, engine = rank_memory(shape, config), engine_memory(shape, config)
    routing = shape.routing if config.routing.replay == "rollout" else None
    schedule, world = config.schedule, config.learner.parallel.world
    slots = slots_of(schedule)
    episodes = schedule.groups_per_step * schedule.samples_per_group
    rows = config.episode.max_turns if config.episode.rows == "stepwise" else 1
    tokens = rows * config.episode.max_total_tokens
    per_token = wire_bytes(routing)
    plan = Plan(
        model=shape.name,
        source=source,
        parameters=shape.parameters,
        active=shape.active,
        device="GPU" if on_gpus else "CPU, or shares of GPUs",
        processes=_processes(config, engine, on_gpus),
        slots=slots,
        staleness_bound=age_bound(config.schedule),
        episodes_per_step=episodes,
        tokens_per_step=episodes * tokens,
        wire_bytes_per_token=per_token,
        wire_bytes_per_step=episodes * (tokens * per_token + HEADER_BYTES),
        buffer_bytes=largest_buffer(config, shape.routing),
        version_bytes=shape.parameters * WIDTH[config.generator.dtype],
        rank=rank,
        engine=engine,
        notes=[*describe_rows(config), *_notes(config, shape, engine, world, on_gpus)],
    )
    _check(config, shape, plan, on_gpus)
    return plan


def _processes(config: Config, engine: EngineMemory, on_gpus: bool) -> list[Process]:
    p, learner, generator = config.learner.parallel, config.learner, config.generator
    out = [
        Process("driver", 1, 0, 0, "this command: the live view, sinks"),
        Process("conductor", 1, 0, 0, "leases, versions, metrics"),
    ]
    if p.world == 1:
        out.append(Process("learner", 1, 1, int(on_gpus), f"{learner.backend}: receives, packs, trains"))
    else:
        out.append(Process("learner", 1, 1, 0, "receives and packs"))
        layout = f"dp {p.dp} x tp {p.tp} x pp {p.pp}, experts over {p.ep}"
        out.append(Process("learner rank", p.world, 1, int(on_gpus), f"{learner.backend}: {layout}"))
    what = f"{generator.engine}, {generator.concurrency} episodes at once"
    out.append(Process("generator", generator.count, 1, engine.devices * on_gpus, what))
    return out


def _check(config: Config, shape: ModelShape, plan: Plan, on_gpus: bool) -> None:
    """Raise `ConfigError` for what would fail, late, when it runs."""
    episode, transport = config.episode, config.transport
    if config.routing.replay != "off" and shape.routing is None:
        raise ConfigError(f'{shape.name} has no MoE layer to replay routes in: set `routing.replay` = "off"')
    if shape.positions and episode.max_total_tokens > shape.positions:
        raise ConfigError(
            f"`episode.max_total_tokens` = {episode.max_total_tokens} is more than the {shape.positions} positions of "
            f"{shape.name}"
        )
    largest = episode.max_total_tokens * plan.wire_bytes_per_token + HEADER_BYTES
    if largest > transport.max_message_bytes:
        raise ConfigError(
            f"`transport.max_message_bytes` = {transport.max_message_bytes} is less than a trajectory may have: set it to at "
            f"least {largest}"
        )
    if not on_gpus:
        if not shape.kv_rank and shape.head_dim < CPU_HEAD_DIM and config.generator.engine == "vllm":
            raise ConfigError(
                f"heads of {shape.head_dim} values, which vLLM on CPU refuses with the first request: it takes {CPU_HEAD_DIM} or "
                "more (hidden_size / heads; `model.init.heads` for a model that is made)"
            )
        return
    capacity = config.cluster.gpu_gib * GIB
    if plan.rank.total > capacity:
        raise ConfigError(
            f"a rank of the learner needs {plan.rank.total / GIB:.0f} GiB (weights and optimizer "
            f"{(plan.rank.weights + plan.rank.optimizer) / GIB:.0f}, activations {plan.rank.activations / GIB:.0f}) of "
            f"`cluster.gpu_gib` = {config.cluster.gpu_gib:g}: raise `learner.parallel`, set `learner.recompute`, or lower "
            "`learner.max_tokens_per_micro_batch`"
        )
    free = _kv_bytes(config, plan.engine)
    if free <= plan.engine.kv_per_token * episode.max_total_tokens:
        raise ConfigError(
            f"an engine's weights take {plan.engine.weights / GIB:.0f} GiB of a GPU of `cluster.gpu_gib` = "
            f"{config.cluster.gpu_gib:g} and have no free bytes for one episode: raise "
            "`generator.engine_args.tensor_parallel_size`"
        )


def _kv_bytes(config: Config, engine: EngineMemory) -> float:
    share = float(config.generator.engine_args.get("gpu_memory_utilization", ENGINE_SHARE))
    return share * config.cluster.gpu_gib * GIB - engine.weights


def _notes(config: Config, shape: ModelShape, engine: EngineMemory, world: int, on_gpus: bool) -> list[str]:
    """What is worth knowing, and what the actors cannot do yet."""
    notes = []
    schedule, generator = config.schedule, config.generator
    wanted = slots_of(schedule)
    episodes = wanted * schedule.samples_per_group
    if episodes < generator.count * generator.concurrency:
        notes.append(
            f"the slots allow {episodes} episodes at once, and generators could play {generator.count * generator.concurrency}: "
            "some of generator.concurrency will not be used"
        )
    free = _kv_bytes(config, engine) if on_gpus else generator.kv_cache_gib * GIB
    if engine.kv_needed > free:
        notes.append(
            f"{generator.concurrency} episodes of {config.episode.max_total_tokens} tokens would need "
            f"{size(engine.kv_needed)} of KV cache, and there are {size(free)}: when all are long, the engine preempts some"
        )
    if config.learner.lora.rank:
        made = adapted(shape, config.learner)
        notes.append(
            f"learner.lora: {number(made.parameters)} parameters are trained on a rank; of the weights that they are added to, "
            f"{size(made.weights * WIDTH[config.learner.dtype])} as in the start model are in host memory, for each rank"
        )
    if on_gpus and world > 1:
        notes.append(f"the learner's {world} ranks meet on 127.0.0.1: they need one host with {world} GPUs")
    if on_gpus and engine.devices > 1:
        notes.append(
            f"an engine over {engine.devices} GPUs: generator actors are given one GPU each as yet, so this starts only where "
            "vLLM is given its devices by other means"
        )
    return notes


def size(count: float) -> str:
    """Bytes for a person."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} B"


def number(count: float) -> str:
    """A count for a person."""
    for unit, factor in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f}"


def describe(plan: Plan, config: Config) -> str:
    """The plan as text."""
    schedule, rank, engine = config.schedule, plan.rank, plan.engine
    lines = [
        f"model       {plan.model}: {number(plan.parameters)} parameters, {number(plan.active)} used by a token ({plan.source})",
        f"devices     {plan.device}; {plan.cpus} CPUs"
        + (f", {plan.gpus} GPUs of {config.cluster.gpu_gib:g} GiB" * bool(plan.gpus)),
        "processes",
        *(
            f"  {p.count:>4} x {p.role:<14}{p.cpus} CPU{f', {p.gpus} GPU' if p.gpus else '':<8}  {p.what}"
            for p in plan.processes
        ),
        f"schedule    {schedule.groups_per_step} groups x {schedule.samples_per_group} episodes a step, {config.steps} steps",
        f"slots       {plan.slots} groups in flight at most",
        f"staleness   a trained token is at most {plan.staleness_bound} versions old",
        f"on the wire {plan.wire_bytes_per_token} bytes a token; at most {size(plan.wire_bytes_per_step)} a step "
        f"({number(plan.tokens_per_step)} tokens)",
        f"buffer      at most {size(plan.buffer_bytes)}, of transport.credit_bytes = {size(config.transport.credit_bytes)}"
        + (": trajectories may wait at their generators" if plan.buffer_bytes > config.transport.credit_bytes else ""),
        f"weights     {size(plan.version_bytes)} a version to each host; shared memory for {PUBLISHED_VERSIONS}: "
        f"{size(PUBLISHED_VERSIONS * plan.version_bytes)}",
        f"memory, a rank of the learner ({number(rank.parameters)} parameters), estimated",
        f"  weights {size(rank.weights)} + optimizer {size(rank.optimizer)} + activations {size(rank.activations)} "
        f"(recompute {config.learner.recompute}) + logits {size(rank.logits)} = {size(rank.total)}",
        f"memory, an engine{f', each of {engine.devices} GPUs' if engine.devices > 1 else ''}",
        f"  weights {size(engine.weights)}, KV cache {size(engine.kv_per_token)} a token",
        *(f"note: {note}" for note in plan.notes),
    ]
    return "\n".join(lines)


def as_json(plan: Plan) -> dict[str, Any]:
    """Plain data, with the totals."""
    out = msgspec.to_builtins(plan)
    return out | {"gpus": plan.gpus, "cpus": plan.cpus, "rank_bytes": plan.rank.total}


def print_plan(config: Config, as_object: bool = False) -> None:
    """Validate, and print the plan to stdout. Raises as `make_plan` does, and for a structure that cannot start."""
    from r3async.tools.hub import with_model
    from r3async.tools.structure import check_directory, check_structure

    config = with_model(config, fetch=False)
    check_directory(config)
    plan = make_plan(config)
    check_structure(config)
    print(json.dumps(as_json(plan)) if as_object else describe(plan, config))


# -- a cluster ---------------------------------------------------------------------------------------------------------

QUERY_SECONDS = 15

GPU_GIB = {
    **{"T4": 16, "L4": 24, "A10G": 24, "L40S": 48, "A100-40G": 40, "A100-80G": 80},
    **{"H20": 96, "H100": 80, "H200": 141, "B200": 180, "GB200": 186, "B300": 288, "GB300": 288},
}
"""By Ray's `accelerator_type`: GiB of one device, from NVIDIA's data sheets. A plain A100 may be either."""


class Node(msgspec.Struct, frozen=True):
    """One alive machine of the cluster and its resources, free or not."""

    name: str
    cpus: float
    gpus: float
    memory: float
    accelerator: str = ""


class Fit(msgspec.Struct, frozen=True):
    """`problems`: why the run cannot start there; none, and it can."""

    nodes: list[Node]
    problems: list[str]


def read_nodes(states: Sequence[Any]) -> list[Node]:
    """Nodes from Ray's state API (`ray.util.state.list_nodes`)."""
    out = []
    for state in states:
        if state.state != "ALIVE":
            continue
        total = state.resources_total or {}
        kinds = [key.removeprefix("accelerator_type:") for key in total if key.startswith("accelerator_type:")]
        out.append(
            Node(
                state.node_name or state.node_ip,
                float(total.get("CPU", 0)),
                float(total.get("GPU", 0)),
                float(total.get("memory", 0)),
                kinds[0] if kinds else "",
            )
        )
    return out


def ask_cluster(address: str) -> list[Node]:
    """The nodes of the cluster whose dashboard is at `address` (http). Raises what Ray raises."""
    from ray.util.state import list_nodes

    return read_nodes(list_nodes(address=address, detail=True, timeout=QUERY_SECONDS))


def check_fit(plan: Plan, config: Config, nodes: Sequence[Node]) -> Fit:
    """Whether every process finds a place. Counts what the cluster has, not what is free: other jobs come and go."""
    problems = []
    cpus, gpus = sum(n.cpus for n in nodes), sum(n.gpus for n in nodes)
    if plan.cpus > cpus:
        problems.append(
            f"the run needs {plan.cpus} CPUs, and the cluster has {cpus:g}: lower `generator.count`, or add nodes"
        )
    if plan.gpus > gpus:
        problems.append(
            f"the run needs {plan.gpus} GPUs, and the cluster has {gpus:g}: lower `generator.count` or `learner.parallel`, or "
            "add nodes"
        )
    widest = max((n.gpus for n in nodes), default=0.0)
    for process in plan.processes:
        if process.gpus > max(widest, 1):
            problems.append(
                f"one {process.role} needs {process.gpus} GPUs on one node, and the largest has {widest:g}: lower "
                "`generator.engine_args.tensor_parallel_size`"
            )
    ranks = config.learner.parallel.world
    if plan.gpus and ranks > widest:
        problems.append(
            f"the learner's {ranks} ranks meet on one host, and the largest has {widest:g} GPUs: lower `learner.parallel`"
        )
    problems += [p for n in nodes if plan.gpus and (p := _too_small(n, plan, config))]
    if not plan.gpus:
        wanted = plan.rank.total * config.learner.parallel.world + config.generator.count * plan.engine.weights
        memory = sum(n.memory for n in nodes)
        if nodes and wanted > memory:
            problems.append(f"the run needs {wanted / GIB:.1f} GiB of memory, and the cluster has {memory / GIB:.1f}")
    return Fit(list(nodes), problems)


def _too_small(node: Node, plan: Plan, config: Config) -> str:
    has = GPU_GIB.get(node.accelerator)
    if not node.gpus or has is None or has >= config.cluster.gpu_gib or has * GIB >= plan.rank.total:
        return ""
    return (
        f"{node.name} has GPUs of {has} GiB ({node.accelerator}), and the plan is for `cluster.gpu_gib` = "
        f"{config.cluster.gpu_gib:g}: set that to {has}, and the plan will say what to change"
    )


def describe_fit(fit: Fit, plan: Plan) -> str:
    """Needs and possessions as text."""
    lines = [f"needs   {plan.cpus} CPUs, {plan.gpus} GPUs"]
    for node in fit.nodes:
        kind = f" ({node.accelerator})" if node.accelerator else ""
        lines.append(f"has     {node.name}: {node.cpus:g} CPUs, {node.gpus:g} GPUs{kind}, {node.memory / GIB:.1f} GiB")
    lines += [f"does not fit: {problem}" for problem in fit.problems] or ["it fits"]
    return "\n".join(lines)
