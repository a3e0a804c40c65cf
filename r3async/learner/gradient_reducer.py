"""How the ranks of a model exchange gradients and updated parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from r3async.learner.row_shares import RowShare

Gradients = Sequence[Tensor]


class GradientReducer:
    """The exchange of one rank, which holds everything. Backends with several ranks derive theirs.

    Sequences are in the order of the parameters that are trained. All methods are collective.

    Attributes:
        shares: For each parameter the rows that this rank updates, and holds masters and moments
            of; empty if it updates all rows.
        sums_gradients: Gradients are summed over ranks. A parameter without a gradient then has
            zeros, since the other ranks expect it to take part.
        keeps_shares: This rank keeps the gradients of its shares alone: `add_gradient` is called
            after each backward pass, and the other methods get the gradients of shares.
    """

    shares: Sequence[RowShare] = ()
    sums_gradients = False
    keeps_shares = False

    def add_gradient(self, index: int, total: Tensor, gradient: Tensor) -> None:
        """Add to `total` what all ranks have of the gradient of parameter `index`, in the rows of
        this rank's share. All ranks compute gradients in the same order."""
        total.add_(gradient)

    def reduce_gradients(self, gradients: Gradients) -> None:
        """Sum each gradient in place over the ranks that hold a copy of the parameter. With
        `shares`, their rows may be summed alone."""

    def compute_squared_norm(self, gradients: Gradients) -> float:
        """Return the sum of squares over the whole model, of gradients that have been reduced."""
        if not gradients:
            return 0.0
        return float(torch.stack(torch._foreach_norm(gradients)).double().square().sum())

    def gather_parameters(self, parameters: Sequence[Tensor]) -> None:
        """Fill in, in place, the rows that other ranks have updated, if there are `shares`."""
