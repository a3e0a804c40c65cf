"""Routes are recorded by position, once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from r3async.routing import RoutingError, RoutingTrace, route_dtype, validate_rows

LAYERS, TOP_K, EXPERTS = 3, 2, 8


def rows(n, seed=0, experts=EXPERTS):
    chance = np.random.default_rng(seed)
    picks = [chance.permutation(experts)[:TOP_K] for _ in range(n * LAYERS)]
    return np.asarray(picks).reshape(n, LAYERS, TOP_K).astype(route_dtype(experts))


def trace():
    return RoutingTrace(layers=LAYERS, top_k=TOP_K, num_experts=EXPERTS)


def test_a_second_prefill_that_disagrees_appends_and_never_overwrites():
    first, again = rows(7, seed=1), rows(12, seed=2)
    assert not (first == again[:7]).all()
    routes = trace()
    assert routes.record(0, first, fed=7) == 7  # turn one: 5 prompt tokens, 3 sampled, the last of them not fed
    assert routes.record(0, again, fed=12) == 5  # turn two prefills everything again, with other choices
    experts, recorded = routes.materialise(13)
    assert (experts[:7] == first).all()
    assert (experts[7:12] == again[7:]).all()  # the last sampled token of turn one among them
    assert recorded.tolist() == [True] * 12 + [False]
    assert experts[12].tolist() == [[0, 1]] * LAYERS  # unrecorded: distinct ids, marked


calls = st.lists(
    st.tuples(
        st.integers(1, 6),  # tokens fed beyond what was fed before
        st.integers(0, 3),  # how many already known rows come again
        st.integers(0, 3),  # rows missing at the end (abort)
        st.booleans(),  # the call returns nothing at all
    ),
    max_size=6,
)


@given(calls)
def test_the_trace_equals_a_position_by_position_reference(history):
    routes, reference, fed = trace(), {}, 0
    for seed, (more, again, short, empty) in enumerate(history):
        first = max(0, fed - again)
        returned = rows(max(0, fed + more - first - short), seed=seed)
        routes.record(first, None if empty else returned, fed=fed + more)
        for position in range(fed, fed + more):
            if not empty and position - first < len(returned):
                reference[position] = returned[position - first]
        fed += more
        assert routes.fed == fed
    experts, recorded = routes.materialise(fed + 1)
    assert experts.dtype == np.uint8
    for position in range(fed + 1):
        assert recorded[position] == (position in reference)
        expected = reference.get(position, np.broadcast_to(np.arange(TOP_K), (LAYERS, TOP_K)))
        assert (experts[position] == expected).all()


def test_a_position_fed_without_a_row_is_never_filled_by_a_later_prefill():
    routes = trace()
    routes.record(0, None, fed=5)
    routes.record(0, rows(8), fed=8)
    assert routes.materialise(8)[1].tolist() == [False] * 5 + [True] * 3


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.zeros((4, LAYERS, TOP_K), np.uint8), "all 4 rows are zero"),
        (np.full((1, LAYERS, TOP_K), 3, np.uint8), "twice"),
        (rows(2) + np.uint8(EXPERTS), "outside 0..7"),
        (rows(2)[:, :2], "shape"),
        (rows(2).astype(np.float32), "dtype"),
        (rows(2).astype(np.int16) - 9, "outside"),
    ],
)
def test_rows_that_can_not_be_choices_are_refused_with_the_reason(bad, message):
    with pytest.raises(RoutingError, match=message):
        validate_rows(bad, layers=LAYERS, top_k=TOP_K, num_experts=EXPERTS)


def test_rows_beyond_what_was_fed_are_refused():
    with pytest.raises(RoutingError, match="only 3 were fed"):
        trace().record(0, rows(4), fed=3)


def test_ids_above_255_are_held_without_wrapping():
    wide = RoutingTrace(layers=LAYERS, top_k=TOP_K, num_experts=512)
    high = rows(3, experts=512)
    high[0, 0] = [511, 256]
    wide.record(0, high, fed=3)
    assert wide.materialise(3)[0].tolist() == high.tolist()
