"""The loss of one micro-batch, and the sums that become the metrics of a step.

`loss = sum over tokens t of w_t (policy_t + coef KL(rollout || learner)_t + reference coef KL(learner || reference)_t
- entropy coef entropy_t)`

The weights `w_t` hold the denominators of the *whole step*, known before its first micro-batch (see `reduction`): every
term is a plain sum, so gradients of micro-batches add up to that of the step, however its samples were packed, ordered
or spread over ranks. What a policy loss needs of a whole episode, it finds: tokens of the episode that are in other
micro-batches come along as constants (`TokenBatch.own`). The loss is a function of all of them, so its gradient by this
micro-batch's log-probs is that of the whole episode's loss; its value counts this micro-batch's tokens only.

Tokens that are masked out may hold anything: each column is replaced by 0 there before anything is computed, by
`torch.where`. At a token that counts, a log-prob that is not finite makes the measured drift (`k3`) not finite too: nothing
hides it. (Tokens whose *rollout* log-prob is not finite are for the caller to mask out, and to count.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from r3async.config import AlgorithmConfig
from r3async.learner.losses import correction
from r3async.learner.losses.correction import correction_mask
from r3async.learner.losses.kl import ESTIMATORS, reference_k3
from r3async.learner.losses.policy_loss import LossInputs, needs_old_logprobs, policy_loss
from r3async.learner.losses.policy_loss import takes_episodes as loss_takes_episodes
from r3async.learner.losses.sums import ObjectiveSums

__all__ = ["ObjectiveSums", "TokenBatch", "objective", "takes_episodes"]


def takes_episodes(config: AlgorithmConfig) -> bool:
    """Whether a token's loss depends on other tokens of its episode, so that `objective` has to see whole episodes."""
    return loss_takes_episodes(policy_loss(config.policy_loss)) or correction.takes_episodes(config.correction)


@dataclass
class TokenBatch:
    """The trained tokens of one micro-batch: M of them, of S episodes; tensors on one device.

    If `takes_episodes(config)`, they are all of the episodes' tokens in the step, and `own` tells this micro-batch's.
    """

    rollout_logprobs: Tensor
    """float32 `[M]`: log-probs under the policy that sampled the tokens (log mu)."""
    advantages: Tensor
    """float32 `[M]`."""
    weights: Tensor
    """float32 `[M]`: what each token's terms are multiplied by, 1 / the denominator of the reduction."""
    sequence: Tensor
    """int64 `[M]`: which of the S episodes each token is of."""
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
    own: Tensor | None = None
    """bool `[M]`: tokens of this micro-batch; the others are another's, and in no figure of this one. None: all."""
    open: Tensor | None = None
    """int64 `[S]`: the number in the step of an episode that other micro-batches have tokens of as well, else -1. Their
    figures are finished when all are known, see `ObjectiveSums.open`. None: every episode is only here."""


def objective(
    batch: TokenBatch,
    logprobs: Tensor,
    entropies: Tensor,
    config: AlgorithmConfig,
    *,
    rollout_kl_coef: float,
    max_token_age: int | None = None,
) -> tuple[Tensor, ObjectiveSums]:
    """Scalar loss of one micro-batch, and its sums.

    `logprobs` float32 `[M]`: the learner's log-probs of the tokens. `entropies` float32 `[M]`: of its distributions at
    them; they need a gradient only if `config.entropy_coef` is not 0. Nothing else receives gradient. Tokens older than
    `max_token_age` are left out as a correction leaves tokens out. Without tokens the loss is a 0 that can be propagated
    back.

    Raises `ValueError` if log-probs that the configuration needs are missing.
    """
    mask = batch.mask
    own = mask if batch.own is None else mask & batch.own

    def clean(column: Tensor) -> Tensor:
        return torch.where(mask, column, 0.0)

    def needed(column: Tensor | None, name: str, needs: bool) -> Tensor | None:
        if needs and column is None:
            raise ValueError(f"the configured loss needs `{name}`, and the batch has none")
        return None if column is None else clean(column)

    old = needed(batch.old_logprobs, "old_logprobs", needs_old_logprobs(config))
    reference = needed(batch.reference_logprobs, "reference_logprobs", config.reference_kl.coef != 0)
    weights, rollout, entropies = clean(batch.weights), clean(batch.rollout_logprobs), clean(entropies)
    logprobs = clean(logprobs)

    kept = correction_mask(
        logprobs, rollout, batch.ages, mask, batch.sequence, batch.sequences, config.correction, max_token_age
    )
    policy = policy_loss(config.policy_loss)(_loss_inputs(logprobs, rollout, old, batch, kept, config))
    terms = {"policy": torch.where(kept, policy.value, 0.0)}
    if rollout_kl_coef:
        terms["rollout_kl"] = rollout_kl_coef * ESTIMATORS[config.rollout_kl.estimator](logprobs - rollout)
    if reference is not None and config.reference_kl.coef:
        terms["reference_kl"] = config.reference_kl.coef * reference_k3(reference - logprobs)
    if config.entropy_coef:
        terms["entropy_bonus"] = -config.entropy_coef * torch.where(kept, entropies, 0.0)
    weighted = {name: weights * value for name, value in terms.items()}
    here = {name: torch.where(own, value, 0.0).sum() for name, value in weighted.items()}
    loss = torch.stack(list(here.values())).sum()
    if batch.own is not None:
        # What this micro-batch's log-probs do to the loss of the episode's other tokens: a gradient, and no value.
        others = torch.where(own, 0.0, weighted["policy"]).sum()
        loss = loss + (others - others.detach())

    sums = ObjectiveSums.of_batch(
        logprobs.detach(),
        rollout,
        reference,
        entropies.detach(),
        mask=own,
        kept=kept & own,
        clipped=policy.clipped & kept & own,
        sequence=batch.sequence,
        sequences=batch.sequences,
        open=batch.open,
    )
    for name, value in weighted.items():
        setattr(sums, name, torch.where(own, value.detach(), 0.0).sum(dtype=torch.float64))
    return loss, sums


def _loss_inputs(
    logprobs: Tensor,
    rollout: Tensor,
    old: Tensor | None,
    batch: TokenBatch,
    kept: Tensor,
    config: AlgorithmConfig,
) -> LossInputs:
    """What the policy loss sees: 0 wherever it does not train."""
    rollout = torch.where(kept, rollout, 0.0)
    old = None if old is None else torch.where(kept, old, 0.0)
    anchor = rollout if config.anchor == "rollout" else old
    assert anchor is not None
    return LossInputs(
        logprobs=torch.where(kept, logprobs, 0.0),
        anchor_logprobs=anchor,
        rollout_logprobs=rollout,
        old_logprobs=old,
        advantages=torch.where(kept, batch.advantages, 0.0),
        mask=kept,
        sequence=batch.sequence,
        sequences=batch.sequences,
        config=config,
    )
