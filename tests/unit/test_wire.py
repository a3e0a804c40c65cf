"""The wire format: what is sent arrives as it was, and bytes that are no message of ours are refused and raise nothing else."""

import contextlib
import math
from typing import Any

import lz4.block
import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from r3async.data import control_messages, wire, wire_frames, wire_tables
from r3async.data.control_messages import decode_control
from r3async.data.tokens import SCHEMA, Column, TokenTable, Turn
from r3async.data.wire import decode_trajectory, encode_trajectory
from r3async.data.wire_frames import WireError
from tests.helpers.wire import (
    COMPRESSIBLE,
    FAST,
    LAYOUTS,
    PACKED,
    RAW,
    ROWS,
    as_bytes,
    edit,
    forge,
    make_table,
    make_trajectory,
    runny_table,
)


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
    received = decode_trajectory([memoryview(b"x" + f)[1:] for f in as_bytes(encode_trajectory(sent))])
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


def block(columns: dict[str, np.ndarray]) -> wire_frames.BlockLayout:
    return wire_frames.lay_out_block((name, array.dtype) for name, array in columns.items())


def test_packed_columns_can_not_grow_beyond_what_arrived():
    """A few bytes that claim sixteen million rows are refused before anything is allocated."""
    frames = as_bytes(encode_trajectory(make_trajectory(tables=[runny_table(100)], turns=[])))
    names = list(SCHEMA.columns)
    turn, mask = names.index("turn"), names.index("loss_mask")
    table = {n: a for n, a in runny_table(100).items() if n in COMPRESSIBLE}
    size = len(wire_frames.pack_columns(table, block(table)))

    def packed(columns: dict[str, np.ndarray]) -> tuple[list[bytes], Any]:
        return with_block(wire_frames.pack_columns(columns, block(columns)))

    def with_block(data: bytes) -> tuple[list[bytes], Any]:
        return [frames[0], frames[1][:-size] + data], edit(*TABLE, PACKED, value=len(data))

    longer = {n: np.resize(a, 100_000) for n, a in table.items()}
    not_bool = {**table, "loss_mask": np.full(100, 2, np.uint8).view(bool)}
    huge = "'token_ids' takes 67108864 bytes"
    cases = [
        ((frames, edit(*TABLE, ROWS, value=2**24)), huge),
        ((frames, edit(*TABLE, value=[2**24, [["turn", "int32"]], 9])), "'token_ids' is missing"),
        ((frames, edit(*COLUMN, turn, value=["turn", "int32", [1]])), "2 dimensions, not 1"),
        ((frames, edit(*COLUMN, mask, value=["turn", "int32"])), "column comes twice"),
        (packed(longer), "a packed block of .* bytes: Decompression failed"),
        (packed({n: a[:50] for n, a in table.items()}), "has 1350 bytes, expected 2700"),
        (with_block(b""), "a packed block of 0 bytes"),
        (with_block(b"\xff" * 90), "a packed block of 90 bytes: Decompression failed"),
    ]
    for (sent, change), reason in cases:
        with pytest.raises(WireError, match=reason):
            decode_trajectory(forge(sent, change))
    with pytest.raises(WireError, match="'loss_mask' has a byte that is neither 0 nor 1"):
        packed(not_bool)
    data = b"".join(not_bool[name].tobytes() for name, _, _ in block(table).columns)
    with pytest.raises(WireError, match="'loss_mask' has a byte that is neither 0 nor 1"):
        decode_trajectory(forge(*with_block(lz4.block.compress(data, store_size=False))))


ROUTES = list(SCHEMA.columns).index("routed_experts")
TABLE = ("samples", 0, "table")
COLUMN = (*TABLE, LAYOUTS)
WANTS_ROUTES = {
    "other form": ("gzip", 3, "Invalid enum value 'gzip'"),
    "bits beyond the dtype": ("bits", 9, "of uint8 cannot come as bits of 9 bits"),
    "no bits": ("bits", 0, "no bits routes of 0 bits"),
    "bits of no id": ("bits", 17, "<= 16"),
}
FORGED = {
    "unknown column": (edit(*COLUMN, 0, 0, value="surprise"), "unknown column 'surprise'"),
    "column twice": (edit(*COLUMN, 2, value=["token_ids", "int32"]), "a column comes twice"),
    "other dtype": (edit(*COLUMN, 0, 1, value="float32"), "dtype 'float32', expected int32"),
    "object dtype": (edit(*COLUMN, 0, 1, value="object"), "dtype 'object', expected int32"),
    "other length": (edit(*TABLE, ROWS, value=6), "sets of"),
    "other inner shape": (edit(*COLUMN, ROUTES, 2, value=[6]), "2 dimensions, not 3"),
    "negative dimension": (edit(*TABLE, ROWS, value=-7), r">= 0 .* at `\$.samples\[0\].table"),
    "huge dimensions": (
        lambda b: edit(*TABLE, ROWS, value=2**24)(edit(*COLUMN, ROUTES, 2, value=[2**24, 2**24])(b)),
        "'token_ids' takes 67108864 bytes, its frame has",
    ),
    "huge inner dimensions": (
        edit(*COLUMN, ROUTES, 2, value=[2**24, 2**24]),
        "'routed_experts' takes 1970324836974592 bytes, its frame has",
    ),
    "dimension over the limit": (edit(*TABLE, ROWS, value=2**40), "<= 16777216"),
    "many dimensions": (edit(*COLUMN, 0, 2, value=[1] * 9), "length <= 8"),
    "layouts that are too long": (edit(*COLUMN, 0, 0, value="x" * 2**15), "length <= 16384"),
    "layouts that are none": (edit(*COLUMN, value=7), "malformed table layout"),
    "block too long": (edit(*TABLE, PACKED, value=2**30), "'the packed columns' takes 1073741824 bytes"),
    "bits that did not come": (
        edit(*COLUMN, ROUTES, value=["routed_experts", "uint8", [2**20, 1], "bits", 7]),
        "'routed_experts' takes 6422528 bytes, its frame has",
    ),
    "routes of other columns": (edit(*COLUMN, 0, value=["token_ids", "int32", [], "bits", 7]), "cannot come as bits"),
    **{
        name: (edit(*COLUMN, ROUTES, value=["routed_experts", "uint8", [2, 1], form, bits]), reason)
        for name, (form, bits, reason) in WANTS_ROUTES.items()
    },
    "a column too many": (edit("samples", 1, "table", LAYOUTS, value=[]), "column 'token_ids' is missing"),
    "a missing sample": (
        lambda b: b | {"samples": b["samples"][:1], "turns": []},
        "1 column frames, but the header describes 1, and [0-9]+ bytes of the last",
    ),
    "a table of text": (edit(*TABLE, value="rows"), r"got `str` .*at `\$.samples\[0\].table"),
    "text for a reward": (edit("turns", 0, "reward", value="0.5"), r"`\$.turns\[0\].reward"),
    "true for a number": (edit("group_index", value=True), "group_index"),
    "nan time": (edit("finished_at", value=math.nan), "finished_at is not finite"),
    "no id": (edit("trajectory_id", value=""), "1 to 100 characters"),
    "long id": (edit("trajectory_id", value="x" * 257), "1 to 100 characters"),
    "a list": (lambda b: [1, 2], "Expected `object`, got `array`"),
    "missing field": (lambda b: {k: v for k, v in b.items() if k != "samples"}, "field `samples`"),
    "deep nesting": (lambda b: b"\x81\xa7samples" + b"\x91" * 100_000, "malformed"),
    "deep table": (
        lambda b: b"\x81\xa7samples\x91\x81\xa5table" + b"\x91" * 100_000,
        "more than 128 lists and objects",
    ),
    "length of 4 G": (
        lambda b: b"\x81\xa7samples\xdd\xff\xff\xff\xff",
        "malformed trajectory: Input data was truncated",
    ),
}


@pytest.mark.parametrize("case", FORGED)
def test_refused_body(case):
    change, reason = FORGED[case]
    frames = as_bytes(encode_trajectory(make_trajectory()))
    assert decode_trajectory(forge(frames, lambda b: b)) == make_trajectory()
    with pytest.raises(WireError, match=reason):
        decode_trajectory(forge(frames, change))


def test_refused_frames():
    frames = as_bytes(encode_trajectory(make_trajectory()))
    flipped = bytes([frames[1][0] ^ 1]) + frames[1][1:]
    header = wire.read_trajectory_header(frames[0])
    old = msgspec.msgpack.encode({"kind": "trajectory", "wire": 3, "schema": header.schema, "crc32": 1, "body": {}})
    huge = msgspec.structs.replace(header, nbytes=wire.MAX_HEADER_BYTES + 1)
    cut = msgspec.structs.replace(header, nbytes=header.nbytes - 1)
    cases = [
        ([], "at least a header"),
        ([b"\xc1\x00"], "malformed header"),
        ([b"", *frames[1:]], "malformed header"),
        ([frames[0][:-3], *frames[1:]], "malformed header"),
        ([frames[0] + b"zz", *frames[1:]], "malformed header"),
        ([msgspec.msgpack.encode(huge), *frames[1:]], r"<= 4194304 .* at `\$.nbytes`"),
        ([msgspec.msgpack.encode(cut), *frames[1:]], "a packed block"),
        (frames[:1], "only 0 column frames, no frame for 'token_ids'"),
        ([*frames, b"x"], "2 column frames, but the header describes 1"),
        ([frames[0], frames[1][:27]], "'token_ids' takes 28 bytes, its frame has 27"),
        ([frames[0], frames[1][:-1]], "'the packed columns' takes [0-9]+ bytes, its frame has"),
        ([frames[0], frames[1] + b"x"], "the header describes 1, and [0-9]+ bytes of the last"),
        ([frames[0], flipped, *frames[2:]], "checksum"),
        ([frames[0].replace(SCHEMA.fingerprint.encode(), b"0badf00d"), *frames[1:]], "schema '0badf00d'"),
        ([frames[0].replace(b"\xa4wire\x08", b"\xa4wire\x07"), *frames[1:]], "wire version 7, expected 8"),
        ([old, *frames[1:]], "wire version 3, expected 8"),
        (["text"], "contiguous bytes, not str"),
        ([memoryview(np.zeros((4, 4)))[::2]], "contiguous bytes"),
    ]
    for bad, reason in cases:
        with pytest.raises(WireError, match=reason):
            decode_trajectory(bad)


ORIGINAL = make_trajectory()
ORIGINAL_FRAMES = as_bytes(encode_trajectory(ORIGINAL))


@st.composite
def mutated(draw) -> list[bytes]:
    """The frames of a trajectory with bytes changed, cut or added, or frames dropped, doubled or swapped."""
    frames = list(ORIGINAL_FRAMES)
    for _ in range(draw(st.integers(1, 3))):
        if not frames:
            break
        i = 0 if draw(st.booleans()) else draw(st.integers(0, len(frames) - 1))
        frame = frames[i]
        at = draw(st.integers(0, len(frame)))
        kind = draw(st.sampled_from(["byte", "cut", "insert", "drop", "double", "swap", "replace"]))
        if kind == "byte":
            frames[i] = frame[:at] + bytes([draw(st.integers(0, 255))]) + frame[at + 1 :]
        elif kind == "cut":
            frames[i] = frame[:at]
        elif kind == "insert":
            frames[i] = frame[:at] + draw(st.binary(max_size=9)) + frame[at:]
        elif kind == "drop":
            del frames[i]
        elif kind == "double":
            frames.insert(i, frame)
        elif kind == "swap":
            j = draw(st.integers(0, len(frames) - 1))
            frames[i], frames[j] = frames[j], frames[i]
        else:
            frames[i] = draw(st.binary(max_size=60))
    return frames


@settings(FAST, max_examples=200)
@given(frames=mutated())
def test_no_mutation_is_taken_for_another_trajectory(frames):
    with contextlib.suppress(WireError):
        assert decode_trajectory(frames) == ORIGINAL


@settings(FAST, max_examples=200)
@given(data=st.data())
def test_no_body_raises_anything_but_wire_error(data):
    """Past the checksum: the body itself is mutated, and signed again."""
    body = wire.read_trajectory_header(ORIGINAL_FRAMES[0]).body
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body) - 1))
        body = body[:at] + data.draw(st.binary(max_size=3)) + body[at + data.draw(st.integers(0, 3)) :] or b"\x00"
    try:
        decoded = decode_trajectory(forge(ORIGINAL_FRAMES, lambda _: body))
    except WireError:
        return
    encode_trajectory(decoded)


@FAST
@given(st.binary(max_size=200) | st.sampled_from([b"\x91" * 60_000, b"\xdf" + b"\xff" * 4, b"\xa2\xff\xff"]))
def test_control_messages_refuse_garbage(data):
    for frame in (data, control_messages.append_control_crc(data)):
        with pytest.raises(WireError):
            decode_control(frame)


@FAST
@given(data=st.data())
def test_control_messages_mutated(data):
    message = control_messages.Welcome("session", "epoch", 3, 100, ["t1", "t2"])
    raw = control_messages.encode_control(message)
    assert decode_control(raw) == message
    body = raw[: -wire_frames.CRC_BYTES]
    at = data.draw(st.integers(0, len(body) - 1))
    with contextlib.suppress(WireError):
        decode_control(
            control_messages.append_control_crc(body[:at] + data.draw(st.binary(max_size=4)) + body[at + 1 :])
        )


def test_a_control_message_of_which_one_bit_changed_is_no_message():
    raw = control_messages.encode_control(
        control_messages.Deliver("session", [control_messages.DeliveryItem("t1", 3, 100, [10, 20])])
    )
    for bit in range(8 * len(raw)):
        changed = bytearray(raw)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError, match="checksum"):
            decode_control(bytes(changed))


@pytest.mark.long
def test_control_messages_have_limits_and_may_grow():
    grown = msgspec.msgpack.encode({"kind": "ack", "ids": ["a"], "invented_later": 1})
    assert decode_control(control_messages.append_control_crc(grown)) == control_messages.Ack(["a"])
    for bad in (
        control_messages.Hello("s", "", "run", "schema"),
        control_messages.Hello("s" * 65, "g0", "run", "schema"),
        control_messages.Deliver("s", [control_messages.DeliveryItem("x" * 257, 0, 1, [])]),
        control_messages.Deliver("s", [control_messages.DeliveryItem("x", 0, -1, [])]),
        control_messages.Deliver("s", [control_messages.DeliveryItem("x", 0, 1, [-1])]),
        control_messages.Deliver("s", []),
        control_messages.Deliver(
            "s", [control_messages.DeliveryItem("x", 0, 1, [1])] * (control_messages.MAX_DELIVERY_ITEMS + 1)
        ),
        control_messages.Reject("x", "why", "perhaps"),
        control_messages.Ack(["x" * 1000] * (control_messages.MAX_CONTROL_BYTES // 1000)),
    ):
        with pytest.raises(WireError):
            decode_control(control_messages.encode_control(bad))


@pytest.mark.parametrize("frame", [1, 2, 3, -1])
def test_a_changed_byte_in_any_of_several_column_frames_is_refused(frame):
    """Large columns are a frame each; the small ones of the second sample follow in the last."""
    frames = [
        bytearray(each) for each in encode_trajectory(make_trajectory(tables=[make_table(0, 12_000), make_table(1, 5)]))
    ]
    assert len(frames) > 4
    frames[frame][0] ^= 1
    with pytest.raises(WireError):
        decode_trajectory(frames)


def test_the_checksum_covers_every_frame_whatever_the_others_are():
    frames = [b"one", b"two", b"three", b"four"]
    seen = {wire_frames.compute_checksum(frames)}
    for at in range(len(frames)):
        seen.add(wire_frames.compute_checksum([each if i != at else each[::-1] for i, each in enumerate(frames)]))
    assert len(seen) == 1 + len(frames)


def test_a_trajectory_of_two_samples_takes_the_memory_of_both():
    one, two = make_table(0, 400), make_table(1, 90)
    sizes = []
    for tables in ([one], [two], [one, two]):
        trajectory = make_trajectory(tables=tables)
        frames = encode_trajectory(trajectory)
        unpacked = wire.decoded_bytes(frames, trajectory) - sum(map(len, frames))
        sizes.append(unpacked - wire.read_trajectory_header(frames[0]).nbytes)
    assert sizes[2] == sizes[0] + sizes[1] > sizes[0]


@pytest.mark.parametrize("wrong", ["first", "second"])
def test_each_of_two_packed_bool_columns_is_checked_and_named(wrong):
    block = wire_frames.lay_out_block(
        [("count", np.dtype("u4")), ("first", np.dtype(bool)), ("second", np.dtype(bool))]
    )
    columns = {"count": np.arange(3, dtype="u4"), "first": np.zeros(3, bool), "second": np.zeros(3, bool)}
    columns[wrong] = np.array([0, 1, 2], np.uint8).view(bool)
    with pytest.raises(WireError, match=f"bool column '{wrong}' has a byte"):
        wire_frames.pack_columns(columns, block)


@pytest.mark.parametrize("extra", ["frame", "bytes"])
def test_more_than_the_header_describes_is_refused_though_the_checksum_is_right(extra):
    head, *frames = encode_trajectory(make_trajectory(tables=[make_table(0, 12_000), make_table(1, 5)]))
    body = wire.read_trajectory_header(head).body
    assert decode_trajectory([wire.encode_trajectory_header(body, frames), *frames])
    more = [*frames, b"more"] if extra == "frame" else [*frames[:-1], bytes(frames[-1]) + b"more"]
    with pytest.raises(WireError, match="but the header describes"):
        decode_trajectory([wire.encode_trajectory_header(body, more), *more])


def test_a_column_that_comes_twice_is_refused_beside_others():
    layouts = [wire_tables.ColumnLayout("token_ids", "int32"), wire_tables.ColumnLayout("turn", "int16")]
    for several in ([*layouts, layouts[1]], [layouts[0], *layouts]):
        header = wire_tables.TableHeader(5, msgspec.msgpack.encode(several), 0)
        with pytest.raises(WireError, match="a column comes twice"):
            list(wire_tables.describe_table(msgspec.to_builtins(header, builtin_types=(bytes,)), SCHEMA))
