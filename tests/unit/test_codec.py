"""Columns as bytes: packed ones come back bit by bit, and nothing that changed goes unseen."""

import contextlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from r3async.data import wire_frames
from r3async.data.wire_frames import WireError

MAX = wire_frames.MAX_JOINED_BYTES
FAST = settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow])


@FAST
@given(
    dtypes=st.lists(st.sampled_from(["float32", "float16", "int32", "uint8", "bool", ">i4", "int64"]), max_size=6),
    rows=st.integers(0, 300),
    seed=st.integers(0, 99),
    steady=st.booleans(),
)
def test_packed_columns_come_back_bit_by_bit(dtypes, rows, seed, steady):
    chance = np.random.default_rng(seed)
    columns = []
    for i, name in enumerate(dtypes):
        dtype = np.dtype(name)
        if dtype.kind == "b":
            array = chance.integers(0, 2, rows).astype(bool)
        else:  # any bits, those of every NaN and of both zeros among them
            array = np.frombuffer(chance.bytes(rows * dtype.itemsize), dtype)
        columns.append((f"c{i}", np.sort(array) if steady else array))
    block = wire_frames.lay_out_block((name, array.dtype) for name, array in columns)
    back = wire_frames.unpack_columns(memoryview(wire_frames.pack_columns(dict(columns), block)), block, rows)
    assert set(back) == {n for n, _ in columns}
    for name, array in columns:
        assert back[name].tobytes() == array.astype(wire_frames.little_endian_dtype(array.dtype)).tobytes()
        assert not back[name].flags.writeable
        assert back[name].flags.aligned


@FAST
@given(data=st.binary(max_size=200), rows=st.integers(0, 60))
def test_no_bytes_unpack_to_anything_but_so_many_rows(data, rows):
    block = wire_frames.lay_out_block([("a", np.dtype("<i4")), ("b", np.dtype(bool))])
    with contextlib.suppress(WireError):
        columns = wire_frames.unpack_columns(memoryview(data), block, rows)
        assert {n: len(a) for n, a in columns.items()} == {"a": rows, "b": rows}


@FAST
@given(
    sizes=st.lists(st.sampled_from([0, 1, 3, 8, 100, MAX, MAX + 1, 2 * MAX]), max_size=9),
    damage=st.sampled_from(["", "short", "long", "frame"]),
)
def test_parts_come_back_from_their_frames_and_nothing_else_does(sizes, damage):
    parts = [bytes([65 + i]) * size for i, size in enumerate(sizes)]
    frames = wire_frames.frame_parts(parts)
    assert [f for f in frames if len(f) > MAX and f in parts] == [p for p in parts if len(p) > MAX]
    if damage and frames:
        changed = {"short": [frames[-1][:-1]], "long": [frames[-1] + b"x"], "frame": [frames[-1], b"x"]}[damage]
        frames = [*frames[:-1], *changed]

    def read() -> list[bytes]:
        reader = wire_frames.PartReader([memoryview(f) for f in frames])
        read = [bytes(reader.read_part(len(part), "a part")) for part in parts]
        reader.check_end()
        return read

    if not (damage and any(sizes)):
        assert read() == parts
        return
    with pytest.raises(WireError):
        read()


@FAST
@given(data=st.data(), length=st.integers(2**16, 2**16 + 30_000), seed=st.integers(0, 99))
def test_the_checksum_of_a_large_frame_sees_every_small_change(data, length, seed):
    whole = np.random.default_rng(seed).bytes(length)
    before = wire_frames.compute_checksum([b"head", whole, b"tail"])
    assert before == wire_frames.compute_checksum([b"head", memoryview(b"x" + whole)[1:], b"tail"])  # Wherever it lies.
    at = data.draw(st.integers(0, length - 1))
    flipped = whole[:at] + bytes([whole[at] ^ (1 << data.draw(st.integers(0, 7)))]) + whole[at + 1 :]
    block = 4096 * data.draw(st.integers(0, length // 4096 - 2))
    moved = whole[:block] + whole[block + 4096 : block + 8192] + whole[block : block + 4096] + whole[block + 8192 :]
    torn = whole[: length - 4096] + bytes(4096)
    for other in (flipped, moved, torn, whole[:-1], whole + b"\0", whole[8:] + whole[:8]):
        assert wire_frames.compute_checksum([b"head", other, b"tail"]) != before
    assert wire_frames.compute_checksum([whole, b"head", b"tail"]) != before
