"""Rows of a parameter, divided among the ranks that hold copies of it: each keeps the optimizer's state of its own rows alone,
and updates these (ZeRO stage 1, arXiv 1910.02054).

A gradient is summed into the share of each rank, and the updated shares are gathered. Rows stay whole, so a share of a tensor of
a checkpoint is a box of it, and any other layout can read what such ranks wrote.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

ALIGNED = 16
"""Values at which shares begin: torch's AdamW on CPU rounds those that do not fill a vector otherwise than the others."""
BUCKET_ELEMENTS = 2**26
"""Elements that one collective is about: of gradients, 256 MiB in float32."""

# Their names since torch 2.13, and before.
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def by_rows(tensor: Tensor) -> Tensor:
    """A view `[rows, columns]` of a contiguous tensor of two dimensions or more; a vector is its own rows."""
    return tensor if tensor.ndim < 2 else tensor.view(-1, tensor.shape[-1])


class Share(NamedTuple):
    """What the rank of number `rank` has, where `ranks` divide a parameter."""

    rank: int = 0
    ranks: int = 1

    def rows(self, shape: Sequence[int]) -> slice:
        """Of a parameter of that shape. Shares begin at multiples of `ALIGNED` values, and are almost alike; small parameters
        are not on every rank."""
        columns = shape[-1] if len(shape) > 1 else 1
        count, step = math.prod(shape) // max(columns, 1), ALIGNED // math.gcd(columns, ALIGNED)
        blocks = -(-count // step)
        ends = (min(count, at * blocks // self.ranks * step) for at in (self.rank, self.rank + 1))
        return slice(*ends)

    def of(self, tensor: Tensor) -> Tensor:
        """A view: the tensor itself, or its rows, see `by_rows`."""
        return tensor if self.ranks == 1 else by_rows(tensor)[self.rows(tensor.shape)]

    def all(self) -> list[Share]:
        """Those of every rank, in order."""
        return [Share(rank, self.ranks) for rank in range(self.ranks)]


WHOLE = Share()


def sum_into_shares(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sum over the group, in place: of each gradient the rows of this rank's share. The others have no meaning then.
    Collective."""
    for bucket in buckets(gradients):
        sent = _flat(bucket, group)
        got = torch.empty_like(sent[0])
        _REDUCE_SCATTER(got, sent.view(-1), group=group)
        _put(bucket, _share_in(group), got)


def gather_shares(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Every rank's share of each tensor, in place, on every rank of the group. All are of one dtype. Collective."""
    for bucket in buckets(tensors):
        mine = _flat(bucket, group, own=True)[0]
        got = mine.new_empty(dist.get_world_size(group), len(mine))
        _ALL_GATHER(got.view(-1), mine, group=group)
        for share, values in zip(_share_in(group).all(), got, strict=True):
            _put(bucket, share, values)


def _share_in(group: dist.ProcessGroup) -> Share:
    return Share(dist.get_rank(group), dist.get_world_size(group))


def _flat(tensors: Sequence[Tensor], group: dist.ProcessGroup, *, own: bool = False) -> Tensor:
    """`[ranks, n]`: every rank's shares of the tensors, one after the other, `n` that of the largest; or this rank's alone."""
    mine = _share_in(group)
    parts = [[share.of(t) for t in tensors] for share in mine.all()]
    longest = max(sum(p.numel() for p in some) for some in parts)
    chosen = [parts[mine.rank]] if own else parts
    out = tensors[0].new_zeros(len(chosen), longest)
    for row, some in zip(out, chosen, strict=True):
        torch.cat([p.reshape(-1) for p in some], out=row[: sum(p.numel() for p in some)])
    return out


def _put(tensors: Sequence[Tensor], share: Share, values: Tensor) -> None:
    parts = [share.of(t) for t in tensors]
    sizes = [p.numel() for p in parts]
    for part, some in zip(parts, values[: sum(sizes)].split(sizes), strict=True):
        part.copy_(some.view_as(part))


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """In order, of at most `BUCKET_ELEMENTS` each, or one larger tensor."""
    bucket: list[Tensor] = []
    held = 0
    for tensor in tensors:
        if bucket and held + tensor.numel() > BUCKET_ELEMENTS:
            yield bucket
            bucket, held = [], 0
        bucket.append(tensor)
        held += tensor.numel()
    if bucket:
        yield bucket
