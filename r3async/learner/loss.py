"""The loss of one micro-batch, and the weight of each token in it.

`loss = sum over tokens t of w_t (policy_t + coef KL(rollout || learner)_t + reference coef
KL(learner || reference)_t
- entropy coef entropy_t)`

The weights `w_t` hold the denominators of the *whole step*, known before its first micro-batch
(`compute_loss_weights`): every term is a plain sum, so gradients of micro-batches add up to that of
the step, however its samples were packed, ordered or spread over ranks. A policy loss sees whole
episodes if it needs them: tokens of the episode that are in other micro-batches come along as
constants (`TokenBatch.in_micro_batch`). The loss is a function of all of them, so its gradient by
this micro-batch's log-probs is that of the whole episode's loss; its value counts this
micro-batch's tokens only.

A log-prob that is not finite makes the measured drift (`k3`) not finite too: nothing hides it.
(Tokens whose *rollout* log-prob is not finite are left out, and counted, by the caller.)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from r3async.config import AlgorithmConfig, RolloutKLConfig
from r3async.config.algorithm import ReferenceKLConfig
from r3async.learner.drift import (
    KL_ESTIMATORS,
    MAX_TOKEN_K3,
    compute_correction_mask,
    compute_correction_weights,
    corrects_by_episode,
    k3,
    tangent_k3,
)
from r3async.learner.loss_sums import LossSums
from r3async.learner.policy_loss import (
    BY_TOKEN_ATTRIBUTE,
    LossInputs,
    bounded_exp,
    needs_old_logprobs,
    resolve_policy_loss,
)
from r3async.learner.token_choice import TOKEN_CHOICES


def needs_whole_episodes(config: AlgorithmConfig) -> bool:
    """Return True if a token's loss depends on other tokens of its episode: `compute_loss` then
    needs whole episodes."""
    return not getattr(
        resolve_policy_loss(config.policy_loss), BY_TOKEN_ATTRIBUTE, False
    ) or corrects_by_episode(config.correction)


def compute_loss_weights(
    masks: Sequence[np.ndarray],
    episodes: Sequence[int],
    groups: Sequence[int],
    reduction: str,
    *,
    norm_length: int,
) -> list[np.ndarray]:
    """Return the token weights of each sample of one optimizer step: float32 `[T_i]`, 0 where
    `masks[i]` is False.

    The reduction says what the loss is a mean over; the weights do not depend on the micro-batch
    and rank that a token is trained in. With `m` the trained tokens of an episode, `M` of its
    group, `N` of the step, and counting only episodes and groups that have one:

    | `algorithm.reduction`          | weight of a token              | so that the loss is a mean over                          |
    |--------------------------------|--------------------------------|----------------------------------------------------------|
    | `token_mean`                   | `1 / N`                        | tokens (DAPO, arXiv 2503.14476, eq. 8)                   |
    | `sequence_mean`                | `1 / (episodes * m)`           | episodes, of token means (GRPO, arXiv 2402.03300, eq. 3) |
    | `sequence_mean_token_sum_norm` | `1 / (episodes * norm_length)` | episodes, of token sums (Dr. GRPO, arXiv 2503.20783)     |
    | `prompt_mean`                  | `1 / (groups * M)`             | groups, of token means                                   |

    The sequence is the episode, however many samples it was divided into. Without any trained token
    all weights are 0.

    Args:
        masks: bool `[T_i]` for all samples of the step, of all ranks.
        episodes: The episode of each sample, as any integer that tells episodes apart.
        groups: The group of each sample, likewise.
    """
    if not len(masks):
        return []
    tokens = np.asarray([np.count_nonzero(mask) for mask in masks], np.int64)
    played, of_episode = _count_tokens_by_owner(tokens, episodes)
    groups_played, of_group = _count_tokens_by_owner(tokens, groups)
    denominators = {
        "token_mean": np.full(len(masks), tokens.sum()),
        "sequence_mean": played * of_episode,
        "sequence_mean_token_sum_norm": np.full(len(masks), played * norm_length),
        "prompt_mean": groups_played * of_group,
    }[reduction]
    lengths = [len(mask) for mask in masks]
    shares = np.repeat(1.0 / np.maximum(denominators.astype(np.float64), 1.0), lengths)
    return split_by_length(np.where(np.concatenate(masks), shares, 0.0).astype(np.float32), lengths)


def split_by_length(values: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    """Return consecutive views of `values`, one for each length."""
    return [
        values[start:stop]
        for start, stop in itertools.pairwise(itertools.accumulate(lengths, initial=0))
    ]


def _count_tokens_by_owner(tokens: np.ndarray, owners: Sequence[int]) -> tuple[int, np.ndarray]:
    """Return how many owners have a token, and for each sample the number of all tokens of
    its owner, int64."""
    names, member = np.unique(np.asarray(owners, np.int64), return_inverse=True)
    totals = np.zeros(len(names), np.int64)
    np.add.at(totals, member, tokens)
    return int(np.count_nonzero(totals)), totals[member]


@dataclass
class TokenBatch:
    """The trained tokens of one micro-batch: M of them, of S episodes; tensors on one device.

    If `needs_whole_episodes(config)`, they are all of the episodes' tokens in the step, and
    `in_micro_batch` marks the ones of this micro-batch.
    """

    rollout_logprobs: Tensor
    """float32 `[M]`: log-probs under the policy that sampled the tokens (log mu)."""
    advantages: Tensor
    """float32 `[M]`: the advantage of each token."""
    weights: Tensor
    """float32 `[M]`: the factor of each token's terms, 1 / the denominator of the reduction."""
    episode_index: Tensor
    """int64 `[M]`: the index, among the S episodes, of each token's episode."""
    num_episodes: int
    """The number of episodes, S."""
    staleness: Tensor
    """int32 `[M]`: the learner's version minus the token's."""
    turns: Tensor | None = None
    """int32 `[M]`: the turn that sampled each token. None: an episode's tokens are in its order."""
    chosen: Tensor | None = None
    """bool `[M]`: the tokens that `token_choice.TOKEN_CHOICES` has chosen for this loss."""
    old_logprobs: Tensor | None = None
    """float32 `[M]`: log-probs of the learner before the step's first update."""
    reference_logprobs: Tensor | None = None
    """float32 `[M]`: log-probs of the frozen reference model."""
    in_micro_batch: Tensor | None = None
    """bool `[M]`: True for tokens of this micro-batch; tokens of other micro-batches count in no
    figure of this one. None: all are of this micro-batch."""
    split_episode_ids: Tensor | None = None
    """int64 `[S]`: the number in the step of an episode that has tokens in other micro-batches too,
    else -1. Their figures are computed when all parts are known, see
    `LossSums.split_episode_parts`. None: every episode is only here.
    """


def compute_loss(
    batch: TokenBatch,
    logprobs: Tensor,
    entropies: Tensor,
    config: AlgorithmConfig,
    *,
    rollout_kl_coef: float,
    max_token_staleness: int | None = None,
) -> tuple[Tensor, LossSums]:
    """Return the scalar loss of one micro-batch, and its sums.

    Only `logprobs`, and `entropies` if their term is used, receive gradient. Without tokens the
    loss is a 0 that can be propagated back. Raises `ValueError` if a column that the configuration
    needs is missing.

    Args:
        logprobs: float32 `[M]`: the learner's log-probs of the tokens.
        entropies: float32 `[M]`: the entropies of the learner's distributions at the tokens; they
            need a gradient only if `config.entropy_coef` is not 0.
        max_token_staleness: Older tokens are left out, as a correction leaves tokens out.
    """
    rollout = batch.rollout_logprobs
    reference = batch.reference_logprobs
    for name, needs in (
        ("old_logprobs", needs_old_logprobs(config)),
        ("reference_logprobs", config.reference_kl.coef != 0),
        ("chosen", config.policy_loss in TOKEN_CHOICES),
    ):
        if needs and getattr(batch, name) is None:
            raise ValueError(f"the configured loss needs `{name}`, and the batch has none")

    correction = config.correction
    old = batch.old_logprobs
    compared = old if old is not None and correction.needs_old_logprobs else logprobs
    kept = compute_correction_mask(
        compared,
        rollout,
        batch.staleness,
        batch.episode_index,
        batch.num_episodes,
        correction,
        max_token_staleness,
    )
    inputs = _build_loss_inputs(logprobs, batch, kept, config)
    policy = resolve_policy_loss(config.policy_loss)(inputs)
    value = policy.value
    if correction.weight != "none":
        value = value * compute_correction_weights(
            compared, rollout, batch.episode_index, batch.num_episodes, correction
        )
    terms = {"policy": torch.where(kept, value, 0.0)}
    if rollout_kl_coef:
        terms["rollout_kl"] = rollout_kl_coef * compute_rollout_kl(
            logprobs - rollout, config.rollout_kl
        )
    if reference is not None and config.reference_kl.coef:
        terms["reference_kl"] = config.reference_kl.coef * compute_reference_kl(
            logprobs, rollout, reference, config.reference_kl
        )
    if config.entropy_coef:
        terms["entropy_bonus"] = -config.entropy_coef * torch.where(kept, entropies, 0.0)

    own = torch.ones_like(kept) if batch.in_micro_batch is None else batch.in_micro_batch
    weighted = {name: batch.weights * value for name, value in terms.items()}
    here = {name: torch.where(own, value, 0.0).sum() for name, value in weighted.items()}
    loss = torch.stack(list(here.values())).sum()
    if batch.in_micro_batch is not None:
        # This micro-batch's log-probs affect the loss of the episode's other tokens: by
        # gradient, not by value.
        others = torch.where(own, 0.0, weighted["policy"]).sum()
        loss = loss + (others - others.detach())

    clipped = policy.clipped & kept & own
    high = inputs.logprobs.detach() > inputs.anchor_logprobs if policy.high is None else policy.high
    sums = LossSums.from_micro_batch(
        logprobs.detach(),
        rollout,
        reference,
        entropies.detach(),
        counted=own,
        trained=kept & own,
        clipped=clipped,
        clipped_high=clipped & high,
        episode_index=batch.episode_index,
        num_episodes=batch.num_episodes,
        split_episode_ids=batch.split_episode_ids,
        token_limit=MAX_TOKEN_K3,
    )
    for name, value in weighted.items():
        setattr(sums, name, torch.where(own, value.detach(), 0.0).sum(dtype=torch.float64))
    return loss, sums


def compute_rollout_kl(delta: Tensor, config: RolloutKLConfig) -> Tensor:
    """Return `[M]`: the estimate of KL(rollout || learner) at each token, for
    `delta = log pi - log mu`; see `drift`."""
    if config.estimator == "k3":
        return tangent_k3(delta, MAX_TOKEN_K3)
    return KL_ESTIMATORS[config.estimator](delta)


def compute_reference_kl(
    logprobs: Tensor, rollout: Tensor, reference: Tensor, config: ReferenceKLConfig
) -> Tensor:
    """Return `[M]`: the estimate of KL(pi || reference) at each token, sampled from mu.

    It is `min(r, weight_cap) k3(log ref - log pi)` with `r = e^clamp(log pi - log mu, -20, 20)`.

    The mean of `r k3` under mu is KL(pi || reference), however old mu is, and so is that of its
    gradient, `-r (log ref - log pi)` by `log pi`: the ratio has a gradient, too. DeepSeek-V3.2
    (arXiv 2512.02556), "unbiased KL estimate". Where it is truncated it has none. Without
    `weighted` it is GRPO's term (arXiv 2402.03300, eq. 4): biased for tokens that are not pi's, and
    with the gradient of KL(reference || pi).
    """
    distance = k3(reference - logprobs)
    return (
        bounded_exp(logprobs - rollout).clamp(max=config.weight_cap) * distance
        if config.weighted
        else distance
    )


def _build_loss_inputs(
    logprobs: Tensor, batch: TokenBatch, kept: Tensor, config: AlgorithmConfig
) -> LossInputs:
    """Return the inputs of the policy loss: 0 wherever it does not train."""
    rollout = torch.where(kept, batch.rollout_logprobs, 0.0)
    old = batch.old_logprobs
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
        episode_index=batch.episode_index,
        num_episodes=batch.num_episodes,
        config=config,
        turns=batch.turns,
        chosen=batch.chosen,
    )
