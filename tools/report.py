"""`r3async report`: write the page of a run, or one that compares several; or serve them while they go on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from r3async.tools.terminal import Terminal


class CannotServe(ValueError):
    """The message says why."""


def command(
    runs: Annotated[list[str] | None, typer.Argument(help="runs' names or directories", show_default="latest")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="file to write", show_default="in the run")
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="serve the page on this machine, up to date, until Ctrl-C")
    ] = False,
    port: Annotated[
        int, typer.Option(help="with --serve: the port of loopback; 0: any free one", min=0, max=65535)
    ] = 0,
) -> None:
    """Write a run's report.html, one file that needs no network. Several runs: a page that compares them."""
    from r3async.tools.inspect.run import InspectError

    try:
        if serve:
            serve_runs(runs or ["latest"], output, port)
        else:
            typer.echo(report(runs or ["latest"], output))
    except (InspectError, CannotServe, OSError) as error:
        Terminal(stderr=True).print(str(error), style="bold red", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(2) from error


def report(runs: Sequence[str], output: Path | None = None) -> Path:
    """The page's path: `output`, or `report.html` of the one run or sweep, or `compare.html` of the first of several. Raises
    `InspectError` for a run that is not there."""
    from r3async.tools.inspect.run import ROOT, find_run
    from r3async.tools.sweep.record import find_sweep, report_sweep
    from r3async.views.report import write_report

    if len(runs) == 1 and output is None and (sweep := find_sweep(runs[0], ROOT)) is not None:
        return report_sweep(sweep)
    first, *others = [find_run(run) for run in runs]
    return write_report(first, *others, path=output or (first / "compare.html" if others else None))


def serve_runs(runs: Sequence[str], output: Path | None, port: int) -> None:
    """Serve until Ctrl-C; the address goes to stdout. Raises `InspectError` for a run that is not there, and `CannotServe`."""
    from r3async.tools.inspect.run import find_run
    from r3async.tools.live import serve

    if output is not None:
        raise CannotServe("--serve writes no file: leave out --output")
    # A link like `latest` may point to another run later: the page stays with the one that it was asked for.
    directories = list(dict.fromkeys(find_run(run).resolve() for run in runs))
    serve(directories, port, typer.echo)
