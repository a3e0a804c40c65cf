"""Runs of a sweep, each with the curves that the sweep's figures are made from: read from its directory, or kept without it.

A sweep appends each whole run to `finished.jsonl` (`FinishedRun`). Figures, intervals and bands follow from that file alone,
so run directories may be deleted, and the data of this project's pages has no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from r3async.record.catalogue import LAST_STEPS, finite_or_none
from r3async.record.reading import convert_valid, read_json_objects
from r3async.views.charts import X_AXES, make_x_columns
from r3async.views.summary import NOT_TRAINED, RunSummary, summarize_run
from r3async.world.files import replace_file

FINISHED_FILE = "finished.jsonl"
"""In the sweep's directory."""
DRIFT_PREFIXES, WINDOW_STEPS = ("rollout_kl/", "served_kl/"), 25
"""Of these metrics a sweep has the largest mean of so many steps in a row: a bound holds in every window, or it does not."""

NumberColumn = list[float | None]


class SweepRun(msgspec.Struct, frozen=True):
    """`name`: of its directory in the sweep's. `model`: the number of its initial model."""

    name: str
    point: str
    seed: int
    model: int


class FinishedRun(msgspec.Struct, frozen=True):
    """A whole run. `overrides`: of `preset`. `facts`: what it depends on beside these: commit, machine, software. `columns`: by
    metric, and by `x/AXIS` (`charts.make_x_columns`), a value for each step; without `x/time` if the run was resumed."""

    name: str
    preset: str
    overrides: list[str]
    status: str
    reason: str
    facts: dict[str, str]
    columns: dict[str, NumberColumn]


class RunResults(msgspec.Struct, frozen=True):
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


class RunCurves(msgspec.Struct, frozen=True):
    """A run as far as it got. `columns`: see `FinishedRun`."""

    status: str
    reason: str
    is_complete: bool
    columns: dict[str, NumberColumn]

    @classmethod
    def from_directory(cls, path: Path, metrics: Iterable[str]) -> RunCurves:
        """Of a run's directory, which may not be there yet."""
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
        """The metric's integral over the axis from 0 to each edge; None where a step lacks it."""
        pairs = zip(self.columns.get(f"x/{axis}", ()), self.columns[name], strict=False)
        known = [(x, y) for x, y in pairs if x is not None and y is not None]
        if not known:
            return None
        at, value = np.array([(0.0, 0.0), *known], np.float64).T
        return np.interp(edges, at, np.cumsum(value * np.diff(at, prepend=0.0)))

    def compute_largest_window(self, name: str) -> float | None:
        """The largest mean of `WINDOW_STEPS` steps in a row; of a shorter run the mean. None where no step has the metric."""
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
            if name.startswith(DRIFT_PREFIXES):
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
    """Whether a run made all its steps, also where it ended before it could say so."""
    made = bool(summary.planned_steps) and summary.steps >= (summary.planned_steps or 0)
    return summary.status in ("finished", NOT_TRAINED) or (made and summary.status != "failed")


def read_finished_runs(path: Path, metrics: Iterable[str] = ()) -> dict[str, FinishedRun]:
    """By name, the runs of a file `finished.jsonl` that have these metrics; none of a file that is not there. Of a run that is
    there twice, the later one."""
    wanted = set(metrics)
    return {
        run.name: run for run in convert_valid(read_json_objects(path), FinishedRun) if wanted <= run.columns.keys()
    }


def write_finished_runs(path: Path, runs: Iterable[FinishedRun]) -> None:
    """A line for each, whole or as it was."""
    replace_file(path, b"".join(msgspec.json.encode(run) + b"\n" for run in runs))


def round_to_six_digits(value: float | None) -> Any:
    """Six digits: enough for every figure, and short in a file."""
    return None if value is None else float(f"{value:.6g}")
