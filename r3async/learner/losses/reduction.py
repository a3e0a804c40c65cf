"""What the loss is a mean over: a weight for each token, the same whatever micro-batch and rank it is trained in.

With `m` the trained tokens of an episode, `M` of its group, `N` of the step, episodes and groups counted if they have one:

| `algorithm.reduction`          | weight of a token              | so that the loss is a mean over                          |
|--------------------------------|--------------------------------|----------------------------------------------------------|
| `token_mean`                   | `1 / N`                        | tokens (DAPO, arXiv 2503.14476, eq. 8)                   |
| `sequence_mean`                | `1 / (episodes * m)`           | episodes, of token means (GRPO, arXiv 2402.03300, eq. 3) |
| `sequence_mean_token_sum_norm` | `1 / (episodes * norm_length)` | episodes, of token sums (Dr. GRPO, arXiv 2503.20783)     |
| `prompt_mean`                  | `1 / (groups * M)`             | groups, of token means                                   |

The sequence is the episode, however many samples it was divided into.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

REDUCTIONS = ("token_mean", "sequence_mean", "sequence_mean_token_sum_norm", "prompt_mean")


def loss_weights(
    masks: Sequence[np.ndarray], episodes: Sequence[int], groups: Sequence[int], reduction: str, *, norm_length: int
) -> list[np.ndarray]:
    """float32 `[T_i]` for each sample of one optimizer step: the weights of its tokens, 0 where `masks[i]` is False.

    `masks`: bool `[T_i]`, all samples of the step, of all ranks. `episodes`, `groups`: which episode and group each is of,
    by any integers that tell them apart. `norm_length`: a constant length, at least 1, for `sequence_mean_token_sum_norm`.
    Without any trained token all weights are 0.
    """
    if not len(masks) == len(episodes) == len(groups):
        raise ValueError(f"{len(masks)} masks, but {len(episodes)} episodes and {len(groups)} groups")
    if norm_length < 1:
        raise ValueError(f"`norm_length` must be at least 1, got {norm_length}")
    tokens = np.asarray([np.count_nonzero(mask) for mask in masks], np.int64)
    by_episode, episode = _totals(tokens, episodes)
    played = np.count_nonzero(by_episode)
    if reduction == "token_mean":
        denominators = np.full(len(masks), tokens.sum())
    elif reduction == "sequence_mean":
        denominators = played * by_episode[episode]
    elif reduction == "sequence_mean_token_sum_norm":
        denominators = np.full(len(masks), played * norm_length)
    elif reduction == "prompt_mean":
        by_group, group = _totals(tokens, groups)
        denominators = np.count_nonzero(by_group) * by_group[group]
    else:
        raise ValueError(f"reduction {reduction!r} is not one of {', '.join(REDUCTIONS)}")
    return [
        np.where(mask, 1.0 / max(float(denominator), 1.0), 0.0).astype(np.float32)
        for mask, denominator in zip(masks, denominators, strict=True)
    ]


def _totals(tokens: np.ndarray, owners: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """int64: the tokens of each owner, and which of them each sample's is."""
    names, member = np.unique(np.asarray(owners, np.int64), return_inverse=True)
    totals = np.zeros(len(names), np.int64)
    np.add.at(totals, member, tokens)
    return totals, member
