"""Token-budget micro-batches: a hard cap, no padding, nothing lost."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from r3async.batching.packing import PackingError, pack, plan_micro_batches
from r3async.records import Sample
from tests.test_records import EXTRA, make_table


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 120))
def test_every_sample_is_in_one_micro_batch_and_no_cap_is_exceeded(lengths, cap):
    plan = plan_micro_batches(lengths, cap)
    assert sorted(i for members in plan for i in members) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in members) <= cap for members in plan)
    assert plan == plan_micro_batches(lengths, cap)
    loads = sorted(sum(lengths[i] for i in members) for members in plan)
    assert len(loads) < 2 or loads[0] + loads[1] > cap  # no two micro-batches could have been one


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(9, 30))
def test_packed_rows_are_the_samples_rows_with_positions_from_zero(lengths, cap):
    samples = [Sample(f"s{i}", make_table(n, seed=i, schema=EXTRA), 0.5 + i) for i, n in enumerate(lengths)]
    by_id = {s.sample_id: s for s in samples}
    seen = []
    for batch in pack(samples, cap):
        for s, name in enumerate(batch.sample_ids):
            start, stop = batch.cu_seqlens[s : s + 2]
            assert batch.table.slice(start, stop) == by_id[name].table
            assert batch.positions[start:stop].tolist() == list(range(stop - start))
            assert np.allclose(batch.token_temperatures[start:stop], by_id[name].temperature)
            seen.append(name)
    assert sorted(seen) == sorted(by_id)


def test_a_sample_longer_than_the_cap_is_refused_with_the_setting():
    with pytest.raises(PackingError, match=r"learner\.max_tokens_per_micro_batch = 8"):
        plan_micro_batches([3, 9], 8)


def test_a_batch_that_mixes_columns_names_the_sample():
    whole, without = make_table(3), make_table(3).without("routed_experts", "routing_recorded")
    with pytest.raises(PackingError, match="sample b"):
        pack([Sample("a", whole), Sample("b", without)], 100)
