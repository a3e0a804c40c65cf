"""Prefixes that samples have in common, so that the learner computes each of them once. Pure.

The G samples of a group begin with the same prompt; a sample that branches off an episode repeats
its earlier tokens. Under a causal mask, the model's output at a token depends only on the tokens up
to it and their routes. So where these are the same, and no token is trained twice, one copy serves
all samples.

Samples are sorted by their tokens, so that each has the longest common prefix with the one before
it. It gives up the rows of that prefix. The minimum over a part of this order is what the ends of
that part share at least, so the same numbers serve any selection of samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from r3async.data.routes import iter_sorted_columns
from r3async.data.tokens import Sample, TokenTable
from r3async.learner.micro_batch_plan import CostModel

KEYS_PER_ROW = 8
"""Most keys per token of the budget: every sample attends to its own copy of its prefix's keys and
values, and all copies together take at most this many times the token budget."""


@dataclass(frozen=True)
class PrefixOverlap:
    """The rows that samples can share, in the order of their tokens.

    Attributes:
        order: int64 `[S]`: the indices of the samples, sorted by tokens.
        sort_position: int64 `[S]`: the inverse of `order`.
        shared_rows: int64 `[S + 1]`: the number of its first rows that the sample at each position
            of that order can give up for those of the sample before it; 0 at both ends.
        lengths: int64 `[S]`, by index.
    """

    order: np.ndarray
    sort_position: np.ndarray
    shared_rows: np.ndarray
    lengths: np.ndarray

    def sort_members(self, members: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return `members` in this order, and how many rows each shares with the one before it:
        int64 `[M]` each."""
        at = np.sort(self.sort_position[np.asarray(members, np.int64)])
        # The minimum over each part after one member up to the next.
        edges = np.append(at[:1], at[:-1] + 1)
        shared = np.minimum.reduceat(self.shared_rows, np.stack([edges, at + 1], axis=1).ravel())[
            ::2
        ]
        shared[:1] = 0
        return self.order[at], shared

    def min_shared_rows(self, first: int, last: int) -> int:
        """Return how many rows, at least, the sample at position `last` can give up for the
        earlier one at `first`."""
        return int(self.shared_rows[first + 1 : last + 1].min())


def find_prefix_overlap(samples: Sequence[Sample]) -> PrefixOverlap | None:
    """Return the rows that samples can share, or None if there are none.

    A sample gives up only rows before its first trained one, and keeps its last row.
    """
    tokens = [s.table["token_ids"] for s in samples]
    names = [t.tobytes() for t in tokens]
    order = sorted(range(len(samples)), key=names.__getitem__)
    alike = np.zeros(len(samples) + 1, np.int64)
    for place in range(1, len(order)):
        before = order[place - 1]
        after = order[place]
        mask = samples[after].table["loss_mask"]
        most = min(len(tokens[before]), len(mask) - 1)
        first = int(mask[:most].argmax()) if most > 0 else 0
        most = first if first or (most > 0 and mask[0]) else most
        if most > 0 and tokens[before][0] == tokens[after][0]:
            common = _count_leading_true(tokens[before][:most] == tokens[after][:most])
            alike[place] = _count_equal_routes(samples[before].table, samples[after].table, common)
    if not alike.any():
        return None
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return PrefixOverlap(
        np.asarray(order), rank, alike, np.asarray([len(t) for t in tokens], np.int64)
    )


def _count_leading_true(same: np.ndarray) -> int:
    """Return the number of entries before the first False one."""
    first = int(same.argmin()) if len(same) else 0
    return first if first or (len(same) and not same[0]) else len(same)


def _count_equal_routes(before: TokenTable, after: TokenTable, rows: int) -> int:
    """Return how many of the first `rows` rows come before the first one whose
    recorded routes, or their gates, differ.

    The order of experts in a record does not matter, unless it has gates.
    """
    if (
        "routed_experts" not in before
        or "routed_experts" not in after
        or "routing_recorded" not in after
    ):
        return rows if "routed_experts" not in before and "routed_experts" not in after else 0
    recorded = before["routing_recorded"][:rows]
    rows = _count_leading_true(recorded == after["routing_recorded"][:rows])
    recorded = recorded[:rows]
    one, other = (t["routed_experts"][:rows] for t in (before, after))
    if "routed_weights" in before and "routed_weights" in after:
        same_gates = before["routed_weights"][:rows] == after["routed_weights"][:rows]
        alike = ~recorded | ((one == other) & same_gates).all(axis=(1, 2))
        return _count_leading_true(alike)
    if not rows or np.array_equal(one, other):
        return rows
    if one.shape[1:] != other.shape[1:]:
        return 0
    same = ~recorded | (one == other).all(axis=(1, 2))
    (unsure,) = np.nonzero(~same)
    one, other = (_sort_experts(x[unsure]) for x in (one, other))
    same[unsure] = (one == other).all(axis=(1, 2))
    return _count_leading_true(same)


def _sort_experts(rows: np.ndarray) -> np.ndarray:
    """Return the experts `[n, L, K]`, each record sorted."""
    out = np.empty((rows.shape[0] * rows.shape[1], rows.shape[2]), rows.dtype)
    for part, columns in iter_sorted_columns(rows.reshape(out.shape)):
        np.stack(columns, axis=1, out=out[part])
    return out.reshape(rows.shape)


def merge_by_prefix(
    units: Sequence[Sequence[int]], likeness: PrefixOverlap, capacity: int
) -> list[list[int]]:
    """Merge units (lists of sample indices, each sample in one) that share prefixes, up to
    `capacity` tokens together."""
    first = [int(likeness.sort_position[np.asarray(unit)].min()) for unit in units]
    joined: list[list[int]] = []
    rows = keys = last = 0
    for at in np.argsort(first, kind="stable").tolist():
        unit = list(units[at])
        place = first[at]
        own, attended = _count_rows_and_keys(unit, likeness)
        shared = likeness.min_shared_rows(last, place) if joined else 0
        if shared and count_budget_tokens(rows + own - shared, keys + attended) <= capacity:
            joined[-1] += unit
            rows = rows + own - shared
            keys = keys + attended
        else:
            joined.append(unit)
            rows = own
            keys = attended
        last = place
    return joined


def count_budget_tokens(rows: int, keys: int) -> int:
    """Return the tokens of the budget that these numbers of rows and attended keys take."""
    return max(rows, -(-keys // KEYS_PER_ROW))


def _count_rows_and_keys(members: Sequence[int], likeness: PrefixOverlap) -> tuple[int, int]:
    """Return the number of rows that are computed, and the number of keys that are attended to."""
    if len(members) == 1:
        length = int(likeness.lengths[members[0]])
        return length, length
    keys = int(likeness.lengths[np.asarray(members)].sum())
    return keys - int(likeness.sort_members(members)[1].sum()), keys


def compute_size_and_cost(
    members: Sequence[int], likeness: PrefixOverlap, cost: CostModel
) -> tuple[int, float]:
    """Return the budget tokens and the cost of samples packed together: of rows, and of the
    keys before each."""
    which, shared = likeness.sort_members(members)
    lengths = likeness.lengths[which]
    rows = int((lengths - shared).sum())
    keys = int(lengths.sum())
    pairs = (lengths.astype(np.float64) ** 2 - shared.astype(np.float64) ** 2).sum()
    return count_budget_tokens(rows, keys), cost.linear * rows + cost.quadratic * float(pairs)


def expand_prefixes(cu_seqlens: np.ndarray, prefixes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the packed rows of whole samples, int64 `[T]`, and the samples' edges in them,
    int64 `[S + 1]`.

    Sample `s` is the first `prefixes[s, 1]` tokens of the earlier sample `prefixes[s, 0]`, followed
    by rows `cu_seqlens[s]:cu_seqlens[s + 1]`.
    """
    starts = cu_seqlens[:-1].tolist()
    stops = cu_seqlens[1:].tolist()
    edges = np.zeros(len(starts) + 1, np.int64)
    np.cumsum(np.diff(cu_seqlens) + prefixes[:, 1], out=edges[1:])
    rows = np.empty(edges[-1], np.int64)
    at = edges.tolist()
    numbers = np.arange(cu_seqlens[-1], dtype=np.int64)
    for sample, (parent, shared) in enumerate(prefixes.tolist()):
        begin = at[sample]
        own = at[sample] + shared
        rows[begin:own] = rows[at[parent] : at[parent] + shared]
        rows[own : at[sample + 1]] = numbers[starts[sample] : stops[sample]]
    return rows, edges
