"""Shares of a parameter, and where they lie in the tensors of a checkpoint."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from r3async.checkpoint.tensors import TensorSlice
from r3async.config import LearnerConfig, config_from_dict
from r3async.learner.optimizer import SHARE_ALIGNMENT, RowShare, view_rows
from r3async.learner.state import ShardSlice


@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.integers(1, 9))
def test_shares_have_every_row_once_and_are_almost_alike(shape, ranks):
    tensor = torch.arange(math.prod(shape)).view(shape)
    parts = [view_rows(share.select_rows(tensor)) for share in RowShare(0, ranks).list_shares()]
    assert torch.equal(torch.cat(parts), view_rows(tensor))
    sizes = [p.numel() for p in parts]
    assert max(sizes) - min(sizes) < 16 * (shape[-1] if len(shape) > 1 else 1) + 16
    # What is not a full vector is at the end of the whole, as it is where nothing is divided.
    assert all(p.numel() and p.flatten()[0] % SHARE_ALIGNMENT == 0 for p in parts if len(p))


def interleaved(groups: int, widths: list[int], columns: int):
    """A parameter in which rows of three tensors take turns, as queries, keys and values do; those tensors, and what it is."""

    def join(tensors):
        return torch.cat([t.unflatten(0, (groups, -1)) for t in tensors], dim=1).flatten(0, 1)

    def split(weight):
        parts = weight.unflatten(0, (groups, -1)).split(widths, dim=1)
        return [part.flatten(0, 1) for part in parts]

    whole = [torch.rand(groups * width, columns) for width in widths]
    places = tuple(TensorSlice.full_tensor(f"t{i}", tensor.shape) for i, tensor in enumerate(whole))
    return join(whole), whole, ShardSlice(places, split, join)


@given(
    st.integers(1, 4), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 6), st.sampled_from([4, 16])
)
def test_a_share_is_a_box_of_each_tensor_that_it_has_rows_of(groups, widths, ranks, columns):
    parameter, tensors, held = interleaved(groups, widths, columns)
    filled = [torch.full_like(t, torch.nan) for t in tensors]
    for share in RowShare(0, ranks).list_shares():
        mine = held.narrow_to_share(parameter.shape, share)
        own = share.select_rows(parameter)
        parts = mine.split(own)
        for place, part in zip(mine.places, parts, strict=True):
            assert tuple(part.shape) == place.size
            box = tuple(slice(o, o + n) for o, n in zip(place.offset, place.size, strict=True))
            assert filled[int(place.name[1:])][box].isnan().all(), "no value is of two ranks"
            filled[int(place.name[1:])][box] = part
        if mine.places:
            assert torch.equal(mine.join(list(parts)), own)
    assert all(torch.equal(a, b) for a, b in zip(filled, tensors, strict=True))


def test_rows_that_only_pad_a_part_are_in_no_place():
    # The second of two tensor-parallel ranks: 5 rows are divided, and of its 3 the last is padding.
    held = ShardSlice((TensorSlice("w", (5, 16), (3, 0), (2, 16)),))
    first, second = (held.narrow_to_share((3, 16), share) for share in RowShare(0, 2).list_shares())
    assert first.places == (TensorSlice("w", (5, 16), (3, 0), (1, 16)),)
    assert second.places == (TensorSlice("w", (5, 16), (4, 0), (1, 16)),)
    assert [len(part) for part in second.split(torch.zeros(2, 16))] == [2]
    assert len(second.join([torch.zeros(2, 16)])) == 2


def test_a_backend_that_always_shards_refuses_the_setting():
    with pytest.raises(ValueError, match='`shard_optimizer` is for backend = "megatron"'):
        config_from_dict({"learner": {"backend": "torch", "shard_optimizer": True}})
    assert LearnerConfig().shard_optimizer is False
