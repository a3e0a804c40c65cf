"""Output of benchmark commands: one JSON object on the last line of stdout, or tables for people."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec
import typer

from dev.bench.jobs import BenchError, ended_in_order

Json = Annotated[bool, typer.Option("--json", help="one JSON object as the last line of stdout")]
Quick = Annotated[bool, typer.Option("--quick", help="a small measurement: the path, not the figures")]
R = TypeVar("R")


def reported(measure: Callable[[], R], render: Callable[[R], str], json: bool) -> R:
    """Measure, print and return the report. Exit with code 1 if the measurement failed."""
    try:
        with ended_in_order():
            report = measure()
    except BenchError as error:
        typer.echo(f"the benchmark failed: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(msgspec.json.encode(report) if json else render(report))
    return report
