"""The experts of a layer as stacks of matrices, in plain torch: one grouped product, no loop.

Nothing here reads a number back from the device: the experts' token counts stay where they were
computed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

GROUPED_ROW_BYTES = 16
"""Bytes that the size of a row must be a multiple of in torch's grouped product."""


class RowGroups:
    """The groups of a grouped product's rows: the first `counts[0]` rows are the first group, and
    so on. `counts` is int64 `[E]`."""

    def __init__(self, counts: Tensor):
        self.counts = counts

    @cached_property
    def ends(self) -> Tensor:
        """int32 `[E]`: the row behind each group's last."""
        return self.counts.cumsum(0, dtype=torch.int32)

    @cached_property
    def is_empty(self) -> Tensor:
        """bool `[E]`: groups without a row."""
        return self.counts == 0


def grouped_linear(x: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
    """Multiply rows by their group's matrix: `x [P, K]`, `weight [E, M, K]` -> `[P, M]`.

    The counts of `groups` add up to P. Differentiable. On CUDA in bf16 it is one kernel; in other
    precisions torch runs the matrices one by one. Rows that are not a multiple of 16 bytes are for
    small tests only: they read the counts back to the host.
    """
    if all(n * x.element_size() % GROUPED_ROW_BYTES == 0 for n in weight.shape[1:]):
        matrices = zero_empty_gradients(weight, lambda: groups.is_empty)
        return F.grouped_mm(x, matrices.mT, offs=groups.ends)
    parts = zip(x.split(groups.counts.tolist()), weight.unbind(), strict=True)
    return torch.cat([F.linear(part, matrix) for part, matrix in parts])


def zero_empty_gradients(weight: Tensor, find_empty: Callable[[], Tensor]) -> Tensor:
    """Return `weight` `[E, ...]`, the matrices of a grouped product, with a gradient that is 0 for
    groups without a row.

    `find_empty()` returns these groups, bool `[E]`; the backward pass asks. Torch leaves these
    gradients unwritten on some devices (github.com/pytorch/pytorch, issues 172439 and 193633). What
    it does on a device nobody can see from the outside, so the mask is there on all of them: it
    takes a pass over the gradient.
    """
    return _ZeroEmptyGradients.apply(weight, find_empty)


class _ZeroEmptyGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, find_empty: Callable[[], Tensor]) -> Tensor:
        ctx.find_empty = find_empty
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        empty = ctx.find_empty().view(-1, *(1 for _ in grads[0].shape[1:]))
        return grads[0].masked_fill(empty, 0.0), None


class WeightedSwiGLU(torch.autograd.Function):
    """The weighted SwiGLU: `silu(gate) * up * share` of `x [P, 2 W]` and `share` float32
    `[P]` -> `[P, W]`.

    The result has the dtype of `x`. In `x`, gate is next to up. Only `x` and `share` are kept for
    the backward pass: half of what a chain of torch's operations would keep.
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
        grad = grads[0]
        active = F.silu(gate)
        by_share = (active * up).mul_(grad).sum(dim=-1, dtype=share.dtype)
        grad = (grad * share[:, None]).to(x.dtype)
        out = torch.empty_like(x)
        by_gate, by_up = out.chunk(2, dim=-1)
        torch.mul(grad, active, out=by_up)
        torch.ops.aten.silu_backward.grad_input(grad.mul_(up), gate, grad_input=by_gate)
        return out, by_share


class ExpertDispatch:
    """The dispatch of `N` tokens to `K` experts each: sent rows are ordered by expert
    and then by token.

    `chosen` bool `[N, E]` has K True values in a row. `token_index` int64 `[N K]` is the token of
    each sent row, `expert_counts` int64 `[E]` the number of rows sent to each expert.
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
        """Return the sum of each token's expert outputs, in the order of experts:
        `y [N K, H]` -> `[N, H]`."""
        return _CombineRows.apply(y, self.token_index, self._token_slots)


def _sum_rows(y: Tensor, slots: Tensor) -> Tensor:
    """Return the sums of the rows of `y` at `slots [N, K]`, in one order at every call; a scatter
    on CUDA has none."""
    return (
        F.embedding_bag(slots, y, mode="sum")
        if slots.numel()
        else y.new_zeros(len(slots), y.shape[1])
    )


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
