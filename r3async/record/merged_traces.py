"""Merging the traces of all ranks that computed a micro-batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from r3async.data.routes import RoutingError
from r3async.learner.shared_prefixes import expand_prefixes

if TYPE_CHECKING:
    from r3async.learner import RouteTrace


def merge_traces(traces: Iterable[RouteTrace], layers: int) -> list[RouteTrace]:
    """Merge the traces of all ranks into one per micro-batch, with all its `N` tokens
    and all `layers`.

    Parts may come in any order, and repeatedly if they are equal. Padding micro-batches are left
    out. Raises `RoutingError` if a part is missing or parts contradict each other.
    """
    parts: dict[tuple[str, ...], list[RouteTrace]] = {}
    for trace in traces:
        if trace.sample_ids:
            parts.setdefault(tuple(trace.sample_ids), []).append(trace)
    return [_merge_parts(of_one, layers) for of_one in parts.values()]


def _merge_parts(parts: list[RouteTrace], layers: int) -> RouteTrace:
    tokens = int(parts[0].cu_seqlens[-1])
    top_k = max(part.own.shape[-1] for part in parts)
    merged = np.zeros((2, tokens, layers, top_k), np.uint16)
    have = np.zeros((tokens, layers), bool)
    for part in parts:
        if not part.columns:
            continue
        here = np.ix_(range(part.first, part.first + len(part.own)), part.columns)
        for whole, chosen in zip(merged, (part.own, part.used), strict=True):
            if (whole[here] != chosen)[have[here]].any():
                raise RoutingError(
                    "traces of two ranks contradict each other in the micro-batch of "
                    f"{part.sample_ids[0]}"
                )
            whole[here] = chosen
        have[here] = True
    if not have.all():
        row, layer = np.argwhere(~have)[0]
        raise RoutingError(
            f"no trace has row {row} of MoE layer {layer} in the micro-batch of "
            f"{parts[0].sample_ids[0]}: the traces of all its ranks are needed"
        )
    own, used = merged
    # All ranks that have log-probs computed the same ones.
    logprobs = next((part.logprobs for part in parts if part.logprobs is not None), None)
    joined = msgspec.structs.replace(
        parts[0], first=0, columns=list(range(layers)), own=own, used=used, logprobs=logprobs
    )
    return joined if joined.prefixes is None else _unfold_prefixes(joined, joined.prefixes)


def _unfold_prefixes(trace: RouteTrace, prefixes: np.ndarray) -> RouteTrace:
    """Expand the trace to all rows of every sample, including the prefix rows that it shares.

    A sample does not train its shared rows, so their log-probs are NaN.
    """
    rows, edges = expand_prefixes(trace.cu_seqlens, prefixes)
    logprobs = trace.logprobs
    if logprobs is not None:
        shared = np.arange(len(rows)) - np.repeat(edges[:-1], np.diff(edges)) < np.repeat(
            prefixes[:, 1], np.diff(edges)
        )
        logprobs = np.where(shared, np.float32(np.nan), logprobs[rows])
    edges = edges.astype(np.int32)
    return msgspec.structs.replace(
        trace,
        cu_seqlens=edges,
        own=trace.own[rows],
        used=trace.used[rows],
        logprobs=logprobs,
        prefixes=None,
    )
