"""The ranks of a learner, and what they reduce and gather with each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class RankGroup:
    """This process among the ranks that train together: `rank` of `world_size`, all in the
    default process group.

    Figures are reduced on `device`.
    """

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_batch_reporter(self) -> bool:
        """True if this rank counts the micro-batches, among the ranks that are
        given the same ones."""
        return True

    @property
    def is_loss_reporter(self) -> bool:
        """True if this rank reports the losses, among the ranks that compute the same ones."""
        return True

    def all_reduce(self, values: np.ndarray, op: Literal["sum", "max"]) -> np.ndarray:
        """Reduce `values`, float64 `[n]`, over all ranks, and return the result on every
        rank. Collective."""
        if self.world_size == 1:
            return values
        # A copy: gloo reduces in place.
        total = torch.from_numpy(np.array(values, np.float64)).to(self.device)
        dist.all_reduce(total, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op])
        return total.cpu().numpy()

    def all_gather(self, value: _Value) -> list[_Value]:
        """Return every rank's `value`, in the order of the ranks. Collective."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait for the other ranks."""
        if self.world_size > 1:
            dist.barrier()


SINGLE_RANK = RankGroup(0, 1, torch.device("cpu"))
