"""How a parameter of the learner consists of tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class TensorLayout:
    """The layout of a parameter that is one tensor. Derived layouts have several."""

    def split(self, parameter: Tensor) -> Sequence[Tensor]:
        """Return the tensors in a parameter, which are views of it where possible. Any tensor with
        its rows can take its place."""
        return [parameter]

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the parameter that consists of `tensors`: undo `split`."""
        return tensors[0]


WHOLE_TENSOR = TensorLayout()


class ConcatenatedPair(TensorLayout):
    """Two tensors of equal shape, one over the other: a gate projection and an up projection."""

    def split(self, parameter: Tensor) -> Sequence[Tensor]:
        return parameter.chunk(2)

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(tensors))


class StackedTensors(TensorLayout):
    """Tensors of equal shape along a first dimension: the output projections of experts."""

    def split(self, parameter: Tensor) -> Sequence[Tensor]:
        return parameter.unbind()

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(tensors))


@dataclass(frozen=True)
class StackedPairs(TensorLayout):
    """Pairs of tensors, one over the other, along a first dimension: the gate and up projections
    of `count` experts."""

    count: int

    def split(self, parameter: Tensor) -> Sequence[Tensor]:
        return parameter.flatten(0, 1).chunk(2 * self.count)

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(tensors)).view(self.count, -1, tensors[0].shape[-1])


@dataclass(frozen=True)
class InterleavedRows(TensorLayout):
    """Tensors whose rows take turns in each of `groups` groups, `widths` rows of each at a time:
    queries, keys and values, in Megatron's order."""

    groups: int
    widths: tuple[int, ...]

    def split(self, parameter: Tensor) -> Sequence[Tensor]:
        parts = parameter.unflatten(0, (self.groups, -1)).split(list(self.widths), dim=1)
        return [part.flatten(0, 1) for part in parts]

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        parts = [tensor.unflatten(0, (self.groups, -1)) for tensor in tensors]
        return torch.cat(parts, dim=1).flatten(0, 1)


@dataclass(frozen=True)
class SelectedRows(TensorLayout):
    """Tensors of which each has some of the `row_count` rows.

    Attributes:
        rows: The rows of each tensor, as indices.
    """

    row_count: int
    rows: tuple[slice | Tensor, ...]

    def split(self, parameter: Tensor) -> Sequence[Tensor]:
        return [parameter[indices] for indices in self.rows]

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        parameter = tensors[0].new_empty(self.row_count, *tensors[0].shape[1:])
        for indices, tensor in zip(self.rows, tensors, strict=True):
            parameter[indices] = tensor
        return parameter
