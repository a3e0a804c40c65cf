"""How far the learner has drifted from the policy that sampled its tokens: estimates, what is left out, and the trust region.

pi: the learner; mu: the rollout policy; `delta = log pi(x) - log mu(x)` for tokens `x ~ mu`. Estimators of KL(mu || pi):

| name  | value              | mean under mu | gradient under mu                                      |
|-------|--------------------|---------------|--------------------------------------------------------|
| `k1`  | `-delta`           | KL, unbiased  | unbiased; noisy, a single token may be negative        |
| `abs` | `|delta|`          | above `|KL|`  | of constant size: drift costs the same however small   |
| `k2`  | `delta^2 / 2`      | KL + O(delta^3) | low variance; equals KL's to first order             |
| `k3`  | `e^delta - 1 - delta` | KL, unbiased | unbiased; never negative                              |

Source: J. Schulman, "Approximating KL Divergence" (2020), with p = pi and q = mu, for KL(q, p) from samples of q.
There the ratio is p/q, so the sign of `delta` follows from who sampled.

For tokens sampled from pi, and `delta = log ref - log pi`, k3 is the term of GRPO (arXiv 2402.03300, eq. 4): KL(pi || ref) in
value; its gradient is that of KL(ref || pi), which agrees with KL(pi || ref)'s to first order in the drift.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from r3async.checkpoint.state import TrustRegionState
from r3async.config import CorrectionConfig, RolloutKLConfig
from r3async.learner.losses.policy_loss import bounded_exp, episode_sums

TANGENT_FROM = 20.0
PROBABILITY_LIMIT = 1e-6
ERROR_LIMIT = 3.0
"""Errors that count: one wild step moves the coefficient no further than drift of 4 times the target does."""


def k2(delta: Tensor) -> Tensor:
    """`delta^2 / 2`. (Elsewhere `(log ratio)^2`, which is 2 k2.)"""
    return 0.5 * delta.square()


def k3(delta: Tensor) -> Tensor:
    """`e^delta - 1 - delta`; beyond delta = 20, its tangent there.

    Computed by `expm1`, and near 0 by its series up to the fourth order (relative error below 1e-7): there the two terms
    cancel, and in float32 would leave little of the value below 1e-5 and nothing of the gradient below 1e-7. The tangent
    keeps a token that mu would sample once in 5e8 from overflowing, and its gradient from vanishing as a clamp's would.
    """
    bounded = delta.clamp(max=TANGENT_FROM)
    tangent = torch.where(delta > TANGENT_FROM, math.expm1(TANGENT_FROM) * (delta - TANGENT_FROM), 0.0)
    series = 0.5 * delta.square() * (1 + delta / 3 * (1 + delta / 4))
    return torch.where(delta.abs() < 1e-2, series, torch.expm1(bounded) - bounded + tangent)


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": torch.neg, "abs": torch.abs, "k2": k2, "k3": k3}
"""By the names of `algorithm.rollout_kl.estimator`. Each maps a tensor of deltas to one of the same shape and dtype."""


# -- which tokens the policy loss leaves out -----------------------------------------------------------------------------


def correction_mask(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    ages: Tensor,
    sequence: Tensor,
    sequences: int,
    config: CorrectionConfig,
    max_token_age: int | None = None,
) -> Tensor:
    """bool `[M]`: the tokens that the policy loss keeps. Arguments as in `TokenBatch`; `logprobs` are pi's.

    Per token: `icepop`, a band on `e^delta` (IcePop: "Small Leak Can Sink a Great Ship", Ant Group 2025; Ring-1T, arXiv
    2510.18855, with 0.5 and 5); `max(binary_kl(pi, mu), binary_kl(mu, pi)) <= kpop` (KPop: "Taming Training-Inference
    Mismatch in Reinforcement Learning with Adaptive Masking Regions", Ant Group 2026, with 0.1); and `age <= max_token_age`
    (`schedule.max_token_age`). Per episode: `geometric`, a band on `e^mean(delta)`, and `product`, on `e^sum(delta)` (Liu, Li
    et al., "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch", 2025);
    `max(k3(delta)) <= max_token_kl` (trust region masking, arXiv 2512.23075, with k3 for the KL at a token).

    Made without gradient, in float64. What is left out contributes to no part of the policy loss, nor to the entropy bonus;
    the KL terms keep it, since the trust region is what brings drifted tokens back. Denominators do not change: a batch of
    which half is left out takes half a step. A learner log-prob that is NaN is left out by nothing, so that the loss shows it.
    """
    logprobs, rollout_logprobs = logprobs.detach().double(), rollout_logprobs.double()
    delta = logprobs - rollout_logprobs
    left_out = _outside(delta, config.icepop_low, config.icepop_high)
    if config.kpop is not None:
        left_out |= binary_kl(logprobs, rollout_logprobs) > config.kpop
        left_out |= binary_kl(rollout_logprobs, logprobs) > config.kpop
    if max_token_age is not None:
        left_out |= ages > max_token_age
    if not judges_episodes(config):
        return ~left_out
    total = episode_sums(delta, sequence, sequences)
    mean = total / episode_sums(torch.ones_like(delta), sequence, sequences).clamp(min=1)
    episodes = _outside(mean, config.geometric_low, config.geometric_high)
    episodes |= _outside(total, config.product_low, config.product_high)
    if config.max_token_kl is not None:
        episodes |= torch.zeros_like(total).scatter_reduce_(0, sequence, k3(delta), "amax") > config.max_token_kl
    return ~(left_out | episodes[sequence])


def judges_episodes(config: CorrectionConfig) -> bool:
    """Whether what is left out depends on other tokens of the episode."""
    bounds = (config.geometric_low, config.geometric_high, config.product_low, config.product_high, config.max_token_kl)
    return any(bound is not None for bound in bounds)


def binary_kl(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """`p log(p / q) + (1 - p) log((1 - p) / (1 - q))` for `p = e^logprobs`, `q = e^other_logprobs`, both within
    1e-6 .. 1 - 1e-6: KL between "this token" and "any other" under two policies."""
    p, q = (x.double().exp().clamp(PROBABILITY_LIMIT, 1 - PROBABILITY_LIMIT) for x in (logprobs, other_logprobs))
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def _outside(log_ratio: Tensor, low: float | None, high: float | None) -> Tensor:
    """bool: `e^log_ratio` is below `low` or above `high`, where there is such a bound. NaN is not."""
    ratio = bounded_exp(log_ratio)
    return (ratio < (-math.inf if low is None else low)) | (ratio > (math.inf if high is None else high))


# -- the trust region ----------------------------------------------------------------------------------------------------


class TrustRegion:
    """Coefficient of one run's KL term, and which step is refused. The same measurements give the same coefficients.

    What is measured after each step is the mean of k3 over its trained tokens (`rollout_kl/k3`): the same whatever estimator
    the loss uses. With a `target`, after each step, for the error `e = min(measured / target - 1, 3)`:

        log coef += gain * (e + e - e_before), within log coef_min .. log coef_max

    A proportional-integral controller of log coef in velocity form, so that a bound does not wind it up. Drift falls by a
    power (0 to 2, roughly) of the coefficient, some steps late: staleness delays what a step changes until its tokens
    are trained. In logarithms that is a delay, and a gain of at most 2, for which a `gain` of 0.1 is stable up to a delay of
    8 steps. (PPO's penalty, arXiv 1707.06347, eq. 8, doubles or halves its coefficient instead, and oscillates.)

    Near the target the error is `log(measured / target)`. It is not that logarithm, since single steps scatter by a factor of
    two about their mean, upwards most: a controller of logarithms holds their geometric mean, and the mean is a quarter more.
    """

    def __init__(self, config: RolloutKLConfig):
        self._config = config
        self._error: float | None = None
        self.coef = config.coef
        """Of the next step."""

    def update(self, measured: float) -> None:
        """Once after each step. A measurement that is not finite changes nothing."""
        target = self._config.target
        if target is None or not math.isfinite(measured):
            return
        error = min(max(measured, 0.0) / target - 1, ERROR_LIMIT)
        before = error if self._error is None else self._error
        step = self._config.gain * (error + error - before)
        self.coef, self._error = self._bounded(self.coef * math.exp(step)), error

    def breaks(self, measured: float) -> bool:
        """Whether a step with that drift must make no optimizer update: above `max`, or not finite. Never without `max`."""
        limit = self._config.max
        return limit is not None and not (math.isfinite(measured) and measured <= limit)

    def state(self) -> TrustRegionState:
        """What `restore` reads."""
        return {"coef": self.coef, "error": self._error}

    def restore(self, state: TrustRegionState) -> None:
        """Continue from a `state`, within the bounds of this configuration; without a `target` its coefficient holds."""
        if self._config.target is not None:
            self.coef, self._error = self._bounded(state["coef"]), state["error"]

    def _bounded(self, coef: float) -> float:
        return min(max(coef, self._config.coef_min), self._config.coef_max)
