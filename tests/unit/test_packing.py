"""Token-budget micro-batches: a hard cap, no padding but what ranks that run out are given, nothing lost."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3async.data.tokens import Sample
from r3async.learner.batch import (
    PackingError,
    collate_samples,
    make_padding_batch,
    pack_for_ranks,
    pack_samples,
)
from tests.helpers.wire import make_table
from tests.unit.test_records import EXTRA


def make_samples(lengths):
    return [Sample(f"s{i}", make_table(i, n, schema=EXTRA), 0.5 + i) for i, n in enumerate(lengths)]


@settings(max_examples=60)
@given(st.lists(st.integers(1, 9), max_size=12), st.integers(9, 30), st.integers(1, 5))
def test_packed_rows_are_the_samples_rows_with_positions_from_zero(lengths, cap, ranks):
    samples = make_samples(lengths)
    by_id = {s.sample_id: s for s in samples}
    divided = pack_for_ranks(samples, cap, ranks=ranks)
    assert len(divided) == ranks
    assert len({len(mine) for mine in divided}) == 1
    seen = []
    for batch in (m for mine in divided for m in mine):
        for s, name in enumerate(batch.sample_ids):
            start, stop = batch.cu_seqlens[s : s + 2]
            assert batch.table.slice_rows(start, stop) == by_id[name].table
            assert batch.positions[start:stop].tolist() == list(range(stop - start))
            assert np.allclose(batch.token_temperatures[start:stop], by_id[name].temperature)
            seen.append(name)
        assert batch.num_tokens <= cap
        assert batch.num_tokens == (batch.num_real_tokens or 1)
    assert sorted(seen) == sorted(by_id)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_rank_that_runs_out_is_given_one_row_that_nothing_counts(ranks):
    divided = pack_for_ranks(make_samples([9]), 4096, ranks=ranks)
    assert [len(mine) for mine in divided] == [1] * ranks
    real, *padding = sorted((m for (m,) in divided), key=lambda m: -m.num_tokens)
    assert real.num_real_tokens == real.num_tokens == 9
    for m in padding:
        assert (m.num_tokens, m.num_real_tokens, m.sample_ids) == (1, 0, ())
        assert list(m.table) == list(real.table)
        assert m.cu_seqlens.tolist() == [0, 1]
        assert m.temperatures.tolist() == [1.0]
        assert not m.support.recorded_mask.any()
        for name, values in m.table.without_columns("support").items():
            fill = EXTRA.columns[name].fill
            assert (values == (np.arange(values.shape[-1]) if fill == "arange" else fill)).all(), name
            assert values.dtype == real.table[name].dtype


def test_nothing_to_train_is_no_micro_batch():
    assert pack_samples([], 8) == []
    assert pack_for_ranks([], 8, ranks=3) == [[], [], []]


def test_padding_of_padding_stays_padding():
    padding = make_padding_batch(make_padding_batch(collate_samples(make_samples([3, 4]))), 5)
    assert (padding.num_tokens, padding.num_real_tokens, padding.segment_lengths.tolist()) == (5, 0, [5])


@pytest.mark.parametrize("cap", [100, 3])
def test_a_batch_that_mixes_columns_names_the_sample(cap):
    """Also if no micro-batch does: ranks with different columns would run different passes."""
    whole, without = make_table(0, 3), make_table(0, 3).without_columns("routed_experts", "routing_recorded")
    with pytest.raises(PackingError, match="sample b"):
        pack_samples([Sample("a", whole), Sample("b", without)], cap)
