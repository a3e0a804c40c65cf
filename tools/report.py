"""`r3async report`: write the page of a run, or one that compares several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from r3async.tools.inspect.run import find_run


def report(runs: Sequence[str], output: Path | None = None) -> Path:
    """The page's path: `output`, or `report.html` of the one run, or `compare.html` of the first of several. Raises
    `InspectError` for a run that is not there."""
    from r3async.views.report import write_report

    first, *others = [find_run(run) for run in runs]
    return write_report(first, *others, path=output or (first / "compare.html" if others else None))
