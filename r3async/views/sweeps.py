"""Results of a sweep, as data and as a page: means of runs with intervals, paired differences, curves with bands.

What a run comes to is worked out here, and what that says of other seeds and models in `data/statistics.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from r3async.data.statistics import Estimate, Run, estimate, paired
from r3async.record.catalogue import LAST_STEPS, Stats, finite, metric
from r3async.record.reading import read_objects
from r3async.views.charts import AXES, Chart, Drawing, Line, color, x_columns
from r3async.views.summary import NOT_TRAINED, RunSummary, format_number, format_seconds, summarize
from r3async.views.templates import TEMPLATES
from r3async.world.files import replace_file

RESULTS, PAGE = "results.json", "report.html"
"""In the sweep's directory."""
BINS = 40
"""Of a curve, at most."""
DRIFT, WINDOW = ("rollout_kl/", "served_kl/"), 25
"""Of these metrics a sweep has the largest mean of so many steps in a row: a bound holds in every window, or it does not."""
AXIS_WORDS = {"time": "wall time", "tokens": "trained tokens"}


class SweptPoint(msgspec.Struct, frozen=True):
    """What is repeated with every seed and model. `base`: the point that it is compared with. `settings`: its own."""

    name: str
    base: str
    settings: dict[str, Any]


class SweptRun(msgspec.Struct, frozen=True):
    """`name`: of its directory in the sweep's. `model`: the number of its initial model."""

    name: str
    point: str
    seed: int
    model: int


class Swept(msgspec.Struct, frozen=True):
    """What a sweep is made of. `facts`: what its results depend on, in words by name: command, commit, machine."""

    title: str
    metrics: list[str]
    points: list[SweptPoint]
    runs: list[SweptRun]
    facts: dict[str, str]


class RunFigures(msgspec.Struct, frozen=True):
    """Of one run. `complete`: it made all its steps, and its figures count. `seconds`: of wall time, None for a run that was
    interrupted and resumed. `figures`: by outcome."""

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


class PointFigures(msgspec.Struct, frozen=True):
    """Of all runs of a point. `differences`: of each outcome to `base`, paired by seed and model. `largest`: of any run."""

    name: str
    base: str
    settings: dict[str, Any]
    planned: int
    complete: int
    estimates: dict[str, Estimate]
    differences: dict[str, Estimate]
    largest: dict[str, float] = {}


class Band(msgspec.Struct, frozen=True):
    """A curve of a point over an axis, by bin: the mean over runs, and its 95 % interval."""

    mean: list[float | None]
    low: list[float | None]
    high: list[float | None]


class Results(msgspec.Struct, frozen=True):
    """`outcomes`: what each figure is, by name. `axes`: the middle of each bin, by axis. `bands`: by metric, axis and point."""

    title: str
    facts: dict[str, str]
    outcomes: dict[str, str]
    runs: list[RunFigures]
    points: list[PointFigures]
    axes: dict[str, list[float]]
    bands: dict[str, dict[str, dict[str, Band]]]


def read_results(directory: Path, swept: Swept) -> Results:
    """What the sweep's runs in `directory` have written so far."""
    loaded = [_Loaded.read(directory / run.name, run) for run in swept.runs]
    complete = [each for each in loaded if each.complete]
    ends = {axis: _common_end(complete, axis) for axis in AXES}
    outcomes = _outcomes(swept.metrics, ends)
    runs = [each.figures(swept.metrics, ends) for each in loaded]
    edges = {
        axis: np.linspace(0.0, end, min(BINS, max(1, min(len(each.rows) for each in complete))) + 1)
        for axis, end in ends.items()
        if end is not None
    }
    return Results(
        swept.title,
        swept.facts,
        outcomes,
        runs,
        [_point(point, runs, outcomes) for point in swept.points],
        {axis: [_short(x) for x in (each[1:] + each[:-1]) / 2] for axis, each in edges.items()},
        {name: {axis: _bands(complete, name, axis, each) for axis, each in edges.items()} for name in swept.metrics},
    )


class _Loaded(msgspec.Struct):
    """A run with its rows. `axes`: `x_columns`, without the time of a run that was resumed."""

    run: SweptRun
    summary: RunSummary
    rows: list[dict[str, Any]]
    axes: dict[str, list[Any]]

    @classmethod
    def read(cls, path: Path, run: SweptRun) -> _Loaded:
        rows, summary = read_objects(path / "metrics.jsonl"), summarize(path)
        axes = x_columns(rows)
        if summary.history.lives > 1:
            axes.pop("x/time", None)
        return cls(run, summary, rows, axes)

    @property
    def complete(self) -> bool:
        return is_complete(self.summary)

    def end(self, axis: str) -> float | None:
        known = [x for x in self.axes.get(f"x/{axis}", ()) if x is not None]
        return known[-1] if known and known[-1] > 0 else None

    def until(self, name: str, axis: str, edges: np.ndarray) -> np.ndarray | None:
        """The metric's integral over the axis from 0 to each edge; None where a step lacks it."""
        xs, ys = self.axes.get(f"x/{axis}", ()), [finite(row.get(name)) for row in self.rows]
        known = [(x, y) for x, y in zip(xs, ys, strict=False) if x is not None and y is not None]
        if not known:
            return None
        at, value = np.array([(0.0, 0.0), *known], np.float64).T
        return np.interp(edges, at, np.cumsum(value * np.diff(at, prepend=0.0)))

    def largest_window(self, name: str) -> float | None:
        """The largest mean of `WINDOW` steps in a row; of a shorter run the mean. None where no step has the metric."""
        known = [y for row in self.rows if (y := finite(row.get(name))) is not None]
        if not known:
            return None
        sums = np.cumsum([0.0, *known])
        width = min(WINDOW, len(known))
        return float((sums[width:] - sums[:-width]).max()) / width

    def figures(self, metrics: Sequence[str], ends: Mapping[str, float | None]) -> RunFigures:
        summary, found = self.summary, dict[str, float | None]()
        for name in metrics:
            stats = Stats.of(self.rows, name)
            found |= {name: stats.mean, f"{name}, last": stats.last}
            if name.startswith(DRIFT):
                found[f"{name}, window"] = self.largest_window(name)
            for axis in AXES[1:]:
                if (end := ends[axis]) is not None and (sums := self.until(name, axis, np.array([end]))) is not None:
                    found[f"{name}, {axis}"] = float(sums[0]) / end
        return RunFigures(
            **msgspec.to_builtins(self.run),
            status=summary.status,
            reason=summary.reason,
            complete=self.complete,
            steps=summary.steps,
            seconds=self.end("time"),
            tokens=self.end("tokens") or 0.0,
            figures={name: _short(value) for name, value in found.items() if value is not None},
        )


def is_complete(summary: RunSummary) -> bool:
    """Whether a run made all its steps, also where it ended before it could say so."""
    made = bool(summary.planned_steps) and summary.steps >= (summary.planned_steps or 0)
    return summary.status in ("finished", NOT_TRAINED) or (made and summary.status != "failed")


def _common_end(runs: Sequence[_Loaded], axis: str) -> float | None:
    """As far as every complete run gets on that axis; None if one is not on it."""
    ends = [run.end(axis) for run in runs]
    known = [end for end in ends if end is not None]
    return min(known) if known and len(known) == len(ends) else None


def _outcomes(metrics: Sequence[str], ends: Mapping[str, float | None]) -> dict[str, str]:
    found = {}
    for name in metrics:
        label = metric(name).label
        found[name] = f"{label}, mean of all steps"
        found[f"{name}, last"] = f"{label}, last {LAST_STEPS} steps"
        if name.startswith(DRIFT):
            found[f"{name}, window"] = f"{label}, largest mean of {WINDOW} steps"
        for axis, words in AXIS_WORDS.items():
            if (end := ends[axis]) is not None:
                much = format_seconds(end) if axis == "time" else f"{format_number(end)} tokens"
                found[f"{name}, {axis}"] = f"{label}, mean over equal {words} ({much})"
    return found


def _point(point: SweptPoint, runs: Sequence[RunFigures], outcomes: Iterable[str]) -> PointFigures:
    estimates, differences, largest = {}, {}, {}
    for outcome in outcomes:
        mine, base = _values(runs, point.name, outcome), _values(runs, point.base, outcome)
        if mine:
            estimates[outcome], largest[outcome] = estimate(mine), max(mine.values())
        if point.base != point.name and (difference := paired(mine, base)) is not None:
            differences[outcome] = difference
    of = [run for run in runs if run.point == point.name]
    complete = sum(run.complete for run in of)
    return PointFigures(point.name, point.base, point.settings, len(of), complete, estimates, differences, largest)


def _values(runs: Sequence[RunFigures], point: str, outcome: str) -> dict[Run, float]:
    return {
        (run.seed, run.model): run.figures[outcome]
        for run in runs
        if run.complete and run.point == point and outcome in run.figures
    }


def _bands(runs: Sequence[_Loaded], name: str, axis: str, edges: np.ndarray) -> dict[str, Band]:
    """By point."""
    by_point: dict[str, dict[Run, np.ndarray]] = {}
    for run in runs:
        if (sums := run.until(name, axis, edges)) is not None:
            means = np.diff(sums) / np.diff(edges)
            by_point.setdefault(run.run.point, {})[run.run.seed, run.run.model] = means
    return {point: _band(curves, len(edges) - 1) for point, curves in by_point.items()}


def _band(curves: Mapping[Run, np.ndarray], bins: int) -> Band:
    found = [estimate({run: float(curve[at]) for run, curve in curves.items()}) for at in range(bins)]
    return Band(
        *([_short(getattr(each, part)) for each in found] for part in ("mean", "low", "high")),
    )


def _short(value: float | None) -> Any:
    """Six digits: enough for every figure, and short in a file."""
    return None if value is None else float(f"{value:.6g}")


# -- in words ----------------------------------------------------------------------------------------------------------


def format_estimate(found: Estimate | None, signed: bool = False) -> str:
    """`0.812 [0.790, 0.834]`; of a single run without the interval."""
    if found is None:
        return "-"
    sign = "+" if signed and found.mean > 0 else ""
    if found.low is None or found.high is None:
        return f"{sign}{format_number(found.mean)} (one run)"
    return f"{sign}{format_number(found.mean)} [{format_number(found.low)}, {format_number(found.high)}]"


def format_outcome(point: PointFigures, outcome: str) -> str:
    """The estimate, and of windows also the largest of any run."""
    text = format_estimate(point.estimates.get(outcome))
    if outcome.endswith(", window") and outcome in point.largest:
        text += f", at most {format_number(point.largest[outcome])}"
    return text


def counted(results: Results) -> str:
    """How many runs there are: `5 seeds x 3 initial models`, and what is missing."""
    runs = [run for run in results.runs if run.complete]
    seeds, models = len({run.seed for run in runs}), len({run.model for run in runs})
    lacking = len(results.runs) - len(runs)
    words = f"{seeds} seed{'s' * (seeds != 1)} x {models} initial model{'s' * (models != 1)}"
    if 1 < seeds == models == len({(run.seed, run.model) for run in runs}):
        words = f"{seeds} seeds, each with an initial model of its own"
    return words + (f"; {lacking} of {len(results.runs)} runs are missing or failed" if lacking else "")


def describe_results(results: Results) -> str:
    """For a terminal: each point with its figures, and the differences."""
    lines = [results.title or "sweep", counted(results)]
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


def write_results(directory: Path, swept: Swept) -> Results:
    """Write `results.json` and `report.html` into the sweep's directory, each whole or not at all."""
    results = read_results(directory, swept)
    replace_file(directory / RESULTS, msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    replace_file(directory / PAGE, results_page(results, directory).encode("utf-8", "replace"))
    return results


def results_page(results: Results, directory: Path) -> str:
    """The whole page, as HTML."""
    drawing = _drawing(results)
    names = [point.name for point in results.points]
    compared = [point for point in results.points if point.differences]
    page = {
        "results": results,
        "names": [(name, color(at)) for at, name in enumerate(names)],
        "counted": counted(results),
        "estimates": _table(results.points, results.outcomes, "estimates"),
        "compared": [(f"{each.name} less {each.base}", color(names.index(each.name))) for each in compared],
        "differences": _table(compared, results.outcomes, "differences"),
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
        axes=[axis for axis in AXES if axis in results.axes],
        written=time.strftime("%Y-%m-%d %H:%M:%S"),
        where=str(directory),
        live=None,
    )


def _table(
    points: Sequence[PointFigures], outcomes: Mapping[str, str], kind: str
) -> list[tuple[str, list[tuple[str, int]]]]:
    """A line for each outcome: a text and a sign for each point."""
    lines = []
    for outcome, words in outcomes.items():
        found = [getattr(point, kind).get(outcome) for point in points]
        if any(found) and kind == "differences":
            lines.append((words, [(format_estimate(each, signed=True), each.sign if each else 0) for each in found]))
        elif any(found):
            lines.append((words, [(format_outcome(point, outcome), 0) for point in points]))
    return lines


def _drawing(results: Results) -> Drawing:
    """A chart for each metric, a line and a band for each point."""
    drawing = Drawing("sweep")
    for name, by_axis in results.bands.items():
        known, lines = metric(name), []
        for at, point in enumerate(results.points):
            for axis, bands in by_axis.items():
                if (band := bands.get(point.name)) is None:
                    continue
                key = f"{at}:{name}"
                drawing.series |= {f"{key}{part}@{axis}": getattr(band, part) for part in ("mean", "low", "high")}
                if axis == AXES[0]:
                    line = Line(f"{key}mean", point.name, color(at), low=f"{key}low", high=f"{key}high")
                    lines.append((line, band.mean))
        caption = "mean of the runs; the band is its 95 % interval"
        drawing.add(Chart(known.label, caption, known.unit), lines)
    drawing.series |= {f"x/{axis}": column for axis, column in results.axes.items()}
    return drawing
