"""Which matrices of a model have adapters (`learner.lora`), and how many values those are, from its shape alone."""

from __future__ import annotations

from typing import NamedTuple

from r3async.config import LearnerConfig
from r3async.config.training import names_matrix
from r3async.data.model_shape import ModelShape


class Matrix(NamedTuple):
    """`copies` matrices that are alike, of one layer. `divided`: what of each tensor-parallel ranks divide."""

    name: str
    rows: int
    columns: int
    divided: str = ""
    copies: int = 1


def matrices(shape: ModelShape, layer: int, *, joined: bool) -> list[Matrix]:
    """What of a layer may be adapted. `joined`: gate and up of an expert are one matrix, as in `backend = "torch"`."""
    h, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    prefix = f"model.layers.{layer}."
    out = [Matrix(f"{prefix}self_attn.{x}_proj", size, h, "rows") for x, size in (("q", q), ("k", kv), ("v", kv))]
    out.append(Matrix(f"{prefix}self_attn.o_proj", h, q, "columns"))
    if layer not in shape.moe_layers:
        up, down = [f"{prefix}mlp.{x}_proj" for x in ("gate", "up")], f"{prefix}mlp.down_proj"
        return [*out, *(Matrix(x, shape.width, h, "rows") for x in up), Matrix(down, h, shape.width, "columns")]
    e, w, experts = shape.experts, shape.expert_width, f"{prefix}mlp.experts."
    gates = [("gate_up_proj", 2 * w)] if joined else [("gate_proj", w), ("up_proj", w)]
    out += [Matrix(f"{experts}{x}", rows, h, "experts", e) for x, rows in gates]
    return [*out, Matrix(f"{experts}down_proj", h, w, "experts", e), Matrix(f"{prefix}mlp.gate", e, h)]


class Adapted(NamedTuple):
    """Of a rank. `parameters`: of its adapters; `weights`: that have one; `largest`: of these, the one with most values;
    `gradient`: values of the largest parameter that holds such a one, whose gradient is made whole."""

    parameters: int
    weights: int
    largest: int
    gradient: int


STACKED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
"""Matrices that are one parameter of a Megatron layer; so are all experts of a rank."""


def adapted(shape: ModelShape, learner: LearnerConfig, stage: int = 0) -> Adapted:
    """With `learner.lora`; an estimate where the model has matrices of other names, such as shared experts."""
    p, sharded = learner.parallel, learner.backend == "torch"
    parameters, weights, largest, gradient = 0, 0, 0, 0
    for layer in range(stage * shape.layers // p.pp, (stage + 1) * shape.layers // p.pp):
        of_parameter: dict[str, int] = {}
        chosen = set()
        for m in matrices(shape, layer, joined=sharded):
            if m.divided == "experts":
                share = rows = columns = p.dp if sharded else p.ep
            else:  # FSDP divides the rows of all
                rows = p.dp if sharded else p.tp if m.divided == "rows" else 1
                columns = p.tp if m.divided == "columns" else 1
                share = rows * columns
            held = m.copies * m.rows * m.columns // share
            last = m.name.rpartition(".")[2]
            parameter = m.name if sharded else STACKED.get(last, last)
            of_parameter[parameter] = of_parameter.get(parameter, 0) + held
            router = m.name.endswith("mlp.gate")
            named = any(names_matrix(target, m.name, router=router) for target in learner.lora.targets)
            if not named or (router and learner.freeze_router):
                continue
            chosen.add(parameter)
            parameters += learner.lora.rank * m.copies * (m.rows // rows + m.columns // columns)
            weights += held
            # An adapter of Megatron's is of one expert.
            largest = max(largest, held if sharded else held // max(1, m.copies // share))
        gradient = max(gradient, *(of_parameter[name] for name in chosen), 0)
    return Adapted(parameters, weights, largest, gradient)
