"""The `python -m dev bench` command line. It imports nothing heavy until a benchmark runs.

Each benchmark is a command here: a module of this package measures, and `_print_report` makes the
report of what it found. The list of benchmarks shows the first line of each command's docstring.
"""

from __future__ import annotations

import inspect
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from dev.bench.jobs import BenchError, end_on_sigterm, print_to_stderr
from r3async.config import ConfigError

if TYPE_CHECKING:
    from dev.bench.report import Measurements

Json = Annotated[bool, typer.Option("--json", help="one JSON object as the last line of stdout")]
Quick = Annotated[
    bool, typer.Option("--quick", help="a small measurement: the path, not the figures")
]
Seeds = Annotated[str, typer.Option(help="seeds, with commas between")]

app = typer.Typer(
    add_completion=False,
    help="Measure a part of r3async: `bench NAME --json`. Without a name: the list.",
)


@app.callback(invoke_without_command=True)
def list_benchmarks(context: typer.Context) -> None:
    """Measure a part of r3async. Without a name, list the benchmarks."""
    if context.invoked_subcommand is None:
        for command in app.registered_commands:
            assert command.callback is not None
            text = inspect.getdoc(command.callback) or ""
            summary = " ".join(text.partition("\n\n")[0].split())
            typer.echo(f"{command.callback.__name__:<12}{summary}")


def _print_report(name: str, measure: Callable[[], Measurements], json: bool) -> None:
    """Measure and print the report. Exit with code 1 if the measurement failed, or found
    what it must not."""
    from dev.bench.report import build_report, collect_facts, render_report

    facts = collect_facts(shlex.join(["python", "-m", "dev", *sys.argv[1:]]))
    try:
        with end_on_sigterm():
            report = build_report(name, measure(), facts)
    except BenchError as error:
        typer.echo(f"the benchmark failed: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(msgspec.json.encode(report) if json else render_report(report))
    if report.problems:
        raise typer.Exit(1)


@app.command()
def e2e(
    json: Json = False,
    peer: Annotated[str, typer.Option(help="trl, or none: our own accounting alone")] = "none",
    peer_python: Annotated[
        str, typer.Option(help="the Python of an environment with the peer in it")
    ] = "",
    peer_threads: Annotated[
        int, typer.Option(help="torch threads of the peer; 0: the faster of 1 and all")
    ] = 0,
    cases: Annotated[
        str,
        typer.Option(
            help="of a, b, c, own; default: all with a peer, own without", show_default=False
        ),
    ] = "",
    seeds: Seeds = "0,1,2",
    steps: Annotated[int, typer.Option(help="steps of each run")] = 200,
    quick: Quick = False,
    keep: Annotated[
        Path | None,
        typer.Option(help="directory for models and runs; those that it has are not made again"),
    ] = None,
) -> None:
    """Compare whole runs with a peer's on this machine: time, CPU time by process,
    idle shares, reward."""
    from dev.bench.e2e import ComparisonPlan, compare_runs, shrink_plan

    chosen = cases.split(",") if cases else ["own"] if peer == "none" else ["a", "b", "c", "own"]
    plan = ComparisonPlan(
        chosen, _parse_numbers(seeds, "--seeds"), peer, peer_python, peer_threads, steps
    )
    _print_report(
        "e2e",
        lambda: compare_runs(shrink_plan(plan) if quick else plan, print_to_stderr, keep=keep),
        json,
    )


@app.command()
def start(
    json: Json = False,
    cases: Annotated[str, typer.Option(help="of model, none, help")] = "model,none,help",
    repeats: Annotated[int, typer.Option(help="starts of each case")] = 3,
    quick: Quick = False,
) -> None:
    """Measure the way from the command to the first trained step: wall and CPU seconds, by
    stage and process."""
    from dev.bench.start import measure_start

    _print_report(
        "start",
        lambda: measure_start(
            cases.split(","), 1 if quick else repeats, print_to_stderr, quick=quick
        ),
        json,
    )


@app.command()
def stranger(json: Json = False) -> None:
    """Walk from `git clone` to a trained, evaluated and exported model: minutes, commands, words
    read. Installs 4 GB."""
    from dev.bench.stranger import walk_path

    _print_report("stranger", lambda: walk_path(print_to_stderr), json)


@app.command()
def conductor(
    json: Json = False,
    generators: Annotated[str, typer.Option(help="sizes of the fleet")] = "8,64,512",
    places: Annotated[int, typer.Option(help="episodes that a generator plays at once")] = 64,
    episode: Annotated[float, typer.Option(help="seconds of an episode, on average")] = 45.0,
    seconds: Annotated[float, typer.Option(help="measured, after a warm-up")] = 60.0,
    only: Annotated[str, typer.Option(help="simulated or ray; default: both")] = "",
    quick: Quick = False,
) -> None:
    """Measure CPU time and messages of the conductor per group, for fleets of several sizes."""
    from dev.bench.conductor import MEASURING_WAYS, measure_conductor
    from dev.bench.fleet import ConductorLoad

    load = ConductorLoad(0, places, episode_seconds=episode, seconds=seconds)
    if only and only not in MEASURING_WAYS:
        raise ConfigError(f"--only {only!r} must be one of {', '.join(MEASURING_WAYS)}")
    sizes = _parse_numbers(generators, "--generators")
    ways = [way for way in MEASURING_WAYS if only in ("", way)]
    if quick:
        load = msgspec.structs.replace(load, episode_seconds=4.0, seconds=8.0, warm_up=4.0)
        sizes = [4, 16]
        ways = ["simulated"]
    _print_report("conductor", lambda: measure_conductor(load, sizes, ways, print_to_stderr), json)


@app.command()
def transport(
    json: Json = False,
    quick: Quick = False,
    rounds: Annotated[
        int, typer.Option(help="how often raw ZeroMQ and the whole path take turns")
    ] = 3,
) -> None:
    """Measure the wire format, and the whole path against raw ZeroMQ: throughput,
    event-loop lag, memory."""
    from dev.bench.transport import measure_transport

    _print_report(
        "transport",
        lambda: measure_transport(quick=quick, rounds=rounds, print_line=print_to_stderr),
        json,
    )


@app.command()
def weights(
    json: Json = False,
    updates: Annotated[int, typer.Option(help="measured updates", min=1)] = 20,
    layers: Annotated[int, typer.Option(help="of the model", min=1)] = 4,
    experts: Annotated[int, typer.Option(help="of each layer", min=2)] = 8,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value", show_default=False)
    ] = None,
) -> None:
    """Measure what a weight update costs learner and engine in a real run: copy, write,
    transfer, load, pause."""
    from dev.bench.weights import measure_weights
    from r3async.config import InitShape

    shape = InitShape(layers=layers, experts=experts)
    _print_report(
        "weights", lambda: measure_weights(updates, shape, overrides or [], print_to_stderr), json
    )


@app.command()
def transfer(
    json: Json = False,
    megabytes: Annotated[float, typer.Option(help="of weights in bf16", min=0.1)] = 256.0,
    versions: Annotated[
        int, typer.Option(help="of each layout; the first is fetched whole", min=2)
    ] = 4,
    lr: Annotated[float, typer.Option(help="by which a step moves every weight")] = 3e-6,
    quick: Quick = False,
) -> None:
    """Measure weight transfer to engines on one, two and more hosts: bytes, seconds and memory,
    full and as deltas."""
    from dev.bench.transfer import TransferJob, measure_transfer

    job = TransferJob(megabytes, versions=versions, lr=lr)
    if quick:
        job = TransferJob(4.0, versions=2, lr=lr, engines=(1, 2), spread=(2,), tensors=4)
    _print_report("transfer", lambda: measure_transfer(job, print_to_stderr), json)


@app.command()
def packing(
    json: Json = False,
    seeds: Seeds = "0,1,2,3,4",
    quick: Quick = False,
    model: Annotated[
        str,
        typer.Option(help="whose costs: a Hugging Face model directory, or the default by name"),
    ] = "Qwen3-30B-A3B",
) -> None:
    """Measure how well samples are divided into micro-batches and among ranks, on five
    length distributions."""
    from dev.bench.packing import measure_packing

    _print_report(
        "packing",
        lambda: measure_packing(_parse_numbers(seeds, "--seeds"), quick=quick, model=model),
        json,
    )


@app.command()
def soak(
    json: Json = False,
    minutes: Annotated[float, typer.Option(help="after the first step", min=0)] = 30.0,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value", show_default=False)
    ] = None,
    keep: Annotated[
        Path | None, typer.Option(help="directory for the run; default: a temporary one")
    ] = None,
) -> None:
    """Check that nothing grows in a long run: memory, open files of every process, the spool.
    Exit 1 if it does."""
    from dev.bench.soak import run_soak

    with tempfile.TemporaryDirectory(prefix="r3async-soak-") as scratch:
        directory = keep or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        _print_report(
            "soak", lambda: run_soak(minutes, overrides or [], directory, print_to_stderr), json
        )


def _parse_numbers(text: str, option: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"{option} {text!r} is not a list of numbers, for example 0,1,2"
        ) from error
