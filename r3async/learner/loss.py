"""The loss of one micro-batch, and the weight of each token in it.

`loss = sum over tokens t of w_t (policy_t + coef KL(rollout || learner)_t + reference coef KL(learner || reference)_t
- entropy coef entropy_t)`

The weights `w_t` hold the denominators of the *whole step*, known before its first micro-batch (`compute_loss_weights`): every
term is a plain sum, so gradients of micro-batches add up to that of the step, however its samples were packed, ordered
or spread over ranks. What a policy loss needs of a whole episode, it finds: tokens of the episode that are in other
micro-batches come along as constants (`TokenBatch.in_micro_batch`). The loss is a function of all of them, so its gradient by
this micro-batch's log-probs is that of the whole episode's loss; its value counts this micro-batch's tokens only.

A log-prob that is not finite makes the measured drift (`k3`) not finite too: nothing hides it. (Tokens whose *rollout* log-prob
is not finite are for the caller to leave out, and to count.)
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
    compute_correction_mask,
    compute_correction_weights,
    corrects_by_episode,
    k3,
    tangent_k3,
)
from r3async.learner.metrics import LossSums
from r3async.learner.policy_loss import (
    BY_TOKEN_ATTRIBUTE,
    LossInputs,
    bounded_exp,
    needs_old_logprobs,
    resolve_policy_loss,
)


def needs_whole_episodes(config: AlgorithmConfig) -> bool:
    """Whether a token's loss depends on other tokens of its episode, so that `compute_loss` has to see whole episodes."""
    return not getattr(resolve_policy_loss(config.policy_loss), BY_TOKEN_ATTRIBUTE, False) or corrects_by_episode(
        config.correction
    )


def compute_loss_weights(
    masks: Sequence[np.ndarray], episodes: Sequence[int], groups: Sequence[int], reduction: str, *, norm_length: int
) -> list[np.ndarray]:
    """float32 `[T_i]` for each sample of one optimizer step: the weights of its tokens, 0 where `masks[i]` is False.

    What the loss is a mean over; the weights are the same whatever micro-batch and rank a token is trained in. With `m` the
    trained tokens of an episode, `M` of its group, `N` of the step, episodes and groups counted if they have one:

    | `algorithm.reduction`          | weight of a token              | so that the loss is a mean over                          |
    |--------------------------------|--------------------------------|----------------------------------------------------------|
    | `token_mean`                   | `1 / N`                        | tokens (DAPO, arXiv 2503.14476, eq. 8)                   |
    | `sequence_mean`                | `1 / (episodes * m)`           | episodes, of token means (GRPO, arXiv 2402.03300, eq. 3) |
    | `sequence_mean_token_sum_norm` | `1 / (episodes * norm_length)` | episodes, of token sums (Dr. GRPO, arXiv 2503.20783)     |
    | `prompt_mean`                  | `1 / (groups * M)`             | groups, of token means                                   |

    The sequence is the episode, however many samples it was divided into. `masks`: bool `[T_i]`, all samples of the step, of
    all ranks. `episodes`, `groups`: which episode and group each is of, by any integers that tell them apart. Without any
    trained token all weights are 0.
    """
    if not len(masks):
        return []
    tokens = np.asarray([np.count_nonzero(mask) for mask in masks], np.int64)
    (played, of_episode), (groups_played, of_group) = (
        _count_tokens_by_owner(tokens, episodes),
        _count_tokens_by_owner(tokens, groups),
    )
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
    """Views of `values`, one of each length, which lie end to end in it."""
    return [values[start:stop] for start, stop in itertools.pairwise(itertools.accumulate(lengths, initial=0))]


def _count_tokens_by_owner(tokens: np.ndarray, owners: Sequence[int]) -> tuple[int, np.ndarray]:
    """How many owners have a token, and int64, for each sample, all tokens of its owner."""
    names, member = np.unique(np.asarray(owners, np.int64), return_inverse=True)
    totals = np.zeros(len(names), np.int64)
    np.add.at(totals, member, tokens)
    return int(np.count_nonzero(totals)), totals[member]


@dataclass
class TokenBatch:
    """The trained tokens of one micro-batch: M of them, of S episodes; tensors on one device.

    If `needs_whole_episodes(config)`, they are all of the episodes' tokens in the step, and `in_micro_batch` says which are
    this micro-batch's.
    """

    rollout_logprobs: Tensor
    """float32 `[M]`: log-probs under the policy that sampled the tokens (log mu)."""
    advantages: Tensor
    """float32 `[M]`."""
    weights: Tensor
    """float32 `[M]`: what each token's terms are multiplied by, 1 / the denominator of the reduction."""
    episode_index: Tensor
    """int64 `[M]`: which of the S episodes each token is of."""
    num_episodes: int
    """S."""
    staleness: Tensor
    """int32 `[M]`: the learner's version minus the token's."""
    old_logprobs: Tensor | None = None
    """float32 `[M]`: log-probs of the learner before the step's first update."""
    reference_logprobs: Tensor | None = None
    """float32 `[M]`: log-probs of the frozen reference model."""
    in_micro_batch: Tensor | None = None
    """bool `[M]`: tokens of this micro-batch; the others are another's, and in no figure of this one. None: all."""
    split_episode_ids: Tensor | None = None
    """int64 `[S]`: the number in the step of an episode that other micro-batches have tokens of as well, else -1. Their
    figures are finished when all are known, see `LossSums.split_episode_parts`. None: every episode is only here."""


def compute_loss(
    batch: TokenBatch,
    logprobs: Tensor,
    entropies: Tensor,
    config: AlgorithmConfig,
    *,
    rollout_kl_coef: float,
    max_token_staleness: int | None = None,
) -> tuple[Tensor, LossSums]:
    """Scalar loss of one micro-batch, and its sums.

    `logprobs` float32 `[M]`: the learner's log-probs of the tokens. `entropies` float32 `[M]`: of its distributions at
    them; they need a gradient only if `config.entropy_coef` is not 0. Nothing else receives gradient. Tokens older than
    `max_token_staleness` are left out as a correction leaves tokens out. Without tokens the loss is a 0 that can be propagated
    back.

    Raises `ValueError` if log-probs that the configuration needs are missing.
    """
    rollout, reference = batch.rollout_logprobs, batch.reference_logprobs
    for name, needs in (
        ("old_logprobs", needs_old_logprobs(config)),
        ("reference_logprobs", config.reference_kl.coef != 0),
    ):
        if needs and getattr(batch, name) is None:
            raise ValueError(f"the configured loss needs `{name}`, and the batch has none")

    correction, old, episodes = config.correction, batch.old_logprobs, (batch.episode_index, batch.num_episodes)
    compared = old if old is not None and correction.needs_old_logprobs else logprobs
    kept = compute_correction_mask(compared, rollout, batch.staleness, *episodes, correction, max_token_staleness)
    inputs = _build_loss_inputs(logprobs, batch, kept, config)
    policy = resolve_policy_loss(config.policy_loss)(inputs)
    value = policy.value
    if correction.weight != "none":
        value = value * compute_correction_weights(compared, rollout, *episodes, correction)
    terms = {"policy": torch.where(kept, value, 0.0)}
    if rollout_kl_coef:
        terms["rollout_kl"] = rollout_kl_coef * compute_rollout_kl(logprobs - rollout, config.rollout_kl)
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
        # What this micro-batch's log-probs do to the loss of the episode's other tokens: a gradient, and no value.
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
        token_limit=config.rollout_kl.token_limit,
    )
    for name, value in weighted.items():
        setattr(sums, name, torch.where(own, value.detach(), 0.0).sum(dtype=torch.float64))
    return loss, sums


def compute_rollout_kl(delta: Tensor, config: RolloutKLConfig) -> Tensor:
    """`[M]`: the estimate of KL(rollout || learner) at each token, for `delta = log pi - log mu` `[M]`; see `drift`."""
    if config.estimator == "k3":
        return tangent_k3(delta, config.token_limit)
    return KL_ESTIMATORS[config.estimator](delta)


def compute_reference_kl(logprobs: Tensor, rollout: Tensor, reference: Tensor, config: ReferenceKLConfig) -> Tensor:
    """`[M]`: the estimate of KL(pi || reference) at each token, sampled from mu: `min(r, weight_cap) k3(log ref - log pi)` with
    `r = e^clamp(log pi - log mu, -20, 20)`.

    The mean of `r k3` under mu is KL(pi || reference), however old mu is, and so is that of its gradient, `-r (log ref - log pi)`
    by `log pi`: the ratio has a gradient, too. DeepSeek-V3.2 (arXiv 2512.02556), "unbiased KL estimate". Where it is
    truncated it has none. Without `weighted` it is GRPO's term (arXiv 2402.03300, eq. 4): biased for tokens that are not pi's,
    and of the gradient of KL(reference || pi).
    """
    distance = k3(reference - logprobs)
    return bounded_exp(logprobs - rollout).clamp(max=config.weight_cap) * distance if config.weighted else distance


def _build_loss_inputs(logprobs: Tensor, batch: TokenBatch, kept: Tensor, config: AlgorithmConfig) -> LossInputs:
    """What the policy loss sees: 0 wherever it does not train."""
    rollout, old = torch.where(kept, batch.rollout_logprobs, 0.0), batch.old_logprobs
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
    )
