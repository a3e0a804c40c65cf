"""Routes of one token sequence, recorded by position, once.

Of the calls of one sequence, the first that feeds position `t` forward owns row `t`. A later call that feeds it again
(the prefill of the next turn, a re-prefill after a weight update) may have chosen other experts; its row is dropped, because the
log-probs that were sampled belong to the first pass (R3, arXiv 2510.11370). A position whose owner returned no row
stays unrecorded: the learner lets that token route by itself.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import numpy as np

CHUNK_ROWS = 2**15
"""Rows of ids that are worked on at a time: their columns then stay in a core's cache."""


class RoutingError(ValueError):
    """Routed experts that cannot be a record of top-k choices."""


def route_dtype(num_experts: int) -> np.dtype:
    """uint8 up to 256 experts, uint16 beyond."""
    if not 0 < num_experts <= 65536:
        raise RoutingError(f"{num_experts} experts cannot be held by uint16 ids")
    return np.dtype(np.uint8 if num_experts <= 256 else np.uint16)


def check_expert_ids(rows: np.ndarray, *, layers: int, top_k: int, num_experts: int) -> None:
    """Check `[n, layers, top_k]` integer ids: shape, range, not all zero. Quick enough for an event loop: two passes over them.

    Raises `RoutingError` that says what is wrong. All-zero rows with `top_k == 1` are legal one by one, but a whole block of
    them over more than one row, with several experts, is what an engine returns that did not record.
    """
    if rows.ndim != 3 or rows.shape[1:] != (layers, top_k):
        raise RoutingError(
            f"routed experts have shape {rows.shape}, expected [n, {layers}, {top_k}]: the model's config.json has {layers} MoE "
            f"layers and {top_k} experts a token; is there something else in generator.engine_args.hf_overrides?"
        )
    if rows.dtype.kind not in "ui":
        raise RoutingError(f"routed experts have dtype {rows.dtype}, expected unsigned integers")
    if rows.size == 0:
        return
    low, high = int(rows.min()), int(rows.max())
    if low < 0 or high >= num_experts:
        raise RoutingError(f"expert id {high if high >= num_experts else low} is outside 0..{num_experts - 1}")
    if num_experts > 1 and high == 0 and (top_k > 1 or rows.shape[0] * layers > 16):
        raise RoutingError(
            f"all {rows.shape[0]} rows are zero: the engine did not record routes "
            "(vLLM on CPU needs enforce_eager=True for this)"
        )


def validate_routes(rows: np.ndarray, *, layers: int, top_k: int, num_experts: int) -> None:
    """`check_expert_ids`, and that no row names an expert twice. Raises `RoutingError` that says what is wrong and where."""
    check_expert_ids(rows, layers=layers, top_k=top_k, num_experts=num_experts)
    for part, columns in iter_sorted_columns(rows.reshape(-1, top_k)):
        for lower, upper in itertools.pairwise(columns):
            if (twice := lower == upper).any():
                row, layer = divmod(part.start + int(twice.argmax()), layers)
                raise RoutingError(f"row {row}, MoE layer {layer} names an expert twice: {rows[row, layer].tolist()}")


def iter_sorted_columns(rows: np.ndarray) -> Iterator[tuple[slice, list[np.ndarray]]]:
    """`rows` `[n, K]`, each sorted, as K columns: of at most `CHUNK_ROWS` rows at a time, in arrays that the next ones overwrite.

    A sorting network over whole columns: 20 times as fast as sorting each row by itself.
    """
    count, top_k = rows.shape
    space = np.empty((top_k + 1, min(count, CHUNK_ROWS)), rows.dtype)
    for start in range(0, count, CHUNK_ROWS):
        part = slice(start, min(start + CHUNK_ROWS, count))
        *columns, spare = (column[: part.stop - start] for column in space)
        for column, ids in zip(columns, rows[part].T, strict=True):
            column[:] = ids
        for i, j in _sorting_network(top_k):
            np.minimum(columns[i], columns[j], out=spare)
            np.maximum(columns[i], columns[j], out=columns[j])
            columns[i], spare = spare, columns[i]
        yield part, columns


@functools.cache
def _sorting_network(count: int) -> list[tuple[int, int]]:
    """Pairs to be put in order, one after the other, to sort `count` values (Batcher's odd-even merge sort)."""
    pairs, merged = [], 1
    while merged < count:
        step = merged
        while step:
            for first in range(step % merged, count - step, 2 * step):
                for i in range(first, min(first + step, count - step)):
                    if i // (2 * merged) == (i + step) // (2 * merged):
                        pairs.append((i, i + step))
            step //= 2
        merged *= 2
    return pairs


class RoutingTrace:
    """Append-only routes of one growing token sequence, in time and memory O(T) over all its calls.

    Positions `0..fed` have been fed forward by some call; each is either recorded or will never be. Rows are kept as
    the views that they came as until `to_arrays` copies them, once.
    """

    def __init__(self, *, layers: int, top_k: int, num_experts: int):
        self.layers, self.top_k, self.num_experts = layers, top_k, num_experts
        self.dtype = route_dtype(num_experts)
        self._blocks: list[tuple[int, np.ndarray]] = []
        self.positions_fed = 0
        """Positions that some call has fed forward: the engine is asked only for rows from here on."""

    def record_rows(self, first_position: int, rows: np.ndarray | None, positions_fed: int) -> int:
        """Take what one engine call returned: `rows[i]` belongs to position `first_position + i`; it fed positions `0..fed`.

        `rows` is `[n, layers, top_k]` of any integer dtype, or None or of length 0 (whatever its other dimensions and
        dtype): the call returned no routes. Positions fed before keep what they have. Returns how many new rows were
        recorded. Raises `RoutingError` for rows beyond `positions_fed` or invalid new rows; the trace is then as before.
        """
        recorded = 0
        if rows is not None and len(rows):
            if first_position < 0 or first_position + len(rows) > positions_fed:
                raise RoutingError(
                    f"rows for positions {first_position}..{first_position + len(rows)} but only {positions_fed} were fed"
                )
            skip = min(max(0, self.positions_fed - first_position), len(rows))
            new = rows[skip:]
            check_expert_ids(new, layers=self.layers, top_k=self.top_k, num_experts=self.num_experts)
            recorded = len(new)
            if recorded:
                # A view of the rest would keep all of `rows` alive: O(T^2) from an engine that returns every row again.
                self._blocks.append((first_position + skip, new.copy() if skip else new))
        self.positions_fed = max(self.positions_fed, positions_fed)
        return recorded

    def branch_at(self, length: int) -> RoutingTrace:
        """A new trace of the same first `length` positions, whose rows it shares; the rest is to be fed again.

        For a context that was rewritten from there on: what is fed there now are other tokens, or the same tokens
        after other ones. The two traces grow independently. Raises `RoutingError` for a negative length.
        """
        if length < 0:
            raise RoutingError(f"a branch cannot keep {length} positions")
        other = RoutingTrace(layers=self.layers, top_k=self.top_k, num_experts=self.num_experts)
        other._blocks = [(first, rows[: length - first]) for first, rows in self._blocks if first < length]
        other.positions_fed = min(self.positions_fed, length)
        return other

    def to_arrays(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """`routed_experts [length, layers, top_k]` and `routing_recorded [length]`; holes hold distinct ids `0..top_k-1`.

        The ids have the dtype that the number of experts asks for, whatever dtypes the calls returned.
        """
        experts = np.empty((length, self.layers, self.top_k), self.dtype)
        experts[:] = np.arange(self.top_k, dtype=self.dtype)
        recorded = np.zeros(length, bool)
        for first, rows in self._blocks:
            stop = min(first + len(rows), length)
            if stop > first:
                experts[first:stop] = rows[: stop - first]
                recorded[first:stop] = True
        return experts, recorded
