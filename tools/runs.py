"""Where run directories are: one answer for every command, and for Python."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

RUNS_ENV = "R3ASYNC_RUNS"
RUNS = Path("runs")

Runs = Annotated[Path, typer.Option("--runs", help="where run directories are", envvar=RUNS_ENV)]
"""`--runs` of a command that takes a run's name."""
NewRuns = Annotated[Path, typer.Option("--runs", help="where run directories are made", envvar=RUNS_ENV)]


def runs_directory() -> Path:
    """Where a run is by its name, if nobody says otherwise: R3ASYNC_RUNS, or `runs` here."""
    return Path(os.environ.get(RUNS_ENV) or RUNS)
