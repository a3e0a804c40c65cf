"""Which directory a command's run gets: by name, under the directory of runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from r3async.actors import run_dir
from r3async.checkpoint.directory import silent
from r3async.config import Config
from r3async.world.appending import Report


def open_run(
    config: Config, preset: str, say: Callable[[str], object], root: Path = Path("runs"), report: Report = silent
) -> run_dir.RunDir:
    """`runs/NAME`, see `r3async.actors.run_dir.open_run`; `runs/latest` points at it."""
    name = config.name or f"{Path(preset).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    run = asyncio.run(run_dir.open_run(config, root / name, say, report))
    try:
        _point_latest(root, name)
    except BaseException:
        run.lock.close()
        raise
    return run


def _point_latest(root: Path, name: str) -> None:
    scratch = root / f".latest-{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):  # of a process with this id that was killed here
        scratch.unlink()
    scratch.symlink_to(name)
    scratch.replace(root / "latest")
