"""Files of JSON lines, read. They are written by `AppendFile`: several processes may append to one, and be killed meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from r3async.world import File, Files
from r3async.world.real import REAL

BLOCK = 2**20


def read_objects(path: Path, *, files: Files = REAL.files) -> Iterator[dict[str, Any]]:
    """The objects of a file, in order. A torn or foreign line is passed over; a missing file has none."""
    try:
        file = files.open(path)
    except FileNotFoundError:
        return
    with file:
        for line in _lines(file):
            try:
                value = msgspec.json.decode(line)
            except msgspec.MsgspecError:
                continue
            if isinstance(value, dict):
                yield value


def _lines(file: File) -> Iterator[bytes]:
    at, rest = 0, b""
    while block := file.read(at, BLOCK):
        at += len(block)
        *lines, rest = (rest + block).split(b"\n")
        yield from lines
    yield rest
