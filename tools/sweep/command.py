"""The command `r3async sweep`. It imports nothing heavy until the plan is read."""

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
from r3async.config.load import explain_bad_name

from ..runs import DEFAULT_RUNS_DIRECTORY, NewRunsOption

if TYPE_CHECKING:
    from r3async.views.sweeps import SweepResults

    from .capacity import Machine, RunNeeds, SweepCapacity
    from .plan import PlannedRun, SweepPlan

PrintLine = Callable[[str], object]


class SweepRequest(NamedTuple):
    """The request of a command line: a plan file, overrides, the runs (`plan.choose_runs`), and how many at once."""

    path: Path
    overrides: Sequence[str] = ()
    seeds: str = ""
    models: str = ""
    only: str = ""
    parallel: int | None = None


class CheckedSweep(NamedTuple):
    """A validated request: the whole plan, the chosen runs, the largest one's needs, how many at once, and where."""

    plan: SweepPlan
    runs: list[PlannedRun]
    max_needs: RunNeeds
    capacity: SweepCapacity
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
    runs: NewRunsOption = DEFAULT_RUNS_DIRECTORY,
) -> None:
    """Make a plan's runs (settings, seeds, initial models) and a report with intervals. Exit 1 if a run failed.

    The same command continues a stopped sweep; finished runs are not repeated.
    """
    asked = SweepRequest(plan, overrides or [], seeds, models, only, parallel)
    if dry_run:
        checked = check_sweep(asked, _print_note, import_code=False)
        for run in checked.runs:
            typer.echo(shlex.join(["r3async", "train", run.preset, *run.overrides]))
        typer.echo(describe_sweep(checked))
        return
    if problem := explain_bad_name(name or plan.stem):
        raise ConfigError(f"--name {name or plan.stem!r} {problem}")
    directory = runs / (name or plan.stem)
    complete, results = run_sweep(directory, asked, _print_note)
    from r3async.views.sweeps import describe_results

    typer.echo(msgspec.json.encode(results).decode() if json else describe_results(results))
    if not complete:
        raise typer.Exit(1)


def check_sweep(request: SweepRequest, print_line: PrintLine, import_code: bool = True) -> CheckedSweep:
    """Validate every requested run like `r3async train --dry-run`. Raises `ConfigError` that names the run.

    Args:
        import_code: As in `make_checked_plan`.
    """
    from ..preflight import make_checked_plan
    from .capacity import combine_needs, compute_capacity, compute_needs, measure_machine
    from .plan import choose_runs, list_runs, read_sweep_plan

    plan = read_sweep_plan(request.path)
    try:
        planned = choose_runs(plan, list_runs(plan, request.overrides), request.seeds, request.models, request.only)
        machine, needs, cluster = measure_machine(), [], os.environ.get("RAY_ADDRESS", "")
        for at, run in enumerate(planned):
            if len(planned) > 20 and at % 20 == 0:
                print_line(f"validating run {at + 1} of {len(planned)}")
            config = run.make_config()
            cluster = config.cluster.address or cluster
            try:
                needs.append(compute_needs(config, make_checked_plan(config, import_code), machine))
            except ConfigError as error:
                raise ConfigError(f"run {run.name}: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{request.path}: {error}") from error
    most = combine_needs(needs)
    return CheckedSweep(
        plan, planned, most, compute_capacity(most, machine, len(planned), request.parallel, cluster), machine
    )


def describe_sweep(checked: CheckedSweep) -> str:
    count, why = checked.capacity
    return f"{len(checked.runs)} runs, {count} at once ({why})"


def run_sweep(directory: Path, asked: SweepRequest, print_line: PrintLine) -> tuple[bool, SweepResults]:
    """Make the requested runs that are missing in `directory`.

    Returns whether all requested runs are complete, and the results of all existing ones. Raises `ConfigError`, and
    `KeyboardInterrupt` after a requested stop.
    """
    from r3async.checkpoint.directory import RunLock
    from r3async.world.files import make_directory

    from ..run_dir import check_disk_space
    from ..train import StopRequest, handle_stop_signals
    from . import record as records
    from .capacity import make_slot_environment
    from .runner import SweepRunner, make_starter

    checked = check_sweep(asked, print_line)
    check_disk_space(directory)
    records.read_sweep_record(directory)  # check that it is free or belongs to a sweep
    make_directory(directory)
    lock = RunLock(directory)
    try:
        if not asyncio.run(lock.acquire_exclusive(0.0)):
            raise ConfigError(f"{directory} is in use by another sweep: wait for it, or choose another --name")
        at_once = checked.capacity.runs
        facts = records.collect_facts(
            shlex.join(["r3async", "sweep", str(asked.path), *asked.overrides]),
            f"{checked.machine.cores} cores, {len(checked.machine.gpus)} GPUs, {at_once} run{'s' * (at_once != 1)} at once",
        )
        record = records.begin_sweep(directory, checked.plan, asked.overrides, checked.runs, facts)
        print_line(f"{describe_sweep(checked)}; directory: {directory}")
        request = StopRequest()
        request.is_loading = False

        def ended(run: PlannedRun) -> None:
            records.save_finished_runs(directory, record, [run], facts)
            records.write_sweep_report(directory, record)

        runner = SweepRunner(
            directory,
            checked.runs,
            checked.capacity.runs,
            make_starter(directory, lambda slot: make_slot_environment(slot, checked.max_needs, checked.machine)),
            request,
            print_line,
            ended,
            metrics=checked.plan.metrics,
        )
        with handle_stop_signals(request):
            complete = runner.run_all()
        results = records.write_sweep_report(directory, record)
        print_line(f"report: {directory / 'report.html'}")
    finally:
        lock.close()
    if request.requested and not complete:
        print_line("stopped: the same command continues with what is left")
        raise KeyboardInterrupt
    for name in runner.failed_names:
        print_line(
            f"{name} failed; its output is in {directory / 'logs' / name}.txt, and the same command tries it again"
        )
    return complete, results


def _print_note(line: str) -> None:
    typer.echo(line, err=True)
