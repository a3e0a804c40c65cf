"""Frames of the wire: columns as bytes, large frames in pieces, and the checksum. Pure.

Bytes are little-endian. Packed columns come back bit for bit: they are compressed (LZ4), never
rounded.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import lz4.block
import numpy as np
import xxhash

from r3async.untrusted import MalformedError, decode_msgpack
from r3async.world import MAX_FRAME

PIECE_BYTES = MAX_FRAME
"""Maximum bytes of a frame on the wire. Larger frames are cut into pieces, so that no more than
this has to be accepted from a peer that has not been admitted yet: ZeroMQ has one limit for all
peers, from the first byte of a connection."""

T = TypeVar("T")

Frame = Any
"""Contiguous bytes: `bytes`, `memoryview`, or a `world.ReceivedFrame`."""


class WireError(ValueError):
    """Error for bytes, or a trajectory to encode, that do not fit the wire format; the message
    says where and why."""


IS_LITTLE_ENDIAN = sys.byteorder == "little"


@functools.cache
def little_endian_dtype(dtype: str | np.dtype) -> np.dtype:
    """Return the dtype in little-endian order, cached: making one in NumPy takes as long as
    reading a column."""
    return np.dtype(dtype).newbyteorder("<")


def decode_wire_struct(
    data: Any, kind: type[T], what: str, dec_hook: Callable[[type, Any], Any] | None = None
) -> T:
    """Decode msgpack as a type. Raises `WireError`, and nothing else, for any other bytes; `what`
    names them in it."""
    try:
        return decode_msgpack(data, kind, dec_hook)
    except MalformedError as error:
        raise WireError(f"malformed {what}: {error}") from error


def array_bytes(array: np.ndarray) -> memoryview:
    """Return the array as little-endian bytes, without a copy if it has that layout already."""
    return _to_little_endian(array).reshape(-1).view(np.uint8).data


def compress_lz4(data: bytes) -> bytes:
    return lz4.block.compress(data, store_size=False) if data else b""


def decompress_lz4(block: bytes | memoryview, size: int) -> bytes:
    """Return exactly `size` decompressed bytes, or raise `WireError`; nothing larger
    is ever allocated."""
    try:
        data = lz4.block.decompress(block, uncompressed_size=size) if size else bytes(block)
    except (lz4.block.LZ4BlockError, ValueError) as error:
        raise WireError(f"a packed block of {len(block)} bytes: {error}") from error
    if len(data) != size:
        raise WireError(f"a packed block has {len(data)} bytes, expected {size}")
    return data


class BlockLayout(NamedTuple):
    """Layout of a packed block, which holds columns of one value a token.

    Attributes:
        columns: Name of each column, its dtype (little-endian), and the bytes before it in a row of
            the block. Wide columns come first, so that each is aligned.
        row_bytes: Bytes of a row of the block.
        bool_count: Number of bool columns, which come last, so that they are checked together.
    """

    columns: tuple[tuple[str, np.dtype, int], ...]
    row_bytes: int
    bool_count: int


def lay_out_block(columns: Iterable[tuple[str, np.dtype]]) -> BlockLayout:
    """Return the layout of a block of columns, given by name and dtype."""
    ordered = sorted(columns, key=lambda column: (-column[1].itemsize, column[1].kind == "b"))
    offsets = list(itertools.accumulate((dtype.itemsize for _, dtype in ordered), initial=0))
    placed = [
        (name, little_endian_dtype(dtype), at)
        for (name, dtype), at in zip(ordered, offsets, strict=False)
    ]
    return BlockLayout(tuple(placed), offsets[-1], sum(dtype.kind == "b" for _, dtype in ordered))


def pack_columns(columns: Mapping[str, np.ndarray], block: BlockLayout) -> bytes:
    """Return columns, `[rows]` each, as a packed block. Raises `WireError` for a bool that is
    neither 0 nor 1."""
    # `Any`: the type of an array does not say that it is a buffer. Making its `data` takes longer
    # than reading it.
    laid: list[Any] = [_to_little_endian(columns[name]) for name, _, _ in block.columns]
    data = b"".join(laid)
    _check_bools(data, block)
    return compress_lz4(data)


def unpack_columns(
    packed: bytes | memoryview, block: BlockLayout, rows: int
) -> dict[str, np.ndarray]:
    """Return the columns of a packed block by name, each `[rows]`, read-only and aligned.

    Nothing larger than they are is ever allocated. Raises `WireError` for bytes that do not hold
    exactly these columns.
    """
    data = decompress_lz4(packed, rows * block.row_bytes)
    _check_bools(data, block)
    return {
        name: np.ndarray(rows, dtype, data, rows * offset) for name, dtype, offset in block.columns
    }


def _check_bools(data: bytes, block: BlockLayout) -> None:
    if not block.bool_count or not data:
        return
    rows = len(data) // block.row_bytes
    values = np.frombuffer(data, np.uint8, offset=len(data) - rows * block.bool_count)
    if np.maximum.reduce(values) > 1:
        wrong = block.columns[int((values > 1).argmax()) // rows - block.bool_count][0]
        raise WireError(f"bool column {wrong!r} has a byte that is neither 0 nor 1")


def _to_little_endian(array: np.ndarray) -> np.ndarray:
    """Return the array C-contiguous and little-endian, itself if it already is."""
    if IS_LITTLE_ENDIAN and array.dtype.isnative and array.flags.c_contiguous:
        return array
    return np.ascontiguousarray(array, dtype=little_endian_dtype(array.dtype))


def compute_checksum(buffers: Iterable[Any]) -> int:
    """Return the XXH3 checksum, 64 bits, of all bytes in order."""
    digest = xxhash.xxh3_64()
    for buffer in buffers:
        digest.update(buffer)
    return digest.intdigest()


MAX_JOINED_BYTES = 2**15
"""Bytes up to which a part is copied into one frame with its neighbours, which costs less than
a separate frame."""
FRAME_ALIGNMENT = 8


def align_offset(at: int) -> int:
    """Return the first offset from `at` on where an array may begin."""
    return -(-at // FRAME_ALIGNMENT) * FRAME_ALIGNMENT


def frame_parts(parts: Iterable[Frame], small_bytes: int = MAX_JOINED_BYTES) -> list[Frame]:
    """Return frames that hold these parts, one after the other.

    Parts of up to `small_bytes` are joined; each larger one is a frame as it is.
    """
    frames: list[Frame] = []
    small: list[Frame] = []
    for part in filter(len, parts):
        if len(part) <= small_bytes:
            # The part before it is padded, so that arrays are aligned in place.
            small += [bytes(-len(small[-1]) % FRAME_ALIGNMENT), part] if small else [part]
            continue
        if small:
            frames.append(b"".join(small))
            small = []
        frames.append(part)
    return [*frames, b"".join(small)] if small else frames


class PartReader:
    """A reader of the parts in frames of `frame_parts`, given the size of each part."""

    def __init__(self, frames: Sequence[memoryview]):
        self._frames = frames
        self._next = 0
        self._frame = memoryview(b"")
        self._at = 0

    def read_part(self, size: int, what: str) -> memoryview:
        """Return the next part. Raises `WireError` if the frames do not have it; `what` is its name
        for the message."""
        if not size:
            return self._frame[:0]
        start = align_offset(self._at)
        if start >= len(self._frame):
            if self._next == len(self._frames):
                raise WireError(f"only {len(self._frames)} column frames, no frame for {what!r}")
            self._frame = self._frames[self._next]
            start = 0
            self._next += 1
        self._at = start + size
        part = self._frame[start : self._at]
        if len(part) < size:
            raise WireError(f"{what!r} takes {size} bytes, its frame has {len(part)}")
        return part

    @property
    def frame_index(self) -> int:
        """The index of the frame that holds the last part: 0 for the first frame."""
        return self._next - 1

    def check_end(self) -> None:
        """Raise `WireError` if anything is left."""
        if self._next < len(self._frames) or self._at < len(self._frame):
            raise WireError(
                f"{len(self._frames)} column frames, but the header describes {self._next}, and "
                f"{self._at} bytes of the last"
            )


def split_frames(frames: Sequence[Frame]) -> list[Frame]:
    """Return frames as they travel, in pieces.

    Each frame becomes consecutive views of `PIECE_BYTES` bytes, and then a shorter one, possibly
    empty, as its end.
    """
    pieces: list[Frame] = []
    for frame in frames:
        view = byte_view(frame)
        pieces += [view[at : at + PIECE_BYTES] for at in range(0, len(view) + 1, PIECE_BYTES)]
    return pieces


def join_pieces(pieces: Sequence[Frame]) -> list[Frame]:
    """Return the frames that `split_frames` cut into these pieces, read-only.

    Only a frame that was cut is copied. Raises `WireError` if the last frame has no end.
    """
    frames: list[Frame] = []
    parts: list[memoryview] = []
    for piece in pieces:
        parts.append(byte_view(piece))
        if len(parts[-1]) < PIECE_BYTES:
            frames.append(piece if len(parts) == 1 else b"".join(parts))
            parts.clear()
    if parts:
        raise WireError("the last frame has no end")
    return frames


def byte_view(frame: Frame) -> memoryview:
    """Return a frame as a view of bytes. Raises `WireError` if it is not contiguous bytes."""
    try:
        view = memoryview(frame)
        # An empty view cannot be cast.
        return view.cast("B") if view.nbytes else memoryview(b"")
    except (TypeError, ValueError) as error:
        raise WireError(
            f"a frame is contiguous bytes, not {type(frame).__name__}: {error}"
        ) from error


CRC_BYTES = 4
