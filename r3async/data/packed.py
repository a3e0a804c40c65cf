"""Packed routes, which take fewer bits than their expert ids. Pure; NumPy alone, on whole
columns at a time.

There are two packed forms, besides `plain`, which is the ids themselves.

Form `bits`: ids that are all below 2^b take b bits each, in their order. The ids are divided into
equal blocks. The contents of the last blocks are moved, a few bits at a time, into the bits that
the first blocks leave free, by masks and shifts of eight ids at once. For 128 experts, the last of
eight blocks goes into the highest bit of the other seven. Only the bits beyond whole bytes are
packed this way; each whole byte is a separate plane.

Form `dense`: each row is stored as a set, so it comes back sorted. The low bits of its sorted ids
are stored unchanged. Their high parts form a non-decreasing sequence of few possible values. Such
sequences are numbered (combinatorial number system), and the number is stored. 8 of 128 experts
take 8 x 3 bits, and 19 bits for the number of 8 values below 16: 43 bits in place of 64, where the
set itself has 40.4 bits of information.

A number is a sum over positions. It is encoded by look-ups in tables that each cover several
positions, and decoded by a single look-up.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import numpy as np

from r3async.data.routes import CHUNK_ROWS, iter_sorted_columns

RouteForm = Literal["plain", "bits", "dense"]

WORD_BYTES = 8
"""Bytes that are processed at a time, and to a multiple of which each part is padded."""
CHUNK_WORDS = 2**13
"""Number of words of each block that are processed at a time, so that all blocks stay
in a core's cache."""
MIN_PACKED_BYTES = 2**14
"""Bytes of ids from which on they are packed. Fewer stay as they are, because packing
has a fixed cost."""
MAX_NUMBERED_SEQUENCES = 2**20
"""Maximum number of sequences of high parts, each of which takes an entry of a table."""
MAX_DENSE_TOP_K = 64


class PackedRoutes:
    """Routes `[T, layers, top_k]` in one of the module's forms, which are unpacked each time
    that they are read.

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
        if self.form == "bits":
            return _read_bits(self.data, self.bits, math.prod(self.shape), self.dtype).reshape(
                self.shape
            )
        return _unpack_dense(self.data, self.bits, self.shape, self.dtype)


def pack_routes(rows: np.ndarray, form: RouteForm) -> PackedRoutes | np.ndarray:
    """Return `rows` `[T, layers, top_k]` (unsigned) in this form, or in a plainer one where this
    form saves nothing."""
    if form == "plain" or rows.nbytes < MIN_PACKED_BYTES:
        return rows
    rows = np.ascontiguousarray(rows, rows.dtype.newbyteorder("="))
    bits = max(1, int(rows.max()).bit_length())
    top_k = rows.shape[-1]
    if form == "dense" and top_k <= MAX_DENSE_TOP_K:
        code = _choose_set_code(bits, top_k)
        if code is not None:
            return PackedRoutes(
                "dense", bits, rows.shape, rows.dtype, _pack_dense(rows.reshape(-1, top_k), code)
            )
    if bits == 8 * rows.dtype.itemsize:
        return rows
    data = np.empty(packed_size("bits", bits, rows.shape), np.uint8)
    _write_bits(rows.reshape(-1), bits, data)
    return PackedRoutes("bits", bits, rows.shape, rows.dtype, data)


def packed_size(form: RouteForm, bits: int, shape: tuple[int, ...]) -> int:
    """Return the size of packed routes in bytes. Raises `ValueError` for a form that cannot
    hold such routes."""
    count = math.prod(shape)
    top_k = shape[-1]
    if form == "bits" and 1 <= bits <= 16:
        return _bit_array_bytes(count, bits)
    code = (
        _choose_set_code(bits, top_k)
        if form == "dense" and 1 <= bits <= 16 and 1 <= top_k <= MAX_DENSE_TOP_K
        else None
    )
    if code is None:
        raise ValueError(f"there are no {form} routes of {bits} bits and {top_k} experts a token")
    return _bit_array_bytes(count, code.low_bits) + _bit_array_bytes(
        count // top_k, code.number_bits
    )


# -- packing numbers of few bits -------------------------------------------------------------------


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


# -- packing rows as sets --------------------------------------------------------------------------


class _SetCode(NamedTuple):
    """A code for rows of `top_k` ids: `low_bits` bits of each id are stored unchanged, and the
    rest, which is below `high_values`, is numbered in `number_bits` bits."""

    top_k: int
    low_bits: int
    high_values: int
    number_bits: int

    @property
    def high_bits(self) -> int:
        """The number of bits of each value that is numbered."""
        return (self.high_values - 1).bit_length()


@functools.cache
def _choose_set_code(bits: int, top_k: int) -> _SetCode | None:
    """Return the shortest code for ids below 2^bits with tables of a bearable size; None if it
    would save nothing."""
    codes = []
    for low in range(bits):
        values = 1 << (bits - low)
        if bits - low <= 8:
            count = math.comb(values + top_k - 1, top_k)
            if count <= MAX_NUMBERED_SEQUENCES:
                codes.append(_SetCode(top_k, low, values, (count - 1).bit_length()))
    best = min(codes, key=lambda code: top_k * code.low_bits + code.number_bits, default=None)
    return best if best and top_k * best.low_bits + best.number_bits < top_k * bits else None


@functools.cache
def _number_tables(code: _SetCode) -> list[np.ndarray]:
    """Return tables for a few positions each: uint32, the part of these positions
    in a row's number.

    A table is indexed by the values at its positions, with that of the first position in the lowest
    bits. The number of values v_0 <= v_1 <= ... is the sum of C(v_i + i, i + 1).
    """
    together = max(1, 16 // code.high_bits)
    tables = []
    for first in range(0, code.top_k, together):
        some = range(first, min(first + together, code.top_k))
        index = np.arange(1 << (code.high_bits * len(some)))
        total = np.zeros(len(index), np.uint32)
        for place, i in enumerate(some):
            steps = np.array(
                [math.comb(value + i, i + 1) % 2**32 for value in range(code.high_values)],
                np.uint32,
            )
            total += steps[(index >> (code.high_bits * place)) % code.high_values]
        tables.append(total)
    return tables


@functools.cache
def _sequence_table(code: _SetCode, dtype: np.dtype) -> np.ndarray:
    """Return the values of each number, shifted to their place in an id, as `[numbers, top_k]`."""
    rest = np.arange(math.comb(code.high_values + code.top_k - 1, code.top_k))
    table = np.empty((len(rest), code.top_k), dtype)
    for i in reversed(range(code.top_k)):
        steps = np.array([math.comb(value + i, i + 1) for value in range(code.high_values)], object)
        steps = np.minimum(steps, MAX_NUMBERED_SEQUENCES).astype(np.int64)
        value = np.searchsorted(steps, rest, side="right") - 1
        table[:, i] = value << code.low_bits
        rest = rest - steps[value]
    return table


def _pack_dense(rows: np.ndarray, code: _SetCode) -> np.ndarray:
    """Pack `rows` `[n, K]` as uint8: the low bits of all first ids, of all second ones, and so on;
    then the numbers."""
    count = len(rows)
    lows = np.empty((code.top_k, count), rows.dtype)
    numbers = np.empty(count, np.uint32)
    for part, columns in iter_sorted_columns(rows):
        for kept, column in zip(lows, columns, strict=True):
            np.bitwise_and(column, rows.dtype.type((1 << code.low_bits) - 1), out=kept[part])
        highs = iter([column >> code.low_bits for column in columns])
        numbers[part] = sum(
            _look_up_numbers(table, highs, code.high_bits) for table in _number_tables(code)
        )
    at = _bit_array_bytes(lows.size, code.low_bits)
    data = np.empty(at + _bit_array_bytes(count, code.number_bits), np.uint8)
    _write_bits(lows.reshape(-1), code.low_bits, data[:at])
    _write_bits(numbers, code.number_bits, data[at:])
    return data


def _look_up_numbers(table: np.ndarray, highs: Iterable[np.ndarray], bits: int) -> Any:
    """Return the entries of a table of `_number_tables` for the next columns, which are
    taken from `highs`."""
    places = range((len(table) - 1).bit_length() // bits)
    index = np.zeros((), np.uint16)
    for place, column in zip(places, highs, strict=False):
        index = index | column.astype(np.uint16) << np.uint16(bits * place)
    return table.take(index)


def _unpack_dense(
    data: np.ndarray, bits: int, shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    code = _choose_set_code(bits, shape[-1])
    assert code is not None, "refused when it was made"
    rows = np.empty((math.prod(shape[:-1]), code.top_k), dtype)
    at = _bit_array_bytes(rows.size, code.low_bits)
    lows = _read_bits(data[:at], code.low_bits, rows.size, dtype).reshape(code.top_k, -1)
    numbers = _read_bits(data[at:], code.number_bits, len(rows), np.dtype(np.uint32))
    table = _sequence_table(code, dtype)
    for start in range(0, len(rows), CHUNK_ROWS):
        part = slice(start, start + CHUNK_ROWS)
        # Damaged data may hold a number that does not exist: it becomes the last one.
        table.take(numbers[part], axis=0, out=rows[part], mode="clip")
        np.bitwise_or(rows[part], lows[:, part].T, out=rows[part])
    return rows.reshape(shape)
