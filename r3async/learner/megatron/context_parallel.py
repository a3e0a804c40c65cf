"""Context parallelism: the tokens of a micro-batch divided among ranks, and their heads
during attention.

Each rank has a contiguous part of the packed tokens; sequence-parallel ranks divide that part in
the same way. For attention the ranks exchange (arXiv 2309.14509): every rank gets all tokens of
some heads, attends as one rank would, and sends the results back. The work is even whatever samples
are packed, attention itself is unchanged, and routes are cut like the tokens that they belong to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from r3async.learner.backend import TokenScores
from r3async.learner.device_upload import upload_array


@dataclass(frozen=True)
class ContextParallelGroup:
    """The ranks that share a micro-batch's tokens: this is `rank` of `num_ranks`, in `group`."""

    rank: int
    num_ranks: int
    group: dist.ProcessGroup

    def local_rows(self, tokens: int) -> slice:
        """Return this rank's rows of that many packed tokens, which divide evenly."""
        each = tokens // self.num_ranks
        return slice(self.rank * each, (self.rank + 1) * each)

    def to_heads(self, x: Tensor) -> Tensor:
        """Exchange `[n, heads, D]` of this rank's tokens for `[N, heads / ranks, D]` of all tokens.

        If there are fewer heads than ranks, several ranks get the same one.
        """
        return _ToHeads.apply(
            x.repeat_interleave(max(1, self.num_ranks // x.shape[1]), dim=1), self
        )

    def to_tokens(self, x: Tensor) -> Tensor:
        """Undo `to_heads`, for heads that are divided."""
        return _ToTokens.apply(x, self)

    def all_reduce_scores(
        self, scores: TokenScores, mine: np.ndarray, total: int, *, entropy_gradient: bool
    ) -> TokenScores:
        """Combine the scores of `total` tokens from each rank's own `scores` of those
        at `mine` (int64).

        Every rank gets all of them, and its own part of the gradient.
        """
        at = upload_array(mine, scores[0].device)
        return _AllReduceScores.apply(*scores, at, total, self.group, entropy_gradient)


def _all_to_all(x: Tensor, context: ContextParallelGroup) -> Tensor:
    """Return what each rank sends to this one, `[ranks, ...]`, given what this
    rank sends to each."""
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=context.group)
    return out


def _exchange_to_heads(x: Tensor, context: ContextParallelGroup) -> Tensor:
    """Exchange `[n, heads, D]` -> `[N, heads / ranks, D]`."""
    return _all_to_all(
        x.unflatten(1, (context.num_ranks, -1)).transpose(0, 1).contiguous(), context
    ).flatten(0, 1)


def _exchange_to_tokens(x: Tensor, context: ContextParallelGroup) -> Tensor:
    """Exchange `[N, heads / ranks, D]` -> `[n, heads, D]`."""
    return (
        _all_to_all(x.contiguous().unflatten(0, (context.num_ranks, -1)), context)
        .transpose(0, 1)
        .flatten(1, 2)
    )


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, context: ContextParallelGroup) -> Tensor:
        ctx.context = context
        return _exchange_to_heads(x, context)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _exchange_to_tokens(grads[0], ctx.context), None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, context: ContextParallelGroup) -> Tensor:
        ctx.context = context
        return _exchange_to_tokens(x, context)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _exchange_to_heads(grads[0], ctx.context), None


class _AllReduceScores(torch.autograd.Function):
    """An all-reduce of scores with a local gradient.

    Ranks compute the same loss of all tokens, so none sends its gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logprobs: Tensor,
        entropies: Tensor,
        at: Tensor,
        total: int,
        group: dist.ProcessGroup,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(at)
        ctx.entropy_gradient = entropy_gradient
        both = logprobs.new_zeros(2, total)
        both[:, at] = torch.stack([logprobs, entropies])
        dist.all_reduce(both, group=group)
        joined = both[0], both[1]
        if not entropy_gradient:
            ctx.mark_non_differentiable(joined[1])
        return joined

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (at,) = ctx.saved_tensors
        entropies = grads[1][at] if ctx.entropy_gradient else None
        return grads[0][at], entropies, None, None, None, None
