"""Results of a sweep, as data and as a page: means of runs with intervals, paired differences, curves with bands.

`data/statistics.py` computes what the runs tell about other seeds and models.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from r3async.data.metrics import LAST_STEPS, find_metric, finite_or_none
from r3async.data.statistics import Estimate, RunKey, estimate_mean, paired_difference
from r3async.record.reading import convert_valid, read_json_objects
from r3async.views.charts import X_AXES, Chart, ChartLine, ChartSet, make_x_columns, pick_color
from r3async.views.summary import NOT_TRAINED, RunSummary, format_number, format_seconds, summarize_run
from r3async.views.templates import TEMPLATES
from r3async.world.files import replace_file

# Runs of a sweep with the curves that its results are computed from: read from a run's directory, or kept without it.
#
# A sweep appends each complete run to `finished.jsonl` (`FinishedRun`). All figures, intervals and bands are computed
# from that file alone, so run directories may be deleted; the data behind this project's pages has no other files.


FINISHED_FILE = "finished.jsonl"
"""File of complete runs in the directory of a sweep."""
DRIFT_PREFIX, WINDOW_STEPS = "rollout_kl/", 25
"""Prefix of drift metrics, and number of consecutive steps in a window.

A sweep has the largest window mean of each of these metrics, because a bound holds only if it holds in every window.
"""

NumberColumn = list[float | None]


class SweepRun(msgspec.Struct, frozen=True):
    """A planned run of a sweep.

    Attributes:
        name: Name of its directory in the sweep's directory.
        point: Name of its point.
        model: Number of its initial model.
    """

    name: str
    point: str
    seed: int
    model: int


class FinishedRun(msgspec.Struct, frozen=True):
    """A complete run.

    Attributes:
        overrides: Overrides of `preset`.
        facts: Other things that the run depends on: commit, machine, software.
        columns: A value for each step, by metric and by `x/AXIS` (`charts.make_x_columns`); `x/time` is missing if the
            run was resumed.
    """

    name: str
    preset: str
    overrides: list[str]
    status: str
    reason: str
    facts: dict[str, str]
    columns: dict[str, NumberColumn]


class RunResults(msgspec.Struct, frozen=True):
    """The results of one run.

    Attributes:
        complete: True if the run made all its steps, so its figures count.
        seconds: Wall time in seconds; None for a run that was interrupted and resumed.
        figures: Figures by outcome.
    """

    name: str
    point: str
    seed: int
    model: int
    status: str
    reason: str
    complete: bool
    steps: int
    seconds: float | None
    tokens: float
    figures: dict[str, float]


class RunCurves(msgspec.Struct, frozen=True):
    """The curves of a run as far as it got. `columns` are as in `FinishedRun`."""

    status: str
    reason: str
    is_complete: bool
    columns: dict[str, NumberColumn]

    @classmethod
    def from_directory(cls, path: Path, metrics: Iterable[str]) -> RunCurves:
        """Read the curves from a run's directory, which may not exist yet."""
        rows, summary = read_json_objects(path / "metrics.jsonl"), summarize_run(path)
        columns: dict[str, NumberColumn] = make_x_columns(rows)
        if summary.history.starts > 1:
            columns.pop("x/time", None)
        columns |= {name: [round_to_six_digits(finite_or_none(row.get(name))) for row in rows] for name in metrics}
        return cls(summary.status, summary.reason, is_run_complete(summary), columns)

    @classmethod
    def from_finished(cls, run: FinishedRun) -> RunCurves:
        return cls(run.status, run.reason, True, run.columns)

    @property
    def step_count(self) -> int:
        return len(self.columns.get("x/step", ()))

    def get_axis_end(self, axis: str) -> float | None:
        known = [x for x in self.columns.get(f"x/{axis}", ()) if x is not None]
        return known[-1] if known and known[-1] > 0 else None

    def integrate_until(self, name: str, axis: str, edges: np.ndarray) -> np.ndarray | None:
        """Return the metric's integral over the axis from 0 to each edge; None where a step lacks it."""
        pairs = zip(self.columns.get(f"x/{axis}", ()), self.columns[name], strict=False)
        known = [(x, y) for x, y in pairs if x is not None and y is not None]
        if not known:
            return None
        at, value = np.array([(0.0, 0.0), *known], np.float64).T
        return np.interp(edges, at, np.cumsum(value * np.diff(at, prepend=0.0)))

    def compute_largest_window(self, name: str) -> float | None:
        """Return the largest mean over `WINDOW_STEPS` consecutive steps, or the mean of a shorter run.

        None where no step has the metric.
        """
        known = self._present_values(name)
        if not known:
            return None
        sums = np.cumsum([0.0, *known])
        width = min(WINDOW_STEPS, len(known))
        return float((sums[width:] - sums[:-width]).max()) / width

    def compute_results(self, run: SweepRun, metrics: Sequence[str], ends: Mapping[str, float | None]) -> RunResults:
        found = dict[str, float | None]()
        for name in metrics:
            if known := self._present_values(name):
                found |= {name: sum(known) / len(known), f"{name}, last": _compute_mean(known[-LAST_STEPS:])}
            if name.startswith(DRIFT_PREFIX):
                found[f"{name}, window"] = self.compute_largest_window(name)
            for axis in X_AXES[1:]:
                if (end := ends[axis]) is not None and (
                    sums := self.integrate_until(name, axis, np.array([end]))
                ) is not None:
                    found[f"{name}, {axis}"] = float(sums[0]) / end
        return RunResults(
            **msgspec.to_builtins(run),
            status=self.status,
            reason=self.reason,
            complete=self.is_complete,
            steps=self.step_count,
            seconds=self.get_axis_end("time"),
            tokens=self.get_axis_end("tokens") or 0.0,
            figures={name: round_to_six_digits(value) for name, value in found.items() if value is not None},
        )

    def _present_values(self, name: str) -> list[float]:
        return [value for value in self.columns[name] if value is not None]


def _compute_mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def is_run_complete(summary: RunSummary) -> bool:
    """Return True if a run made all its steps, even if it ended before it could report that."""
    made = bool(summary.planned_steps) and summary.steps >= (summary.planned_steps or 0)
    return summary.status in ("finished", NOT_TRAINED) or (made and summary.status != "failed")


def read_finished_runs(path: Path, metrics: Iterable[str] = ()) -> dict[str, FinishedRun]:
    """Read the runs of a file `finished.jsonl` that have these metrics, by name.

    A missing file has no runs. Of a run that is listed twice, the later line counts.
    """
    wanted = set(metrics)
    return {
        run.name: run for run in convert_valid(read_json_objects(path), FinishedRun) if wanted <= run.columns.keys()
    }


def write_finished_runs(path: Path, runs: Iterable[FinishedRun]) -> None:
    """Write a file `finished.jsonl` with a line for each run. The file is replaced as a whole or stays as it was."""
    replace_file(path, b"".join(msgspec.json.encode(run) + b"\n" for run in runs))


def round_to_six_digits(value: float | None) -> Any:
    """Round to six significant digits: enough for every figure, and short in a file."""
    return None if value is None else float(f"{value:.6g}")


RESULTS_FILE, REPORT_FILE = "results.json", "report.html"
"""Files of the results in the directory of a sweep."""
MAX_BINS = 40
"""Maximum number of bins of a curve."""
AXIS_LABELS = {"time": "wall time", "tokens": "trained tokens"}


class SweepPoint(msgspec.Struct, frozen=True):
    """A point of a sweep, whose settings are run with every seed and model.

    Attributes:
        base_point: Name of the point that it is compared with.
        settings: Settings of the point itself.
    """

    name: str
    base_point: str
    settings: dict[str, Any]


class SweepDescription(msgspec.Struct, frozen=True):
    """The description of a sweep.

    Attributes:
        facts: Things that the results depend on, as text by name: command, commit, machine.
    """

    title: str
    metrics: list[str]
    points: list[SweepPoint]
    runs: list[SweepRun]
    facts: dict[str, str]


class PointResults(msgspec.Struct, frozen=True):
    """The results of all runs of a point.

    Attributes:
        estimates: Estimate of each outcome.
        differences: Difference of each outcome to `base`, paired by seed and model.
        largest: Largest value of each outcome in any run.
    """

    name: str
    base: str
    settings: dict[str, Any]
    planned: int
    complete: int
    estimates: dict[str, Estimate]
    differences: dict[str, Estimate]
    largest: dict[str, float] = {}


class CurveBand(msgspec.Struct, frozen=True):
    """A curve of a point over an axis, by bin: the mean over runs, with its 95 % interval."""

    mean: list[float | None]
    low: list[float | None]
    high: list[float | None]


class SweepResults(msgspec.Struct, frozen=True):
    """The results of a sweep.

    Attributes:
        outcomes: Description of each figure, by name.
        axes: Middle of each bin, by axis.
        bands: Curve bands by metric, axis and point.
    """

    title: str
    facts: dict[str, str]
    outcomes: dict[str, str]
    runs: list[RunResults]
    points: list[PointResults]
    axes: dict[str, list[float]]
    bands: dict[str, dict[str, dict[str, CurveBand]]]


def read_sweep_results(directory: Path, swept: SweepDescription) -> SweepResults:
    """Read the results that the runs of a sweep have written so far.

    Complete runs are read from `finished.jsonl`, all others from their directories.
    """
    kept = read_finished_runs(directory / FINISHED_FILE, swept.metrics)
    curves = [
        (
            run,
            RunCurves.from_finished(kept[run.name])
            if run.name in kept
            else RunCurves.from_directory(directory / run.name, swept.metrics),
        )
        for run in swept.runs
    ]
    complete = [(run, each) for run, each in curves if each.is_complete]
    ends = {axis: _find_common_end([each for _, each in complete], axis) for axis in X_AXES}
    outcomes = _name_outcomes(swept.metrics, ends)
    runs = [each.compute_results(run, swept.metrics, ends) for run, each in curves]
    edges = {
        axis: np.linspace(0.0, end, min(MAX_BINS, max(1, min(each.step_count for _, each in complete))) + 1)
        for axis, end in ends.items()
        if end is not None
    }
    return SweepResults(
        swept.title,
        swept.facts | _merge_facts([kept[run.name] for run in swept.runs if run.name in kept]),
        outcomes,
        runs,
        [_estimate_point(point, runs, outcomes) for point in swept.points],
        {axis: [round_to_six_digits(x) for x in (each[1:] + each[:-1]) / 2] for axis, each in edges.items()},
        {
            name: {axis: _estimate_bands(complete, name, axis, each) for axis, each in edges.items()}
            for name in swept.metrics
        },
    )


def _merge_facts(runs: Sequence[FinishedRun]) -> dict[str, str]:
    """Merge the facts of all runs: each commit and each machine appears once, in the order of the runs."""
    names = dict.fromkeys(name for run in runs for name in run.facts)
    return {name: "; ".join(dict.fromkeys(run.facts[name] for run in runs if name in run.facts)) for name in names}


def _find_common_end(runs: Sequence[RunCurves], axis: str) -> float | None:
    """Return the largest axis value that all complete runs reach; None if one of them has no values on the axis."""
    ends = [run.get_axis_end(axis) for run in runs]
    known = [end for end in ends if end is not None]
    return min(known) if known and len(known) == len(ends) else None


def _name_outcomes(metrics: Sequence[str], ends: Mapping[str, float | None]) -> dict[str, str]:
    found = {}
    for name in metrics:
        label = find_metric(name).label
        found[name] = f"{label}, mean of all steps"
        found[f"{name}, last"] = f"{label}, last {LAST_STEPS} steps"
        if name.startswith(DRIFT_PREFIX):
            found[f"{name}, window"] = f"{label}, largest mean of {WINDOW_STEPS} steps"
        for axis, words in AXIS_LABELS.items():
            if (end := ends[axis]) is not None:
                much = format_seconds(end) if axis == "time" else f"{format_number(end)} tokens"
                found[f"{name}, {axis}"] = f"{label}, mean over equal {words} ({much})"
    return found


def _estimate_point(point: SweepPoint, runs: Sequence[RunResults], outcomes: Iterable[str]) -> PointResults:
    estimates, differences, largest = {}, {}, {}
    for outcome in outcomes:
        mine, base = _collect_outcomes(runs, point.name, outcome), _collect_outcomes(runs, point.base_point, outcome)
        if mine:
            estimates[outcome], largest[outcome] = estimate_mean(mine), max(mine.values())
        if point.base_point != point.name and (difference := paired_difference(mine, base)) is not None:
            differences[outcome] = difference
    of = [run for run in runs if run.point == point.name]
    complete = sum(run.complete for run in of)
    return PointResults(
        point.name, point.base_point, point.settings, len(of), complete, estimates, differences, largest
    )


def _collect_outcomes(runs: Sequence[RunResults], point: str, outcome: str) -> dict[RunKey, float]:
    return {
        (run.seed, run.model): run.figures[outcome]
        for run in runs
        if run.complete and run.point == point and outcome in run.figures
    }


def _estimate_bands(
    runs: Sequence[tuple[SweepRun, RunCurves]], name: str, axis: str, edges: np.ndarray
) -> dict[str, CurveBand]:
    """Estimate the band of a metric over an axis for each point."""
    by_point: dict[str, dict[RunKey, np.ndarray]] = {}
    for run, curves in runs:
        if (sums := curves.integrate_until(name, axis, edges)) is not None:
            by_point.setdefault(run.point, {})[run.seed, run.model] = np.diff(sums) / np.diff(edges)
    return {point: _estimate_band(means, len(edges) - 1) for point, means in by_point.items()}


def _estimate_band(curves: Mapping[RunKey, np.ndarray], bins: int) -> CurveBand:
    found = [estimate_mean({run: float(curve[at]) for run, curve in curves.items()}) for at in range(bins)]
    return CurveBand(
        *([round_to_six_digits(getattr(each, part)) for each in found] for part in ("mean", "low", "high")),
    )


# -- formatting --------------------------------------------------------------------------------------------------------


def format_estimate(estimate: Estimate | None, signed: bool = False) -> str:
    """Format an estimate as `0.812 [0.790, 0.834]`; a single run has no interval."""
    if estimate is None:
        return "-"
    sign = "+" if signed and estimate.mean > 0 else ""
    if estimate.low is None or estimate.high is None:
        return f"{sign}{format_number(estimate.mean)} (one run)"
    return f"{sign}{format_number(estimate.mean)} [{format_number(estimate.low)}, {format_number(estimate.high)}]"


def format_outcome(point: PointResults, outcome: str) -> str:
    """Format the estimate of an outcome; for a window outcome, also the largest value of any run."""
    text = format_estimate(point.estimates.get(outcome))
    if outcome.endswith(", window") and outcome in point.largest:
        text += f", at most {format_number(point.largest[outcome])}"
    return text


def describe_run_counts(results: SweepResults) -> str:
    """Describe the number of runs, as in `5 seeds x 3 initial models`, and how many are missing."""
    runs = [run for run in results.runs if run.complete]
    seeds, models = len({run.seed for run in runs}), len({run.model for run in runs})
    lacking = len(results.runs) - len(runs)
    words = f"{seeds} seed{'s' * (seeds != 1)} x {models} initial model{'s' * (models != 1)}"
    if 1 < seeds == models == len({(run.seed, run.model) for run in runs}):
        words = f"{seeds} seeds, each with an initial model of its own"
    return words + (f"; {lacking} of {len(results.runs)} runs are missing or failed" if lacking else "")


def describe_results(results: SweepResults) -> str:
    """Format the results for a terminal: each point with its figures and differences."""
    lines = [results.title or "sweep", describe_run_counts(results)]
    for outcome, words in results.outcomes.items():
        lines += ["", words]
        for point in results.points:
            text = f"  {point.name:<32} {format_outcome(point, outcome)}"
            if outcome in point.differences:
                text += f"; {format_estimate(point.differences[outcome], signed=True)} against {point.base}"
            lines.append(text)
    lines += [f"\n{run.name}: {run.status} {run.reason}".rstrip() for run in results.runs if not run.complete]
    return "\n".join(lines)


# -- the page ----------------------------------------------------------------------------------------------------------


def write_sweep_results(directory: Path, swept: SweepDescription) -> SweepResults:
    """Write `results.json` and `report.html` into the sweep's directory, each whole or not at all."""
    results = read_sweep_results(directory, swept)
    replace_file(directory / RESULTS_FILE, msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    replace_file(directory / REPORT_FILE, render_results_page(results, directory).encode("utf-8", "replace"))
    return results


def render_results_page(results: SweepResults, directory: Path) -> str:
    """Render the page of a sweep, as HTML."""
    drawing = _build_charts(results)
    names = [point.name for point in results.points]
    compared = [point for point in results.points if point.differences]
    page = {
        "results": results,
        "names": [(name, pick_color(at)) for at, name in enumerate(names)],
        "counted": describe_run_counts(results),
        "estimates": _make_table(results.points, results.outcomes, "estimates"),
        "compared": [(f"{each.name} less {each.base}", pick_color(names.index(each.name))) for each in compared],
        "differences": _make_table(compared, results.outcomes, "differences"),
        "runs": [(run, format_seconds(run.seconds)) for run in results.runs],
    }
    data = {
        "series": drawing.series,
        "charts": drawing.charts,
        "more": [],
        "maps": [],
        "ages": None,
        "timeline": None,
    }
    return TEMPLATES.get_template("report_sweep.html").render(
        page,
        title=results.title or directory.name,
        data=data,
        drawn=bool(drawing.charts),
        axes=[axis for axis in X_AXES if axis in results.axes],
        written=time.strftime("%Y-%m-%d %H:%M:%S"),
        where=str(directory),
        live=None,
    )


def _make_table(
    points: Sequence[PointResults], outcomes: Mapping[str, str], kind: str
) -> list[tuple[str, list[tuple[str, int]]]]:
    """Build a table with a line for each outcome, which has a text and a sign for each point."""
    lines = []
    for outcome, words in outcomes.items():
        found = [getattr(point, kind).get(outcome) for point in points]
        if any(found) and kind == "differences":
            lines.append((words, [(format_estimate(each, signed=True), each.sign if each else 0) for each in found]))
        elif any(found):
            lines.append((words, [(format_outcome(point, outcome), 0) for point in points]))
    return lines


def _build_charts(results: SweepResults) -> ChartSet:
    """Build a chart for each metric, with a line and a band for each point."""
    drawing = ChartSet("sweep")
    for name, by_axis in results.bands.items():
        known, lines = find_metric(name), []
        for at, point in enumerate(results.points):
            for axis, bands in by_axis.items():
                if (band := bands.get(point.name)) is None:
                    continue
                key = f"{at}:{name}"
                drawing.series |= {f"{key}{part}@{axis}": getattr(band, part) for part in ("mean", "low", "high")}
                if axis == X_AXES[0]:
                    line = ChartLine(f"{key}mean", point.name, pick_color(at), low=f"{key}low", high=f"{key}high")
                    lines.append((line, band.mean))
        caption = "mean of the runs; the band is its 95 % interval"
        drawing.add_chart(Chart(known.label, caption, known.unit), lines)
    drawing.series |= {f"x/{axis}": column for axis, column in results.axes.items()}
    return drawing
