"""How columns become bytes: raw, or packed together where they are nearly constant; how frames travel; and the checksum. Pure.

Bytes are little-endian. Packed columns come back bit by bit: they are compressed (LZ4), never rounded.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import lz4.block
import numpy as np
import xxhash

from r3async.world import MAX_FRAME

PIECE = MAX_FRAME
"""Bytes of a frame as it travels. Larger ones travel in pieces, so that a peer that is not let in yet can have this much taken
and no more: ZeroMQ has one limit for both, from the first byte of a connection."""

Frame = Any
"""Contiguous bytes: `bytes`, `memoryview`, or a `world.Frame`."""


class WireError(ValueError):
    """Bytes (or a trajectory to be encoded) that do not fit the wire format; the message says where and why."""


@functools.cache
def little_endian(dtype: str | np.dtype) -> np.dtype:
    """NumPy makes a new one each time, which takes as long as reading a column."""
    return np.dtype(dtype).newbyteorder("<")


def raw_bytes(array: np.ndarray) -> memoryview:
    """The array as little-endian bytes, without a copy if it is that already."""
    return _little(array).reshape(-1).view(np.uint8).data


def compress(data: bytes) -> bytes:
    return lz4.block.compress(data, store_size=False) if data else b""


def decompress(block: bytes | memoryview, size: int) -> bytes:
    """Exactly `size` bytes, or `WireError`; nothing larger is ever allocated."""
    try:
        data = lz4.block.decompress(block, uncompressed_size=size) if size else bytes(block)
    except (lz4.block.LZ4BlockError, ValueError) as error:
        raise WireError(f"a packed block of {len(block)} bytes: {error}") from error
    if len(data) != size:
        raise WireError(f"a packed block has {len(data)} bytes, expected {size}")
    return data


def pack(columns: Sequence[tuple[str, np.ndarray]]) -> bytes:
    """Columns of one table, by name, as one block. Raises `WireError` for a bool that is neither 0 nor 1."""
    columns = sorted(columns, key=lambda column: _place(column[1].dtype))
    block = b"".join([_little(array).data for _, array in columns])
    _check_bools(np.frombuffer(block, np.uint8), [(name, array.dtype) for name, array in columns])
    return compress(block)


def unpack(block: memoryview, columns: Sequence[tuple[str, np.dtype]], rows: int) -> dict[str, np.ndarray]:
    """The columns, by name, each `[rows]`, read-only and aligned; their dtypes are little-endian.

    Nothing larger than they are is ever allocated. Raises `WireError` for a block that does not hold exactly that.
    """
    data = decompress(block, rows * sum(dtype.itemsize for _, dtype in columns))
    columns = sorted(columns, key=lambda column: _place(column[1]))
    _check_bools(np.frombuffer(data, np.uint8), columns)
    arrays, at = {}, 0
    for name, dtype in columns:
        arrays[name] = np.frombuffer(data, dtype, rows, at)
        at += arrays[name].nbytes
    return arrays


def _place(dtype: np.dtype) -> tuple[int, bool]:
    """Wide columns first, so that each is aligned; bools last, so that they are checked together."""
    return -dtype.itemsize, dtype.kind == "b"


def _check_bools(block: np.ndarray, columns: Sequence[tuple[str, np.dtype]]) -> None:
    bools = [name for name, dtype in columns if dtype.kind == "b"]
    rows = len(block) // max(1, sum(dtype.itemsize for _, dtype in columns))
    values = block[len(block) - rows * len(bools) :]
    if bools and values.max(initial=0) > 1:
        wrong = bools[int((values > 1).argmax()) // rows]
        raise WireError(f"bool column {wrong!r} has a byte that is neither 0 nor 1")


def _little(array: np.ndarray) -> np.ndarray:
    """C-contiguous and little-endian."""
    return np.ascontiguousarray(array, dtype=little_endian(array.dtype))


def checksum(buffers: Iterable[Any]) -> int:
    """XXH3, 64 bits, of all bytes in order."""
    digest = xxhash.xxh3_64()
    for buffer in buffers:
        digest.update(buffer)
    return digest.intdigest()


def cut(frames: Sequence[Frame]) -> list[Frame]:
    """Frames as they travel: consecutive views of `PIECE` bytes each, and then a shorter one, which may be empty, as its end."""
    pieces: list[Frame] = []
    for frame in frames:
        view = view_of(frame)
        pieces += [view[at : at + PIECE] for at in range(0, len(view) + 1, PIECE)]
    return pieces


def joined(pieces: Sequence[Frame]) -> list[Frame]:
    """The frames that `cut` made these of, read-only; one that was cut is copied, another is not. Raises `WireError`."""
    frames: list[Frame] = []
    parts: list[memoryview] = []
    for piece in pieces:
        parts.append(view_of(piece))
        if len(parts[-1]) < PIECE:
            frames.append(piece if len(parts) == 1 else b"".join(parts))
            parts.clear()
    if parts:
        raise WireError("the last frame has no end")
    return frames


def view_of(frame: Frame) -> memoryview:
    try:
        view = memoryview(frame)
        # An empty view cannot be cast.
        return view.cast("B") if view.nbytes else memoryview(b"")
    except (TypeError, ValueError) as error:
        raise WireError(f"a frame is contiguous bytes, not {type(frame).__name__}: {error}") from error
