"""Several runs on one page: figures and settings side by side, and each curve of all of them in one chart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from r3async.observe.charts import CHARTS, Line, chart_column, chart_frame
from r3async.observe.report_episodes import beside as episodes
from r3async.observe.report_parts import flat, same, value_text
from r3async.observe.summary import RunSummary, format_number, format_percent, format_seconds
from r3async.observe.timeline import Span, busy_shares

__all__ = [
    "chart_cards",
    "color",
    "config_table",
    "describe_overlays",
    "distinct",
    "episodes",
    "figures",
    "header",
    "time_table",
]

COLORS = ("blue", "orange", "green", "violet", "red", "amber")

FIGURES: tuple[tuple[str, Callable[[RunSummary], str]], ...] = (
    ("status", lambda s: s.status),
    ("steps", lambda s: f"{s.steps}" + (f" of {s.planned_steps}" if s.planned_steps else "")),
    ("time", lambda s: format_seconds(s.duration_seconds)),
    ("reward, first 3 steps", lambda s: format_number(s.reward_first)),
    ("reward, last 10 steps", lambda s: format_number(s.reward_last)),
    ("best step's reward", lambda s: format_number(s.reward_best)),
    ("reward of the last evaluation", lambda s: format_number(s.evaluation_last)),
    ("drift k3, last 10 steps", lambda s: format_number(s.drift)),
    ("drift k3, worst step", lambda s: format_number(s.drift_max)),
    ("mean age", lambda s: format_number(s.staleness_mean)),
    ("oldest token", lambda s: format_number(s.staleness_max)),
    ("allowed age", lambda s: format_number(s.staleness_bound)),
    ("routing agreement", lambda s: format_percent(s.agreement)),
    ("routes recorded", lambda s: format_percent(s.recorded_fraction)),
    ("generated tokens/s", lambda s: format_number(s.generated_tokens_per_second)),
    ("trained tokens/s", lambda s: format_number(s.trained_tokens_per_second)),
    ("weight update", lambda s: format_seconds(s.update_seconds)),
    ("engine pause", lambda s: format_seconds(s.pause_seconds)),
    ("restarts of generators", lambda s: str(s.restarts)),
    ("restarts of the run", lambda s: str(s.run_restarts)),
    ("messages rejected", lambda s: str(s.rejected)),
    ("warnings, errors", lambda s: f"{s.warnings}, {s.errors}"),
)


def distinct(names: Sequence[str], run_dirs: Sequence[Path]) -> list[str]:
    """Names that tell the runs apart: where two are equal, their directories."""
    return [str(path) if list(names).count(name) > 1 else name for name, path in zip(names, run_dirs, strict=True)]


def color(index: int) -> str:
    return COLORS[index % len(COLORS)]


def _key(names: Sequence[str]) -> str:
    spans = "".join(f"<span style='--swatch:var(--{color(i)})'>{escape(name)}</span>" for i, name in enumerate(names))
    return f"<div class='legend'>{spans}</div>"


def _table(heading: str, names: Sequence[str], lines: Sequence[tuple[str, Sequence[str]]]) -> str:
    head = "".join(f"<th style='color:var(--{color(i)})'>{escape(name)}</th>" for i, name in enumerate(names))
    body = "".join(
        f"<tr><td>{escape(label)}</td>{''.join(f'<td>{escape(value)}</td>' for value in values)}</tr>"
        for label, values in lines
    )
    return f"{heading}\n<div class='card wide numbers few'><table><tr><th></th>{head}</tr>{body}</table></div>"


def header(names: Sequence[str], summaries: Sequence[RunSummary]) -> str:
    title = " <span class='soft'>against</span> ".join(escape(name) for name in names)
    failed = "".join(
        f"<div class='notice'>{escape(name)}: {escape(s.reason)}</div>"
        for name, s in zip(names, summaries, strict=True)
        if s.status == "failed"
    )
    return f"<header><h1>{title}</h1></header>{failed}"


def figures(summaries: Sequence[RunSummary], names: Sequence[str]) -> str:
    return _table("<h2>Figures</h2>", names, [(label, [of(s) for s in summaries]) for label, of in FIGURES])


def describe_overlays(
    runs: Sequence[Sequence[dict[str, Any]]], names: Sequence[str]
) -> tuple[list[dict[str, Any]], dict[str, list[Any]]]:
    """One chart for each curve that any of the runs has, with a line a run; and the columns they draw."""
    charts: list[dict[str, Any]] = []
    series: dict[str, list[Any]] = {
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
                frame = chart_frame(chart, values, None, f"chart-{len(charts)}")
                title = chart.title if len(chart.lines) == 1 else f"{chart.title}: {line.label}"
                charts.append(frame | {"title": title, "caption": chart.caption, "lines": lines})
    return charts, series


def chart_cards(charts: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    cards = "".join(
        f"<section class='card chart'><h3>{escape(chart['title'])}</h3>"
        f"<p>{escape(' · '.join(filter(None, (chart['caption'], chart['unit']))))}</p>"
        f"<div class='plot' id='{chart['id']}'></div></section>"
        for chart in charts
    )
    return f"<h2>Curves</h2>\n{_key(names)}<div class='charts'>{cards}</div>" if cards else ""


def time_table(spans: Sequence[Sequence[Span]], names: Sequence[str]) -> str:
    """Shares of the time of every kind of span that any run has."""
    shares = [busy_shares(of_one) for of_one in spans]
    kinds = list(dict.fromkeys(key for of_one in shares for key in of_one if key[1] != "alive"))
    if not kinds:
        return ""
    lines = [
        (f"{who}: {what}", [format_percent(of_one.get((who, what))) for of_one in shares])
        for who, what in sorted(kinds)
    ]
    return _table("<h2>Time<small>share of the whole run</small></h2>", names, lines)


def config_table(configs: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """The settings in which the runs differ."""
    flats = [flat(config) for config in configs]
    keys = list(dict.fromkeys(key for one in flats for key in one))
    lines = []
    for key in keys:
        values = [one.get(key) for one in flats]
        if not all(key in one and same(values[0], value) for one, value in zip(flats, values, strict=True)):
            shown = [value_text(one[key]) if key in one else "-" for one in flats]
            lines.append((key, shown))
    heading = "<h2>Configuration<small>where it differs</small></h2>"
    return _table(heading, names, lines) if lines else "<h2>Configuration<small>the same in all</small></h2>"
