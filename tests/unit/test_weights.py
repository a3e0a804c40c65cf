"""Publishing weights and their deltas: complete or absent, checked byte by byte, and gone when their publisher is."""

import errno
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from r3async.weights import version_reader
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
from r3async.weights.host_weights import SafetensorsEncoder
from r3async.weights.manifest import TensorEntry, WeightError, WeightManifest
from r3async.weights.version_reader import iter_verified_tensors, verify_version_file
from r3async.weights.version_store import VersionStore
from r3async.world.disk import SystemFiles


def tensors() -> dict[str, torch.Tensor]:
    matrix = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    return {
        "matrix": matrix,
        "transposed": matrix.T,
        "tied": matrix,
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "steps": torch.arange(3),
    }


@pytest.fixture
def publisher(tmp_path):
    with VersionStore(tmp_path) as publisher:
        yield publisher


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_read_is_what_was_published(publisher, dtype):
    manifest = publisher.write_tensors(3, tensors(), dtype)
    read = dict(iter_verified_tensors(manifest))
    for name, tensor in tensors().items():
        expected = tensor.to(dtype) if tensor.is_floating_point() else tensor
        assert read[name].dtype == expected.dtype
        assert torch.equal(read[name], expected)
    assert list(read) == list(tensors())
    assert manifest.nbytes == sum(t.nbytes for t in read.values())
    assert manifest.version == 3
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=WeightManifest) == manifest


def test_what_decides_who_is_chosen_is_never_rounded(publisher):
    """Engines keep it in float32 whatever they compute in. A plain float32 model, so that all tensors are alike in memory."""
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    given = {"first": torch.arange(4) / 3, bias: torch.arange(4) / 7, "last": torch.arange(4) / 9}
    manifest = publisher.write_tensors(0, given, torch.bfloat16)
    read = dict(iter_verified_tensors(manifest))
    assert list(read) == list(given)
    assert [tensor.dtype for tensor in read.values()] == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert torch.equal(read[bias], given[bias])
    assert all(torch.equal(read[name], given[name].bfloat16()) for name in ("first", "last"))
    assert manifest.nbytes == sum(t.nbytes for t in read.values()) == 4 * (2 + 4 + 2)


def test_the_file_is_ordinary_safetensors(publisher):
    loaded = load_file(publisher.write_tensors(0, tensors(), torch.float32).path)
    assert torch.equal(loaded["transposed"], tensors()["transposed"])
    assert loaded["scalar"].shape == ()


def test_a_mapped_version_outlives_its_file(publisher):
    held = dict(iter_verified_tensors(publisher.write_tensors(0, tensors(), torch.float32)))
    for version in (1, 2, 3):
        publisher.write_tensors(version, {"matrix": torch.zeros(6, 8)}, torch.float32)
    assert torch.equal(held["matrix"], tensors()["matrix"])


@pytest.mark.parametrize("version", [4, 3])
def test_versions_only_go_up(publisher, version):
    publisher.write_tensors(4, tensors(), torch.float32)
    with pytest.raises(WeightError, match=f"version {version} cannot follow version 4"):
        publisher.write_tensors(version, tensors(), torch.float32)


@pytest.mark.parametrize("threads", [1, 4])
def test_every_flipped_byte_is_found_and_its_tensor_named_and_a_truncated_file_is_refused(
    publisher, threads, monkeypatch
):
    monkeypatch.setattr(version_reader, "_BYTES_OF_A_THREAD", 1000 // threads)
    manifest = publisher.write_tensors(0, tensors(), torch.float32)
    content = bytearray(Path(manifest.path).read_bytes())
    at, damaged = len(content) - manifest.nbytes, []
    for name, entry in manifest.tensors.items():
        size = torch.Size(entry.shape).numel() * getattr(torch, entry.dtype).itemsize
        if size:
            content[at + size // 2] ^= 1
            Path(manifest.path).write_bytes(content)
            with pytest.raises(WeightError, match=f"tensor '{name}' is corrupt"):
                verify_version_file(manifest)
            content[at + size // 2] ^= 1
            damaged.append(name)
        at += size
    assert damaged == ["matrix", "transposed", "tied", "scalar", "steps"]
    Path(manifest.path).write_bytes(content[:-4])
    with pytest.raises(WeightError, match="cannot be read"):
        verify_version_file(manifest)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("matrix"), "tensor 'matrix' is not in the manifest"),
        (lambda t: t.update(other=TensorEntry("float32", (1,), 0)), "tensor 'other' is missing"),
        (lambda t: t.update(matrix=TensorEntry("float32", (8, 6), 0)), "tensor 'matrix' is float32"),
        (lambda t: t.update(matrix=TensorEntry("float16", (6, 8), 0)), "the manifest says float16"),
    ],
)
def test_a_file_that_differs_from_its_manifest_is_refused_before_any_tensor(publisher, change, message):
    manifest = publisher.write_tensors(0, tensors(), torch.float32)
    entries = dict(manifest.tensors)
    change(entries)
    with pytest.raises(WeightError, match=message):
        next(iter_verified_tensors(msgspec.structs.replace(manifest, tensors=entries), verify_checksums=False))


def test_too_little_space_is_an_error_that_says_how_much_is_missing(publisher, monkeypatch):
    monkeypatch.setattr(SystemFiles, "free_bytes", lambda self, path: 1024)
    with pytest.raises(OSError, match=r"needs 0\.00 GiB .* free; .*weights\.directory") as full:
        publisher.write_tensors(0, tensors(), torch.float32)
    assert full.value.errno == errno.ENOSPC
    assert [path.name for path in publisher.path.iterdir()] == ["lock"]
    monkeypatch.undo()
    publisher.write_tensors(0, tensors(), torch.float32)  # once there is some


def test_a_disk_that_can_never_hold_two_versions_is_said_and_not_waited_for(publisher, monkeypatch):
    whole = 16 * 2**20 + 1000
    monkeypatch.setattr(SystemFiles, "total_bytes", lambda self, path: whole)
    publisher.write_tensors(0, tensors(), torch.float32)
    with pytest.raises(
        WeightError, match=r"version 1 needs .* beside the .* of the one before but .* can hold 0\.02 GiB"
    ):
        publisher.write_tensors(1, tensors(), torch.float32)


def test_where_there_is_no_space_for_a_third_version_the_first_makes_way_unless_it_is_read(publisher, monkeypatch):
    for version in (0, 1):
        publisher.write_tensors(version, tensors(), torch.float32)
    there = lambda: sorted(path.name for path in publisher.path.glob("version-*"))  # noqa: E731
    monkeypatch.setattr(SystemFiles, "free_bytes", lambda self, path: 2**30 if len(there()) < 2 else 1024)
    with pytest.raises(OSError, match="free"):
        publisher.write_tensors(2, tensors(), torch.float32, versions_in_use=[0])
    publisher.write_tensors(2, tensors(), torch.float32)
    assert there() == ["version-1.safetensors", "version-2.safetensors"]


def test_a_failed_write_leaves_nothing_behind(publisher):
    broken = {"good": torch.zeros(4), "bad": torch.zeros(4, dtype=torch.complex64)}
    with pytest.raises(WeightError, match="tensor 'bad' has dtype"):
        publisher.write_tensors(0, broken, torch.float32)
    with pytest.raises(WeightError, match="no tensors"):
        publisher.write_tensors(0, {}, torch.float32)
    assert [path.name for path in publisher.path.iterdir()] == ["lock"]
    publisher.write_tensors(0, tensors(), torch.float32)


def test_close_removes_everything(tmp_path):
    publisher = VersionStore(tmp_path)
    publisher.write_tensors(0, tensors(), torch.float32)
    publisher.close()
    publisher.close()
    assert list(tmp_path.iterdir()) == []


def test_publishers_share_a_directory_and_lost_ones_are_cleared_away(tmp_path):
    killed = (
        "import os, signal, sys, torch; from pathlib import Path; from r3async.weights.version_store import VersionStore\n"
        "VersionStore(Path(sys.argv[1])).write_tensors(0, {'x': torch.zeros(4)}, torch.float32); os.kill(os.getpid(), 9)"
    )
    with VersionStore(tmp_path) as living:
        manifest = living.write_tensors(0, tensors(), torch.float32)
        result = subprocess.run([sys.executable, "-c", killed, str(tmp_path)], timeout=240, check=False)
        assert result.returncode == -9
        assert len(list(tmp_path.iterdir())) == 2
        with VersionStore(tmp_path) as second:
            assert set(tmp_path.iterdir()) == {living.path, second.path}
            verify_version_file(manifest)


def test_a_version_that_an_engine_is_still_reading_outlives_any_number_of_newer_ones(tmp_path):
    weights = {"a": torch.ones(3)}
    with VersionStore(tmp_path) as publisher:
        first = publisher.write_tensors(1, weights, torch.float32)
        second = publisher.write_tensors(2, weights, torch.float32)
        for version in range(3, 7):
            publisher.write_tensors(version, weights, torch.float32, versions_in_use=[1])
            verify_version_file(first)
        with pytest.raises(WeightError, match=r"version 2 .*cannot be read"):
            verify_version_file(second)
        publisher.write_tensors(7, weights, torch.float32)
        kept = sorted(path.name for path in publisher.path.glob("*.safetensors"))
        assert kept == ["version-6.safetensors", "version-7.safetensors"]


@pytest.mark.parametrize("bucket", [1, 7, 64, 10**6])
def test_no_part_is_larger_than_a_bucket_and_all_of_them_are_the_file(bucket):
    encoded = SafetensorsEncoder(3, tensors(), torch.float32, bucket)
    header, *parts = [bytes(part) for part in encoded]
    assert all(len(part) <= max(bucket, 8) for part in parts)  # one element at least
    manifest = encoded.build_manifest("")
    whole = SafetensorsEncoder(3, tensors(), torch.float32, 10**9)
    assert b"".join([header, *parts]) == b"".join(bytes(part) for part in whole)
    assert manifest == whole.build_manifest("")


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
    after[where] += np.uint8(draw(st.sampled_from([1, 2, 128, 255])))
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
    parts = [p for span in ((0, 0), (0, 1), (1, 2), (2, None)) for p in encode_records(before, after, *span)]
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
