"""Which curves a report draws, and their data and axes as the page's script wants them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from r3async.observe.metrics import METRICS


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


def finite(value: Any) -> float | None:
    """A number short enough for a page; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


def describe_charts(
    rows: Sequence[dict[str, Any]], bound: int | None
) -> tuple[list[dict[str, Any]], dict[str, list[float | None]]]:
    """The charts that have data, as the page's script wants them, and the columns they draw."""
    charts: list[dict[str, Any]] = []
    series: dict[str, list[float | None]] = {}
    for chart in CHARTS:
        lines = []
        for line in chart.lines:
            column = chart_column(chart, line.metric, rows)
            if any(v is not None for v in column):
                series[line.metric] = column
                lines.append(line)
        if lines:
            leading = [line for line in lines if not line.points] or lines
            values = [v for line in leading for v in series[line.metric] if v is not None]
            frame = chart_frame(chart, values, bound, f"chart-{len(charts)}")
            charts.append(frame | {"lines": [msgspec.to_builtins(line) for line in lines]})
    return charts, series


def chart_column(chart: Chart, metric: str, rows: Sequence[dict[str, Any]]) -> list[float | None]:
    """A metric of all rows; None where there is nothing to draw."""
    column = [finite(row.get(metric)) for row in rows]
    return [v if v is not None and v > 0 else None for v in column] if chart.log else column


def describe_more(
    rows: Sequence[dict[str, Any]],
) -> tuple[list[dict[str, Any]], dict[str, list[float | None]], list[tuple[str, float]]]:
    """A chart for each metric that `CHARTS` has not, with the `group` it is in (the prefix of its name), their columns, and
    the metrics that never change."""
    drawn = {line.metric for chart in CHARTS for line in chart.lines} | {"step", "version", "time"}
    order = {name: index for index, name in enumerate(METRICS)}
    names = {name for row in rows for name in row} - drawn
    charts: list[dict[str, Any]] = []
    series: dict[str, list[float | None]] = {}
    constants: list[tuple[str, float]] = []
    for name in sorted(names, key=lambda name: (order.get(name, len(order)), name)):
        metric = METRICS.get(name)
        label = metric.label if metric else name
        chart = Chart(label, (Line(name, label, "blue"),), unit=metric.unit if metric else "")
        column = chart_column(chart, name, rows)
        values = [v for v in column if v is not None]
        if len(set(values)) == 1 and len(rows) > 1:
            constants.append((label, values[0]))
        elif values:
            series[name] = column
            frame = chart_frame(chart, values, None, f"more-{len(charts)}")
            group = name.partition("/")[0] if "/" in name else "step"
            charts.append(frame | {"group": group, "lines": [msgspec.to_builtins(line) for line in chart.lines]})
    groups = list(dict.fromkeys(chart["group"] for chart in charts))
    charts.sort(key=lambda chart: groups.index(chart["group"]))
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
