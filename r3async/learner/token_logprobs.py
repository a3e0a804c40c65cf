"""Log-probs of given tokens from hidden states, without holding all logits at once.

Where sampling excluded tokens, the distribution is over the others.

Logits exist in chunks of tokens, in float32, and are recomputed in the backward pass: only one
number per token is kept in between. With `z` the logits of a token over its temperature and `p =
softmax(z)`,

log p(t) = z_t - max - log sum exp(z - max)        by z:  onehot(t) - p
H = -sum p log p                                   by z:  -p (log p + H)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from r3async.data.supports import SupportSets
from r3async.learner.device_upload import upload_array

LOGIT_CHUNK_ELEMENTS = 2**25
"""Logits (tokens x vocabulary of this rank) that exist at once in float32: 128 MiB."""


class SupportMask:
    """The supports of M tokens on a device, for this rank's columns of the logits: ids
    `first .. first + columns - 1`."""

    def __init__(self, supports: SupportSets, device: torch.device, first: int, columns: int):
        written = supports.encoded_ids()
        here = (written.ids >= first) & (written.ids < first + columns)
        self._columns = columns
        self._length = len(supports)
        # A support that lists its tokens excludes all others.
        named_in = supports.recorded_mask & ~supports.complement_mask
        self._excludes_unnamed = upload_array(named_in, device)
        self._rows = upload_array(written.rows[here], device)
        self._ids = upload_array(written.ids[here] - first, device)
        begin = first // 8
        end = -(-(first + columns) // 8)
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
    float32_head: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return each target's log-prob under `softmax(logits / temperature)`, and its entropy:
    float32 `[M]`, in nats.

    The logits are `hidden @ output_weight.T + bias`. At most `chunk_elements` logits exist at
    once, but at least those of one token. The gradient of `output_weight` is summed over
    chunks in float32.

    Args:
        output_weight: `[V, H]`.
        hidden: `[M, H]`.
        targets: int64 `[M]`.
        temperatures: float32 `[M]`.
        first_token_id: This rank has the logits of ids `first_token_id .. first_token_id + V`.
        group: Ranks that each have the logits of a part of the ids; every rank gets the result. Two
            collectives per chunk, in the forward pass only.
        entropy_gradient: Entropies have a gradient only if this is set.
        supports: The supports of the M tokens. Log-probs and entropies are then those of the
            distribution over the tokens in it, and nothing else has a gradient. It takes a byte for
            each logit of a chunk.
        float32_head: Whether logits of narrower numbers are summed in float32 and stay so, as
            engines do with `model.head_dtype = "float32"`; else they are rounded to the dtype of
            `hidden`. Without CUDA, a pass needs a float32 copy of `output_weight`.
    """
    columns = len(output_weight)
    rows = max(1, chunk_elements // max(1, columns))
    masks = _build_masks(supports, rows, len(hidden), hidden.device, first_token_id, columns)
    widen = float32_head and hidden.dtype.itemsize < 4
    head = _ChunkSettings(first_token_id, group, rows, masks, entropy_gradient, widen)
    logprobs, entropies = _ChunkedLogprobs.apply(
        hidden, output_weight, bias, targets, temperatures, head
    )
    return logprobs, entropies


class _ChunkSettings(NamedTuple):
    """The settings of chunked log-probs, with `chunk_rows` tokens in a chunk and one of
    `masks` for each chunk."""

    first_token_id: int
    group: dist.ProcessGroup | None
    chunk_rows: int
    masks: Sequence[SupportMask | None]
    entropy_gradient: bool
    widen: bool


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
        factor = _prepare_matrix(matrix, head)
        found = [
            _forward_chunk(_compute_logits(h, factor, bias, t, mask, head), targets_of, head)
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
        of_hidden = []
        of_bias = None if bias is None else bias.new_zeros(len(matrix), dtype=torch.float32)
        by_logprob, by_entropy = grads
        factor = _prepare_matrix(matrix, head)
        for h, targets_of, t, norm, entropy, grad, spread, mask in _iter_chunks(
            head, hidden, targets, temperatures, norms, entropies, by_logprob, by_entropy
        ):
            by_logit = _backward_chunk(
                _compute_logits(h, factor, bias, t, mask, head),
                norm,
                targets_of,
                entropy,
                grad,
                spread,
                head,
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


def _prepare_matrix(matrix: Tensor, head: _ChunkSettings) -> Tensor:
    """Return the output matrix as `_project_logits` takes it. It is not converted for each chunk."""
    return matrix.float() if head.widen and not matrix.is_cuda else matrix


def _project_logits(
    hidden: Tensor, matrix: Tensor, bias: Tensor | None, head: _ChunkSettings
) -> Tensor:
    if not head.widen:
        return F.linear(hidden, matrix, bias)
    if not matrix.is_cuda:
        return F.linear(hidden.float(), matrix, None if bias is None else bias.float())
    # Only CUDA multiplies narrower numbers to a float32 result.
    logits = torch.mm(hidden, matrix.T, out_dtype=torch.float32)
    return logits if bias is None else logits.add_(bias)


def _compute_logits(
    hidden: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    temperatures: Tensor,
    mask: SupportMask | None,
    head: _ChunkSettings,
) -> Tensor:
    """Return the logits, float32 `[m, V]`, minus infinity where `mask` excludes tokens."""
    z = _project_logits(hidden, matrix, bias, head).float().div_(temperatures[:, None])
    return z if mask is None else z.masked_fill_(mask.build_excluded(), -torch.inf)


def _find_local_targets(
    targets: Tensor, head: _ChunkSettings, columns: int
) -> tuple[Tensor, Tensor]:
    """Return the column of each target, and whether it is one of this rank's."""
    column = targets - head.first_token_id
    mine = (column >= 0) & (column < columns)
    return torch.where(mine, column, 0)[:, None], mine


def _forward_chunk(
    z: Tensor, targets: Tensor, head: _ChunkSettings
) -> tuple[Tensor, Tensor, Tensor]:
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
    z: Tensor,
    norm: Tensor,
    targets: Tensor,
    entropies: Tensor,
    grad: Tensor,
    spread: Tensor,
    head: _ChunkSettings,
) -> Tensor:
    """Return the gradient by `z`, `[m, V]`. Overwrites `z`.

    `norm` `[m]` is the logarithm of the sum of `exp(z)`; `grad` and `spread` `[m]` are the
    gradients by log-prob and entropy.
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
    supports: SupportSets | None,
    rows: int,
    count: int,
    device: torch.device,
    first: int,
    columns: int,
) -> Sequence[SupportMask | None]:
    """Return one mask for each chunk of `rows` of `count` tokens."""
    starts = range(0, max(1, count), rows)
    if supports is None:
        return [None] * len(starts)
    return [SupportMask(supports[start : start + rows], device, first, columns) for start in starts]


def select_supports(column: SupportSets | None, rows: np.ndarray) -> SupportSets | None:
    """Return the supports of the tokens at `rows`; None if none has one, and logits are of the
    whole vocabulary."""
    if column is None:
        return None
    supports = column.take_rows(rows)
    return supports if supports.recorded_mask.any() else None
