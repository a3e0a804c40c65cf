"""Computation that every backend shares: uploads, packed attention, stacked experts, gathers, log-probs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from r3async.data.supports import SupportSets
from r3async.learner.batch import expand_prefixes

# What a micro-batch needs on the device. The host never waits for it: it prepares the next operations, and the next
# micro-batch, while the device computes.


def upload_array(array: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Copy an array of the host to the device, without waiting for the device.

    On the CPU nothing is copied: the tensor shares the array's memory. The array must not be read-only.
    """
    values = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
    if device.type != "cuda":
        return values.to(device)
    # Only from pinned memory does a copy return at once. Torch keeps that memory until the copy is done, for later ones.
    return values.pin_memory().to(device, non_blocking=True)


# Causal attention over packed samples, planned once per micro-batch and used by every layer. One of two layouts, by what
# the device has a kernel for: a kernel for packed samples needs no padding; torch's general attention does.


class AttentionPlan:
    """The attention of one micro-batch's samples, in the layouts that its kernels ask for. See `plan_attention`."""

    def __init__(self, cu_seqlens: np.ndarray, device: torch.device, prefixes: np.ndarray | None):
        self._cu_seqlens, self._device, self._prefixes = cu_seqlens, device, prefixes

    @cached_property
    def padded_layout(self) -> PaddedLayout:
        return _plan_padded(self._cu_seqlens, self._device, self._prefixes)

    @cached_property
    def unpadded_layout(self) -> UnpaddedLayout:
        return _plan_unpadded(self._cu_seqlens, self._device, self._prefixes)


@dataclass(frozen=True)
class UnpaddedLayout:
    """Samples end to end, each with queries for its own rows and keys for all its tokens, shared ones included.

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
    """Buckets of samples of similar length, padded on the right to the longest and attended by one call.

    Under a causal mask no token sees the padding behind it. Samples that share a prefix have keys and values of all
    their tokens, but queries only after the first `skipped`, whose queries belong to other samples. All fields but
    `buckets` are None if the packed order is the padded one.

    Attributes:
        buckets: (samples, padded length, skipped) of each bucket.
        key_gather: The packed row that fills each padded slot of keys and values.
        query_gather: The packed row that fills each padded slot of queries.
        query_slots: int64 `[N]`: for every packed row its slot among the queries.
    """

    buckets: tuple[tuple[int, int, int], ...]
    key_gather: DeterministicGather | None
    query_gather: DeterministicGather | None
    query_slots: Tensor | None


def plan_buckets(lengths: np.ndarray) -> list[np.ndarray]:
    """Return the samples of each bucket (indices, longest first).

    A sample is shorter than the longest of its bucket by at most a quarter, or by 16 tokens.
    """
    order = np.argsort(-lengths, kind="stable")
    buckets, start = [], 0
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


def plan_attention(cu_seqlens: np.ndarray, device: torch.device, prefixes: np.ndarray | None = None) -> AttentionPlan:
    """Plan attention for samples laid end to end at `cu_seqlens` (int `[S + 1]`); `prefixes`: see `MicroBatch`."""
    return AttentionPlan(cu_seqlens, device, prefixes)


def _plan_unpadded(cu_seqlens: np.ndarray, device: torch.device, prefixes: np.ndarray | None) -> UnpaddedLayout:
    rows, key_edges = (None, cu_seqlens) if prefixes is None else expand_prefixes(cu_seqlens, prefixes)
    queries, keys = (upload_array(x.astype(np.int32), device) for x in (cu_seqlens, key_edges))
    return UnpaddedLayout(
        query_edges=queries,
        key_edges=keys,
        longest_query=int(np.diff(cu_seqlens).max()),
        longest_key=int(np.diff(key_edges).max()),
        key_gather=None if rows is None else DeterministicGather.from_index(rows, int(cu_seqlens[-1]), device),
    )


def _plan_padded(cu_seqlens: np.ndarray, device: torch.device, prefixes: np.ndarray | None) -> PaddedLayout:
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
        # A padded slot holds its sample's first token: any finite value will do, as nothing depends on it.
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
        query_gather=from_keys if alike else DeterministicGather.from_index(np.concatenate(queries), total, device),
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
    """Compute attention: `query [N, heads, D]`, `key` and `value` `[N, groups, D]` -> `[N, heads, D]`.

    Args:
        scale: Factor of the scores; None is `1 / sqrt(D)`.
        sinks: `[heads]`: a score for each head that takes part in every softmax and has no value.
        window: The number of tokens that a token sees, itself the last of them.
    """
    if sinks is None and _has_unpadded_kernel(query, value):
        return attend_unpadded(query, key, value, plan.unpadded_layout, scale, window=window)
    return attend_padded(query, key, value, plan.padded_layout, scale, sinks=sinks, window=window)


def _has_unpadded_kernel(query: Tensor, value: Tensor) -> bool:
    """Return True if FlashAttention computes this: 16 bits, on an Ampere or later, with heads of one size that it has."""
    size = query.shape[-1]
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    return size == value.shape[-1] and size <= 256 and size % 8 == 0 and _is_ampere_or_later(query.device)


@cache
def _is_ampere_or_later(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def attend_unpadded(
    query: Tensor, key: Tensor, value: Tensor, layout: UnpaddedLayout, scale: float | None, *, window: int | None = None
) -> Tensor:
    """Compute attention as `packed_attention` does, by one call of torch's FlashAttention for packed samples.

    The padded layout would call cuDNN, which plans for every new shape, and most micro-batches have new shapes (D-201).
    """
    from torch.nn.attention.varlen import varlen_attn  # registers operators, which takes its time at start-up

    if layout.key_gather is not None:
        key, value = layout.key_gather(key), layout.key_gather(value)
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
    """Return what newer versions must be told of grouped keys; torch 2.11 takes them as they are."""
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
    """Compute attention as `packed_attention` does, by torch's general attention over padded samples."""
    if layout.key_gather is not None and layout.query_gather is not None:
        query, key, value = layout.query_gather(query), layout.key_gather(key), layout.key_gather(value)
    sizes = [(count * (width - skipped), count * width) for count, width, skipped in layout.buckets]
    asked, held = zip(*sizes, strict=True)
    parts = zip(query.split(asked), key.split(held), value.split(held), layout.buckets, strict=True)
    with _prefer_unplanned_kernels() if query.is_cuda else nullcontext():
        attended = [
            _attend_bucket(q, k, v, n, width, skipped, scale, sinks, window) for q, k, v, (n, width, skipped) in parts
        ]
    out = attended[0] if len(attended) == 1 else torch.cat(attended)
    return out if layout.query_slots is None else _UnpadRows.apply(out, layout.query_slots)


def _prefer_unplanned_kernels() -> AbstractContextManager[None]:
    """Leave cuDNN, which plans for every new shape, to what other kernels cannot do."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]
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
        from torch.nn.attention.bias import causal_lower_right  # imports the compiler: one second at start-up

        # Queries lack the first tokens, but the last query still sees all keys.
        mask = causal_lower_right(width - skipped, width + before)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return out[..., :size].transpose(1, 2).flatten(0, 1)


_SINK_PADDING = 8
"""Values by which each head grows with sinks: kernels take sizes in multiples of eight."""


def _append_sink_key(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Prepend one key to all others, whose product with a query of head `h` is `sinks[h] / scale`; its value is zero.

    All three `[n, heads or groups, W, D]` -> `[.., D + 8]`: the first of the new values holds that product in queries,
    and 1 in the new key.
    """
    score = (sinks.to(q.dtype) / scale).view(1, -1, 1, 1).expand(*q.shape[:3], 1)
    q = torch.cat([q, F.pad(score, (0, _SINK_PADDING - 1))], dim=-1)
    sink = F.one_hot(torch.tensor(k.shape[-1], device=k.device), k.shape[-1] + _SINK_PADDING).to(k.dtype)
    k = torch.cat([sink.expand(*k.shape[:2], 1, -1), F.pad(k, (0, _SINK_PADDING))], dim=2)
    return q, k, F.pad(v, (0, q.shape[-1] - v.shape[-1], 1, 0))


def _build_window_mask(width: int, skipped: int, window: int, device: torch.device) -> Tensor:
    """Return bool `[width - skipped, width]`: the keys that each query sees."""
    at = torch.arange(width, device=device)
    ago = at[skipped:, None] - at
    return (ago >= 0) & (ago < window)


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


# The experts of a layer as stacks of matrices, in plain torch: one grouped product instead of a loop over experts.
#
# Nothing here reads a number back from the device: the experts' token counts stay where they were computed.


GROUPED_ROW_BYTES = 16
"""Bytes that the size of a row must be a multiple of in torch's grouped product."""


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Multiply rows by their group's matrix: `x [P, K]`, `weight [E, M, K]` -> `[P, M]`.

    The first `counts[0]` rows of `x` are multiplied by the first matrix, and so on. `counts` int64 `[E]` add up to P.
    Differentiable. On CUDA in bf16 it is one kernel; in other precisions torch runs the matrices one by one. Rows that
    are not a multiple of 16 bytes are for small tests only: they read the counts back to the host.
    """
    if all(n * x.element_size() % GROUPED_ROW_BYTES == 0 for n in weight.shape[1:]):
        ends = counts.cumsum(0, dtype=torch.int32)
        return F.grouped_mm(x, zero_empty_gradients(weight, ends).mT, offs=ends)
    parts = zip(x.split(counts.tolist()), weight.unbind(), strict=True)
    return torch.cat([F.linear(part, matrix) for part, matrix in parts])


def zero_empty_gradients(weight: Tensor, ends: Tensor) -> Tensor:
    """Return `weight` `[E, ...]`, the matrices of a grouped product, with a gradient that is 0 for groups without a row.

    `ends` int32 `[E]` are the ends of the groups' rows. Torch leaves these gradients unwritten on some devices
    (github.com/pytorch/pytorch, issues 172439 and 193633). What it does on a device nobody can see from the outside, so
    the mask is there on all of them: it takes a pass over the gradient.
    """
    return _ZeroEmptyGradients.apply(weight, ends)


class _ZeroEmptyGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(ends)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (ends,) = ctx.saved_tensors
        empty = ends.diff(prepend=ends.new_zeros(1)) == 0
        return grads[0].masked_fill(empty.view(-1, *(1 for _ in grads[0].shape[1:])), 0.0), None


class WeightedSwiGLU(torch.autograd.Function):
    """The weighted SwiGLU: `silu(gate) * up * share` of `x [P, 2 W]` and `share` float32 `[P]` -> `[P, W]`.

    The result has the dtype of `x`. In `x`, gate is next to up. Only `x` and `share` are kept for the backward pass:
    half of what a chain of torch's operations would keep.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gates: Tensor) -> Tensor:
        ctx.save_for_backward(x, gates)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up).mul_(gates[:, None])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, share = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        grad, active = grads[0], F.silu(gate)
        by_share = (active * up).mul_(grad).sum(dim=-1, dtype=share.dtype)
        grad = (grad * share[:, None]).to(x.dtype)
        out = torch.empty_like(x)
        by_gate, by_up = out.chunk(2, dim=-1)
        torch.mul(grad, active, out=by_up)
        torch.ops.aten.silu_backward.grad_input(grad.mul_(up), gate, grad_input=by_gate)
        return out, by_share


class ExpertDispatch:
    """The dispatch of `N` tokens to `K` experts each: sent rows are ordered by expert and then by token.

    `chosen` bool `[N, E]` has K True values in a row. `token_index` int64 `[N K]` is the token of each sent row,
    `expert_counts` int64 `[E]` the number of rows sent to each expert.
    """

    def __init__(self, chosen: Tensor, top_k: int):
        size = len(chosen) * top_k
        experts, self.token_index = torch.nonzero_static(chosen.T, size=size).unbind(dim=1)
        self._gate_index = self.token_index * chosen.shape[1] + experts
        self._token_slots = self.token_index.argsort(stable=True).view(len(chosen), top_k)
        self.expert_counts = chosen.sum(dim=0)

    def dispatch_rows(self, x: Tensor) -> Tensor:
        """Return the sent rows: `x [N, H]` -> `[N K, H]`."""
        return _DispatchRows.apply(x, self.token_index, self._token_slots)

    def gather_gates(self, gates: Tensor) -> Tensor:
        """Return the gates of the sent rows: `gates [N, E]` -> `[N K]`."""
        return gates.reshape(-1).gather(0, self._gate_index)

    def combine_outputs(self, y: Tensor) -> Tensor:
        """Return the sum of each token's expert outputs, in the order of experts: `y [N K, H]` -> `[N, H]`."""
        return _CombineRows.apply(y, self.token_index, self._token_slots)


def _sum_rows(y: Tensor, slots: Tensor) -> Tensor:
    """Return the sums of the rows of `y` at `slots [N, K]`, in one order at every call; a scatter on CUDA has none."""
    return F.embedding_bag(slots, y, mode="sum") if slots.numel() else y.new_zeros(len(slots), y.shape[1])


class _DispatchRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        return x.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _sum_rows(grads[0].contiguous(), ctx.saved_tensors[0]), None, None


class _CombineRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, tokens: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        return _sum_rows(y.contiguous(), slots)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None


# Log-probs of given tokens from hidden states, without holding all logits at once. Where sampling excluded tokens, the
# distribution is over the others.
#
# Logits exist in chunks of tokens, in float32, and are recomputed in the backward pass: only one number per token is
# kept in between. With `z` the logits of a token over its temperature and `p = softmax(z)`,
#
# log p(t) = z_t - max - log sum exp(z - max)        by z:  onehot(t) - p
# H = -sum p log p                                   by z:  -p (log p + H)


LOGIT_CHUNK_ELEMENTS = 2**25
"""Logits (tokens x vocabulary of this rank) that exist at once in float32: 128 MiB."""


class SupportMask:
    """The supports of M tokens on a device, for this rank's columns of the logits: ids `first .. first + columns - 1`."""

    def __init__(self, supports: SupportSets, device: torch.device, first: int, columns: int):
        written = supports.encoded_ids()
        here = (written.ids >= first) & (written.ids < first + columns)
        self._columns, self._length = columns, len(supports)
        # A support that lists its tokens excludes all others.
        named_in = supports.recorded_mask & ~supports.complement_mask
        self._excludes_unnamed = upload_array(named_in, device)
        self._rows = upload_array(written.rows[here], device)
        self._ids = upload_array(written.ids[here] - first, device)
        begin, end = first // 8, -(-(first + columns) // 8)
        self._bit_offset = first - 8 * begin
        self._bits = []
        for rows, bits in supports.iter_bitmaps():
            part = np.zeros((len(rows), end - begin), np.uint8)
            part[:, : max(0, min(end, bits.shape[1]) - begin)] = bits[:, begin:end]
            self._bits.append((upload_array(rows, device), upload_array(part, device)))

    def build_excluded(self) -> Tensor:
        """Return bool `[M, columns]`: the tokens that could not be sampled. A new tensor."""
        out = self._excludes_unnamed[:, None].repeat(1, self._columns)
        out[self._rows, self._ids] = ~self._excludes_unnamed[self._rows]
        shifts = torch.arange(8, dtype=torch.uint8, device=out.device)
        for rows, bits in self._bits:
            inside = (bits[:, :, None] >> shifts & 1).flatten(1)
            out[rows] = inside[:, self._bit_offset : self._bit_offset + self._columns] == 0
        return out


def token_logprobs(
    output_weight: Tensor,
    hidden: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    *,
    bias: Tensor | None = None,
    first_token_id: int = 0,
    group: dist.ProcessGroup | None = None,
    chunk_elements: int = LOGIT_CHUNK_ELEMENTS,
    entropy_gradient: bool = False,
    supports: SupportSets | None = None,
) -> tuple[Tensor, Tensor]:
    """Return each target's log-prob under `softmax(logits / temperature)`, and its entropy: float32 `[M]`, in nats.

    The logits are `hidden @ output_weight.T + bias`. At most `chunk_elements` logits exist at once, but at least those
    of one token. The gradient of `output_weight` is summed over chunks in float32.

    Args:
        output_weight: `[V, H]`.
        hidden: `[M, H]`.
        targets: int64 `[M]`.
        temperatures: float32 `[M]`.
        first_token_id: This rank has the logits of ids `first_token_id .. first_token_id + V`.
        group: Ranks that each have the logits of a part of the ids; every rank gets the result. Two collectives per
            chunk, in the forward pass only.
        entropy_gradient: Entropies have a gradient only if this is set.
        supports: The supports of the M tokens. Log-probs and entropies are then those of the distribution over the
            tokens in it, and nothing else has a gradient. It takes a byte for each logit of a chunk.
    """
    columns = len(output_weight)
    rows = max(1, chunk_elements // max(1, columns))
    masks = _build_masks(supports, rows, len(hidden), hidden.device, first_token_id, columns)
    head = _ChunkSettings(first_token_id, group, rows, masks, entropy_gradient)
    logprobs, entropies = _ChunkedLogprobs.apply(hidden, output_weight, bias, targets, temperatures, head)
    return logprobs, entropies


class _ChunkSettings(NamedTuple):
    """The settings of chunked log-probs, with `chunk_rows` tokens in a chunk and one of `masks` for each chunk."""

    first_token_id: int
    group: dist.ProcessGroup | None
    chunk_rows: int
    masks: Sequence[SupportMask | None]
    entropy_gradient: bool


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        matrix: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperatures: Tensor,
        head: _ChunkSettings,
    ) -> tuple[Tensor, Tensor]:
        found = [
            _forward_chunk(_compute_logits(h, matrix, bias, t, mask), targets_of, head)
            for h, targets_of, t, mask in _iter_chunks(head, hidden, targets, temperatures)
        ]
        logprobs, entropies, norms = (torch.cat(parts) for parts in zip(*found, strict=True))
        ctx.save_for_backward(hidden, matrix, bias, targets, temperatures, entropies, norms)
        ctx.head = head
        if not head.entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, matrix, bias, targets, temperatures, entropies, norms = ctx.saved_tensors
        head: _ChunkSettings = ctx.head
        of_matrix: Tensor | None = None
        of_hidden, of_bias = [], None if bias is None else bias.new_zeros(len(matrix), dtype=torch.float32)
        by_logprob, by_entropy = grads
        for h, targets_of, t, norm, entropy, grad, spread, mask in _iter_chunks(
            head, hidden, targets, temperatures, norms, entropies, by_logprob, by_entropy
        ):
            by_logit = _backward_chunk(
                _compute_logits(h, matrix, bias, t, mask), norm, targets_of, entropy, grad, spread, head
            )
            by_logit.div_(t[:, None])
            rounded = by_logit.to(h.dtype)
            of_hidden.append(rounded @ matrix)
            if ctx.needs_input_grad[1]:
                part = rounded.T @ h
                if of_matrix is None:
                    of_matrix = part if len(hidden) <= head.chunk_rows else part.float()
                else:
                    of_matrix += part
                del part
            if of_bias is not None:
                of_bias += by_logit.sum(0)
            del by_logit, rounded  # before the next chunk allocates its own
        of_matrix = None if of_matrix is None else of_matrix.to(matrix.dtype)
        of_bias = None if bias is None or of_bias is None else of_bias.to(bias.dtype)
        return torch.cat(of_hidden), of_matrix, of_bias, None, None, None


def _iter_chunks(head: _ChunkSettings, *tensors: Tensor) -> Any:
    """Yield, for each chunk, the rows of every tensor, and its mask."""
    return zip(*(t.split(head.chunk_rows) for t in tensors), head.masks, strict=True)


def _compute_logits(
    hidden: Tensor, matrix: Tensor, bias: Tensor | None, temperatures: Tensor, mask: SupportMask | None
) -> Tensor:
    """Return the logits, float32 `[m, V]`, minus infinity where `mask` excludes tokens."""
    z = F.linear(hidden, matrix, bias).float().div_(temperatures[:, None])
    return z if mask is None else z.masked_fill_(mask.build_excluded(), -torch.inf)


def _find_local_targets(targets: Tensor, head: _ChunkSettings, columns: int) -> tuple[Tensor, Tensor]:
    """Return the column of each target, and whether it is one of this rank's."""
    column = targets - head.first_token_id
    mine = (column >= 0) & (column < columns)
    return torch.where(mine, column, 0)[:, None], mine


def _forward_chunk(z: Tensor, targets: Tensor, head: _ChunkSettings) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs, entropies, and the logarithm of the sum of `exp(z)`. Overwrites `z`."""
    top = z.max(dim=-1).values
    if head.group is not None:
        dist.all_reduce(top, dist.ReduceOp.MAX, group=head.group)
    z.sub_(top[:, None])
    column, mine = _find_local_targets(targets, head, z.shape[1])
    picked = torch.where(mine, z.gather(1, column)[:, 0], 0.0)
    weights = z.exp()
    # Where a weight is 0 the logit may be minus infinity, and their product NaN.
    spread = z.mul_(weights).masked_fill_(weights == 0, 0.0).sum(dim=-1)
    total = torch.stack([weights.sum(dim=-1), picked, spread])
    if head.group is not None:
        dist.all_reduce(total, group=head.group)
    norm, picked, spread = total
    return picked - norm.log(), norm.log() - spread / norm, top + norm.log()


def _backward_chunk(
    z: Tensor, norm: Tensor, targets: Tensor, entropies: Tensor, grad: Tensor, spread: Tensor, head: _ChunkSettings
) -> Tensor:
    """Return the gradient by `z`, `[m, V]`. Overwrites `z`.

    `norm` `[m]` is the logarithm of the sum of `exp(z)`; `grad` and `spread` `[m]` are the gradients by log-prob and
    entropy.
    """
    column, mine = _find_local_targets(targets, head, z.shape[1])
    logs = z.sub_(norm[:, None])
    if head.entropy_gradient:
        out = logs.exp()
        # A token without probability has no gradient, but an infinite logarithm.
        information = logs.masked_fill_(out == 0, 0.0).add_(entropies[:, None])
        out.mul_(information.mul_(-spread[:, None]).sub_(grad[:, None]))
    else:
        out = logs.exp_().mul_(-grad[:, None])
    return out.scatter_add_(1, column, torch.where(mine, grad, 0.0)[:, None])


def _build_masks(
    supports: SupportSets | None, rows: int, count: int, device: torch.device, first: int, columns: int
) -> Sequence[SupportMask | None]:
    """Return one mask for each chunk of `rows` of `count` tokens."""
    starts = range(0, max(1, count), rows)
    if supports is None:
        return [None] * len(starts)
    return [SupportMask(supports[start : start + rows], device, first, columns) for start in starts]


def select_supports(column: SupportSets | None, rows: np.ndarray) -> SupportSets | None:
    """Return the supports of the tokens at `rows`; None if none has one, and logits are of the whole vocabulary."""
    if column is None:
        return None
    supports = column.take_rows(rows)
    return supports if supports.recorded_mask.any() else None


# Gathering rows of a tensor by index, possibly several times, with a gradient that is the same at every call.


class DeterministicGather:
    """A gather with a deterministic gradient: `gather(x)` returns rows `source_rows` int64 `[P]` of `x [N, ...]`.

    The gradient of a row is the sum of those at its `gradient_slots`, in order. `slot_offsets` int64 `[N]` says where
    the slots of each row begin; it is None if each row has one slot.
    """

    def __init__(self, source_rows: Tensor, gradient_slots: Tensor, slot_offsets: Tensor | None):
        self.source_rows, self.gradient_slots, self.slot_offsets = source_rows, gradient_slots, slot_offsets

    @staticmethod
    def from_index(index: np.ndarray, total: int, device: torch.device) -> DeterministicGather:
        """Build a gather from `index` int `[P]` of `total` rows.

        An entry is `-1 - row` where nothing depends on the gathered row; its gradient is 0.
        """
        (there,) = np.nonzero(index >= 0)
        rows = index[there]
        slots = there[np.argsort(rows, kind="stable")]
        counts = np.bincount(rows, minlength=total)
        offsets = None if len(rows) == total and (counts == 1).all() else np.cumsum(counts) - counts
        index = np.where(index < 0, -1 - index, index)
        return DeterministicGather(
            upload_array(index, device),
            upload_array(slots, device),
            None if offsets is None else upload_array(offsets, device),
        )

    def __call__(self, x: Tensor) -> Tensor:
        return _GatherRows.apply(x, self.source_rows, self.gradient_slots, self.slot_offsets)


class _GatherRows(torch.autograd.Function):
    """The autograd function of `DeterministicGather`.

    For slots whose gradient is zero this equals the scatter-add that indexing would do, and is much faster; and where a
    row is gathered several times, its sum has a fixed order also on CUDA.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, slots: Tensor, offsets: Tensor | None) -> Tensor:
        ctx.save_for_backward(slots, offsets)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        slots, offsets = ctx.saved_tensors
        grad = grads[0]
        if offsets is None:
            return grad.index_select(0, slots), None, None, None
        sums = F.embedding_bag(slots, grad.flatten(1).contiguous(), offsets, mode="sum")
        return sums.view(-1, *grad.shape[1:]), None, None, None
