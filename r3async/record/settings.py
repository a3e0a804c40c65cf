"""A run's configuration as it was written, as plain data: runs of other releases can be read too."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from r3async.config import ScheduleConfig


def read_run_config(run_dir: Path) -> dict[str, Any]:
    """The resolved configuration, {} if there is none."""
    try:
        return tomllib.loads((Path(run_dir) / "config.toml").read_text())
    except (OSError, ValueError):
        return {}


def read_schedule(config: dict[str, Any]) -> ScheduleConfig | None:
    """Of a run's configuration; None if it has none."""
    found = config.get("schedule")
    if not isinstance(found, dict) or "max_staleness" not in found:
        return None
    known = {field.name for field in msgspec.structs.fields(ScheduleConfig)}
    try:
        return msgspec.convert({name: value for name, value in found.items() if name in known}, ScheduleConfig)
    except msgspec.ValidationError:
        return None


def same(one: Any, other: Any) -> bool:
    """Lists and tuples of the same values are the same."""
    lists = isinstance(one, (list, tuple)) and isinstance(other, (list, tuple))
    return list(one) == list(other) if lists else one == other


def value_text(value: Any) -> str:
    return '""' if value == "" else value if isinstance(value, str) else msgspec.json.encode(value).decode()
