"""Write the page of a run or a comparison of several, or serve them during the runs:
`r3async report`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from .runs import DEFAULT_RUNS_DIRECTORY, RunsOption
from .targets import describe_os_error, name_target
from .terminal import SafeConsole


def report_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUNS]...", help="runs' names or directories", show_default="latest"
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="file to write", show_default="in the run")
    ] = None,
    serve: Annotated[
        bool,
        typer.Option("--serve", help="serve the page on this machine, up to date, until Ctrl-C"),
    ] = False,
    port: Annotated[
        int,
        typer.Option(help="with --serve: the port of loopback; 0: any free one", min=0, max=65535),
    ] = 0,
    runs: RunsOption = DEFAULT_RUNS_DIRECTORY,
) -> None:
    """Write a run's report.html, one file that needs no network. Several runs: a page
    that compares them."""
    from .inspect.run import InspectError

    if serve and output is not None:
        raise typer.BadParameter("--serve writes no file: leave out --output")
    try:
        if serve:
            serve_runs(names or ["latest"], port, runs)
        else:
            typer.echo(write_report_page(names or ["latest"], output, runs))
    except (InspectError, OSError) as error:
        line = describe_os_error(error)
        SafeConsole(stderr=True).print(
            line, style="bold red", highlight=False, markup=False, soft_wrap=True
        )
        raise typer.Exit(2) from error


def write_report_page(names: Sequence[str], output: Path | None, root: Path) -> Path:
    """Write a report page and return its path.

    The path is `output`, or `report.html` of the one run, or `compare.html` of the first of
    several. Raises `InspectError` for an unknown run.
    """
    from r3async.views.report import write_report

    from .inspect.run import find_run

    first, *others = [find_run(name, root) for name in names]
    path = output or first / ("compare.html" if others else "report.html")
    with name_target(path):
        return write_report(first, *others, path=path)


def serve_runs(names: Sequence[str], port: int, root: Path) -> None:
    """Serve until Ctrl-C; print the address to stdout.

    Raises `OSError` for a port that is not free, and `InspectError` for an unknown run.
    """
    from .inspect.run import find_run
    from .live import serve_live_pages

    # A link like `latest` may point to another run later; the page stays with the present one.
    directories = list(dict.fromkeys(find_run(name, root).resolve() for name in names))
    serve_live_pages(directories, port, typer.echo)
