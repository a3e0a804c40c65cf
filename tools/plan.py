"""Plan a run before it starts: processes, places, bytes, memory, speed.
`r3async train … --dry-run` prints it."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from r3async.actors.placement_plan import ResourceDemand, check_transfers, find_smallest_layout
from r3async.config import Config, ParallelConfig
from r3async.data.model_shape import ModelShape, RoutingShape
from r3async.data.tokens import SCHEMA
from r3async.data.write_sizes import DTYPE_BYTES, WriteSizes
from r3async.schedule.groups import TRAJECTORY_HEADER_BYTES, max_buffer_bytes
from r3async.schedule.run_ahead import compute_staleness_bound, count_slots

from .adapted import count_adapters
from .generation_speed import GenerationSpeed, estimate_generation
from .layouts import AS_FAST, choose_layout
from .memory import (
    GIB,
    GPU_PARAMETERS,
    EngineMemory,
    RankMemory,
    check_trainable,
    estimate_engine_memory,
    estimate_rank_memory,
    find_model_shape,
    find_quantized_form,
)
from .speed import PUBLISHED_SPEEDS, TrainingSpeed, estimate_speed
from .traffic import describe_host_memory, describe_step_traffic, format_bytes

VERSIONS_IN_MEMORY = 2
LEARNER_COLUMNS = (
    "episode",
    "place",
    "advantages",
    "loss_weights",
    "probed",
    "old_logprobs",
    "reference_logprobs",
)
DEFAULT_ENGINE_SHARE = 0.92
"""Share of a GPU's memory that vLLM (0.30) takes, unless
`generator.engine_args.gpu_memory_utilization` sets another."""


class ProcessPlan(msgspec.Struct, frozen=True):
    """Processes of one kind, each with `cpus` and `gpus`."""

    role: str
    count: int
    cpus: int
    gpus: int
    what: str


class RunPlan(msgspec.Struct, frozen=True):
    """Everything that a run consists of. Bytes are upper bounds: every episode as
    long as allowed."""

    model: str
    source: str
    parameters: int
    active: int
    device: str
    processes: list[ProcessPlan]
    slots: int
    staleness_bound: int
    episodes_per_step: int
    tokens_per_step: int
    wire_bytes_per_token: int
    wire_bytes_per_step: int
    buffer_bytes: int
    version_bytes: int
    adapter_bytes: int
    """Bytes of a version that has adapters alone; 0 if versions have all weights."""
    write_seconds: float
    """Timeout for writing a version, in seconds (`supervise.patience`)."""
    first_install_seconds: float
    """Timeout for an engine's first installation, in seconds (`supervise.patience`)."""
    install_seconds: float
    """Timeout for each later installation, in seconds."""
    checkpoint_bytes: int
    """Bytes of a checkpoint; 0 with adapters, which are few."""
    checkpoint_seconds: float
    """Timeout for writing a checkpoint, in seconds (`supervise.patience`)."""
    rank: RankMemory
    engine: EngineMemory
    gpus: int
    shared: bool
    """True if engines are on the GPUs of the learner's ranks."""
    host: list[str]
    """Contents of the memory of the learner's hosts, one line each."""
    traffic: list[str]
    """Data that ranks exchange in a step, one line each."""
    speed: TrainingSpeed | None
    """Estimated speed of the learner's GPUs; None for a model that is not planned for GPUs."""
    generation: GenerationSpeed | None
    """Estimated speed of an engine; None where `speed` is, and for engines of other
    kinds than vLLM."""
    hosts: list[str]
    """Placement of the processes, one line per host, if they are on GPUs: on hosts of
    `cluster.gpus_per_node`."""
    notes: list[str]

    @property
    def cpus(self) -> int:
        return sum(p.count * p.cpus for p in self.processes)


def count_wire_bytes(routing: RoutingShape | None) -> int:
    """Return the bytes of one token on the wire, from the schema: every column that the
    engine's side fills."""
    sizes = routing.column_sizes if routing else {}
    total = 0
    for column in SCHEMA.columns.values():
        if (
            column.name in LEARNER_COLUMNS
            or (column.optional and routing is None)
            or column.holds_sets
        ):
            continue
        wide = column.inner_dims and routing is not None and routing.num_experts > 256
        dtype = np.dtype(column.dtypes[-1 if wide else 0])
        total += math.prod(sizes[d] for d in column.inner_dims) * dtype.itemsize
    return total


def make_run_plan(config: Config) -> RunPlan:
    """Plan a run. Raises `ConfigError`, naming the setting and the fix, if its processes
    cannot be placed.

    Whether it can start is what `preflight` checks.
    """
    shape, source = find_model_shape(config)
    check_trainable(shape, config.learner)
    on_gpus = shape.num_parameters > GPU_PARAMETERS
    rank = estimate_rank_memory(shape, config)
    engine = estimate_engine_memory(shape, config)
    recorded = shape.routing_shape
    if recorded is not None:
        has_gates = config.routing.gates == "rollout"
        recorded = msgspec.structs.replace(recorded, has_gates=has_gates)
    routing = recorded if config.routing.replay == "rollout" else None
    schedule = config.schedule
    slots = count_slots(schedule)
    episodes = schedule.prompts_per_step * schedule.group_size
    rows = config.episode.max_turns if config.episode.rows == "stepwise" else 1
    tokens = rows * config.episode.max_total_tokens
    per_token = count_wire_bytes(routing)
    written = WriteSizes.for_model(config, shape.num_parameters)
    adapter_bytes = _count_adapter_bytes(shape, config)
    gpus, shared, hosts, across = _plan_placement(config) if on_gpus else (0, False, [], [])
    plan = RunPlan(
        model=shape.name,
        source=source,
        parameters=shape.num_parameters,
        active=shape.active_parameters,
        device="GPU" if on_gpus else "CPU, or shares of GPUs",
        processes=_plan_processes(config, engine, on_gpus),
        slots=slots,
        staleness_bound=compute_staleness_bound(config.schedule),
        episodes_per_step=episodes,
        tokens_per_step=episodes * tokens,
        wire_bytes_per_token=per_token,
        wire_bytes_per_step=episodes * (tokens * per_token + TRAJECTORY_HEADER_BYTES),
        buffer_bytes=max_buffer_bytes(config, recorded),
        version_bytes=written.version_bytes,
        adapter_bytes=adapter_bytes,
        write_seconds=config.supervise.limits.version_write(written.version_bytes),
        first_install_seconds=config.supervise.limits.install(written.version_bytes, first=True),
        install_seconds=config.supervise.limits.install(
            adapter_bytes or written.version_bytes, first=False
        ),
        checkpoint_bytes=written.checkpoint_bytes,
        checkpoint_seconds=config.supervise.limits.checkpoint_write(written.checkpoint_bytes),
        rank=rank,
        engine=engine,
        gpus=gpus,
        shared=shared,
        host=describe_host_memory(shape, config),
        traffic=describe_step_traffic(shape, config, episodes * tokens),
        speed=estimate_speed(shape, config, episodes * tokens) if on_gpus else None,
        generation=_estimate_generation(config, shape, engine) if on_gpus else None,
        hosts=hosts,
        notes=[*_make_notes(config, shape, engine, on_gpus), *across],
    )
    if plan.speed:
        faster = _note_faster_layout(config, shape, plan.speed, plan.tokens_per_step)
        if faster:
            plan.notes.append(faster)
    return plan


def _estimate_generation(
    config: Config, shape: ModelShape, engine: EngineMemory
) -> GenerationSpeed | None:
    if config.generator.engine != "vllm":
        return None
    return estimate_generation(shape, config, engine)


def _note_faster_layout(
    config: Config, shape: ModelShape, speed: TrainingSpeed, tokens: int
) -> str:
    """Return a note if another layout on the same GPUs would train faster by the estimate."""
    if config.learner.backend != "megatron":
        return ""
    found = choose_layout(shape, config, config.learner.parallel.world_size, tokens)
    if found is None or speed.tokens_per_second >= AS_FAST * found.tokens_per_second:
        return ""
    return (
        f"{found.tokens_per_second:,.0f} tokens/s a GPU, in {found.memory.total_bytes / GIB:.0f} "
        f"GiB, by the same estimate: {found.describe_settings()}"
    )


def _plan_placement(config: Config) -> tuple[int, bool, list[str], list[str]]:
    """Find the smallest placement: GPUs, whether engines share them, hosts, and notes.
    Raises `ConfigError`."""
    layout, nodes = find_smallest_layout(
        ResourceDemand.from_config(config), config.cluster.gpus_per_node
    )
    check_transfers(config, layout)
    p = config.learner.parallel
    at = layout.rank_hosts()
    notes = []
    stage = p.dp * p.tp
    apart = any(len(set(at[i : i + p.ep])) > 1 for i in range(0, len(at), stage)) and p.ep > 1
    if apart:
        notes.append(
            f"the ranks that exchange a layer's experts (learner.parallel.ep = {p.ep}) are on "
            "several hosts: every MoE layer sends tokens between them"
        )
    return layout.gpu_count, layout.shares_gpus, layout.describe_hosts(nodes), notes


def _plan_processes(config: Config, engine: EngineMemory, on_gpus: bool) -> list[ProcessPlan]:
    p = config.learner.parallel
    learner = config.learner
    generator = config.generator
    out = [
        ProcessPlan("driver", 1, 0, 0, "this command: its live lines, sinks"),
        ProcessPlan("conductor", 1, 0, 0, "leases, versions, metrics"),
    ]
    if p.world_size == 1:
        out.append(
            ProcessPlan(
                "learner", 1, 1, int(on_gpus), f"{learner.backend}: receives, packs, trains"
            )
        )
    else:
        out.append(ProcessPlan("learner", 1, 1, 0, "receives and packs"))
        layout = f"dp {p.dp} x cp {p.cp} x tp {p.tp} x pp {p.pp}, experts over {p.ep}"
        out.append(
            ProcessPlan(
                "learner rank", p.world_size, 1, int(on_gpus), f"{learner.backend}: {layout}"
            )
        )
    what = f"{generator.engine}, {generator.concurrency} episodes at once"
    out.append(ProcessPlan("generator", generator.count, 1, engine.devices * on_gpus, what))
    return out


def engine_memory_share(config: Config) -> float:
    return float(config.generator.engine_args.get("gpu_memory_utilization", DEFAULT_ENGINE_SHARE))


def compute_free_kv_bytes(config: Config, engine: EngineMemory) -> float:
    """Return the bytes of the KV cache on a GPU, as vLLM computes them."""
    cache = config.generator.engine_args.get("kv_cache_memory_bytes")
    if cache:
        return float(cache)
    return engine_memory_share(config) * config.cluster.gpu_gib * GIB - engine.bytes_beside_cache


def _make_notes(
    config: Config, shape: ModelShape, engine: EngineMemory, on_gpus: bool
) -> list[str]:
    """List useful notes, and what the actors cannot do yet."""
    notes = []
    schedule = config.schedule
    generator = config.generator
    wanted = count_slots(schedule)
    episodes = wanted * schedule.group_size
    if episodes < generator.count * generator.concurrency:
        notes.append(
            f"the slots allow {episodes} episodes at once, and generators could run "
            f"{generator.count * generator.concurrency}: some of generator.concurrency "
            "will not be used"
        )
    on_cpu = float(generator.engine_args.get("kv_cache_memory_bytes", generator.kv_cache_gib * GIB))
    free = compute_free_kv_bytes(config, engine) if on_gpus else on_cpu
    if engine.kv_needed > free:
        notes.append(
            f"{generator.concurrency} episodes of {config.episode.max_total_tokens} tokens would "
            f"need {format_bytes(engine.kv_needed)} of KV cache, and there are "
            f"{format_bytes(free)}: when all are long, the engine preempts some"
        )
    form = find_quantized_form(config)
    if form is not None:
        notes.append(
            f"the weights in {form} are dequantized when they are read: all figures here count "
            f"{format_count(shape.num_parameters)} parameters in {config.learner.dtype}"
        )
    if config.learner.lora.rank:
        made = count_adapters(shape, config.learner)
        notes.append(
            f"learner.lora: {format_count(made.adapter_parameters)} parameters are trained on a "
            "rank; of the weights that they are added to, "
            f"{format_bytes(made.adapted_weights * DTYPE_BYTES[config.learner.dtype])} as in the "
            "start model are in host memory, for each rank"
        )
    if shape.recurrent_layers and config.learner.share_prefixes:
        notes.append(
            f"{len(shape.recurrent_layers)} of {shape.num_layers} layers keep a state, in which "
            "samples cannot share a prefix: learner.share_prefixes has no effect"
        )
    if shape.moe_layers and config.routing.replay == "off":
        notes.append(
            "the model has experts, and the learner chooses them anew: routing.replay=rollout uses "
            "those that the engine chose"
        )
    p = config.learner.parallel
    if config.supervise.copy_steps and 1 < p.world_size <= (
        config.cluster.gpus_per_node if on_gpus else p.world_size
    ):
        lora = config.learner.lora.rank
        kept = 12 * (
            p.world_size * count_adapters(shape, config.learner).adapter_parameters
            if lora
            else shape.num_parameters
        )
        notes.append(
            f"supervise.copy_steps: two copies of the learner's state, {format_bytes(kept)} each, "
            "are in Ray's object store of its host (--object-store-memory), if they fit: its ranks "
            "start again from them if one is lost"
        )
    return notes


def _count_adapter_bytes(shape: ModelShape, config: Config) -> int:
    if not config.learner.lora.delivers_adapters:
        return 0
    whole = msgspec.structs.replace(config.learner, parallel=ParallelConfig())
    made = count_adapters(shape, whole)
    return made.adapter_parameters * DTYPE_BYTES[config.generator.dtype]


def _describe_version(plan: RunPlan) -> str:
    weights = format_bytes(plan.version_bytes)
    if not plan.adapter_bytes:
        return f"{weights} a version to each host"
    return f"{weights} to each host once, then {format_bytes(plan.adapter_bytes)} a version"


def format_count(count: float) -> str:
    """Format a count for display."""
    for unit, factor in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f}"


def describe_plan(plan: RunPlan, config: Config) -> str:
    """Describe the plan as text."""
    schedule = config.schedule
    rank = plan.rank
    engine = plan.engine
    lines = [
        f"model       {plan.model}: {format_count(plan.parameters)} parameters, "
        f"{format_count(plan.active)} used by a token ({plan.source})",
        f"devices     {plan.device}; {plan.cpus} CPUs"
        + (f", {plan.gpus} GPUs of {config.cluster.gpu_gib:g} GiB" if plan.gpus else ""),
        "processes",
        *(
            (
                f"  {p.count:>4} x {p.role:<14}{p.cpus} "
                f"CPU{f', {p.gpus} GPU' if p.gpus else '':<8}  {p.what}"
            )
            for p in plan.processes
        ),
        *(
            f"places on {len(plan.hosts)} host(s) of {config.cluster.gpus_per_node} GPUs"
            for _ in plan.hosts[:1]
        ),
        *(f"  {line}" for line in plan.hosts),
        (
            f"schedule    {schedule.prompts_per_step} groups x {schedule.group_size} episodes a "
            f"step, {config.steps} steps"
        ),
        f"slots       {plan.slots} groups in flight at most",
        f"staleness   a trained token is at most {plan.staleness_bound} versions old",
        f"on the wire {plan.wire_bytes_per_token} bytes a token; at most "
        f"{format_bytes(plan.wire_bytes_per_step)} a step "
        f"({format_count(plan.tokens_per_step)} tokens)",
        f"buffer      at most {format_bytes(plan.buffer_bytes)}, of transport.credit_bytes = "
        f"{format_bytes(config.transport.credit_bytes)}"
        + (
            ": trajectories may wait at their generators"
            if plan.buffer_bytes > config.transport.credit_bytes
            else ""
        ),
        f"weights     {_describe_version(plan)}; shared memory for "
        f"{VERSIONS_IN_MEMORY}: {format_bytes(VERSIONS_IN_MEMORY * plan.version_bytes)}",
        f"            at most {plan.write_seconds:.0f} s to write (supervise.patience)",
        f"            {plan.first_install_seconds:.0f} s for an engine's first installation, "
        f"{plan.install_seconds:.0f} s for each that follows",
        "checkpoint  "
        + (f"{format_bytes(plan.checkpoint_bytes)}, " if plan.checkpoint_bytes else "")
        + f"at most {plan.checkpoint_seconds:.0f} s to write",
        f"memory, a rank of the learner ({format_count(rank.parameters)} parameters), estimated",
        f"  weights {format_bytes(rank.weights)} + optimizer {format_bytes(rank.optimizer)} + "
        f"activations {format_bytes(rank.activations)} (recompute {config.learner.recompute}) + "
        f"logits {format_bytes(rank.logits)}"
        + (
            f", or {format_bytes(rank.temporary)} of copies while it updates"
            if rank.temporary > 0
            else ""
        )
        + (f" + context {format_bytes(rank.context)} (assumed)" if rank.context > 0 else "")
        + (f" + teacher {format_bytes(rank.teacher)}" if rank.teacher else "")
        + (f" + senders of weights {format_bytes(rank.senders)} (assumed)" if rank.senders else "")
        + f" = {format_bytes(rank.total_bytes)}",
        "host memory of the learner" + (": " + ", ".join(plan.host)),
        *(f"between ranks, a step: {line}" for line in plan.traffic),
        *_describe_speed(plan, config),
        f"memory, an engine{f', each of {engine.devices} GPUs' if engine.devices > 1 else ''}",
        f"  weights {format_bytes(engine.weights)}"
        + (f", slots for adapters {format_bytes(engine.adapters)}" if engine.adapters else "")
        + f", a step {format_bytes(engine.step)}"
        + (
            ", "
            f"{'' if config.generator.engine_args.get('enforce_eager') else 'CUDA graphs and '}context "
            f"{format_bytes(engine.graphs)} (assumed)"
            if engine.graphs
            else ""
        )
        + f", KV cache {format_bytes(engine.kv_per_token)} a token"
        + (f" and {format_bytes(engine.states)} of states an episode" if engine.states else ""),
        *(f"note: {note}" for note in plan.notes),
    ]
    return "\n".join(lines)


def _describe_speed(plan: RunPlan, config: Config) -> list[str]:
    if plan.speed is None:
        return []
    each = plan.speed.tokens_per_second
    count = config.learner.parallel.world_size
    basis = (
        "four layers of Qwen3-30B-A3B on one H200"
        if plan.active < plan.parameters
        else "assumed rates"
    )
    published = f"; {PUBLISHED_SPEEDS[plan.model]}" if plan.model in PUBLISHED_SPEEDS else ""
    return [
        f"training    some {each:,.0f} tokens/s a GPU, {each * count:,.0f} on {count}, a step of "
        f"{sum(plan.speed.seconds.values()):.0f} s: {plan.speed.describe_parts()}",
        f"            by {basis} (docs/benchmarks.md#one-gpu){published}",
        *_describe_generation(plan, config, each * count),
    ]


def _describe_generation(plan: RunPlan, config: Config, trained_per_second: float) -> list[str]:
    made = plan.generation
    engines = config.generator.count
    if made is None:
        return []
    sampled = made.tokens_per_second
    needed = made.count_engines(trained_per_second)
    return [
        f"generation  some {sampled:,.0f} tokens/s an engine, {sampled * engines:,.0f} on "
        f"{engines}, with {made.episodes:.0f} episodes at once on each",
        (
            f"            by assumed rates of an H100; {needed} such engines sample as fast as "
            "the learner trains"
        ),
    ]


def plan_to_json(plan: RunPlan) -> dict[str, Any]:
    """Convert the plan to plain data, with the totals."""
    out = msgspec.to_builtins(plan)
    return out | {"cpus": plan.cpus, "rank_bytes": plan.rank.total_bytes}
