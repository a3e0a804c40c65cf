"""A compact encoding of the difference between two versions of the weights.

An optimizer step at a small learning rate leaves most bf16 weights unchanged, bit by bit.
Files of two versions with equal headers are compared block by block, in words of 16 bits. A
block is a record:

    kind (u8) | words that changed (u32) | lengths of the three planes (u32 each) | XXH3 of the new block (u64) | planes

`SAME` has no planes, `RAW` has the block itself in the first one. `SPARSE` has the gaps between the
words that changed, one byte each, 255 standing for "255 words, and the gap continues"; and the
change of each word, as a signed number of 16 bits in zigzag order, low bytes apart from high ones.
A step moves a weight by few units in its last place, so its low byte has few values and its high
byte is 0. Planes are deflated with run-length and Huffman coding only (RFC 1951): searching for
repeats gains nothing here.

A delta names the version that it changes and the version that results. It applies to no other
version, and every resulting block must have the recorded checksum.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

import msgspec
import numpy as np
import xxhash

from r3async.untrusted import MalformedError, decode_msgpack
from r3async.weights.manifest import WeightError, WeightManifest
from r3async.world import Buffer, File

DELTA_MAGIC = b"r3delta1"
DELTA_BLOCK_BYTES = 4 * 2**20
"""Bytes of a file that are compared and applied at once."""
MAX_DELTA_BLOCK_BYTES = 64 * 2**20
"""Largest block in bytes that is accepted in a delta, because a block is held in memory."""
MAX_SPARSE_FRACTION = 0.5
"""Share of changed words above which a block is sent raw: finding and packing them would take
longer than sending it."""
SAMPLED_BLOCKS = 4
"""Number of blocks that are compared to decide whether a delta is worthwhile."""
_WORD = np.dtype("<u2")
_RECORD = struct.Struct("<BIIIIQ")
_SAME, _SPARSE, _RAW = range(3)
_GAP_CONTINUES = 255


class VersionDigest(msgspec.Struct, frozen=True):
    """The identity of a version's contents, which a delta changes or produces. `digest` is
    `WeightManifest.digest`."""

    version: int
    digest: int


def digest_version(manifest: WeightManifest) -> VersionDigest:
    """Return the identity of the version that the manifest describes."""
    return VersionDigest(manifest.version, manifest.digest)


class DeltaHeader(msgspec.Struct, frozen=True):
    """The header of a delta.

    Attributes:
        base: The version that the delta changes.
        made: The version that results.
        nbytes: Size of the file, before and after.
        block_bytes: Size of each block but the last.
    """

    base: VersionDigest
    made: VersionDigest
    nbytes: int
    block_bytes: int


def encode_delta_header(head: DeltaHeader) -> bytes:
    data = msgspec.msgpack.encode(head)
    return DELTA_MAGIC + len(data).to_bytes(4, "little") + data


def decode_delta_header(delta: Buffer) -> tuple[DeltaHeader, int]:
    """Return the header of a delta and the offset of its first record. Raises `WeightError`."""
    view = memoryview(delta)
    length = int.from_bytes(view[len(DELTA_MAGIC) : len(DELTA_MAGIC) + 4], "little")
    begin = len(DELTA_MAGIC) + 4 + length
    if view[: len(DELTA_MAGIC)] != DELTA_MAGIC or begin > view.nbytes:
        raise WeightError("these bytes are no delta")
    try:
        head = decode_msgpack(view[len(DELTA_MAGIC) + 4 : begin], DeltaHeader)
    except MalformedError as error:
        raise WeightError(f"the head of a delta cannot be read: {error}") from error
    if (
        not 0 < head.block_bytes <= MAX_DELTA_BLOCK_BYTES
        or head.block_bytes % _WORD.itemsize
        or head.nbytes < 0
    ):
        raise WeightError(
            f"the head of a delta names blocks of {head.block_bytes} in a file of "
            f"{head.nbytes} bytes"
        )
    return head, begin


def iter_blocks(nbytes: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the offset and the length in bytes of each block of a file."""
    for start in range(0, nbytes, block_bytes):
        yield start, min(block_bytes, nbytes - start)


def encode_delta_block(base: Buffer, new: Buffer) -> list[bytes | memoryview]:
    """Return the record that turns `base` into `new`, which has the same length. It keeps
    a view of `new`."""
    view = memoryview(new)
    digest = xxhash.xxh3_64_intdigest(new)
    before = _view_words(base)
    after = _view_words(new)
    changed = before != after
    count = int(np.count_nonzero(changed))
    if not count:
        return [_RECORD.pack(_SAME, 0, 0, 0, 0, digest)]
    if count > MAX_SPARSE_FRACTION * len(after):
        return [_RECORD.pack(_RAW, count, view.nbytes, 0, 0, digest), view]
    at = np.flatnonzero(changed)
    moved = _encode_zigzag(before[at], after[at])
    low = (moved & 0xFF).astype(np.uint8)
    high = (moved >> 8).astype(np.uint8)
    planes = [_deflate_plane(plane) for plane in (_encode_gaps(at), low, high)]
    return [_RECORD.pack(_SPARSE, count, *map(len, planes), digest), *planes]


def read_record_length(data: Buffer) -> int:
    """Return the length of the record that begins with `data`, which has at least
    `MIN_RECORD_BYTES` bytes."""
    _, _, *lengths, _ = _RECORD.unpack_from(data)
    return _RECORD.size + sum(lengths)


MIN_RECORD_BYTES = _RECORD.size
"""Length in bytes of a record without planes."""


def decode_delta_block(base: Buffer, record: Buffer) -> memoryview:
    """Apply a complete `record` to a block and return the result.

    Raises `WeightError` if the record is torn, or belongs to another block.
    """
    kind, count, *lengths, digest = _RECORD.unpack_from(record)
    view = memoryview(record)
    at = _RECORD.size
    planes = []
    for length in lengths:
        planes.append(view[at : at + length])
        at += length
    if at != view.nbytes:
        raise WeightError(f"a record of a delta has {view.nbytes} bytes, and should have {at}")
    if kind == _SAME:
        made = memoryview(base)
    elif kind == _RAW:
        made = planes[0]
    elif kind == _SPARSE:
        made = _apply_sparse(base, count, planes)
    else:
        raise WeightError(f"a record of a delta is of kind {kind}, which there is not")
    if made.nbytes != memoryview(base).nbytes or xxhash.xxh3_64_intdigest(made) != digest:
        raise WeightError(
            "a block of a delta does not become what it was: the delta, or what it "
            "changes, is corrupt"
        )
    return made


def _apply_sparse(base: Buffer, count: int, planes: list[memoryview]) -> memoryview:
    data = memoryview(base)
    words = _view_words(data).copy()
    if count > len(words):
        raise WeightError(f"a record of a delta has {count} changes of {len(words)} words")
    try:
        gaps = np.frombuffer(_inflate_plane(planes[0], 2 * len(words)), np.uint8)
        low, high = (np.frombuffer(_inflate_plane(plane, count), np.uint8) for plane in planes[1:])
    except zlib.error as error:
        raise WeightError(f"a plane of a delta is corrupt: {error}") from error
    at = (np.cumsum(gaps + (gaps != _GAP_CONTINUES).astype(np.int64)) - 1)[gaps != _GAP_CONTINUES]
    if not len(at) == len(low) == len(high) == count or (count and at[-1] >= len(words)):
        raise WeightError(f"a record of a delta has not {count} changes of {len(words)} words")
    moved = low.astype(np.uint16) | high.astype(np.uint16) << 8
    words[at] += (moved >> 1) ^ -(moved & 1).astype(np.uint16)
    return words.data.cast("B")[: data.nbytes]


def _view_words(data: Buffer) -> np.ndarray:
    """View data as words, uint16; an odd byte at the end becomes a word with a zero."""
    view = memoryview(data)
    return np.frombuffer(view if view.nbytes % 2 == 0 else bytes(view) + b"\0", _WORD)


def _encode_zigzag(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Return the difference modulo 2^16 in zigzag order, uint16, so that small numbers of both
    signs are small."""
    moved = (after - before).view(np.int16)
    return (moved.view(np.uint16) << 1) ^ (moved >> 15).view(np.uint16)


def _encode_gaps(at: np.ndarray) -> np.ndarray:
    """Return the number of words between each of the ascending numbers `at` and the one before,
    encoded as uint8."""
    more, rest = np.divmod(np.diff(at, prepend=-1) - 1, _GAP_CONTINUES)
    out = np.full(int(more.sum()) + len(at), _GAP_CONTINUES, np.uint8)
    out[np.cumsum(more + 1) - 1] = rest
    return out


def _deflate_plane(plane: np.ndarray) -> bytes:
    packer = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, strategy=zlib.Z_RLE)
    return packer.compress(plane.data) + packer.flush()


def _inflate_plane(plane: Buffer, max_bytes: int) -> bytes:
    """Inflate a plane to at most `max_bytes + 1` bytes, whatever a torn plane contains; one more
    tells that it is too long."""
    opener = zlib.decompressobj(-zlib.MAX_WBITS)
    data = opener.decompress(plane, max_bytes + 1)
    if not opener.eof and len(data) <= max_bytes:
        raise zlib.error("it ends too early")
    return data


def is_delta_worthwhile(before: File, after: File) -> bool:
    """Return True if a delta would be much shorter than the file.

    That is the case if, in most of a few sampled blocks, less than `MAX_SPARSE_FRACTION` changed.
    """
    if before.size() != after.size():
        return False
    all_of_them = list(iter_blocks(after.size(), DELTA_BLOCK_BYTES))
    looked = all_of_them[:: max(1, len(all_of_them) // SAMPLED_BLOCKS)]
    raw = [
        encode_delta_block(before.map_bytes(*at), after.map_bytes(*at))[0][0] == _RAW
        for at in looked
    ]
    return sum(raw) < len(raw) / 2


def apply_delta(
    base: VersionDigest, before: File, delta: File, start: int = 0, nbytes: int | None = None
) -> Iterator[Buffer]:
    """Apply a delta to the file of `base`, or to `nbytes` of it from `start` on, and yield the
    result block by block.

    Raises `WeightError` if the delta changes another version, or if either file is corrupt.
    """
    data = delta.map_bytes()
    head, at = decode_delta_header(data)
    if head.base != base:
        raise WeightError(
            f"a delta to version {head.base.version} was to be applied to version {base.version}"
        )
    changed = before.size() - start if nbytes is None else min(nbytes, before.size() - start)
    if changed != head.nbytes:
        raise WeightError(
            f"a delta changes a file of {head.nbytes} bytes, and was to change one of {changed}"
        )
    for offset, length in iter_blocks(head.nbytes, head.block_bytes):
        end = at + (
            read_record_length(data[at:])
            if len(data) - at >= MIN_RECORD_BYTES
            else MIN_RECORD_BYTES
        )
        if end > len(data):
            raise WeightError(f"a delta ends at byte {offset} of {head.nbytes}")
        yield decode_delta_block(before.map_bytes(start + offset, length), data[at:end])
        at = end
    if at != len(data):
        raise WeightError(f"a delta has {len(data) - at} bytes too many")


def encode_delta(
    base: VersionDigest, target: VersionDigest, before: File, after: File
) -> Iterator[Buffer]:
    """Yield the delta that turns the file `before` into `after`, which has the same length."""
    yield make_delta_header(base, target, after.size())
    yield from encode_records(before, after)


def make_delta_header(base: VersionDigest, target: VersionDigest, nbytes: int) -> bytes:
    """Return the header of a delta; the records of `encode_records` follow it."""
    return encode_delta_header(DeltaHeader(base, target, nbytes, DELTA_BLOCK_BYTES))


def encode_records(
    before: File, after: File, first: int = 0, last: int | None = None
) -> Iterator[Buffer]:
    """Yield the records of blocks `first` to `last`, so that several processes can write
    a delta together."""
    for start, length in list(iter_blocks(after.size(), DELTA_BLOCK_BYTES))[first:last]:
        yield from encode_delta_block(
            before.map_bytes(start, length), after.map_bytes(start, length)
        )
