"""The experts of a layer as stacks of matrices, in plain torch: one grouped product in the place of a loop over experts.

Nothing here asks the device for a number: how many tokens an expert has stays where it was counted.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

GROUPED_ROW_BYTES = 16
"""Bytes of which a row has to be a multiple in torch's grouped product."""


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """`x [P, K]`, `weight [E, M, K]` -> `[P, M]`: of the rows of `x`, the first `counts[0]` times the first matrix, and so on.

    `counts` int64 `[E]`, which add up to P. Differentiable. On CUDA in bf16 it is one kernel; in other precisions torch runs the
    matrices one by one. Rows that are not a multiple of 16 bytes are for small tests only: these ask for the counts.
    """
    if all(n * x.element_size() % GROUPED_ROW_BYTES == 0 for n in weight.shape[1:]):
        # torch has no products of zero rows, and gradients that are expanded have no strides that it takes.
        return F.grouped_mm(x, weight.mT, offs=counts.cumsum(0).to(x.device, torch.int32, non_blocking=True))
    parts = zip(x.split(counts.tolist()), weight.unbind(), strict=True)
    return torch.cat([F.linear(part, matrix) for part, matrix in parts])


class WeightedSwiGLU(torch.autograd.Function):
    """`silu(gate) * up * share` of `x [P, 2 W]` (gate next to up) and `share` float32 `[P]` -> `[P, W]` in the dtype of `x`.

    Only `x` and `share` are kept for the backward pass: half of what a chain of torch's operations would keep.
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
    """Which expert each of `N` tokens is sent to, `K` times each: the order of the sent rows, by expert and then by token.

    `chosen` bool `[N, E]`, K of them in a row. `token_index` int64 `[N K]`: the token of each sent row. `expert_counts` int64
    `[E]`.
    """

    def __init__(self, chosen: Tensor, top_k: int):
        size = len(chosen) * top_k
        experts, self.token_index = torch.nonzero_static(chosen.T, size=size).unbind(dim=1)
        self._gate_index = self.token_index * chosen.shape[1] + experts
        self._token_slots = self.token_index.argsort(stable=True).view(len(chosen), top_k)
        self.expert_counts = chosen.sum(dim=0)

    def dispatch_rows(self, x: Tensor) -> Tensor:
        """`x [N, H]` -> `[N K, H]`."""
        return _DispatchRows.apply(x, self.token_index, self._token_slots)

    def gather_gates(self, gates: Tensor) -> Tensor:
        """`gates [N, E]` -> `[N K]`."""
        return gates.reshape(-1).gather(0, self._gate_index)

    def combine_outputs(self, y: Tensor) -> Tensor:
        """`y [N K, H]` -> `[N, H]`: what a token's experts made of it, added up in the order of experts."""
        return _CombineRows.apply(y, self.token_index, self._token_slots)


def _sum_rows(y: Tensor, slots: Tensor) -> Tensor:
    """Rows of `y` at `slots [N, K]`, added up: in one order at every call, where a scatter on CUDA has none."""
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
