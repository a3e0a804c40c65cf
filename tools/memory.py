"""What a rank of the learner and an engine hold in memory: an estimate, from the model's shape and the configuration.

**Weights and optimizer** (exact, but for buffers). `learner.optimizer.MasterAdamW` keeps, by parameter of the rank:
the weight in the compute dtype, an fp32 master copy if that is not fp32 already, an fp32 gradient, and two fp32
moments. So 2 + 4 + 4 + 8 = 18 bytes in bfloat16, 4 + 4 + 8 = 16 in float32: the count of ZeRO (arXiv 1910.02054,
section 3.1: 16 with a 2-byte gradient), with the gradient accumulated in fp32. Megatron ranks hold `ModelShape.of_rank`
parameters, and do not divide optimizer state of the same parameters among data-parallel ranks. With `backend =
"torch"` and dp > 1, FSDP2 divides 16 bytes a parameter by dp (its shards are the fp32 masters), and holds the
vocabulary and two layers whole in the compute dtype, with one layer's fp32 gradient.

**Activations** follow Korthikanti et al. 2022 (arXiv 2205.05198, section 4), counted anew for this decoder: no
dropout, attention without a score matrix, grouped queries, gated feed-forward. Values kept for the backward pass, by
token and layer, in the compute dtype:

* attention: 2 h (residual, norm) + (a + 2 g) d (as projected) + 2 (a + g) d (queries and keys before their norms, and
  rotated) + a d (result);
* feed-forward of width w: 2 h + 5 w (gate and up, silu, product); mixture of experts: 2 h + k (h + 6 w) (a token is
  sent to k experts), and 2 · experts values in fp32 of the router. A test holds all of this to what a learner keeps;
* `recompute = "selective"`: of an MoE layer 2 h, and one layer's mixture while it is made again; `"full"`: h a layer,
  and one whole layer.

Tensor parallelism comes with sequence parallelism, and divides all of it. 1F1B keeps `pp - stage` micro-batches of
`layers / pp` layers at stage `stage`. A micro-batch has at most `learner.max_tokens_per_micro_batch` tokens. Logits:
three fp32 tensors of at most `learner.logprobs.CHUNK_ELEMENTS`. What is not in it: the allocator's fragments, NCCL's
and cuBLAS's workspaces, ranks that get more than their share of routed tokens.

**Engine**: weights divided by `tensor_parallel_size`, and 2 · layers · key-value heads ·
head size values of KV cache a token.
"""

from __future__ import annotations

from typing import Any

import msgspec

from r3async.config import Config
from r3async.data.model_shape import ModelShape

GIB = 2**30
CHUNK_ELEMENTS = 2**25
"""`learner.logprobs.CHUNK_ELEMENTS`; to import that would import torch."""
WIDTH = {"float32": 4, "bfloat16": 2}


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


def rank_memory(shape: ModelShape, config: Config) -> RankMemory:
    """Of the learner's rank that needs most."""
    learner = config.learner
    p, width = learner.parallel, WIDTH[learner.dtype]
    if learner.backend == "torch" and p.dp > 1:
        largest = max(map(shape.layer, range(shape.layers)))
        held = -(-shape.parameters // p.dp)
        whole = (2 * largest + shape.embedding * (1 if shape.tied else 2)) * width
        activations = _activations(shape, config, 0)
        return RankMemory(held, 4 * held + whole, 12 * held + 4 * largest, activations, _logits(shape, config))
    by_stage = []
    for stage in range(p.pp):
        held = shape.of_rank(learner, stage) if learner.backend == "megatron" else shape.parameters
        masters = 4 * held if learner.dtype != "float32" else 0
        logits = _logits(shape, config) if stage == p.pp - 1 else 0
        activations = _activations(shape, config, stage)
        by_stage.append(RankMemory(held, width * held, masters + 12 * held, activations, logits))
    return max(by_stage, key=lambda m: m.total)


def layer_values(shape: ModelShape, index: int) -> tuple[float, float]:
    """Values kept of one layer by token, in units of the compute dtype of bfloat16: of attention and the norms, and of what
    `recompute = "selective"` makes again."""
    a, g, d, h = shape.heads, shape.kv_heads, shape.head_dim, shape.hidden
    attention = 2 * h + (a + 2 * g) * d + 2 * (a + g) * d + a * d
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
    per_token = 2 * shape.layers * heads * shape.head_dim * width
    needed = per_token * config.generator.concurrency * config.episode.max_total_tokens
    return EngineMemory(tp, shape.parameters * width // tp, per_token, needed)
