"""Rows of a tensor by their index, some of them several times, with a gradient that is the same at every call."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


class DeterministicGather:
    """`gather(x)`: rows `source_rows` int64 `[P]` of `x [N, ...]`. The gradient of a row is the sum of those at its
    `gradient_slots`, in order.

    `slot_offsets` int64 `[N]`: where the slots of each row begin; None if each row has one.
    """

    def __init__(self, source_rows: Tensor, gradient_slots: Tensor, slot_offsets: Tensor | None):
        self.source_rows, self.gradient_slots, self.slot_offsets = source_rows, gradient_slots, slot_offsets

    @staticmethod
    def from_index(index: np.ndarray, total: int, device: torch.device) -> DeterministicGather:
        """`index` int `[P]`, of `total` rows: `-1 - row` where nothing depends on what is taken, and its gradient is 0."""
        (there,) = np.nonzero(index >= 0)
        rows = index[there]
        slots = there[np.argsort(rows, kind="stable")]
        counts = np.bincount(rows, minlength=total)
        offsets = None if len(rows) == total and (counts == 1).all() else np.cumsum(counts) - counts
        index = np.where(index < 0, -1 - index, index)
        return DeterministicGather(
            *(None if x is None else torch.from_numpy(x).to(device) for x in (index, slots, offsets))
        )

    def __call__(self, x: Tensor) -> Tensor:
        return _GatherRows.apply(x, self.source_rows, self.gradient_slots, self.slot_offsets)


class _GatherRows(torch.autograd.Function):
    """For slots whose gradient is zero this equals the scatter-add that indexing would do, and is much faster; and where a row
    is taken several times, its sum has an order also on CUDA."""

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
