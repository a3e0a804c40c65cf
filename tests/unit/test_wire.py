"""The wire format: everything that is sent arrives as it was."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from r3async.data import wire
from r3async.data.tokens import SCHEMA, Column, TokenTable, Turn
from r3async.data.wire import WireError, decode_trajectory, encode_trajectory
from tests.helpers.wire import COMPRESSIBLE, FAST, PACKED, RAW, as_bytes, make_table, make_trajectory, runny_table


@FAST
@given(
    lengths=st.lists(st.integers(0, 40), max_size=4),
    inner=st.integers(1, 5),
    optional=st.booleans(),
    wide=st.booleans(),
    name=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=64),
    preview=st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=2), max_size=3),
    numbers=st.tuples(st.integers(0, 2**40), st.integers(-(2**63), 2**63 - 1), st.floats(-1e6, 1e6)),
)
def test_round_trip(lengths, inner, optional, wide, name, preview, numbers):
    tables = [make_table(i, n, inner, optional=optional, wide=wide) for i, n in enumerate(lengths)]
    group, seed, when = numbers
    sent = make_trajectory(name, tables, group_index=group, task_seed=seed, preview=preview, finished_at=when)
    frames = encode_trajectory(sent)
    assert len(frames) == (2 if any(lengths) else 1)  # small columns are joined
    for received in (decode_trajectory(frames), decode_trajectory(as_bytes(frames))):
        assert received == sent
        for a, b in zip(sent.samples, received.samples, strict=True):
            assert {n: c.dtype for n, c in a.table.items()} == {n: c.dtype for n, c in b.table.items()}


def test_a_column_added_to_the_schema_travels():
    schema = SCHEMA.with_column(Column("entropy", ("float16",), 0.0)).with_column(
        Column("seen", ("bool",), False, inner_dims=("a", "b"), optional=True)
    )
    sent = make_trajectory(tables=[make_table(0, 6, schema=schema)])
    received = decode_trajectory(as_bytes(encode_trajectory(sent, schema)), schema)
    assert received == sent
    assert received.samples[0].table["entropy"].dtype == np.float16
    assert received.samples[0].table["seen"].shape == (6, 2, 3)
    with pytest.raises(WireError, match="both ends must run the same columns"):
        decode_trajectory(encode_trajectory(sent, schema), SCHEMA)
    with pytest.raises(WireError, match="the connection has"):
        encode_trajectory(sent, SCHEMA)


def test_columns_that_are_steady_travel_packed_in_one_part_a_row():
    tables = [runny_table(n) for n in (600, 400, 20_000)]
    sent = make_trajectory(tables=tables)
    frames = encode_trajectory(sent)
    raw = [tables[2][name].nbytes for name in RAW]
    heads = msgspec.msgpack.decode(wire.read_trajectory_header(frames[0]).body)["samples"]
    packed = [head["table"][PACKED] for head in heads]
    for size, table in zip(packed, tables, strict=True):
        assert size * 12 < sum(table[name].nbytes for name in COMPRESSIBLE)
    # What is small of all tables, and then what is large, each by itself.
    small = sum(table[name].nbytes for table in tables[:2] for name in RAW) + sum(packed[:2])
    assert [len(f) for f in frames[2:-1]] == raw
    assert small <= len(frames[1]) < small + 8 * len(SCHEMA.columns)
    assert len(frames[-1]) == packed[2]
    assert len(frames[0]) < 3000
    received = decode_trajectory(as_bytes(frames))
    assert received == sent
    for a, b in zip(sent.samples, received.samples, strict=True):
        assert {n: c.dtype for n, c in a.table.items()} == {n: c.dtype for n, c in b.table.items()}
        assert not any(c.flags.writeable or not c.flags.aligned for _, c in b.table.without_columns("support").items())
    unpacked = sum(t[name].nbytes for t in tables for name in COMPRESSIBLE)
    headers = wire.read_trajectory_header(frames[0]).nbytes
    assert wire.decoded_bytes(frames, received) == headers + unpacked + sum(map(len, frames))


def test_many_rows_of_one_episode():
    """Trained step by step, an episode is one sample a turn, each with all columns."""
    tables = [runny_table(n) for n in range(20, 420)]
    sent = make_trajectory(tables=tables, turns=[Turn(i, i, 1, 9, 0.5, "eos") for i in range(len(tables))])
    assert decode_trajectory(as_bytes(encode_trajectory(sent))) == sent


def test_payload_is_raw_and_not_copied():
    sent = make_trajectory(tables=[make_table(0, 20_000, 8).without_columns("support")])
    frames = encode_trajectory(sent)
    arrays = [sent.samples[0].table[name] for name in RAW]
    assert len(frames[0]) < 2000
    assert [len(f) for f in frames[1:-1]] == [a.nbytes for a in arrays]
    for array, frame in zip(arrays, frames[1:-1], strict=True):
        assert np.shares_memory(array, np.frombuffer(frame, np.uint8))
    received = decode_trajectory(frames)
    for array, name in zip(arrays, RAW, strict=True):
        assert np.shares_memory(array, received.samples[0].table[name])
        assert not decode_trajectory(as_bytes(frames)).samples[0].table["token_ids"].flags.writeable


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_what_does_not_get_smaller_is_never_more_than_was_offered(rows):
    """A learner rejects what is larger on the wire than what was granted for it."""
    sent = make_trajectory(tables=[make_table(5, rows, optional=False)], turns=[])
    frames = encode_trajectory(sent)
    assert sum(len(f) for f in frames) <= wire.decoded_bytes(frames, sent)


def test_frames_of_zeromq_and_odd_addresses():
    sent = make_trajectory()
    assert decode_trajectory([zmq.Frame(f) for f in as_bytes(encode_trajectory(sent))]) == sent
    shifted = [memoryview(b"x" + f)[1:] for f in as_bytes(encode_trajectory(sent))]
    received = decode_trajectory(shifted)
    assert received == sent
    assert all(array.flags.aligned for s in received.samples for _, array in s.table.without_columns("support").items())


def test_slices_foreign_byte_order_and_numpy_scalars_are_encoded():
    table = make_table(0, 20)
    strided = TokenTable({n: a[::2] for n, a in table.items()})
    swapped = table.with_columns(token_ids=table["token_ids"].astype(">i4"))
    sent = make_trajectory(tables=[strided, swapped], turns=[Turn(0, 0, 1, 2, np.float32(0.25), "eos")])
    received = decode_trajectory(as_bytes(encode_trajectory(sent)))
    assert received.samples[0].table == strided
    assert received.samples[1].table == table
    assert received.turns[0].reward == 0.25


def test_log_probs_that_are_not_finite_arrive():
    table = make_table(0, 4)
    bad = np.array([np.nan, -np.inf, np.inf, -1], np.float32)
    sent = make_trajectory(tables=[table.with_columns(rollout_logprobs=bad, loss_mask=np.ones(4, bool))])
    received = decode_trajectory(encode_trajectory(sent))
    np.testing.assert_array_equal(received.samples[0].table["rollout_logprobs"], bad)


def test_what_would_be_refused_is_not_encoded():
    table = make_table(0, 3)
    bad = [
        (make_trajectory("x" * 300), "100 characters"),
        (make_trajectory(started_at=math.inf), "started_at or finished_at is not finite"),
        (make_trajectory(tables=[table.with_columns(loss_mask=np.full(3, 2, np.uint8).view(bool))]), "'loss_mask' has"),
        (make_trajectory(preview=[{"a": "\ud800"}]), "cannot be encoded"),
        (make_trajectory(task_seed=2**70), "cannot be encoded"),
        (make_trajectory(preview=[{"a": object()}]), "a object cannot be sent"),
        (make_trajectory(preview=[{"a": "x" * wire.MAX_HEADER_BYTES}]), "shorten the preview"),
    ]
    for trajectory, reason in bad:
        with pytest.raises(WireError, match=reason):
            encode_trajectory(trajectory)
