"""The command `r3async inspect`: what its words mean, and who answers."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from tools.terminal import Terminal

if TYPE_CHECKING:
    from rich.console import Console


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What to show; None: the default of what is shown. `routes`, `trajectories`: asked for by name."""

    trajectories: bool
    tokens: bool
    frames: bool
    reward_below: float | None
    age_above: int | None
    turns: int | None
    trajectory: str | None
    step: int | None
    version: int | None
    limit: int | None
    export: Path | None
    routes: bool
    verify_routes: bool
    layers: list[int]
    diff: bool
    json: bool

    @property
    def of_trajectories(self) -> bool:
        """An option was given that makes sense of trajectories only."""
        given = (self.reward_below, self.age_above, self.turns, self.version, self.limit, self.export)
        return self.trajectories or self.tokens or any(each is not None for each in given)

    @property
    def of_routes(self) -> bool:
        """Routes are to be shown; by default, those of the trajectory or the step that was named."""
        named = self.trajectory is not None or self.step is not None
        return self.routes or self.diff or bool(self.layers) or (named and not self.of_trajectories)


def inspect(
    target: Annotated[
        str,
        typer.Argument(
            metavar="[RUN_OR_FILE]",
            help="a run's name or directory; a spool or one of its files; a checkpoint; a file with a message",
        ),
    ] = "latest",
    trajectories: Annotated[bool, typer.Option("--trajectories", help="list a run's trajectories")] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="one token a line")] = False,
    reward_below: Annotated[float | None, typer.Option(help="only trajectories that earned less")] = None,
    age_above: Annotated[int | None, typer.Option(help="only those with a token older than so many versions")] = None,
    turns: Annotated[int | None, typer.Option(help="only those of so many turns or more")] = None,
    version: Annotated[
        int | None, typer.Option(help="from which ages in a spool count", show_default="the newest known")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=0, help="at most so many; 0: all", show_default="depends")] = None,
    export: Annotated[Path | None, typer.Option(help="write trajectories to FILE.jsonl or FILE.parquet")] = None,
    frames: Annotated[bool, typer.Option("--frames", help="messages as they came over the wire")] = False,
    routes: Annotated[bool, typer.Option("--routes", help="a trajectory's routes against the learner's")] = False,
    verify_routes: Annotated[
        bool, typer.Option("--verify-routes", help="prove that training used the engine's routes; exit 1 if not")
    ] = False,
    trajectory: Annotated[
        str | None, typer.Option(help="only this one (--routes: which)", show_default="the first")
    ] = None,
    step: Annotated[int | None, typer.Option(help="of this step", show_default="the last traced")] = None,
    layer: Annotated[
        list[int] | None, typer.Option(help="only this MoE layer, from 0; may be repeated (--routes)")
    ] = None,
    diff: Annotated[bool, typer.Option("--diff", help="only tokens that learner and engine route differently")] = False,
    json: Annotated[bool, typer.Option("--json", help="one JSON object a line, or for the whole proof")] = False,
) -> None:
    """Look into a run, a spool, a checkpoint or a message. Without an option: what there is to see. Exit 2 if something can
    not be read."""

    from r3async.observe.routes import RouteFileError
    from tools.inspect_run import InspectError

    wanted = Wanted(
        trajectories=trajectories,
        tokens=tokens,
        frames=frames,
        reward_below=reward_below,
        age_above=age_above,
        turns=turns,
        trajectory=trajectory,
        step=step,
        version=version,
        limit=limit,
        export=export,
        routes=routes,
        verify_routes=verify_routes,
        layers=layer or [],
        diff=diff,
        json=json,
    )
    problems: list[str] = []
    try:
        proven = _answer(target, wanted, Terminal(), problems)
    except (InspectError, RouteFileError) as error:
        problems.append(str(error))
        proven = True
    except OSError as error:
        if error.errno == errno.EPIPE:  # `| head`
            raise
        problems.append(f"{error.filename or target}: {error.strerror or error}")
        proven = True
    for problem in problems:
        Terminal(stderr=True).print(problem, style="bold red", highlight=False, markup=False, soft_wrap=True)
    if problems or not proven:
        raise typer.Exit(2 if problems else 1)


def _answer(target: str, wanted: Wanted, console: Console, problems: list[str]) -> bool:
    """False if what was to be proven is not so."""
    from tools.inspect_look import describe_rest, look_at, run_trajectories
    from tools.inspect_routes import describe_kept, print_verification, show_routes
    from tools.inspect_run import InspectError, find_file, find_run, overview

    found = find_file(target)
    if found is not None:
        if wanted.routes or wanted.diff or wanted.layers or wanted.verify_routes:
            raise InspectError(f"{found} is no run: only a run has routes")
        look_at(found, wanted, console, problems)
        return True
    run_dir = find_run(target)
    if wanted.frames:
        raise InspectError(f"--frames is of a spool or a message, for example of {run_dir / 'spool'}")
    if wanted.of_trajectories:
        run_trajectories(run_dir, wanted, console, problems)
    if wanted.of_routes:
        show_routes(
            run_dir,
            console,
            trajectory=wanted.trajectory,
            step=wanted.step,
            layers=wanted.layers,
            diff=wanted.diff,
            json=wanted.json,
        )
    if wanted.verify_routes:
        return print_verification(run_dir, console, json=wanted.json)
    if not wanted.of_trajectories and not wanted.of_routes:
        overview(run_dir, [*describe_kept(run_dir), *describe_rest(run_dir)], console)
    return True
