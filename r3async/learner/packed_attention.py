"""Causal attention over packed samples, planned once per micro-batch and used by every layer.

One of two layouts, by what the device has a kernel for: a kernel for packed samples needs no
padding; torch's general attention does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from r3async.learner.deterministic_gather import DeterministicGather
from r3async.learner.device_upload import upload_array
from r3async.learner.recurrent_layout import RecurrentLayout
from r3async.learner.results import LearnerError
from r3async.learner.shared_prefixes import expand_prefixes


class AttentionPlan:
    """The attention of one micro-batch's samples, in the layouts that its kernels ask for. See
    `plan_attention`."""

    def __init__(self, cu_seqlens: np.ndarray, device: torch.device, prefixes: np.ndarray | None):
        self._cu_seqlens = cu_seqlens
        self._device = device
        self._prefixes = prefixes

    @cached_property
    def padded_layout(self) -> PaddedLayout:
        return _plan_padded(self._cu_seqlens, self._device, self._prefixes)

    @cached_property
    def unpadded_layout(self) -> UnpaddedLayout:
        return _plan_unpadded(self._cu_seqlens, self._device, self._prefixes)

    @cached_property
    def recurrent_layout(self) -> RecurrentLayout:
        """The samples for recurrent layers. Raises `LearnerError` if samples share prefixes."""
        self.check_whole_samples()
        return RecurrentLayout(self._cu_seqlens, self._device)

    def check_whole_samples(self) -> None:
        """Raise `LearnerError` if some samples have no rows of their own for a prefix."""
        if self._prefixes is not None:
            raise LearnerError(
                "layers that keep a state need every sample whole: set learner.share_prefixes = "
                "false"
            )


@dataclass(frozen=True)
class UnpaddedLayout:
    """Samples end to end, each with queries for its own rows and keys for all its tokens,
    shared ones included.

    Attributes:
        query_edges: int32 `[S + 1]`.
        key_edges: int32 `[S + 1]`.
        longest_query: The largest number of queries of a sample.
        longest_key: The largest number of keys of a sample.
        key_gather: The packed row of each key; None where no sample shares a prefix.
    """

    query_edges: Tensor
    key_edges: Tensor
    longest_query: int
    longest_key: int
    key_gather: DeterministicGather | None


@dataclass(frozen=True)
class PaddedLayout:
    """Buckets of samples of similar length, padded on the right to the longest and
    attended by one call.

    Under a causal mask no token sees the padding behind it. Samples that share a prefix have keys
    and values of all their tokens, but queries only after the first `skipped`, whose queries belong
    to other samples. All fields but `buckets` are None if the packed order is the padded one.

    Attributes:
        buckets: (samples, padded length, skipped) of each bucket.
        key_gather: The packed row that fills each padded slot of keys and values.
        query_gather: The packed row that fills each padded slot of queries.
        query_slots: int64 `[N]`: for every packed row its slot among the queries.
        masks: The masks of buckets, which every layer uses, by what they were built from.
    """

    buckets: tuple[tuple[int, int, int], ...]
    key_gather: DeterministicGather | None
    query_gather: DeterministicGather | None
    query_slots: Tensor | None
    masks: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)


def plan_buckets(lengths: np.ndarray) -> list[np.ndarray]:
    """Return the samples of each bucket (indices, longest first).

    A sample is shorter than the longest of its bucket by at most a quarter, or by 16 tokens.
    """
    order = np.argsort(-lengths, kind="stable")
    buckets = []
    start = 0
    for i in range(1, len(order) + 1):
        longest = lengths[order[start]]
        if i == len(order) or longest - lengths[order[i]] > max(16, longest // 4):
            buckets.append(order[start:i])
            start = i
    return buckets


def plan_prefix_buckets(lengths: np.ndarray, shared: np.ndarray) -> list[np.ndarray]:
    """Return the buckets of samples that share about as much.

    Samples that share nothing come first, then the others by the rule of `plan_buckets`.
    """
    if not shared.any():
        return plan_buckets(lengths)
    alone = np.flatnonzero(shared == 0)
    (begins,) = np.nonzero(shared)
    likes = [alone, *(begins[some] for some in plan_buckets(shared[begins]))]
    return [some[members] for some in likes for members in plan_buckets(lengths[some])]


def plan_attention(
    cu_seqlens: np.ndarray, device: torch.device, prefixes: np.ndarray | None = None
) -> AttentionPlan:
    """Plan attention for samples laid end to end at `cu_seqlens` (int `[S + 1]`); `prefixes`:
    see `MicroBatch`."""
    return AttentionPlan(cu_seqlens, device, prefixes)


def _plan_unpadded(
    cu_seqlens: np.ndarray, device: torch.device, prefixes: np.ndarray | None
) -> UnpaddedLayout:
    rows, key_edges = (
        (None, cu_seqlens) if prefixes is None else expand_prefixes(cu_seqlens, prefixes)
    )
    queries, keys = (upload_array(x.astype(np.int32), device) for x in (cu_seqlens, key_edges))
    return UnpaddedLayout(
        query_edges=queries,
        key_edges=keys,
        longest_query=int(np.diff(cu_seqlens).max()),
        longest_key=int(np.diff(key_edges).max()),
        key_gather=None
        if rows is None
        else DeterministicGather.from_index(rows, int(cu_seqlens[-1]), device),
    )


def _plan_padded(
    cu_seqlens: np.ndarray, device: torch.device, prefixes: np.ndarray | None
) -> PaddedLayout:
    total = int(cu_seqlens[-1])
    if prefixes is None:
        whole = np.arange(total)
        edges = cu_seqlens.astype(np.int64)
        shared = np.zeros(len(cu_seqlens) - 1, np.int64)
    else:
        whole, edges = expand_prefixes(cu_seqlens, prefixes)
        shared = prefixes[:, 1].astype(np.int64)
    starts = edges[:-1]
    lengths = np.diff(edges)
    shapes = []
    keys = []
    queries = []
    slots = np.empty(total, np.int64)
    at = 0
    for members in plan_prefix_buckets(lengths, shared):
        width = int(lengths[members[0]])
        skipped = int(shared[members].min())
        column = np.arange(width)
        inside = column < lengths[members, None]
        # A padded slot holds its sample's first token: any finite value will do, as
        # nothing depends on it.
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
        return PaddedLayout(tuple(shapes), None, None, None)
    from_keys = DeterministicGather.from_index(index, total, device)
    alike = all(skipped == 0 for *_, skipped in shapes) and not shared.any()
    return PaddedLayout(
        buckets=tuple(shapes),
        key_gather=from_keys,
        query_gather=from_keys
        if alike
        else DeterministicGather.from_index(np.concatenate(queries), total, device),
        query_slots=upload_array(slots, device),
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
    """Compute attention: `query [N, heads, D]`, `key` and `value` `[N, groups, D]` ->
    `[N, heads, D]`.

    Args:
        scale: Factor of the scores; None is `1 / sqrt(D)`.
        sinks: `[heads]`: a score for each head that takes part in every softmax and has no value.
        window: The number of tokens that a token sees, itself the last of them.
    """
    if sinks is None and _has_unpadded_kernel(query, value):
        return attend_unpadded(query, key, value, plan.unpadded_layout, scale, window=window)
    return attend_padded(query, key, value, plan.padded_layout, scale, sinks=sinks, window=window)


def _has_unpadded_kernel(query: Tensor, value: Tensor) -> bool:
    """Return True if FlashAttention computes this: 16 bits, on an Ampere or later, with heads of
    one size that it has."""
    size = query.shape[-1]
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    return (
        size == value.shape[-1]
        and size <= 256
        and size % 8 == 0
        and _is_ampere_or_later(query.device)
    )


@cache
def _is_ampere_or_later(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def attend_unpadded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: UnpaddedLayout,
    scale: float | None,
    *,
    window: int | None = None,
) -> Tensor:
    """Compute attention as `packed_attention` does, by one call of torch's FlashAttention
    for packed samples.

    The padded layout would call cuDNN, which plans for every new shape, and most micro-batches have
    new shapes (D-201).
    """
    # Registers operators, which takes its time at start-up.
    from torch.nn.attention.varlen import varlen_attn

    if layout.key_gather is not None:
        key = layout.key_gather(key)
        value = layout.key_gather(value)
    return varlen_attn(
        query,
        key,
        value,
        layout.query_edges,
        layout.key_edges,
        layout.longest_query,
        layout.longest_key,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **_grouped_key_options(varlen_attn),
    )


@cache
def _grouped_key_options(varlen_attn: Callable[..., Any]) -> dict[str, Any]:
    """Return what newer versions must be told of grouped keys; torch 2.11 takes
    them as they are."""
    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def attend_padded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PaddedLayout,
    scale: float | None,
    *,
    sinks: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Compute attention as `packed_attention` does, by torch's general attention
    over padded samples."""
    if layout.key_gather is not None and layout.query_gather is not None:
        query = layout.query_gather(query)
        key = layout.key_gather(key)
        value = layout.key_gather(value)
    sizes = [(count * (width - skipped), count * width) for count, width, skipped in layout.buckets]
    asked, held = zip(*sizes, strict=True)
    parts = zip(query.split(asked), key.split(held), value.split(held), layout.buckets, strict=True)
    with _prefer_unplanned_kernels() if query.is_cuda else nullcontext():
        attended = [
            _attend_bucket(q, k, v, *bucket, scale, sinks, window, layout.masks)
            for q, k, v, bucket in parts
        ]
    return unpad_rows(attended[0] if len(attended) == 1 else torch.cat(attended), layout)


def unpad_rows(padded: Tensor, layout: PaddedLayout) -> Tensor:
    """Return the packed rows `[N, ...]` of the padded slots of queries."""
    slots = layout.query_slots
    rows: Tensor = padded if slots is None else _UnpadRows.apply(padded, slots)
    return rows


def _prefer_unplanned_kernels() -> AbstractContextManager[None]:
    """Leave cuDNN, which plans for every new shape, to what other kernels cannot do."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels = [
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.MATH,
    ]
    chosen: AbstractContextManager[None] = sdpa_kernel(kernels, set_priority=True)
    return chosen


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
    masks: dict[tuple[Any, ...], Tensor],
) -> Tensor:
    q = query.unflatten(0, (count, width - skipped)).transpose(1, 2)
    k, v = (x.unflatten(0, (count, width)).transpose(1, 2) for x in (key, value))
    grouped = query.shape[1] != key.shape[1]
    size = v.shape[-1]
    before = int(sinks is not None)
    if sinks is not None:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        q, k, v = _append_sink_key(q, k, v, sinks, scale)
    window = width if window is None else min(window, width)
    mask: Any = None
    if window < width or ((skipped or before) and q.device.type == "cpu"):
        mask = _find_mask(masks, q, width, skipped, before, window)
    elif skipped or before:
        # Imports the compiler: one second at start-up.
        from torch.nn.attention.bias import causal_lower_right

        # Queries lack the first tokens, but the last query still sees all keys.
        mask = causal_lower_right(width - skipped, width + before)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return out[..., :size].transpose(1, 2).flatten(0, 1)


_SINK_PADDING = 8
"""Values by which each head grows with sinks: kernels take sizes in multiples of eight."""


def _append_sink_key(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Prepend one key to all others, whose product with a query of head `h` is `sinks[h] / scale`;
    its value is zero.

    All three `[n, heads or groups, W, D]` -> `[.., D + 8]`: the first of the new values holds that
    product in queries, and 1 in the new key.
    """
    score = (sinks.to(q.dtype) / scale).view(1, -1, 1, 1).expand(*q.shape[:3], 1)
    q = torch.cat([q, F.pad(score, (0, _SINK_PADDING - 1))], dim=-1)
    sink = F.one_hot(torch.tensor(k.shape[-1], device=k.device), k.shape[-1] + _SINK_PADDING).to(
        k.dtype
    )
    k = torch.cat([sink.expand(*k.shape[:2], 1, -1), F.pad(k, (0, _SINK_PADDING))], dim=2)
    return q, k, F.pad(v, (0, q.shape[-1] - v.shape[-1], 1, 0))


def _find_mask(
    masks: dict[tuple[Any, ...], Tensor],
    query: Tensor,
    width: int,
    skipped: int,
    before: int,
    window: int,
) -> Tensor:
    """Return the keys that each query sees, `[width - skipped, before + width]`.

    On CPU it is what is added to scores, in the dtype of `query`: torch would make that of a bool
    mask in every layer.
    """
    built_from = (width, skipped, before, window, query.dtype)
    if built_from not in masks:
        at = torch.arange(width, device=query.device)
        ago = at[skipped:, None] - at
        seen = F.pad((ago >= 0) & (ago < window), (before, 0), value=True)
        if query.device.type == "cpu":
            seen = torch.zeros_like(seen, dtype=query.dtype).masked_fill_(~seen, -torch.inf)
        masks[built_from] = seen
    return masks[built_from]


class _UnpadRows(torch.autograd.Function):
    """Packed rows selected from padded ones: `x[slots]`. The gradient of padding is zero."""

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
