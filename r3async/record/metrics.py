"""What was measured: `run_dir/metrics.jsonl`, one JSON object per optimizer step. `catalogue.py` says what each name means."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from r3async.record.jsonl import read_objects
from r3async.world import Files, World
from r3async.world.appending import AppendFile
from r3async.world.real import REAL


def _number(value: Any) -> Any:
    item = getattr(value, "item", None)
    if item is None:
        raise TypeError(f"a metric is a number, got {type(value).__name__}")
    return item()


_encoder = msgspec.json.Encoder(enc_hook=_number)


class MetricsWriter:
    """Appends rows to `metrics.jsonl`. One writer per run; a row is in the file when `write` returns, or kept."""

    def __init__(self, run_dir: Path, *, world: World = REAL):
        self._file = AppendFile(Path(run_dir) / "metrics.jsonl", world=world)

    def write(self, row: Mapping[str, Any]) -> list[str]:
        """Append one step. Non-finite values are written as null, and their names returned: they need attention.

        Raises `TypeError` for a value that is no number (nor text or None).
        """
        plain = {k: v if isinstance(v, (int, float, str, type(None))) else _number(v) for k, v in row.items()}
        odd = [name for name, value in plain.items() if isinstance(value, float) and not math.isfinite(value)]
        self._file.append(_encoder.encode({**plain, **dict.fromkeys(odd)}))
        return odd

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path, *, files: Files = REAL.files) -> list[dict[str, Any]]:
    """The rows in order. A torn last line (a writer that died) is left out; a missing file has no rows."""
    return list(read_objects(Path(path), files=files))
