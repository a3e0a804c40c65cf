"""Columns that are nearly constant, as runs of equal values; and the checksum. Pure.

Runs are `n` lengths (uint32) and then `n` values (the column's dtype), little-endian. Values are compared by their bits, so
every NaN and the sign of zero come back as they were.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np

WORTH = 4
"""A column becomes runs if that takes at most a fourth of its bytes. Log-probs of a sample that is mostly sampled never
do, so they are not copied; it costs one pass over one value a token to find out."""
LENGTH = np.dtype("<u4")

LANES = 1021
"""A prime, so that blocks of a disk or a network that change places do not stay in their lanes."""
FOLDED = 2**16
"""Bytes from which a buffer is folded first."""


class WireError(ValueError):
    """Bytes (or a trajectory to be encoded) that do not fit the wire format; the message says where and why."""


def raw_bytes(array: np.ndarray) -> memoryview:
    """The array as little-endian bytes, without a copy if it is that already."""
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return little.reshape(-1).view(np.uint8).data


def to_runs(array: np.ndarray) -> bytes | None:
    """`array [T]` as runs; None if it has more dimensions, is empty, or is not worth it."""
    if array.ndim != 1 or not len(array):
        return None
    bits = np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
    changes = (bits[1:] != bits[:-1]).nonzero()[0]
    if (len(changes) + 1) * (LENGTH.itemsize + array.dtype.itemsize) * WORTH > array.nbytes:
        return None
    edges = np.empty(len(changes) + 2, np.int64)
    edges[0], edges[1:-1], edges[-1] = 0, changes + 1, len(array)
    lengths = (edges[1:] - edges[:-1]).astype(LENGTH)
    return lengths.tobytes() + bytes(raw_bytes(array[edges[:-1]]))


def from_runs(runs: bytes, dtype: np.dtype, rows: int, column: str) -> np.ndarray:
    """`[rows]`, read-only. Raises `WireError` if the runs are not of exactly so many rows."""
    count, rest = divmod(len(runs), LENGTH.itemsize + dtype.itemsize)
    if rest:
        raise WireError(f"the runs of column {column!r} take {len(runs)} bytes, which is no whole number of them")
    lengths = np.frombuffer(runs, LENGTH, count)
    total = int(lengths.sum(dtype=np.uint64))
    if total != rows:
        raise WireError(f"the runs of column {column!r} have {total} rows, expected {rows}")
    values = np.frombuffer(runs, dtype.newbyteorder("<"), count, count * LENGTH.itemsize)
    if dtype.kind == "b" and values.view(np.uint8).max(initial=0) > 1:
        raise WireError(f"the runs of bool column {column!r} have a byte that is neither 0 nor 1")
    array = np.repeat(values, lengths)
    array.flags.writeable = False
    return array


def checksum(buffers: Iterable[Any]) -> int:
    """CRC-32 of all bytes in order, where a buffer of `FOLDED` bytes or more counts as its `fold`.

    CRC-32 alone took two thirds of the processor time of a large trajectory, both ends and ZeroMQ included.
    """
    value = 0
    for buffer in buffers:
        view = memoryview(buffer)
        value = zlib.crc32(fold(view) if view.nbytes >= FOLDED else view, value)
    return value


def fold(view: memoryview) -> bytes:
    """The sums, modulo 2**64, of every `LANES`-th word of 8 bytes; then the words and bytes that are left, and the length.

    Any change within one word shows. Changes of several words go unseen only if they cancel in every lane: by chance once
    in 2**64, or when whole words change places at a multiple of 8168 bytes.
    """
    rows = view.nbytes // (8 * LANES)
    size = rows * 8 * LANES
    words = np.frombuffer(view, "<u8", rows * LANES).reshape(rows, LANES)
    sums = np.add.reduce(words, axis=0, dtype=np.uint64)
    return sums.astype("<u8", copy=False).tobytes() + bytes(view[size:]) + view.nbytes.to_bytes(8, "little")
