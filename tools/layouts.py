"""Find layouts of the learner's ranks, and memory-saving settings, with which a model fits on given GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from r3async.config import Config, LearnerConfig, ParallelConfig
from r3async.data.models import ModelShape, ModelShapeError

from .memory import GIB, RankMemory, estimate_rank_memory

MEMORY_HEADROOM = 0.95
"""Share of a GPU's memory that a recommended layout may use; memory outside the estimate needs the rest."""


def find_fitting_layouts(shape: ModelShape, config: Config, gpus: int) -> Iterator[tuple[LearnerConfig, RankMemory]]:
    """Yield settings with which a Megatron rank fits, the fastest first as far as known without measuring.

    Expensive choices come last. From the most expensive on, they are: moments in host memory, then recomputed
    activations (a third of the computing), then pipeline stages (idle when a step begins and ends), then
    tensor-parallel ranks (they exchange activations in every layer). Expert-parallel ranks exchange tokens in every
    layer, however many they are. Optimizer state is always sharded, because that costs nothing.
    """
    kinds = [(o, r) for o in (False, True) for r in ("none", "selective", "full")]
    layouts = [(pp, tp) for pp in _list_divisors(gpus) for tp in _list_divisors(gpus // pp)]
    experts = len(shape.moe_layers) > 0
    for offload, recompute in kinds:
        for pp, tp in layouts:
            stage = gpus // pp
            # Experts over all ranks of a stage have no replicas; over fewer ranks, less is exchanged.
            for ep in _list_divisors(stage) if experts else [1]:
                parallel = ParallelConfig(dp=stage // tp, tp=tp, pp=pp, ep=ep)
                if tp > config.cluster.gpus_per_node or not _can_divide(shape, parallel):
                    continue
                learner = msgspec.structs.replace(
                    config.learner,
                    parallel=parallel,
                    recompute=recompute,
                    offload_moments=offload,
                    shard_optimizer=parallel.world_size > 1,
                )
                found = estimate_rank_memory(shape, msgspec.structs.replace(config, learner=learner))
                if found.total_bytes <= MEMORY_HEADROOM * config.cluster.gpu_gib * GIB:
                    yield learner, found


def recommend_layout(shape: ModelShape, config: Config) -> str:
    """Recommend the first layout that fits, in a sentence.

    It uses the GPUs of `learner.parallel`, or the fewest more, found by doubling, up to 64 times as many.
    """
    if config.learner.backend != "megatron":
        return '`learner.backend` = "megatron" divides a model in more ways'
    gpus = config.learner.parallel.world_size
    for count in (gpus << n for n in range(7)):
        for learner, memory in find_fitting_layouts(shape, config, count):
            p = learner.parallel
            told = [f"parallel = {{ dp = {p.dp}, tp = {p.tp}, pp = {p.pp}, ep = {p.ep} }}"]
            told += [f'recompute = "{learner.recompute}"']
            told += ["offload_moments = true"] * learner.offload_moments
            told += ["shard_optimizer = true"] * learner.shard_optimizer
            return (
                f"With {count} GPU(s) this takes {memory.total_bytes / GIB:.0f} GiB each: [learner] {', '.join(told)}"
            )
    return f"No layout of up to {gpus << 6} such GPUs holds it"


def _list_divisors(count: int) -> list[int]:
    return [n for n in range(1, count + 1) if count % n == 0]


def _can_divide(shape: ModelShape, parallel: ParallelConfig) -> bool:
    try:
        parallel.check_values()
        shape.check_parallelism(parallel)
    except (ValueError, ModelShapeError):
        return False
    return True
