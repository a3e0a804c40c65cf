"""The command `r3async submit` and its subcommands."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from r3async.config import load_command_config
from r3async.world.process_output import clean_log_output

from ..runs import DEFAULT_RUNS_DIRECTORY, RUNS_VARIABLE
from ..terminal import SafeConsole, echo_printable
from ..usage import DefaultCommandGroup

if TYPE_CHECKING:
    from .jobs import ClusterJobs

AddressOption = Annotated[
    str,
    typer.Option(
        help="of the cluster's dashboard, http://HOST:8265, or of the cluster, HOST:6379",
        show_default="RAY_API_SERVER_ADDRESS, RAY_ADDRESS, http://127.0.0.1:8265",
    ),
]
TokenOption = Annotated[
    str, typer.Option("--token-file", help="the cluster's token", show_default="as Ray finds it")
]
JobArgument = Annotated[str, typer.Argument(help="a job's id, or the name of its run")]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(help="key=value, for example learner.lr=1e-4", show_default=False),
]


app = typer.Typer(
    cls=DefaultCommandGroup,
    no_args_is_help=True,
    help="Submit a run to a Ray cluster, `submit PRESET KEY=VALUE …`, and look after it.",
)


@contextmanager
def _open_jobs(address: str, token_file: str) -> Iterator[ClusterJobs]:
    """Open the cluster's jobs; a request that fails or is refused is one line on stderr
    and exit code 2."""
    from .jobs import ClusterJobs, SubmitError

    try:
        yield ClusterJobs(address, token_file)
    except SubmitError as error:
        SafeConsole(stderr=True).print(
            str(error), style="bold red", highlight=False, markup=False, soft_wrap=True
        )
        raise typer.Exit(2) from error


@app.command(
    name="run",
    hidden=True,
    epilog="Example: r3async submit quickstart seed=1 name=night --address http://HEAD:8265",
)
def submit(
    preset: Annotated[str, typer.Argument(help="a preset's name, or a TOML file in this folder")],
    overrides: OverridesArgument = None,
    address: AddressOption = "",
    token_file: TokenOption = "",
    follow: Annotated[
        bool, typer.Option("--follow/--detach", help="show the log until the job ends")
    ] = True,
    runs: Annotated[
        Path,
        typer.Option(
            help="where run directories are made; every node must see it", envvar=RUNS_VARIABLE
        ),
    ] = DEFAULT_RUNS_DIRECTORY,
    name: Annotated[str, typer.Option("--id", help="of the job", show_default="Ray's")] = "",
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="refuse what does not fit the cluster")
    ] = True,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="show the job and whether it fits (exit 1 if not), and submit nothing"
        ),
    ] = False,
) -> None:
    """Package this folder (without what .gitignore and .rayignore name) and train
    PRESET as a job."""
    from ..preflight import check_dry_run
    from .jobs import make_package

    config = load_command_config(preset, overrides or [])
    start = check_dry_run(config, import_code=not dry_run, made_elsewhere=True)
    for note in start.notes:
        echo_printable(note, err=True)
    package = make_package(config, preset, overrides or [], runs=runs)
    left_out = package.describe_likely_secrets()
    if left_out:
        echo_printable(left_out, err=True)
    if dry_run:
        echo_printable(
            json.dumps(
                {"entrypoint": package.entrypoint, "runtime_env": package.runtime_env}, indent=2
            )
        )
        if not check:
            return
    with _open_jobs(address or config.cluster.address, token_file) as jobs:
        if check:
            _check_cluster_fit(start.plan, config, jobs, dry_run)
        if dry_run:
            return
        job = jobs.submit_job(package, name, lambda text: echo_printable(text, err=True))
        echo_printable(
            f"job {job} submitted to {jobs.address}; runs are made in {runs.absolute()}", err=True
        )
        if follow:
            _follow_job(jobs, job)
        echo_printable(job)


def _check_cluster_fit(plan: Any, config: Any, jobs: ClusterJobs, dry_run: bool) -> None:
    """Compare a run's needs with the cluster's resources. If they do not fit, exit with 1 after a
    dry run, which prints both; else raise `SubmitError`."""
    from ..fit import check_cluster_fit, describe_cluster_fit, query_nodes
    from .jobs import SubmitError

    fit = check_cluster_fit(plan, config, query_nodes(jobs.dashboard_address))
    if dry_run:
        echo_printable(describe_cluster_fit(fit, plan), err=True)
        if fit.problems:
            raise typer.Exit(1)
    elif fit.problems:
        raise SubmitError(
            "\n".join(f"does not fit: {p}" for p in fit.problems)
            + "\n(--no-check submits it all the same)"
        )


def _follow_job(jobs: ClusterJobs, job: str) -> NoReturn:
    """Show the job's log until it ends, and exit with its exit code."""
    from .jobs import STATUS_EXIT_CODES, write_log

    try:
        status = jobs.follow_log(job, write_log)
    except KeyboardInterrupt:
        echo_printable(
            f"\nthe job keeps running; `r3async submit stop {job}` ends it in order", err=True
        )
        raise typer.Exit(130) from None
    # Ray's message about a failed command repeats the end of the log, which was already shown.
    message = (
        status["message"]
        if "setup failed" in status["message"]
        else status["message"].partition("\n")[0]
    )
    echo_printable(f"job {job} {status['status'].lower()}: {message}".rstrip(": "), err=True)
    sys.stdout.flush()
    raise typer.Exit(STATUS_EXIT_CODES[status["status"]])


@app.command(epilog="Example: r3async submit status night")
def status(job: JobArgument, address: AddressOption = "", token_file: TokenOption = "") -> None:
    """Print a job's status as JSON; the exit code is that of `submit`: 0 also while it runs."""
    from .jobs import STATUS_EXIT_CODES

    with _open_jobs(address, token_file) as jobs:
        found = jobs.get_status(jobs.find_job(job))
    echo_printable(json.dumps(found))
    raise typer.Exit(STATUS_EXIT_CODES.get(found["status"], 0))


@app.command(name="list", epilog="Example: r3async submit list")
def list_jobs(address: AddressOption = "", token_file: TokenOption = "") -> None:
    """List all jobs of the cluster, one JSON object per line."""
    with _open_jobs(address, token_file) as jobs:
        for found in jobs.list_jobs():
            echo_printable(json.dumps(found))


@app.command(epilog="Example: r3async submit logs night --follow")
def logs(
    job: JobArgument,
    follow: Annotated[
        bool, typer.Option("--follow/--no-follow", help="until it ends, with its exit code")
    ] = False,
    address: AddressOption = "",
    token_file: TokenOption = "",
) -> None:
    """Print a job's output."""
    with _open_jobs(address, token_file) as jobs:
        found = jobs.find_job(job)
        if follow:
            _follow_job(jobs, found)
        echo_printable(clean_log_output(jobs.get_logs(found)), nl=False)


@app.command(epilog="Example: r3async submit stop night")
def stop(
    job: JobArgument,
    wait: Annotated[float, typer.Option(help="seconds to wait for its end")] = 300.0,
    address: AddressOption = "",
    token_file: TokenOption = "",
) -> None:
    """Stop a job after its running step, with a checkpoint."""
    with _open_jobs(address, token_file) as jobs:
        job = jobs.find_job(job)
        asked = jobs.stop_job(job)
        found = jobs.wait_ended(job, wait)
    echo_printable(
        f"job {job} {'was stopped' if asked else 'had ended already'}: {found['status']}"
    )
