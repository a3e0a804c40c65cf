"""Charts of a run's evaluations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from r3async.data.metrics import finite_or_none
from r3async.views.charts import (
    EVALUATION_CHART,
    EVALUATION_ERROR,
    EVALUATION_REWARD,
    PASS_AT_K_CHART,
    PASS_AT_PREFIX,
    X_AXES,
    ChartLine,
    ChartSet,
    MetricsRows,
    NumberColumn,
    extract_column,
    pick_color,
)


def parse_evaluations(lines: MetricsRows, set_name: str = "") -> list[dict[str, Any]]:
    """Return the evaluations as `{"step", EVALUATION_REWARD, EVALUATION_ERROR}` and each pass@k, in
    the order of steps.

    The error is None where unknown. If a step was evaluated again after a resume, the last
    evaluation counts. `set_name` is one of `evaluation.sets`; by default the first.
    """
    found = {}
    passes = _insert_set_name(PASS_AT_PREFIX, set_name)
    for line in lines:
        step = finite_or_none(line.get("step"))
        reward = finite_or_none(line.get(_insert_set_name(EVALUATION_REWARD, set_name)))
        if step is not None and reward is not None:
            solved = {
                PASS_AT_PREFIX + k: finite_or_none(line[passes + k])
                for k in find_number_suffixes(passes, line)
            }
            found[step] = {
                "step": step,
                EVALUATION_REWARD: reward,
                EVALUATION_ERROR: finite_or_none(
                    line.get(_insert_set_name(EVALUATION_ERROR, set_name))
                ),
                **solved,
            }
    return [found[step] for step in sorted(found)]


def find_number_suffixes(prefix: str, names: Iterable[str]) -> list[str]:
    """Return the numbers, as text, of those `names` that consist of `prefix` and a number."""
    ends = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    return [end for end in ends if end.isdecimal()]


def _insert_set_name(metric: str, set_name: str) -> str:
    return metric.replace("/", f"/{set_name}/", 1) if set_name else metric


def find_evaluated_sets(lines: MetricsRows) -> list[str]:
    """Return the names of the sets that were evaluated, in their order."""
    names: dict[str, None] = {}
    for line in lines:
        for metric in line:
            parts = metric.split("/")
            if len(parts) == 3 and _insert_set_name(EVALUATION_REWARD, parts[1]) == metric:
                names[parts[1]] = None
    return list(names)


def make_evaluation_line(label: str, color: str, prefix: str = "") -> ChartLine:
    """Return the chart line of a run's evaluations.

    Evaluations are few, so each is marked, and they have their own steps. `prefix`, of its
    columns, differs by run.
    """
    return ChartLine(
        prefix + EVALUATION_REWARD,
        label,
        color,
        x=f"{prefix}evaluation/",
        error=prefix + EVALUATION_ERROR,
        marks=True,
    )


def build_evaluation_charts(
    runs: Sequence[tuple[ChartLine, MetricsRows]],
    axes: Sequence[dict[str, list[Any]]],
    training: MetricsRows = (),
) -> ChartSet:
    """Build a chart of the evaluations of all runs that have some, and of the reward of the
    steps of `training`.

    `axes` has the columns of each run from `make_x_columns`.
    """
    drawing = ChartSet("evaluation")
    drawn: list[tuple[ChartLine, NumberColumn]] = []
    for (line, evaluations), columns in zip(runs, axes, strict=True):
        if evaluations:
            drawn.append((line, [each[EVALUATION_REWARD] for each in evaluations]))
            drawing.series |= _make_evaluation_columns(
                line.x, [each["step"] for each in evaluations], columns
            )
            drawing.series[line.error] = [each[EVALUATION_ERROR] for each in evaluations]
    if not drawn:
        return drawing
    reward = ChartLine("reward/mean", "training", "blue")
    drawn.append((reward, extract_column(EVALUATION_CHART, reward.metric, training)))
    caption = EVALUATION_CHART.caption + (", beside the step's own" if training else "")
    drawing.add_chart(EVALUATION_CHART, drawn, caption=caption)
    return drawing


def add_pass_chart(
    drawing: ChartSet, line: ChartLine, evaluations: MetricsRows, title: str
) -> None:
    """Add a chart of pass@k of one set, with a line for each k, the largest on top.

    `line` is the one that `build_evaluation_charts` drew for the set.
    """
    counts = sorted(
        {int(k) for each in evaluations for k in find_number_suffixes(PASS_AT_PREFIX, each)}
    )
    drawn = [
        (
            ChartLine(f"{line.metric}@{k}", f"pass@{k}", pick_color(index), x=line.x, marks=True),
            [each.get(f"{PASS_AT_PREFIX}{k}") for each in evaluations],
        )
        for index, k in enumerate(counts)
    ]
    if len(counts) > 1:
        drawing.add_chart(PASS_AT_K_CHART, drawn[::-1], title=title)


def _make_evaluation_columns(
    prefix: str, steps: Sequence[float], run: dict[str, list[Any]]
) -> dict[str, list[Any]]:
    """Return the positions of evaluations after `steps` on each axis of their run.

    They are interpolated between its rows; before the first row an axis starts at 0.
    """
    columns: dict[str, list[Any]] = {f"{prefix}x/step": list(steps)}
    for axis in X_AXES[1:]:
        made = zip(run.get("x/step", ()), run.get(f"x/{axis}", ()), strict=False)
        known = [
            (0.0, 0.0),
            *(
                (step, at)
                for step, at in made
                if finite_or_none(step) is not None and at is not None
            ),
        ]
        if len(known) > 1:
            there, at = np.array(known, np.float64).T
            columns[f"{prefix}x/{axis}"] = np.interp(steps, there, at).round(2).tolist()
    return columns
