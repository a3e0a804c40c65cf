"""A slice of a whole tensor, which is what one rank has of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from r3async.checkpoint.rank_files import TensorSlice
from r3async.learner.row_shares import RowShare
from r3async.learner.tensor_layout import WHOLE_TENSOR, SelectedRows, TensorLayout


@dataclass(frozen=True)
class ShardSlice:
    """The position of one parameter of this rank in the whole model.

    Attributes:
        places: The places of the tensors in the parameter, in the order of `layout.split`.
        is_writer: True on the one rank, among those that hold the same values, that writes them.
    """

    places: tuple[TensorSlice, ...]
    layout: TensorLayout = WHOLE_TENSOR
    is_writer: bool = True

    def narrow_to_share(self, shape: Sequence[int], share: RowShare) -> ShardSlice:
        """Return the position of that share of the parameter, which has `shape`, in
        the whole model.

        Places in which the share has nothing are left out. The rows of each place are in order in
        the parameter, so the rows that belong to a share are a box.
        """
        if share.num_ranks == 1:
            return self
        count = math.prod(shape[:-1]) if len(shape) > 1 else shape[0]
        mine = share.row_range(shape)
        numbers = (
            torch.arange(count).view(*shape[:-1], 1) if len(shape) > 1 else torch.arange(count)
        )
        places = []
        rows = []
        for place, part in zip(self.places, self.layout.split(numbers), strict=True):
            assert len(place.shape) <= 2, place
            here = part.reshape(-1)
            (inside,) = torch.nonzero((here >= mine.start) & (here < mine.stop), as_tuple=True)
            if len(inside):
                first = min(int(inside[0]), place.size[0])  # rows after these only pad the part
                offset = place.offset[0] + first
                size = min(len(inside), place.size[0] - first)
                places.append(
                    replace(
                        place, offset=(offset, *place.offset[1:]), size=(size, *place.size[1:])
                    ),
                )
                rows.append(_as_slice(here[inside] - mine.start))

        layout = SelectedRows(mine.stop - mine.start, tuple(rows))
        return ShardSlice(tuple(places), layout, self.is_writer)


def _as_slice(numbers: Tensor) -> slice | Tensor:
    """Return a slice if the numbers are consecutive: indexing with it copies nothing."""
    first = int(numbers[0])
    last = int(numbers[-1])
    return slice(first, last + 1) if last - first + 1 == len(numbers) else numbers
