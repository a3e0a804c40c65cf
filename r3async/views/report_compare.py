"""Several runs on one page: figures and settings side by side, and each curve of all of them in one chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from r3async.config import flat
from r3async.record.catalogue import METRICS, figure_label
from r3async.record.timeline import Span, busy_shares
from r3async.views.charts import CHARTS, Line, Series, chart_column, chart_frame
from r3async.views.summary import RunSummary, format_metric, format_number, format_percent, format_seconds

COLORS = ("blue", "orange", "green", "violet", "red", "amber")

Lines = list[tuple[str, list[str]]]
"""Of a table: a label, and a cell for each run."""


def distinct(names: Sequence[str], run_dirs: Sequence[Path]) -> list[str]:
    """Names that tell the runs apart: where two are equal, their directories."""
    return [str(path) if list(names).count(name) > 1 else name for name, path in zip(names, run_dirs, strict=True)]


def color(index: int) -> str:
    return COLORS[index % len(COLORS)]


def figures(summaries: Sequence[RunSummary]) -> Lines:
    """The catalogue's figures of a run, between what happened to it."""
    metrics = [(known, figure) for known in METRICS.values() for figure in known.figures.split()]
    return [
        ("status", [s.status for s in summaries]),
        ("steps", [f"{s.steps}" + (f" of {s.planned_steps}" if s.planned_steps else "") for s in summaries]),
        ("time", [format_seconds(s.duration_seconds) for s in summaries]),
        *(
            (
                figure_label(known, figure),
                [format_metric(getattr(s[known.name], figure), known.unit) for s in summaries],
            )
            for known, figure in metrics
        ),
        ("reward of the last evaluation", [format_number(s.evaluation_last) for s in summaries]),
        ("allowed age", [format_number(s.staleness_bound) for s in summaries]),
        ("restarts of generators", [str(s.history.generators_lost) for s in summaries]),
        ("restarts of the run", [str(s.history.run_restarts) for s in summaries]),
        ("messages rejected", [str(s.rejected) for s in summaries]),
        ("warnings, errors", [f"{s.warnings}, {s.errors}" for s in summaries]),
    ]


def describe_overlays(
    runs: Sequence[Sequence[dict[str, Any]]], names: Sequence[str]
) -> tuple[list[dict[str, Any]], Series]:
    """One chart for each curve that any of the runs has, with a line a run; and the columns they draw."""
    charts: list[dict[str, Any]] = []
    series: Series = {
        f"{index}:step": [row.get("step", at + 1) for at, row in enumerate(rows)] for index, rows in enumerate(runs)
    }
    for chart in CHARTS:
        for line in chart.lines:
            lines, values = [], []
            for index, rows in enumerate(runs):
                column = chart_column(chart, line.metric, rows)
                if any(value is not None for value in column):
                    series[f"{index}:{line.metric}"] = column
                    values += [value for value in column if value is not None]
                    drawn = Line(f"{index}:{line.metric}", names[index], color(index), points=line.points)
                    lines.append(msgspec.to_builtins(drawn) | {"x": f"{index}:step"})
            if lines:
                title = chart.title if len(chart.lines) == 1 else f"{chart.title}: {line.label}"
                frame = chart_frame(chart, values, None, f"chart-{len(charts)}")
                charts.append(frame | {"title": title, "lines": lines})
    return charts, series


def time_table(spans: Sequence[Sequence[Span]]) -> Lines:
    """Shares of the time of every kind of span that any run has."""
    shares = [busy_shares(of_one) for of_one in spans]
    kinds = sorted({key for of_one in shares for key in of_one})
    return [(f"{who}: {what}", [format_percent(of_one.get((who, what))) for of_one in shares]) for who, what in kinds]


def config_table(configs: Sequence[dict[str, Any]]) -> Lines:
    """The settings in which the runs differ."""
    flats = [flat(config) for config in configs]
    return [
        (key, [value_text(one[key]) if key in one else "-" for one in flats])
        for key in dict.fromkeys(key for one in flats for key in one)
        if not all(key in one and same(flats[0].get(key), one[key]) for one in flats)
    ]


def same(one: Any, other: Any) -> bool:
    """Lists and tuples of the same values are the same."""
    lists = isinstance(one, (list, tuple)) and isinstance(other, (list, tuple))
    return list(one) == list(other) if lists else one == other


def value_text(value: Any) -> str:
    return '""' if value == "" else value if isinstance(value, str) else msgspec.json.encode(value).decode()
