"""Files of records, each a few frames of bytes: the format of the spool, the quarantine and the
route files.

    magic (8) | frames (u32) | crc32 of the lengths (u32) | length of each frame (u64 ...) | frames

All integers are little-endian. Each frame is padded to 8 bytes, so that arrays mapped from the file
are aligned. The writer of a record decides what its frames contain and how they are checksummed.
"""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from r3async.world import Buffer, Files
from r3async.world.real import REAL_WORLD

RECORD_HEAD = struct.Struct("<8sII")
RECORD_ALIGNMENT = 8
MAX_RECORD_FRAMES = 2**20


@dataclass(frozen=True, slots=True)
class FramedRecord:
    """A whole record of a file, which begins at byte `offset`."""

    offset: int
    frames: list[memoryview]


@dataclass(frozen=True, slots=True)
class TornRecord:
    """The place in a file, byte `offset`, from which on it holds no valid
    record, and the reason."""

    offset: int
    reason: str


@dataclass(frozen=True)
class RecordFormat:
    """A kind of record file, identified by the 8 bytes `magic` with which each of
    its records begins."""

    magic: bytes

    def encode_record(self, frames: Sequence[Buffer]) -> list[bytes | memoryview]:
        """Return a record as buffers to be written one after the other. No frame is copied."""
        views = [memoryview(frame) for frame in frames]
        lengths = np.array([view.nbytes for view in views], "<u8").tobytes()
        pieces: list[bytes | memoryview] = [
            RECORD_HEAD.pack(self.magic, len(views), zlib.crc32(lengths)) + lengths
        ]
        for view in views:
            pieces.append(view)
            padding = -view.nbytes % RECORD_ALIGNMENT
            if padding:
                pieces.append(bytes(padding))
        return pieces

    def append_record(
        self,
        path: Path,
        frames: Sequence[Buffer],
        *,
        fsync: bool,
        valid_bytes: int | None = None,
        files: Files = REAL_WORLD.files,
    ) -> tuple[int, int]:
        """Append one record to a file, which is created if it is missing, and return the record's
        offset and length.

        `valid_bytes` is the length of the file's whole records, if known; anything that an earlier
        error left behind them is cut off first. Raises `OSError`; the file is then as long as
        before, if the disk allows it.
        """
        with files.open(path, create=True) as file:
            offset = file.size() if valid_bytes is None else valid_bytes
            if file.size() > offset:
                file.truncate(offset)
            try:
                length = file.append(self.encode_record(frames))
                if fsync:
                    file.fsync()
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(offset)
                raise
        return offset, length

    def iter_records(
        self, view: memoryview, offset: int = 0
    ) -> Iterator[FramedRecord | TornRecord]:
        """Yield all records of a file from byte `offset` on, and end with `TornRecord` at the first
        place without one.

        A record's frames lie within the file. Their contents are not checked: that is left
        to their reader.
        """
        while offset < len(view):
            problem = ""
            lengths = np.zeros(0, np.uint64)
            end = offset
            if len(view) - offset < RECORD_HEAD.size:
                problem = f"{len(view) - offset} bytes, less than the head of a record"
            else:
                magic, count, checksum = RECORD_HEAD.unpack_from(view, offset)
                first = offset + RECORD_HEAD.size + 8 * count
                if magic != self.magic:
                    problem = (
                        f"{bytes(magic)!r} is not the beginning of a record, which "
                        f"is {self.magic!r}"
                    )
                elif count > MAX_RECORD_FRAMES or first > len(view):
                    problem = f"the record ends before the lengths of its {count} frames"
                else:
                    table = view[offset + RECORD_HEAD.size : first]
                    lengths = np.frombuffer(table, "<u8")
                    if zlib.crc32(table) != checksum:
                        problem = "the lengths of the record's frames do not match their checksum"
                    elif (
                        end := first
                        + sum(-(-int(n) // RECORD_ALIGNMENT) * RECORD_ALIGNMENT for n in lengths)
                    ) > len(view):
                        problem = (
                            f"the record takes {end - offset} bytes, the file has "
                            f"{len(view) - offset} of them"
                        )
            if problem:
                yield TornRecord(offset, problem)
                return
            frames = []
            start = offset + RECORD_HEAD.size + 8 * len(lengths)
            for n in map(int, lengths):
                frames.append(view[start : start + n])
                start += -(-n // RECORD_ALIGNMENT) * RECORD_ALIGNMENT
            yield FramedRecord(offset, frames)
            offset = end


def map_file(
    path: Path, offset: int = 0, length: int | None = None, *, files: Files = REAL_WORLD.files
) -> memoryview:
    """Return `length` bytes of a file from `offset` on, read-only. They stay readable when the
    file is deleted."""
    with files.open(path) as file:
        return file.map_bytes(offset, length)
