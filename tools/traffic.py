"""Estimate a run's host memory and the bytes that a step moves, from the settings and the
model's shape alone.

Bytes are upper bounds: every episode as long as allowed. A ring of n ranks that sums or gathers x
bytes moves x (n - 1) / n from each rank, and twice that to leave the sum on all (Patarasu and Yuan
2009, doi.org/10.1016/j.jpdc.2008.09.002).
"""

from __future__ import annotations

import math

from r3async.config import Config
from r3async.data.model_shape import ModelShape
from r3async.data.write_sizes import DTYPE_BYTES

from .adapted import count_adapters
from .memory import count_replicas

RANK_PROCESS_BYTES = 445 * 10**6
"""Memory of a rank's process before it loads anything, with torch and transformers,
measured on CPU (D-206)."""


def format_bytes(count: float) -> str:
    """Format a number of bytes for display."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} B"


def describe_host_memory(shape: ModelShape, config: Config) -> list[str]:
    """Describe the memory of all the learner's hosts, besides weights and optimizer on CPU and
    /dev/shm, in lines."""
    learner = config.learner
    ranks = learner.parallel.world_size
    # The copy has the learner's dtype, and is converted a bucket at a time.
    copied = shape.num_parameters * DTYPE_BYTES[learner.dtype] + ranks * config.weights.bucket_bytes
    lines = [
        f"{format_bytes(copied)} of weights that are being published, with a bucket of each rank",
        (
            f"{format_bytes(ranks * RANK_PROCESS_BYTES)} of the ranks' processes, "
            "measured without CUDA"
        ),
        (
            f"{format_bytes(config.transport.credit_bytes)} at most of trajectories that wait "
            "(transport.credit_bytes)"
        ),
    ]
    if learner.offload_moments:
        lines.append(
            f"{format_bytes(8 * count_updated(shape, config) * ranks)} of moments "
            "(learner.offload_moments)"
        )
    if config.algorithm.reference_kl.coef and not learner.lora.rank:
        held = DTYPE_BYTES[learner.dtype] * _count_rank_parameters(shape, config) * ranks
        lines.append(f"{format_bytes(held)} of the reference model (algorithm.reference_kl)")
    return lines


def describe_step_traffic(shape: ModelShape, config: Config, tokens: int) -> list[str]:
    """Describe the data that ranks exchange in a step of `tokens`, in lines."""
    lines = []
    if config.learner.backend == "megatron":
        each = count_copy_bytes(shape, config, tokens)
        if each:
            lines.append(
                f"{format_bytes(each)} from each rank to those that hold copies: gradients, and "
                "what they become"
            )
    sent = count_expert_bytes(shape, config, tokens)
    if sent:
        lines.append(
            f"{format_bytes(sent)} from each rank to those that have other experts, if all tokens "
            "are trained once"
        )
    return lines


def count_copy_bytes(shape: ModelShape, config: Config, tokens: int) -> float:
    """Count the bytes of gradients and weights that a rank sends in a step of `tokens` to those
    that hold copies."""
    learner = config.learner
    width = DTYPE_BYTES[config.learner.dtype]
    updates = config.schedule.updates_per_step
    passes = count_micro_batches(config, tokens)
    if learner.lora.rank or learner.backend == "scripted":
        return 0.0
    if learner.backend == "torch":
        # FSDP: shards of weights for both passes and the recomputation, and gradients in float32,
        # of every micro-batch.
        n = learner.parallel.dp
        ep = learner.parallel.ep
        gathers = 3 if learner.recompute == "full" else 2
        all_experts = len(shape.moe_layers) * shape.expert_parameters
        gathered = sum(
            held * (copies - 1) / copies
            for held, copies in (
                (shape.num_parameters - all_experts, n),
                (all_experts / ep, n // ep),
            )
        )
        return passes * gathered * (gathers * width + 4)
    many, of_experts = count_replicas(learner)
    rest, experts = _count_parameters(shape, config)
    # Sums in float32, to each rank its share; then the sums, or the updated weights, to all.
    summed = 4 * (passes if learner.shard_gradients else updates)
    gathered = (width if learner.shard_optimizer else 4) * updates
    return sum(
        held * (summed + gathered) * (n - 1) / n
        for held, n in ((rest, many), (experts, of_experts))
    )


def count_expert_bytes(shape: ModelShape, config: Config, tokens: int) -> float:
    """Count the bytes of tokens that a rank sends in a step of `tokens` to those that
    have other experts."""
    learner = config.learner
    p = config.learner.parallel
    if p.ep == 1 or not shape.moe_layers:
        return 0.0
    # There and back; forward, backward, and a recomputation.
    passes = 2 * (2 if learner.recompute == "none" else 3)
    sent = (
        tokens
        / (p.dp * p.cp * p.tp)
        * len(shape.moe_layers)
        / p.pp
        * shape.top_k
        * shape.hidden_size
    )
    return (
        sent
        * DTYPE_BYTES[learner.dtype]
        * passes
        * (p.ep - 1)
        / p.ep
        * config.schedule.epochs_per_step
    )


def count_micro_batches(config: Config, tokens: int) -> int:
    """Return the micro-batches that a rank trains in a step of `tokens`, if all
    of them are full."""
    schedule = config.schedule
    p = config.learner.parallel
    each = tokens / (
        p.dp * schedule.minibatches_per_step * config.learner.max_tokens_per_micro_batch
    )
    return max(1, math.ceil(each)) * schedule.minibatches_per_step * schedule.epochs_per_step


def _count_parameters(shape: ModelShape, config: Config) -> tuple[int, int]:
    """Count the parameters of a rank of the largest stage: outside experts, and in experts."""
    p = config.learner.parallel
    stages = [
        (
            sum(
                i in shape.moe_layers
                for i in range(s * shape.num_layers // p.pp, (s + 1) * shape.num_layers // p.pp)
            ),
            s,
        )
        for s in range(p.pp)
    ]
    experts = [
        (moe * shape.expert_parameters // p.ep, shape.rank_parameters(config.learner, s))
        for moe, s in stages
    ]
    of_experts, held = max(experts, key=lambda pair: pair[1])
    return held - of_experts, of_experts


def _count_rank_parameters(shape: ModelShape, config: Config) -> int:
    if config.learner.backend == "megatron":
        return sum(_count_parameters(shape, config))
    return -(-shape.num_parameters // config.learner.parallel.dp)


def count_updated(shape: ModelShape, config: Config) -> int:
    """Count the values of a rank that have moments."""
    learner = config.learner
    many, of_experts = count_replicas(learner)
    if learner.lora.rank:
        return count_adapters(shape, learner).adapter_parameters // (
            min(many, of_experts) if learner.shard_optimizer else 1
        )
    if learner.backend != "megatron" or not learner.shard_optimizer:
        return _count_rank_parameters(shape, config)
    rest, experts = _count_parameters(shape, config)
    return rest // many + experts // of_experts
