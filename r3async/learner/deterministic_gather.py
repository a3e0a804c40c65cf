"""Gathering rows by index, with a gradient that is the same at every call."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from r3async.learner.device_upload import upload_array


class DeterministicGather:
    """A gather with a deterministic gradient: `gather(x)` returns rows `source_rows` int64 `[P]`
    of `x [N, ...]`.

    The gradient of a row is the sum of those at its `gradient_slots`, in order. `slot_offsets`
    int64 `[N]` says where the slots of each row begin; it is None if each row has one slot.
    """

    def __init__(self, source_rows: Tensor, gradient_slots: Tensor, slot_offsets: Tensor | None):
        self.source_rows = source_rows
        self.gradient_slots = gradient_slots
        self.slot_offsets = slot_offsets

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

    For slots whose gradient is zero this equals the scatter-add that indexing would do, and is much
    faster; and where a row is gathered several times, its sum has a fixed order also on CUDA.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, index: Tensor, slots: Tensor, offsets: Tensor | None
    ) -> Tensor:
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
