"""Episodes whose samples are in several micro-batches, of this rank or of others.

A loss that takes whole episodes (`loss.needs_whole_episodes`) is given every trained token of an
episode in each micro-batch that has one of them. The learner's log-probs of tokens elsewhere come
from a forward pass before the first backward pass, with the same weights; the other columns are
known. Each token has a unique number in the minibatch, the column `place`, so that a sum over ranks
gathers all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from r3async.learner.device_upload import upload_array
from r3async.learner.rank_group import RankGroup

TokenColumns = dict[str, np.ndarray]
"""Columns of trained tokens by name, each `[M]`."""
LOSS_COLUMNS = ("rollout_logprobs", "advantages", "old_logprobs", "reference_logprobs")
"""Columns of a micro-batch's table that the loss takes as they are, where the table has them."""


def find_split_episodes(episodes: Sequence[np.ndarray], count: int, ranks: RankGroup) -> np.ndarray:
    """Return bool `[count]`: the episodes that have trained tokens in more than one
    micro-batch of all ranks.

    Collective.

    `episodes` has an array for each micro-batch, see `TrainedTokens`.
    """
    held = np.zeros(count)
    for found in episodes:
        held[np.unique(found[found >= 0])] += ranks.is_batch_reporter
    return ranks.all_reduce(held, "sum") > 1 if count else held > 1


def gather_token_columns(
    places: Sequence[np.ndarray], columns: Sequence[TokenColumns], count: int, ranks: RankGroup
) -> TokenColumns:
    """Return the columns of all trained tokens of the minibatch, of all ranks, in the order
    of their places.

    Collective.

    Args:
        places: int `[M]` for each micro-batch of this rank, each below `count`.
        columns: Columns for each micro-batch of this rank; the same columns on every rank.
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
        name: values[there].astype(columns[0][name].dtype)
        for name, values in zip(names, table[1:], strict=True)
    } | {"place": np.flatnonzero(there)}


def select_episode_columns(
    everywhere: TokenColumns, episodes: np.ndarray, places: np.ndarray
) -> tuple[TokenColumns, np.ndarray]:
    """Return the columns of all tokens of those episodes, and the positions of `places` in them.

    The columns are in the order of the tokens' places. `places` are int `[M]`, positions int64
    `[M]`. `everywhere` comes from `gather_token_columns`.
    """
    rows = np.flatnonzero(np.isin(everywhere["episode"], episodes))
    columns = {name: values[rows] for name, values in everywhere.items()}
    return columns, np.searchsorted(columns["place"], places)


def merge_logprobs(
    everywhere: np.ndarray, rows: Tensor, logprobs: Tensor, entropies: Tensor
) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies of all tokens of some episodes, `[A]`.

    Log-probs are `everywhere`, as they were computed before; at `rows` int64 `[M]` they have the
    gradient of `logprobs` `[M]`. So every micro-batch sees the same values, to the last bit, and
    decides alike. Entropies are 0 except at `rows`.
    """
    before = upload_array(everywhere, logprobs.device).to(logprobs.dtype)
    mine = before[rows] + (logprobs - logprobs.detach())
    return before.index_copy(0, rows, mine), torch.zeros_like(before).index_copy(0, rows, entropies)
