"""Runs of a sweep, each with the curves that the sweep's figures are made from: read from its directory, or kept without it.

A sweep appends each whole run to `finished.jsonl` (`KeptRun`). Figures, intervals and bands follow from that file alone, so run
directories may be deleted, and the data of this project's pages has no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from r3async.record.catalogue import LAST_STEPS, finite
from r3async.record.reading import converted, read_objects
from r3async.views.charts import AXES, x_columns
from r3async.views.summary import NOT_TRAINED, RunSummary, summarize
from r3async.world.files import replace_file

FINISHED = "finished.jsonl"
"""In the sweep's directory."""
DRIFT, WINDOW = ("rollout_kl/", "served_kl/"), 25
"""Of these metrics a sweep has the largest mean of so many steps in a row: a bound holds in every window, or it does not."""

Column = list[float | None]


class SweptRun(msgspec.Struct, frozen=True):
    """`name`: of its directory in the sweep's. `model`: the number of its initial model."""

    name: str
    point: str
    seed: int
    model: int


class KeptRun(msgspec.Struct, frozen=True):
    """A whole run. `overrides`: of `preset`. `facts`: what it depends on beside these: commit, machine, software. `columns`: by
    metric, and by `x/AXIS` (`charts.x_columns`), a value for each step; without `x/time` if the run was resumed."""

    name: str
    preset: str
    overrides: list[str]
    status: str
    reason: str
    facts: dict[str, str]
    columns: dict[str, Column]


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


class Curves(msgspec.Struct, frozen=True):
    """A run as far as it got. `columns`: see `KeptRun`."""

    status: str
    reason: str
    complete: bool
    columns: dict[str, Column]

    @classmethod
    def read(cls, path: Path, metrics: Iterable[str]) -> Curves:
        """Of a run's directory, which may not be there yet."""
        rows, summary = read_objects(path / "metrics.jsonl"), summarize(path)
        columns: dict[str, Column] = x_columns(rows)
        if summary.history.lives > 1:
            columns.pop("x/time", None)
        columns |= {name: [short(finite(row.get(name))) for row in rows] for name in metrics}
        return cls(summary.status, summary.reason, is_complete(summary), columns)

    @classmethod
    def kept(cls, run: KeptRun) -> Curves:
        return cls(run.status, run.reason, True, run.columns)

    @property
    def steps(self) -> int:
        return len(self.columns.get("x/step", ()))

    def end(self, axis: str) -> float | None:
        known = [x for x in self.columns.get(f"x/{axis}", ()) if x is not None]
        return known[-1] if known and known[-1] > 0 else None

    def until(self, name: str, axis: str, edges: np.ndarray) -> np.ndarray | None:
        """The metric's integral over the axis from 0 to each edge; None where a step lacks it."""
        pairs = zip(self.columns.get(f"x/{axis}", ()), self.columns[name], strict=False)
        known = [(x, y) for x, y in pairs if x is not None and y is not None]
        if not known:
            return None
        at, value = np.array([(0.0, 0.0), *known], np.float64).T
        return np.interp(edges, at, np.cumsum(value * np.diff(at, prepend=0.0)))

    def largest_window(self, name: str) -> float | None:
        """The largest mean of `WINDOW` steps in a row; of a shorter run the mean. None where no step has the metric."""
        known = self._known(name)
        if not known:
            return None
        sums = np.cumsum([0.0, *known])
        width = min(WINDOW, len(known))
        return float((sums[width:] - sums[:-width]).max()) / width

    def figures(self, run: SweptRun, metrics: Sequence[str], ends: Mapping[str, float | None]) -> RunFigures:
        found = dict[str, float | None]()
        for name in metrics:
            if known := self._known(name):
                found |= {name: sum(known) / len(known), f"{name}, last": _mean(known[-LAST_STEPS:])}
            if name.startswith(DRIFT):
                found[f"{name}, window"] = self.largest_window(name)
            for axis in AXES[1:]:
                if (end := ends[axis]) is not None and (sums := self.until(name, axis, np.array([end]))) is not None:
                    found[f"{name}, {axis}"] = float(sums[0]) / end
        return RunFigures(
            **msgspec.to_builtins(run),
            status=self.status,
            reason=self.reason,
            complete=self.complete,
            steps=self.steps,
            seconds=self.end("time"),
            tokens=self.end("tokens") or 0.0,
            figures={name: short(value) for name, value in found.items() if value is not None},
        )

    def _known(self, name: str) -> list[float]:
        return [value for value in self.columns[name] if value is not None]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def is_complete(summary: RunSummary) -> bool:
    """Whether a run made all its steps, also where it ended before it could say so."""
    made = bool(summary.planned_steps) and summary.steps >= (summary.planned_steps or 0)
    return summary.status in ("finished", NOT_TRAINED) or (made and summary.status != "failed")


def read_finished(path: Path, metrics: Iterable[str] = ()) -> dict[str, KeptRun]:
    """By name, the runs of a file `finished.jsonl` that have these metrics; none of a file that is not there. Of a run that is
    there twice, the later one."""
    wanted = set(metrics)
    return {run.name: run for run in converted(read_objects(path), KeptRun) if wanted <= run.columns.keys()}


def write_finished(path: Path, runs: Iterable[KeptRun]) -> None:
    """A line for each, whole or as it was."""
    replace_file(path, b"".join(msgspec.json.encode(run) + b"\n" for run in runs))


def short(value: float | None) -> Any:
    """Six digits: enough for every figure, and short in a file."""
    return None if value is None else float(f"{value:.6g}")
