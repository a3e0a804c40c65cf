"""The command line. It imports nothing heavy until a command needs it, so that a
typo fails at once."""

from __future__ import annotations

import json as json_module
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from r3async.config import LOOPBACK_HOST, Config, ConfigError, load_command_config
from r3async.world.process_output import escape_control_characters
from r3async.world.processes import add_user_module_path

from .inspect.command import app as inspect
from .model_commands import diagnose, doctor, export, scale, sft
from .report import report_command as report
from .runs import DEFAULT_RUNS_DIRECTORY, RunsOption
from .submit.commands import app as submit
from .targets import describe_os_error
from .terminal import SafeConsole
from .usage import UsageError, explain_usage_error

UNTRAINED_EXIT_CODE = 4
"""Exit code of a run that made all its steps without a single update."""
FILE_ERRORS = (
    FileExistsError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)
"""Errors about files; a plain `OSError` is one too, unlike the subclasses of libraries."""
INTERRUPTED_EXIT_CODE = 130
"""Exit code of a command that was stopped before it had produced anything, or at once."""

app = typer.Typer(
    add_completion=False,
    epilog="Rarely needed commands (keys, init-model, replay): python -m r3async.tools -h",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

TRAIN = "Train"
LOOK = "Look"
CLUSTER = "Cluster"
DEVELOP = "Develop"
"""Panels of the help, in this order. The text after a command's help, `epilog`, is one example."""

OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(help="key=value, for example learner.lr=1e-4", show_default=False),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"r3async {version('r3async')}")
        raise typer.Exit


@app.callback()
def r3async(
    version: Annotated[
        bool,
        typer.Option("--version", help="print the version", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    """Asynchronous reinforcement learning for mixture-of-experts language models."""


@app.command(
    rich_help_panel=TRAIN,
    epilog="Example: r3async train math data=rows.jsonl reward=rewards:correct model.path=MODEL",
)
def train(
    preset: Annotated[
        str | None, typer.Argument(help="a preset's name, or a TOML file", show_default="required")
    ] = None,
    overrides: OverridesArgument = None,
    list_presets: Annotated[
        bool, typer.Option("--list", help="list the presets, and start nothing")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="validate everything, print the plan, start nothing")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="the plan as JSON (--dry-run)")] = False,
    runs: RunsOption = DEFAULT_RUNS_DIRECTORY,
) -> None:
    """Train. Everything the run writes is in runs/NAME; runs/latest is the newest."""
    if list_presets:
        if preset is not None:
            raise ConfigError(f"`train --list` lists all presets: leave {preset!r} out")
        from .presets import describe_presets

        return typer.echo(describe_presets())
    if preset is None:
        raise ConfigError(
            "`train` needs a preset's name or a TOML file; `r3async train --list` lists the presets"
        )
    config = load_command_config(preset, overrides or [])
    if dry_run:
        return _print_plan(config, overrides or [], json, runs)
    from r3async.world.process_output import ignore_command_output_errors

    from .training_session import train as run

    ignore_command_output_errors()
    run(config, preset, root=runs)


@app.command(name="eval", rich_help_panel=TRAIN, epilog="Example: r3async eval latest --tasks 256")
def evaluate(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN_OR_MODEL]",
            help="a run's name, or a model directory; with --policy oracle or random not needed",
            show_default="latest",
        ),
    ] = None,
    overrides: OverridesArgument = None,
    env: Annotated[
        str | None,
        typer.Option(
            help="the environment, as env.name", show_default="that of the run's evaluations"
        ),
    ] = None,
    tasks: Annotated[
        int | None, typer.Option(help="how many tasks", show_default="64, or the sets' own")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="of the tasks; training uses none of them",
            show_default="the run's evaluation.seed",
        ),
    ] = None,
    policy: Annotated[str, typer.Option(help="model, or oracle or random for scale")] = "model",
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="RUN_OR_MODEL",
            help=(
                "a model to evaluate on the same tasks, for the difference and its interval; "
                "start: the one that the run started from"
            ),
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(help="whose settings to use", show_default="the run's own, or the defaults"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="one JSON object as the last line")] = False,
    runs: RunsOption = DEFAULT_RUNS_DIRECTORY,
) -> None:
    """Evaluate a model on fixed tasks: its mean reward with a confidence interval."""
    if policy not in ("model", "oracle", "random"):
        _exit_with_error(f"--policy {policy!r} must be model, oracle or random", 2)
    from .eval import eval_command

    eval_command(
        target,
        env,
        overrides or [],
        baseline=baseline,
        preset=preset,
        tasks=tasks,
        seed=seed,
        policy=policy,  # type: ignore[arg-type]
        json=json,
        root=runs,
    )


@app.command(
    rich_help_panel=TRAIN, epilog="Example: r3async tinker Qwen/Qwen3-30B-A3B learner.lora.rank=32"
)
def tinker(
    model: Annotated[str, typer.Argument(help="a model directory, or a name on the hub")],
    overrides: OverridesArgument = None,
    host: Annotated[str, typer.Option(help="interface to listen on")] = LOOPBACK_HOST,
    port: Annotated[int, typer.Option(help="0: a free one", min=0, max=65535)] = 8378,
    served_name: Annotated[
        str | None,
        typer.Option("--as", help="the base_model of clients", show_default="MODEL"),
    ] = None,
    runs: RunsOption = DEFAULT_RUNS_DIRECTORY,
) -> None:
    """Serve the Tinker API: loops written for it train this model, with recorded routes."""
    from .tinker import build_tinker_config, serve_tinker

    config = build_tinker_config(model, overrides or [])
    serve_tinker(config, served_name or model, host, port, runs)


@app.command(rich_help_panel=LOOK, epilog="Example: r3async tail latest --no-follow")
def tail(
    run: Annotated[str, typer.Argument(help="a run's name or directory")] = "latest",
    follow: Annotated[bool, typer.Option(help="until the run ends, or only what there is")] = True,
    patience: Annotated[
        float, typer.Option(help="seconds without news after which it ends (exit 3)")
    ] = 1800.0,
    address: Annotated[
        str | None, typer.Option(help="of a Ray cluster's dashboard: the run is there")
    ] = None,
    job: Annotated[
        str | None, typer.Option(help="the job that trains (--address)", show_default="the newest")
    ] = None,
    runs: RunsOption = DEFAULT_RUNS_DIRECTORY,
) -> None:
    """Watch a run: a line for each step, evaluation and warning. Exit 1 if the run failed."""
    from .inspect.run import InspectError, find_run
    from .tail.lines import tail_local
    from .tail.remote import RemoteError, tail_remote

    try:
        if address:
            code = tail_remote(address, run, job=job, follow=follow, patience=patience)
        else:
            code = tail_local(find_run(run, runs), follow=follow, patience=patience)
    except (InspectError, RemoteError) as error:
        _exit_with_error(str(error), 2)
    raise typer.Exit(code)


app.command(
    rich_help_panel=TRAIN, epilog="Example: r3async sft math data=rows.jsonl model.path=MODEL"
)(sft)
app.command(rich_help_panel=TRAIN, epilog="Example: r3async export latest my-model")(export)
app.command(name="report", rich_help_panel=LOOK, epilog="Example: r3async report first second")(
    report
)
app.add_typer(inspect, name="inspect", rich_help_panel=LOOK)
app.command(rich_help_panel=LOOK, epilog="Example: r3async doctor")(doctor)
app.add_typer(submit, name="submit", rich_help_panel=CLUSTER)
app.command(rich_help_panel=CLUSTER, epilog="Example: r3async scale first generators=4")(scale)
app.command(rich_help_panel=DEVELOP, epilog="Example: r3async diagnose latest")(diagnose)


def main() -> None:
    """Run the command `r3async`."""
    run_app(app, "r3async")


def run_app(app: typer.Typer, name: str) -> NoReturn:
    """Run the command that `sys.argv` names.

    An error that the user can fix is one line on stderr and exit code 2. A failed run exits with
    1, one that made all its steps without an update with 4, and one that was stopped before its
    first step with 130.
    """
    add_user_module_path()
    try:
        sys.exit(app(prog_name=name, standalone_mode=False))
    except UsageError as error:
        _exit_with_error(explain_usage_error(error, sys.argv), 2)
    except ConfigError as error:
        _exit_with_error(f"configuration error: {error}", 2)
    except KeyboardInterrupt:
        _exit_with_error("interrupted", INTERRUPTED_EXIT_CODE)
    except Exception as error:
        if type(error) is OSError or isinstance(error, FILE_ERRORS):
            _exit_with_error(describe_os_error(error), 2)
        # Matched by name, because importing the modules that define them takes seconds.
        match type(error).__name__:
            case "NotTrained":
                _exit_with_error(f"nothing was trained: {error}", UNTRAINED_EXIT_CODE)
            case "StoppedBeforeStep":
                _exit_with_error(str(error), INTERRUPTED_EXIT_CODE)
            case "RunFailed" | "ProcessLost":
                _exit_with_error(f"the run failed: {error}", 1)
            case "CheckpointError" | "CheckpointUnreadable" | "IncompatibleCheckpoint":
                _exit_with_error(f"checkpoint error: {error}", 2)
            case "LearnerError":
                _exit_with_error(str(error), 2)
            case "Abort":
                _exit_with_error("interrupted", INTERRUPTED_EXIT_CODE)
        sys.stderr.write(escape_control_characters(traceback.format_exc()))
        sys.exit(1)


def _print_plan(config: Config, overrides: Sequence[str], as_json: bool, runs: Path) -> None:
    """Check a start that does not follow, and print its plan to stdout."""
    from .plan import describe_plan, plan_to_json
    from .preflight import make_checked_plan
    from .user_code import may_import_code

    plan = make_checked_plan(config, may_import_code(config, overrides), runs=runs)
    typer.echo(json_module.dumps(plan_to_json(plan)) if as_json else describe_plan(plan, config))


def _exit_with_error(message: str, code: int) -> NoReturn:
    if message:
        SafeConsole(stderr=True).print(
            message, style="bold red", highlight=False, markup=False, soft_wrap=True
        )
    sys.exit(code)


if __name__ == "__main__":
    main()
