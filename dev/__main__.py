"""Command line of the development tools: `python -m dev`. Imports nothing heavy until a
command needs it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dev.bench.commands import app as bench
from r3async.config import ConfigError
from r3async.tools.cli import OverridesArgument, run_app
from r3async.tools.runs import DEFAULT_RUNS_DIRECTORY, RunsOption

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench, name="bench")


@app.command()
def chaos(
    preset: Annotated[str, typer.Argument(help="a preset's name, or a TOML file")] = "quickstart",
    overrides: OverridesArgument = None,
    scenario: Annotated[
        str,
        typer.Option(
            help=(
                "what happens: kills, rewind, first-checkpoint, full-disk, frozen, blocked-line, "
                "full-memory or strangers"
            )
        ),
    ] = "kills",
    kills: Annotated[
        int, typer.Option(help="processes to kill, of every role (scenario kills)", min=0)
    ] = 20,
    seed: Annotated[int, typer.Option(help="of the run, of who is hit when, and of the noise")] = 0,
    engine: Annotated[str, typer.Option(help="scripted (no model plays), or vllm")] = "scripted",
    fault: Annotated[
        str,
        typer.Option(
            help="have the learner do one thing wrong, which the accounting has to show (exit 1)"
        ),
    ] = "",
    replay: Annotated[
        bool,
        typer.Option(
            "--replay",
            help="record the run, and make its steps again: every digest has to be the same",
        ),
    ] = False,
    runs: RunsOption = DEFAULT_RUNS_DIRECTORY,
    json: Annotated[bool, typer.Option("--json", help="one JSON object as the last line")] = False,
) -> None:
    """Inject the faults of a scenario into a real run, and check what it trained. Exits with 1
    for any problem."""
    import msgspec

    from dev.chaos.run import describe_report, run_chaos

    report = run_chaos(
        preset,
        overrides or [],
        scenario=scenario,
        kills=kills,
        seed=seed,
        engine=engine,
        fault=fault,
        root=runs,
        replayed=replay,
    )
    typer.echo(describe_report(report), err=json)
    if json:
        typer.echo(msgspec.json.encode(report))
    raise typer.Exit(1 if report.problems else 0)


@app.command()
def simulate(
    seeds: Annotated[int, typer.Option(help="how many runs", min=1)] = 100,
    seed: Annotated[int | None, typer.Option(help="only this run", min=0)] = None,
    first: Annotated[int, typer.Option(help="the first seed", min=0)] = 0,
    jobs: Annotated[int, typer.Option(help="processes; 0: one a core", min=0)] = 0,
    mutant: Annotated[
        str, typer.Option(help="plant this defect, which the search has to find (exit 1 if not)")
    ] = "",
    case: Annotated[Path | None, typer.Option(help="only this run, as --keep wrote it")] = None,
    keep: Annotated[
        Path | None, typer.Option(help="write the run that fails, made small, to this file")
    ] = None,
    shrink: Annotated[
        bool, typer.Option(help="make the run that fails small before it is reported")
    ] = True,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="write the last run's timeline: *.jsonl as a run's own, else Chrome's format"
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="one JSON object as the last line")] = False,
) -> None:
    """Simulate the whole system in virtual time with faults, a run per seed. Exits with 1 if an
    invariant is broken."""
    from dev.simulation.command import simulate_command

    raise typer.Exit(
        simulate_command(
            seeds=seeds if seed is None else 1,
            first=first if seed is None else seed,
            jobs=jobs,
            mutant=mutant,
            case=case,
            keep=keep,
            shrinking=shrink,
            trace=trace,
            json=json,
        )
    )


@app.command("simulate-tinker")
def simulate_tinker(
    seeds: Annotated[int, typer.Option(help="how many runs", min=1)] = 100,
    first: Annotated[int, typer.Option(help="the first seed", min=0)] = 0,
    jobs: Annotated[int, typer.Option(help="processes; 0: one a core", min=0)] = 0,
    mutant: Annotated[
        str, typer.Option(help="plant this defect, which the search has to find (exit 1 if not)")
    ] = "",
) -> None:
    """Simulate the Tinker server in virtual time, with clients that retry as the SDK does, and
    faults, a run per seed. Exits with 1 if an invariant is broken."""
    from dev.simulation.tinker.command import simulate_tinker_command

    raise typer.Exit(simulate_tinker_command(seeds=seeds, first=first, jobs=jobs, mutant=mutant))


@app.command()
def fuzz(
    messages: Annotated[
        int, typer.Option(help="damaged messages to a receiver", min=0)
    ] = 1_000_000,
    files: Annotated[int, typer.Option(help="damaged files of a spool", min=0)] = 100_000,
    checkpoints: Annotated[int, typer.Option(help="damaged checkpoints", min=0)] = 100_000,
    seed: int = 0,
) -> None:
    """Damage messages, spool files and checkpoints, and print how each kind was handled."""
    from dev.fuzz.run import run_fuzz

    run_fuzz(messages=messages, files=files, checkpoints=checkpoints, seed=seed)


@app.command(name="pack-gpu")
def pack_gpu(
    directory: Annotated[
        Path, typer.Argument(help="directory to make, and to copy to the other machine")
    ],
    small: Annotated[bool, typer.Option("--small", help="for a machine without a GPU")] = False,
    python: Annotated[
        str | None, typer.Option(help="the other machine's, as 3.12", show_default="this one's")
    ] = None,
    platform: Annotated[
        str | None, typer.Option(help="as manylinux_2_28_x86_64", show_default="this machine's")
    ] = None,
    has: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "NAME==VERSION that the other machine has, as torch==2.13.0, or a file of such "
                "lines (its pip freeze): left out, with all that only they need; may be repeated"
            )
        ),
    ] = None,
    piece: Annotated[int, typer.Option(help="MiB of a file at most", min=1)] = 1024,
) -> None:
    """Pack r3async for a machine without pip and network: `python run.py` there is
    `r3async doctor --gpu`."""
    from dev.gpu.pack import PackError, Target, pack_bundle

    try:
        target = Target.read(python, platform)
        made = pack_bundle(
            directory,
            target,
            extra="cpu" if small else "gpu",
            has=has or [],
            piece=piece << 20,
            say=typer.echo,
        )
    except PackError as error:
        raise ConfigError(str(error)) from error
    size = sum(size for _, size, _ in made["pieces"]) / 1e6
    typer.echo(
        f"{directory}: {len(made['wheels'])} wheels, {size:.0f} MB in {len(made['pieces'])} pieces"
    )
    typer.echo(
        f"copy it there, then: python{target.python} "
        f"{directory.name}/run.py{' --small' if small else ''}"
    )


@app.command()
def sweep(
    plan: Annotated[
        Path, typer.Argument(help="a TOML file, such as docs/figures/plans/quickstart.toml")
    ],
    only: Annotated[str, typer.Option(help="only runs whose names contain this text")] = "",
    parallel: Annotated[int, typer.Option(help="runs at once", min=1)] = 1,
    runs: RunsOption = DEFAULT_RUNS_DIRECTORY,
) -> None:
    """Make a plan's runs that are not finished yet, and print means with intervals. Exits with 1
    if a run failed."""
    from dev.bench.jobs import print_to_stderr
    from dev.bench.report import collect_facts
    from dev.sweep.plan import read_sweep_plan
    from dev.sweep.results import (
        FINISHED_FILE,
        compute_results,
        describe_results,
        read_finished_runs,
    )
    from dev.sweep.runs import make_runs, make_train_command

    swept = read_sweep_plan(plan)
    directory = runs / plan.stem
    failed = make_runs(
        directory,
        swept,
        only=only,
        parallel=parallel,
        facts=collect_facts(f"python -m dev sweep {plan} --parallel {parallel}"),
        print_line=print_to_stderr,
        make_command=make_train_command,
    )
    finished = read_finished_runs(directory / FINISHED_FILE)
    typer.echo(describe_results(swept, compute_results(swept, finished)))
    raise typer.Exit(1 if failed else 0)


def main() -> None:
    run_app(app, "python -m dev")


if __name__ == "__main__":
    main()
