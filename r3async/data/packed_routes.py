"""Packed routes, which take fewer bits than their expert ids. Pure; NumPy alone, on whole
columns at a time.

Besides `plain`, which is the ids themselves, there is one form, `bits`: ids that are all below 2^b
take b bits each, in their order. The ids are divided into equal blocks. The contents of the last
blocks are moved, a few bits at a time, into the bits that the first blocks leave free, by masks and
shifts of eight ids at once. For 128 experts, the last of eight blocks goes into the highest bit of
the other seven. Only the bits beyond whole bytes are packed this way; each whole byte is a separate
plane.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Literal, NamedTuple

import numpy as np

RouteForm = Literal["plain", "bits"]

WORD_BYTES = 8
"""Bytes that are processed at a time, and to a multiple of which each part is padded."""
CHUNK_WORDS = 2**13
"""Number of words of each block that are processed at a time, so that all blocks stay
in a core's cache."""
MIN_PACKED_BYTES = 2**14
"""Bytes of ids from which on they are packed. Fewer stay as they are, because packing
has a fixed cost."""


class PackedRoutes:
    """Routes `[T, layers, top_k]` in a packed form, which are unpacked each time that they are read.

    `bits` is the bit length of the largest id. Any `data` (uint8, of `packed_size` bytes, aligned
    to 8) decodes to routes of this shape with ids below 2^bits, so reading never fails. Raises
    `ValueError` for data of another size, or for a form that cannot hold such routes.
    """

    __slots__ = ("bits", "data", "dtype", "form", "shape")

    def __init__(
        self, form: RouteForm, bits: int, shape: tuple[int, ...], dtype: np.dtype, data: np.ndarray
    ):
        size = packed_size(form, bits, shape)
        if size != data.nbytes:
            raise ValueError(
                f"{form} routes of shape {list(shape)} in {bits} bits take {size} bytes, "
                f"not {data.nbytes}"
            )
        self.form = form
        self.bits = bits
        self.shape = shape
        self.dtype = dtype
        self.data = data

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Return some rows, `[n, layers, top_k]`. All routes are unpacked for this, unless
        the slice is empty."""
        if len(range(*rows.indices(len(self)))):
            return self.unpack_routes()[rows]
        return np.empty((0, *self.shape[1:]), self.dtype)

    def unpack_routes(self) -> np.ndarray:
        """Return the routes as a new array."""
        values = _read_bits(self.data, self.bits, math.prod(self.shape), self.dtype)
        return values.reshape(self.shape)


def pack_routes(rows: np.ndarray, form: RouteForm) -> PackedRoutes | np.ndarray:
    """Return `rows` `[T, layers, top_k]` (unsigned) in this form, or in a plainer one where this
    form saves nothing."""
    if form == "plain" or rows.nbytes < MIN_PACKED_BYTES:
        return rows
    rows = np.ascontiguousarray(rows, rows.dtype.newbyteorder("="))
    bits = max(1, int(rows.max()).bit_length())
    if bits == 8 * rows.dtype.itemsize:
        return rows
    data = np.empty(packed_size("bits", bits, rows.shape), np.uint8)
    _write_bits(rows.reshape(-1), bits, data)
    return PackedRoutes("bits", bits, rows.shape, rows.dtype, data)


def packed_size(form: RouteForm, bits: int, shape: tuple[int, ...]) -> int:
    """Return the size of packed routes in bytes. Raises `ValueError` for a form that cannot
    hold such routes."""
    if form != "bits" or not 1 <= bits <= 16:
        raise ValueError(f"there are no {form} routes of {bits} bits")
    return _bit_array_bytes(math.prod(shape), bits)


class _BitSplit(NamedTuple):
    """A way to store `bits` < 8 bits of each byte.

    Of every `blocks` blocks, `kept_blocks` stay in place. The contents of the others go into the
    bits that these leave free, `unit_bits` bits at a time.
    """

    blocks: int
    kept_blocks: int
    unit_bits: int


def _split_bits(bits: int) -> _BitSplit:
    unit = math.gcd(bits, 8)
    return _BitSplit(8 // unit, bits // unit, unit)


def _words_per_block(count: int, blocks: int) -> int:
    """Return the number of words in each block when `count` bytes are divided into
    `blocks` blocks."""
    return -(-count // (blocks * WORD_BYTES))


def _bit_array_bytes(count: int, bits: int) -> int:
    """Return the size in bytes of `count` packed numbers of `bits` bits each."""
    size = bits // 8 * WORD_BYTES * _words_per_block(count, 1)
    rest = bits % 8
    if rest:
        split = _split_bits(rest)
        size += split.kept_blocks * WORD_BYTES * _words_per_block(count, split.blocks)
    return size


@functools.cache
def _block_moves(bits: int) -> list[tuple[int, int, int, int]]:
    """Return one move for each unit of the blocks that are not kept, block by block
    and unit by unit.

    A move is the source block, the target block, the shift up to the unit's place there (down if
    negative), and the mask of that place in a byte.
    """
    blocks, kept, unit = _split_bits(bits)
    moves = []
    for source, target in itertools.product(range(blocks - kept), range(kept)):
        place = bits + source * unit
        moves.append((kept + source, target, place - target * unit, ((1 << unit) - 1) << place))
    return moves


def _write_bits(values: np.ndarray, bits: int, out: np.ndarray) -> None:
    """Write unsigned `values` `[n]`, all below 2^bits, into `out`, uint8
    `[_bit_array_bytes(n, bits)]`."""
    plane = values.view(np.uint8).reshape(-1, values.itemsize).T
    padded = WORD_BYTES * _words_per_block(len(values), 1)
    for which in range(bits // 8):
        out[which * padded : which * padded + len(values)] = plane[which]
        out[which * padded + len(values) : (which + 1) * padded] = 0
    rest = bits % 8
    if not rest:
        return
    blocks, kept, _ = _split_bits(rest)
    words = _words_per_block(len(values), blocks)
    top = plane[bits // 8]
    if top.size != blocks * words * WORD_BYTES or not top.flags.c_contiguous:
        top = np.zeros(blocks * words * WORD_BYTES, np.uint8)
        top[: len(values)] = plane[bits // 8]
    source = top.view(np.uint64).reshape(blocks, words)
    target = out[bits // 8 * padded :].view(np.uint64).reshape(kept, words)
    spare = np.empty(min(words, CHUNK_WORDS), np.uint64)
    for at in range(0, words, CHUNK_WORDS):
        part = slice(at, min(at + CHUNK_WORDS, words))
        moved = spare[: part.stop - at]
        for block, into, shift, mask in _block_moves(rest):
            _shift_words(source[block, part], shift, moved)
            np.bitwise_and(moved, _repeat_byte_mask(mask), out=moved)
            before = source if block == kept else target
            np.bitwise_or(before[into, part], moved, out=target[into, part])


def _read_bits(data: np.ndarray, bits: int, count: int, dtype: np.dtype) -> np.ndarray:
    """Return the values that `_write_bits` was given, as `[count]` of an unsigned `dtype`."""
    padded = WORD_BYTES * _words_per_block(count, 1)
    rest = bits % 8
    top = np.zeros(0, np.uint8)
    if rest:
        blocks, kept, _ = _split_bits(rest)
        words = _words_per_block(count, blocks)
        source = data[bits // 8 * padded :].view(np.uint64).reshape(kept, words)
        target = np.empty((blocks, words), np.uint64)
        spare = np.empty(min(words, CHUNK_WORDS), np.uint64)
        for at in range(0, words, CHUNK_WORDS):
            part = slice(at, min(at + CHUNK_WORDS, words))
            moved = spare[: part.stop - at]
            np.bitwise_and(
                source[:, part], _repeat_byte_mask((1 << rest) - 1), out=target[:kept, part]
            )
            for block, into, shift, mask in _block_moves(rest):
                np.bitwise_and(source[into, part], _repeat_byte_mask(mask), out=moved)
                if not into:
                    _shift_words(moved, -shift, target[block, part])
                    continue
                _shift_words(moved, -shift, moved)
                np.bitwise_or(target[block, part], moved, out=target[block, part])
        top = target.view(np.uint8).reshape(-1)[:count]
        if dtype.itemsize == 1:
            return top.view(dtype)
    values = np.zeros(count, dtype)
    plane = values.view(np.uint8).reshape(-1, values.itemsize).T
    for which in range(bits // 8):
        plane[which] = data[which * padded : which * padded + count]
    if rest:
        plane[bits // 8] = top
    return values


def _shift_words(words: np.ndarray, up: int, out: np.ndarray) -> None:
    if up >= 0:
        np.left_shift(words, np.uint64(up), out=out)
    else:
        np.right_shift(words, np.uint64(-up), out=out)


def _repeat_byte_mask(mask: int) -> np.uint64:
    """Return the mask of a byte repeated for all eight bytes of a word."""
    return np.uint64(mask * 0x0101_0101_0101_0101)
