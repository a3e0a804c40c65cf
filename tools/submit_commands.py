"""`r3async submit` and `r3async cluster` on the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from r3async.config import load_command
from r3async.printable import printable_log
from tools.terminal import Terminal, echo

if TYPE_CHECKING:
    from tools.submit import Jobs

Address = Annotated[
    str,
    typer.Option(
        help="of the cluster's dashboard, http://HOST:8265, or of the cluster, HOST:6379",
        show_default="RAY_API_SERVER_ADDRESS, RAY_ADDRESS, http://127.0.0.1:8265",
    ),
]
Token = Annotated[str, typer.Option("--token-file", help="the cluster's token", show_default="as Ray finds it")]
Job = Annotated[str, typer.Argument(help="a job's id, or the name of its run")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="key=value, for example learner.lr=1e-4", show_default=False)
]


class _RunUnlessNamed(TyperGroup):
    """`submit PRESET …` submits; `submit status ID` and the like are what they say."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_RunUnlessNamed,
    no_args_is_help=True,
    help="Submit a run to a Ray cluster, `submit PRESET [key=value …]`, and look after it.",
)


def open_jobs(address: str, token_file: str) -> Jobs:
    """The cluster's jobs; one line on stderr and exit code 2 if it can not be asked."""
    from tools.submit import Jobs, SubmitError

    try:
        return Jobs(address, token_file)
    except SubmitError as error:
        raise _failed(error) from error


def _failed(error: Exception) -> typer.Exit:
    Terminal(stderr=True).print(str(error), style="bold red", highlight=False, markup=False, soft_wrap=True)
    return typer.Exit(2)


@app.command(name="run", hidden=True)
def submit(
    preset: Annotated[str, typer.Argument(help="a preset's name, or a TOML file in this folder")],
    overrides: Overrides = None,
    address: Address = "",
    token_file: Token = "",
    follow: Annotated[bool, typer.Option("--follow/--detach", help="show the log until the job ends")] = True,
    runs: Annotated[Path, typer.Option(help="where run directories are made; every node must see it")] = Path("runs"),
    name: Annotated[str, typer.Option("--id", help="of the job", show_default="Ray's")] = "",
    check: Annotated[bool, typer.Option("--check/--no-check", help="refuse what can not fit the cluster")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show the job, and submit nothing")] = False,
) -> None:
    """Package this folder (without what .gitignore and .rayignore name) and train PRESET as a job."""
    from tools.plan import make_plan
    from tools.submit import SubmitError, make_package

    config = load_command(preset, overrides or [])
    plan = make_plan(config)
    package = make_package(config, preset, overrides or [], runs=runs)
    if dry_run:
        echo(json.dumps({"entrypoint": package.entrypoint, "runtime_env": package.runtime_env}, indent=2))
        return
    jobs = open_jobs(address or config.cluster.address, token_file)
    try:
        if check:
            _refuse_what_does_not_fit(plan, config, jobs)
        job = jobs.submit(package, name, lambda text: echo(text, err=True))
    except SubmitError as error:
        raise _failed(error) from error
    echo(f"job {job} submitted to {jobs.address}; runs are made in {runs.absolute()}", err=True)
    if not follow:
        echo(job)
        return
    _follow(jobs, job)


def _refuse_what_does_not_fit(plan: Any, config: Any, jobs: Any) -> None:
    from tools.cluster import ask_cluster, check_fit
    from tools.submit import SubmitError

    fit = check_fit(plan, config, ask_cluster(jobs.dashboard))
    if fit.problems:
        raise SubmitError(
            "\n".join(f"does not fit: {p}" for p in fit.problems) + "\n(--no-check submits it all the same)"
        )


def _follow(jobs: Any, job: str) -> None:
    from tools.submit import EXIT_CODES, SubmitError, write_log

    try:
        status = jobs.follow(job, write_log)
    except KeyboardInterrupt:
        echo(f"\nthe job goes on; `r3async submit stop {job}` ends it in order", err=True)
        raise typer.Exit(130) from None
    except SubmitError as error:
        raise _failed(error) from error
    # Ray's message of a failed command repeats the end of the log, which was shown.
    message = status["message"] if "setup failed" in status["message"] else status["message"].partition("\n")[0]
    echo(f"job {job} {status['status'].lower()}: {message}".rstrip(": "), err=True)
    sys.stdout.flush()
    raise typer.Exit(EXIT_CODES[status["status"]])


@app.command()
def status(job: Job, address: Address = "", token_file: Token = "") -> None:
    """A job's status as JSON; the exit code is that of `submit`: 0 also while it runs."""
    from tools.submit import EXIT_CODES

    found = _ask(address, token_file, "status", job)
    echo(json.dumps(found))
    raise typer.Exit(EXIT_CODES.get(found["status"], 0))


@app.command(name="list")
def list_jobs(address: Address = "", token_file: Token = "") -> None:
    """All jobs of the cluster, one JSON object a line."""
    for found in _ask(address, token_file, "list"):
        echo(json.dumps(found))


@app.command()
def logs(
    job: Job,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="until it ends, with its exit code")] = False,
    address: Address = "",
    token_file: Token = "",
) -> None:
    """What a job has printed."""
    if follow:
        jobs = open_jobs(address, token_file)
        _follow(jobs, _find(jobs, job))
    echo(printable_log(_ask(address, token_file, "logs", job)), nl=False)


@app.command()
def stop(
    job: Job,
    wait: Annotated[float, typer.Option(help="seconds to wait for its end")] = 300.0,
    address: Address = "",
    token_file: Token = "",
) -> None:
    """End a job in order: the running step is finished, a checkpoint written."""
    from tools.submit import SubmitError

    jobs = open_jobs(address, token_file)
    job = _find(jobs, job)
    try:
        asked = jobs.stop(job)
        found = jobs.wait(job, wait)
    except SubmitError as error:
        raise _failed(error) from error
    echo(f"job {job} {'was stopped' if asked else 'had ended already'}: {found['status']}")


def _ask(address: str, token_file: str, question: str, *jobs_named: str) -> Any:
    from tools.submit import SubmitError

    jobs = open_jobs(address, token_file)
    try:
        return getattr(jobs, question)(*(jobs.find(job) for job in jobs_named))
    except SubmitError as error:
        raise _failed(error) from error


def _find(jobs: Jobs, job: str) -> str:
    from tools.submit import SubmitError

    try:
        return jobs.find(job)
    except SubmitError as error:
        raise _failed(error) from error


def cluster(
    preset: Annotated[str, typer.Argument(help="a preset's name, or a TOML file")],
    overrides: Overrides = None,
    address: Address = "",
    token_file: Token = "",
) -> None:
    """What a run needs beside what a Ray cluster has; exit code 1 if it does not fit."""
    from tools.cluster import ask_cluster, check_fit, describe_fit
    from tools.plan import make_plan

    config = load_command(preset, overrides or [])
    plan = make_plan(config)
    jobs = open_jobs(address or config.cluster.address, token_file)
    fit = check_fit(plan, config, ask_cluster(jobs.dashboard))
    echo(describe_fit(fit, plan))
    raise typer.Exit(1 if fit.problems else 0)
