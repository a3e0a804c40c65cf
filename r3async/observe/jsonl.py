"""Files of JSON lines, read. They are written by `AppendFile`: several processes may append to one, and be killed meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec


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
