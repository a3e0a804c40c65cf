"""This process among those that train together, one rank each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Ranks:
    """`rank` of `world`, all in the default process group. `device`: where figures are reduced."""

    rank: int
    world: int
    device: torch.device

    @property
    def is_first_copy(self) -> bool:
        """Of the ranks that are given the same micro-batches, the one that counts them."""
        return True

    @property
    def holds_loss(self) -> bool:
        """Of the ranks that compute the same losses, the one that reports them."""
        return True

    def reduce(self, values: np.ndarray, how: Literal["sum", "max"]) -> np.ndarray:
        """`values` float64 `[n]` reduced over all ranks; every rank gets the result. Collective."""
        if self.world == 1:
            return values
        # A copy: gloo reduces in place.
        total = torch.from_numpy(np.array(values, np.float64)).to(self.device)
        dist.all_reduce(total, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[how])
        return total.cpu().numpy()

    def barrier(self) -> None:
        """Wait for the other ranks."""
        if self.world > 1:
            dist.barrier()


ALONE = Ranks(0, 1, torch.device("cpu"))
