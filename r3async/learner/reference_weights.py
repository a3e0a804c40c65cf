"""The weights of a reference policy, beside the learner's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter

from r3async.learner.row_shares import to_local


class ReferenceWeights:
    """A copy, in host memory, of this rank's weights as they are now: the frozen reference
    model of the policy."""

    @torch.no_grad()
    def __init__(self, parameters: Iterable[Parameter]):
        self._parameters = list(parameters)
        self._copies = self._copy_weights()

    def _copy_weights(self) -> list[Tensor]:
        return [to_local(p.detach()).to("cpu", copy=True) for p in self._parameters]

    @contextmanager
    def use_reference_weights(self) -> Iterator[None]:
        """Give the model the reference weights inside this block, and its own again
        afterwards, bit by bit."""
        own = self._copy_weights()
        self._load_weights(self._copies)
        try:
            yield
        finally:
            self._load_weights(own)

    @torch.no_grad()
    def _load_weights(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            to_local(parameter.detach()).copy_(value)
