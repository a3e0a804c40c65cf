"""The configuration section `learner`: routes, ranks, optimizer and adapters."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from r3async.config.section import NumberRange, PositiveFloat, PositiveInt, Section, UnitFraction


class RoutingConfig(Section):
    replay: Literal["rollout", "learner", "off"] = "rollout"
    """Routes of the learner's forward passes. `rollout`: the engine's (R3). `learner`: the
    learner's own in a pass before the step (R2). `off`: each pass computes its own."""
    gates: Literal["learner", "rollout"] = "learner"
    """Weights of the experts' outputs in those passes. `learner`: of its own routers.
    `rollout`: the engine's, which makes drift smaller; then the policy loss does not train
    routers. Needs `replay = "rollout"`."""
    min_recorded_fraction: UnitFraction = 0.9
    """Minimum share of trained tokens' inputs with recorded routes; a step below it stops the
    run."""
    trace: Literal["off", "sample", "all"] = "sample"
    """Trajectories whose routes are kept in `runs/NAME/routes`. `sample`: the first of every
    tenth step. `all`: for `r3async inspect verify` and whole groups in the report."""

    def check_values(self) -> None:
        if self.gates == "rollout" and self.replay != "rollout":
            raise ValueError(
                '`gates` = "rollout" are those of replayed experts: with '
                f'`replay` = {self.replay!r} it has to be "learner"'
            )


class ParallelConfig(Section):
    """Division of the model and the batch among the learner's ranks; there are
    `dp * cp * tp * pp` of them."""

    dp: PositiveInt = 1
    """Data parallel: ranks (or groups of ranks) that train different micro-batches. With `backend
    = "torch"` they shard the weights (FSDP2)."""
    tp: PositiveInt = 1
    """Tensor parallel, always with sequence parallelism."""
    pp: PositiveInt = 1
    """Pipeline stages (1F1B)."""
    ep: PositiveInt = 1
    """Expert parallel: number of the `dp * cp * tp` ranks of a stage that divide the
    experts."""
    cp: PositiveInt = 1
    """Context parallel: ranks that divide the tokens of each micro-batch, and the heads during
    attention (Ulysses)."""

    @property
    def world_size(self) -> int:
        return self.dp * self.cp * self.tp * self.pp

    def check_values(self) -> None:
        stage = self.dp * self.cp * self.tp
        if stage % self.ep:
            raise ValueError(
                f"`ep` = {self.ep} must divide dp * cp * tp = {stage}: experts are "
                "divided among these"
            )


AdamBeta = Annotated[float, NumberRange(0, 0.999999999)]


ALL_LINEAR = "all-linear"
SERVED_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM (0.30) makes slots for adapters. Others take the next slot."""
SERVED_MODULES = (
    *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
"""Ends of the names of matrices whose adapters engines add themselves (`lora.deliver`)."""


class LoraConfig(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685): `W + alpha / rank * B A` replaces each targeted
    matrix `W`, and only `A` and `B` are trained."""

    rank: int = 0
    """Rank of the adapters. 0: none; all weights are trained."""
    alpha: PositiveFloat = 32.0
    """The adapters' output is multiplied by `alpha / rank`."""
    targets: list[str] = msgspec.field(default_factory=lambda: [ALL_LINEAR])
    """Matrices that get adapters (docs/lora.md), by a part of their names, such as `q_proj` or
    `layers.3.mlp`. `all-linear`: all but routers, embeddings and the output layer."""
    deliver: Literal["merged", "adapter"] = "merged"
    """Weights that engines get. `merged`: all, adapters included. `adapter`: the adapters alone
    (docs/lora.md#adapters-alone)."""

    @property
    def delivers_adapters(self) -> bool:
        """True if versions have adapters alone."""
        return bool(self.rank) and self.deliver == "adapter"

    def list_served_modules(self) -> list[str]:
        """Return those of `SERVED_MODULES` in which `targets` may name a matrix."""
        known = {part for module in SERVED_MODULES for part in module.split(".")}
        named = [known.intersection(target.split(".")) for target in self.targets]
        return [
            module
            for module in SERVED_MODULES
            if any(parts <= set(module.split(".")) for parts in named)
        ]

    def check_values(self) -> None:
        if self.delivers_adapters and self.rank > SERVED_RANKS[-1]:
            raise ValueError(
                f"`rank` = {self.rank} is more than the {SERVED_RANKS[-1]} that vLLM serves: lower "
                'it, or set `deliver` = "merged"'
            )
        if not self.targets or not all(target.strip(".") for target in self.targets):
            raise ValueError(
                f'`targets` must name matrices, such as ["{ALL_LINEAR}"] or ["q_proj", "experts"]'
            )


def find_served_rank(rank: int) -> int:
    """Return the rank of the slots that vLLM makes for adapters of that rank."""
    return next(served for served in SERVED_RANKS if served >= rank)


def is_served_module(name: str) -> bool:
    """Return whether engines can add an adapter of the matrix of that name themselves."""
    return any(f".{name}".endswith(f".{module}") for module in SERVED_MODULES)


def matches_target(target: str, name: str, *, router: bool) -> bool:
    """Return whether one of `LoraConfig.targets` matches a matrix, given its name in the checkpoint
    without `.weight`."""
    return not router if target == ALL_LINEAR else f".{target.strip('.')}." in f".{name}."


class LearnerConfig(Section):
    backend: Literal["megatron", "torch", "scripted"] = "megatron"
    """Training backend. `megatron`: megatron-core, for most of docs/models.md. `torch`: these and
    other transformers models, with FSDP2. `scripted`: no model, for tests."""
    parallel: ParallelConfig = msgspec.field(default_factory=ParallelConfig)
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that are recomputed in the backward pass. `selective`: those of MoE layers.
    `full`: those of whole layers."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute dtype. The optimizer keeps fp32 master weights."""
    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the learning rate after the warm-up, down to `min_lr_ratio * lr` at the run's last
    update."""
    warmup_steps: int = 0
    """Updates over which the learning rate rises linearly."""
    min_lr_ratio: UnitFraction = 0.0
    """Final learning rate of `linear` and `cosine`, as a share of `lr`."""
    weight_decay: float = 0.0
    """AdamW's decay of weights."""
    betas: tuple[AdamBeta, AdamBeta] = (0.9, 0.95)
    """Adam's decay rates of the gradient's mean and of its square."""
    eps: PositiveFloat = 1e-8
    """Adam's term in the denominator."""
    max_grad_norm: PositiveFloat = 1.0
    """Norm to which a larger gradient is clipped."""
    max_tokens_per_micro_batch: PositiveInt = 16384
    """Maximum number of tokens in one forward pass; tokens of a shared prefix count once."""
    share_prefixes: bool = True
    """Compute what samples have in common, such as a group's prompt, once."""
    lora: LoraConfig = msgspec.field(default_factory=LoraConfig)
    freeze_router: bool = False
    """Do not train the routers."""
    expert_bias_rate: UnitFraction = 0.0
    """Step of the expert bias of models that have one (DeepSeek-V3, GLM-4.5): after each update
    it rises by this for experts with fewer tokens than the layer's mean, and falls for the
    others (arXiv 2408.15664)."""
    offload_moments: bool = False
    """Keep Adam's moments (8 bytes per parameter) in host memory between updates."""
    shard_optimizer: bool = False
    """Divide master weights and moments (12 bytes per parameter in bfloat16, 8 in float32) among
    ranks with copies of a parameter (ZeRO stage 1). FSDP2 (`backend = "torch"`) always does."""
    shard_gradients: bool = False
    """With `shard_optimizer`, divide the sums of gradients (4 bytes per parameter) too (ZeRO stage
    2). The last bits of a step with several micro-batches differ."""
    deterministic: bool = False
    """On GPUs, use only kernels that give the same bits at every call; slower
    (docs/scaling.md#the-same-bits-again). CPUs always do."""
    threads: PositiveInt = 1
    """Torch threads of the learner on CPU."""

    def check_values(self) -> None:
        p = self.parallel
        if self.backend == "torch" and max(p.tp, p.cp, p.pp) > 1:
            raise ValueError(
                '`backend` = "torch" shards everything over `parallel.dp` (FSDP2), and experts over '
                '`ep` of these ranks; tp, cp and pp need backend = "megatron"'
            )
        if self.backend == "torch" and self.shard_optimizer:
            raise ValueError(
                '`shard_optimizer` is for backend = "megatron": "torch" always does that '
                "(FSDP2); set it to false"
            )
        if self.shard_gradients and not self.shard_optimizer:
            raise ValueError(
                "`shard_gradients` divides what `shard_optimizer` divides: set that to true, too"
            )
        if self.shard_gradients and self.lora.rank:
            raise ValueError(
                "`shard_gradients` has nothing to divide with `lora.rank`: adapters' "
                "gradients are small"
            )
        if self.backend == "scripted" and p.world_size > 1:
            raise ValueError(
                '`backend` = "scripted" is one process: it needs `parallel` of one rank'
            )
        if self.backend == "scripted" and self.lora.rank:
            raise ValueError(
                '`backend` = "scripted" has no matrices: `lora.rank` needs another backend'
            )
        if self.expert_bias_rate and (
            self.lora.rank or self.freeze_router or self.backend == "scripted"
        ):
            other = (
                "lora.rank"
                if self.lora.rank
                else "freeze_router"
                if self.freeze_router
                else "backend"
            )
            raise ValueError(
                f"`expert_bias_rate` changes what routers choose, and `{other}` leaves them as "
                "they are: set it to 0"
            )
