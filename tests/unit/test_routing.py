"""Routes are recorded by position, once."""

import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from r3async.data.routes import RoutingError, RoutingTrace, route_dtype, validate_routes

LAYERS, TOP_K, EXPERTS = 3, 2, 8


def rows(n, seed=0, experts=EXPERTS):
    rng = np.random.default_rng(seed)
    picks = [rng.permutation(experts)[:TOP_K] for _ in range(n * LAYERS)]
    return np.asarray(picks).reshape(n, LAYERS, TOP_K).astype(route_dtype(experts))


def trace():
    return RoutingTrace(layers=LAYERS, top_k=TOP_K, num_experts=EXPERTS)


calls = st.lists(
    st.tuples(
        st.integers(1, 6),  # tokens fed beyond what was fed before
        st.integers(0, 12),  # how many rows come again, of positions with one and of those that were fed without
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
        routes.record_rows(first, None if empty else returned, positions_fed=fed + more)
        for position in range(fed, fed + more):
            if not empty and position - first < len(returned):
                reference[position] = returned[position - first]
        fed += more
        assert routes.positions_fed == fed
    experts, recorded = routes.to_arrays(fed + 1)
    assert experts.dtype == np.uint8
    for position in range(fed + 1):
        assert recorded[position] == (position in reference)
        expected = reference.get(position, np.broadcast_to(np.arange(TOP_K), (LAYERS, TOP_K)))
        assert (experts[position] == expected).all()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.zeros((4, LAYERS, TOP_K), np.uint8), "all 4 rows are zero.*enforce_eager=true"),
        (np.full((1, LAYERS, TOP_K), 3, np.uint8), "twice"),
        (np.concatenate([np.zeros((3, LAYERS, TOP_K), np.uint8), rows(1)]), "row 0, MoE layer 0 names an expert twice"),
        (
            np.concatenate([rows(3), np.zeros((1, LAYERS, TOP_K), np.uint8)]),
            r"row 3, MoE layer 0 names an expert twice: \[0, 0\], so the engine did not record it; .*enforce_eager=true",
        ),
        (rows(2) + np.uint8(EXPERTS), "outside 0..7"),
        (rows(2)[:, :2], "shape"),
        (rows(2).astype(np.float32), "dtype"),
        (rows(2).astype(np.int16) - 9, "outside"),
    ],
)
def test_rows_that_cannot_be_choices_are_refused_with_the_reason(bad, message):
    with pytest.raises(RoutingError, match=message):
        validate_routes(bad, layers=LAYERS, top_k=TOP_K, num_experts=EXPERTS)


@pytest.mark.parametrize("first_dtype", [np.uint8, np.uint16, np.int32, np.int64])
@pytest.mark.parametrize("second_dtype", [np.uint16, np.int64])
def test_turns_of_different_dtypes_are_unified_and_never_wrapped(first_dtype, second_dtype):
    """More than 256 experts, and a first turn whose ids all fit uint8: in either order."""
    low, high = rows(3, seed=1).astype(first_dtype), rows(4, seed=2, experts=512).astype(second_dtype)
    high[:, 0] = [511, 256]
    for one, two in ((low, high), (high, low)):
        wide = RoutingTrace(layers=LAYERS, top_k=TOP_K, num_experts=512)
        wide.record_rows(0, one, positions_fed=len(one))
        wide.record_rows(len(one), two, positions_fed=7)
        experts, recorded = wide.to_arrays(7)
        assert experts.dtype == np.uint16
        assert experts.tolist() == [*one.tolist(), *two.tolist()]
        assert recorded.all()


def test_ids_of_few_experts_are_narrowed_whatever_the_engine_returned():
    routes = trace()
    returned = np.asfortranarray(rows(3).astype(np.int64))
    routes.record_rows(0, returned, positions_fed=3)
    experts, _ = routes.to_arrays(3)
    assert experts.dtype == np.uint8
    assert experts.tolist() == returned.tolist()


@pytest.mark.parametrize(
    "nothing",
    [
        None,
        *(np.empty((0, LAYERS, TOP_K), dtype) for dtype in (np.uint8, np.uint16, np.int64, np.float32)),
        np.empty(0, np.float64),
        np.empty((0, 0), object),
    ],
)
def test_an_empty_return_is_unrecorded(nothing):
    empty = trace()
    assert empty.record_rows(0, nothing, positions_fed=0) == 0
    experts, recorded = empty.to_arrays(1)  # nothing was ever fed; one token was appended
    assert experts.tolist() == [[[0, 1]] * LAYERS]
    assert not recorded.any()
    routes = trace()
    routes.record_rows(0, rows(3), positions_fed=3)
    assert routes.record_rows(3, nothing, positions_fed=5) == 0
    routes.record_rows(5, rows(1, seed=9), positions_fed=6)
    experts, recorded = routes.to_arrays(7)
    assert recorded.tolist() == [True] * 3 + [False] * 2 + [True, False]
    assert (experts[~recorded] == np.arange(TOP_K)).all()
    assert (experts[5] == rows(1, seed=9)[0]).all()


def test_invalid_rows_change_nothing():
    routes = trace()
    routes.record_rows(0, rows(3), positions_fed=3)
    for bad, message in (
        (rows(2)[:, :2], "shape"),
        (np.zeros((2, LAYERS, TOP_K), np.uint8), "zero"),
        (rows(4), "only 5 were fed"),
    ):
        with pytest.raises(RoutingError, match=message):
            routes.record_rows(3, bad, positions_fed=5)
    assert routes.positions_fed == 3
    assert routes.to_arrays(3)[1].all()


def test_a_branch_shares_rows_and_records_the_rewritten_part_again():
    old, new = rows(9), rows(5, seed=1)
    routes = trace()
    routes.record_rows(0, old[:6], positions_fed=6)
    routes.record_rows(6, old[6:], positions_fed=9)
    branch = routes.branch_at(7)
    assert branch.positions_fed == 7
    branch.record_rows(7, new, positions_fed=12)
    routes.record_rows(9, rows(1, seed=2), positions_fed=10)
    experts, recorded = branch.to_arrays(13)
    assert (experts[:12] == np.concatenate([old[:7], new])).all()
    assert recorded.tolist() == [True] * 12 + [False]
    experts, recorded = routes.to_arrays(10)
    assert (experts == np.concatenate([old, rows(1, seed=2)])).all()
    assert recorded.all()
    assert branch.branch_at(3).branch_at(5).positions_fed == 3  # what was forgotten does not come back
    with pytest.raises(RoutingError, match="cannot keep -1"):
        routes.branch_at(-1)


def test_a_branch_forgets_what_was_fed_without_a_row():
    routes = trace()
    routes.record_rows(0, rows(2), positions_fed=6)
    branch = routes.branch_at(4)
    assert branch.to_arrays(4)[1].tolist() == [True, True, False, False]
    assert branch.record_rows(0, rows(6, seed=1), positions_fed=6) == 2
    assert branch.to_arrays(6)[1].tolist() == [True, True, False, False, True, True]


def test_rows_are_kept_as_views_until_they_are_materialised_once():
    returned = [rows(4, seed=i) for i in range(20)]
    routes = trace()
    for i, block in enumerate(returned):
        routes.record_rows(4 * i, block, positions_fed=4 * i + 4)
    branch = routes.branch_at(70)
    for block in returned:
        block[:] = block[..., ::-1].copy()  # so all that is a view of it changes
    for holder, length in ((routes, 80), (branch, 70)):
        np.testing.assert_array_equal(holder.to_arrays(length)[0], np.concatenate(returned)[:length])


def test_an_engine_that_returns_every_row_again_costs_no_more_memory():
    routes, kept = trace(), []
    for fed in range(5, 400, 5):
        returned = rows(fed, seed=fed)
        routes.record_rows(0, returned, positions_fed=fed)
        kept.append(weakref.ref(returned))
    del returned
    assert sum(array() is not None for array in kept) <= 1, "the first, which is all new"
