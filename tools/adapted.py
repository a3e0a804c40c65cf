"""Count a model's LoRA adapters (`learner.lora`) from its shape alone: the adapted matrices
and their sizes."""

from __future__ import annotations

from typing import NamedTuple

from r3async.config import LearnerConfig
from r3async.config.learner import matches_target
from r3async.data.model_shape import ModelShape


class WeightMatrix(NamedTuple):
    """A weight matrix of one layer, or several alike.

    Attributes:
        sharded_by: What the tensor-parallel ranks divide: "rows", "columns", "experts",
            or "" for nothing.
        num_copies: Number of equal matrices, such as one per expert.
    """

    name: str
    rows: int
    columns: int
    sharded_by: str = ""
    num_copies: int = 1


def list_adaptable_matrices(
    shape: ModelShape, layer: int, *, fused_gate_up: bool
) -> list[WeightMatrix]:
    """List the matrices of a layer that may be adapted.

    Args:
        fused_gate_up: The gate and up projections of an expert are one matrix, as in
            `backend = "torch"`.
    """
    h = shape.hidden_size
    q = shape.num_heads * shape.head_dim
    kv = shape.num_kv_heads * shape.head_dim
    prefix = f"model.layers.{layer}."
    out = []
    if layer in shape.attention_layers:
        sizes = (("q", q), ("k", kv), ("v", kv))
        out = [WeightMatrix(f"{prefix}self_attn.{x}_proj", size, h, "rows") for x, size in sizes]
        out.append(WeightMatrix(f"{prefix}self_attn.o_proj", h, q, "columns"))
    if layer not in shape.moe_layers:
        up = [f"{prefix}mlp.{x}_proj" for x in ("gate", "up")]
        down = f"{prefix}mlp.down_proj"
        return [
            *out,
            *(WeightMatrix(x, shape.mlp_width, h, "rows") for x in up),
            WeightMatrix(down, h, shape.mlp_width, "columns"),
        ]
    e = shape.num_experts
    w = shape.expert_width
    experts = f"{prefix}mlp.experts."
    gates = [("gate_up_proj", 2 * w)] if fused_gate_up else [("gate_proj", w), ("up_proj", w)]
    out += [WeightMatrix(f"{experts}{x}", rows, h, "experts", e) for x, rows in gates]
    return [
        *out,
        WeightMatrix(f"{experts}down_proj", h, w, "experts", e),
        WeightMatrix(f"{prefix}mlp.gate", e, h),
    ]


class AdapterCounts(NamedTuple):
    """The number of values that LoRA adds to one rank, and of those that it adapts there.

    Attributes:
        adapter_parameters: Values of the rank's adapters.
        adapted_weights: Values of the matrices that have an adapter.
        largest_weight: Values of the largest of these matrices.
        largest_gradient: Values of the largest parameter that contains such a matrix; its gradient
            is computed in full.
    """

    adapter_parameters: int
    adapted_weights: int
    largest_weight: int
    largest_gradient: int


FUSED_PARAMETERS = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
}
"""Matrices that are one parameter of a Megatron layer; so are all experts of a rank."""


def count_adapters(shape: ModelShape, learner: LearnerConfig, stage: int = 0) -> AdapterCounts:
    """Count the adapters of a rank in pipeline stage `stage`, with `learner.lora`.

    The count is an estimate if the model has matrices of other names, such as shared experts.
    """
    p = learner.parallel
    sharded = learner.backend == "torch"
    parameters = 0
    weights = 0
    largest = 0
    gradient = 0
    for layer in range(stage * shape.num_layers // p.pp, (stage + 1) * shape.num_layers // p.pp):
        of_parameter: dict[str, int] = {}
        chosen = set()
        for m in list_adaptable_matrices(shape, layer, fused_gate_up=sharded):
            if m.sharded_by == "experts":
                share = rows = columns = p.dp if sharded else p.ep
            else:  # FSDP shards the rows of every matrix
                rows = p.dp if sharded else p.tp if m.sharded_by == "rows" else 1
                columns = p.tp if m.sharded_by == "columns" else 1
                share = rows * columns
            held = m.num_copies * m.rows * m.columns // share
            last = m.name.rpartition(".")[2]
            parameter = m.name if sharded else FUSED_PARAMETERS.get(last, last)
            of_parameter[parameter] = of_parameter.get(parameter, 0) + held
            router = m.name.endswith("mlp.gate")
            named = any(
                matches_target(target, m.name, router=router) for target in learner.lora.targets
            )
            if not named or (router and learner.freeze_router):
                continue
            chosen.add(parameter)
            parameters += learner.lora.rank * m.num_copies * (m.rows // rows + m.columns // columns)
            weights += held
            # Megatron's adapters are per expert.
            largest = max(largest, held if sharded else held // max(1, m.num_copies // share))
        gradient = max(gradient, *(of_parameter[name] for name in chosen), 0)
    return AdapterCounts(parameters, weights, largest, gradient)
