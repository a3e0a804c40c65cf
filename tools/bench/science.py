"""`bench science`: the sweeps of plan files, and their results as data from which the pages are made (`bench/page.py`)."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from r3async.config import ConfigError
from r3async.tools.bench.claims import FIGURES
from r3async.tools.bench.jobs import BenchError, Say
from r3async.tools.sweep.command import Asked, make
from r3async.tools.sweep.plan import read_plan
from r3async.views.sweeps import Results, describe_results
from r3async.world.files import make_directory, replace_file

PLANS = FIGURES / "plans"
STEPS = 4
"""Of a small measurement, which has two seeds."""


class Report(msgspec.Struct, frozen=True):
    """`sweeps`: results by plan. `quick`: they are small, and were not kept with the pages."""

    benchmark: str
    quick: bool
    sweeps: dict[str, Results]


def run(plans: Sequence[Path], asked: Asked, *, quick: bool, keep: Path | None, out: Path | None, say: Say) -> Report:
    """Make each plan's sweep, or what is missing of it in `keep`, and write its results to `out` (docs/figures/science) by the
    plan's name, with the runs that failed. `asked`: overrides, seeds and variants for all of them. Raises `ConfigError`, and
    `BenchError` where no run was finished."""
    if twice := next((p for p in plans if [q.stem for q in plans].count(p.stem) > 1), None):
        raise ConfigError(f"two plans are called {twice.stem}: their data would have one name")
    target = out or (None if quick else FIGURES / "science")
    found = {}
    with tempfile.TemporaryDirectory(prefix="r3async-science-") as scratch:
        for plan in plans:
            mine = asked._replace(path=plan)
            if quick:
                seeds = ",".join(map(str, read_plan(plan).seeds[:2]))
                mine = mine._replace(overrides=[*asked.overrides, f"steps={STEPS}"], seeds=asked.seeds or seeds)
            _, results = make((keep or Path(scratch)) / plan.stem, mine, say)
            if not any(each.complete for each in results.runs):
                raise BenchError(f"no run of {plan} was finished:\n{describe_results(results)}")
            words = shlex.join(["r3async", "bench", "science", str(plan), *asked.overrides])
            facts = results.facts | {"command": words}
            found[plan.stem] = msgspec.structs.replace(results, facts=facts)
            if target is not None:
                make_directory(target)
                replace_file(target / f"{plan.stem}.json", msgspec.json.encode(found[plan.stem]) + b"\n")
                say(f"wrote {target / plan.stem}.json; python -m r3async.tools.bench.page brings it into the pages")
    return Report("science", quick, found)


def render(report: Report) -> str:
    """For people."""
    return "\n\n".join(map(describe_results, report.sweeps.values()))
