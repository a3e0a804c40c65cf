"""The configuration section `algorithm`: advantages, losses, corrections and the trust region."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from r3async.config.others import find_equivalent_value
from r3async.config.section import (
    ConfigError,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Section,
    SignedFloat,
    UnitFraction,
    did_you_mean,
)
from r3async.config.user_code import import_object

MAX_COEFFICIENT = 1.0
"""Maximum of the coefficient that `rollout_kl.target` adapts."""


class RolloutKLConfig(Section):
    """The trust region: a term `coef * KL(rollout || learner)` on every trained token, and
    bounds on the drift."""

    estimator: Literal["k1", "abs", "k2", "k3"] = "k2"
    """Estimator of the KL term in the loss. Measured drift is always k3's mean over trained
    tokens."""
    coef: float = 0.01
    """Weight of the rollout-KL term. With `target`, its initial value and its minimum."""
    target: PositiveFloat | None = None
    """Drift, in nats per token, above which the coefficient is raised after a step."""
    limit: PositiveFloat | None = None
    """A step is shortened, to 1/32 at most, if served drift on the probed episodes would exceed
    this. Unset: the `target`."""
    max: PositiveFloat | None = None
    """Measured drift above which a step makes no optimizer update; nor does one whose drift is not
    finite."""
    measure: Literal["served", "replayed"] = "served"
    """Drift that `target` and `max` use. `served`: with the routers' own choice
    (`rollout_kl/served_k3`). `replayed`: with the rollout's routes (`rollout_kl/k3`)."""
    probe_share: UnitFraction = 0.04
    """Share of a step's tokens on which served drift is measured, with one more forward pass; at
    least 640 tokens, or a quarter of the step if that is less. 0: it is not measured."""
    probe_every: PositiveInt = 4
    """Steps between two such passes; in between, served drift is estimated from the replayed one.
    With `max` and no `limit` there is one every step."""

    @property
    def update_limit(self) -> float | None:
        """The drift above which a step is shortened."""
        return self.limit if self.limit is not None or self.target is None else self.target

    @property
    def measurement_interval(self) -> int:
        """The number of steps from one measurement of served drift before the update to the next.
        With a `limit` served drift is always predicted, so a failure that only routes show does not
        go unnoticed in between; with `max` alone every step is measured."""
        return (
            1
            if self.measure == "served" and self.max is not None and self.update_limit is None
            else self.probe_every
        )

    @property
    def needs_served_drift(self) -> bool:
        """True if a bound needs served drift; then there is always a probed episode."""
        soft = self.measure == "served" and (self.target is not None or self.max is not None)
        return soft or self.update_limit is not None

    def check_values(self) -> None:
        if self.target is not None and not 0 < self.coef <= MAX_COEFFICIENT:
            raise ValueError(
                "with `target`, `coef` must be more than 0, as it starts there, and "
                f"at most {MAX_COEFFICIENT:g}"
            )
        if self.target is not None and self.max is not None and self.max <= self.target:
            raise ValueError(
                "`max` must be more than `target`, or every other step makes no update"
            )
        if self.limit is not None and not self.probe_share:
            raise ValueError(
                "`limit` needs `probe_share`: the drift after a step is predicted on these episodes"
            )
        if self.target is not None and self.limit is not None and self.limit < self.target:
            raise ValueError("`limit` must be at least `target`, or every other step is shortened")


class ReferenceKLConfig(Section):
    coef: float = 0.0
    """Weight of KL(learner || frozen reference model). 0: that model is not loaded."""
    weighted: bool = True
    """Weight each token's term by learner / rollout, as is right for tokens of older weights
    (DeepSeek-V3.2). Off: GRPO's term."""
    weight_cap: PositiveFloat = 5.0
    """Truncation of these weights."""


class DistillationConfig(Section):
    """On-policy distillation: a teacher's log-prob minus the engine's is added to the advantage
    of each sampled token, in the mean the gradient of KL(learner || teacher)."""

    teacher: str = ""
    """Directory of a Hugging Face model with the same tokenizer, which the learner's ranks
    hold; or the address of a vLLM server that serves one, such as `http://HOST:8000/v1`."""
    coef: PositiveFloat = 1.0
    """Factor of that difference."""
    rewards: bool = True
    """Train on rewards as well. Off: distillation alone."""

    @property
    def is_served(self) -> bool:
        """True if a server has the teacher."""
        return self.teacher.startswith(("http://", "https://"))


class ClipConfig(Section):
    """Ratios are clipped to `1 - clip_low .. 1 + clip_high`."""

    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.2
    """Upper end of the clip range of a token's ratio; DAPO (arXiv 2503.14476) takes 0.28."""


class TruncatedPGConfig(Section):
    cap: PositiveFloat = 2.0
    """Truncation of the importance weights."""


class PPOConfig(ClipConfig):
    dual_clip: float | None = None
    """Bound on the loss of tokens with negative advantage, as a multiple of the advantage (3 in
    arXiv 1912.09729)."""

    def check_values(self) -> None:
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError("`dual_clip` must be more than 1")


class TISConfig(PPOConfig):
    cap: PositiveFloat = 2.0
    """Truncation of the weights recomputed / rollout. With 5 this is AReaL's decoupled PPO (arXiv
    2505.24298)."""


class GSPOConfig(ClipConfig):
    clip_low: PositiveFloat = 3e-4
    """Clip range of the ratio of a whole episode, per token: 3e-4 and 4e-4 in arXiv 2507.18071."""
    clip_high: PositiveFloat = 4e-4
    """Upper end of that range. One meant for single tokens, such as 0.28, would clip nothing
    here."""
    noise: float = 0.0
    """Standard deviation of a token's log-ratio between equal weights: the square root of twice
    `rollout_kl/k3_staleness_0`. The range of an episode of n tokens is at least 3 noise /
    sqrt(n)."""


class CISPOConfig(ClipConfig):
    clip_low: PositiveFloat = 1.0
    """Lower end of the clip range. 1: no lower bound."""
    clip_high: PositiveFloat = 4.0
    """Upper end of the clip range: a token's weight is at most 1 more than this, and its gradient
    stays (arXiv 2506.13585)."""


class SAPOConfig(Section):
    tau_positive: PositiveFloat = 1.0
    tau_negative: PositiveFloat = 1.05
    """Temperatures of the gate, for tokens of positive and of negative advantage."""


class DPPOConfig(Section):
    threshold_low: PositiveFloat = 0.2
    threshold_high: PositiveFloat = 0.2
    """Threshold of |difference of probability|, above which a token is pushed no further down,
    and no further up."""


class CPPOConfig(Section):
    threshold: PositiveFloat = 0.2
    """Threshold of |difference of probability| times a token's weight: 0.15 for dense models and
    0.2 for a mixture in arXiv 2606.10968."""
    weight_min: PositiveFraction = 0.8
    """Weight of an episode's last token; the first has 1, and those between lie on a line."""
    budget: PositiveFloat = 0.02
    """Weighted mean of |difference of probability| over the tokens before one, above which its
    threshold is lower."""


class ClipCovConfig(Section):
    """A token's covariance is (log-prob - mean) (advantage - mean), with means over a minibatch."""

    share: PositiveFraction = 2e-4
    """Share of a minibatch's tokens that is left out of the loss, at least one; drawn among those
    whose covariance is between `low` and `high`."""
    low: float = 1.0
    high: float = 5.0
    """Bounds of that covariance."""

    def check_values(self) -> None:
        if self.low >= self.high:
            raise ValueError("`low` must be less than `high`, or no token is between them")


class KLCovConfig(Section):
    share: PositiveFraction = 2e-4
    """Share of a minibatch's tokens that is penalised, at least one: those with the largest
    covariance of log-prob and advantage."""
    coef: PositiveFloat = 1.0
    """Weight of the penalty, |log-ratio|."""


class M2POConfig(Section):
    limit: PositiveFloat = 0.04
    """Mean of the squared log-ratio over a minibatch's tokens that move further away, above which
    the furthest are left out."""


class CorrectionConfig(Section):
    """Tokens that the policy loss leaves out because learner and rollout policy differ on them
    too much; KL terms and denominators keep them. Each mask is off unless set. A ratio is
    learner / rollout, and bounds are inclusive."""

    icepop_low: float | None = None
    icepop_high: float | None = None
    """A token is kept if its ratio is within these bounds. IcePop: 0.5 and 5."""
    kpop: float | None = None
    """A token is kept if the binary KL, in both directions, is at most this. KPop: 0.1."""
    geometric_low: float | None = None
    geometric_high: float | None = None
    """An episode is kept if the geometric mean of its tokens' ratios is within these bounds, for
    example 0.99 and 1.001."""
    product_low: float | None = None
    product_high: float | None = None
    """An episode is kept if the product of its tokens' ratios is within these bounds."""
    veto_low: float | None = None
    veto_high: float | None = None
    """An episode is kept if the ratio of each of its tokens is within these bounds, for example
    0.0001 and 100."""
    max_token_kl: float | None = None
    """An episode is kept if none of its tokens has a k3 above this."""
    numerator: Literal["learner", "recomputed"] = "learner"
    """Numerator of these ratios. `learner`: the current learner. `recomputed`: the learner before
    the step, as in the sources (one more forward pass)."""
    weight: Literal["none", "token", "sequence"] = "none"
    """Multiply the policy loss by importance weights recomputed / rollout, per token or per
    episode, truncated at `weight_cap`. Needs `numerator` and `algorithm.anchor` to be
    `recomputed`."""
    weight_cap: PositiveFloat = 2.0

    @property
    def needs_old_logprobs(self) -> bool:
        """True if the learner's log-probs before the step are compared."""
        return self.numerator == "recomputed"

    def check_values(self) -> None:
        if self.weight != "none" and self.numerator != "recomputed":
            raise ValueError(
                '`weight` needs `numerator` = "recomputed": its ratio is recomputed / rollout'
            )
        for name in ("icepop", "geometric", "product", "veto"):
            low = getattr(self, f"{name}_low")
            high = getattr(self, f"{name}_high")
            if low is not None and not 0 < low <= 1:
                raise ValueError(
                    f"`{name}_low` must be in 0..1: a ratio of 1 means that the policies agree"
                )
            if high is not None and high < 1:
                raise ValueError(
                    f"`{name}_high` must be at least 1: a ratio of 1 means that the policies agree"
                )


class OverlongPenaltyConfig(Section):
    """DAPO's soft punishment of long answers (arXiv 2503.14476, eq. 13)."""

    buffer: int = 0
    """Tokens before `episode.max_new_tokens` over which the penalty grows from 0 to `factor`. 0:
    none."""
    factor: PositiveFloat = 1.0


BUILTIN_ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "maxrl")
"""The built-in values of `algorithm.advantage`. All but `reinforce_pp`, and your own, compare an
episode with the others of its group, so that a group needs several episodes."""

BUILTIN_POLICY_LOSSES = (
    "truncated_pg",
    "sequence_truncated_pg",
    "ppo",
    "tis",
    "gspo",
    "cispo",
    "sapo",
    "dppo",
    "cppo",
    "clip_cov",
    "kl_cov",
    "m2po",
)
"""The built-in values of `algorithm.policy_loss`."""


class RouterAuxConfig(Section):
    """Load-balancing loss of the routers, with the replayed experts as the load."""

    coef: float = 0.0
    """Weight of the load-balancing loss of every MoE layer, `experts * sum_i f_i P_i` (Switch
    Transformer, arXiv 2101.03961, eq. 4); 1 is an even load. Needs `routing.replay`."""


class AlgorithmConfig(Section):
    advantage: str = "grpo"
    """Advantage estimator (docs/algorithms.md has the formulas): `grpo`, `dr_grpo`, `rloo`,
    `reinforce_pp`, `reinforce_pp_baseline`, `maxrl`, or your own as `module:function`."""
    credit: Literal["trajectory", "turn", "token"] = "trajectory"
    """Unit of credit. `trajectory`: all turns share the episode's advantage. `turn`: a turn is
    compared with the same turn of its group, if every turn is rewarded for its own answer.
    `token`: the same for the reward from a token to the episode's end."""
    filter_zero_variance: bool = False
    """Leave out groups whose episodes all have the same score, without `overlong_penalty`."""
    overlong_filter: bool = False
    """Leave out episodes whose answer or context became too long. Their scores still count in
    the group."""
    overlong_penalty: OverlongPenaltyConfig = msgspec.field(default_factory=OverlongPenaltyConfig)
    reduction: Literal[
        "token_mean", "sequence_mean", "sequence_mean_token_sum_norm", "prompt_mean"
    ] = "token_mean"
    """What the loss is a mean over (docs/algorithms.md)."""
    policy_loss: str = "truncated_pg"
    """Policy loss (docs/algorithms.md): `truncated_pg`, `sequence_truncated_pg`, `ppo`, `tis`,
    `gspo`, `cispo`, `sapo`, `dppo`, `cppo`, `clip_cov`, `kl_cov`, `m2po`, or your own as
    `module:function`."""
    anchor: Literal["rollout", "recomputed"] = "rollout"
    """Denominator of the policy loss's ratio. `rollout`: the engine's log-probs. `recomputed`:
    the learner's before the step (one more forward pass)."""
    truncated_pg: TruncatedPGConfig = msgspec.field(default_factory=TruncatedPGConfig)
    ppo: PPOConfig = msgspec.field(default_factory=PPOConfig)
    tis: TISConfig = msgspec.field(default_factory=TISConfig)
    gspo: GSPOConfig = msgspec.field(default_factory=GSPOConfig)
    cispo: CISPOConfig = msgspec.field(default_factory=CISPOConfig)
    sapo: SAPOConfig = msgspec.field(default_factory=SAPOConfig)
    dppo: DPPOConfig = msgspec.field(default_factory=DPPOConfig)
    cppo: CPPOConfig = msgspec.field(default_factory=CPPOConfig)
    clip_cov: ClipCovConfig = msgspec.field(default_factory=ClipCovConfig)
    kl_cov: KLCovConfig = msgspec.field(default_factory=KLCovConfig)
    m2po: M2POConfig = msgspec.field(default_factory=M2POConfig)
    loss_args: dict[str, Any] = msgspec.field(default_factory=dict)
    """Arguments for your own policy loss or advantage, passed as `inputs.config.loss_args`."""
    correction: CorrectionConfig = msgspec.field(default_factory=CorrectionConfig)
    entropy_coef: SignedFloat = 0.0
    """Weight of the entropy bonus."""
    rollout_kl: RolloutKLConfig = msgspec.field(default_factory=RolloutKLConfig)
    reference_kl: ReferenceKLConfig = msgspec.field(default_factory=ReferenceKLConfig)
    distillation: DistillationConfig = msgspec.field(default_factory=DistillationConfig)
    router_aux: RouterAuxConfig = msgspec.field(default_factory=RouterAuxConfig)

    def check_values(self) -> None:
        if self.advantage == "maxrl" and self.overlong_penalty.buffer:
            raise ValueError(
                "`overlong_penalty` makes rewards negative, and `advantage` = 'maxrl' is "
                "for rewards >= 0"
            )
        if self.correction.weight != "none" and (
            self.anchor == "rollout" or self.policy_loss == "tis"
        ):
            raise ValueError(
                "`correction.weight` counts recomputed / rollout twice: it needs `anchor` = "
                '"recomputed", and a `policy_loss` other than '
                "'tis', which has it"
            )
        _check_function_name("policy_loss", self.policy_loss, BUILTIN_POLICY_LOSSES)
        _check_function_name("advantage", self.advantage, BUILTIN_ADVANTAGES)


def _check_function_name(key: str, value: str, builtin: Sequence[str]) -> None:
    """Raise `ValueError` for a `value` that is neither built in nor the name of a function."""
    if value in builtin or ":" in value:
        return
    hint = find_equivalent_value(key, value) or did_you_mean(
        value, builtin, f"built in: {', '.join(builtin)}."
    )
    raise ValueError(
        f"`{key}` = {value!r}: there is none of that name; {hint} Your own is `module:function`."
    )


def check_policy_loss(config: AlgorithmConfig) -> None:
    """Import a user-defined policy loss. Raises `ConfigError`. Reading a configuration does not do
    this, as the configuration may come from a stranger."""
    if config.policy_loss not in BUILTIN_POLICY_LOSSES:
        import_policy_loss(config.policy_loss)


def import_policy_loss(path: str) -> Callable[..., Any]:
    """Return the function at `module:function`. Raises `ConfigError` if there is none that
    takes one argument."""
    return _import_function("policy_loss", path, "the loss inputs")


def import_advantage(path: str) -> Callable[..., Any]:
    """Return the function at `module:function`. Raises `ConfigError` if there is none that
    takes one argument."""
    return _import_function("advantage", path, "the scores of a group")


def _import_function(key: str, path: str, argument: str) -> Callable[..., Any]:
    try:
        function = import_object(path)
    except (Exception, SystemExit) as error:  # importing somebody's module may raise anything
        raise ConfigError(f"[algorithm] `{key}` = {path!r} cannot be loaded: {error}") from error
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ConfigError(
            f"[algorithm] `{key}` = {path!r} must be a function of one argument, {argument}: "
            f"{error}"
        ) from error
    return function
