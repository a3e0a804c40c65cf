"""The loss of one micro-batch, and the sums that become the metrics of a step.

`loss = sum over tokens t of w_t (policy_t + coef KL(rollout || learner)_t + reference coef KL(learner || reference)_t
- entropy coef entropy_t)`

The weights `w_t` hold the denominators of the *whole step*, known before its first micro-batch (see `reduction`): every
term is a plain sum, so gradients of micro-batches add up to that of the step, however its samples were packed, ordered
or spread over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from r3async.algorithms.kl import ESTIMATORS, k1, k2, k3, reference_k3
from r3async.algorithms.policy_loss import POLICY_LOSSES
from r3async.algorithms.sums import ObjectiveSums
from r3async.config import AlgorithmConfig

__all__ = ["ObjectiveSums", "TokenBatch", "objective"]


@dataclass
class TokenBatch:
    """The trained tokens of one micro-batch: M of them, of S samples that are whole in it; tensors on one device."""

    rollout_logprobs: Tensor
    """float32 `[M]`: log-probs under the policy that sampled the tokens (log mu)."""
    advantages: Tensor
    """float32 `[M]`."""
    weights: Tensor
    """float32 `[M]`: what each token's terms are multiplied by, 1 / the denominator of the reduction."""
    sequence: Tensor
    """int64 `[M]`: which of the S samples each token is of, ascending."""
    sequences: int
    """S."""
    ages: Tensor
    """int32 `[M]`: the learner's version minus the token's."""
    mask: Tensor
    """bool `[M]`: tokens that count; the others may hold anything (NaN too) in every other column."""
    old_logprobs: Tensor | None = None
    """float32 `[M]`: log-probs of the learner before the step's first update."""
    reference_logprobs: Tensor | None = None
    """float32 `[M]`: log-probs of the frozen reference model."""


def objective(
    batch: TokenBatch, logprobs: Tensor, entropies: Tensor, config: AlgorithmConfig, *, rollout_kl_coef: float
) -> tuple[Tensor, ObjectiveSums]:
    """Scalar loss of one micro-batch, and its sums.

    `logprobs` float32 `[M]`: the learner's log-probs of the tokens. `entropies` float32 `[M]`: of its distributions at
    them; they need a gradient only if `config.entropy_coef` is not 0. Nothing else receives gradient. Without tokens the
    loss is a 0 that can be propagated back.
    """
    mask, zero = batch.mask, torch.zeros((), dtype=logprobs.dtype, device=logprobs.device)
    weights = torch.where(mask, batch.weights, zero)
    logprobs = torch.where(mask, logprobs, zero)
    delta = logprobs - torch.where(mask, batch.rollout_logprobs, zero)

    terms = {
        "policy": POLICY_LOSSES[config.policy_loss](
            logprobs, batch.rollout_logprobs, batch.advantages, mask, config.ratio_cap
        )
    }
    if rollout_kl_coef:
        terms["rollout_kl"] = rollout_kl_coef * ESTIMATORS[config.rollout_kl.estimator](delta)
    reference = torch.zeros_like(delta)
    if batch.reference_logprobs is not None:
        reference = reference_k3(torch.where(mask, batch.reference_logprobs, zero) - logprobs)
        if config.reference_kl.coef:
            terms["reference_kl"] = config.reference_kl.coef * reference
    elif config.reference_kl.coef:
        raise ValueError("`reference_kl.coef` is set, but the batch has no reference log-probs")
    if config.entropy_coef:
        terms["entropy_term"] = -config.entropy_coef * torch.where(mask, entropies, zero)
    terms = {name: weights * value for name, value in terms.items()}
    loss = torch.stack([value.sum() for value in terms.values()]).sum()

    exact = delta.detach().double()
    ratio = torch.where(mask, exact.exp(), 0.0)
    sums = ObjectiveSums.zero(logprobs.device)
    for name, value in terms.items():
        setattr(sums, name, value.detach().sum(dtype=torch.float64))
    sums.tokens = mask.sum(dtype=torch.float64)
    sums.k1, sums.k2, sums.k3 = k1(exact).sum(), k2(exact).sum(), k3(exact).sum()
    sums.reference_k3 = reference.detach().sum(dtype=torch.float64)
    sums.ratio, sums.ratio_squared = ratio.sum(), ratio.square().sum()
    sums.ratio_max = ratio.max() if len(ratio) else ratio.sum()
    sums.entropy = torch.where(mask, entropies.detach(), zero).sum(dtype=torch.float64)
    return loss, sums
