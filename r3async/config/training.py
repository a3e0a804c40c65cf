"""Sections about what trains: advantages, losses, corrections, the trust region, routes, and the learner's ranks."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec

from r3async.config.section import Positive, PositiveInt, Range, Section, Share, Signed, did_you_mean


class RolloutKLConfig(Section):
    """The trust region: a term `coef * KL(rollout || learner)` on every trained token."""

    estimator: Literal["k1", "abs", "k2", "k3"] = "k2"
    """Of the term in the loss. What is measured, for `target` and `max`, is always k3's mean over trained tokens."""
    coef: float = 0.01
    """Weight of the term; with `target`, where it starts."""
    target: Positive | None = None
    """Drift, in nats per token, to which the coefficient is adapted after every step. Unset: the coefficient stays."""
    max: Positive | None = None
    """A step whose measured drift is above this, or not finite, makes no optimizer update. Unset: none is refused."""
    coef_min: Positive = 1e-4
    coef_max: float = 100.0
    """Bounds of the adapted coefficient."""
    gain: Positive = 0.1
    """Of the adaptation: e-folds that the coefficient moves in a step when drift is twice its target."""

    def check(self) -> None:
        if self.coef_max < self.coef_min:
            raise ValueError("`coef_max` must be at least `coef_min`")
        if self.target is not None and not self.coef_min <= self.coef <= self.coef_max:
            raise ValueError("with `target`, `coef` must be between `coef_min` and `coef_max`")
        if self.target is not None and self.max is not None and self.max <= self.target:
            raise ValueError("`max` must be more than `target`, or every other step makes no update")


class ReferenceKLConfig(Section):
    coef: float = 0.0
    """Weight of KL(learner || frozen reference model); 0 does without that model."""


class ClipConfig(Section):
    """Ratios are clipped to `1 - clip_low .. 1 + clip_high`."""

    clip_low: Positive = 0.2
    clip_high: Positive = 0.2
    """DAPO (arXiv 2503.14476) takes 0.28."""


class PPOConfig(ClipConfig):
    dual_clip: float | None = None
    """If set, bounds the loss of tokens with negative advantage to this many times the advantage (3 in arXiv 1912.09729)."""

    def check(self) -> None:
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError("`dual_clip` must be more than 1")


class DecoupledPPOConfig(PPOConfig):
    behaviour_cap: Positive = 5.0
    """Truncation of the behaviour weights, recomputed / rollout."""


class GSPOConfig(ClipConfig):
    clip_low: Positive = 3e-4
    clip_high: Positive = 4e-4


class CISPOConfig(ClipConfig):
    clip_low: Positive = 1.0
    """1: no lower bound."""
    clip_high: Positive = 4.0


class SAPOConfig(Section):
    tau_positive: Positive = 1.0
    tau_negative: Positive = 1.05
    """Temperatures of the gate, for tokens of positive and of negative advantage."""


class DPPOConfig(Section):
    threshold_low: Positive = 0.2
    threshold_high: Positive = 0.2
    """|difference of probability| above which a token is pushed no further down, and no further up."""


class CorrectionConfig(Section):
    """Trained tokens that the policy loss leaves out because learner and rollout policy differ on them too much. The KL
    terms keep them, and denominators stay. Each is off unless set; a ratio is learner / rollout, and bounds are inclusive."""

    icepop_low: float | None = None
    icepop_high: float | None = None
    """A token is kept if its ratio is within these. IcePop: 0.5 and 5."""
    kpop: float | None = None
    """A token is kept if the binary KL, in both directions, is at most this. KPop: 0.1."""
    geometric_low: float | None = None
    geometric_high: float | None = None
    """An episode is kept if the geometric mean of its tokens' ratios is within these, 0.99 and 1.001, say."""
    product_low: float | None = None
    product_high: float | None = None
    """An episode is kept if the product of its tokens' ratios is within these."""
    max_token_kl: float | None = None
    """An episode is kept if none of its tokens' k3 is above this."""

    def check(self) -> None:
        for name in ("icepop", "geometric", "product"):
            low, high = getattr(self, f"{name}_low"), getattr(self, f"{name}_high")
            if low is not None and not 0 < low <= 1:
                raise ValueError(f"`{name}_low` must be in 0..1: a ratio of 1 means that the policies agree")
            if high is not None and high < 1:
                raise ValueError(f"`{name}_high` must be at least 1: a ratio of 1 means that the policies agree")


class OverlongPenaltyConfig(Section):
    """DAPO's soft punishment of long answers (arXiv 2503.14476, eq. 13)."""

    buffer: int = 0
    """Tokens before `episode.max_new_tokens` over which the penalty grows from 0 to `factor`; 0: no penalty."""
    factor: Positive = 1.0


GROUP_RELATIVE = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "maxrl")
"""Values of `algorithm.advantage` that compare an episode with the others of its group, of which there have to be some."""

POLICY_LOSSES = ("tis", "ppo", "gspo", "cispo", "sapo", "dppo", "decoupled_ppo")
"""The built-in values of `algorithm.policy_loss`."""


class RouterAuxConfig(Section):
    """Load balance of the routers, with the experts that were replayed as the load."""

    coef: float = 0.0
    """Weight of `experts * sum_i f_i P_i` of every MoE layer: `f_i` the share of the step's choices that fell on expert i,
    `P_i` the router's mean probability of it (Switch Transformer, arXiv 2101.03961, eq. 4). 1 is even. Needs
    `routing.replay`, whose routes are known before the step's first forward pass."""


class AlgorithmConfig(Section):
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "maxrl"] = "grpo"
    """How scores become advantages; formulas and sources in `learner.losses.advantages`."""
    credit: Literal["trajectory", "turn", "token"] = "trajectory"
    """`trajectory`: all turns share the episode's advantage. `turn`: a turn's is relative to the same turn of its group; only
    for environments that reward every turn for its own answer.
    `token`: a token's score is the reward from it to the episode's end, relative to the same turn of its group."""
    normalize_std: bool = True
    """With `advantage = "grpo"`, divide by the group's standard deviation; off gives Dr.GRPO's."""
    filter_zero_variance: bool = False
    """Do not train groups whose episodes all scored the same. `schedule.replaced_groups` takes others in their place."""
    overlong_filter: bool = False
    """Do not train episodes that ended because an answer, or the context, became too long. They still count as scores."""
    overlong_penalty: OverlongPenaltyConfig = msgspec.field(default_factory=OverlongPenaltyConfig)
    reduction: Literal["token_mean", "sequence_mean", "sequence_mean_token_sum_norm", "prompt_mean"] = "token_mean"
    """What the loss is a mean over; formulas in `learner.losses.objective`."""
    policy_loss: str = "tis"
    """`tis`, `ppo`, `gspo`, `cispo`, `sapo`, `dppo`, `decoupled_ppo` (formulas and sources in `learner.losses.policy_loss`), or
    your own as `module:function`, of the type `learner.losses.policy_loss.PolicyLossFunction`."""
    anchor: Literal["rollout", "recomputed"] = "rollout"
    """Denominator of the policy loss's ratio: the log-probs that the engine sampled with, or those that the learner
    recomputes before the step's first update (one more forward pass)."""
    ratio_cap: Positive = 2.0
    """Of `tis`: truncation of its importance weights."""
    ppo: PPOConfig = msgspec.field(default_factory=PPOConfig)
    gspo: GSPOConfig = msgspec.field(default_factory=GSPOConfig)
    cispo: CISPOConfig = msgspec.field(default_factory=CISPOConfig)
    sapo: SAPOConfig = msgspec.field(default_factory=SAPOConfig)
    dppo: DPPOConfig = msgspec.field(default_factory=DPPOConfig)
    decoupled_ppo: DecoupledPPOConfig = msgspec.field(default_factory=DecoupledPPOConfig)
    loss_args: dict[str, Any] = msgspec.field(default_factory=dict)
    """Passed to your own policy loss, as `inputs.config.loss_args`."""
    correction: CorrectionConfig = msgspec.field(default_factory=CorrectionConfig)
    entropy_coef: Signed = 0.0
    """Weight of the entropy bonus."""
    rollout_kl: RolloutKLConfig = msgspec.field(default_factory=RolloutKLConfig)
    reference_kl: ReferenceKLConfig = msgspec.field(default_factory=ReferenceKLConfig)
    router_aux: RouterAuxConfig = msgspec.field(default_factory=RouterAuxConfig)

    def check(self) -> None:
        if self.advantage == "maxrl" and self.overlong_penalty.buffer:
            raise ValueError("`overlong_penalty` makes rewards negative, and `advantage` = 'maxrl' is for rewards >= 0")
        if self.policy_loss not in POLICY_LOSSES:
            import_policy_loss(self.policy_loss)


def import_policy_loss(path: str) -> Callable[..., Any]:
    """The function at `module:function`. Raises `ValueError` if there is none that takes one argument."""
    if ":" not in path:
        hint = did_you_mean(path, POLICY_LOSSES, f"built in: {', '.join(POLICY_LOSSES)}.")
        raise ValueError(f"`policy_loss` = {path!r}: no such loss; {hint} Your own is `module:function`.")
    try:
        function = pkgutil.resolve_name(path)
    except Exception as error:  # importing somebody's module may raise anything
        raise ValueError(f"`policy_loss` = {path!r} cannot be loaded: {error}") from error
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ValueError(
            f"`policy_loss` = {path!r} must be a function of one argument, the loss inputs: {error}"
        ) from error
    return function


class RoutingConfig(Section):
    replay: Literal["rollout", "learner", "off"] = "rollout"
    """`rollout`: the learner uses the experts that the engine chose (R3). `learner`: those that it chose itself in a pass
    before the step (R2). `off`: every pass routes by itself."""
    min_recorded_fraction: Share = 0.9
    """With replay, a step whose recorded share of trained tokens' inputs is below this stops the run."""
    trace: Literal["off", "sample", "all"] = "sample"
    """Whose routes are kept in `runs/NAME/routes`, as the engine returned them and as the learner used them. `sample`: the
    first trajectory's of every `trace_every`-th step. `all`: every trajectory's; `r3async inspect verify NAME`
    then verifies that they are equal. Per token 25 bytes and 3 ids for each MoE layer and expert it is sent to."""
    trace_every: PositiveInt = 10


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

    def check(self) -> None:
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


ALL_MATRICES = "all-linear"


class LoraConfig(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685): `W + alpha / rank * B A` in the place of each targeted matrix `W`, of which
    only `A` and `B` are trained. Engines are given the merged weights."""

    rank: int = 0
    """Columns of `B` and rows of `A`; 0: no adapters, all weights are trained."""
    alpha: Positive = 32.0
    """What the adapters add is multiplied by `alpha / rank`."""
    targets: list[str] = msgspec.field(default_factory=lambda: [ALL_MATRICES])
    """Matrices that get adapters, by a part of their names in the checkpoint, between dots: `q_proj`, `self_attn`, `experts`,
    `layers.3.mlp`. `all-linear`: all but routers, embeddings and the output layer. A router (`mlp.gate`) is targeted by name
    only; embeddings and the output layer cannot be."""

    def check(self) -> None:
        if not self.targets or not all(target.strip(".") for target in self.targets):
            raise ValueError(f'`targets` must name matrices, such as ["{ALL_MATRICES}"] or ["q_proj", "experts"]')


def names_matrix(target: str, name: str, *, router: bool) -> bool:
    """Whether one of `LoraConfig.targets` names a matrix, by its name in the checkpoint without `.weight`."""
    return not router if target == ALL_MATRICES else f".{target.strip('.')}." in f".{name}."


class LearnerConfig(Section):
    backend: Literal["megatron", "torch", "scripted"] = "megatron"
    """`megatron`: the models of docs/models.md on megatron-core. `torch`: these and others of transformers, with FSDP2.
    `scripted`: no model at all, for tests and simulation. Its weights are a digest of what it trained; nothing is learnt."""
    parallel: ParallelConfig = msgspec.field(default_factory=ParallelConfig)
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations made again in the backward pass: `selective` those of MoE layers, `full` those of whole layers."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute dtype; the optimizer keeps fp32 master weights."""
    lr: Positive = 1e-6
    """The highest learning rate: of every step with `lr_schedule = "constant"` and no warm-up."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after the warm-up: not at all, or in a line or half a cosine down to `min_lr_ratio * lr` at the
    run's last update (`steps * schedule.minibatches_per_step`). It counts updates that were made, so skipped ones delay it."""
    warmup_steps: int = 0
    """Updates in which it rises in a line, the last of them with `lr` itself."""
    min_lr_ratio: Share = 0.0
    """Where `linear` and `cosine` end, as a share of `lr`."""
    weight_decay: float = 0.0
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: Positive = 1e-8
    max_grad_norm: Positive = 1.0
    max_tokens_per_micro_batch: PositiveInt = 16384
    """Tokens that are fed forward at once; those of a shared prefix count once."""
    share_prefixes: bool = True
    """Feed what samples have in common, a group's prompt above all, forward once: tokens that are not trained, with the same
    routes. The gradient is the same."""
    lora: LoraConfig = msgspec.field(default_factory=LoraConfig)
    freeze_router: bool = False
    """Leave the routers' weights as they are in the start model."""
    threads: PositiveInt = 1
    """Torch threads of the learner on CPU."""
    start_timeout: Positive = 600.0
    collective_timeout: Positive = 600.0
    """Seconds that one rank waits for the others before it times out."""

    def check(self) -> None:
        p = self.parallel
        if self.backend == "torch" and max(p.tp, p.pp, p.ep) > 1:
            raise ValueError(
                '`backend` = "torch" shards everything over `parallel.dp` (FSDP2); tp, pp and ep need backend = "megatron"'
            )
        if self.backend == "scripted" and p.world > 1:
            raise ValueError('`backend` = "scripted" is one process: it needs `parallel` of one rank')
        if self.backend == "scripted" and self.lora.rank:
            raise ValueError('`backend` = "scripted" has no matrices: `lora.rank` needs another backend')
