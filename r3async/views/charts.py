"""Which curves are drawn together, on a terminal and in a report; and for a report's script, their data and axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np

from r3async.record.catalogue import COLORS, METRICS, finite, in_order

AXES = ("step", "time", "tokens")
"""What a curve can be drawn over: the step, seconds since the run began, or tokens that were trained so far."""
EVALUATED, ERROR, PASSES = "evaluation/reward_mean", "evaluation/reward_error", "evaluation/pass@"
"""Of a line of `evaluation.jsonl`; the last with a number of answers behind it."""

Rows = Sequence[dict[str, Any]]
Column = list[float | None]


class Line(msgspec.Struct, frozen=True):
    """`points`: drawn as points, and without effect on the axis. `x`: the beginning of the names of its columns on `AXES`; those
    of the page's own run begin with nothing. `error`: the column of its error bars. `marks`: each value is marked. `low`, `high`:
    the columns of a band around it."""

    metric: str
    label: str
    color: str
    dash: str = ""
    points: bool = False
    x: str = ""
    error: str = ""
    marks: bool = False
    low: str = ""
    high: str = ""


class Chart(msgspec.Struct, frozen=True):
    title: str
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

    @property
    def lines(self) -> list[Line]:
        """The catalogue's curves of this title."""
        return [Line(m.name, *m.curve[1:]) for m in METRICS.values() if m.curve and m.curve.chart == self.title]


CHARTS = (
    Chart("Reward", "per trajectory"),
    Chart(
        "Drift",
        "KL(rollout ‖ learner) of trained tokens; k1 is drawn where it is positive",
        "nats",
        ".2e",
        log=True,
        target="algorithm.rollout_kl.target",
    ),
    Chart("Teacher", "KL(rollout ‖ teacher) of trained tokens", "nats"),
    Chart("Staleness", "versions between sampling a token and training it", bound=True),
    Chart(
        "Routing",
        "routes that came with the tokens, and experts that learner and engine both choose",
        format=".2%",
        share=True,
    ),
    Chart("Policy loss", "per trained token"),
    Chart("Answers", "loss of `r3async sft`, per token of an answer", "nats"),
    Chart("Gradient norm", "before clipping", log=True),
    Chart("Throughput", "of wall time", "tokens/s", ",.0f"),
    Chart("Weight updates", "time to bring a new version into the engines", "s", ".3f"),
    Chart("Entropy", "of the learner at trained tokens", "nats"),
    Chart("Reward spread", "standard deviation of an episode's reward"),
    Chart("Response length", "sampled in an episode", "tokens", ",.0f"),
    Chart("Truncated", "an answer was cut at its length, or the context was full", format=".2%", share=True),
    Chart("Clipped", "trained tokens held by a bound of the policy loss", format=".2%"),
    Chart("Learner time", "per step", "s", ".2f"),
    Chart("Processor time", "per step", "s", ".2f"),
    Chart("Learner stages", "processor time per step", "s", ".3f"),
    Chart("Generator stages", "processor time per step", "s", ".3f"),
    Chart("Conductor stages", "processor time per step", "s", ".3f"),
    Chart(
        "Idle",
        "share of the last 16 steps; who is idle should get less, or the other one more",
        format=".0%",
        share=True,
    ),
)
PASS_CHART = Chart("Solved", "pass@k: tasks of which one of k answers is right", format=".2%", share=True)
EVALUATION_CHART = Chart("Evaluation", "mean reward of tasks that training never poses, with its standard error")


class Drawing:
    """What a page's script draws. `charts`: their words, axes and lines; `series`: the columns of these, by name. `kind`: the
    beginning of their ids."""

    def __init__(self, kind: str):
        self._kind = kind
        self.charts: list[dict[str, Any]] = []
        self.series: dict[str, list[Any]] = {}

    def add(self, chart: Chart, drawn: Sequence[tuple[Line, Column]], bound: int | None = None, **words: Any) -> None:
        """A chart of the lines that have a value; none if no line has one. `words`: in place of the chart's own, or beside."""
        kept = [(line, column) for line, column in drawn if any(value is not None for value in column)]
        if kept:
            self.series |= {line.metric: column for line, column in kept}
            leading = [column for line, column in kept if not line.points] or [column for _, column in kept]
            values = [value for column in leading for value in column if value is not None]
            lines = {"id": f"{self._kind}-{len(self.charts)}", "lines": [msgspec.to_builtins(line) for line, _ in kept]}
            self.charts.append(chart_frame(chart, values, bound) | lines | words)


def describe_charts(rows: Rows, bound: int | None) -> Drawing:
    """The charts that have data."""
    drawing = Drawing("chart")
    for chart in CHARTS:
        drawn = [(line, chart_column(chart, line.metric, rows)) for line in chart.lines]
        drawing.add(chart, drawn[::-1], bound)  # the first, which is looked at most, over the others
    return drawing


def describe_more(rows: Rows) -> tuple[Drawing, list[tuple[str, float]]]:
    """A chart for each metric that `CHARTS` has not, with the `group` it is in; and the labels and values of the metrics that
    never change."""
    drawing = Drawing("more")
    constants: list[tuple[str, float]] = []
    for known in in_order({name for row in rows for name in row}):
        if known.curve is not None:
            continue
        chart = Chart(known.label, known.docs, known.unit)
        column = chart_column(chart, known.name, rows)
        values = {value for value in column if value is not None}
        if len(values) == 1 and len(rows) > 1:
            constants.append((known.label, values.pop()))
        else:
            drawing.add(chart, [(Line(known.name, known.label, "blue"), column)], group=known.group)
    return drawing, constants


def describe_overlays(runs: Sequence[Rows], names: Sequence[str], axes: Sequence[dict[str, list[Any]]]) -> Drawing:
    """One chart for each curve that any of the runs has, with a line a run. `axes`: see `x_columns`."""
    drawing = Drawing("chart")
    for chart in CHARTS:
        for line in chart.lines:
            drawn = [
                (
                    Line(f"{i}:{line.metric}", names[i], color(i), points=line.points, x=f"{i}:"),
                    chart_column(chart, line.metric, rows),
                )
                for i, rows in enumerate(runs)
            ]
            title = chart.title if len(chart.lines) == 1 else f"{chart.title}: {line.label}"
            drawing.add(chart, drawn, title=title, bound=None)
    drawing.series |= {f"{i}:{name}": column for i, columns in enumerate(axes) for name, column in columns.items()}
    return drawing


def color(index: int) -> str:
    return COLORS[index % len(COLORS)]


def x_columns(rows: Rows, started: float | None = None) -> dict[str, list[Any]]:
    """`x/AXIS` for each of `AXES` that the rows have. `started`: unix seconds from which time counts, or the first row's."""
    times, tokens = ([finite(row.get(name)) for row in rows] for name in ("time", "batch/trained_tokens"))
    columns: dict[str, list[Any]] = {"x/step": [row.get("step", at + 1) for at, row in enumerate(rows)]}
    if known := [at for at in times if at is not None]:
        since = min(known) if started is None else started
        columns["x/time"] = [None if at is None else round(at - since, 2) for at in times]
    if any(tokens):
        columns["x/tokens"] = list(accumulate(count or 0.0 for count in tokens))
    return columns


def chart_column(chart: Chart, name: str, rows: Rows) -> Column:
    """A metric of all rows, short enough for a page; None where there is nothing to draw."""
    known = [finite(row.get(name)) for row in rows]
    column = [float(f"{value:.6g}") if isinstance(value, float) else value for value in known]
    return [v if v is not None and v > 0 else None for v in column] if chart.log else column


def chart_frame(chart: Chart, values: Sequence[float], bound: int | None) -> dict[str, Any]:
    """The chart without its lines: words, axes and what `values` want of them."""
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
        margin = 0.15 if high > 2 * low else 0.5
        limits = [math.log10(low) - margin, math.log10(high) + margin]
    elif low >= 0:
        limits = [0, (high or 1) * 1.08]
    return {
        "title": chart.title,
        "caption": chart.caption,
        "unit": chart.unit,
        "format": chart.format,
        "ticks": ".0%" if chart.share and low < 0.95 else ".1%" if chart.share else "~s" if high >= 1000 else "",
        "log": chart.log,
        "decades": max(1.0, math.log10(high / low)) if chart.log else 0,
        "range": limits,
        "bound": bound if chart.bound else None,
    }


# -- evaluations -------------------------------------------------------------------------------------------------------


def evaluations_of(lines: Rows, of: str = "") -> list[dict[str, Any]]:
    """`{"step", EVALUATED, ERROR}`, and each pass@k, in the order of steps; ERROR is None where unknown. Of one step
    that was evaluated again, after a resume, the last counts. `of`: which of `evaluation.sets`; by default the first."""
    found, passes = {}, _of_set(PASSES, of)
    for line in lines:
        step, reward = finite(line.get("step")), finite(line.get(_of_set(EVALUATED, of)))
        if step is not None and reward is not None:
            solved = {PASSES + k: finite(line[passes + k]) for k in numbers_after(passes, line)}
            found[step] = {"step": step, EVALUATED: reward, ERROR: finite(line.get(_of_set(ERROR, of))), **solved}
    return [found[step] for step in sorted(found)]


def numbers_after(prefix: str, names: Iterable[str]) -> list[str]:
    """What follows `prefix` in those of `names` that are it and a number."""
    ends = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    return [end for end in ends if end.isdecimal()]


def _of_set(metric: str, of: str) -> str:
    return metric.replace("/", f"/{of}/", 1) if of else metric


def evaluated_sets(lines: Rows) -> list[str]:
    """Names of the sets that were evaluated, in their order."""
    names: dict[str, None] = {}
    for line in lines:
        for metric in line:
            parts = metric.split("/")
            if len(parts) == 3 and _of_set(EVALUATED, parts[1]) == metric:
                names[parts[1]] = None
    return list(names)


def evaluation_line(label: str, color: str, prefix: str = "") -> Line:
    """Evaluations are few: each is marked, and has steps of its own. `prefix`: of its columns, which differs by run."""
    return Line(prefix + EVALUATED, label, color, x=f"{prefix}evaluation/", error=prefix + ERROR, marks=True)


def describe_evaluations(
    runs: Sequence[tuple[Line, Rows]], axes: Sequence[dict[str, list[Any]]], training: Rows = ()
) -> Drawing:
    """A chart of the evaluations of each run that has some, and of the reward of the steps of `training` beside them. `axes`: of
    each run, see `x_columns`."""
    drawing = Drawing("evaluation")
    drawn: list[tuple[Line, Column]] = []
    for (line, evaluations), columns in zip(runs, axes, strict=True):
        if evaluations:
            drawn.append((line, [each[EVALUATED] for each in evaluations]))
            drawing.series |= _evaluation_columns(line.x, [each["step"] for each in evaluations], columns)
            drawing.series[line.error] = [each[ERROR] for each in evaluations]
    if not drawn:
        return drawing
    reward = Line("reward/mean", "training", "blue")
    drawn.append((reward, chart_column(EVALUATION_CHART, reward.metric, training)))
    caption = EVALUATION_CHART.caption + (", beside the step's own" if training else "")
    drawing.add(EVALUATION_CHART, drawn, caption=caption)
    return drawing


def add_passes(drawing: Drawing, line: Line, evaluations: Rows, title: str) -> None:
    """A chart of pass@k of one set, which `describe_evaluations` has drawn as `line`: a line for each k, the most at the top."""
    counts = sorted({int(k) for each in evaluations for k in numbers_after(PASSES, each)})
    drawn = [
        (
            Line(f"{line.metric}@{k}", f"pass@{k}", color(index), x=line.x, marks=True),
            [each.get(f"{PASSES}{k}") for each in evaluations],
        )
        for index, k in enumerate(counts)
    ]
    if len(counts) > 1:
        drawing.add(PASS_CHART, drawn[::-1], title=title)


def _evaluation_columns(prefix: str, steps: Sequence[float], run: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Where evaluations after `steps` are on each axis of their run, between its rows; at 0 before the first."""
    columns: dict[str, list[Any]] = {f"{prefix}x/step": list(steps)}
    for axis in AXES[1:]:
        made = zip(run.get("x/step", ()), run.get(f"x/{axis}", ()), strict=False)
        known = [(0.0, 0.0), *((step, at) for step, at in made if finite(step) is not None and at is not None)]
        if len(known) > 1:
            there, at = np.array(known, np.float64).T
            columns[f"{prefix}x/{axis}"] = np.interp(steps, there, at).round(2).tolist()
    return columns
