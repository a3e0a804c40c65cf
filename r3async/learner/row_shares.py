"""Rows of a parameter, divided among the ranks that hold copies (ZeRO stage 1, arXiv 1910.02054).

Each rank keeps the optimizer's state of its own rows only, and updates these.

A gradient is summed into the share of each rank, and the updated shares are gathered. Rows stay
whole, so a share of a tensor of a checkpoint is a box of it, and any other layout can read what
such ranks wrote.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, which shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


SHARE_ALIGNMENT = 16
"""Alignment of the beginnings of shares, in values: torch's AdamW on CPU rounds values that do not
fill a vector differently from the others."""
COLLECTIVE_BUCKET_ELEMENTS = 2**26
"""Elements in one collective: for gradients, 256 MiB in float32."""
SCATTER_ELEMENTS = 2**24
"""Elements in one collective within a backward pass, where activations are in memory, too."""

# The names since torch 2.13, and the earlier ones.
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def view_rows(tensor: Tensor) -> Tensor:
    """Return a view `[rows, columns]` of a contiguous tensor of two dimensions or more; a vector
    is its own rows."""
    return tensor if tensor.ndim < 2 else tensor.view(-1, tensor.shape[-1])


class RowShare(NamedTuple):
    """The share of rank `rank`, where `num_ranks` divide a parameter."""

    rank: int = 0
    num_ranks: int = 1

    def row_range(self, shape: Sequence[int]) -> slice:
        """Return the rows of this share of a parameter of that shape.

        Shares begin at multiples of `SHARE_ALIGNMENT` values, and are almost equal; small
        parameters are not on every rank.
        """
        columns = shape[-1] if len(shape) > 1 else 1
        count = math.prod(shape) // max(columns, 1)
        step = SHARE_ALIGNMENT // math.gcd(columns, SHARE_ALIGNMENT)
        blocks = -(-count // step)
        start, stop = (
            min(count, rank * blocks // self.num_ranks * step)
            for rank in (self.rank, self.rank + 1)
        )
        return slice(start, stop)

    def select_rows(self, tensor: Tensor) -> Tensor:
        """Return a view: the tensor itself, or its rows of this share, see `view_rows`."""
        return tensor if self.num_ranks == 1 else view_rows(tensor)[self.row_range(tensor.shape)]

    def list_shares(self) -> list[RowShare]:
        """Return the shares of all ranks, in order."""
        return [RowShare(rank, self.num_ranks) for rank in range(self.num_ranks)]


UNSHARDED = RowShare()


def reduce_scatter_shares(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sum gradients over the group, in place: for each gradient the rows of this rank's share.

    The other rows are undefined afterwards. Collective.
    """
    for bucket in iter_buckets(gradients):
        sent = _flatten_shares(bucket, group)
        got = torch.empty_like(sent[0])
        _REDUCE_SCATTER(got, sent.view(-1), group=group)
        _copy_into_share(bucket, _share_in_group(group), got)


def add_summed_share(total: Tensor, gradient: Tensor, group: dist.ProcessGroup) -> None:
    """Add to `total`, the rows of this rank's share, the sum in float32 of all ranks'
    gradients of these rows.

    A bucket of rows at a time, so that a large gradient is not held twice. Collective.
    """
    own = _share_in_group(group)
    parts = [share.select_rows(gradient) for share in own.list_shares()]
    columns = total.shape[1:]
    longest = max(len(part) for part in parts)
    step = max(1, SCATTER_ELEMENTS // (len(parts) * math.prod(columns)))
    for begin in range(0, longest, step):
        sent = total.new_zeros(len(parts), min(step, longest - begin), *columns)
        for row, part in zip(sent, parts, strict=True):
            piece = part[begin : begin + step]
            row[: len(piece)].copy_(piece)
        got = torch.empty_like(sent[0])
        _REDUCE_SCATTER(got.view(-1), sent.view(-1), group=group)
        mine = total[begin : begin + step]
        mine.add_(got[: len(mine)])


def all_gather_shares(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Gather every rank's share of each tensor, in place, on every rank of the group.

    All tensors have one dtype. Collective.
    """
    for bucket in iter_buckets(tensors):
        mine = _flatten_shares(bucket, group, local_only=True)[0]
        got = mine.new_empty(dist.get_world_size(group), len(mine))
        _ALL_GATHER(got.view(-1), mine, group=group)
        for share, values in zip(_share_in_group(group).list_shares(), got, strict=True):
            _copy_into_share(bucket, share, values)


def _share_in_group(group: dist.ProcessGroup) -> RowShare:
    return RowShare(dist.get_rank(group), dist.get_world_size(group))


def _flatten_shares(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, *, local_only: bool = False
) -> Tensor:
    """Return every rank's shares of the tensors, one after the other, or this rank's
    alone: `[ranks, n]`.

    `n` is the size of the largest.
    """
    mine = _share_in_group(group)
    parts = [[share.select_rows(t) for t in tensors] for share in mine.list_shares()]
    longest = max(sum(p.numel() for p in some) for some in parts)
    chosen = [parts[mine.rank]] if local_only else parts
    out = tensors[0].new_zeros(len(chosen), longest)
    for row, some in zip(out, chosen, strict=True):
        torch.cat([p.reshape(-1) for p in some], out=row[: sum(p.numel() for p in some)])
    return out


def _copy_into_share(tensors: Sequence[Tensor], share: RowShare, values: Tensor) -> None:
    parts = [share.select_rows(t) for t in tensors]
    sizes = [p.numel() for p in parts]
    for part, some in zip(parts, values[: sum(sizes)].split(sizes), strict=True):
        part.copy_(some.view_as(part))


def iter_buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors in order, in buckets of at most `COLLECTIVE_BUCKET_ELEMENTS`, or
    one larger tensor."""
    bucket: list[Tensor] = []
    held = 0
    for tensor in tensors:
        if bucket and held + tensor.numel() > COLLECTIVE_BUCKET_ELEMENTS:
            yield bucket
            bucket = []
            held = 0
        bucket.append(tensor)
        held += tensor.numel()
    if bucket:
        yield bucket
