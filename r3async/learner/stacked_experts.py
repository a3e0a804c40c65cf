"""The experts of a layer as stacks of matrices, in plain torch: one grouped product, no loop.

Nothing here reads a number back from the device: the experts' token counts stay where they were
computed.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

GROUPED_ROW_BYTES = 16
"""Bytes that the size of a row must be a multiple of in torch's grouped product."""


class RowGroups:
    """The groups of a grouped product's rows: group `e` ends before row `ends[e]`, int32 `[E]`,
    where the next one begins."""

    def __init__(self, ends: Tensor):
        self.ends = ends

    @classmethod
    def from_counts(cls, counts: Tensor) -> RowGroups:
        """Make groups of `counts` rows, int64 `[E]`."""
        return cls(counts.cumsum(0, dtype=torch.int32))

    @cached_property
    def is_empty(self) -> Tensor:
        """bool `[E]`: groups without a row."""
        empty = torch.empty_like(self.ends, dtype=torch.bool)
        torch.eq(self.ends[:1], 0, out=empty[:1])
        torch.eq(self.ends[1:], self.ends[:-1], out=empty[1:])
        return empty

    def list_counts(self) -> list[int]:
        """Return the rows of each group, read back from the device."""
        ends = self.ends.tolist()
        return [end - begin for begin, end in pairwise([0, *ends])]


def grouped_linear(x: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
    """Multiply rows by their group's matrix: `x [P, K]`, `weight [E, M, K]` -> `[P, M]`.

    Differentiable. On CUDA in bf16 it is one kernel; in other precisions torch runs the matrices
    one by one. Rows that are not a multiple of 16 bytes are for small tests only: they read the
    counts back to the host.
    """
    if all(n * x.element_size() % GROUPED_ROW_BYTES == 0 for n in weight.shape[1:]):
        return multiply_groups(x, weight.mT, groups)
    parts = zip(x.split(groups.list_counts()), weight.unbind(), strict=True)
    return torch.cat([F.linear(part, matrix) for part, matrix in parts])


def multiply_groups(x: Tensor, matrices: Tensor, groups: RowGroups) -> Tensor:
    """Multiply rows by their group's matrix: `x [P, K]`, `matrices [E, K, M]` -> `[P, M]`.

    Values and gradients are those of torch's grouped product, but for groups without a row: torch
    leaves their gradients unwritten on some devices (github.com/pytorch/pytorch, issues 172439 and
    193633). What it does on a device nobody can see from the outside, so they are set to 0 on all
    of them: in place, as nobody else has the gradient yet. Autograd takes it for the parameter's
    `grad` as it is. A function of its own behind torch's would cost two copies.
    """
    product: Tensor = _GroupedProduct.apply(x, matrices, groups)
    return product


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, matrices: Tensor, groups: RowGroups) -> Tensor:
        ctx.save_for_backward(x, matrices)
        ctx.groups = groups
        return F.grouped_mm(x, matrices, offs=groups.ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, matrices = ctx.saved_tensors
        needs_rows, needs_matrices, _ = ctx.needs_input_grad
        by_rows = by_matrices = None
        if needs_rows:
            by_rows = F.grouped_mm(grads[0], matrices.mT, offs=ctx.groups.ends)
        if needs_matrices:
            by_matrices = _differentiate_matrices(x, matrices, grads[0], ctx.groups)
        return by_rows, by_matrices, None


def _differentiate_matrices(x: Tensor, matrices: Tensor, grad: Tensor, groups: RowGroups) -> Tensor:
    """Return the gradient of `matrices [E, K, M]` in their layout."""
    is_transposed = matrices.stride(-2) == 1
    left, right = (grad, x) if is_transposed else (x, grad)
    gradient = F.grouped_mm(left.mT, right, offs=groups.ends)
    gradient.masked_fill_(groups.is_empty[:, None, None], 0.0)
    return gradient.mT if is_transposed else gradient


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
