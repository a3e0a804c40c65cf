"""The command `r3async inspect` and its subcommands: their options, and the calls
that answer them."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..runs import DEFAULT_RUNS_DIRECTORY, RunsOption
from ..terminal import SafeConsole
from ..usage import DefaultCommandGroup

if TYPE_CHECKING:
    from .look import Inspection


class _InspectGroup(DefaultCommandGroup):
    """A group in which `inspect RUN` is an overview and `inspect routes RUN` a subcommand;
    default: the newest run."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args or ["show"])


app = typer.Typer(
    cls=_InspectGroup,
    help=(
        "Look into a run, a spool, a checkpoint or a message. `inspect [RUN_OR_FILE]` says what "
        "there is to see. Exit 2 if something cannot be read."
    ),
)

TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="[RUN_OR_FILE]",
        help=(
            "a run's name or directory; a spool or one of its files; a checkpoint; a "
            "file with a message"
        ),
    ),
]
RunArgument = Annotated[str, typer.Argument(metavar="[RUN]", help="a run's name or directory")]
LimitOption = Annotated[
    int | None, typer.Option(min=0, help="maximum number; 0: all", show_default="depends")
]
JsonOption = Annotated[bool, typer.Option("--json", help="one JSON object per line")]


@contextmanager
def _open_inspection(target: str, runs: Path) -> Iterator[Inspection]:
    """Open an inspection; unreadable data is reported on stderr at the end, with exit code 2."""
    from r3async.record.routes import RouteFileError

    from .look import Inspection
    from .run import InspectError

    problems: list[str] = []
    try:
        yield Inspection(SafeConsole(), problems, runs)
    except (InspectError, RouteFileError) as error:
        problems.append(str(error))
    except OSError as error:
        if error.errno == errno.EPIPE:  # `| head`
            raise
        problems.append(f"{error.filename or target}: {error.strerror or error}")
    for problem in problems:
        SafeConsole(stderr=True).print(
            problem, style="bold red", highlight=False, markup=False, soft_wrap=True
        )
    if problems:
        raise typer.Exit(2)


@app.command(hidden=True, epilog="Example: r3async inspect runs/first/checkpoints")
def show(
    target: TargetArgument = "latest",
    limit: LimitOption = None,
    json: JsonOption = False,
    runs: RunsOption = DEFAULT_RUNS_DIRECTORY,
) -> None:
    """Show the contents of a run, a spool's trajectories, a checkpoint's state and
    tensors, or a message."""
    with _open_inspection(target, runs) as inspection:
        inspection.show_target(target, limit, json)


@app.command(
    epilog="Example: r3async inspect trajectories latest --reward-below 0.2 --export bad.parquet"
)
def trajectories(
    target: TargetArgument = "latest",
    reward_below: Annotated[
        float | None, typer.Option(help="only those with a lower reward")
    ] = None,
    age_above: Annotated[
        int | None, typer.Option(help="only those with a token older than this many versions")
    ] = None,
    turns: Annotated[
        int | None, typer.Option(help="only those with this many turns or more")
    ] = None,
    trajectory: Annotated[str | None, typer.Option(help="only the one of this id")] = None,
    step: Annotated[int | None, typer.Option(help="only those that this step trained")] = None,
    version: Annotated[
        int | None,
        typer.Option(help="from which ages in a spool count", show_default="the newest known"),
    ] = None,
    limit: LimitOption = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="one token per line")] = False,
    export: Annotated[
        Path | None, typer.Option(help="write them to FILE.jsonl or FILE.parquet")
    ] = None,
    json: JsonOption = False,
    runs: RunsOption = DEFAULT_RUNS_DIRECTORY,
) -> None:
    """List trajectories of a run or a spool, one per line; or show their tokens; or
    write them to a file."""
    with _open_inspection(target, runs) as inspection:
        from .trajectories import TrajectoryFilter

        keep = TrajectoryFilter(reward_below, age_above, turns, trajectory, step)
        inspection.show_trajectories(
            target, keep, version, limit, tokens=tokens, export=export, json=json
        )


@app.command(epilog="Example: r3async inspect routes latest --diff")
def routes(
    run: RunArgument = "latest",
    trajectory: Annotated[
        str | None, typer.Option(help="which", show_default="the first of the step")
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="of this step", show_default="the last traced")
    ] = None,
    layer: Annotated[
        list[int] | None, typer.Option(help="only this MoE layer, from 0; may be repeated")
    ] = None,
    diff: Annotated[
        bool, typer.Option("--diff", help="only tokens that learner and engine route differently")
    ] = False,
    json: JsonOption = False,
    runs: RunsOption = DEFAULT_RUNS_DIRECTORY,
) -> None:
    """Show a trajectory's experts token by token: the engine's beside those that the
    learner would choose."""
    with _open_inspection(run, runs) as inspection:
        inspection.show_routes(run, trajectory, step, layer or [], diff=diff, json=json)


@app.command(epilog="Example: r3async inspect verify latest")
def verify(
    run: RunArgument = "latest",
    json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
    runs: RunsOption = DEFAULT_RUNS_DIRECTORY,
) -> None:
    """Verify from two records that training used the engine's routes. Exit 1 if it
    did not."""
    with _open_inspection(run, runs) as inspection:
        verified = inspection.verify_routes(run, json)
    if not verified:
        raise typer.Exit(1)


@app.command(epilog="Example: r3async inspect frames runs/first/spool --limit 5")
def frames(
    target: TargetArgument,
    limit: LimitOption = None,
    json: JsonOption = False,
    runs: RunsOption = DEFAULT_RUNS_DIRECTORY,
) -> None:
    """Show messages as they came over the wire, frame by frame, from a spool or from a file
    with one message."""
    with _open_inspection(target, runs) as inspection:
        inspection.show_frames(target, limit, json)
