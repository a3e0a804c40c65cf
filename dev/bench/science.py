"""The benchmark `bench science`: the sweeps of plan files, with results as data from which the pages are made
(`bench/page.py`).

Each plan has two files: NAME.jsonl with every complete run (`views/sweeps.py`), and NAME.json with the results. The
second is made from the first, by the same command, without training: a run that is in the data is not made again. So
the runs of a plan may be made in several parts, on machines that are gone by the time of the last.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from dev.bench.claims import FIGURES
from dev.bench.jobs import BenchError, Say
from r3async.config import ConfigError
from r3async.tools.sweep.command import SweepRequest, run_sweep
from r3async.tools.sweep.plan import list_runs, read_sweep_plan
from r3async.tools.sweep.record import RunSpec
from r3async.views.sweeps import (
    FINISHED_FILE,
    RESULTS_FILE,
    SweepResults,
    describe_results,
    read_finished_runs,
    write_finished_runs,
)
from r3async.world.files import make_directory, replace_file

PLANS = FIGURES / "plans"
STEPS = 4
"""Number of steps of a small measurement, which has two seeds."""


class Report(msgspec.Struct, frozen=True):
    """The report of `bench science`.

    Attributes:
        quick: True if the sweeps are small, and were not kept with the pages.
        sweeps: results by plan.
    """

    benchmark: str
    quick: bool
    sweeps: dict[str, SweepResults]


def run(
    plans: Sequence[Path], asked: SweepRequest, *, quick: bool, keep: Path | None, out: Path | None, say: Say
) -> Report:
    """Make each plan's sweep, and write its runs and results.

    Runs that `out` (docs/figures/science) and `keep` have are not made again. The runs and results are written to `out`
    by the plan's name, with the runs that failed, and also if the command is interrupted. Raises `ConfigError`,
    `BenchError` if no run was finished, and `KeyboardInterrupt`.

    Args:
        asked: overrides, seeds and variants for all plans.
    """
    if twice := next((p for p in plans if [q.stem for q in plans].count(p.stem) > 1), None):
        raise ConfigError(f"two plans are called {twice.stem}: their data would have one name")
    target = out or (None if quick else FIGURES / "science")
    found = {}
    with tempfile.TemporaryDirectory(prefix="r3async-science-") as scratch:
        for plan in plans:
            mine = asked._replace(path=plan)
            if quick:
                seeds = ",".join(map(str, read_sweep_plan(plan).seeds[:2]))
                mine = mine._replace(overrides=[*asked.overrides, f"steps={STEPS}"], seeds=asked.seeds or seeds)
            directory = (keep or Path(scratch)) / plan.stem
            data = target and target / f"{plan.stem}.jsonl"
            if data is not None:
                _take(data, directory, mine)
            try:
                _, results = run_sweep(directory, mine, say)
            except KeyboardInterrupt:
                if data is not None and (directory / FINISHED_FILE).exists():
                    results = msgspec.json.decode((directory / RESULTS_FILE).read_bytes(), type=SweepResults)
                    _give(directory, data, _named(plan, asked, results))
                raise
            if not any(each.complete for each in results.runs):
                raise BenchError(f"no run of {plan} was finished:\n{describe_results(results)}")
            found[plan.stem] = _named(plan, asked, results)
            if data is not None:
                _give(directory, data, found[plan.stem])
                say(f"wrote {data} and .json; python -m dev.bench.page brings them into the pages")
    return Report("science", quick, found)


def _named(plan: Path, asked: SweepRequest, results: SweepResults) -> SweepResults:
    """Add to the results the command that makes them."""
    words = shlex.join(["python", "-m", "dev", "bench", "science", str(plan), *asked.overrides])
    return msgspec.structs.replace(results, facts=results.facts | {"command": words})


def _take(data: Path, directory: Path, asked: SweepRequest) -> None:
    """Add to the sweep's directory the runs of the data that it lacks. Raises `ConfigError` for a run that the plan
    would make with other settings."""
    plan = read_sweep_plan(asked.path)
    runs = {run.name: run for run in list_runs(plan, asked.overrides)}
    there = {name: run for name, run in read_finished_runs(data, plan.metrics).items() if name in runs}
    for name, run in there.items():
        if difference := RunSpec(run.preset, run.overrides).describe_difference(runs[name]):
            raise ConfigError(
                f"{data} has a run {name} that was made with other settings ({difference}): name another directory (--out), or "
                "remove that line to make the run again"
            )
    own = directory / FINISHED_FILE
    if there.keys() - read_finished_runs(own).keys():
        make_directory(directory)
        write_finished_runs(own, (there | read_finished_runs(own)).values())


def _give(directory: Path, data: Path, results: SweepResults) -> None:
    """Write the data of the plan's runs, in the plan's order, and the results. Curves are in the first file alone."""
    finished = read_finished_runs(directory / FINISHED_FILE)
    make_directory(data.parent)
    write_finished_runs(data, [finished[run.name] for run in results.runs if run.name in finished])
    figures = msgspec.structs.replace(results, axes={}, bands={})
    replace_file(data.with_suffix(".json"), msgspec.json.encode(figures) + b"\n")


def render(report: Report) -> str:
    """Format the report for people."""
    return "\n\n".join(map(describe_results, report.sweeps.values()))
