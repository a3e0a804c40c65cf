"""`r3async train … --dry-run`: everything that can be known of a run before it starts, and whether that fits together."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from r3async.actors.layout import Demand, hosts_needed
from r3async.config import Config, ConfigError, check_policy_loss
from r3async.data.model_shape import ModelShape, RoutingShape
from r3async.data.records import SCHEMA
from r3async.data.written import WIDTH, WrittenBytes
from r3async.schedule.admission import age_bound, slots_of
from r3async.schedule.groups import HEADER_BYTES, largest_buffer
from r3async.tools.adapted import adapted
from r3async.tools.layouts import recommended
from r3async.tools.memory import (
    GIB,
    GPU_PARAMETERS,
    EngineMemory,
    RankMemory,
    check_trained,
    engine_memory,
    rank_memory,
    shape_of,
)
from r3async.tools.traffic import host_memory, size, step_traffic

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Values of a head that vLLM's attention on CPU takes (0.30)."""
PUBLISHED_VERSIONS = 2
ADDED_BY_LEARNER = ("episode", "place", "advantages", "loss_weights", "probed", "old_logprobs", "reference_logprobs")
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
    write_seconds: float
    """That writing a version may take (`weights.write_timeout`)."""
    first_install_seconds: float
    """That an engine may take for its first installation (`weights.install_timeout`)."""
    install_seconds: float
    """And for each that follows."""
    checkpoint_bytes: int
    """0 with adapters, which are few."""
    checkpoint_seconds: float
    """That writing a checkpoint may take (`checkpoint.write_timeout`)."""
    rank: RankMemory
    engine: EngineMemory
    gpus: int
    shared: bool
    """Engines are on the GPUs of the learner's ranks."""
    host: list[str]
    """What is in the memory of the learner's hosts."""
    traffic: list[str]
    """What ranks move among them in a step."""
    hosts: list[str]
    """Where the processes go, a line for each host, if they are on GPUs: on hosts of `cluster.gpus_per_node`."""
    notes: list[str]

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


def make_plan(config: Config, imports: bool = True) -> Plan:
    """Work a run out. Raises `ConfigError`, naming the setting and the fix, for what cannot run.

    Code that `config` names is imported and checked with `imports`, and else left alone, which a note says: see `user_code`.
    """
    from r3async.rollout.evaluation import check_environment
    from r3async.tools.preflight import check_loss
    from r3async.tools.rows import describe_rows
    from r3async.tools.user_code import describe_code, named_code

    if code := {} if imports else named_code(config):
        notes = [f"{describe_code(code)}. It was not imported, so neither it nor rows were checked"]
    else:
        check_policy_loss(config.algorithm)
        check_loss(config)
        check_environment(config)
        notes = describe_rows(config)
    shape, source = shape_of(config)
    check_trained(shape, config.learner)
    on_gpus = shape.parameters > GPU_PARAMETERS
    rank, engine = rank_memory(shape, config), engine_memory(shape, config)
    routing = shape.routing if config.routing.replay == "rollout" else None
    schedule = config.schedule
    slots = slots_of(schedule)
    episodes = schedule.groups_per_step * schedule.samples_per_group
    rows = config.episode.max_turns if config.episode.rows == "stepwise" else 1
    tokens = rows * config.episode.max_total_tokens
    per_token = wire_bytes(routing)
    written = WrittenBytes.of(config, shape.parameters)
    gpus, shared, hosts, across = _places(config) if on_gpus else (0, False, [], [])
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
        version_bytes=written.version,
        write_seconds=config.weights.write_seconds(written.version),
        first_install_seconds=config.weights.install_seconds(written.version, first=True),
        install_seconds=config.weights.install_seconds(written.version, first=False),
        checkpoint_bytes=written.checkpoint,
        checkpoint_seconds=config.checkpoint.write_seconds(written.checkpoint),
        rank=rank,
        engine=engine,
        gpus=gpus,
        shared=shared,
        host=host_memory(shape, config),
        traffic=step_traffic(shape, config, episodes * tokens),
        hosts=hosts,
        notes=[*notes, *_notes(config, shape, engine, on_gpus), *across],
    )
    _check(config, shape, plan, on_gpus)
    return plan


def _places(config: Config) -> tuple[int, bool, list[str], list[str]]:
    """GPUs, whether engines share them, hosts, and what is worth knowing of them: as few as will do. Raises `Unplaceable`."""
    layout, nodes = hosts_needed(Demand.of(config), config.cluster.gpus_per_node)
    p, at, notes = config.learner.parallel, layout.training(), []
    stage = p.dp * p.tp
    apart = any(len(set(at[i : i + p.ep])) > 1 for i in range(0, len(at), stage)) and p.ep > 1
    if apart:
        notes.append(
            f"the ranks that exchange a layer's experts (learner.parallel.ep = {p.ep}) are on several hosts: every MoE layer "
            "sends tokens between them"
        )
    return layout.gpus, layout.shared, layout.describe(nodes), notes


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
        layout = f"dp {p.dp} x cp {p.cp} x tp {p.tp} x pp {p.pp}, experts over {p.ep}"
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
        from r3async.tools.preflight import has_gpu

        on_cpu = shape.head_dim < CPU_HEAD_DIMS[0] or not has_gpu()
        if not shape.kv_rank and shape.head_dim not in CPU_HEAD_DIMS and config.generator.engine == "vllm" and on_cpu:
            raise ConfigError(
                f"heads of {shape.head_dim} values, which vLLM on CPU refuses with the first request: it takes "
                f"{', '.join(map(str, CPU_HEAD_DIMS))} (hidden_size / heads; `model.init.heads` for a model that is made)"
            )
        return
    capacity = config.cluster.gpu_gib * GIB
    if plan.shared:
        _check_shared(config, plan, capacity)
    if plan.rank.total > capacity:
        raise ConfigError(
            f"a rank of the learner needs {plan.rank.total / GIB:.0f} GiB (weights and optimizer "
            f"{(plan.rank.weights + plan.rank.optimizer) / GIB:.0f}, activations {plan.rank.activations / GIB:.0f}"
            f"{f', teacher {plan.rank.teacher / GIB:.0f}' * bool(plan.rank.teacher)}) of "
            f"`cluster.gpu_gib` = {config.cluster.gpu_gib:g}: raise `learner.parallel`, set `learner.recompute`, or lower "
            f"`learner.max_tokens_per_micro_batch`. {recommended(shape, config)}"
        )
    free = _kv_bytes(config, plan.engine)
    if free <= plan.engine.kv_per_token * episode.max_total_tokens:
        raise ConfigError(
            f"an engine's weights take {plan.engine.weights / GIB:.0f} GiB of a GPU of `cluster.gpu_gib` = "
            f"{config.cluster.gpu_gib:g} and have no free bytes for one episode: raise "
            "`generator.engine_args.tensor_parallel_size`"
        )


def _check_shared(config: Config, plan: Plan, capacity: float) -> None:
    """A rank and the engines on its GPU fit it together."""
    ranks = config.learner.parallel.world
    engines = -(-config.generator.count // ranks)
    share = _engine_share(config)
    if plan.rank.total + engines * share * capacity > capacity:
        most = max(0.0, (1 - plan.rank.total / capacity) / engines)
        raise ConfigError(
            f"a rank of the learner needs {plan.rank.total / GIB:.0f} GiB of a GPU of `cluster.gpu_gib` = "
            f"{config.cluster.gpu_gib:g}, and {engines} engine(s) beside it take {share:.0%} each: set "
            f"`generator.engine_args.gpu_memory_utilization` to at most {math.floor(100 * most) / 100:g}, or give engines "
            'GPUs of their own (`generator.colocate` = "off")'
        )


def _engine_share(config: Config) -> float:
    return float(config.generator.engine_args.get("gpu_memory_utilization", ENGINE_SHARE))


def _kv_bytes(config: Config, engine: EngineMemory) -> float:
    return _engine_share(config) * config.cluster.gpu_gib * GIB - engine.weights


def _notes(config: Config, shape: ModelShape, engine: EngineMemory, on_gpus: bool) -> list[str]:
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
    p = config.learner.parallel
    if config.supervise.copy_steps and 1 < p.world <= (config.cluster.gpus_per_node if on_gpus else p.world):
        lora = config.learner.lora.rank
        kept = 12 * (p.world * adapted(shape, config.learner).parameters if lora else shape.parameters)
        notes.append(
            f"supervise.copy_steps: two copies of the learner's state, {size(kept)} each, are in Ray's object store of its host "
            "(--object-store-memory), if they fit: its ranks start again from them if one is lost"
        )
    return notes


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
        *(f"places on {len(plan.hosts)} host(s) of {config.cluster.gpus_per_node} GPUs" for _ in plan.hosts[:1]),
        *(f"  {line}" for line in plan.hosts),
        f"schedule    {schedule.groups_per_step} groups x {schedule.samples_per_group} episodes a step, {config.steps} steps",
        f"slots       {plan.slots} groups in flight at most",
        f"staleness   a trained token is at most {plan.staleness_bound} versions old",
        f"on the wire {plan.wire_bytes_per_token} bytes a token; at most {size(plan.wire_bytes_per_step)} a step "
        f"({number(plan.tokens_per_step)} tokens)",
        f"buffer      at most {size(plan.buffer_bytes)}, of transport.credit_bytes = {size(config.transport.credit_bytes)}"
        + (": trajectories may wait at their generators" if plan.buffer_bytes > config.transport.credit_bytes else ""),
        f"weights     {size(plan.version_bytes)} a version to each host; shared memory for {PUBLISHED_VERSIONS}: "
        f"{size(PUBLISHED_VERSIONS * plan.version_bytes)}",
        f"            at most {plan.write_seconds:.0f} s to write (weights.write_timeout)",
        f"            {plan.first_install_seconds:.0f} s for an engine's first installation, {plan.install_seconds:.0f} s for "
        "each that follows (weights.install_timeout)",
        "checkpoint  "
        + f"{size(plan.checkpoint_bytes)}, " * bool(plan.checkpoint_bytes)
        + f"at most {plan.checkpoint_seconds:.0f} s to write (checkpoint.write_timeout)",
        f"memory, a rank of the learner ({number(rank.parameters)} parameters), estimated",
        f"  weights {size(rank.weights)} + optimizer {size(rank.optimizer)} + activations {size(rank.activations)} "
        f"(recompute {config.learner.recompute}) + logits {size(rank.logits)}"
        + f", or {size(rank.temporary)} of copies while it updates" * (rank.temporary > 0)
        + f" + context {size(rank.context)} (assumed)" * (rank.context > 0)
        + f" + teacher {size(rank.teacher)}" * bool(rank.teacher)
        + f" = {size(rank.total)}",
        "host memory of the learner" + (": " + ", ".join(plan.host)),
        *(f"between ranks, a step: {line}" for line in plan.traffic),
        f"memory, an engine{f', each of {engine.devices} GPUs' if engine.devices > 1 else ''}",
        f"  weights {size(engine.weights)}, KV cache {size(engine.kv_per_token)} a token",
        *(f"note: {note}" for note in plan.notes),
    ]
    return "\n".join(lines)


def as_json(plan: Plan) -> dict[str, Any]:
    """Plain data, with the totals."""
    out = msgspec.to_builtins(plan)
    return out | {"cpus": plan.cpus, "rank_bytes": plan.rank.total}


def checked_plan(config: Config, imports: bool = True) -> Plan:
    """The plan of a run that could start. Raises as `make_plan` does, and for a structure that cannot start."""
    from r3async.tools.hub import with_model
    from r3async.tools.structure import check_directory, check_structure

    config = with_model(config, fetch=False)
    check_directory(config)
    plan = make_plan(config, imports)
    check_structure(config)
    return plan


def print_plan(config: Config, overrides: Sequence[str] = (), as_object: bool = False) -> None:
    """Validate, and print the plan to stdout. `overrides`: what was typed. Raises as `checked_plan` does."""
    from r3async.tools.user_code import may_import

    plan = checked_plan(config, may_import(config, overrides))
    print(json.dumps(as_json(plan)) if as_object else describe(plan, config))
