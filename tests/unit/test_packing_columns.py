"""A per-token column that only these tests declare goes wherever token data goes, with its values, and nothing else changed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3async.data.tokens import SCHEMA, Column, Sample, TokenTable
from r3async.data.wire import decode_trajectory, encode_trajectory
from r3async.learner.batch import (
    PackingError,
    collate_samples,
    make_padding_batch,
    pack_for_ranks,
    pad_to_multiple,
)
from tests.helpers.wire import as_bytes, make_table, make_trajectory

SURPRISE = Column("surprise", ("int16", "int32"), -9, inner_dims=("width",))
VERDICT = Column("verdict", ("float32",), 0.5, optional=True)
SCHEMA_WITH = SCHEMA.with_column(SURPRISE).with_column(VERDICT)


def mark(sample: int, length: int, dtype: str = "int16") -> np.ndarray:
    """`[length, 2]`: values that name their sample, token and place."""
    token, place = np.meshgrid(np.arange(length), np.arange(2), indexing="ij")
    return (1000 * sample + 10 * token + place).astype(dtype)


def make_sample(index: int, length: int, dtype: str = "int16") -> Sample:
    table = make_table(index, length, schema=SCHEMA_WITH)
    marks = mark(index, length, dtype)
    return Sample(f"t0/{index}", table.with_columns(surprise=marks, verdict=marks[:, 0].astype(np.float32)), 0.7)


def check(table: TokenTable, index: int, start: int = 0) -> None:
    """Rows of that sample from its token `start` on."""
    expected = mark(index, start + len(table), "int32")[start:]
    np.testing.assert_array_equal(table["surprise"], expected)
    np.testing.assert_array_equal(table["verdict"], expected[:, 0].astype(np.float32))
    assert list(table) == list(SCHEMA_WITH.columns)


def check_padding(table: TokenTable) -> None:
    assert (table["surprise"] == -9).all()
    assert (table["verdict"] == 0.5).all()
    assert table["surprise"].shape[1:] == (2,)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 4))
def test_decoded_packed_split_padded_and_merged(lengths, ranks):
    sent = make_trajectory(tables=[], samples=[make_sample(i, n) for i, n in enumerate(lengths)])
    received = decode_trajectory(as_bytes(encode_trajectory(sent, SCHEMA_WITH)), SCHEMA_WITH)  # decoded
    for index, sample in enumerate(received.samples):
        check(sample.table, index)

    divided = pack_for_ranks(received.samples, 12, ranks=ranks)  # packed
    for micro_batch in (m for mine in divided for m in mine):
        for batch in (micro_batch, pad_to_multiple(micro_batch, 5)):  # padded
            for name, start, stop in zip(batch.sample_ids, batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
                index = int(name.split("/")[1])
                check(batch.table.slice_rows(start, stop), index)  # split
                middle = (start + stop) // 2
                check(batch.table.slice_rows(middle, stop), index, middle - start)
            check_padding(batch.table.slice_rows(batch.num_real_tokens, batch.num_tokens))

    whole = TokenTable.concat([s.table for s in received.samples])  # merged
    at = 0
    for index, length in enumerate(lengths):
        check(whole.slice_rows(at, at + length), index)
        at += length


def test_padding_of_a_rank_that_runs_out_has_the_columns():
    divided = pack_for_ranks([make_sample(0, 4)], 12, ranks=3)
    (padding, _) = [m for (m,) in divided if not m.sample_ids]
    assert padding.num_tokens == 1
    check_padding(padding.table)
    check_padding(make_padding_batch(collate_samples([make_sample(0, 4)]), 3).table)


def test_a_wider_dtype_in_one_sample_widens_the_micro_batch():
    wide = make_sample(1, 3, "int32")
    wide.table["surprise"][:] += 100_000
    merged = collate_samples([make_sample(0, 2), wide])
    assert merged.table["surprise"].dtype == np.int32
    check(merged.table.slice_rows(0, 2), 0)
    np.testing.assert_array_equal(merged.table["surprise"][2:], mark(1, 3, "int32") + 100_000)


def test_a_sample_without_an_optional_column_is_named():
    without = Sample("t0/1", make_sample(1, 3).table.without_columns("verdict"))
    with pytest.raises(PackingError, match=r"t0/1.*verdict"):
        pack_for_ranks([make_sample(0, 12), without], 12)
