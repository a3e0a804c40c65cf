"""Deltas of weights: what they make is bit by bit what was published, or they are refused."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from r3async.weights.delta import (
    DELTA_BLOCK_BYTES,
    DeltaHeader,
    VersionDigest,
    apply_delta,
    decode_delta_block,
    encode_delta,
    encode_delta_block,
    encode_delta_header,
    encode_records,
    make_delta_header,
)
from r3async.weights.manifest import WeightError
from r3async.world.disk import SystemFiles

OLD, NEW = VersionDigest(3, 17), VersionDigest(4, 18)


def record_of(before: bytes, after: bytes) -> bytes:
    return b"".join(map(bytes, encode_delta_block(before, after)))


@st.composite
def pairs(draw):
    """Two contents of one length: few changes, many, none, far apart, or by much."""
    length = draw(st.integers(0, 3000))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    before = rng.integers(0, 256, length, np.uint8)
    after = before.copy()
    share = draw(st.sampled_from([0.0, 0.001, 0.01, 0.2, 0.45, 1.0]))
    where = rng.random(length) < share
    by = draw(st.sampled_from([1, 2, 128, 255]))
    after[where] += np.uint8(by)
    return before.tobytes(), after.tobytes()


@settings(max_examples=300)
@given(pairs())
def test_a_block_becomes_what_it_was_made_of(pair):
    before, after = pair
    assert bytes(decode_delta_block(before, record_of(before, after))) == after


@settings(max_examples=200)
@given(pairs(), st.data())
def test_a_record_that_is_torn_or_changed_is_refused_or_harmless(pair, data):
    before, after = pair
    record = bytearray(record_of(before, after))
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(record) * 8 - 1))
        record[at // 8] ^= 1 << at % 8
    else:
        del record[data.draw(st.integers(25, len(record))) :]
    try:
        made = bytes(decode_delta_block(before, record))
    except WeightError:
        return
    assert made == after  # a bit of a count that nothing depends on


def test_a_block_of_another_base_is_refused():
    rng = np.random.default_rng(0)
    before = rng.integers(0, 256, 4096, np.uint8)
    after, other = before.copy(), before.copy()
    after[5], other[77] = after[5] ^ 1, other[77] ^ 1
    with pytest.raises(WeightError, match="does not become what it was"):
        decode_delta_block(other, record_of(before, after))


def write(tmp_path, name: str, pieces) -> object:
    file = SystemFiles().open(tmp_path / name, exclusive=True)
    file.append([bytes(p) for p in pieces])
    return file


def contents(nbytes: int, lr: float) -> tuple[bytes, bytes]:
    """bf16 weights before and after a step that moves each by `lr`."""
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(nbytes // 2, generator=generator) * 0.02
    moved = master + torch.randn(len(master), generator=generator).sign() * lr
    before, after = (t.bfloat16().view(torch.uint8).numpy().tobytes() for t in (master, moved))
    return before + b"x" * (nbytes % 2), after + b"y" * (nbytes % 2)


@pytest.mark.parametrize("nbytes", [7, DELTA_BLOCK_BYTES, 2 * DELTA_BLOCK_BYTES + 4097])
def test_a_file_becomes_the_published_one_whoever_made_which_blocks(tmp_path, nbytes):
    old, new = contents(nbytes, 3e-6)
    before, after = write(tmp_path, "old", [old]), write(tmp_path, "new", [new])
    whole = write(tmp_path, "delta", encode_delta(OLD, NEW, before, after))
    parts = [
        p for first, last in ((0, 0), (0, 1), (1, 2), (2, None)) for p in encode_records(before, after, first, last)
    ]
    assert write(tmp_path, "parts", [make_delta_header(OLD, NEW, nbytes), *parts]).read() == whole.read()
    assert b"".join(map(bytes, apply_delta(OLD, before, whole))) == new
    if nbytes >= DELTA_BLOCK_BYTES:
        assert whole.size() < nbytes / 15


def test_a_delta_is_only_applied_to_the_version_that_it_changes(tmp_path):
    old, new = contents(10_000, 1e-5)
    before, after = write(tmp_path, "old", [old]), write(tmp_path, "new", [new])
    delta = write(tmp_path, "delta", encode_delta(OLD, NEW, before, after))
    for other in (VersionDigest(2, 17), VersionDigest(3, 19)):
        with pytest.raises(WeightError, match=r"to version 3 was to be applied"):
            next(iter(apply_delta(other, before, delta)))
    with pytest.raises(WeightError, match="does not become"):
        list(apply_delta(OLD, after, delta))
    short = write(tmp_path, "short", [old[:-1]])
    with pytest.raises(WeightError, match="file of 10000 bytes"):
        list(apply_delta(OLD, short, delta))


@pytest.mark.parametrize("cut", [0, 9, 40, -1])
def test_a_file_that_is_torn_is_refused(tmp_path, cut):
    old, new = contents(10_000, 1e-5)
    before, after = write(tmp_path, "old", [old]), write(tmp_path, "new", [new])
    delta = b"".join(map(bytes, encode_delta(OLD, NEW, before, after)))
    with pytest.raises(WeightError):
        list(apply_delta(OLD, before, write(tmp_path, "torn", [delta[:cut]])))
    with pytest.raises(WeightError, match="bytes too many"):
        list(apply_delta(OLD, before, write(tmp_path, "long", [delta, b"?"])))
    huge = encode_delta_header(msgspec.structs.replace(DeltaHeader(OLD, NEW, 10_000, 2), block_bytes=2**40))
    with pytest.raises(WeightError, match="names blocks"):
        list(apply_delta(OLD, before, write(tmp_path, "huge", [huge])))
