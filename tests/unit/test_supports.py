"""Sets of tokens that could be sampled: their bytes are those sets, never more than a bit a token, and bad ones are refused."""

from functools import partial

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3async.data.supports import FORM_BITS, FORM_EXCEPT, FORM_LISTED, SupportSets
from r3async.data.tokens import SCHEMA, Sample, SchemaError, TokenTable, Trajectory, Turn
from r3async.data.wire import decode_trajectory, encode_trajectory
from r3async.data.wire_frames import WireError
from r3async.schedule.validation import InvalidTrajectory, check_trajectory, validate_trajectories
from tests.helpers.wire import make_trajectory

SIZES = st.sampled_from([1, 7, 8, 9, 264, 1000, 40_000])
SHARES = st.lists(st.sampled_from([0.0, 0.0002, 0.01, 0.2, 0.5, 0.9, 0.999, 1.0]), max_size=6)


def sets_of(dense: np.ndarray) -> SupportSets:
    return SupportSets.from_bitmaps(np.packbits(dense, axis=1, bitorder="little"), dense.shape[1])


@settings(max_examples=60)
@given(SIZES, SHARES, st.integers(0, 99))
def test_bytes_hold_exactly_the_sets_whatever_is_done_to_them(vocab_size, shares, seed):
    rng = np.random.default_rng(seed)
    dense = rng.random((len(shares), vocab_size)) < np.reshape(shares, (-1, 1))
    sets = sets_of(dense)
    assert np.array_equal(sets.to_dense_mask(vocab_size), dense)
    assert (np.diff(sets.byte_edges) <= -(-vocab_size // 8)).all()
    assert sets.fits_vocab(vocab_size).all()
    assert sets.recorded_mask.all()
    assert SupportSets.decode(len(sets), sets.encode().tobytes()) == sets
    rows, ids = np.nonzero(dense)
    edges = np.searchsorted(rows, np.arange(len(sets) + 1))
    assert SupportSets.from_ids(ids, edges, vocab_size) == sets
    assert np.array_equal(SupportSets.from_id_lists(ids, edges).to_dense_mask(vocab_size), dense)
    tokens = rng.integers(0, vocab_size, len(sets))
    assert np.array_equal(sets.contains_ids(tokens), dense[np.arange(len(sets)), tokens])
    if len(sets):
        chosen = rng.integers(0, len(sets), 5)
        assert np.array_equal(sets.take_rows(chosen).to_dense_mask(vocab_size), dense[chosen])
    cut = int(rng.integers(0, len(sets) + 1))
    assert SupportSets.concat([sets[:cut], sets[cut:]]) == sets
    spread = SupportSets.from_parts(len(sets) + 3, [(1, sets[:cut]), (cut + 2, sets[cut:])])
    assert spread[1 : cut + 1] == sets[:cut]
    assert spread[cut + 2 : -1] == sets[cut:]
    assert not spread.recorded_mask[[0, cut + 1, -1]].any()
    assert spread.contains_ids(np.full(len(spread), 5))[[0, cut + 1, -1]].all()
    for kept, inside in zip(sets.tolist(), dense, strict=True):
        listed = {i for i in kept if i >= 0} if not kept or kept[0] >= 0 else None
        # Nothing is listed of a set that lacks nothing.
        assert listed in (set(np.flatnonzero(inside)), None) or (not listed and inside.all())
        assert listed is not None or {-1 - i for i in kept} == set(np.flatnonzero(~inside))


def test_each_form_is_used_where_it_is_the_shortest():
    dense = np.zeros((3, 8000), bool)
    dense[0, [5, 4000]] = True
    dense[1] = True
    dense[1, 77] = False
    dense[2, ::2] = True
    sets = sets_of(dense)
    assert (sets.heads & 3).tolist() == [FORM_LISTED, FORM_EXCEPT, FORM_BITS]
    assert np.diff(sets.byte_edges).tolist() == [3, 1, 1000]


def test_a_token_of_top_p_takes_at_most_34_bytes():
    """At the sizes of a large vocabulary: 14 tokens anywhere among 152 thousand."""
    rng = np.random.default_rng(0)
    ids = np.sort(np.stack([rng.choice(151_936, 14, replace=False) for _ in range(500)]), axis=1)
    sets = SupportSets.from_id_lists(ids.reshape(-1), np.arange(0, ids.size + 1, 14))
    assert len(sets.encode()) / len(sets) <= 34


@given(st.binary(max_size=40), st.integers(0, 12))
def test_any_bytes_are_sets_that_can_be_read_or_are_refused(data, length):
    try:
        sets = SupportSets.decode(length, data)
    except ValueError:
        return
    assert len(sets) == length
    sets.contains_ids(np.zeros(length, np.int64))
    sets.fits_vocab(100)
    sets.tolist()
    assert SupportSets.decode(length, sets.encode().tobytes()).tolist() == sets.tolist()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x01", "heads of 2 sets"),
        (b"\x05\x01", "sets of 1 bytes have 0"),
        (b"\x05\x01\x80", "does not end"),
        (b"\x15\x01\x80\x80\x80\x80\x01", "more than 4 bytes"),
        (b"\x81\x80\x80\x80\x00\x01", "head of a set has more"),
        (b"\x04\x01\x07", "nobody recorded has bytes"),
    ],
)
def test_damaged_sets_are_refused(data, reason):
    with pytest.raises(ValueError, match=reason):
        SupportSets.decode(2, data)


def table_of(tokens, sets: SupportSets | None, first: int = 1) -> TokenTable:
    """A prompt of `first` tokens, and an answer."""
    n = len(tokens)
    columns = {name: column.filled_rows(n) for name, column in SCHEMA.columns.items() if not column.optional}
    columns["token_ids"] = np.asarray(tokens, np.int32)
    sampled = np.arange(n) >= first
    columns["loss_mask"], columns["turn"] = sampled, np.where(sampled, 0, -1).astype(np.int32)
    columns["policy_version"] = columns["turn"].copy()
    return TokenTable(columns if sets is None else {**columns, "support": sets})


def trajectory(*tables: TokenTable):
    (table,) = tables
    return msgspec.structs.replace(
        make_trajectory(tables=[table]), turns=[Turn(0, 0, 1, len(table), 0.5, "stop")], samples=[Sample("s", table)]
    )


def validate_table(sent: Trajectory, masked: bool) -> None:
    validate_trajectories([sent], vocab_size=20, learner_version=0, max_tokens=99, routing=None, needs_supports=masked)


GOOD = SupportSets.from_parts(3, [(1, SupportSets.from_id_lists(np.array([3, 4, 4, 9]), np.array([0, 2, 4])))])


def test_a_trajectory_with_supports_is_trainable_and_travels():
    sent = trajectory(table_of([1, 3, 9], GOOD))
    validate_table(sent, masked=True)
    assert decode_trajectory([bytes(f) for f in encode_trajectory(sent)]) == sent
    validate_table(trajectory(table_of([1, 3, 9], None)), masked=False)


@pytest.mark.parametrize(
    ("tokens", "sets", "masked", "reason"),
    [
        ([1, 3, 8], GOOD, None, "token 8 at 2 is not in its own support"),
        ([1, 3, 9], SupportSets.from_parts(3, [(0, GOOD[1:])]), None, "support of a token that was not sampled"),
        ([1, 3, 9], SupportSets.from_parts(3, [(1, GOOD[1:2])]), True, "trained token without a support"),
        ([1, 3, 9], None, True, "has no supports"),
        ([1, 3, 9], GOOD, False, "nothing here renormalises"),
        (
            [1, 3, 9],
            SupportSets.from_parts(3, [(1, SupportSets.from_id_lists(np.array([3, 9, 20]), np.array([0, 1, 3])))]),
            True,
            "an id outside 0..19",
        ),
        (
            [1, 3, 9],
            SupportSets.from_parts(3, [(1, sets_of(np.arange(48).reshape(2, 24) % 3 == 0))]),
            True,
            "outside 0..19",
        ),
    ],
)
def test_bad_masks_are_refused(tokens, sets, masked, reason):
    table = table_of(tokens, sets)
    check = check_trajectory if masked is None else partial(validate_table, masked=masked)
    with pytest.raises(InvalidTrajectory, match=reason):
        check(trajectory(table))


def test_a_column_of_sets_is_nothing_else():
    with pytest.raises(SchemaError, match="has to be sets"):
        table_of([1, 2], None).with_columns(support=np.zeros(2, np.uint8))
    with pytest.raises(SchemaError, match="holds no sets"):
        table_of([1, 2], None).with_columns(rewards=GOOD[:2])
    with pytest.raises(SchemaError, match="3 rows, expected 2"):
        table_of([1, 2], GOOD)


def test_a_table_without_sets_is_joined_to_others_that_have_them():
    joined = TokenTable.concat([table_of([1, 2], None), table_of([1, 3, 9], GOOD)], [1, 0])
    assert joined["support"] == SupportSets.from_parts(4, [(1, GOOD)])


def test_sets_that_do_not_fit_are_refused_on_the_wire():
    frames = [bytes(f) for f in encode_trajectory(trajectory(table_of([1, 3, 9], GOOD)))]
    assert GOOD.encode().tobytes() in frames[1]
    bad = GOOD.encode().tobytes()[:-1] + b"\xff"
    with pytest.raises(WireError, match="last number of a set does not end"):
        decode_trajectory([frames[0], frames[1].replace(GOOD.encode().tobytes(), bad)])
