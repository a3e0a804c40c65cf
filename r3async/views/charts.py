"""Charts of a run: curves drawn together on a terminal and in a report, with data and axes for a
report's script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import msgspec

from r3async.data.metrics import LINE_COLORS, METRICS, finite_or_none, sort_metrics

X_AXES = ("step", "time", "tokens")
"""X axes of curves: the step, seconds since the run began, and tokens trained so far."""
EVALUATION_REWARD = "evaluation/reward_mean"
EVALUATION_ERROR = "evaluation/reward_error"
PASS_AT_PREFIX = "evaluation/pass@"
"""Fields of a line of `evaluation.jsonl`; the number of answers k follows the prefix
`evaluation/pass@`."""

MetricsRows = Sequence[dict[str, Any]]
NumberColumn = list[float | None]


class ChartLine(msgspec.Struct, frozen=True):
    """One line of a chart.

    Attributes:
        points: Draw points instead of a line, and ignore them when the axis is scaled.
        x: Prefix of the names of its columns on `X_AXES`; empty for the page's own run.
        error: Column of its error bars.
        marks: Mark each value.
    """

    metric: str
    label: str
    color: str
    dash: str = ""
    points: bool = False
    x: str = ""
    error: str = ""
    marks: bool = False


class Chart(msgspec.Struct, frozen=True):
    title: str
    caption: str = ""
    unit: str = ""
    number_format: str = ""
    """`share`, `scientific` or `whole`; by default four significant digits."""
    has_log_scale: bool = False
    is_share: bool = False
    """True for a fraction: the axis ends at 100 %."""
    shows_bound: bool = False
    """True to draw the bound on age that the schedule guarantees."""
    is_performance: bool = False
    """True if it says where time goes, and not what is learnt."""

    @property
    def lines(self) -> list[ChartLine]:
        """The curves of the metric catalogue that belong to this chart, by its title."""
        return [
            ChartLine(m.name, *m.curve[1:])
            for m in METRICS.values()
            if m.curve and m.curve.chart == self.title
        ]


CHARTS = (
    Chart("Reward", "per trajectory"),
    Chart(
        "Drift",
        "KL(rollout ‖ learner) of trained tokens; k1 is drawn where it is positive",
        "nats",
        "scientific",
        has_log_scale=True,
    ),
    Chart("Teacher", "KL(rollout ‖ teacher) of trained tokens", "nats"),
    Chart("Staleness", "versions between sampling a token and training it", shows_bound=True),
    Chart(
        "Routing",
        "routes that came with the tokens, and experts that learner and engine both choose",
        number_format="share",
        is_share=True,
    ),
    Chart("Policy loss", "per trained token"),
    Chart("Answers", "loss of `r3async sft`, per token of an answer", "nats"),
    Chart("Gradient norm", "before clipping", has_log_scale=True),
    Chart("Throughput", "of wall time", "tokens/s", "whole"),
    Chart("Weight updates", "time to bring a new version into the engines", "s"),
    Chart("Entropy", "of the learner at trained tokens", "nats"),
    Chart("Reward spread", "standard deviation of an episode's reward"),
    Chart("Response length", "sampled in an episode", "tokens", "whole"),
    Chart(
        "Truncated",
        "an answer was cut at its length, or the context was full",
        number_format="share",
        is_share=True,
    ),
    Chart("Clipped", "trained tokens held by a bound of the policy loss", number_format="share"),
    Chart("Learner time", "per step", "s", is_performance=True),
    Chart("Processor time", "per step", "s", is_performance=True),
    Chart("Learner stages", "processor time per step", "s", is_performance=True),
    Chart("Generator stages", "processor time per step", "s", is_performance=True),
    Chart("Conductor stages", "processor time per step", "s", is_performance=True),
    Chart(
        "Idle",
        "share of the last 16 steps; who is idle should get less, or the other one more",
        number_format="share",
        is_share=True,
        is_performance=True,
    ),
)
PASS_AT_K_CHART = Chart(
    "Solved",
    "pass@k: tasks of which one of k answers is right",
    number_format="share",
    is_share=True,
)
EVALUATION_CHART = Chart(
    "Evaluation", "mean reward on tasks held out from training, with its standard error"
)


class ChartSet:
    """The charts that a page's script draws. `kind` is the prefix of their ids.

    Attributes:
        charts: Texts, axes and lines of each chart.
        series: Columns of the lines, by name.
    """

    def __init__(self, kind: str):
        self._kind = kind
        self.charts: list[dict[str, Any]] = []
        self.series: dict[str, list[Any]] = {}

    def add_chart(
        self,
        chart: Chart,
        drawn: Sequence[tuple[ChartLine, NumberColumn]],
        bound: int | None = None,
        **overrides: Any,
    ) -> None:
        """Add a chart of the lines that have a value, if any line has one.

        `overrides` replace fields of the chart or add new ones.
        """
        kept = [
            (line, column) for line, column in drawn if any(value is not None for value in column)
        ]
        if kept:
            self.series |= {line.metric: column for line, column in kept}
            leading = [column for line, column in kept if not line.points] or [
                column for _, column in kept
            ]
            values = [value for column in leading for value in column if value is not None]
            lines = {
                "id": f"{self._kind}-{len(self.charts)}",
                "lines": [msgspec.to_builtins(line) for line, _ in kept],
            }
            self.charts.append(make_chart_frame(chart, values, bound) | lines | overrides)


def build_charts(rows: MetricsRows, bound: int | None) -> ChartSet:
    """Build the charts of `CHARTS` that have data."""
    drawing = ChartSet("chart")
    for chart in CHARTS:
        drawn = [(line, extract_column(chart, line.metric, rows)) for line in chart.lines]
        # The first line, which people look at most, on top.
        drawing.add_chart(chart, drawn[::-1], bound)
    return drawing


def build_other_charts(rows: MetricsRows) -> tuple[ChartSet, list[tuple[str, float]]]:
    """Build a chart for each metric that is not in `CHARTS`, with its `group`.

    Also returns the labels and values of the metrics that never change.
    """
    drawing = ChartSet("more")
    constants: list[tuple[str, float]] = []
    for known in sort_metrics({name for row in rows for name in row}):
        if known.curve is not None:
            continue
        chart = Chart(known.label, known.description, known.unit)
        column = extract_column(chart, known.name, rows)
        values = {value for value in column if value is not None}
        if len(values) == 1 and len(rows) > 1:
            constants.append((known.label, values.pop()))
        else:
            drawing.add_chart(
                chart, [(ChartLine(known.name, known.label, "blue"), column)], group=known.group
            )
    return drawing, constants


def build_overlay_charts(
    runs: Sequence[MetricsRows], names: Sequence[str], axes: Sequence[dict[str, list[Any]]]
) -> ChartSet:
    """Build one chart for each curve that any run has, with one line per run. `axes` are from
    `make_x_columns`."""
    drawing = ChartSet("chart")
    for chart in CHARTS:
        for line in chart.lines:
            drawn = [
                (
                    ChartLine(
                        f"{i}:{line.metric}", names[i], pick_color(i), points=line.points, x=f"{i}:"
                    ),
                    extract_column(chart, line.metric, rows),
                )
                for i, rows in enumerate(runs)
            ]
            title = chart.title if len(chart.lines) == 1 else f"{chart.title}: {line.label}"
            drawing.add_chart(chart, drawn, title=title, bound=None)
    drawing.series |= {
        f"{i}:{name}": column for i, columns in enumerate(axes) for name, column in columns.items()
    }
    return drawing


def pick_color(index: int) -> str:
    return LINE_COLORS[index % len(LINE_COLORS)]


def make_x_columns(rows: MetricsRows, started: float | None = None) -> dict[str, list[Any]]:
    """Return a column `x/AXIS` for each of `X_AXES` that the rows have.

    Time counts from `started`, in unix seconds, or from the first row.
    """
    times, tokens = (
        [finite_or_none(row.get(name)) for row in rows] for name in ("time", "batch/trained_tokens")
    )
    columns: dict[str, list[Any]] = {
        "x/step": [row.get("step", at + 1) for at, row in enumerate(rows)]
    }
    known = [at for at in times if at is not None]
    if known:
        since = min(known) if started is None else started
        columns["x/time"] = [None if at is None else round(at - since, 2) for at in times]
    if any(tokens):
        columns["x/tokens"] = list(accumulate(count or 0.0 for count in tokens))
    return columns


def extract_column(chart: Chart, name: str, rows: MetricsRows) -> NumberColumn:
    """Return the values of a metric in all rows, rounded to be short on a page; None where there is
    nothing to draw."""
    known = [finite_or_none(row.get(name)) for row in rows]
    column = [float(f"{value:.6g}") if isinstance(value, float) else value for value in known]
    return (
        [v if v is not None and v > 0 else None for v in column] if chart.has_log_scale else column
    )


def make_chart_frame(chart: Chart, values: Sequence[float], bound: int | None) -> dict[str, Any]:
    """Return the chart without its lines: its texts, and its axes scaled to `values`."""
    low = min(values)
    high = max(values)
    limits = None
    if chart.shows_bound:
        limits = [-0.08 * max(high, bound or 0, 1), max(high, bound or 0, 1) * 1.15]
    elif chart.is_share:
        # What matters is the distance to 100 %: the axis starts near the data, not at 0.
        floor = min(low, 0.99) - 0.05 * (1 - min(low, 0.99))
        limits = [max(floor, -0.02), 1 + 0.06 * (1 - floor)]
    elif chart.has_log_scale:
        # A step that is exactly on-policy has a drift of rounding errors, decades below all others.
        low = max(low, sorted(values)[len(values) // 2] / 100)
        margin = 0.15 if high > 2 * low else 0.5
        limits = [math.log10(low) - margin, math.log10(high) + margin]
    elif low >= 0:
        limits = [0, (high or 1) * 1.08]
    return {
        "title": chart.title,
        "caption": chart.caption,
        "is_performance": chart.is_performance,
        "unit": chart.unit,
        "format": chart.number_format,
        "ticks": "share" if chart.number_format == "share" else "compact" if high >= 1000 else "",
        "log": chart.has_log_scale,
        "range": limits,
        "bound": bound if chart.shows_bound else None,
    }
