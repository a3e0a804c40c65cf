"""Drift between the learner and the policy that sampled its tokens: KL estimators, corrections, and the trust region.

pi: the learner; mu: the rollout policy; `delta = log pi(x) - log mu(x)` for tokens `x ~ mu`. Estimators of
KL(mu || pi):

| name  | value              | mean under mu | gradient under mu                                      |
|-------|--------------------|---------------|--------------------------------------------------------|
| `k1`  | `-delta`           | KL, unbiased  | unbiased; noisy, a single token may be negative        |
| `abs` | `|delta|`          | above `|KL|`  | of constant size: drift costs the same however small   |
| `k2`  | `delta^2 / 2`      | KL + O(delta^3) | low variance; equals KL's to first order             |
| `k3`  | `e^delta - 1 - delta` | KL, unbiased | unbiased; never negative                              |

Source: J. Schulman, "Approximating KL Divergence" (2020), with p = pi and q = mu, for KL(q, p) from samples of q. There
the ratio is p/q, so the sign of `delta` depends on which policy sampled.

For tokens sampled from pi, and `delta = log ref - log pi`, k3 is the term of GRPO (arXiv 2402.03300, eq. 4):
KL(pi || ref) in value; its gradient is that of KL(ref || pi), which agrees with KL(pi || ref)'s to first order in the
drift.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from r3async.checkpoint.state import TrustRegionState
from r3async.config import CorrectionConfig, RolloutKLConfig
from r3async.learner.policy_loss import bounded_exp, sum_by_episode

K3_TANGENT_START = 20.0
K3_SERIES_LIMIT = 1e-2
MIN_PROBABILITY = 1e-6
MAX_SHARE_DECAY, MAX_SHARE_GROWTH = 0.7, 1.15
"""The least factor of `max_share` after a step that was shortened, and its factor after one that was not. It settles
where about one step in four is shortened."""
MAX_SHARE_FLOOR = 1 / 32
VARIANCE_HISTORY = 4
"""Number of measurements that define the usual variance of the gap. With more of them, intervals hold the true value no
more often, and are wider where drift falls."""
MAX_DRIFT_ERROR = 3.0
"""The largest error that counts: one wild step moves the coefficient no further than drift of 4 times the target."""


def k2(delta: Tensor) -> Tensor:
    """Return `delta^2 / 2`. (Elsewhere `(log ratio)^2`, which is 2 k2.)"""
    return 0.5 * delta.square()


def k3(delta: Tensor) -> Tensor:
    """Return `e^delta - 1 - delta`; beyond delta = 20, its tangent there.

    Computed by `expm1`, and near 0 by its series up to the fourth order (relative error below 1e-7): there the two
    terms cancel, and in float32 would leave little of the value below 1e-5 and nothing of the gradient below 1e-7. The
    tangent keeps a token that mu would sample once in 5e8 from overflowing, and its gradient from vanishing as a
    clamp's would.

    The branch that is not taken has a gradient too, times 0, which is 0 only if the gradient is finite: so the input of
    the series is clamped to its range.
    """
    bounded = delta.clamp(max=K3_TANGENT_START)
    tangent = torch.where(delta > K3_TANGENT_START, math.expm1(K3_TANGENT_START) * (delta - K3_TANGENT_START), 0.0)
    near = delta.clamp(-K3_SERIES_LIMIT, K3_SERIES_LIMIT)
    series = 0.5 * near.square() * (1 + near / 3 * (1 + near / 4))
    return torch.where(delta.abs() < K3_SERIES_LIMIT, series, torch.expm1(bounded) - bounded + tangent)


def clamped_k3(delta: Tensor, limit: float) -> Tensor:
    """Return k3, at most `limit` (`rollout_kl.token_limit`) for a token.

    So one token does not decide the mean of a step. Values that are not finite stay so.
    """
    values = k3(delta)
    return torch.where(values.isfinite(), values.clamp(max=limit), values)


def tangent_k3(delta: Tensor, limit: float) -> Tensor:
    """Return k3, replaced by its tangent above the positive `delta` where it reaches `limit`.

    So the gradient is bounded, and does not vanish. For negative `delta`, k3 itself is nearly a line, of slope -1.
    """
    edge = min(math.sqrt(2 * limit), math.log1p(2 * limit) + 1)
    for _ in range(30):  # Newton's method from above, on a convex function
        edge -= (math.expm1(edge) - edge - limit) / math.expm1(edge)
    beyond = (delta - edge).clamp(min=0)
    return k3(delta - beyond) + math.expm1(edge) * beyond


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": torch.neg, "abs": torch.abs, "k2": k2, "k3": k3}
"""The estimators, by their names in `algorithm.rollout_kl.estimator`. They keep the shape and dtype of the deltas."""


# -- corrections: tokens that the policy loss leaves out -----------------------------------------------------------------


def compute_correction_mask(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    staleness: Tensor,
    episode_index: Tensor,
    num_episodes: int,
    config: CorrectionConfig,
    max_token_staleness: int | None = None,
) -> Tensor:
    """Return bool `[M]`: the tokens that the policy loss keeps.

    The arguments are those of `TokenBatch`; `logprobs` are pi's: the learner's now, or before the step with
    `correction.anchor = "recomputed"`, as in the sources of all but the last two of these.

    Per token: `icepop`, a band on `e^delta` (IcePop: "Small Leak Can Sink a Great Ship", Ant Group 2025; Ring-1T, arXiv
    2510.18855, with 0.5 and 5); `max(binary_kl(pi, mu), binary_kl(mu, pi)) <= kpop` (KPop: "Taming Training-Inference
    Mismatch in Reinforcement Learning with Adaptive Masking Regions", Ant Group 2026, with 0.1); and
    `age <= max_token_age` (`schedule.max_token_age`). Per episode: `geometric`, a band on `e^mean(delta)`, and
    `product`, on `e^sum(delta)` (Liu, Li et al., "When Speed Kills Stability: Demystifying RL Collapse from the
    Training-Inference Mismatch", 2025); `max(k3(delta)) <= max_token_kl` (trust region masking, arXiv 2512.23075, with
    k3 for the KL at a token).

    The mask is computed without gradient, in float64. Tokens left out contribute to no part of the policy loss, nor to
    the entropy bonus; the KL terms keep them, since the trust region is what brings drifted tokens back. Denominators
    do not change: a batch of which half is left out takes half a step. A learner log-prob that is NaN is never left
    out, so that the loss shows it.
    """
    logprobs, rollout_logprobs = logprobs.detach().double(), rollout_logprobs.double()
    delta = logprobs - rollout_logprobs
    left_out = _is_outside_band(delta, config.icepop_low, config.icepop_high)
    if config.kpop is not None:
        left_out |= binary_kl(logprobs, rollout_logprobs) > config.kpop
        left_out |= binary_kl(rollout_logprobs, logprobs) > config.kpop
    if max_token_staleness is not None:
        left_out |= staleness > max_token_staleness
    if not corrects_by_episode(config):
        return ~left_out
    total = sum_by_episode(delta, episode_index, num_episodes)
    mean = total / sum_by_episode(torch.ones_like(delta), episode_index, num_episodes).clamp(min=1)
    episodes = _is_outside_band(mean, config.geometric_low, config.geometric_high)
    episodes |= _is_outside_band(total, config.product_low, config.product_high)
    if config.max_token_kl is not None:
        episodes |= torch.zeros_like(total).scatter_reduce_(0, episode_index, k3(delta), "amax") > config.max_token_kl
    return ~(left_out | episodes[episode_index])


def compute_correction_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, episode_index: Tensor, num_episodes: int, config: CorrectionConfig
) -> Tensor:
    """Return `[M]`, without gradient, in the dtype of `old_logprobs`: the factor of each token's policy loss.

    `token`: `min(e^delta, weight_cap)`; `sequence`: `min(e^sum(delta), weight_cap)` over the trained tokens of its
    episode, with `delta = log pi_old - log mu` clamped to -20..20. Truncated importance sampling by token and by
    sequence: Liu, Li et al., "When Speed Kills Stability", 2025, the `rollout_is` of verl.
    """
    delta = old_logprobs.detach().double() - rollout_logprobs.double()
    if config.weight == "sequence":
        delta = sum_by_episode(delta, episode_index, num_episodes)[episode_index]
    return bounded_exp(delta).clamp(max=config.weight_cap).to(old_logprobs.dtype)


def corrects_by_episode(config: CorrectionConfig) -> bool:
    """Return True if the correction mask, or a weight, depends on other tokens of the episode."""
    if config.weight == "sequence":
        return True
    bounds = (config.geometric_low, config.geometric_high, config.product_low, config.product_high, config.max_token_kl)
    return any(bound is not None for bound in bounds)


def binary_kl(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Return the KL between "this token" and "any other" under two policies.

    It is `p log(p / q) + (1 - p) log((1 - p) / (1 - q))` for `p = e^logprobs`, `q = e^other_logprobs`, both within 1e-6
    .. 1 - 1e-6.
    """
    p, q = (x.double().exp().clamp(MIN_PROBABILITY, 1 - MIN_PROBABILITY) for x in (logprobs, other_logprobs))
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def _is_outside_band(log_ratio: Tensor, low: float | None, high: float | None) -> Tensor:
    """Return bool: True where `e^log_ratio` is below `low` or above `high`, if such a bound exists; NaN is not."""
    ratio = bounded_exp(log_ratio)
    return (ratio < (-math.inf if low is None else low)) | (ratio > (math.inf if high is None else high))


# -- the trust region ----------------------------------------------------------------------------------------------------


class TrustRegion:
    """The coefficient of one run's KL term, and the limit that refuses a step.

    The same measurements give the same coefficients.

    After each step, the mean of k3 over its trained tokens is measured, served or replayed (`measure`), whatever
    estimator the loss uses. With a `target`, after each step, for the error `e = min(measured / target - 1, 3)` and
    `v = e + e - e_before`:

        log coef += (gain if v > 0 else gain_down) * v, within log of the configured coef .. log coef_max

    This is a proportional-integral controller of log coef in velocity form, so that a bound does not wind it up. It has
    one side: the coefficient of the configuration is its floor, so calm steps do not disarm it. With a floor of 1e-4, a
    hundred calm steps lowered it by two decades, and a burst then ran unopposed for 30 to 40 steps. It rises faster
    than it falls. As single steps scatter by a factor of two, mostly upwards, the mean of the drift then settles below
    the target, at 0.7 to 0.95 of it: the target is a bound of the mean, not its value.

    Drift falls by a power (0 to 2, roughly) of the coefficient, some steps late: staleness delays what a step changes
    until its tokens are trained. (PPO's penalty, arXiv 1707.06347, eq. 8, doubles or halves its coefficient instead,
    and oscillates.)
    """

    def __init__(self, config: RolloutKLConfig):
        self._config = config
        self._last_error: float | None = None
        self._served_gaps: list[float | None] = []
        """The gap by which served drift exceeded the replayed one when it was last measured, by age."""
        self._gap_variances: list[float] = []
        """The variance of the gap over episodes, from the last measurements."""
        self.coef = config.coef
        """The coefficient of the next step."""
        self.max_share = 1.0
        """The share of the next step that is tried first, with a `limit`."""

    def record_step_share(self, share: float) -> None:
        """Record that this share of `max_share` was made; call once after each step with a `limit`.

        The tokens that a step is judged by are of versions before it, and the next ones of versions that are in flight.
        So a whole step after a short one is noticed too late: with step lengths that go up and down, an oscillation
        appeared. After a step that went too far, the share grows back step by step.
        """
        self.max_share = min(
            1.0, max(MAX_SHARE_FLOOR, self.max_share * (max(share, MAX_SHARE_DECAY) if share < 1 else MAX_SHARE_GROWTH))
        )

    def record_served_gaps(self, gaps: Sequence[float | None], variance: float | None) -> None:
        """Record a measurement of served drift, from which other steps are estimated; call once after each.

        Args:
            gaps: How far served drift is above the replayed one, by age; None for an age without probed tokens.
            variance: The result of `compute_gap_variance`; None if too few episodes were probed.
        """
        before = self._served_gaps or [None] * len(gaps)
        self._served_gaps = [
            new if new is not None and math.isfinite(new) else old for new, old in zip(gaps, before, strict=True)
        ]
        if variance is not None and math.isfinite(variance):
            self._gap_variances = [*self._gap_variances, variance][-VARIANCE_HISTORY:]

    @property
    def mean_gap_variance(self) -> float:
        """The mean of the last variances of the gap; 0 before the first measurement."""
        return sum(self._gap_variances) / max(len(self._gap_variances), 1)

    def update_coefficient(self, drift: float) -> None:
        """Update the coefficient from the measured drift, once after each step.

        A drift that is not finite changes nothing.
        """
        target = self._config.target
        if target is None or not math.isfinite(drift):
            return
        error = min(max(drift, 0.0) / target - 1, MAX_DRIFT_ERROR)
        speed = error + error - (error if self._last_error is None else self._last_error)
        gain = self._config.gain if speed > 0 else self._config.gain_down
        self.coef, self._last_error = self._clamp_coefficient(self.coef * math.exp(gain * speed)), error

    def select_drift(self, replayed: float, served: float | None) -> float:
        """Select which of a step's two drifts goes to `update_coefficient` and `exceeds_max_drift`.

        `served` is measured or estimated; None if it is unknown.
        """
        return replayed if served is None or self._config.measure == "replayed" else served

    def extrapolate_served_drift(self, replayed: float, tokens_by_staleness: Sequence[float]) -> float | None:
        """Estimate the served drift of a step that did not measure it, from its replayed drift and its tokens' ages.

        At each age it is as far above the replayed drift as when that age, or the nearest measured one, was last
        measured. The measurement at age 0 is used for age 0 alone: there engine and learner have the same weights, so
        it says nothing about the effect of updates on routers. Returns None if the measurements do not cover all
        tokens.
        """
        measured = {age: gap for age, gap in enumerate(self._served_gaps) if gap is not None}
        if not measured:
            return None
        above = 0.0
        for age, tokens in enumerate(tokens_by_staleness):
            if not tokens:
                continue
            near = {abs(other - age): gap for other, gap in measured.items() if other == age or other > 0}
            if not near:
                return None
            above += tokens * near[min(near)]
        return max(replayed + above / max(sum(tokens_by_staleness), 1.0), 0.0)

    def exceeds_max_drift(self, measured: float) -> bool:
        """Return True if a step with that drift must make no optimizer update: above `max`, or not finite.

        Never without `max`.
        """
        limit = self._config.max
        return limit is not None and not (math.isfinite(measured) and measured <= limit)

    def state_dict(self) -> TrustRegionState:
        """Return the state that `load_state_dict` reads."""
        return {
            "coef": self.coef,
            "error": self._last_error,
            "gaps": self._served_gaps,
            "variances": self._gap_variances,
            "reach": self.max_share,
        }

    def load_state_dict(self, state: TrustRegionState) -> None:
        """Continue from a `state`, within the bounds of this configuration; without a `target`, its coefficient stays."""
        self._served_gaps, self.max_share = list(state.get("gaps", [])), state.get("reach", 1.0)
        self._gap_variances = list(state.get("variances", []))
        if self._config.target is not None:
            self.coef, self._last_error = self._clamp_coefficient(state["coef"]), state["error"]

    def _clamp_coefficient(self, coef: float) -> float:
        return min(max(coef, self._config.coef), self._config.coef_max)
