"""Moments of the optimizer in host memory, but for those that an update is about."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

BUCKET_ELEMENTS = 2**26
"""Elements whose moments are on the device at once, or those of one larger parameter."""
AWAY = ("exp_avg", "exp_avg_sq")


class HostMoments:
    """Steps `adam` through its parameters, a bucket at a time.

    A moment's tensor stays where Adam made it, without memory; its values are in host memory, pinned where there is CUDA. Every
    parameter is updated by the kernel, and from the numbers, that it would be updated with otherwise.
    """

    def __init__(self, adam: torch.optim.Optimizer, bucket_elements: int = BUCKET_ELEMENTS):
        self._adam, self._bucket = adam, bucket_elements
        self._values: dict[Tensor, dict[str, Tensor]] = {}

    def step(self, parameters: Sequence[Tensor]) -> None:
        """One step of those that have a gradient."""
        gradients = [(p, p.grad) for p in parameters if p.grad is not None]
        for parameter, _ in gradients:
            parameter.grad = None
        for bucket in self._buckets(gradients):
            for parameter, gradient in bucket:
                self._bring(parameter)
                parameter.grad = gradient
            self._adam.step()
            for parameter, _ in bucket:
                self.put_away(parameter)
                parameter.grad = None

    def of(self, parameter: Tensor) -> dict[str, Tensor]:
        """The values of its moments, in host memory; none before its first update."""
        return self._values.get(parameter, {})

    @contextlib.contextmanager
    def borrowed(self, parameter: Tensor) -> Iterator[None]:
        """Inside, its moments are on the device, to be read only."""
        self._bring(parameter)
        try:
            yield
        finally:
            for name in AWAY:
                _part(self._adam.state[parameter][name]).untyped_storage().resize_(0)

    def put_away(self, parameter: Tensor) -> None:
        """Move its moments to the host."""
        for name in AWAY:
            moment = _part(self._adam.state[parameter][name])
            host = self._values.setdefault(parameter, {})
            if name not in host:
                host[name] = torch.empty(moment.shape, dtype=moment.dtype, pin_memory=moment.is_cuda)
            host[name].copy_(moment)
            moment.untyped_storage().resize_(0)

    def forget(self) -> None:
        """There are no moments any more."""
        self._values.clear()

    def _bring(self, parameter: Tensor) -> None:
        for name, values in self.of(parameter).items():
            moment = _part(self._adam.state[parameter][name])
            moment.untyped_storage().resize_(values.numel() * values.element_size())
            moment.copy_(values)

    def _buckets(self, gradients: Iterable[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
        bucket: list[tuple[Tensor, Tensor]] = []
        held = 0
        for parameter, gradient in gradients:
            if bucket and held + parameter.numel() > self._bucket:
                yield bucket
                bucket, held = [], 0
            bucket.append((parameter, gradient))
            held += parameter.numel()
        if bucket:
            yield bucket


def _part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
