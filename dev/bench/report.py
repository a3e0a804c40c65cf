"""The report of every benchmark: rows of figures, each with its mean, its 95 % interval and the
number of values.

A benchmark collects values by case and figure, one for each repeat or seed (`Measurements`). The
report is written as one JSON object, for docs/figures/bench, and shown as a table
(`render_report`), on the terminal and on the pages (`page.py`).
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from statistics import median

import msgspec

from dev.estimates import estimate_mean

REPOSITORY_ROOT = Path(__file__).resolve().parents[2]


class Measurements(msgspec.Struct):
    """The values that a benchmark collects.

    Attributes:
        values: the values of each figure of each case, one for each repeat.
        facts: what the figures depend on, in words.
        problems: what the benchmark must not find; with any, its command exits with 1.
    """

    values: dict[str, dict[str, list[float]]] = {}
    facts: dict[str, str] = {}
    problems: list[str] = []

    def add_figures(self, case: str, figures: Mapping[str, float | None]) -> None:
        """Add one value to each of the figures of a case; None is no value."""
        row = self.values.setdefault(case, {})
        for name, value in figures.items():
            if value is not None:
                row.setdefault(name, []).append(float(value))


class MeanFigure(msgspec.Struct, frozen=True):
    """The mean and the median of `n` values, and the mean's 95 % interval (Student's t;
    None for one value)."""

    mean: float
    low: float | None
    high: float | None
    median: float
    n: int
    values: list[float]


class CaseFigures(msgspec.Struct, frozen=True):
    case: str
    figures: dict[str, MeanFigure]

    @property
    def value_count(self) -> int:
        """The number of values of each figure; some may have fewer."""
        return max(figure.n for figure in self.figures.values())


class BenchReport(msgspec.Struct, frozen=True):
    benchmark: str
    facts: dict[str, str]
    rows: list[CaseFigures]
    problems: list[str] = []

    def find_figures(self, case: str) -> dict[str, MeanFigure]:
        """Return the figures of a case."""
        return next(row.figures for row in self.rows if row.case == case)


def summarize_values(values: Sequence[float]) -> MeanFigure:
    estimate = estimate_mean(values)
    return MeanFigure(
        estimate.mean, estimate.low, estimate.high, median(values), len(values), list(values)
    )


def build_report(name: str, measured: Measurements, facts: Mapping[str, str]) -> BenchReport:
    rows = [
        CaseFigures(case, {figure: summarize_values(values) for figure, values in row.items()})
        for case, row in measured.values.items()
    ]
    return BenchReport(name, {**facts, **measured.facts}, rows, measured.problems)


def collect_facts(command: str) -> dict[str, str]:
    """Return what all figures depend on. It is collected before the benchmark runs, for the
    load of the machine."""
    torch = metadata.version("torch")
    return {
        "command": command,
        "commit": find_commit(),
        "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {torch}",
        "load before it": f"{os.getloadavg()[0]:.1f}",
    }


def find_commit() -> str:
    """Return the commit of this checkout, with a `+` if its files differ from it;
    else the version."""
    answers = []
    for words in (
        ("rev-parse", "--short=12", "HEAD"),
        ("status", "--porcelain", "--untracked-files=no"),
    ):
        command = ["git", "-C", str(REPOSITORY_ROOT), *words]
        try:
            asked = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        except (OSError, subprocess.CalledProcessError):
            return f"r3async {metadata.version('r3async')}"
        answers.append(asked.stdout.strip())
    commit, changes = answers
    return f"{commit}+" if changes else commit


# -- tables ----------------------------------------------------------------------------------------


def format_table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table that is aligned for a terminal: the first column left,
    the others right."""
    texts = [list(heads), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]

    def format_row(row: Sequence[str]) -> str:
        cells = [
            f"{text:{'>' if i else '<'}{width}}"
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        return f"| {' | '.join(cells)} |"

    head, *body = map(format_row, texts)
    return [head, f"|{'|'.join('-' * (width + 2) for width in widths)}|", *body]


def format_value(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def format_figure(figure: MeanFigure | None) -> str:
    """Format a figure as `0.812 [0.79, 0.834]`; one value has no interval."""
    if figure is None:
        return ""
    if figure.low is None or figure.high is None:
        return format_value(figure.mean)
    return f"{format_value(figure.mean)} [{format_value(figure.low)}, {format_value(figure.high)}]"


def report_lines(report: BenchReport) -> Iterator[str]:
    """Yield the lines of a report: its facts, and a table for each stretch of rows
    that share figures."""
    yield "; ".join(
        f"{name}: {f'`{fact}`' if name == 'command' else fact}"
        for name, fact in report.facts.items()
    )
    stretches: list[list[CaseFigures]] = []
    for row in report.rows:
        if not stretches or row.figures.keys().isdisjoint(stretches[-1][-1].figures):
            stretches.append([])
        stretches[-1].append(row)
    for rows in stretches:
        names = list(dict.fromkeys(name for row in rows for name in row.figures))
        cells = [
            (row.case, *(format_figure(row.figures.get(name)) for name in names), row.value_count)
            for row in rows
        ]
        yield from ("", *format_table(("case", *names, "n"), cells))
    yield from ("", *report.problems) if report.problems else ()


def render_report(report: BenchReport) -> str:
    return "\n".join(report_lines(report))
