"""Routes of one token sequence, recorded once for each position.

The first call of a sequence that feeds position `t` forward owns row `t`. A later call that feeds
it again (the prefill of the next turn, a re-prefill after a weight update) may have chosen other
experts; its row is dropped, because the sampled log-probs belong to the first pass (R3, arXiv
2510.11370). A position whose owner returned no row stays unrecorded: the learner's own router then
routes that token.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import numpy as np

LOST_ROUTES_FIX = (
    "a compiled graph may have lost them: set generator.engine_args.enforce_eager=true"
)
"""What to do where an engine did not record routes."""
CHUNK_ROWS = 2**15
"""Rows of ids that are processed at a time, so that their columns stay in a core's cache."""


class RoutingError(ValueError):
    """Error for routed experts that cannot be a record of top-k choices."""


def route_dtype(num_experts: int) -> np.dtype:
    """Return the dtype of expert ids: uint8 up to 256 experts, uint16 beyond. Raises
    `RoutingError` beyond 65536."""
    if not 0 < num_experts <= 65536:
        raise RoutingError(f"{num_experts} experts cannot be held by uint16 ids")
    return np.dtype(np.uint8 if num_experts <= 256 else np.uint16)


def check_expert_ids(rows: np.ndarray, *, layers: int, top_k: int, num_experts: int) -> None:
    """Check that integer ids `[n, layers, top_k]` have the right shape and range and
    are not all zero.

    A pass over the ids, two if they are signed: quick enough for an event loop. Raises
    `RoutingError` that says what is wrong. Single all-zero rows are legal with `top_k == 1`, but
    more than 16 of them (rows times layers), with several experts, are what an engine returns that
    did not record.
    """
    if rows.ndim != 3 or rows.shape[1:] != (layers, top_k):
        raise RoutingError(
            f"routed experts have shape {rows.shape}, expected [n, {layers}, {top_k}]: the model's "
            f"config.json has {layers} MoE layers and {top_k} experts a token; is there something "
            "else in generator.engine_args.hf_overrides?"
        )
    if rows.dtype.kind not in "ui":
        raise RoutingError(f"routed experts have dtype {rows.dtype}, expected unsigned integers")
    if rows.size == 0:
        return
    low = int(rows.min()) if rows.dtype.kind == "i" else 0
    high = int(rows.max())
    if low < 0 or high >= num_experts:
        raise RoutingError(
            f"expert id {high if high >= num_experts else low} is outside 0..{num_experts - 1}"
        )
    if num_experts > 1 and high == 0 and (top_k > 1 or rows.shape[0] * layers > 16):
        raise RoutingError(
            f"all {rows.shape[0]} rows are zero: the engine did not record routes; "
            f"{LOST_ROUTES_FIX}"
        )


def validate_routes(rows: np.ndarray, *, layers: int, top_k: int, num_experts: int) -> None:
    """Check ids as `check_expert_ids` does, and that no row names an expert twice.

    Raises `RoutingError` that says what is wrong and where.
    """
    check_expert_ids(rows, layers=layers, top_k=top_k, num_experts=num_experts)
    for part, columns in iter_sorted_columns(rows.reshape(-1, top_k)):
        for lower, upper in itertools.pairwise(columns):
            twice = lower == upper
            if twice.any():
                row, layer = divmod(part.start + int(twice.argmax()), layers)
                unwritten = (
                    ""
                    if rows[row, layer].any()
                    else f", so the engine did not record it; {LOST_ROUTES_FIX}"
                )
                raise RoutingError(
                    f"row {row}, MoE layer {layer} names an expert twice: "
                    f"{rows[row, layer].tolist()}{unwritten}"
                )


def check_gates(gates: np.ndarray | None, shape: tuple[int, ...]) -> None:
    """Raise `RoutingError` if `gates` are not the finite float32 gates of routes of this shape."""
    if gates is None or gates.shape != shape or gates.dtype != np.float32:
        found = "there are none" if gates is None else f"{gates.dtype} {list(gates.shape)}"
        raise RoutingError(f"gates of routes have to be float32 {list(shape)}: {found}")
    if not np.isfinite(gates).all():
        raise RoutingError("a gate of recorded routes is not finite")


def iter_sorted_columns(rows: np.ndarray) -> Iterator[tuple[slice, list[np.ndarray]]]:
    """Yield `rows` `[n, K]`, each sorted, as K columns of at most `CHUNK_ROWS` rows at a time.

    Each item is the slice of its rows, and the columns, which the next item overwrites. The sorting
    network works on whole columns, which is 20 times as fast as sorting each row separately.
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
    """Return the pairs to put in order, one after the other, to sort `count` values (Batcher's
    odd-even merge sort)."""
    pairs = []
    merged = 1
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

    Positions `0..positions_fed` have been fed forward by some call; each is either
    recorded or never will be. Rows are kept as the views in which they came until
    `to_arrays` copies them, once.
    """

    def __init__(self, *, layers: int, top_k: int, num_experts: int, has_gates: bool = False):
        self.layers = layers
        self.top_k = top_k
        self.num_experts = num_experts
        self.has_gates = has_gates
        self.dtype = route_dtype(num_experts)
        self._blocks: list[tuple[int, np.ndarray, np.ndarray | None]] = []
        """First position, routes and gates of each block."""
        self.positions_fed = 0
        """Number of positions that some call has fed forward; the engine is asked only for
        rows from here on."""

    def record_rows(
        self,
        first_position: int,
        rows: np.ndarray | None,
        positions_fed: int,
        gates: np.ndarray | None = None,
    ) -> int:
        """Record the routes that one engine call returned, and return how many new
        rows were recorded.

        Positions fed before keep what they have. Raises `RoutingError` for rows beyond
        `positions_fed` or invalid new rows; the trace is then unchanged.

        Args:
            first_position: Position of `rows[0]`; `rows[i]` belongs to position
                `first_position + i`.
            rows: `[n, layers, top_k]` of any integer dtype. None, or of length 0 (whatever its
                other dimensions and dtype), if the call returned no routes.
            positions_fed: Number of positions that the call fed: `0..positions_fed`.
            gates: float32, shaped as `rows`, if the trace has gates.
        """
        recorded = 0
        if rows is not None and len(rows):
            if first_position < 0 or first_position + len(rows) > positions_fed:
                raise RoutingError(
                    f"rows for positions {first_position}..{first_position + len(rows)} but only "
                    f"{positions_fed} were fed"
                )
            skip = min(max(0, self.positions_fed - first_position), len(rows))
            new = rows[skip:]
            check_expert_ids(
                new, layers=self.layers, top_k=self.top_k, num_experts=self.num_experts
            )
            if self.has_gates:
                check_gates(gates, rows.shape)
            new_gates = gates[skip:] if self.has_gates and gates is not None else None
            recorded = len(new)
            if recorded:
                # A view of the rest would keep all of `rows` alive: O(T^2) from an engine that
                # returns every row again.
                if skip:
                    new = new.copy()
                    new_gates = None if new_gates is None else new_gates.copy()
                self._blocks.append((first_position + skip, new, new_gates))
        self.positions_fed = max(self.positions_fed, positions_fed)
        return recorded

    def branch_at(self, length: int) -> RoutingTrace:
        """Return a new trace that shares the rows of the first `length` positions; the rest has
        to be fed again.

        It serves a context that was rewritten from there on, where other tokens, or the same tokens
        after other ones, are fed now. The two traces grow independently. Raises `RoutingError` for
        a negative length.
        """
        if length < 0:
            raise RoutingError(f"a branch cannot keep {length} positions")
        other = RoutingTrace(
            layers=self.layers,
            top_k=self.top_k,
            num_experts=self.num_experts,
            has_gates=self.has_gates,
        )
        other._blocks = [
            (first, rows[: length - first], None if gates is None else gates[: length - first])
            for first, rows, gates in self._blocks
            if first < length
        ]
        other.positions_fed = min(self.positions_fed, length)
        return other

    def to_arrays(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return `routed_experts [length, layers, top_k]` and `routing_recorded [length]`.

        Positions without a record hold distinct ids `0..top_k-1`. The ids have the dtype that the
        number of experts requires, whatever dtypes the calls returned.
        """
        experts = np.empty((length, self.layers, self.top_k), self.dtype)
        experts[:] = np.arange(self.top_k, dtype=self.dtype)
        recorded = np.zeros(length, bool)
        for first, rows, _ in self._blocks:
            stop = min(first + len(rows), length)
            if stop > first:
                experts[first:stop] = rows[: stop - first]
                recorded[first:stop] = True
        return experts, recorded

    def gates_array(self, length: int) -> np.ndarray:
        """Return `routed_weights`, float32 `[length, layers, top_k]`, of a trace that has gates.
        Positions without a record have 0."""
        out = np.zeros((length, self.layers, self.top_k), np.float32)
        for first, _, gates in self._blocks:
            assert gates is not None
            stop = min(first + len(gates), length)
            if stop > first:
                out[first:stop] = gates[: stop - first]
        return out
