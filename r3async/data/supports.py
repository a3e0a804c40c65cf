"""Compact sets of the token ids that could be sampled, one for each sampled token. Pure; whole
columns at a time.

Top-p, top-k and min-p leave a few tokens of the vocabulary, which share all probability. The
learner renormalises over the same set, the *support* of the token. A set is stored in the shortest
of three forms, so that it never takes more than a bit for each token of the vocabulary: its ids,
the ids that it lacks, or a bitmap. Ids ascend, and each is stored as the number of ids skipped
before it, in seven bits a byte; its last byte is below 128.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

FORM_NONE, FORM_LISTED, FORM_EXCEPT, FORM_BITS = range(4)
"""Forms of a set, in the lowest two bits of its head: no set was recorded; the ids follow;
the ids that are not in it follow; a bitmap follows. The head's other bits are the number of
bytes that follow."""
MAX_NUMBER_BYTES = 4
"""Maximum number of bytes of a number: ids are below 2^28."""


class RowIds(NamedTuple):
    """Ids of some sets, one after the other.

    Attributes:
        rows: Row of each id, int64 `[n]`, ascending.
        ids: Ids, int64 `[n]`.
    """

    rows: np.ndarray
    ids: np.ndarray


class SupportSets:
    """Sets of token ids, one for each of T tokens.

    Raises `ValueError` for heads and data that do not fit each other, or numbers that do not end,
    so that every instance can be read.

    Args:
        heads: Head of each set (see `FORM_NONE`), uint32 `[T]`.
        data: Bytes that follow the heads, uint8.
    """

    __slots__ = ("byte_edges", "data", "heads")

    dtype = np.dtype(np.uint8)
    ndim = 1

    def __init__(self, heads: np.ndarray, data: np.ndarray):
        self.heads = heads
        self.data = data
        self.byte_edges = np.zeros(len(heads) + 1, np.int64)
        """Offsets of each set's bytes in `data`, int64 `[T + 1]`."""
        np.cumsum(heads >> 2, out=self.byte_edges[1:])
        if self.byte_edges[-1] != len(data):
            raise ValueError(f"sets of {self.byte_edges[-1]} bytes have {len(data)}")
        self._check_encoding()

    def _check_encoding(self) -> None:
        form = self.heads & 3
        size = self.heads >> 2
        if (size[form == FORM_NONE] > 0).any():
            raise ValueError("a set that nobody recorded has bytes")
        numbers = ((form == FORM_LISTED) | (form == FORM_EXCEPT)) & (size > 0)
        if (self.data[self.byte_edges[1:][numbers] - 1] > 127).any():
            raise ValueError("the last number of a set does not end")
        # A number is too long if `MAX_NUMBER_BYTES` bytes in a row say that another one follows.
        on = (self.data > 127) & np.repeat(form != FORM_BITS, size)
        run = on[MAX_NUMBER_BYTES - 1 :].copy()
        for back in range(1, MAX_NUMBER_BYTES):
            run &= on[MAX_NUMBER_BYTES - 1 - back : len(on) - back]
        if run.any():
            raise ValueError(f"a number of a set has more than {MAX_NUMBER_BYTES} bytes")

    # -- construction ------------------------------------------------------------------------------

    @staticmethod
    def unrecorded(length: int) -> SupportSets:
        """Return the column of `length` tokens that nobody sampled, which have no sets."""
        return SupportSets(np.zeros(length, np.uint32), np.zeros(0, np.uint8))

    @staticmethod
    def from_bitmaps(bits: np.ndarray, vocab_size: int) -> SupportSets:
        """Return the sets of bitmaps, uint8 `[T, ceil(vocab_size / 8)]`.

        The lowest bit of a byte comes first. Bits beyond the vocabulary are 0.
        """
        width = bits.shape[1]
        words = _bits_to_words(bits)
        counts = np.bitwise_count(words).sum(axis=1, dtype=np.int64)
        most = 2 * counts > vocab_size
        listed = np.minimum(counts, vocab_size - counts)
        short = listed < width
        if most.any():
            others = ~bits[most]
            others[:, -1:] &= (1 << (vocab_size - 8 * (width - 1))) - 1
            words = words.copy()
            words[most] = _bits_to_words(others)
        where = np.flatnonzero(short)
        found = _ids_from_words(words if short.all() else words[where])
        lengths, numbers = _encode_gaps(found, len(where))
        kept = lengths < width
        heads = np.full(len(bits), width << 2 | FORM_BITS, np.uint32)
        heads[where[kept]] = (
            lengths[kept] << 2 | np.where(most[where[kept]], FORM_EXCEPT, FORM_LISTED)
        ).astype(np.uint32)
        if kept.all() and short.all():
            return SupportSets(heads, numbers)
        edges = np.zeros(len(heads) + 1, np.int64)
        np.cumsum(heads >> 2, out=edges[1:])
        data = np.empty(edges[-1], np.uint8)
        plain = (heads & 3) == FORM_BITS
        data[np.repeat(plain, heads >> 2)] = bits[plain].reshape(-1)
        data[np.repeat(~plain, heads >> 2)] = numbers[np.repeat(kept, lengths)]
        return SupportSets(heads, data)

    @staticmethod
    def from_ids(ids: np.ndarray, edges: np.ndarray, vocab_size: int) -> SupportSets:
        """Return the sets of `ids`, int `[n]`: set t has the ids
        `edges[t]:edges[t + 1]`, ascending."""
        bits = np.zeros((len(edges) - 1, -(-vocab_size // 8)), np.uint8)
        rows = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
        np.bitwise_or.at(bits, (rows, ids >> 3), (1 << (ids & 7)).astype(np.uint8))
        return SupportSets.from_bitmaps(bits, vocab_size)

    @staticmethod
    def from_id_lists(ids: np.ndarray, edges: np.ndarray) -> SupportSets:
        """Return the sets as `from_ids` does, for small sets of any vocabulary: all are stored
        as lists of ids."""
        rows = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
        lengths, data = _encode_gaps(RowIds(rows, ids), len(edges) - 1)
        return SupportSets((lengths << 2 | FORM_LISTED).astype(np.uint32), data)

    @staticmethod
    def concat(parts: Sequence[SupportSets]) -> SupportSets:
        if not parts:
            return SupportSets.unrecorded(0)
        return SupportSets(
            np.concatenate([p.heads for p in parts]), np.concatenate([p.data for p in parts])
        )

    @staticmethod
    def from_parts(length: int, parts: Sequence[tuple[int, SupportSets]]) -> SupportSets:
        """Return the sets of `length` tokens, of which only those in `parts` have any.

        Each part begins at its given index; parts are in order and do not overlap.
        """
        heads = np.zeros(length, np.uint32)
        for start, part in parts:
            heads[start : start + len(part)] = part.heads
        return SupportSets(
            heads, np.concatenate([np.zeros(0, np.uint8), *(part.data for _, part in parts)])
        )

    @staticmethod
    def decode(length: int, encoded: Any) -> SupportSets:
        """Return the `length` sets that `encode` encoded. Raises `ValueError` for other bytes."""
        data = np.frombuffer(encoded, np.uint8)
        if not len(data):
            return SupportSets.unrecorded(length)
        ends = np.flatnonzero(data < 128)[:length]
        if len(ends) < length:
            raise ValueError(f"{len(ends)} heads of {length} sets")
        head = data[: int(ends[-1]) + 1 if length else 0]
        if (np.diff(ends, prepend=-1) > MAX_NUMBER_BYTES).any():
            raise ValueError(f"a head of a set has more than {MAX_NUMBER_BYTES} bytes")
        return SupportSets(_decode_varints(head).astype(np.uint32), data[len(head) :])

    def encode(self) -> np.ndarray:
        """Return the sets as uint8: the heads as numbers, then the data; empty if no
        token has a set."""
        if not self.heads.any():
            return self.data
        return np.concatenate([_encode_varints(self.heads.astype(np.int64))[1], self.data])

    # -- as a column -------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        return self.heads.shape

    @property
    def nbytes(self) -> int:
        return self.heads.nbytes + self.data.nbytes

    def __len__(self) -> int:
        return len(self.heads)

    def __getitem__(self, rows: slice) -> SupportSets:
        start, stop, step = rows.indices(len(self))
        if step != 1:
            return self.take_rows(np.arange(start, stop, step))
        return SupportSets(
            self.heads[start:stop],
            self.data[self.byte_edges[start] : self.byte_edges[max(start, stop)]],
        )

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, SupportSets)
            and np.array_equal(self.heads, other.heads)
            and np.array_equal(self.data, other.data)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Supports({len(self)} tokens, {len(self.data)} bytes)"

    def take_rows(self, rows: np.ndarray) -> SupportSets:
        """Return the sets of `rows`, int `[n]`."""
        heads = self.heads[rows]
        return SupportSets(heads, self.data[_concat_ranges(self.byte_edges[:-1][rows], heads >> 2)])

    def tolist(self) -> list[list[int] | None]:
        """Return the sets for people to read.

        Each is the ids of the set, or `-1 - id` for each id that it lacks if it has most; None if
        no set was recorded.
        """
        out: list[list[int] | None] = [None] * len(self)
        for row, form in enumerate((self.heads & 3).tolist()):
            part = self[row : row + 1]
            if form == FORM_BITS:
                out[row] = _ids_from_words(_bits_to_words(part.data[None])).ids.tolist()
            elif form:
                ids = part.encoded_ids().ids
                out[row] = (ids if form == FORM_LISTED else -1 - ids).tolist()
        return out

    # -- reading -----------------------------------------------------------------------------------

    @property
    def recorded_mask(self) -> np.ndarray:
        """The mask of the tokens that have a set, bool `[T]`."""
        return (self.heads & 3) != FORM_NONE

    @property
    def complement_mask(self) -> np.ndarray:
        """The mask of the tokens whose `encoded_ids` are the ids not in their set, bool `[T]`."""
        return (self.heads & 3) == FORM_EXCEPT

    def encoded_ids(self) -> RowIds:
        """Return the ids that are stored as such, of all sets that have any."""
        form = self.heads & 3
        size = self.heads >> 2
        written = form != FORM_BITS
        data = self.data if written.all() else self.data[np.repeat(written, size)]
        gaps = _decode_varints(data)
        ends = np.zeros(len(data) + 1, np.int64)
        np.cumsum(data < 128, out=ends[1:])
        edges = np.zeros(len(self) + 1, np.int64)
        np.cumsum(np.where(written, size, 0), out=edges[1:])
        counts = np.diff(ends[edges])
        rows = np.repeat(np.arange(len(self)), counts)
        total = np.cumsum(gaps + 1)
        before = np.concatenate([[0], total])[ends[edges[:-1]]]
        return RowIds(rows, total - 1 - before[rows])

    def iter_bitmaps(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the sets stored as bitmaps, by width: their rows, int64 `[m]`, and the bitmaps,
        uint8 `[m, width]`."""
        size = np.where((self.heads & 3) == FORM_BITS, self.heads >> 2, 0)
        for width in np.unique(size[size > 0]).tolist():
            (rows,) = np.nonzero(size == width)
            yield (
                rows,
                self.data[_concat_ranges(self.byte_edges[:-1][rows], size[rows])].reshape(
                    len(rows), width
                ),
            )

    def contains_ids(self, ids: np.ndarray) -> np.ndarray:
        """Return bool `[T]`: whether each of `ids`, int `[T]` and not negative, is in its set;
        True without a set."""
        written = self.encoded_ids()
        named = np.zeros(len(self), bool)
        named[written.rows[written.ids == ids[written.rows]]] = True
        inside = named ^ self.complement_mask | ~self.recorded_mask
        inside[(self.heads & 3) == FORM_BITS] = False
        for rows, bits in self.iter_bitmaps():
            byte = ids[rows] >> 3
            here = byte < bits.shape[1]
            found = bits[np.arange(len(rows)), np.where(here, byte, 0)] >> (ids[rows] & 7) & 1
            inside[rows] = here & (found > 0)
        return inside

    def fits_vocab(self, vocab_size: int) -> np.ndarray:
        """Return bool `[T]`: whether all ids that are named are below `vocab_size`."""
        written = self.encoded_ids()
        good = np.ones(len(self), bool)
        good[written.rows[written.ids >= vocab_size]] = False
        for rows, bits in self.iter_bitmaps():
            last = vocab_size - 8 * (bits.shape[1] - 1)
            good[rows] = (bits[:, -1] >> last == 0) if 0 < last < 8 else last == 8
        return good

    def to_dense_mask(self, vocab_size: int) -> np.ndarray:
        """Return the sets as bool `[T, vocab_size]`; all True for tokens without a set."""
        written = self.encoded_ids()
        named = np.zeros((len(self), vocab_size), bool)
        named[written.rows, written.ids] = True
        inside = named ^ (self.complement_mask | ~self.recorded_mask)[:, None]
        for rows, bits in self.iter_bitmaps():
            inside[rows] = np.unpackbits(bits, axis=1, count=vocab_size, bitorder="little") > 0
        return inside


def _bits_to_words(bits: np.ndarray) -> np.ndarray:
    """Return uint8 `[T, width]` as uint64 `[T, ceil(width / 8)]`; the lowest bit of the first
    byte is the lowest."""
    extra = -bits.shape[1] % 8
    return np.ascontiguousarray(np.pad(bits, ((0, 0), (0, extra))) if extra else bits).view("<u8")


def _ids_from_words(words: np.ndarray) -> RowIds:
    """Return the ids of the bits that are set in uint64 `[T, W]`."""
    flat = words.reshape(-1)
    where = np.flatnonzero(flat)
    at, bit = np.nonzero(
        np.unpackbits(flat[where].view(np.uint8).reshape(-1, 8), axis=1, bitorder="little")
    )
    rows, word = np.divmod(where[at], max(1, words.shape[1]))
    return RowIds(rows, 64 * word + bit)


def _encode_gaps(sets: RowIds, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of bytes that each of `length` sets takes, int64, and these bytes."""
    first = np.diff(sets.rows, prepend=-1) > 0
    gaps = np.where(first, sets.ids, np.diff(sets.ids, prepend=0) - 1)
    sizes, data = _encode_varints(gaps)
    lengths = np.bincount(sets.rows, sizes, length).astype(np.int64)
    return lengths, data


def _encode_varints(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of bytes of each number, and all bytes.

    A byte holds seven bits, the lowest first, plus 128 if more bytes follow.
    """
    sizes = np.ones(len(numbers), np.int64)
    for i in range(1, MAX_NUMBER_BYTES):
        sizes += numbers >= 1 << 7 * i
    starts = np.cumsum(sizes) - sizes
    data = np.empty(sizes.sum(), np.uint8)
    for i in range(MAX_NUMBER_BYTES):
        longer = sizes > i
        more = (sizes[longer] > i + 1) << 7
        data[starts[longer] + i] = numbers[longer] >> 7 * i & 127 | more
    return sizes, data


def _decode_varints(data: np.ndarray) -> np.ndarray:
    """Return the numbers that `_encode_varints` encoded, int64. None may have more than
    `MAX_NUMBER_BYTES` bytes."""
    ends = np.flatnonzero(data < 128)
    starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
    values = np.zeros(len(ends), np.int64)
    for i in range(MAX_NUMBER_BYTES):
        here = starts + i <= ends
        values[here] |= (data[starts[here] + i].astype(np.int64) & 127) << 7 * i
    return values


def _concat_ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the indices `starts[i] .. starts[i] + sizes[i] - 1` of each i, one after
    the other, int64."""
    sizes = sizes.astype(np.int64)
    before = np.cumsum(sizes) - sizes
    return np.repeat(starts - before, sizes) + np.arange(sizes.sum())
