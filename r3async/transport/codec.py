"""How columns become bytes: raw, or packed together where they are nearly constant; how frames travel; and the checksum. Pure.

Bytes are little-endian. Packed columns come back bit by bit: they are compressed (LZ4), never rounded.
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
"""Bytes of a frame as it travels. Larger ones travel in pieces, so that a peer that is not let in yet can have this much taken
and no more: ZeroMQ has one limit for both, from the first byte of a connection."""

T = TypeVar("T")

Frame = Any
"""Contiguous bytes: `bytes`, `memoryview`, or a `world.ReceivedFrame`."""


class WireError(ValueError):
    """Bytes (or a trajectory to be encoded) that do not fit the wire format; the message says where and why."""


IS_LITTLE_ENDIAN = sys.byteorder == "little"


@functools.cache
def little_endian_dtype(dtype: str | np.dtype) -> np.dtype:
    """NumPy makes a new one each time, which takes as long as reading a column."""
    return np.dtype(dtype).newbyteorder("<")


def decode_wire_struct(data: Any, kind: type[T], what: str, dec_hook: Callable[[type, Any], Any] | None = None) -> T:
    """msgpack of a type. Raises `WireError`, and nothing else, for whatever else the bytes are; `what`: for its message."""
    try:
        return decode_msgpack(data, kind, dec_hook)
    except MalformedError as error:
        raise WireError(f"malformed {what}: {error}") from error


def array_bytes(array: np.ndarray) -> memoryview:
    """The array as little-endian bytes, without a copy if it is that already."""
    return _to_little_endian(array).reshape(-1).view(np.uint8).data


def compress_lz4(data: bytes) -> bytes:
    return lz4.block.compress(data, store_size=False) if data else b""


def decompress_lz4(block: bytes | memoryview, size: int) -> bytes:
    """Exactly `size` bytes, or `WireError`; nothing larger is ever allocated."""
    try:
        data = lz4.block.decompress(block, uncompressed_size=size) if size else bytes(block)
    except (lz4.block.LZ4BlockError, ValueError) as error:
        raise WireError(f"a packed block of {len(block)} bytes: {error}") from error
    if len(data) != size:
        raise WireError(f"a packed block has {len(data)} bytes, expected {size}")
    return data


class BlockLayout(NamedTuple):
    """How columns of one value a token lie in a packed block. `columns`: name, dtype (little-endian), and the bytes before it of
    a row of the block; wide columns first, so that each is aligned, and the `bool_count` last, so that they are checked
    together."""

    columns: tuple[tuple[str, np.dtype, int], ...]
    row_bytes: int
    bool_count: int


def lay_out_block(columns: Iterable[tuple[str, np.dtype]]) -> BlockLayout:
    """Of columns by name and dtype."""
    ordered = sorted(columns, key=lambda column: (-column[1].itemsize, column[1].kind == "b"))
    offsets = list(itertools.accumulate((dtype.itemsize for _, dtype in ordered), initial=0))
    placed = [(name, little_endian_dtype(dtype), at) for (name, dtype), at in zip(ordered, offsets, strict=False)]
    return BlockLayout(tuple(placed), offsets[-1], sum(dtype.kind == "b" for _, dtype in ordered))


def pack_columns(columns: Mapping[str, np.ndarray], block: BlockLayout) -> bytes:
    """Columns `[rows]` by name. Raises `WireError` for a bool that is neither 0 nor 1."""
    # An array is a buffer, which its type does not say; making its `data` takes longer than reading that.
    laid: list[Any] = [_to_little_endian(columns[name]) for name, _, _ in block.columns]
    data = b"".join(laid)
    _check_bools(data, block)
    return compress_lz4(data)


def unpack_columns(packed: bytes | memoryview, block: BlockLayout, rows: int) -> dict[str, np.ndarray]:
    """The columns, by name, each `[rows]`, read-only and aligned.

    Nothing larger than they are is ever allocated. Raises `WireError` for bytes that do not hold exactly that.
    """
    data = decompress_lz4(packed, rows * block.row_bytes)
    _check_bools(data, block)
    return {name: np.ndarray(rows, dtype, data, rows * offset) for name, dtype, offset in block.columns}


def _check_bools(data: bytes, block: BlockLayout) -> None:
    if not block.bool_count or not data:
        return
    rows = len(data) // block.row_bytes
    values = np.frombuffer(data, np.uint8, offset=len(data) - rows * block.bool_count)
    if np.maximum.reduce(values) > 1:
        wrong = block.columns[int((values > 1).argmax()) // rows - block.bool_count][0]
        raise WireError(f"bool column {wrong!r} has a byte that is neither 0 nor 1")


def _to_little_endian(array: np.ndarray) -> np.ndarray:
    """C-contiguous and little-endian."""
    if IS_LITTLE_ENDIAN and array.dtype.isnative and array.flags.c_contiguous:
        return array
    return np.ascontiguousarray(array, dtype=little_endian_dtype(array.dtype))


def compute_checksum(buffers: Iterable[Any]) -> int:
    """XXH3, 64 bits, of all bytes in order."""
    digest = xxhash.xxh3_64()
    for buffer in buffers:
        digest.update(buffer)
    return digest.intdigest()


MAX_JOINED_BYTES = 2**15
"""Bytes of a part that is copied into one frame with its neighbours: a frame of its own costs more than that."""
FRAME_ALIGNMENT = 8


def align_offset(at: int) -> int:
    """The first place from `at` on where an array may begin."""
    return -(-at // FRAME_ALIGNMENT) * FRAME_ALIGNMENT


def frame_parts(parts: Iterable[Frame], small_bytes: int = MAX_JOINED_BYTES) -> list[Frame]:
    """Frames that hold these parts, one after the other: large ones by themselves, as they are, those of up to `small_bytes`
    joined."""
    frames: list[Frame] = []
    small: list[Frame] = []
    for part in filter(len, parts):
        if len(part) <= small_bytes:
            # The one before it is padded, so that arrays are aligned where they are.
            small += [bytes(-len(small[-1]) % FRAME_ALIGNMENT), part] if small else [part]
            continue
        if small:
            frames.append(b"".join(small))
            small = []
        frames.append(part)
    return [*frames, b"".join(small)] if small else frames


class PartReader:
    """Reads what `frame_parts` made, given how large each part is."""

    def __init__(self, frames: Sequence[memoryview]):
        self._frames, self._next = frames, 0
        self._frame, self._at = memoryview(b""), 0

    def read_part(self, size: int, what: str) -> memoryview:
        """The next part. Raises `WireError` if the frames do not have it; `what`: its name, for the message."""
        if not size:
            return self._frame[:0]
        start = align_offset(self._at)
        if start >= len(self._frame):
            if self._next == len(self._frames):
                raise WireError(f"only {len(self._frames)} column frames, no frame for {what!r}")
            self._frame, start = self._frames[self._next], 0
            self._next += 1
        self._at = start + size
        part = self._frame[start : self._at]
        if len(part) < size:
            raise WireError(f"{what!r} takes {size} bytes, its frame has {len(part)}")
        return part

    @property
    def frame_index(self) -> int:
        """Of the last part: 0 for the first frame."""
        return self._next - 1

    def check_end(self) -> None:
        """Raises `WireError` if anything is left."""
        if self._next < len(self._frames) or self._at < len(self._frame):
            raise WireError(
                f"{len(self._frames)} column frames, but the header describes {self._next}, and {self._at} bytes of the last"
            )


def split_frames(frames: Sequence[Frame]) -> list[Frame]:
    """Frames as they travel: consecutive views of `PIECE_BYTES` bytes each, and then a shorter one, which may be empty, as
    its end."""
    pieces: list[Frame] = []
    for frame in frames:
        view = byte_view(frame)
        pieces += [view[at : at + PIECE_BYTES] for at in range(0, len(view) + 1, PIECE_BYTES)]
    return pieces


def join_pieces(pieces: Sequence[Frame]) -> list[Frame]:
    """The frames that `split_frames` made these of, read-only; one that was cut is copied, another is not. Raises `WireError`."""
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
    try:
        view = memoryview(frame)
        # An empty view cannot be cast.
        return view.cast("B") if view.nbytes else memoryview(b"")
    except (TypeError, ValueError) as error:
        raise WireError(f"a frame is contiguous bytes, not {type(frame).__name__}: {error}") from error
