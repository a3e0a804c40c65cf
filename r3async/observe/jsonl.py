"""Append-only files of JSON lines: several processes may append to one file, and any of them may die while it does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec


class LineFile:
    """Appends whole lines, each with one write to an `O_APPEND` descriptor: lines of several processes never mix.

    Opening ends a line that a killed process left torn, so that ours does not continue it. Nothing is buffered; a
    written line survives the death of the process (not of the machine).
    """

    __slots__ = ("_fd", "path")

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")

    def append(self, line: bytes) -> None:
        os.write(self._fd, line + b"\n")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_objects(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file, in order. A torn or foreign line is passed over; a missing file has none."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            try:
                value = msgspec.json.decode(line)
            except msgspec.MsgspecError:
                continue
            if isinstance(value, dict):
                yield value
