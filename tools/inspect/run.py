"""Resolve the names on the command line of `r3async inspect`."""

from __future__ import annotations

import os
import re
from pathlib import Path

from rich.cells import cell_len, set_cell_size

from r3async.config import did_you_mean

_CHECKPOINT = re.compile(r"step-\d{8,}(\..*)?")


class InspectError(ValueError):
    """An error for a target that does not exist; the message says what exists."""


def is_checkpoint(path: Path) -> bool:
    """Return whether the path is a checkpoint, or was one that lost its manifest."""
    # Unlike `Path.resolve`, this takes a loop of links.
    named = _CHECKPOINT.fullmatch(os.path.basename(os.path.realpath(path))) is not None
    return path.is_dir() and (named or (path / "manifest.json").is_file())


def is_run(path: Path) -> bool:
    """Return whether the path is a run. A checkpoint has a `config.toml` too, but is not a run."""
    return not is_checkpoint(path) and any(
        (path / part).is_file() for part in ("config.toml", "events.jsonl")
    )


def fit_to_cells(text: str, cells: int) -> str:
    """Fit `text` to exactly this many terminal cells, with non-printable characters escaped."""
    visible = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    if cell_len(visible) > cells:
        visible = set_cell_size(visible, cells - 1) + "…"
    return set_cell_size(visible, cells)


def find_file(name: str, root: Path) -> Path | None:
    """Find a file, or a part of a run: its spool, its checkpoints, or one of them. Returns None
    for anything else."""
    for path in (Path(name), root / name):
        if path.is_file():
            return path
        part = (
            path.name in ("spool", "quarantine", "checkpoints")
            or is_checkpoint(path)
            or any(path.glob("*.spool"))
        )
        if path.is_dir() and part and not is_run(path):
            return path
    return None


def find_run(name: str, root: Path) -> Path:
    """Return the directory of a run, given as a path or by its name below `root`.

    Raises `InspectError` with the nearest name.
    """
    for path in (Path(name), root / name):
        if is_run(path):
            return path
    if Path(name).is_dir():
        raise InspectError(
            f"{name} is not the directory of a run (there is neither config.toml nor "
            "events.jsonl in it)"
        )
    names = sorted(p.name for p in root.iterdir() if p.is_dir()) if root.is_dir() else []
    raise InspectError(f"no run {name!r}; {suggest_nearest(Path(name).name, names)}")


def suggest_nearest(name: str, names: list[str], limit: int = 5) -> str:
    """Return the end of a message about an unknown name."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    listed = f"there are: {', '.join(names[:limit])}{more}" if names else "there are none"
    return did_you_mean(name, names, listed, cutoff=0.5)
