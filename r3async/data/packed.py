"""Routes in fewer bits than their ids have, in the forms that `PackedRoutes` names. Pure; NumPy alone, whole columns at a time.

`bits`: ids that are all below 2^b, in b bits each, in their order. The ids are divided into equal blocks. What the last blocks
hold goes, a few bits at a time, into the bits that the first ones leave free, by masks and shifts of eight ids at once: for 128
experts, the last of eight blocks into the highest bit of the other seven. Bits beyond whole bytes only; whole bytes are planes
of their own.

`dense`: each row as the set that it is, so it comes back sorted. The low bits of its sorted ids are kept as they are. Their high
parts are a sequence that never falls, of few values: such sequences are numbered (combinatorial number system), and the number
is kept. 8 of 128 experts: 8 x 3 bits, and 19 for the number of 8 values below 16, 43 bits in place of 64; their set has 40.4.

A number is a sum over positions, so that it is looked up in tables for some of them at a time; it is read by one look-up.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import numpy as np

from r3async.data.routes import CHUNK, sorted_columns

Form = Literal["plain", "bits", "dense"]

WORD = 8
"""Bytes that are worked on at a time, and to which each part is padded."""
WORDS = 2**13
"""Of each block, at a time: all blocks then stay in a core's cache."""
MIN_BYTES = 2**14
"""Fewer bytes of ids than this stay as they are: packing has costs that do not depend on how many there are."""
MAX_NUMBERS = 2**20
"""Sequences of high parts that are numbered: an entry of a table each."""
MAX_TOP_K = 64


class PackedRoutes:
    """Routes `[T, layers, top_k]` in one of the forms above; `bits`: of the largest id. Unpacked whenever they are read.

    Any `data` (uint8, of `packed_size` bytes, aligned to 8) is routes of this shape, with ids below 2^bits: there is nothing
    to be refused when they are read. Raises `ValueError` for another size, or for a form that does not have such routes.
    """

    __slots__ = ("bits", "data", "dtype", "form", "shape")

    def __init__(self, form: Form, bits: int, shape: tuple[int, ...], dtype: np.dtype, data: np.ndarray):
        if (size := packed_size(form, bits, shape)) != data.nbytes:
            raise ValueError(
                f"{form} routes of shape {list(shape)} in {bits} bits take {size} bytes, not {data.nbytes}"
            )
        self.form, self.bits, self.shape, self.dtype, self.data = form, bits, shape, dtype, data

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        """`[n, layers, top_k]`; all of them are unpacked for it, unless it is none."""
        if len(range(*rows.indices(len(self)))):
            return self.unpack()[rows]
        return np.empty((0, *self.shape[1:]), self.dtype)

    def unpack(self) -> np.ndarray:
        """A new array."""
        if self.form == "bits":
            return _get(self.data, self.bits, math.prod(self.shape), self.dtype).reshape(self.shape)
        return _unpack_dense(self.data, self.bits, self.shape, self.dtype)


def pack_routes(rows: np.ndarray, form: Form) -> PackedRoutes | np.ndarray:
    """`rows` `[T, layers, top_k]` (unsigned) in this form, or in a plainer one where it has nothing to gain."""
    if form == "plain" or rows.nbytes < MIN_BYTES:
        return rows
    rows = np.ascontiguousarray(rows, rows.dtype.newbyteorder("="))
    bits, top_k = max(1, int(rows.max()).bit_length()), rows.shape[-1]
    if form == "dense" and top_k <= MAX_TOP_K and (code := _code(bits, top_k)) is not None:
        return PackedRoutes("dense", bits, rows.shape, rows.dtype, _pack_dense(rows.reshape(-1, top_k), code))
    if bits == 8 * rows.dtype.itemsize:
        return rows
    data = np.empty(packed_size("bits", bits, rows.shape), np.uint8)
    _put(rows.reshape(-1), bits, data)
    return PackedRoutes("bits", bits, rows.shape, rows.dtype, data)


def packed_size(form: Form, bits: int, shape: tuple[int, ...]) -> int:
    """Bytes. Raises `ValueError` for a form that does not have such routes."""
    count, top_k = math.prod(shape), shape[-1]
    if form == "bits" and 1 <= bits <= 16:
        return _size(count, bits)
    code = _code(bits, top_k) if form == "dense" and 1 <= bits <= 16 and 1 <= top_k <= MAX_TOP_K else None
    if code is None:
        raise ValueError(f"there are no {form} routes of {bits} bits and {top_k} experts a token")
    return _size(count, code.low) + _size(count // top_k, code.number_bits)


# -- numbers of few bits ------------------------------------------------------------------------------------------------


class _Split(NamedTuple):
    """How `bits` < 8 of each byte are kept: of every `blocks` blocks `kept` stay, and what the others hold goes into the bits
    that these leave free, `unit` bits at a time."""

    blocks: int
    kept: int
    unit: int


def _split(bits: int) -> _Split:
    unit = math.gcd(bits, 8)
    return _Split(8 // unit, bits // unit, unit)


def _words(count: int, blocks: int) -> int:
    """Of a block."""
    return -(-count // (blocks * WORD))


def _size(count: int, bits: int) -> int:
    """Bytes of `count` numbers of `bits` bits each."""
    size = bits // 8 * WORD * _words(count, 1)
    if rest := bits % 8:
        split = _split(rest)
        size += split.kept * WORD * _words(count, split.blocks)
    return size


@functools.cache
def _moves(bits: int) -> list[tuple[int, int, int, int]]:
    """For each unit of a block that is not kept: which block, into which one it goes, how far it is shifted up to its place
    there (down, if negative), and which bits of that place's bytes it is. Blocks in order, and the units of each."""
    blocks, kept, unit = _split(bits)
    moves = []
    for source, target in itertools.product(range(blocks - kept), range(kept)):
        place = bits + source * unit
        moves.append((kept + source, target, place - target * unit, ((1 << unit) - 1) << place))
    return moves


def _put(values: np.ndarray, bits: int, out: np.ndarray) -> None:
    """Unsigned `values` `[n]`, all below 2^bits, into `out`, uint8 `[_size]`."""
    plane = values.view(np.uint8).reshape(-1, values.itemsize).T
    padded = WORD * _words(len(values), 1)
    for which in range(bits // 8):
        out[which * padded : which * padded + len(values)] = plane[which]
        out[which * padded + len(values) : (which + 1) * padded] = 0
    if not (rest := bits % 8):
        return
    blocks, kept, _ = _split(rest)
    words = _words(len(values), blocks)
    top = plane[bits // 8]
    if top.size != blocks * words * WORD or not top.flags.c_contiguous:
        top = np.zeros(blocks * words * WORD, np.uint8)
        top[: len(values)] = plane[bits // 8]
    source = top.view(np.uint64).reshape(blocks, words)
    target = out[bits // 8 * padded :].view(np.uint64).reshape(kept, words)
    spare = np.empty(min(words, WORDS), np.uint64)
    for at in range(0, words, WORDS):
        part = slice(at, min(at + WORDS, words))
        moved = spare[: part.stop - at]
        for block, into, shift, mask in _moves(rest):
            _shift(source[block, part], shift, moved)
            np.bitwise_and(moved, _everywhere(mask), out=moved)
            before = source if block == kept else target
            np.bitwise_or(before[into, part], moved, out=target[into, part])


def _get(data: np.ndarray, bits: int, count: int, dtype: np.dtype) -> np.ndarray:
    """`[count]` of an unsigned `dtype`: what `_put` was given."""
    padded = WORD * _words(count, 1)
    rest = bits % 8
    top = np.zeros(0, np.uint8)
    if rest:
        blocks, kept, _ = _split(rest)
        words = _words(count, blocks)
        source = data[bits // 8 * padded :].view(np.uint64).reshape(kept, words)
        target = np.empty((blocks, words), np.uint64)
        spare = np.empty(min(words, WORDS), np.uint64)
        for at in range(0, words, WORDS):
            part = slice(at, min(at + WORDS, words))
            moved = spare[: part.stop - at]
            np.bitwise_and(source[:, part], _everywhere((1 << rest) - 1), out=target[:kept, part])
            for block, into, shift, mask in _moves(rest):
                np.bitwise_and(source[into, part], _everywhere(mask), out=moved)
                if not into:
                    _shift(moved, -shift, target[block, part])
                    continue
                _shift(moved, -shift, moved)
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


def _shift(words: np.ndarray, up: int, out: np.ndarray) -> None:
    if up >= 0:
        np.left_shift(words, np.uint64(up), out=out)
    else:
        np.right_shift(words, np.uint64(-up), out=out)


def _everywhere(mask: int) -> np.uint64:
    """A mask of a byte, for all eight."""
    return np.uint64(mask * 0x0101_0101_0101_0101)


# -- rows as sets -------------------------------------------------------------------------------------------------------


class _Code(NamedTuple):
    """Rows of `top_k` ids: `low` bits of each are kept as they are, the rest, below `values`, is numbered in `number_bits`."""

    top_k: int
    low: int
    values: int
    number_bits: int

    @property
    def high(self) -> int:
        """Bits of what is numbered."""
        return (self.values - 1).bit_length()


@functools.cache
def _code(bits: int, top_k: int) -> _Code | None:
    """The shortest for ids below 2^bits with tables of a bearable size; None if no set is shorter than its ids."""
    codes = []
    for low in range(bits):
        values = 1 << (bits - low)
        if bits - low <= 8 and (count := math.comb(values + top_k - 1, top_k)) <= MAX_NUMBERS:
            codes.append(_Code(top_k, low, values, (count - 1).bit_length()))
    best = min(codes, key=lambda code: top_k * code.low + code.number_bits, default=None)
    return best if best and top_k * best.low + best.number_bits < top_k * bits else None


@functools.cache
def _numbering(code: _Code) -> list[np.ndarray]:
    """For some positions each, uint32 by their values (the first one's lowest): their part of a row's number.

    The number of values v_0 <= v_1 <= ... is the sum of C(v_i + i, i + 1).
    """
    together = max(1, 16 // code.high)
    tables = []
    for first in range(0, code.top_k, together):
        some = range(first, min(first + together, code.top_k))
        index = np.arange(1 << (code.high * len(some)))
        total = np.zeros(len(index), np.uint32)
        for place, i in enumerate(some):
            steps = np.array([math.comb(value + i, i + 1) % 2**32 for value in range(code.values)], np.uint32)
            total += steps[(index >> (code.high * place)) % code.values]
        tables.append(total)
    return tables


@functools.cache
def _sequences(code: _Code, dtype: np.dtype) -> np.ndarray:
    """`[numbers, top_k]`: the values of each number, where they belong in an id."""
    rest = np.arange(math.comb(code.values + code.top_k - 1, code.top_k))
    table = np.empty((len(rest), code.top_k), dtype)
    for i in reversed(range(code.top_k)):
        steps = np.array([math.comb(value + i, i + 1) for value in range(code.values)], object)
        steps = np.minimum(steps, MAX_NUMBERS).astype(np.int64)
        value = np.searchsorted(steps, rest, side="right") - 1
        table[:, i] = value << code.low
        rest = rest - steps[value]
    return table


def _pack_dense(rows: np.ndarray, code: _Code) -> np.ndarray:
    """`rows` `[n, K]`. uint8: the low bits of all first ids, then of all second ones, ...; then the numbers."""
    count = len(rows)
    lows = np.empty((code.top_k, count), rows.dtype)
    numbers = np.empty(count, np.uint32)
    for part, columns in sorted_columns(rows):
        for kept, column in zip(lows, columns, strict=True):
            np.bitwise_and(column, rows.dtype.type((1 << code.low) - 1), out=kept[part])
        highs = iter([column >> code.low for column in columns])
        numbers[part] = sum(_looked_up(table, highs, code.high) for table in _numbering(code))
    at = _size(lows.size, code.low)
    data = np.empty(at + _size(count, code.number_bits), np.uint8)
    _put(lows.reshape(-1), code.low, data[:at])
    _put(numbers, code.number_bits, data[at:])
    return data


def _looked_up(table: np.ndarray, highs: Iterable[np.ndarray], bits: int) -> Any:
    """What a table of `_numbering` says of the next columns."""
    places = range((len(table) - 1).bit_length() // bits)
    index = np.zeros((), np.uint16)
    for place, column in zip(places, highs, strict=False):
        index = index | column.astype(np.uint16) << np.uint16(bits * place)
    return table.take(index)


def _unpack_dense(data: np.ndarray, bits: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    code = _code(bits, shape[-1])
    assert code is not None, "refused when it was made"
    rows = np.empty((math.prod(shape[:-1]), code.top_k), dtype)
    at = _size(rows.size, code.low)
    lows = _get(data[:at], code.low, rows.size, dtype).reshape(code.top_k, -1)
    numbers = _get(data[at:], code.number_bits, len(rows), np.dtype(np.uint32))
    table = _sequences(code, dtype)
    for start in range(0, len(rows), CHUNK):
        part = slice(start, start + CHUNK)
        # A number that there is not is what damaged data may hold: it becomes the last one.
        table.take(numbers[part], axis=0, out=rows[part], mode="clip")
        np.bitwise_or(rows[part], lows[:, part].T, out=rows[part])
    return rows.reshape(shape)
