"""Moments of the optimizer in host memory, except for those that an update is using."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from r3async.learner.row_shares import to_local

OFFLOAD_BUCKET_ELEMENTS = 2**26
"""Elements whose moments are on the device at once; a larger parameter is alone in its bucket."""
OFFLOADED_MOMENTS = ("exp_avg", "exp_avg_sq")


class HostMoments:
    """Steps `adam` through its parameters, a bucket at a time.

    A moment's tensor stays where Adam created it, without memory; its values are in host memory,
    pinned where there is CUDA. Every parameter is updated by the same kernel, and from the same
    numbers, as without offloading.
    """

    def __init__(self, adam: torch.optim.Optimizer, bucket_elements: int = OFFLOAD_BUCKET_ELEMENTS):
        self._adam = adam
        self._bucket_elements = bucket_elements
        self._host_values: dict[Tensor, dict[str, Tensor]] = {}

    def step(self, parameters: Sequence[Tensor]) -> None:
        """Make one step of the parameters that have a gradient."""
        gradients = [(p, p.grad) for p in parameters if p.grad is not None]
        for parameter, _ in gradients:
            parameter.grad = None
        for bucket in self._iter_buckets(gradients):
            for parameter, gradient in bucket:
                self._load_to_device(parameter)
                parameter.grad = gradient
            self._adam.step()
            for parameter, _ in bucket:
                self.offload_moments(parameter)
                parameter.grad = None

    def get_moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the values of a parameter's moments, in host memory; none before
        its first update."""
        return self._host_values.get(parameter, {})

    @contextlib.contextmanager
    def moments_on_device(self, parameter: Tensor) -> Iterator[None]:
        """Load a parameter's moments to the device inside this block, for reading only."""
        self._load_to_device(parameter)
        try:
            yield
        finally:
            for name in OFFLOADED_MOMENTS:
                to_local(self._adam.state[parameter][name]).untyped_storage().resize_(0)

    def offload_moments(self, parameter: Tensor) -> None:
        """Move a parameter's moments to the host."""
        for name in OFFLOADED_MOMENTS:
            moment = to_local(self._adam.state[parameter][name])
            host = self._host_values.setdefault(parameter, {})
            if name not in host:
                host[name] = torch.empty(
                    moment.shape, dtype=moment.dtype, pin_memory=moment.is_cuda
                )
            host[name].copy_(moment)
            moment.untyped_storage().resize_(0)

    def clear_moments(self) -> None:
        """Drop all moments."""
        self._host_values.clear()

    def _load_to_device(self, parameter: Tensor) -> None:
        for name, values in self.get_moments(parameter).items():
            moment = to_local(self._adam.state[parameter][name])
            moment.untyped_storage().resize_(values.numel() * values.element_size())
            moment.copy_(values)

    def _iter_buckets(
        self, gradients: Iterable[tuple[Tensor, Tensor]]
    ) -> Iterator[list[tuple[Tensor, Tensor]]]:
        bucket: list[tuple[Tensor, Tensor]] = []
        held = 0
        for parameter, gradient in gradients:
            if bucket and held + parameter.numel() > self._bucket_elements:
                yield bucket
                bucket = []
                held = 0
            bucket.append((parameter, gradient))
            held += parameter.numel()
        if bucket:
            yield bucket
