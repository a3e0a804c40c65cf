"""Find layouts of the learner's ranks, and memory-saving settings, with which a model
fits on given GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from r3async.config import Config, LearnerConfig, ParallelConfig
from r3async.data.model_shape import ModelShape, ModelShapeError

from .memory import GIB, RankMemory, count_replicas, estimate_rank_memory
from .speed import estimate_speed

MEMORY_HEADROOM = 0.95
"""Share of a GPU's memory that a recommended layout may use; memory outside the
estimate needs the rest."""
AS_FAST = 0.97
"""Share of the highest speed from which a layout counts as fast as that one: the
estimate is no better."""


class FittingLayout(msgspec.Struct, frozen=True):
    """Settings of the learner with which a rank fits, its memory, and the tokens a
    second of each GPU."""

    learner: LearnerConfig
    memory: RankMemory
    tokens_per_second: float

    def describe_settings(self) -> str:
        """Return the settings as words of a command line."""
        learner = self.learner
        p = self.learner.parallel
        flags = ("offload_moments", "shard_optimizer", "shard_gradients")
        words = [
            f"'learner.parallel={{ dp = {p.dp}, tp = {p.tp}, pp = {p.pp}, ep = {p.ep} }}'",
            f"learner.recompute={learner.recompute}",
            *(f"learner.{name}=true" for name in flags if getattr(learner, name)),
        ]
        return " ".join(words)


def find_fitting_layouts(
    shape: ModelShape, config: Config, gpus: int, tokens: int
) -> Iterator[FittingLayout]:
    """Yield settings with which a Megatron rank fits, for steps of `tokens`, the simplest first.

    From the least simple on, they have: moments in host memory, then recomputed activations, then
    pipeline stages, then tensor-parallel ranks. Optimizer state is always sharded, because that
    costs nothing, and gradients are where a rank fits with that alone.
    """
    kinds = [(o, r) for o in (False, True) for r in ("none", "selective", "full")]
    layouts = [(pp, tp) for pp in _list_divisors(gpus) for tp in _list_divisors(gpus // pp)]
    experts = len(shape.moe_layers) > 0
    for offload, recompute in kinds:
        for pp, tp in layouts:
            stage = gpus // pp
            # Experts over all ranks of a stage have no replicas; over fewer ranks,
            # less is exchanged.
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
                    shard_gradients=False,
                )
                may_divide = max(count_replicas(learner)) > 1 and not learner.lora.rank
                for divide in (False, True) if may_divide else (False,):
                    learner = msgspec.structs.replace(learner, shard_gradients=divide)
                    changed = msgspec.structs.replace(config, learner=learner)
                    memory = estimate_rank_memory(shape, changed)
                    if memory.total_bytes <= MEMORY_HEADROOM * config.cluster.gpu_gib * GIB:
                        speed = estimate_speed(shape, changed, tokens)
                        yield FittingLayout(learner, memory, speed.tokens_per_second)
                        break


def choose_layout(
    shape: ModelShape, config: Config, gpus: int, tokens: int
) -> FittingLayout | None:
    """Return the simplest layout that is as fast as the fastest that fits, or None if none does."""
    found = list(find_fitting_layouts(shape, config, gpus, tokens))
    fastest = max((layout.tokens_per_second for layout in found), default=0.0)
    return next((layout for layout in found if layout.tokens_per_second >= AS_FAST * fastest), None)


def recommend_layout(shape: ModelShape, config: Config, tokens: int) -> str:
    """Recommend a layout that fits, for steps of `tokens`, in a sentence.

    It uses the GPUs of `learner.parallel`, or the fewest more, found by doubling, up to
    64 times as many.
    """
    if config.learner.backend != "megatron":
        return (
            "More ranks hold less each: raise `learner.parallel.dp`, and `ep` with it; "
            "`learner.recompute` and `learner.offload_moments` take less, too"
        )
    gpus = config.learner.parallel.world_size
    for count in (gpus << n for n in range(7)):
        layout = choose_layout(shape, config, count, tokens)
        if layout is not None:
            return (
                f"With {count} GPU(s) this takes {layout.memory.total_bytes / GIB:.0f} GiB each: "
                f"{layout.describe_settings()}"
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
