"""`r3async inspect`: look into the directory of a run. What can be looked at has a module of its own (`inspect_*.py`)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

ROOT = Path("runs")


class InspectError(ValueError):
    """What was asked for is not there; the message says what is."""


def find_run(name: str, root: Path = ROOT) -> Path:
    """The directory of a run, given as such or by its name below `root`. Raises `InspectError` with the nearest name."""
    for path in (Path(name), root / name):
        if any((path / part).is_file() for part in ("config.toml", "events.jsonl")):
            return path
    if Path(name).is_dir():
        raise InspectError(
            f"{name} is not the directory of a run (there is neither config.toml nor events.jsonl in it)"
        )
    names = sorted(p.name for p in root.iterdir() if p.is_dir()) if root.is_dir() else []
    raise InspectError(f"no run {name!r}; {nearest(Path(name).name, names)}")


def nearest(name: str, names: list[str], shown: int = 5) -> str:
    """The end of a message about a name that is not there."""
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]!r}?"
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return f"there are: {', '.join(names[:shown])}{more}" if names else "there are none"


def overview(run_dir: Path, kept: Iterable[str], console: Console) -> None:
    """What can be inspected in this run: the lines of `kept`."""
    console.print(f"{run_dir.resolve().name}  ({run_dir})", style="bold", highlight=False, markup=False)
    for line in kept:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
