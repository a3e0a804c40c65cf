"""Section `learner`: backend, ranks, precision, optimizer."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from r3async.config.section import Positive, PositiveInt, Range, Section


class ParallelConfig(Section):
    """How the learner's ranks divide the model and the batch; there are `dp * tp * pp` of them."""

    dp: PositiveInt = 1
    """Data parallel: ranks (or groups of ranks) that train different micro-batches. With `backend = "torch"` the weights
    are sharded among them (FSDP2)."""
    tp: PositiveInt = 1
    """Tensor parallel, always with sequence parallelism."""
    pp: PositiveInt = 1
    """Pipeline stages (1F1B)."""
    ep: PositiveInt = 1
    """Expert parallel: among how many of the `dp * tp` ranks of a stage the experts are divided."""
    cp: PositiveInt = 1
    """Context parallel: not supported."""
    vpp: PositiveInt = 1
    """Virtual pipeline stages: not supported."""

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.pp

    def __post_init__(self) -> None:
        if self.dp * self.tp % self.ep:
            raise ValueError(
                f"`ep` = {self.ep} must divide dp * tp = {self.dp * self.tp}: experts are divided among these"
            )
        if self.cp > 1:
            raise ValueError(
                "`cp` (context parallelism) is not supported: samples are packed whole, and attention sees them on one rank; "
                "use `tp` for long samples, whose activations it splits along the sequence"
            )
        if self.vpp > 1:
            raise ValueError(
                "`vpp` (virtual pipeline stages) is not supported: a rank would hold several separate pieces of the model, and "
                "neither weights nor recorded routes are divided that way; use `pp` alone"
            )


Beta = Annotated[float, Range(0, 0.999999999)]


class LearnerConfig(Section):
    backend: Literal["megatron", "torch", "scripted"] = "megatron"
    """`megatron`: Qwen3-MoE on megatron-core. `torch`: any mixture of experts that transformers has, with FSDP2. `scripted`: no
    model at all, for tests and simulation. Its weights are a digest of what it trained; nothing is learnt."""
    parallel: ParallelConfig = msgspec.field(default_factory=ParallelConfig)
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations made again in the backward pass: `selective` those of MoE layers, `full` those of whole layers."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute dtype; the optimizer keeps fp32 master weights."""
    lr: Positive = 1e-6
    warmup_steps: int = 0
    weight_decay: float = 0.0
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: Positive = 1e-8
    max_grad_norm: Positive = 1.0
    max_tokens_per_micro_batch: PositiveInt = 16384
    threads: PositiveInt = 1
    """Torch threads of the learner on CPU."""
    start_timeout: Positive = 600.0
    collective_timeout: Positive = 600.0
    """Seconds that one rank waits for the others before it gives up."""

    def __post_init__(self) -> None:
        p = self.parallel
        if self.backend == "torch" and max(p.tp, p.pp, p.ep) > 1:
            raise ValueError(
                '`backend` = "torch" shards everything over `parallel.dp` (FSDP2); tp, pp and ep need backend = "megatron"'
            )
        if self.backend == "scripted" and p.world > 1:
            raise ValueError('`backend` = "scripted" is one process: it needs `parallel` of one rank')
