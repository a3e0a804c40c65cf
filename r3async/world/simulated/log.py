"""What happened in a simulation: one line an event, the same in every Python process for the same seed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

BATCH = 4096
"""Lines that are hashed at once."""


def shown(value: Any) -> str:
    """A value as a line has it: without spaces, and without what differs from one Python process to the next."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(shown, value))}]"
    text = str(value)
    return text if text.isprintable() and text and not (set(text) & {" ", '"', "="}) else json.dumps(text)


class EventLog:
    """`event` is for people: kept in `lines`, and told to `listeners`. `detail` is what else may not differ between two runs of a
    seed: it goes into the hash, and into `lines` only if `details` is set."""

    def __init__(self, time: Callable[[], float], *, details: bool = False):
        self.lines: list[str] = []
        self.listeners: list[Callable[[float, str, str, dict[str, Any]], None]] = []
        """Called with seconds, who, what and the fields."""
        self.details = details
        self._time, self._hash = time, hashlib.blake2b(digest_size=16)
        self._batch: list[str] = []

    def event(self, who: str, what: str, **fields: Any) -> None:
        """`fields`: numbers, short texts, lists of them. Neither addresses of objects nor paths of this machine."""
        now = self._time()
        line = " ".join([f"{now:.6f}", who, what, *(f"{name}={shown(value)}" for name, value in fields.items())])
        self.lines.append(line)
        self._add(line)
        for listener in self.listeners:
            listener(now, who, what, fields)

    def detail(self, line: str) -> None:
        line = f"{self._time():.6f} {line}"
        if self.details:
            self.lines.append(line)
        self._add(line)

    def _add(self, line: str) -> None:
        self._batch.append(line)
        if len(self._batch) >= BATCH:
            self._flush()

    def _flush(self) -> None:
        self._hash.update("".join(f"{line}\n" for line in self._batch).encode())
        self._batch.clear()

    def digest(self) -> str:
        """Of all lines so far, in hexadecimal digits."""
        self._flush()
        return self._hash.hexdigest()


__all__ = ["EventLog", "shown"]
