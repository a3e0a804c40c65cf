"""The requests of one model that were acknowledged, and their answers, so that a server that is
killed does them when it starts again: a file each.

They survive the process, not a machine that loses its power: nothing is synced.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeVar

import msgspec

from r3async.tinker.protocol import Answer
from r3async.untrusted import MalformedError, decode_msgpack
from r3async.world import Files
from r3async.world.files import make_directory, read_file, write_atomically

_FILE_NAME = re.compile(r"(\d+)\.(request|answer)")


class TakenRequest(msgspec.Struct, frozen=True):
    """A request as it came. `kind` is its path."""

    kind: str
    body: bytes
    protobuf: bool


Stored = TypeVar("Stored", TakenRequest, Answer)
_ENDINGS = {TakenRequest: "request", Answer: "answer"}


class RequestFiles:
    """The requests of one model, by number. All methods block."""

    def __init__(self, directory: Path, *, files: Files):
        self._directory = directory
        self._disk = files

    def write(self, number: int, stored: TakenRequest | Answer) -> None:
        """Raises `OSError`."""
        if number == 0:
            make_directory(self._directory, files=self._disk)
        path = self._locate(number, type(stored))
        write_atomically(path, [msgspec.msgpack.encode(stored)], fsync=False, files=self._disk)

    def read(self, number: int, kind: type[Stored]) -> Stored | None:
        """Return the request or answer of a number; None if there is none."""
        try:
            data = read_file(self._locate(number, kind), files=self._disk)
            return decode_msgpack(data, kind)
        except (FileNotFoundError, MalformedError):
            return None

    def list_numbers(self, kind: type[TakenRequest | Answer]) -> list[int]:
        found = map(_FILE_NAME.fullmatch, self._disk.list_names(self._directory))
        return sorted(int(match[1]) for match in found if match and match[2] == _ENDINGS[kind])

    def remove(self, number: int, kind: type[TakenRequest | Answer]) -> None:
        self._disk.remove(self._locate(number, kind))

    def _locate(self, number: int, kind: type[TakenRequest | Answer]) -> Path:
        return self._directory / f"{number}.{_ENDINGS[kind]}"
