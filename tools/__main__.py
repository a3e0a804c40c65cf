"""Rarely used commands: `python -m r3async.tools`. It imports nothing heavy until a command
needs it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from r3async.config import ConfigError, load_command_config
from r3async.world.curve_keys import GENERATOR_KEY_NAME, LEARNER_KEY_NAME, create_key_files

from .cli import OverridesArgument, run_app
from .model_commands import exit_with_error
from .runs import DEFAULT_RUNS_DIRECTORY, RunsOption
from .targets import name_target
from .terminal import SafeConsole

PROGRAM = "python -m r3async.tools"

app = typer.Typer(
    help="Make keys or a tiny model, or repeat a recorded run.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command(epilog=f"Example: {PROGRAM} keys my-keys --name generator")
def keys(
    directory: Annotated[Path, typer.Argument(help="directory to make, or to add missing keys to")],
    name: Annotated[
        list[str] | None,
        typer.Option(help="a generator's key; may be repeated", show_default="generator"),
    ] = None,
) -> None:
    """Make keys for `transport.keys`: only processes that have one can connect. Secrets have
    mode 0600."""
    names = (LEARNER_KEY_NAME, *(name or [GENERATOR_KEY_NAME]))
    try:
        with name_target(directory):
            made = create_key_files(directory, names)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    for path in made:
        typer.echo(f"{path}  {path.stat().st_mode & 0o777:04o}")
    if not made:
        typer.echo(f"{directory} has these keys already; nothing was changed")
    typer.echo(
        f"set transport.keys={directory.resolve()}; a host that has only generators needs "
        f"{GENERATOR_KEY_NAME}.secret and {LEARNER_KEY_NAME}.public, and the learner lets in the "
        "key of every *.public file"
    )


@app.command(name="init-model", epilog=f"Example: {PROGRAM} init-model tiny --preset quickstart")
def init_model(
    directory: Annotated[Path, typer.Argument(help="directory to make")],
    overrides: OverridesArgument = None,
    preset: Annotated[
        str, typer.Option(help="whose model.init and env settings to use")
    ] = "quickstart",
) -> None:
    """Make a tiny random Qwen3-MoE with a byte-level tokenizer, warmed up on the
    environment's oracle."""
    config = load_command_config(preset, overrides or [], "init-model")
    from .init_model import init_model as make
    from .run_dir import check_disk_space

    check_disk_space(directory.parent)

    with name_target(directory):
        make(directory, config, progress=lambda line: typer.echo(line, err=True))


@app.command(epilog=f"Example: {PROGRAM} replay first --from 20")
def replay(
    run: Annotated[
        str, typer.Argument(help="a run's name or directory, made with observe.record=full")
    ] = "latest",
    changed: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            help="key=value that is not the run's: a counterfactual on the same data",
            show_default=False,
        ),
    ] = None,
    start: Annotated[
        int,
        typer.Option(
            "--from", help="begin at the run's checkpoint of this step; 0: its start model"
        ),
    ] = 0,
    steps: Annotated[
        int | None, typer.Option(help="maximum number of steps", show_default="all")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="where the start model is now, if it was moved")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="directory for the replay's metrics and model")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="one JSON object as the last line of stdout")
    ] = False,
    runs: RunsOption = DEFAULT_RUNS_DIRECTORY,
) -> None:
    """Repeat a recorded run's steps without engines; name the first step and stage that differ.
    Exit 1 if one does."""
    import msgspec

    from r3async.checkpoint import CheckpointError
    from r3async.learner import LearnerError
    from r3async.record.recording import RecordedStep, RecordingError

    from . import replay as replays
    from .inspect.run import InspectError, find_run

    screen = SafeConsole(stderr=True)

    def progress(recorded: RecordedStep, metrics: Mapping[str, float | None]) -> None:
        pairs = [
            (name, recorded.metrics.get(name), metrics.get(name)) for name in replays.SHOWN_METRICS
        ]
        text = ", ".join(
            f"{n} {_format_value(theirs)}{f' -> {_format_value(ours)}' if changed else ''}"
            for n, theirs, ours in pairs
        )
        screen.print(f"step {recorded.step}: {text}", highlight=False, markup=False, soft_wrap=True)

    try:
        done = replays.replay_run(
            find_run(run, runs),
            changed_settings=changed or (),
            start_step=start,
            steps=steps,
            model=model,
            out=out,
            progress=progress,
        )
    except (InspectError, RecordingError, CheckpointError, LearnerError) as error:
        exit_with_error(str(error))
    typer.echo(msgspec.json.encode(done).decode() if json else replays.describe_replay(done))
    if done.difference is not None:
        raise typer.Exit(1)


def _format_value(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def main() -> None:
    """Run the command that `sys.argv` names."""
    run_app(app, PROGRAM)


if __name__ == "__main__":
    main()
