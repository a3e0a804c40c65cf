"""The `python -m dev bench` command line. It imports nothing heavy until a benchmark runs.

Each benchmark is a command here: a module of this package measures and returns a report (a msgspec struct). The list of
benchmarks shows the first line of each command's docstring.
"""

from __future__ import annotations

import inspect
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from dev.bench.jobs import say_on_stderr
from dev.bench.reporting import Json, Quick
from dev.bench.reporting import reported as _report
from dev.bench.science_command import science
from r3async.config import ConfigError

app = typer.Typer(
    add_completion=False, help="Measure a part of r3async: `bench NAME --json`. Without a name: the list."
)


@app.callback(invoke_without_command=True)
def listing(context: typer.Context) -> None:
    """Measure a part of r3async. Without a name, list the benchmarks."""
    if context.invoked_subcommand is None:
        for command in app.registered_commands:
            assert command.callback is not None
            name, text = command.name or command.callback.__name__, inspect.getdoc(command.callback) or ""
            typer.echo(f"{name:<12}{text.splitlines()[0]}")


@app.command()
def replay(
    json: Json = False,
    seeds: Annotated[str, typer.Option(help="seeds of model, sampling and advantages")] = "0,1,2",
    quick: Quick = False,
    table: Annotated[bool, typer.Option("--table", help="also vary router, depth and experts, one at a time")] = False,
    model: Annotated[
        list[Path] | None,
        typer.Option(help="also measure this Hugging Face model; one in a run's directory plays that run's episodes"),
    ] = None,
    pairs: Annotated[int | None, typer.Option(help="pairs of timed steps; 0 times none", show_default="24")] = None,
) -> None:
    """Measure what routing replay costs (step time, bytes) and gains (log-probs, gradients nearer to the engine's)."""
    from dev.bench.replay import plan, render, run

    planned = plan(_seeds(seeds), quick=quick, table=table, models=model or [], pairs=pairs)
    _report(lambda: run(planned, say_on_stderr), render, json)


@app.command(name="replay-map")
def replay_map(
    json: Json = False,
    axes: Annotated[str, typer.Option(help="what to vary, with commas between; default: everything")] = "",
    seeds: Annotated[str, typer.Option(help="of start model, tasks and sampling")] = "0,1,2,3,4",
    data: Annotated[
        Path | None, typer.Option(help="file of runs: those that it has are not made again, new ones are added")
    ] = None,
    quick: Quick = False,
) -> None:
    """Measure what replay is worth to training: KL and reward with off, R2 and R3, by noise, precision, age, ..."""
    from dev.bench.replay_map import AXES, chosen, quickly, render, run

    points = quickly() if quick else chosen([name for name in axes.split(",") if name] or list(AXES))
    _report(lambda: run(points, [0, 1] if quick else _seeds(seeds), say_on_stderr, data), render, json)


@app.command()
def loss(
    json: Json = False,
    quick: Quick = False,
) -> None:
    """Measure memory and time of the loss's log-probs in chunks, against all logits at once."""
    from dev.bench.loss import render, run

    _report(lambda: run(quick, say_on_stderr), render, json)


@app.command()
def experts(json: Json = False, quick: Quick = False) -> None:
    """Compare experts as stacked matrices with a loop over experts: CPU time, operations, waits for the device."""
    from dev.bench.experts import render, run

    _report(lambda: run(quick, say_on_stderr), render, json)


@app.command()
def sampling(
    json: Json = False,
    seeds: Annotated[str, typer.Option(help="seeds of model, prompts and sampling")] = "0,1,2",
    quick: Quick = False,
) -> None:
    """Measure how far learner and vLLM differ at top-p 0.95, with and without the sampling mask, and its bytes."""
    from dev.bench.sampling import render, run

    _report(lambda: run(_seeds(seeds), quick, say_on_stderr), render, json)


@app.command()
def packing(
    json: Json = False,
    seeds: Annotated[str, typer.Option(help="seeds of the lengths")] = "0,1,2,3,4",
    quick: Quick = False,
    model: Annotated[
        str, typer.Option(help="whose costs: a Hugging Face model directory, or the default by name")
    ] = "Qwen3-30B-A3B",
) -> None:
    """Measure how well samples are divided into micro-batches and among ranks, on five length distributions."""
    from dev.bench.packing import render, run

    _report(lambda: run(_seeds(seeds), quick=quick, model=model), render, json)


@app.command()
def prefixes(json: Json = False, quick: Quick = False) -> None:
    """Measure what feeding shared prefixes forward once saves the learner, by share of the prompt."""
    from dev.bench.prefixes import render, run

    _report(lambda: run(quick, say_on_stderr), render, json)


@app.command()
def wire(json: Json = False, quick: Quick = False) -> None:
    """Measure bytes and microseconds per token of the wire format, against lists of numbers and pickle."""
    from dev.bench.wire import render, run

    _report(lambda: run(quick), render, json)


@app.command()
def transport(
    json: Json = False,
    quick: Quick = False,
    rounds: Annotated[int, typer.Option(help="how often raw ZeroMQ and the whole path take turns")] = 3,
) -> None:
    """Measure throughput of the whole path against raw ZeroMQ, event-loop lag of both ends, and memory."""
    from dev.bench.transport import render, run

    _report(lambda: run(quick=quick, rounds=rounds, say=say_on_stderr), render, json)


@app.command()
def weights(
    json: Json = False,
    updates: Annotated[int, typer.Option(help="measured updates", min=1)] = 20,
    layers: Annotated[int, typer.Option(help="layers of the model")] = 4,
    hidden_size: Annotated[int, typer.Option(help="hidden size")] = 128,
    experts: Annotated[int, typer.Option(help="experts of each layer")] = 8,
    expert_hidden_size: Annotated[int, typer.Option(help="hidden size of each expert")] = 64,
    dtype: Annotated[str, typer.Option(help="of the engine's weights: float32 or bfloat16")] = "float32",
    on_update: Annotated[str, typer.Option(help="keep, recompute or drain")] = "keep",
    backend: Annotated[str, typer.Option(help="auto, shared_memory, tcp or nccl")] = "auto",
) -> None:
    """Measure what a weight update costs learner and engine in a real run: copy, write, transfer, load, pause."""
    from dev.bench.weights import WeightsJob, render, run

    job = WeightsJob(updates, layers, hidden_size, experts, expert_hidden_size, dtype, on_update, backend)
    _report(lambda: run(job, say_on_stderr), render, json)


@app.command()
def transfer(
    json: Json = False,
    megabytes: Annotated[float, typer.Option(help="of weights in bf16", min=0.1)] = 256.0,
    versions: Annotated[int, typer.Option(help="of each layout; the first is fetched whole", min=2)] = 4,
    lr: Annotated[float, typer.Option(help="by which a step moves every weight")] = 3e-6,
    quick: Quick = False,
) -> None:
    """Measure weight transfer to engines on one, two and more hosts: bytes, seconds and memory, full and as deltas."""
    from dev.bench.transfer import TransferJob, render, run

    job = TransferJob(megabytes, versions=versions, lr=lr)
    if quick:
        job = TransferJob(4.0, versions=2, lr=lr, engines=(1, 2), spread=(2,), tensors=4)
    _report(lambda: run(job, say_on_stderr), render, json)


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
    from dev.bench.conductor import WAYS, render, run
    from dev.bench.fleet import Load

    load = Load(0, places, episode_seconds=episode, seconds=seconds)
    if only and only not in WAYS:
        raise ConfigError(f"--only {only!r} must be one of {', '.join(WAYS)}")
    sizes, ways = _seeds(generators, "--generators"), [way for way in WAYS if only in ("", way)]
    if quick:
        load = msgspec.structs.replace(load, episode_seconds=4.0, seconds=8.0, warm_up=4.0)
        sizes, ways = [4, 16], ["simulated"]
    _report(lambda: run(load, sizes, ways, say_on_stderr), render, json)


@app.command()
def soak(
    json: Json = False,
    minutes: Annotated[float, typer.Option(help="after the first step", min=0)] = 30.0,
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value", show_default=False)] = None,
    keep: Annotated[Path | None, typer.Option(help="directory for the run; default: a temporary one")] = None,
) -> None:
    """Check that nothing grows in a long run: memory, open files of every process, the spool. Exit 1 if it does."""
    from dev.bench.soak import render, run

    with tempfile.TemporaryDirectory(prefix="r3async-soak-") as scratch:
        directory = keep or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        report = _report(lambda: run(minutes, overrides or [], directory, say_on_stderr), render, json)
    if not report.flat:
        raise typer.Exit(1)


@app.command()
def overlap(
    json: Json = False,
    staleness: Annotated[str, typer.Option(help="bounds to compare, the first with all others")] = "0,1,2,4,8",
    steps: Annotated[int, typer.Option(help="steps of each run")] = 24,
    window: Annotated[int, typer.Option(help="schedule.window of each run")] = 1,
    median: Annotated[float, typer.Option(help="median latency of a tool call, seconds")] = 0.4,
    sigma: Annotated[float, typer.Option(help="spread of its logarithm: larger is a heavier tail")] = 1.0,
    quick: Quick = False,
    predict: Annotated[
        bool, typer.Option("--predict", help="also what the cluster model says, given the durations of S = 1 alone")
    ] = False,
    keep: Annotated[
        Path | None, typer.Option(help="directory for model and runs; those that it has are not made again")
    ] = None,
) -> None:
    """Measure what asynchrony gains with slow tools: steps/s, idle shares, ages and reward, by staleness bound."""
    from dev.bench.overlap import Plan, render, run

    plan = Plan(
        _seeds(staleness, "--staleness"), steps=steps, window=window, latency_median=median, latency_sigma=sigma
    )
    if quick:
        plan = msgspec.structs.replace(
            plan, staleness=[0, 1], steps=5, settle=2, prompts_per_step=4, group_size=4, latency_median=0.1
        )
    _report(lambda: run(plan, say_on_stderr, keep=keep, predicting=predict), render, json)


@app.command()
def scale(
    json: Json = False,
    only: Annotated[str, typer.Option(help="axes, with commas between; default: all")] = "",
    quick: Quick = False,
) -> None:
    """Check that our CPU time grows no faster than the work: turns of an episode, and more. Exit 1 above 1.1."""
    from dev.bench.scale import render, run

    report = _report(lambda: run([n for n in only.split(",") if n], quick=quick, say=say_on_stderr), render, json)
    if report.steep and not quick:
        raise typer.Exit(1)


@app.command()
def e2e(
    json: Json = False,
    peer: Annotated[str, typer.Option(help="trl, or none: our own accounting alone")] = "none",
    peer_python: Annotated[str, typer.Option(help="the Python of an environment with the peer in it")] = "",
    peer_threads: Annotated[int, typer.Option(help="torch threads of the peer; 0: the faster of 1 and all")] = 0,
    cases: Annotated[
        str, typer.Option(help="of a, b, c, own; default: all with a peer, own without", show_default=False)
    ] = "",
    seeds: Annotated[str, typer.Option(help="seeds of the runs")] = "0,1,2",
    steps: Annotated[int, typer.Option(help="steps of each run")] = 200,
    quick: Quick = False,
    keep: Annotated[
        Path | None, typer.Option(help="directory for models and runs; those that it has are not made again")
    ] = None,
) -> None:
    """Compare whole runs with a peer's on this machine, and the pipeline with its bare parts."""
    from dev.bench.e2e import run, small
    from dev.bench.e2e_report import Plan, render

    chosen = cases.split(",") if cases else ["own"] if peer == "none" else ["a", "b", "c", "own"]
    plan = Plan(chosen, _seeds(seeds), peer, peer_python, peer_threads, steps)
    _report(lambda: run(small(plan) if quick else plan, say_on_stderr, keep=keep), render, json)


@app.command()
def drift(
    json: Json = False,
    seeds: Annotated[str, typer.Option(help="seeds of model and runs; empty: the simulation alone")] = "0",
    calm: Annotated[int, typer.Option(help="steps before the burst", min=1)] = 40,
    burst: Annotated[int, typer.Option(help="steps from then on", min=1)] = 40,
    factor: Annotated[float, typer.Option(help="of the learning rate, in the burst", min=1)] = 10.0,
    staleness: Annotated[int, typer.Option(help="bound on the age of samples", min=0)] = 4,
    quick: Quick = False,
    keep: Annotated[
        Path | None, typer.Option(help="directory for models and runs; those that it has are not made again")
    ] = None,
) -> None:
    """Measure and simulate served drift above the replayed one, by age, and the trust region's answer to a burst."""
    from dev.bench.drift import Plan, render, run

    chosen = _seeds(seeds) if seeds else []
    plan = Plan(chosen, calm=calm, burst=burst, factor=factor, staleness=staleness)
    if quick:
        plan = Plan(chosen[:1], calm=3, burst=3, staleness=1, groups=2, samples=4, settle=0, warm_steps=1)
    _report(lambda: run(plan, say_on_stderr, keep=keep), render, json)


@app.command()
def step(
    json: Json = False,
    steps: Annotated[int, typer.Option(help="measured batches", min=1)] = 24,
    seed: Annotated[int, typer.Option(help="of model, tasks and sampling")] = 0,
    quick: Quick = False,
) -> None:
    """Measure what served drift, a limit and a recording add to a learner's step, in turns on the same episodes."""
    from dev.bench.step import render, run

    _report(lambda: run(steps, seed, quick, say_on_stderr), render, json)


@app.command()
def start(
    json: Json = False,
    cases: Annotated[str, typer.Option(help="of model, none, help")] = "model,none,help",
    repeats: Annotated[int, typer.Option(help="starts of each case")] = 3,
    quick: Quick = False,
) -> None:
    """Measure the way from the command to the first trained step: wall and CPU seconds, by stage and process."""
    from dev.bench.start import render, run

    chosen, times = cases.split(","), 1 if quick else repeats
    _report(lambda: run(chosen, times, say_on_stderr, quick=quick), render, json)


app.command()(science)


@app.command(name="all")
def every(
    json: Json = False,
    only: Annotated[str, typer.Option(help="benchmarks, with commas between; default: all but e2e")] = "",
    peer_python: Annotated[str, typer.Option(help="of `e2e`; without it: our own accounting alone")] = "",
    quick: Quick = False,
) -> None:
    """Run several benchmarks one after the other and print their headlines, for `bench compare` and the docs."""
    from dev.bench.compare import measures, render_all, run_all

    made = measures(peer_python, quick=quick, say=say_on_stderr)
    names = [n for n in only.split(",") if n] or [n for n in made if n != "e2e" or peer_python]
    _report(lambda: run_all(made, names, say_on_stderr, quick=quick), render_all, json)


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="what `bench all --json` printed, or one benchmark")],
    after: Annotated[Path, typer.Argument(help="the same, later")],
    json: Json = False,
) -> None:
    """Compare two files and list what got worse beyond its spread. Exit 1 if anything did."""
    from dev.bench.compare import compare as differences
    from dev.bench.compare import read, render

    if _report(lambda: differences(read(before), read(after)), render, json).worse:
        raise typer.Exit(1)


def _seeds(text: str, option: str = "--seeds") -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option} {text!r} is not a list of numbers, for example 0,1,2") from error
