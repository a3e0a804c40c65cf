"""Log-probs of given tokens from hidden states, without holding all logits at once.

Where sampling excluded tokens, the distribution is over the others.

Logits exist in chunks of tokens, and are recomputed in the backward pass: only one number per
token is kept in between. On a GPU kernels read each chunk once (`logit_kernels`); elsewhere torch's
operations do, in float32. With `z` the logits of a token over its temperature and `p =
softmax(z)`,

log p(t) = z_t - max - log sum exp(z - max)        by z:  onehot(t) - p
H = -sum p log p                                   by z:  -p (log p + H)
"""

from __future__ import annotations

import functools
import importlib.util
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
"""Logits (tokens x vocabulary of this rank) that exist at once on a CPU: 128 MiB in float32."""
MAX_LOGIT_CHUNK_ELEMENTS = 2**30
GPU_BYTES_PER_LOGIT = 576
"""Of a GPU's memory, for each logit that exists at once: a hundredth of the memory for them and
their gradient. A chunk of the output matrix's gradient is as large whatever the rows: with few rows
it takes most of the time."""


def choose_chunk_elements(device: torch.device) -> int:
    """Return how many logits exist at once on `device`.

    That follows the GPU's total memory, not what is free: two runs would sum in another order.
    """
    if device.type != "cuda":
        return LOGIT_CHUNK_ELEMENTS
    total = torch.cuda.get_device_properties(device).total_memory
    return min(MAX_LOGIT_CHUNK_ELEMENTS, total // GPU_BYTES_PER_LOGIT)


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
    chunk_elements: int | None = None,
    entropy_gradient: bool = False,
    supports: SupportSets | None = None,
    float32_head: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return each target's log-prob under `softmax(logits / temperature)`, and its entropy:
    float32 `[M]`, in nats.

    The logits are `hidden @ output_weight.T + bias`. At most `chunk_elements` of them exist at
    once (default: `choose_chunk_elements`), but at least those of one token. The gradient of
    `output_weight` is summed over chunks in float32.

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
    if chunk_elements is None:
        chunk_elements = choose_chunk_elements(hidden.device)
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
            _forward_chunk(_project_logits(h, factor, bias, head), t, targets_of, mask, head)
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
                _project_logits(h, factor, bias, head),
                t,
                targets_of,
                mask,
                _ChunkGradients(norm, entropy, grad, spread),
                head,
                h.dtype if bias is None else torch.float32,
            )
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


def _find_local_targets(
    targets: Tensor, head: _ChunkSettings, columns: int
) -> tuple[Tensor, Tensor]:
    """Return the column of each target, and whether it is one of this rank's."""
    column = targets - head.first_token_id
    mine = (column >= 0) & (column < columns)
    return torch.where(mine, column, 0)[:, None], mine


def _forward_chunk(
    logits: Tensor,
    temperatures: Tensor,
    targets: Tensor,
    mask: SupportMask | None,
    head: _ChunkSettings,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs, entropies, and the logarithm of the sum of `exp(z)`. Overwrites `logits`
    if they are float32."""
    column, mine = _find_local_targets(targets, head, logits.shape[1])
    excluded = None if mask is None else mask.build_excluded()
    if _can_run_kernels(logits):
        top, total = _summarize_by_kernel(logits, temperatures, column, mine, excluded, head.group)
    else:
        z = _scale_logits(logits, temperatures, excluded)
        del logits  # in bfloat16 they are beside z
        top, total = _summarize_rows(z, column, mine, head.group)
    if head.group is not None:
        dist.all_reduce(total, group=head.group)
    norm, picked, spread = total
    return picked - norm.log(), norm.log() - spread / norm, top + norm.log()


def _summarize_rows(
    z: Tensor, column: Tensor, mine: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Return the maxima of all ranks' `z`, `[m]`, and of this rank's `[3, m]`: the sum of `e = exp(z
    - maximum)`, `z - maximum` in the target's column, and the sum of `e (z - maximum)`. Overwrites
    `z`."""
    top = z.max(dim=-1).values
    if group is not None:
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    z.sub_(top[:, None])
    picked = torch.where(mine, z.gather(1, column)[:, 0], 0.0)
    weights = z.exp()
    # Where a weight is 0 the logit may be minus infinity, and their product NaN.
    spread = z.mul_(weights).masked_fill_(weights == 0, 0.0).sum(dim=-1)
    return top, torch.stack([weights.sum(dim=-1), picked, spread])


def _summarize_by_kernel(
    logits: Tensor,
    temperatures: Tensor,
    column: Tensor,
    mine: Tensor,
    excluded: Tensor | None,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor]:
    """Return what `_summarize_rows` does, of `z = logits / temperatures`."""
    from . import logit_kernels

    targets = torch.where(mine, column[:, 0], -1)
    local, total, spread, picked = logit_kernels.summarize_rows(
        logits, temperatures, targets, excluded
    )
    top = local
    if group is not None:
        top = local.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    # A rank may have no token that could be sampled.
    fall = (local - top).masked_fill_(local == -torch.inf, 0.0)
    scale = fall.exp()
    picked = torch.where(mine, picked - top, 0.0)
    return top, torch.stack([scale * total, picked, scale * (spread + fall * total)])


def _scale_logits(logits: Tensor, temperatures: Tensor, excluded: Tensor | None) -> Tensor:
    """Return `z = logits / temperature`, float32, minus infinity where a token is excluded."""
    z = logits.float().div_(temperatures[:, None])
    return z if excluded is None else z.masked_fill_(excluded, -torch.inf)


class _ChunkGradients(NamedTuple):
    """What the gradients of a chunk's tokens follow from, `[m]` each: `norms` are logarithms of the
    sum of `exp(z)`."""

    norms: Tensor
    entropies: Tensor
    by_logprob: Tensor
    by_entropy: Tensor


def _backward_chunk(
    logits: Tensor,
    temperatures: Tensor,
    targets: Tensor,
    mask: SupportMask | None,
    of: _ChunkGradients,
    head: _ChunkSettings,
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient by `logits`, `[m, V]`, of `dtype` or float32. Overwrites `logits` if they
    are float32."""
    column, mine = _find_local_targets(targets, head, logits.shape[1])
    excluded = None if mask is None else mask.build_excluded()
    if _can_run_kernels(logits):
        from . import logit_kernels

        own = torch.where(mine, column[:, 0], -1)
        if not head.entropy_gradient:
            of = of._replace(by_entropy=torch.zeros_like(of.by_logprob))
        return logit_kernels.write_gradients(logits, temperatures, own, excluded, *of, dtype)
    logs = _scale_logits(logits, temperatures, excluded)
    del logits  # in bfloat16 they are beside them
    logs.sub_(of.norms[:, None])
    if head.entropy_gradient:
        out = logs.exp()
        # A token without probability has no gradient, but an infinite logarithm.
        information = logs.masked_fill_(out == 0, 0.0).add_(of.entropies[:, None])
        out.mul_(information.mul_(-of.by_entropy[:, None]).sub_(of.by_logprob[:, None]))
    else:
        out = logs.exp_().mul_(-of.by_logprob[:, None])
    out.scatter_add_(1, column, torch.where(mine, of.by_logprob, 0.0)[:, None])
    return out.div_(temperatures[:, None])


def _can_run_kernels(logits: Tensor) -> bool:
    return logits.is_cuda and _has_triton_driver()


@functools.cache
def _has_triton_driver() -> bool:
    """Return whether Triton can run kernels here: on a GPU, or by its interpreter."""
    if importlib.util.find_spec("triton") is None:
        return False
    import triton

    if triton.knobs.runtime.interpret:
        return True
    try:
        triton.runtime.driver.active.get_current_target()
    except (RuntimeError, AssertionError):  # no driver, or not its library: an emulated device
        return False
    return True


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
