"""The location of run directories, the same for every command and for Python."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

RUNS_VARIABLE = "R3ASYNC_RUNS"
DEFAULT_RUNS_DIRECTORY = Path("runs")

RunsOption = Annotated[
    Path, typer.Option("--runs", help="where run directories are", envvar=RUNS_VARIABLE)
]


def get_runs_directory() -> Path:
    """Return the default directory of runs: R3ASYNC_RUNS, or `runs` in the current directory."""
    return Path(os.environ.get(RUNS_VARIABLE) or DEFAULT_RUNS_DIRECTORY)
