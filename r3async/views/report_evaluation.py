"""Evaluations in a report: reward on tasks that training never poses, over the steps after which they began."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from r3async.record.catalogue import finite
from r3async.record.reading import EVALUATION, read_objects
from r3async.views.charts import Chart, Line, Series, chart_column, chart_frame

REWARD, ERROR = "evaluation/reward_mean", "evaluation/reward_error"
CHART = Chart(
    "Evaluation",
    (Line(REWARD, "evaluation", "orange"), Line("reward/mean", "training", "blue")),
    "mean reward of tasks that training never poses, with its standard error, beside the step's own",
)


def read_evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """`{"step", REWARD, ERROR}` in the order of steps; ERROR is None where unknown. Of one step that was evaluated again,
    after a resume, the last counts."""
    found = {}
    for line in read_objects(run_dir / EVALUATION):
        step, reward = finite(line.get("step")), finite(line.get(REWARD))
        if step is not None and reward is not None:
            found[step] = {"step": step, REWARD: reward, ERROR: finite(line.get(ERROR))}
    return [found[step] for step in sorted(found)]


def describe_evaluation(
    evaluations: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]
) -> tuple[list[dict[str, Any]], Series]:
    """The chart as the page's script wants it, none without evaluations; and the columns it draws."""
    if not evaluations:
        return [], {}
    training = chart_column(CHART, "reward/mean", rows)
    series = _columns("", evaluations) | {"reward/mean": training}
    lines = [_drawn("", CHART.lines[0])]
    if any(value is not None for value in training):
        lines.append(msgspec.to_builtins(CHART.lines[1]))
    steps = [each["step"] for each in evaluations] + [
        row["step"] for row in rows if finite(row.get("step")) is not None
    ]
    return [_framed([*series[REWARD], *(v for v in training if v is not None)], steps) | {"lines": lines}], series


def describe_evaluations(
    runs: Sequence[Sequence[dict[str, Any]]], names: Sequence[str], colors: Sequence[str]
) -> tuple[list[dict[str, Any]], Series]:
    """One chart with a line for each run that has evaluations; and the columns it draws."""
    lines: list[dict[str, Any]] = []
    series: Series = {}
    for index, evaluations in enumerate(runs):
        if evaluations:
            series |= _columns(f"{index}:", evaluations)
            lines.append(_drawn(f"{index}:", Line(f"{index}:{REWARD}", names[index], colors[index])))
    if not lines:
        return [], {}
    every = [each for evaluations in runs for each in evaluations]
    framed = _framed([each[REWARD] for each in every], [each["step"] for each in every])
    caption = "mean reward of tasks that training never poses, with its standard error"
    return [framed | {"caption": caption, "lines": lines}], series


def _columns(prefix: str, evaluations: Sequence[dict[str, Any]]) -> Series:
    names = {"evaluation/step": "step", REWARD: REWARD, ERROR: ERROR}
    return {prefix + name: [each[key] for each in evaluations] for name, key in names.items()}


def _drawn(prefix: str, line: Line) -> dict[str, Any]:
    """Evaluations are few: each is marked, and has steps of its own."""
    return msgspec.to_builtins(line) | {"x": f"{prefix}evaluation/step", "error": prefix + ERROR, "marks": True}


def _framed(values: list[float], steps: Sequence[float]) -> dict[str, Any]:
    """`span`: of the steps, with room for marks at both ends. Step 0, before training, may be among them."""
    room = max(0.5, (max(steps) - min(steps)) / 50)
    return chart_frame(CHART, values, None, "chart-evaluation") | {"span": [min(steps) - room, max(steps) + room]}
