"""Log-probs of given tokens from hidden states, without holding all logits at once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

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
) -> tuple[Tensor, Tensor]:
    """float32 `[M]` log-prob of each target under `softmax(logits / temperature)`, and its entropy, in nats.

    `hidden [M, H]`, `targets` int64 `[M]`, `temperatures` float32 `[M]`. `vocab_size`: columns of `logits(hidden)`. If all
    logits are more than `chunk_elements`, they are made chunk by chunk, and made again in the backward pass.
    """

    def piece(hidden: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        return logprobs(logits(hidden).float() / temperatures[:, None], targets, entropy_gradient)

    rows = max(1, chunk_elements // vocab_size)
    if len(hidden) <= rows:
        return piece(hidden, targets, temperatures)
    parts = [
        checkpoint(piece, *chunk, use_reentrant=False, preserve_rng_state=False)
        for chunk in zip(hidden.split(rows), targets.split(rows), temperatures.split(rows), strict=True)
    ]
    chosen, entropies = zip(*parts, strict=True)
    return torch.cat(chosen), torch.cat(entropies)
