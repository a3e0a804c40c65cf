"""The commands `export`, `sft`, `diagnose`, `doctor` and `scale`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer

from r3async.config import ConfigError, load_command_config

from .runs import DEFAULT_RUNS_DIRECTORY, RunsOption
from .targets import name_target
from .terminal import SafeConsole


def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_CHECKPOINT", help="a run's name or directory, or a checkpoint's"
        ),
    ],
    directory: Annotated[
        Path | None,
        typer.Argument(help="directory to make", show_default="NAME-model, or NAME-adapter"),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="where the start model is now, if it was moved")
    ] = None,
    adapter: Annotated[
        bool,
        typer.Option(
            "--adapter/--merge",
            help=(
                "of a run with learner.lora: only the adapters, in PEFT's format; or the whole "
                "model with the adapters merged into its weights"
            ),
        ),
    ] = False,
    runs: RunsOption = DEFAULT_RUNS_DIRECTORY,
) -> None:
    """Write a checkpoint's model as a Hugging Face directory: safetensors,
    configuration, tokenizer."""
    from r3async.checkpoint import CheckpointError

    from . import export as exports

    named = runs / source
    path = Path(source) if Path(source).exists() or not named.exists() else named
    directory = directory or Path(f"{path.resolve().name}-{'adapter' if adapter else 'model'}")
    try:
        write = exports.export_adapter if adapter else exports.export_model
        with name_target(directory):
            opened = write(path, directory, model=model)
    except CheckpointError as error:
        exit_with_error(str(error))
    typer.echo(
        f"{directory}: the {'adapters' if adapter else 'model'} after step {opened.state.steps}, "
        f"from {opened.path}"
    )


def sft(
    preset: Annotated[str, typer.Argument(help="a preset's name, or a TOML file")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="key=value: data=FILE and model.path=DIRECTORY, sft.epochs=3, learner.lr=1e-5",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="validate everything, print the plan, start nothing")
    ] = False,
    runs: RunsOption = DEFAULT_RUNS_DIRECTORY,
) -> None:
    """Train on the answers in your rows: messages, or prompts and answers. The model is in
    runs/NAME/model."""
    config = load_command_config(preset, overrides or [], "sft")
    if dry_run:
        from .sft import describe_supervised_plan

        typer.echo(describe_supervised_plan(config, runs))
        return
    from r3async.learner import LearnerError
    from r3async.world.process_output import ignore_command_output_errors

    from .sft import run_sft as run

    ignore_command_output_errors()
    try:
        run(config, preset, root=runs)
    except LearnerError as error:
        exit_with_error(str(error))


def diagnose(
    target: Annotated[
        str,
        typer.Argument(
            metavar="[RUN_OR_MODEL]", help="a run's name or directory, or a model directory"
        ),
    ] = "latest",
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="key=value, for example learner.backend=torch", show_default=False),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(help="whose settings to use", show_default="the run's own, or the defaults"),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="one JSON object as the last line of stdout")
    ] = False,
    runs: RunsOption = DEFAULT_RUNS_DIRECTORY,
) -> None:
    """Compare every stage of engine and learner on the same tokens; name what differs first.
    Exit 1 if a stage does."""
    import tempfile

    import msgspec

    from r3async.checkpoint import CheckpointError
    from r3async.learner import LearnerError
    from r3async.rollout.activations import ActivationError
    from r3async.rollout.engine import EngineError
    from r3async.weights.manifest import WeightError

    from .diagnose.command import find_diagnosis_target
    from .diagnose.command import run_diagnosis as examine
    from .diagnose.diagnosis import describe_diagnosis

    screen = SafeConsole(stderr=True)

    def say(line: str) -> None:
        screen.print(line, highlight=False, markup=False, soft_wrap=True)

    with tempfile.TemporaryDirectory(prefix="r3async-diagnose-") as scratch:
        try:
            patient = find_diagnosis_target(
                target, preset, overrides or [], Path(scratch), say, runs
            )
            done = examine(patient, Path(scratch), say)
        except (CheckpointError, LearnerError, EngineError, ActivationError, WeightError) as error:
            exit_with_error(str(error))
    typer.echo(msgspec.json.encode(done).decode() if json else describe_diagnosis(done))
    if not done.is_consistent:
        raise typer.Exit(1)


def doctor(
    gpu: Annotated[
        bool,
        typer.Option("--gpu", help="measure kernels, memory and speed on a GPU"),
    ] = False,
    small: Annotated[
        bool, typer.Option("--small", help="with --gpu: small shapes, which run on a CPU too")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option(help="with --gpu: only parts whose names begin with this")
    ] = None,
    minutes: Annotated[
        float, typer.Option(help="with --gpu: the same command continues with what is left")
    ] = 9.5,
    out: Annotated[Path, typer.Option(help="with --gpu: directory of its results")] = Path(
        "gpu-check"
    ),
) -> None:
    """Check this machine: versions, what works, what does not, and the fix. With --gpu,
    measure a GPU."""
    if gpu:
        from .gpu_check.command import check_gpu

        with name_target(out):
            code = check_gpu(
                out, small=small, only=only or [], minutes=minutes, console=SafeConsole()
            )
        raise typer.Exit(code)
    from .doctor import run_doctor

    raise typer.Exit(run_doctor())


def exit_with_error(message: str) -> NoReturn:
    """Print `message` to stderr and exit with 2."""
    SafeConsole(stderr=True).print(
        message, style="bold red", highlight=False, markup=False, soft_wrap=True
    )
    raise typer.Exit(2)


def scale(
    run: Annotated[str, typer.Argument(help="the name or directory of a run whose command runs")],
    wanted: Annotated[
        list[str], typer.Argument(metavar="generators=N", help="how many the run should have")
    ],
    wait: Annotated[
        float, typer.Option(help="seconds to wait until it has them; 0: do not wait")
    ] = 900.0,
    runs: RunsOption = DEFAULT_RUNS_DIRECTORY,
) -> None:
    """Change the number of generators of a running run. Exit 1 if it refuses, 3 if
    it does not have them yet."""
    from .inspect.run import InspectError, find_run
    from .scale import parse_generators, scale_run

    count = parse_generators(wanted)
    try:
        directory = find_run(run, runs)
    except InspectError as error:
        raise ConfigError(str(error)) from error
    raise typer.Exit(scale_run(directory, count, wait, typer.echo))
