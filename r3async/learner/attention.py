"""Causal attention over packed samples, in plain torch: planned once per micro-batch, used by every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from r3async.learner.batch.prefixes import expand_prefixes
from r3async.learner.taken import DeterministicGather


@dataclass(frozen=True)
class AttentionPlan:
    """How the samples of one micro-batch attend.

    Samples of similar length form a bucket, padded on the right to its longest and attended by one call: under a causal
    mask no token sees the padding behind it. `buckets`: (samples, padded length, skipped) of each. Samples that share a
    prefix have keys and values of all their tokens, and queries without the first `skipped`, which others have in theirs.
    `key_gather`, `query_gather`: which packed row each padded slot is filled from. `query_slots` int64 `[N]`: for every
    packed row its slot among the queries. All are None if the packed order is the padded one.
    """

    buckets: tuple[tuple[int, int, int], ...]
    key_gather: DeterministicGather | None
    query_gather: DeterministicGather | None
    query_slots: Tensor | None


def plan_buckets(lengths: np.ndarray) -> list[np.ndarray]:
    """Samples (indices, longest first) per bucket: shorter than the longest by at most a quarter, or by 16 tokens."""
    order = np.argsort(-lengths, kind="stable")
    buckets, start = [], 0
    for i in range(1, len(order) + 1):
        longest = lengths[order[start]]
        if i == len(order) or longest - lengths[order[i]] > max(16, longest // 4):
            buckets.append(order[start:i])
            start = i
    return buckets


def plan_prefix_buckets(lengths: np.ndarray, shared: np.ndarray) -> list[np.ndarray]:
    """`plan_buckets` of samples that share about as much: those that share nothing, then others by the same rule."""
    if not shared.any():
        return plan_buckets(lengths)
    alone = np.flatnonzero(shared == 0)
    (begins,) = np.nonzero(shared)
    likes = [alone, *(begins[some] for some in plan_buckets(shared[begins]))]
    return [some[members] for some in likes for members in plan_buckets(lengths[some])]


def plan_attention(cu_seqlens: np.ndarray, device: torch.device, prefixes: np.ndarray | None = None) -> AttentionPlan:
    """Plan for samples laid end to end at `cu_seqlens` (int `[S + 1]`); `prefixes`: see `MicroBatch`."""
    total = int(cu_seqlens[-1])
    if prefixes is None:
        whole, edges, shared = np.arange(total), cu_seqlens.astype(np.int64), np.zeros(len(cu_seqlens) - 1, np.int64)
    else:
        (whole, edges), shared = expand_prefixes(cu_seqlens, prefixes), prefixes[:, 1].astype(np.int64)
    starts, lengths = edges[:-1], np.diff(edges)
    shapes, keys, queries = [], [], []
    slots = np.empty(total, np.int64)
    at = 0
    for members in plan_prefix_buckets(lengths, shared):
        width, skipped = int(lengths[members[0]]), int(shared[members].min())
        column = np.arange(width)
        inside = column < lengths[members, None]
        # A padded slot holds its sample's first token: any finite value does, nothing depends on it.
        rows = whole[starts[members, None] + np.where(inside, column, 0)]
        keys.append(np.where(inside, rows, -1 - rows).reshape(-1))
        own = (inside & (column >= shared[members, None]))[:, skipped:]
        asking = rows[:, skipped:]
        slots[asking[own]] = (at + np.arange(asking.size).reshape(asking.shape))[own]
        queries.append(np.where(own, asking, -1 - asking).reshape(-1))
        shapes.append((len(members), width, skipped))
        at += asking.size
    index = np.concatenate(keys)
    if len(index) == total and bool((index == np.arange(total)).all()):
        return AttentionPlan(tuple(shapes), None, None, None)
    from_keys = DeterministicGather.from_index(index, total, device)
    alike = all(skipped == 0 for *_, skipped in shapes) and not shared.any()
    return AttentionPlan(
        buckets=tuple(shapes),
        key_gather=from_keys,
        query_gather=from_keys if alike else DeterministicGather.from_index(np.concatenate(queries), total, device),
        query_slots=torch.from_numpy(slots).to(device),
    )


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: AttentionPlan,
    scale: float | None,
    *,
    sinks: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """`query [N, heads, D]`, `key` and `value` `[N, groups, D]` -> `[N, heads, D]`; `scale` None is `1 / sqrt(D)`.

    `sinks` `[heads]`: of each head a score that is in every softmax and has no value. `window`: a token sees so many, itself
    the last of them.
    """
    if plan.key_gather is not None and plan.query_gather is not None:
        query, key, value = plan.query_gather(query), plan.key_gather(key), plan.key_gather(value)
    sizes = [(count * (width - skipped), count * width) for count, width, skipped in plan.buckets]
    asked, held = zip(*sizes, strict=True)
    parts = zip(query.split(asked), key.split(held), value.split(held), plan.buckets, strict=True)
    attended = [
        _attend_bucket(q, k, v, n, width, skipped, scale, sinks, window) for q, k, v, (n, width, skipped) in parts
    ]
    out = attended[0] if len(attended) == 1 else torch.cat(attended)
    return out if plan.query_slots is None else _UnpadRows.apply(out, plan.query_slots)


def _attend_bucket(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    count: int,
    width: int,
    skipped: int,
    scale: float | None,
    sinks: Tensor | None,
    window: int | None,
) -> Tensor:
    q = query.unflatten(0, (count, width - skipped)).transpose(1, 2)
    k, v = (x.unflatten(0, (count, width)).transpose(1, 2) for x in (key, value))
    grouped = query.shape[1] != key.shape[1]
    size, before = v.shape[-1], int(sinks is not None)
    if sinks is not None:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        q, k, v = _append_sink_key(q, k, v, sinks, scale)
    mask: Any = None
    if window is not None and window < width:
        mask = F.pad(_build_window_mask(width, skipped, window, q.device), (before, 0), value=True)
    elif skipped or before:
        from torch.nn.attention.bias import causal_lower_right  # brings the compiler, a second of each start

        # Where queries lack the first tokens, the last of them still sees all keys.
        mask = causal_lower_right(width - skipped, width + before)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return out[..., :size].transpose(1, 2).flatten(0, 1)


_SINK_PADDING = 8
"""Values that a head has more with sinks: kernels take sizes in eights."""


def _append_sink_key(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """One key more, before all others, whose product with a query of head `h` is `sinks[h] / scale`; its value is zero.

    All three `[n, heads or groups, W, D]` -> `[.., D + 8]`: queries have that product in the first of the new values, and of the
    keys the new one has 1 there.
    """
    score = (sinks.to(q.dtype) / scale).view(1, -1, 1, 1).expand(*q.shape[:3], 1)
    q = torch.cat([q, F.pad(score, (0, _SINK_PADDING - 1))], dim=-1)
    sink = F.one_hot(torch.tensor(k.shape[-1], device=k.device), k.shape[-1] + _SINK_PADDING).to(k.dtype)
    k = torch.cat([sink.expand(*k.shape[:2], 1, -1), F.pad(k, (0, _SINK_PADDING))], dim=2)
    return q, k, F.pad(v, (0, q.shape[-1] - v.shape[-1], 1, 0))


def _build_window_mask(width: int, skipped: int, window: int, device: torch.device) -> Tensor:
    """bool `[width - skipped, width]`: which keys each query sees."""
    at = torch.arange(width, device=device)
    ago = at[skipped:, None] - at
    return (ago >= 0) & (ago < window)


class _UnpadRows(torch.autograd.Function):
    """Packed rows from padded ones: `x[slots]`. The gradient of padding is zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.rows = len(x)
        return x.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (slots,) = ctx.saved_tensors
        grad = grads[0].new_zeros((ctx.rows, *grads[0].shape[1:]))
        return grad.index_copy_(0, slots, grads[0]), None
