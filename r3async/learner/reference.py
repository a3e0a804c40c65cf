"""The frozen model that the policy is kept near: the weights that a run began with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter


def _values(parameter: Parameter) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.data


class Reference:
    """A copy of this rank's weights as they are now, in host memory."""

    @torch.no_grad()
    def __init__(self, parameters: Iterable[Parameter]):
        self._parameters = list(parameters)
        self._copies = [_values(p).to("cpu", copy=True) for p in self._parameters]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """In this block the model has the reference weights; afterwards its own again, bit by bit."""
        own = [_values(p).to("cpu", copy=True) for p in self._parameters]
        self._put(self._copies)
        try:
            yield
        finally:
            self._put(own)

    @torch.no_grad()
    def _put(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            _values(parameter).copy_(value)
