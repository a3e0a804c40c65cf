"""Which curves are drawn together, on a terminal and in a report; and for a report's script, their data and axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from r3async.record.catalogue import finite, in_order


class Line(msgspec.Struct, frozen=True):
    metric: str
    label: str
    color: str
    dash: str = ""
    points: bool = False
    """Drawn as points, and without a say in the axis."""


class Chart(msgspec.Struct, frozen=True):
    title: str
    lines: tuple[Line, ...]
    caption: str = ""
    unit: str = ""
    format: str = ".3~g"
    log: bool = False
    share: bool = False
    """A fraction: the axis ends at 100 %."""
    bound: bool = False
    """Draw the bound on age that the schedule promises."""
    target: str = ""
    """The setting that the curve is held to."""


CHARTS = (
    Chart(
        "Reward", (Line("reward/max", "best", "green", "dot"), Line("reward/mean", "mean", "blue")), "per trajectory"
    ),
    Chart(
        "Drift",
        (
            Line("rollout_kl/k1", "k1", "orange", points=True),
            Line("rollout_kl/k2", "k2", "violet", "dash"),
            Line("rollout_kl/k3", "k3", "blue"),
        ),
        "KL(rollout ‖ learner) of trained tokens; k1 is drawn where it is positive",
        "nats",
        ".2e",
        log=True,
        target="algorithm.rollout_kl.target",
    ),
    Chart(
        "Staleness",
        (Line("staleness/max", "oldest token", "orange"), Line("staleness/mean", "mean", "blue")),
        "versions between sampling a token and training it",
        bound=True,
    ),
    Chart(
        "Routing",
        (Line("routing/recorded_fraction", "recorded", "green"), Line("routing/agreement", "agreement", "blue")),
        "routes that came with the tokens, and experts that learner and engine both choose",
        format=".2%",
        share=True,
    ),
    Chart("Policy loss", (Line("loss/policy", "policy loss", "blue"),), "per trained token"),
    Chart("Gradient norm", (Line("grad_norm", "norm", "blue"),), "before clipping", log=True),
    Chart(
        "Throughput",
        (
            Line("throughput/generated_tokens_per_second", "generated", "green"),
            Line("throughput/trained_tokens_per_second", "trained", "blue"),
        ),
        "of wall time",
        "tokens/s",
        ",.0f",
    ),
    Chart(
        "Weight updates",
        (Line("weights/update_seconds", "delivery", "blue"), Line("weights/pause_seconds", "engine pause", "orange")),
        "time to bring a new version into the engines",
        "s",
        ".3f",
    ),
    Chart("Entropy", (Line("entropy/mean", "entropy", "blue"),), "of the learner at trained tokens", "nats"),
    Chart(
        "Learner time",
        (Line("learner/step_seconds", "training", "blue"), Line("learner/wait_seconds", "waiting for data", "orange")),
        "per step",
        "s",
        ".2f",
    ),
    Chart(
        "Idle",
        (
            Line("learner/idle_share", "learner, for want of groups", "blue"),
            Line("generator/idle_share", "generators, for want of a slot", "orange"),
        ),
        "share of the last 16 steps; who is idle should get less, or the other one more",
        format=".0%",
        share=True,
    ),
)

Series = dict[str, list[Any]]
"""Columns that a page's script draws, by name."""


def describe_charts(rows: Sequence[dict[str, Any]], bound: int | None) -> tuple[list[dict[str, Any]], Series]:
    """The charts that have data, as the page's script wants them, and the columns they draw."""
    charts: list[dict[str, Any]] = []
    series: Series = {}
    for chart in CHARTS:
        drawn = {line.metric: chart_column(chart, line.metric, rows) for line in chart.lines}
        lines = [line for line in chart.lines if any(value is not None for value in drawn[line.metric])]
        if lines:
            series |= {line.metric: drawn[line.metric] for line in lines}
            leading = [line for line in lines if not line.points] or lines
            values = [v for line in leading for v in drawn[line.metric] if v is not None]
            frame = chart_frame(chart, values, bound, f"chart-{len(charts)}")
            charts.append(frame | {"lines": [msgspec.to_builtins(line) for line in lines]})
    return charts, series


def chart_column(chart: Chart, name: str, rows: Sequence[dict[str, Any]]) -> list[float | None]:
    """A metric of all rows, short enough for a page; None where there is nothing to draw."""
    known = [finite(row.get(name)) for row in rows]
    column = [float(f"{value:.6g}") if isinstance(value, float) else value for value in known]
    return [v if v is not None and v > 0 else None for v in column] if chart.log else column


def describe_more(
    rows: Sequence[dict[str, Any]],
) -> tuple[list[dict[str, Any]], Series, list[tuple[str, float]]]:
    """A chart for each metric that `CHARTS` has not, with the `group` it is in, their columns, and the labels and values of the
    metrics that never change."""
    drawn = {line.metric for chart in CHARTS for line in chart.lines}
    charts: list[dict[str, Any]] = []
    series: Series = {}
    constants: list[tuple[str, float]] = []
    for known in in_order({name for row in rows for name in row} - drawn):
        chart = Chart(known.label, (Line(known.name, known.label, "blue"),), known.docs, known.unit)
        column = chart_column(chart, known.name, rows)
        values = [v for v in column if v is not None]
        if len(set(values)) == 1 and len(rows) > 1:
            constants.append((known.label, values[0]))
        elif values:
            series[known.name] = column
            frame = chart_frame(chart, values, None, f"more-{len(charts)}")
            charts.append(frame | {"group": known.group, "lines": msgspec.to_builtins(chart.lines)})
    return charts, series, constants


def chart_frame(chart: Chart, values: list[float], bound: int | None, key: str) -> dict[str, Any]:
    """The chart without its lines: words, axes and what `values` want of them."""
    shown_bound = bound if chart.bound else None
    low, high = min(values), max(values)
    limits = None
    if chart.bound:
        limits = [-0.08 * max(high, bound or 0, 1), max(high, bound or 0, 1) * 1.15]
    elif chart.share:
        # What matters is the distance to 100 %: the axis starts near the data, not at 0.
        floor = min(low, 0.99) - 0.05 * (1 - min(low, 0.99))
        limits = [max(floor, -0.02), 1 + 0.06 * (1 - floor)]
    elif chart.log:
        # A step that is exactly on-policy has a drift of rounding errors, decades below all others.
        low = max(low, sorted(values)[len(values) // 2] / 100)
        room = 0.15 if high > 2 * low else 0.5
        limits = [math.log10(low) - room, math.log10(high) + room]
    elif low >= 0:
        limits = [0, (high or 1) * 1.08]
    return {
        "id": key,
        "title": chart.title,
        "caption": chart.caption,
        "unit": chart.unit,
        "format": chart.format,
        "ticks": ".0%" if chart.share and low < 0.95 else ".1%" if chart.share else "~s" if high >= 1000 else "",
        "log": chart.log,
        "decades": max(1.0, math.log10(high / low)) if chart.log else 0,
        "range": limits,
        "bound": shown_bound,
    }
