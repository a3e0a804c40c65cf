"""`r3async sweep`. Imports nothing heavy until the plan is read."""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import typer

from r3async.config import ConfigError
from r3async.config.read import name_problem
from r3async.tools.runs import RUNS, NewRuns

if TYPE_CHECKING:
    from r3async.tools.sweep.capacity import Capacity, Machine, Need
    from r3async.tools.sweep.plan import PlannedRun, SweepPlan
    from r3async.views.sweeps import Results

Say = Callable[[str], object]


class Asked(NamedTuple):
    """What a command line says: a plan file, overrides, which of its runs (see `plan.chosen`), and how many at once."""

    path: Path
    overrides: Sequence[str] = ()
    seeds: str = ""
    models: str = ""
    only: str = ""
    parallel: int | None = None


class Checked(NamedTuple):
    """The whole plan; the runs that were asked for, validated; what the largest of them needs; how many at once, and where."""

    plan: SweepPlan
    runs: list[PlannedRun]
    most: Need
    capacity: Capacity
    machine: Machine


def sweep(
    plan: Annotated[Path, typer.Argument(help="a TOML file; docs/sweeps.md says what is in it")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="key=value for every run, for example steps=60", show_default=False),
    ] = None,
    name: Annotated[
        str, typer.Option(help="of the sweep's directory among the runs", show_default="the plan file's")
    ] = "",
    parallel: Annotated[
        int | None, typer.Option(help="runs at once", min=1, show_default="as many as this machine allows")
    ] = None,
    seeds: Annotated[str, typer.Option(help="only these of the plan, like 0,1", show_default="all")] = "",
    models: Annotated[
        str, typer.Option(help="only these of its initial models, by number from 0", show_default="all")
    ] = "",
    only: Annotated[str, typer.Option(help="only these variants, with commas between", show_default="all")] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="validate every run, and list them; start nothing")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="the results as one JSON object on the last line")] = False,
    runs: NewRuns = RUNS,
) -> None:
    """Make many runs from a plan: settings, seeds, initial models; then a report with intervals. Exit 1 if a run failed.

    The same command continues a sweep that was stopped; runs that are finished are not made again.
    """
    asked = Asked(plan, overrides or [], seeds, models, only, parallel)
    if dry_run:
        checked = check(asked, _note, imports=False)
        for run in checked.runs:
            typer.echo(shlex.join(["r3async", "train", run.preset, *run.overrides]))
        typer.echo(described(checked))
        return
    if problem := name_problem(name or plan.stem):
        raise ConfigError(f"--name {name or plan.stem!r} {problem}")
    directory = runs / (name or plan.stem)
    complete, results = make(directory, asked, _note)
    from r3async.views.sweeps import describe_results

    typer.echo(msgspec.json.encode(results).decode() if json else describe_results(results))
    if not complete:
        raise typer.Exit(1)


def check(asked: Asked, say: Say, imports: bool = True) -> Checked:
    """Every run that is asked for, validated as by `r3async train --dry-run`; see `make_plan` for `imports`. Raises `ConfigError`
    that names the run."""
    from r3async.tools.plan import checked_plan
    from r3async.tools.sweep.capacity import at_once, here, largest, need
    from r3async.tools.sweep.plan import chosen, read_plan, runs_of

    plan = read_plan(asked.path)
    try:
        planned = chosen(plan, runs_of(plan, asked.overrides), asked.seeds, asked.models, asked.only)
        machine, needs, cluster = here(), [], os.environ.get("RAY_ADDRESS", "")
        for at, run in enumerate(planned):
            if len(planned) > 20 and at % 20 == 0:
                say(f"validating run {at + 1} of {len(planned)}")
            config = run.config()
            cluster = config.cluster.address or cluster
            try:
                needs.append(need(config, checked_plan(config, imports), machine))
            except ConfigError as error:
                raise ConfigError(f"run {run.name}: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{asked.path}: {error}") from error
    most = largest(needs)
    return Checked(plan, planned, most, at_once(most, machine, len(planned), asked.parallel, cluster), machine)


def described(checked: Checked) -> str:
    count, why = checked.capacity
    return f"{len(checked.runs)} runs, {count} at once ({why})"


def make(directory: Path, asked: Asked, say: Say) -> tuple[bool, Results]:
    """Make the runs that are asked for and missing in `directory`. Returns whether all of them are complete, and the results of
    all that are there. Raises `ConfigError` and, where somebody asked for the end, `KeyboardInterrupt`."""
    from r3async.checkpoint.directory import RunLock
    from r3async.tools.run_dir import check_capacity
    from r3async.tools.sweep import record as records
    from r3async.tools.sweep.capacity import devices_of
    from r3async.tools.sweep.runner import Runner, starter
    from r3async.tools.train import StopRequest, stop_signals
    from r3async.world.files import make_directory

    checked = check(asked, say)
    check_capacity(directory)
    records.read_record(directory)  # is it free, or a sweep's?
    make_directory(directory)
    lock = RunLock(directory)
    try:
        if not asyncio.run(lock.alone(0.0)):
            raise ConfigError(f"{directory} is in use by another sweep: wait for it, or choose another --name")
        at_once = checked.capacity.runs
        facts = records.facts_of(
            shlex.join(["r3async", "sweep", str(asked.path), *asked.overrides]),
            f"{checked.machine.cores} cores, {len(checked.machine.gpus)} GPUs, {at_once} run{'s' * (at_once != 1)} at once",
        )
        record = records.begin(directory, checked.plan, asked.overrides, checked.runs, facts)
        say(f"{described(checked)}; directory: {directory}")
        request = StopRequest()
        request.loading = False

        def ended(run: PlannedRun) -> None:
            records.keep(directory, record, [run], facts)
            records.report(directory, record)

        runner = Runner(
            directory,
            checked.runs,
            checked.capacity.runs,
            starter(directory, lambda slot: devices_of(slot, checked.most, checked.machine)),
            request,
            say,
            ended,
            metrics=checked.plan.metrics,
        )
        with stop_signals(request):
            complete = runner.make()
        results = records.report(directory, record)
        say(f"report: {directory / 'report.html'}")
    finally:
        lock.close()
    if request.requested and not complete:
        say("stopped: the same command continues with what is left")
        raise KeyboardInterrupt
    for name in runner.failed:
        say(f"{name} failed; its output is in {directory / 'logs' / name}.txt, and the same command tries it again")
    return complete, results


def _note(line: str) -> None:
    typer.echo(line, err=True)
