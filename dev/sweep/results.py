"""Finished runs of a sweep, kept in one file, and what they come to: means over seeds with
intervals, paired differences.

A sweep appends each run that made all its steps to `finished.jsonl`: its settings, commit and
machine, and by step the plan's metrics. All figures follow from that file alone, so the runs'
directories may be deleted; docs/figures/science has such files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np

from dev.estimates import Estimate, estimate_mean
from dev.sweep.plan import PlannedRun, SweepPlan, list_points, list_runs
from r3async.data.metrics import LAST_STEPS, finite_or_none
from r3async.record.reading import read_json_objects
from r3async.views.number_formats import format_number
from r3async.views.summary import NOT_TRAINED, summarize_run

FINISHED_FILE = "finished.jsonl"
DRIFT_PREFIX = "rollout_kl/"
WINDOW_STEPS = 25
"""Consecutive steps of a window. A bound on drift holds if it holds in every window."""


class FinishedRun(msgspec.Struct, frozen=True):
    """A run that made all its steps.

    Attributes:
        facts: What else the run depends on: commit, machine, software.
        columns: By metric, a value for each step; None where a step lacks it.
    """

    name: str
    preset: str
    overrides: list[str]
    status: str
    reason: str
    facts: dict[str, str]
    columns: dict[str, list[float | None]]


class PointResults(msgspec.Struct, frozen=True):
    """The results of all finished runs of a point.

    Attributes:
        base: Name of the point that it is compared with.
        figures: By seed, the figures of the run (`compute_figures`).
        estimates: The mean of each figure over the runs.
        differences: The mean difference of each figure to `base`, paired by seed.
    """

    name: str
    base: str
    figures: dict[int, dict[str, float]]
    estimates: dict[str, Estimate]
    differences: dict[str, Estimate]

    def find_largest(self, figure: str) -> float:
        """Return the largest value of a figure in any run."""
        return max(figures[figure] for figures in self.figures.values())


def read_finished_runs(path: Path) -> dict[str, FinishedRun]:
    """Read the runs of a file `finished.jsonl` by name; a missing file has none."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    runs = [msgspec.json.decode(line, type=FinishedRun) for line in lines]
    return {run.name: run for run in runs}


def append_finished_run(path: Path, run: FinishedRun) -> None:
    with path.open("ab") as file:
        file.write(msgspec.json.encode(run) + b"\n")


def collect_finished_run(
    directory: Path, plan: SweepPlan, run: PlannedRun, facts: Mapping[str, str]
) -> FinishedRun | None:
    """Read a run from its directory; None if it is not there or has not made all its steps."""
    path = directory / run.name
    if not path.is_dir():
        return None
    summary = summarize_run(path)
    if summary.status not in ("finished", NOT_TRAINED):
        return None
    rows = read_json_objects(path / "metrics.jsonl")
    columns = {
        name: [
            None if (v := finite_or_none(row.get(name))) is None else float(f"{v:.6g}")
            for row in rows
        ]
        for name in plan.metrics
    }
    return FinishedRun(
        run.name, plan.preset, run.overrides, summary.status, summary.reason, dict(facts), columns
    )


def compute_figures(run: FinishedRun, metrics: Sequence[str]) -> dict[str, float]:
    """Compute the figures of a run.

    For each metric: its mean over all steps; `METRIC, last`, over the last `LAST_STEPS`; and for
    drift `METRIC, window`, the largest mean over `WINDOW_STEPS` consecutive steps.
    """
    found = {}
    for name in metrics:
        known = [value for value in run.columns[name] if value is not None]
        if not known:
            continue
        found[name] = fmean(known)
        found[f"{name}, last"] = fmean(known[-LAST_STEPS:])
        if name.startswith(DRIFT_PREFIX):
            width = min(WINDOW_STEPS, len(known))
            means = np.convolve(known, np.full(width, 1 / width), mode="valid")
            found[f"{name}, window"] = float(means.max())
    return found


def compute_results(plan: SweepPlan, finished: Mapping[str, FinishedRun]) -> list[PointResults]:
    """Compute the results of each point from the finished runs of the plan."""
    figures: dict[str, dict[int, dict[str, float]]] = {}
    for run in list_runs(plan):
        of_point = figures.setdefault(run.point, {})
        if run.name in finished:
            of_point[run.seed] = compute_figures(finished[run.name], plan.metrics)
    results = []
    for point in list_points(plan):
        own = figures[point.name]
        names = dict.fromkeys(name for each in own.values() for name in each)
        estimates = {
            name: estimate_mean([each[name] for each in own.values() if name in each])
            for name in names
        }
        differences = {}
        for name in names if point.base != point.name else ():
            base = figures[point.base]
            pairs = [
                own[seed][name] - base[seed][name]
                for seed in own
                if seed in base and name in own[seed] and name in base[seed]
            ]
            if pairs:
                differences[name] = estimate_mean(pairs)
        results.append(PointResults(point.name, point.base, own, estimates, differences))
    return results


def format_estimate(estimate: Estimate, sign: str = "") -> str:
    """Format an estimate as `0.812 [0.79, 0.834]`; a single value has no interval.

    Args:
        sign: "+" for a difference.
    """
    mean = f"{sign if estimate.mean > 0 else ''}{format_number(estimate.mean)}"
    if estimate.low is None or estimate.high is None:
        return f"{mean} (one run)"
    return f"{mean} [{format_number(estimate.low)}, {format_number(estimate.high)}]"


def describe_results(plan: SweepPlan, results: Sequence[PointResults]) -> str:
    """Format the results for a terminal."""
    finished = sum(len(point.figures) for point in results)
    lines = [f"{plan.title or 'sweep'}: {finished} of {len(list_runs(plan))} runs"]
    for name in dict.fromkeys(name for point in results for name in point.estimates):
        lines += ["", name]
        for point in results:
            if name not in point.estimates:
                continue
            text = f"  {point.name:<40} {format_estimate(point.estimates[name])}"
            if name.endswith(", window"):
                text += f", at most {format_number(point.find_largest(name))}"
            if name in point.differences:
                text += f"; {format_estimate(point.differences[name], '+')} against {point.base}"
            lines.append(text)
    return "\n".join(lines)
