"""Causal attention over packed samples, in plain torch: planned once per micro-batch, used by every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx


@dataclass(frozen=True)
class AttentionPlan:
    """How the samples of one micro-batch attend.

    Samples of similar length form a bucket, padded on the right to its longest and attended by one call: under a causal
    mask no token sees the padding behind it. `buckets`: (samples, padded length) of each. `padded` int64 `[P]`: for every
    padded slot the packed row it is filled from. `slots` int64 `[N]`: for every packed row its padded slot. Both are None
    if the packed order is the padded one.
    """

    buckets: tuple[tuple[int, int], ...]
    padded: Tensor | None
    slots: Tensor | None


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


def plan_attention(cu_seqlens: np.ndarray, device: torch.device) -> AttentionPlan:
    """Plan for samples laid end to end at `cu_seqlens` (int `[S + 1]`)."""
    starts, lengths = cu_seqlens[:-1].astype(np.int64), np.diff(cu_seqlens).astype(np.int64)
    total = int(cu_seqlens[-1])
    shapes, padded = [], []
    slots = np.empty(total, np.int64)
    at = 0
    for members in plan_buckets(lengths):
        width = int(lengths[members[0]])
        column = np.arange(width)
        inside = column < lengths[members, None]
        # A padded slot holds its sample's first token: any finite value does, nothing depends on it.
        rows = starts[members, None] + np.where(inside, column, 0)
        slots[rows[inside]] = (at + np.arange(rows.size).reshape(rows.shape))[inside]
        shapes.append((len(members), width))
        padded.append(rows.reshape(-1))
        at += rows.size
    index = np.concatenate(padded)
    straight = len(index) == total and bool((index == np.arange(total)).all())
    return AttentionPlan(
        buckets=tuple(shapes),
        padded=None if straight else torch.from_numpy(index).to(device),
        slots=None if straight else torch.from_numpy(slots).to(device),
    )


def packed_attention(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float | None) -> Tensor:
    """`query [N, heads, D]`, `key` and `value` `[N, groups, D]` -> `[N, heads, D]`; `scale` None is `1 / sqrt(D)`."""
    if plan.padded is not None:
        query, key, value = (_Rearrange.apply(x, plan.padded, plan.slots) for x in (query, key, value))
    parts = (x.split([count * width for count, width in plan.buckets]) for x in (query, key, value))
    attended = [_attend(q, k, v, n, width, scale) for q, k, v, (n, width) in zip(*parts, plan.buckets, strict=True)]
    out = attended[0] if len(attended) == 1 else torch.cat(attended)
    return out if plan.slots is None else _Restore.apply(out, plan.slots)


def _attend(query: Tensor, key: Tensor, value: Tensor, count: int, width: int, scale: float | None) -> Tensor:
    q, k, v = (x.unflatten(0, (count, width)).transpose(1, 2) for x in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2).flatten(0, 1)


class _Rearrange(torch.autograd.Function):
    """Rows of `x` at `index`; the gradient's rows at `back`, which must undo it.

    For padded slots, whose gradient is zero, this equals the scatter-add that indexing would do, and is much faster.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, index: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (back,) = ctx.saved_tensors
        return grads[0].index_select(0, back), None, None


class _Restore(torch.autograd.Function):
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
