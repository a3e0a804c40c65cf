"""The shape of the model that a configuration names, and an estimate of what a rank of the learner and an engine hold in memory.

So that a plan can be made where the weights are not, the numbers of some published models are here.

**Weights and optimizer** (exact, but for buffers). `learner.optimizer.MasterAdamW` keeps, by parameter of the rank:
the weight in the compute dtype, an fp32 master copy if that is not fp32 already, an fp32 gradient, and two fp32
moments. So 2 + 4 + 4 + 8 = 18 bytes in bfloat16, 4 + 4 + 8 = 16 in float32: the count of ZeRO (arXiv 1910.02054,
section 3.1: 16 with a 2-byte gradient), with the gradient accumulated in fp32. Megatron ranks hold `ModelShape.of_rank`
parameters, and do not divide optimizer state of the same parameters among data-parallel ranks. With `backend =
"torch"` and dp > 1, FSDP2 divides 16 bytes a parameter by dp (its shards are the fp32 masters), and holds the
vocabulary and two layers whole in the compute dtype, with one layer's fp32 gradient.

With `learner.lora` the weights stay, and all the rest is of the adapters, 16 bytes a parameter, and of one adapted weight: its
gradient, and that in fp32. The start model's values of what is adapted are in host memory, in the compute dtype.

**Activations** follow Korthikanti et al. 2022 (arXiv 2205.05198, section 4), counted for this decoder: no
dropout, attention without a score matrix, grouped queries, gated feed-forward. Values kept for the backward pass, by
token and layer, in the compute dtype:

* attention: 2 h (residual, norm) + (a + 2 g) d (as projected) + 2 (a + g) d (queries and keys before their norms, and
  rotated) + a d (result); latent attention: 2 h, its low ranks before and after their norms, queries, keys and values as
  projected and as attended, and the result;
* feed-forward of width w: 2 h + 5 w (gate and up, silu, product); mixture of experts: 2 h + k (h + 6 w) (a token is
  sent to k experts), and 2 · experts values in fp32 of the router. A test holds all of this to what a learner keeps;
* `recompute = "selective"`: of an MoE layer 2 h, and one layer's mixture while it is made again; `"full"`: h a layer,
  and one whole layer.

Tensor parallelism comes with sequence parallelism, and divides all of it. 1F1B keeps `pp - stage` micro-batches of
`layers / pp` layers at stage `stage`. A micro-batch has at most `learner.max_tokens_per_micro_batch` tokens. Logits:
three fp32 tensors of at most `learner.logprobs.CHUNK_ELEMENTS`. What is not in it: the allocator's fragments, NCCL's
and cuBLAS's workspaces, ranks that get more than their share of routed tokens.

**Engine**: weights divided by `tensor_parallel_size`, and 2 · layers · key-value heads ·
head size values of KV cache a token; of latent attention layers · (rank of keys and values + rotated values).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from r3async.config import Config, ConfigError, LearnerConfig
from r3async.config.training import names_matrix
from r3async.data.architectures import ARCHITECTURES, REFUSED, supported
from r3async.data.model_shape import ModelShape, ShapeError, read_shape

GIB = 2**30
GPU_PARAMETERS = 10**9
"""A model of more parameters is planned for GPUs."""
CHUNK_ELEMENTS = 2**25
"""`learner.logprobs.CHUNK_ELEMENTS`; to import that would import torch."""
WIDTH = {"float32": 4, "bfloat16": 2}


_QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": _QWEN3_MOE
    | {
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
    },
    "Qwen3-235B-A22B": _QWEN3_MOE
    | {
        "num_hidden_layers": 94,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_attention_heads": 64,
    },
    "Qwen2.5-1.5B-Instruct": {
        "model_type": "qwen2",
        "num_hidden_layers": 28,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "Qwen2.5-7B-Instruct": {
        "model_type": "qwen2",
        "num_hidden_layers": 28,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
}
"""From the models' own `config.json`: huggingface.co/Qwen/NAME/blob/main/config.json."""

INIT_VOCABULARY = 264
"""256 bytes and six special tokens, in eights: of a model that `model.init` makes."""


def check_trained(shape: ModelShape, learner: LearnerConfig) -> None:
    """Raise `ConfigError` if the ranks of `learner.parallel` cannot share this model, or its backend not train it."""
    if reason := REFUSED.get(shape.kind):
        raise ConfigError(f"{shape.name} cannot be trained ({shape.kind}): {reason}. These can: {supported()}")
    if learner.backend == "megatron" and shape.kind not in ARCHITECTURES:
        raise ConfigError(
            f'`learner.backend` = "megatron" trains {supported()} and no {shape.kind} ({shape.name}): set it to "torch"'
        )
    try:
        shape.check_divides(learner.parallel)
    except ShapeError as error:
        raise ConfigError(f"{shape.name}: {error}") from error


def check_router_aux(shape: ModelShape, config: Config) -> None:
    """Raise `ConfigError` for a load-balance term that would have no gradient."""
    declared = ARCHITECTURES.get(shape.kind)
    if config.algorithm.router_aux.coef and shape.moe_layers and declared is not None and declared.score == "sigmoid":
        raise ConfigError(
            f"`algorithm.router_aux.coef`: a bias of each expert balances {shape.name} ({shape.kind}), and a term of the loss "
            "has no gradient where that bias decides: set it to 0"
        )


def planned_shape(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape that a `config.json` describes. Raises `ConfigError` if its numbers are not there."""
    try:
        return read_shape(config, name)
    except ShapeError as error:
        raise ConfigError(f"{error}: its memory cannot be planned") from error


def shape_of(config: Config) -> tuple[ModelShape, str]:
    """The model of a run, and where its numbers are from. Raises `ConfigError` if they are nowhere."""
    path = config.model.path
    if not path:
        i = config.model.init
        made = {
            "model_type": "qwen3_moe",
            "hidden_size": i.hidden_size,
            "num_hidden_layers": i.layers,
            "num_attention_heads": i.heads,
            "num_key_value_heads": i.kv_heads,
            "head_dim": i.hidden_size // i.heads,
            "intermediate_size": 2 * i.hidden_size,
            "num_experts": i.experts,
            "num_experts_per_tok": i.top_k,
            "moe_intermediate_size": i.expert_hidden_size,
            "vocab_size": INIT_VOCABULARY,
            "max_position_embeddings": i.max_positions,
        }
        return planned_shape(made, "model.init"), "model.init: made when the run starts"
    file, name = Path(path) / "config.json", Path(path).name
    if file.is_file():
        return planned_shape(json.loads(file.read_text()), name), str(file)
    if name in PUBLISHED:
        return planned_shape(PUBLISHED[name], name), f"the published shape of {name}; {path} is not on this machine"
    raise ConfigError(
        f"`model.path` = {path!r}: no config.json there, and no published shape is known for {name!r} "
        f"(known: {', '.join(PUBLISHED)}). A model of the hub is fetched when a run starts, or by: hf download {path}"
    )


# -- memory ------------------------------------------------------------------------------------------------------------


class RankMemory(msgspec.Struct, frozen=True):
    """Bytes of the rank that holds most."""

    parameters: int
    """How many it holds."""
    weights: int
    optimizer: int
    """Master copies, gradients, moments."""
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.activations + self.logits


class EngineMemory(msgspec.Struct, frozen=True):
    """Bytes on one device (or, without GPUs, in one process) of one engine."""

    devices: int
    """That one engine is divided among."""
    weights: int
    kv_per_token: int
    kv_needed: int
    """If every episode that a generator plays at once were as long as it may be."""


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
    """Of a rank. `parameters`: of its adapters; `weights`: that have one; `largest`: of these, the one with most values."""

    parameters: int
    weights: int
    largest: int


def adapted(shape: ModelShape, learner: LearnerConfig, stage: int = 0) -> Adapted:
    """With `learner.lora`; an estimate where the model has matrices of other names, such as shared experts."""
    p, sharded = learner.parallel, learner.backend == "torch"
    parameters, weights, largest = 0, 0, 0
    for layer in range(stage * shape.layers // p.pp, (stage + 1) * shape.layers // p.pp):
        for m in matrices(shape, layer, joined=sharded):
            router = m.name.endswith("mlp.gate")
            named = any(names_matrix(target, m.name, router=router) for target in learner.lora.targets)
            if not named or (router and learner.freeze_router):
                continue
            if m.divided == "experts":
                share = rows = columns = p.dp if sharded else p.ep
            else:  # FSDP divides the rows of all
                rows = p.dp if sharded else p.tp if m.divided == "rows" else 1
                columns = p.tp if m.divided == "columns" else 1
                share = rows * columns
            parameters += learner.lora.rank * m.copies * (m.rows // rows + m.columns // columns)
            held = m.copies * m.rows * m.columns // share
            weights += held
            # One of Megatron's experts is a parameter of its own.
            largest = max(largest, held if sharded else held // max(1, m.copies // share))
    return Adapted(parameters, weights, largest)


def rank_memory(shape: ModelShape, config: Config) -> RankMemory:
    """Of the learner's rank that needs most."""
    learner = config.learner
    p, width = learner.parallel, WIDTH[learner.dtype]
    if learner.backend == "torch" and p.dp > 1:
        largest = max(map(shape.layer, range(shape.layers)))
        held = -(-shape.parameters // p.dp)
        whole = (2 * largest + shape.embedding * (1 if shape.tied else 2)) * width
        activations = _activations(shape, config, 0)
        optimizer = _adapters(shape, learner, 0, 4) if learner.lora.rank else 12 * held
        return RankMemory(held, 4 * held + whole, optimizer + 4 * largest, activations, _logits(shape, config))
    by_stage = []
    for stage in range(p.pp):
        held = shape.of_rank(learner, stage) if learner.backend == "megatron" else shape.parameters
        masters = 4 * held if learner.dtype != "float32" else 0
        logits = _logits(shape, config) if stage == p.pp - 1 else 0
        activations = _activations(shape, config, stage)
        optimizer = _adapters(shape, learner, stage, width) if learner.lora.rank else masters + 12 * held
        by_stage.append(RankMemory(held, width * held, optimizer, activations, logits))
    return max(by_stage, key=lambda m: m.total)


def _adapters(shape: ModelShape, learner: LearnerConfig, stage: int, width: int) -> int:
    """Values, gradients and moments of the adapters, and what it takes to make their gradients of one weight's."""
    made = adapted(shape, learner, stage)
    return 16 * made.parameters + (width + 4) * made.largest


def layer_values(shape: ModelShape, index: int) -> tuple[float, float]:
    """Values kept of one layer by token, in units of the compute dtype of bfloat16: of attention and the norms, and of what
    `recompute = "selective"` makes again."""
    a, g, d, h = shape.heads, shape.kv_heads, shape.head_dim, shape.hidden
    attention = 2 * h + (a + 2 * g) * d + 2 * (a + g) * d + a * d
    if shape.kv_rank:
        both = a * (2 * shape.qk_dim + shape.value_dim)
        attention = 2 * h + 2 * (shape.query_rank + shape.kv_rank) + 2 * both + a * shape.value_dim
    if index not in shape.moe_layers:
        return attention + 2 * h + 5 * shape.width, 0.0
    mixture = shape.top_k * (h + 6 * shape.expert_width) + 4 * shape.experts + 5 * shape.shared_width
    return attention + 2 * h, mixture


def _activations(shape: ModelShape, config: Config, stage: int) -> int:
    learner = config.learner
    p = learner.parallel
    kept, once = 0.0, 0.0
    for index in range(stage * shape.layers // p.pp, (stage + 1) * shape.layers // p.pp):
        base, mixture = layer_values(shape, index)
        if learner.recompute == "full":
            kept, once = kept + shape.hidden, max(once, base + mixture)
        elif learner.recompute == "selective":
            kept, once = kept + base, max(once, mixture)
        else:
            kept += base + mixture
    values = kept * (p.pp - stage) + once
    return int(values * learner.max_tokens_per_micro_batch * WIDTH[learner.dtype] / p.tp)


def _logits(shape: ModelShape, config: Config) -> int:
    learner = config.learner
    columns = -(-shape.vocab // learner.parallel.tp)
    return 3 * 4 * min(CHUNK_ELEMENTS, learner.max_tokens_per_micro_batch * columns)


def engine_memory(shape: ModelShape, config: Config) -> EngineMemory:
    """Of one generator's engine."""
    args: dict[str, Any] = config.generator.engine_args
    tp = int(args.get("tensor_parallel_size", 1))
    width = WIDTH[config.generator.dtype]
    heads = max(1, shape.kv_heads // tp)  # fewer heads than ranks are held more than once
    # Latent attention keeps what keys and values are made of, on every rank.
    values = shape.kv_rank + shape.rope_dim if shape.kv_rank else 2 * heads * shape.head_dim
    per_token = shape.layers * values * width
    needed = per_token * config.generator.concurrency * config.episode.max_total_tokens
    return EngineMemory(tp, shape.parameters * width // tp, per_token, needed)
