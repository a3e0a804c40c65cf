"""The command `python -m dev bench science`. It imports nothing heavy until it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dev.bench.jobs import say_on_stderr
from dev.bench.reporting import Json, Quick, reported
from r3async.config import ConfigError


def science(
    words: Annotated[list[str], typer.Argument(metavar="PLAN…", help="plan files of sweeps, and key=value for all")],
    json: Json = False,
    seeds: Annotated[str, typer.Option(help="only these of each plan", show_default="all")] = "",
    models: Annotated[str, typer.Option(help="only these initial models, by number", show_default="all")] = "",
    only: Annotated[str, typer.Option(help="only these variants", show_default="all")] = "",
    parallel: Annotated[
        int | None, typer.Option(help="runs at once", min=1, show_default="as many as this machine allows")
    ] = None,
    keep: Annotated[
        Path | None, typer.Option(help="directory for the sweeps; runs that it has are not made again")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="directory of the data", show_default="docs/figures/science; with --quick none")
    ] = None,
    quick: Quick = False,
) -> None:
    """Run the sweeps of plan files, and keep them as data with commit and command, from which pages are made."""
    from dev.bench.science import render, run
    from r3async.tools.sweep.command import SweepRequest

    plans, overrides = [Path(word) for word in words if "=" not in word], [word for word in words if "=" in word]
    if not plans:
        raise ConfigError("bench science: name a plan file, for example docs/figures/plans/trust-region.toml")
    asked = SweepRequest(plans[0], overrides, seeds, models, only, parallel)
    reported(lambda: run(plans, asked, quick=quick, keep=keep, out=out, say=say_on_stderr), render, json)
