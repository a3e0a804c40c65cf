"""Log-probs of given tokens from hidden states, without holding all logits at once; where tokens were left out of sampling, over
those that were not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from r3async.data.supports import Supports

CHUNK_ELEMENTS = 2**25
"""Logits (tokens x vocabulary of this rank) that exist at once in float32: 128 MiB."""

LogProbs = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor]]
"""`(logits float32 [M, V], targets int64 [M], entropy_gradient) -> (log-probs [M], entropies [M])`. Entropies have a
gradient only if it is asked for: it costs as much memory as the log-probs' own."""


def whole_vocabulary(logits: Tensor, targets: Tensor, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy, float32 `[M]`, from the logits of every token id."""
    everything = torch.log_softmax(logits, dim=-1)
    with nullcontext() if entropy_gradient else torch.no_grad():
        # A log-prob of minus infinity has probability 0, and adds nothing to the entropy or to its gradient.
        possible = everything > -torch.inf
        known = torch.where(possible, everything, 0.0)
        entropies = -torch.where(possible, known.exp() * known, 0.0).sum(dim=-1)
    return everything.gather(1, targets[:, None])[:, 0], entropies


def split_vocabulary(first: int, group: dist.ProcessGroup) -> LogProbs:
    """The same where each rank of `group` has the logits of a part of the ids, this one of `first ..`; every rank gets the
    result. Two collectives a call, in the forward pass only."""

    def logprobs(logits: Tensor, targets: Tensor, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        return _SplitVocabulary.apply(logits, targets, first, group, entropy_gradient)

    return logprobs


class _SplitVocabulary(torch.autograd.Function):
    """`log p(t) = z_t - max - log sum exp(z - max)`; its gradient by `z` is `onehot(t) - p`. That of the entropy
    `H = -sum p log p` is `-p (log p + H)`."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        top = logits.max(dim=-1).values
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        shifted = logits - top[:, None]
        weights = shifted.exp()
        column = targets - first
        mine = (column >= 0) & (column < logits.shape[1])
        column = torch.where(mine, column, 0)
        picked = torch.where(mine, shifted.gather(1, column[:, None])[:, 0], 0.0)
        # Where a weight is 0 the logit may be minus infinity, and their product nothing.
        spread = torch.where(weights > 0, weights * shifted, 0.0).sum(dim=-1)
        total = torch.stack([weights.sum(dim=-1), picked, spread])
        dist.all_reduce(total, group=group)
        norm, picked, spread = total
        entropies = norm.log() - spread / norm
        ctx.save_for_backward(weights.div_(norm[:, None]), column, mine, entropies)
        ctx.entropy_gradient = entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return picked - norm.log(), entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, column, mine, entropies = ctx.saved_tensors
        grad = grads[0][:, None]
        out = -probabilities * grad
        out.scatter_add_(1, column[:, None], torch.where(mine[:, None], grad, 0.0))
        if ctx.entropy_gradient:
            information = torch.where(probabilities > 0, probabilities.log(), 0.0)
            out -= grads[1][:, None] * probabilities * (information + entropies[:, None])
        return out, None, None, None, None


class Mask:
    """The supports of M tokens on a device, for this rank's columns of the logits: ids `first .. first + columns - 1`."""

    def __init__(self, supports: Supports, device: torch.device, first: int, columns: int):
        written = supports.numbers()
        here = (written.ids >= first) & (written.ids < first + columns)
        self._columns, self._length = columns, len(supports)
        # Of those who name what is in it, all others are left out.
        named_in = supports.recorded & ~supports.negative
        self._rest = torch.from_numpy(named_in).to(device)
        self._rows = torch.from_numpy(written.rows[here]).to(device)
        self._ids = torch.from_numpy(written.ids[here] - first).to(device)
        begin, end = first // 8, -(-(first + columns) // 8)
        self._skip = first - 8 * begin
        self._bits = []
        for rows, bits in supports.bitmaps():
            part = np.zeros((len(rows), end - begin), np.uint8)
            part[:, : max(0, min(end, bits.shape[1]) - begin)] = bits[:, begin:end]
            self._bits.append((torch.from_numpy(rows).to(device), torch.from_numpy(part).to(device)))

    def left_out(self) -> Tensor:
        """bool `[M, columns]`: what could not be sampled. A new tensor."""
        out = self._rest[:, None].repeat(1, self._columns)
        out[self._rows, self._ids] = ~self._rest[self._rows]
        shifts = torch.arange(8, dtype=torch.uint8, device=out.device)
        for rows, bits in self._bits:
            inside = (bits[:, :, None] >> shifts & 1).flatten(1)
            out[rows] = inside[:, self._skip : self._skip + self._columns] == 0
        return out


def token_logprobs(
    logits: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    vocab_size: int,
    *,
    logprobs: LogProbs = whole_vocabulary,
    chunk_elements: int = CHUNK_ELEMENTS,
    entropy_gradient: bool = False,
    supports: Supports | None = None,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """float32 `[M]` log-prob of each target under `softmax(logits / temperature)`, and its entropy, in nats.

    `supports`: of M tokens; both are then of the distribution over the tokens in it, and nothing else has a gradient. It takes a
    byte for each logit of a chunk. `first`: the token id of the first column of the logits.

    `hidden [M, H]`, `targets` int64 `[M]`, `temperatures` float32 `[M]`. `vocab_size`: columns of `logits(hidden)`. If all
    logits are more than `chunk_elements`, they are made chunk by chunk, and made again in the backward pass.
    """

    def piece(hidden: Tensor, targets: Tensor, temperatures: Tensor, mask: Mask | None) -> tuple[Tensor, Tensor]:
        scaled = logits(hidden).float() / temperatures[:, None]
        if mask is not None:
            scaled = scaled.masked_fill_(mask.left_out(), -torch.inf)
        return logprobs(scaled, targets, entropy_gradient)

    rows = max(1, chunk_elements // max(1, vocab_size))
    masks = _masks(supports, rows, len(hidden), hidden.device, first, vocab_size)
    if len(hidden) <= rows:
        return piece(hidden, targets, temperatures, masks[0])
    parts = [
        checkpoint(piece, *chunk, use_reentrant=False, preserve_rng_state=False)
        for chunk in zip(hidden.split(rows), targets.split(rows), temperatures.split(rows), masks, strict=True)
    ]
    chosen, entropies = zip(*parts, strict=True)
    return torch.cat(chosen), torch.cat(entropies)


def _masks(
    supports: Supports | None, rows: int, count: int, device: torch.device, first: int, columns: int
) -> Sequence[Mask | None]:
    """One for each chunk of `rows` of `count` tokens."""
    starts = range(0, max(1, count), rows)
    if supports is None:
        return [None] * len(starts)
    return [Mask(supports[start : start + rows], device, first, columns) for start in starts]


def supports_of(column: Supports | None, rows: np.ndarray) -> Supports | None:
    """Those of the tokens at `rows`; None if none has one, and logits are of the whole vocabulary."""
    if column is None:
        return None
    supports = column.take(rows)
    return supports if supports.recorded.any() else None
