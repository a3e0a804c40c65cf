"""Drift between the learner and the policy that sampled its tokens: KL estimators, and corrections.

pi: the learner; mu: the rollout policy; `delta = log pi(x) - log mu(x)` for tokens `x ~ mu`.
Estimators of KL(mu || pi):

| name  | value              | mean under mu | gradient under mu                                      |
|-------|--------------------|---------------|--------------------------------------------------------|
| `k1`  | `-delta`           | KL, unbiased  | unbiased; noisy, a single token may be negative        |
| `abs` | `|delta|`          | above `|KL|`  | of constant size: drift costs the same however small   |
| `k2`  | `delta^2 / 2`      | KL + O(delta^3) | low variance; equals KL's to first order             |
| `k3`  | `e^delta - 1 - delta` | KL, unbiased | unbiased; never negative                              |

Source: J. Schulman, "Approximating KL Divergence" (2020), with p = pi and q = mu, for KL(q, p) from
samples of q. There the ratio is p/q, so the sign of `delta` depends on which policy sampled.

For tokens sampled from pi, and `delta = log ref - log pi`, k3 is the term of GRPO (arXiv
2402.03300, eq. 4): KL(pi || ref) in value; its gradient is that of KL(ref || pi), which agrees with
KL(pi || ref)'s to first order in the drift.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from r3async.config import CorrectionConfig
from r3async.learner.policy_loss import bounded_exp, sum_by_episode

K3_TANGENT_START = 20.0
K3_SERIES_LIMIT = 1e-2
MAX_TOKEN_K3 = 100.0
"""Maximum that one token's k3 adds to the measured drift. As `rollout_kl.estimator`, k3 continues
as a straight line from there."""
MIN_PROBABILITY = 1e-6


def k2(delta: Tensor) -> Tensor:
    """Return `delta^2 / 2`. (Elsewhere `(log ratio)^2`, which is 2 k2.)"""
    return 0.5 * delta.square()


def k3(delta: Tensor) -> Tensor:
    """Return `e^delta - 1 - delta`; beyond delta = 20, its tangent there.

    Computed by `expm1`, and near 0 by its series up to the fourth order (relative error below
    1e-7): there the two terms cancel, and in float32 would leave little of the value below 1e-5 and
    nothing of the gradient below 1e-7. The tangent keeps a token that mu would sample once in 5e8
    from overflowing, and its gradient from vanishing as a clamp's would.

    The branch that is not taken has a gradient too, times 0, which is 0 only if the gradient is
    finite: so the input of the series is clamped to its range.
    """
    bounded = delta.clamp(max=K3_TANGENT_START)
    tangent = torch.where(
        delta > K3_TANGENT_START, math.expm1(K3_TANGENT_START) * (delta - K3_TANGENT_START), 0.0
    )
    near = delta.clamp(-K3_SERIES_LIMIT, K3_SERIES_LIMIT)
    series = 0.5 * near.square() * (1 + near / 3 * (1 + near / 4))
    return torch.where(
        delta.abs() < K3_SERIES_LIMIT, series, torch.expm1(bounded) - bounded + tangent
    )


def clamped_k3(delta: Tensor, limit: float) -> Tensor:
    """Return k3, at most `limit` (`MAX_TOKEN_K3`) for a token.

    So one token does not decide the mean of a step. Values that are not finite stay so.
    """
    values = k3(delta)
    return torch.where(values.isfinite(), values.clamp(max=limit), values)


def tangent_k3(delta: Tensor, limit: float) -> Tensor:
    """Return k3, replaced by its tangent above the positive `delta` where it reaches `limit`.

    So the gradient is bounded, and does not vanish. For negative `delta`, k3 itself is nearly a
    line, of slope -1.
    """
    edge = min(math.sqrt(2 * limit), math.log1p(2 * limit) + 1)
    for _ in range(30):  # Newton's method from above, on a convex function
        edge -= (math.expm1(edge) - edge - limit) / math.expm1(edge)
    beyond = (delta - edge).clamp(min=0)
    return k3(delta - beyond) + math.expm1(edge) * beyond


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": torch.neg,
    "abs": torch.abs,
    "k2": k2,
    "k3": k3,
}
"""The estimators, by their names in `algorithm.rollout_kl.estimator`. They keep the shape and
dtype of the deltas."""


# -- corrections: tokens that the policy loss leaves out -------------------------------------------


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

    The arguments are those of `TokenBatch`; `logprobs` are pi's: the learner's now, or
    before the step with `correction.numerator = "recomputed"`, as in the sources of all but the
    last two of these.

    Per token: `icepop`, a band on `e^delta` (IcePop: "Small Leak Can Sink a Great Ship",
    Ant Group 2025; Ring-1T, arXiv 2510.18855, with 0.5 and 5);
    `max(binary_kl(pi, mu), binary_kl(mu, pi)) <= kpop` (KPop: "Taming Training-Inference
    Mismatch in Reinforcement Learning with Adaptive Masking Regions", Ant Group 2026, with
    0.1); and `age <= max_token_age` (`schedule.max_token_age`). Per episode: `veto`, a band on
    `e^delta` of each of its tokens (SkyRL's `outlier_token_is_threshold_low` and `_high`, with 1e-4
    and 100); `geometric`, a band on `e^mean(delta)`, and `product`, on `e^sum(delta)` (Liu, Li et
    al., "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference
    Mismatch", 2025); `max(k3(delta)) <= max_token_kl` (trust region masking, arXiv 2512.23075, with
    k3 for the KL at a token).

    The mask is computed without gradient, in float64. Tokens left out contribute to no part of the
    policy loss, nor to the entropy bonus; the KL terms keep them, since the trust region is what
    brings drifted tokens back. Denominators do not change: a batch of which half is left out takes
    half a step. A learner log-prob that is NaN is never left out, so that the loss shows it.
    """
    logprobs = logprobs.detach().double()
    rollout_logprobs = rollout_logprobs.double()
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
    vetoed = _is_outside_band(delta, config.veto_low, config.veto_high)
    episodes |= sum_by_episode(vetoed, episode_index, num_episodes) > 0
    if config.max_token_kl is not None:
        episodes |= (
            torch.zeros_like(total).scatter_reduce_(0, episode_index, k3(delta), "amax")
            > config.max_token_kl
        )
    return ~(left_out | episodes[episode_index])


def compute_correction_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    episode_index: Tensor,
    num_episodes: int,
    config: CorrectionConfig,
) -> Tensor:
    """Return `[M]`, without gradient, in the dtype of `old_logprobs`: the factor of each
    token's policy loss.

    `token`: `min(e^delta, weight_cap)`; `sequence`: `min(e^sum(delta), weight_cap)` over the
    trained tokens of its episode, with `delta = log pi_old - log mu` clamped to -20..20. Truncated
    importance sampling by token and by sequence: Liu, Li et al., "When Speed Kills Stability",
    2025, the `rollout_is` of verl.
    """
    delta = old_logprobs.detach().double() - rollout_logprobs.double()
    if config.weight == "sequence":
        delta = sum_by_episode(delta, episode_index, num_episodes)[episode_index]
    return bounded_exp(delta).clamp(max=config.weight_cap).to(old_logprobs.dtype)


def corrects_by_episode(config: CorrectionConfig) -> bool:
    """Return True if the correction mask, or a weight, depends on other tokens of the episode."""
    if config.weight == "sequence":
        return True
    bounds = (
        config.geometric_low,
        config.geometric_high,
        config.product_low,
        config.product_high,
        config.veto_low,
        config.veto_high,
        config.max_token_kl,
    )
    return any(bound is not None for bound in bounds)


def binary_kl(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Return the KL between "this token" and "any other" under two policies.

    It is `p log(p / q) + (1 - p) log((1 - p) / (1 - q))` for `p = e^logprobs`,
    `q = e^other_logprobs`, both within 1e-6 .. 1 - 1e-6.
    """
    p, q = (
        x.double().exp().clamp(MIN_PROBABILITY, 1 - MIN_PROBABILITY)
        for x in (logprobs, other_logprobs)
    )
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def _is_outside_band(log_ratio: Tensor, low: float | None, high: float | None) -> Tensor:
    """Return bool: True where `e^log_ratio` is below `low` or above `high`, if such a bound
    exists; NaN is not."""
    ratio = bounded_exp(log_ratio)
    return (ratio < (-math.inf if low is None else low)) | (
        ratio > (math.inf if high is None else high)
    )
