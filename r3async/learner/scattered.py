"""Episodes whose samples are in several micro-batches, of this rank or of others.

A loss that takes whole episodes (`objective.takes_episodes`) is given every trained token of an episode in each micro-batch
that has one of them. The learner's log-probs of tokens elsewhere come from a forward pass before the first backward pass, with
the same weights; the other columns are known. Each token has a number of its own in the minibatch, the column `place`, so that
a sum over ranks puts all of them together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from r3async.learner.backend import RankGroup

TokenColumns = dict[str, np.ndarray]
"""Of trained tokens, each `[M]`."""


def find_split_episodes(episodes: Sequence[np.ndarray], count: int, ranks: RankGroup) -> np.ndarray:
    """bool `[count]`: which episodes have trained tokens in more than one micro-batch of all ranks. Collective.

    `episodes`: of each micro-batch, see `minibatch.TrainedTokens`.
    """
    held = np.zeros(count)
    for found in episodes:
        held[np.unique(found[found >= 0])] += ranks.is_batch_reporter
    return ranks.all_reduce(held, "sum") > 1 if count else held > 1


def gather_token_columns(
    places: Sequence[np.ndarray], columns: Sequence[TokenColumns], count: int, ranks: RankGroup
) -> TokenColumns:
    """The columns of all trained tokens of the minibatch, of all ranks, in the order of their places. Collective.

    `places` int `[M]`, each below `count`, and `columns`: of each micro-batch of this rank; the same columns on every rank.
    """
    names = list(columns[0])
    table = np.zeros((len(names) + 1, count))
    for place, mine in zip(places, columns, strict=True):
        if ranks.is_batch_reporter:
            table[0, place] = 1
            for row, name in enumerate(names, 1):
                table[row, place] = mine[name]
    table = ranks.all_reduce(table.reshape(-1), "sum").reshape(table.shape)
    there = table[0] > 0
    return {
        name: values[there].astype(columns[0][name].dtype) for name, values in zip(names, table[1:], strict=True)
    } | {"place": np.flatnonzero(there)}


def select_episode_columns(
    everywhere: TokenColumns, episodes: np.ndarray, places: np.ndarray
) -> tuple[TokenColumns, np.ndarray]:
    """The columns of all tokens of those episodes, in the order of their places, and where `places` int `[M]` are among them,
    int64 `[M]`. `everywhere`: from `gather_token_columns`."""
    take = np.flatnonzero(np.isin(everywhere["episode"], episodes))
    columns = {name: values[take] for name, values in everywhere.items()}
    return columns, np.searchsorted(columns.pop("place"), places)


def merge_logprobs(everywhere: np.ndarray, rows: Tensor, logprobs: Tensor, entropies: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of all tokens of some episodes, `[A]`: `everywhere` the log-probs as they were found before, at
    `rows` int64 `[M]` with the gradient of `logprobs` `[M]`. So every micro-batch sees the same values, to the last bit, and
    decides alike. Entropies are 0 but for `rows`."""
    before = torch.from_numpy(everywhere).to(logprobs.device, logprobs.dtype)
    mine = before[rows] + (logprobs - logprobs.detach())
    return before.index_copy(0, rows, mine), torch.zeros_like(before).index_copy(0, rows, entropies)
