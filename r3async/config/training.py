"""Sections about what trains, besides the algorithm: routes, the learner's ranks, its optimizer and adapters."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from r3async.config.section import NumberRange, PositiveFloat, PositiveInt, Section, UnitFraction


class RoutingConfig(Section):
    replay: Literal["rollout", "learner", "off"] = "rollout"
    """`rollout`: the learner uses the experts that the engine chose (R3). `learner`: those that it chose itself in a pass
    before the step (R2). `off`: every pass routes by itself."""
    min_recorded_fraction: UnitFraction = 0.9
    """With replay, a step whose recorded share of trained tokens' inputs is below this stops the run."""
    trace: Literal["off", "sample", "all"] = "sample"
    """Whose routes are kept in `runs/NAME/routes`, as the engine returned them and as the learner used them. `sample`: the
    first trajectory's of every `trace_every`-th step. `all`: every trajectory's; `r3async inspect verify NAME`
    then verifies that they are equal. Per token 25 bytes and 3 ids for each MoE layer and expert it is sent to."""
    trace_every: PositiveInt = 10


class ParallelConfig(Section):
    """How the learner's ranks divide the model and the batch; there are `dp * cp * tp * pp` of them."""

    dp: PositiveInt = 1
    """Data parallel: ranks (or groups of ranks) that train different micro-batches. With `backend = "torch"` the weights
    are sharded among them (FSDP2)."""
    tp: PositiveInt = 1
    """Tensor parallel, always with sequence parallelism."""
    pp: PositiveInt = 1
    """Pipeline stages (1F1B)."""
    ep: PositiveInt = 1
    """Expert parallel: among how many of the `dp * cp * tp` ranks of a stage the experts are divided."""
    cp: PositiveInt = 1
    """Context parallel: ranks among which the tokens of each micro-batch are divided, and their heads while they attend
    (Ulysses). For long samples: each rank has `1 / cp` of the activations."""
    vpp: PositiveInt = 1
    """Virtual pipeline stages: not supported."""

    @property
    def world_size(self) -> int:
        return self.dp * self.cp * self.tp * self.pp

    def check_values(self) -> None:
        stage = self.dp * self.cp * self.tp
        if stage % self.ep:
            raise ValueError(f"`ep` = {self.ep} must divide dp * cp * tp = {stage}: experts are divided among these")
        if self.vpp > 1:
            raise ValueError(
                "`vpp` (virtual pipeline stages) is not supported: a rank would hold several separate pieces of the model, and "
                "neither weights nor recorded routes are divided that way; use `pp` alone"
            )


AdamBeta = Annotated[float, NumberRange(0, 0.999999999)]


ALL_LINEAR = "all-linear"


class LoraConfig(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685): `W + alpha / rank * B A` in the place of each targeted matrix `W`, of which
    only `A` and `B` are trained. Engines are given the merged weights."""

    rank: int = 0
    """Columns of `B` and rows of `A`; 0: no adapters, all weights are trained."""
    alpha: PositiveFloat = 32.0
    """What the adapters add is multiplied by `alpha / rank`."""
    targets: list[str] = msgspec.field(default_factory=lambda: [ALL_LINEAR])
    """Matrices that get adapters, by a part of their names in the checkpoint, between dots: `q_proj`, `self_attn`, `experts`,
    `layers.3.mlp`. `all-linear`: all but routers, embeddings and the output layer. A router (`mlp.gate`) is targeted by name
    only; embeddings and the output layer cannot be."""

    def check_values(self) -> None:
        if not self.targets or not all(target.strip(".") for target in self.targets):
            raise ValueError(f'`targets` must name matrices, such as ["{ALL_LINEAR}"] or ["q_proj", "experts"]')


def matches_target(target: str, name: str, *, router: bool) -> bool:
    """Whether one of `LoraConfig.targets` names a matrix, by its name in the checkpoint without `.weight`."""
    return not router if target == ALL_LINEAR else f".{target.strip('.')}." in f".{name}."


class LearnerConfig(Section):
    backend: Literal["megatron", "torch", "scripted"] = "megatron"
    """`megatron`: the models of docs/models.md on megatron-core. `torch`: these and others of transformers, with FSDP2.
    `scripted`: no model at all, for tests and simulation. Its weights are a digest of what it trained; nothing is learnt."""
    parallel: ParallelConfig = msgspec.field(default_factory=ParallelConfig)
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations made again in the backward pass: `selective` those of MoE layers, `full` those of whole layers."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute dtype; the optimizer keeps fp32 master weights."""
    lr: PositiveFloat = 1e-6
    """The highest learning rate: of every step with `lr_schedule = "constant"` and no warm-up."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after the warm-up: not at all, or in a line or half a cosine down to `min_lr_ratio * lr` at the
    run's last update (`steps * schedule.minibatches_per_step * schedule.epochs_per_step`). It counts updates that were made, so
    skipped ones delay it."""
    warmup_steps: int = 0
    """Updates in which it rises in a line, the last of them with `lr` itself."""
    min_lr_ratio: UnitFraction = 0.0
    """Where `linear` and `cosine` end, as a share of `lr`."""
    weight_decay: float = 0.0
    betas: tuple[AdamBeta, AdamBeta] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    max_grad_norm: PositiveFloat = 1.0
    max_tokens_per_micro_batch: PositiveInt = 16384
    """Tokens that are fed forward at once; those of a shared prefix count once."""
    share_prefixes: bool = True
    """Feed what samples have in common, a group's prompt above all, forward once: tokens that are not trained, with the same
    routes. The gradient is the same."""
    lora: LoraConfig = msgspec.field(default_factory=LoraConfig)
    freeze_router: bool = False
    """Leave the routers' weights as they are in the start model."""
    expert_bias_rate: UnitFraction = 0.0
    """Of models in which a bias of each expert decides who is chosen (DeepSeek-V3, GLM-4.5): after each update the bias of an
    expert that got fewer tokens than the mean of its layer rises by this, and that of the others falls (arXiv 2408.15664). 0:
    they stay as they are."""
    offload_moments: bool = False
    """Keep Adam's moments (8 bytes a parameter) in host memory between updates. The updates are the same bit by bit, and take as
    long again as moving 16 bytes a parameter."""
    shard_optimizer: bool = False
    """Divide master weights and moments (12 bytes a parameter in bfloat16, 8 in float32) among the ranks that hold copies of a
    parameter (ZeRO stage 1). With `backend = "torch"` FSDP2 always does. The updates are those of copies that are all kept, as
    far as sums of gradients are."""
    deterministic: bool = False
    """Let torch use only kernels that give the same bits at every call: a step that a resumed run makes again on GPUs is then the
    one that was lost. Slower. docs/scaling.md says where it ends; on CPU bits are the same without it."""
    threads: PositiveInt = 1
    """Torch threads of the learner on CPU."""
    start_timeout: PositiveFloat = 600.0
    collective_timeout: PositiveFloat = 600.0
    """Seconds that one rank waits for the others before it times out."""

    def check_values(self) -> None:
        p = self.parallel
        if self.backend == "torch" and max(p.tp, p.cp, p.pp, p.ep) > 1:
            raise ValueError(
                '`backend` = "torch" shards everything over `parallel.dp` (FSDP2); tp, cp, pp and ep need backend = "megatron"'
            )
        if self.backend == "torch" and self.shard_optimizer:
            raise ValueError(
                '`shard_optimizer` is for backend = "megatron": "torch" always does that (FSDP2); set it to false'
            )
        if self.backend == "scripted" and p.world_size > 1:
            raise ValueError('`backend` = "scripted" is one process: it needs `parallel` of one rank')
        if self.backend == "scripted" and self.lora.rank:
            raise ValueError('`backend` = "scripted" has no matrices: `lora.rank` needs another backend')
        if self.expert_bias_rate and (self.lora.rank or self.freeze_router or self.backend == "scripted"):
            other = "lora.rank" if self.lora.rank else "freeze_router" if self.freeze_router else "backend"
            raise ValueError(
                f"`expert_bias_rate` changes what routers choose, and `{other}` leaves them as they are: set it to 0"
            )
