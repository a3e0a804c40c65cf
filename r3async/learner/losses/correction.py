"""Which trained tokens the policy loss leaves out, because the learner has moved too far from the policy that sampled them.

pi: the learner; mu: the rollout policy; `delta = log pi - log mu` at a token. Masks are made without gradient, in float64, and
only from tokens that count. What a mask leaves out contributes to no part of the policy loss, nor to the entropy bonus; the
KL terms keep it, since the trust region is what brings drifted tokens back. Denominators do not change: a batch of which
half is left out takes half a step. A learner log-prob that is NaN is left out by nothing, so that the loss shows it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from r3async.config import CorrectionConfig
from r3async.learner.losses.kl import k3
from r3async.learner.losses.policy_loss import LOG_RATIO_LIMIT
from r3async.learner.losses.segments import segment_max, segment_mean, segment_sum

PROBABILITY_LIMIT = 1e-6


def icepop(delta: Tensor, low: float | None, high: float | None) -> Tensor:
    """bool `[M]`: `low <= e^delta <= high`. IcePop: "Small Leak Can Sink a Great Ship", Ant Group 2025; Ring-1T, arXiv
    2510.18855, with 0.5 and 5."""
    return ~_outside(delta, low, high)


def binary_kl(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """`p log(p / q) + (1 - p) log((1 - p) / (1 - q))` for `p = e^logprobs`, `q = e^other_logprobs`, both within
    1e-6 .. 1 - 1e-6: KL between "this token" and "any other" under two policies."""
    p, q = (x.double().exp().clamp(PROBABILITY_LIMIT, 1 - PROBABILITY_LIMIT) for x in (logprobs, other_logprobs))
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def kpop(logprobs: Tensor, rollout_logprobs: Tensor, limit: float) -> Tensor:
    """bool `[M]`: `max(binary_kl(pi, mu), binary_kl(mu, pi)) <= limit`. KPop: "Taming Training-Inference Mismatch in
    Reinforcement Learning with Adaptive Masking Regions", Ant Group 2026, with 0.1."""
    forward, backward = binary_kl(logprobs, rollout_logprobs), binary_kl(rollout_logprobs, logprobs)
    return ~((forward > limit) | (backward > limit))


def correction_mask(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    ages: Tensor,
    mask: Tensor,
    sequence: Tensor,
    sequences: int,
    config: CorrectionConfig,
    max_token_age: int | None = None,
) -> Tensor:
    """bool `[M]`: the tokens of `mask` that the policy loss keeps. Arguments as in `TokenBatch`; `logprobs` are pi's.

    Per token: `icepop`, `kpop`, and `age <= max_token_age` (`schedule.max_token_age`). Per episode, over its tokens in
    `mask`: `geometric`, a band on `e^mean(delta)`, and `product`, on `e^sum(delta)` (Liu, Li et al., "When Speed Kills
    Stability: Demystifying RL Collapse from the Training-Inference Mismatch", 2025); `max(k3(delta)) <= max_token_kl`
    (trust region masking, arXiv 2512.23075, with k3 for the KL at a token).
    """
    logprobs, rollout_logprobs = logprobs.detach().double(), rollout_logprobs.double()
    delta = logprobs - rollout_logprobs
    keep = mask.clone()
    if config.icepop_low is not None or config.icepop_high is not None:
        keep &= icepop(delta, config.icepop_low, config.icepop_high)
    if config.kpop is not None:
        keep &= kpop(logprobs, rollout_logprobs, config.kpop)
    if max_token_age is not None:
        keep &= ages <= max_token_age
    left_out = torch.zeros(sequences, dtype=torch.bool, device=mask.device)
    if config.geometric_low is not None or config.geometric_high is not None:
        mean = segment_mean(delta, mask, sequence, sequences)
        left_out |= _outside(mean, config.geometric_low, config.geometric_high)
    if config.product_low is not None or config.product_high is not None:
        left_out |= _outside(segment_sum(delta, mask, sequence, sequences), config.product_low, config.product_high)
    if config.max_token_kl is not None:
        left_out |= segment_max(k3(delta), mask, sequence, sequences) > config.max_token_kl
    return keep & ~left_out[sequence]


def takes_episodes(config: CorrectionConfig) -> bool:
    """Whether what is left out depends on other tokens of the episode."""
    bounds = (config.geometric_low, config.geometric_high, config.product_low, config.product_high, config.max_token_kl)
    return any(bound is not None for bound in bounds)


def _outside(log_ratio: Tensor, low: float | None, high: float | None) -> Tensor:
    """bool: `e^log_ratio` is below `low` or above `high`. NaN is not."""
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    outside = torch.zeros_like(ratio, dtype=torch.bool)
    if low is not None:
        outside |= ratio < low
    if high is not None:
        outside |= ratio > high
    return outside
