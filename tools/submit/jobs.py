"""Submit a run as a job of a Ray cluster, with Ray's `JobSubmissionClient` like `ray job submit`:
`r3async submit`.

The job's command is `r3async train …`, so whatever works there works here. In addition, the job
finds its Python (`launch.py`), the folder is packaged without files that a job never needs, models
and run directories get paths that outlive the package, and Ray gets the time that the run may need
to stop in order.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil

from r3async.config import Config, ConfigError, is_loopback_host
from r3async.world.process_output import clean_log_output

from ..runs import RUNS_VARIABLE, get_runs_directory
from .launch import extract_command, make_entrypoint
from .secrets import find_likely_secrets, make_exclude_pattern

AUTH_MODE_VARIABLE = "RAY_AUTH_MODE"
DEFAULT_ADDRESS = "http://127.0.0.1:8265"
MAX_SECRETS_SHOWN = 20
UNPACKED_DIRECTORIES = (".git", ".venv", "runs", "__pycache__", ".hypothesis")
EXCLUDE_PATTERNS = (
    *(f"{name}/" for name in UNPACKED_DIRECTORIES),
    *("*.safetensors", "*.pyc", "*.log", ".*_cache/"),
)
"""Patterns left out of the package in addition to the folder's `.gitignore` and `.rayignore`."""
SHUTDOWN_SECONDS = 30.0
"""Seconds to save the model and end the actors, after the running step."""
MAX_RECONNECTS = 5
MAX_QUIET_SECONDS = 60.0
"""Seconds without a line of the log after which the connection is renewed."""
REQUEST_TIMEOUT_SECONDS = 60.0
"""Timeout of a request to the cluster, in seconds."""
SETTLE_SECONDS = 60.0
"""Seconds within which the job's status follows the end of its log."""
AGENT_SECONDS = 30.0
NO_AGENT_MESSAGE = "No available agent"
"""Message of the dashboard while the agent that starts jobs is not up."""
STATUS_EXIT_CODES = {"SUCCEEDED": 0, "FAILED": 1, "STOPPED": 3}
"""Exit code of `submit` for each final status of the job; 2 is a mistake of the command
line, as everywhere."""


class SubmitError(RuntimeError):
    """A request that the cluster did not get or refused; the message gives a remedy."""


class JobPackage(msgspec.Struct, frozen=True):
    """The contents of a job: its shell command and Ray's runtime environment.

    Attributes:
        likely_secrets: Files and directories of the folder that are left out, because they are
            likely to hold keys.
    """

    entrypoint: str
    runtime_env: dict[str, Any]
    likely_secrets: Sequence[str] = ()

    def describe_likely_secrets(self) -> str:
        """Describe what is left out in one line; "" if nothing is."""
        if not self.likely_secrets:
            return ""
        names = ", ".join(self.likely_secrets[:MAX_SECRETS_SHOWN])
        more = len(self.likely_secrets) - MAX_SECRETS_SHOWN
        return (
            "not packaged, because the names are those of keys: "
            f"{names}{f' and {more} more' if more > 0 else ''}. If your code needs one, rename it, "
            "or name its path on a disk that all nodes see"
        )


def compute_stop_seconds(config: Config) -> int:
    """Return the seconds that Ray waits between SIGTERM and SIGKILL when the job is stopped.

    They are the time that `train` gives the actors, plus the time to leave Ray. Ray's own default
    is 3 s, in which no model is saved.
    """
    return math.ceil(4 * config.supervise.stop_grace_seconds + SHUTDOWN_SECONDS)


def make_package(
    config: Config,
    preset: str,
    overrides: Sequence[str] = (),
    *,
    directory: Path | None = None,
    runs: Path | None = None,
    env: dict[str, str] | None = None,
) -> JobPackage:
    """Make the job that trains `preset` with `overrides`, from `directory` (the current one).

    Run directories are made in `runs` (by default `get_runs_directory`), which every node that
    trains must see. A local `model.path` or `transport.keys` is passed as an absolute path, because
    weights and keys are not packaged. Raises `ConfigError` for a file outside the folder, and for a
    folder that has another module named `r3async`.
    """
    directory = (directory or Path.cwd()).absolute()
    if preset.endswith(".toml"):
        path = Path(preset).absolute()
        if not path.is_relative_to(directory):
            raise ConfigError(
                f"{preset} is outside of {directory}, which is what the job gets: copy it there"
            )
        preset = str(path.relative_to(directory))
    _refuse_hidden_module(directory)
    words = ["-m", "r3async", "train", preset, *overrides]
    for setting, place in (
        ("model.path", config.model.path),
        ("transport.keys", config.transport.keys),
    ):
        if place and Path(place).is_dir() and not Path(place).is_absolute():
            words.append(f"{setting}={Path(place).absolute()}")
    environment = {
        "RAY_JOB_STOP_WAIT_TIME_S": str(compute_stop_seconds(config)),
        RUNS_VARIABLE: str((runs or get_runs_directory()).absolute()),
        **{name: os.environ[name] for name in ("HF_HUB_OFFLINE",) if name in os.environ},
        **(env or {}),
    }
    secrets = find_likely_secrets(directory, skipped=UNPACKED_DIRECTORIES)
    runtime_env = {
        "working_dir": str(directory),
        "excludes": [
            *EXCLUDE_PATTERNS,
            *_find_own_output(directory),
            *map(make_exclude_pattern, secrets),
        ],
        "env_vars": environment,
    }
    return JobPackage(
        make_entrypoint(words, needs="import r3async.tools.cli"), runtime_env, secrets
    )


def _find_own_output(directory: Path) -> list[str]:
    """Return the files of the folder that receive our own output.

    Ray names a package by its contents, which it reads more than once: a file that grows in between
    makes a job request a package that does not exist.
    """
    out = []
    for descriptor in (1, 2):
        try:
            target = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:
            continue
        if target.is_relative_to(directory):
            out.append("/" + str(target.relative_to(directory)))
    return sorted(set(out))


def _refuse_hidden_module(directory: Path) -> None:
    """Refuse a folder with another module `r3async`.

    Ray puts the folder at the front of the module path of every process of the job, so that this
    module would shadow ours.
    """
    if (directory / "r3async" / "api.py").is_file():
        return  # a checkout: the job runs its code
    if (directory / "r3async").is_dir() or (directory / "r3async.py").is_file():
        raise ConfigError(
            f"{directory} has a module 'r3async', which would hide the installed one in the job: "
            "submit from another folder, or rename it"
        )


def open_job_client(address: str, headers: dict[str, str] | None = None) -> Any:
    """Open Ray's client for the jobs of a cluster. Raises what Ray raises.

    A local run leaves a token in `~/.ray/auth_token`; a head that is started later requires it, and
    clients do not look there. So a cluster on this machine that requires it gets it. A token is
    sent to no other machine unless the user says so.
    """
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    try:
        return JobSubmissionClient(address, headers=headers)
    except AuthenticationError:
        if not _use_local_token(address):
            raise
        return JobSubmissionClient(address, headers=headers)


def _use_local_token(address: str) -> bool:
    """Make this process use the token that Ray keeps for its user.

    Returns False if there is none, or if it does not belong to that address.
    """
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    host = _split_address(address).hostname or ""
    if AUTH_MODE_VARIABLE in os.environ or not (
        is_loopback_host(host) or host in _list_local_addresses()
    ):
        return False
    if not AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True):
        return False
    os.environ[AUTH_MODE_VARIABLE] = "token"
    Config.initialize("")  # Ray has already read the variable
    return True


def _list_local_addresses() -> set[str]:
    return {each.address for addresses in psutil.net_if_addrs().values() for each in addresses}


class ClusterJobs:
    """The jobs of one cluster. Every method may raise `SubmitError`."""

    def __init__(self, address: str = "", token_file: str = ""):
        if token_file:
            if not Path(token_file).is_file():
                raise SubmitError(f"--token-file {token_file}: there is no such file")
            os.environ |= {AUTH_MODE_VARIABLE: "token", "RAY_AUTH_TOKEN_PATH": token_file}
            os.environ.pop("RAY_AUTH_TOKEN", None)
        if address:
            # Ray prefers these variables to the address that it is given.
            os.environ.pop("RAY_API_SERVER_ADDRESS", None)
            os.environ.pop("RAY_ADDRESS", None)
        self.address = (
            address
            or os.environ.get("RAY_API_SERVER_ADDRESS")
            or os.environ.get("RAY_ADDRESS")
            or DEFAULT_ADDRESS
        )
        import logging

        packaging = ("_private.runtime_env.packaging", "_private.runtime_env.working_dir")
        for noisy in ("dashboard.modules.job.sdk", "dashboard.modules.dashboard_sdk", *packaging):
            logging.getLogger(f"ray.{noisy}").setLevel(logging.WARNING)
        with self._explain_errors():
            _check_port(self.address)
            self._client = open_job_client(self.address)
        # Ray's client passes further arguments to `requests`, which without a
        # timeout waits for ever.
        self._client._do_request = partial(
            self._client._do_request, timeout=REQUEST_TIMEOUT_SECONDS
        )

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        from ray.exceptions import AuthenticationError

        try:
            yield
        except AuthenticationError as error:
            raise SubmitError(
                f"{self.address} wants a token ({str(error).splitlines()[0]}): set "
                "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to the cluster's token file, or "
                "pass --token-file"
            ) from error
        except ConnectionError as error:
            raise SubmitError(
                f"no Ray cluster answers at {self.address}: is it running (`ray start --head`), "
                "and is this the address of its dashboard (port 8265 by default)? --address or "
                "RAY_ADDRESS names another"
            ) from error
        except RuntimeError as error:
            text = str(error)
            if "does not exist" in text:
                raise SubmitError(
                    f"{self.address}: {_last_line(text).rstrip('.')}; `r3async submit "
                    "list` shows its jobs"
                ) from error
            raise SubmitError(f"{self.address}: {_last_line(text)}") from error
        except ValueError as error:
            raise SubmitError(str(error)) from error

    @property
    def dashboard_address(self) -> str:
        """The http address that `address` stands for."""
        return str(self._client.get_address())

    def submit_job(
        self,
        package: JobPackage,
        name: str = "",
        print_line: Callable[[str], object] = lambda text: None,
    ) -> str:
        """Package, upload and start a job, and return its id.

        A cluster that was just started may take `AGENT_SECONDS` until it accepts jobs.

        Args:
            name: The job's id; empty for one from Ray.
        """
        deadline = time.monotonic() + AGENT_SECONDS
        while True:
            try:
                with self._explain_errors():
                    return self._client.submit_job(
                        entrypoint=package.entrypoint,
                        runtime_env=package.runtime_env,
                        submission_id=name or None,
                    )
            except SubmitError as error:
                if NO_AGENT_MESSAGE not in str(error):
                    raise
                if time.monotonic() > deadline:
                    raise SubmitError(
                        f"{self.address} takes no jobs ({NO_AGENT_MESSAGE!r} for "
                        f"{AGENT_SECONDS:.0f} s): its dashboard agent is not up. If another Ray "
                        "runs on that host, it has the agent's port: give `ray start` "
                        "--dashboard-agent-listen-port=0"
                    ) from error
                print_line("the cluster takes no jobs yet: waiting for its dashboard agent")
                time.sleep(2.0)

    def get_status(self, job: str) -> dict[str, Any]:
        """Return a job's `status`, `message`, `entrypoint` and `seconds` (0 before it runs).

        The status is PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED.
        """
        with self._explain_errors():
            info = self._client.get_job_info(job)
        began = info.start_time or 0
        ended = info.end_time or time.time() * 1000
        return {
            "job": job,
            "status": str(getattr(info.status, "value", info.status)),
            "message": info.message or "",
            "entrypoint": extract_command(info.entrypoint),
            "seconds": (ended - began) / 1000 if began else 0.0,
        }

    def list_jobs(self) -> list[dict[str, Any]]:
        """Return the status of all submitted jobs, the oldest first."""
        return [self.get_status(job.submission_id) for job in self._list_submitted()]

    def find_job(self, job: str) -> str:
        """Return the id that `job` stands for: itself, or the newest job whose command has
        `name=JOB`, a run's name."""
        known = self._list_submitted()
        if job in {j.submission_id for j in known}:
            return job
        return next(
            (j.submission_id for j in reversed(known) if f"name={job}" in j.entrypoint.split()), job
        )

    def _list_submitted(self) -> Sequence[Any]:
        with self._explain_errors():
            jobs = self._client.list_jobs()
        return sorted((j for j in jobs if j.submission_id), key=lambda j: j.start_time or 0)

    def get_logs(self, job: str) -> str:
        """Return the job's output so far."""
        with self._explain_errors():
            return self._client.get_job_logs(job)

    def stop_job(self, job: str) -> bool:
        """Request an orderly end: SIGTERM, then SIGKILL after the job's grace period. Returns False
        if it had ended."""
        if self.get_status(job)["status"] in STATUS_EXIT_CODES:
            return False
        with self._explain_errors():
            return bool(self._client.stop_job(job))

    def wait_ended(self, job: str, seconds: float) -> dict[str, Any]:
        """Wait for the job's end and return its status. Raises `SubmitError` if it has not ended
        `seconds` from now."""
        deadline = time.monotonic() + seconds
        while (status := self.get_status(job))["status"] not in STATUS_EXIT_CODES:
            if time.monotonic() > deadline:
                raise SubmitError(f"job {job} is still {status['status']} after {seconds:.0f} s")
            time.sleep(0.5)
        return status

    def follow_log(self, job: str, write: Callable[[str], Any]) -> dict[str, Any]:
        """Pass the job's output to `write` until it ends, and return its status.

        A lost connection is renewed, without repeating a line. Ctrl-C leaves the job running and
        raises `KeyboardInterrupt`.
        """
        shown = lost = 0

        def show(text: str) -> None:
            nonlocal shown
            write(text)
            shown += len(text)

        while True:
            try:
                asyncio.run(self._tail_log(job, shown, show))
                break
            except TimeoutError:
                pass  # no output for long: it may be computing, or the connection is lost
            except (RuntimeError, OSError) as error:
                lost += 1
                if lost > MAX_RECONNECTS:
                    raise SubmitError(
                        f"the log of job {job} broke off {lost} times ({error}); the job keeps "
                        f"running: `r3async submit logs {job}`"
                    ) from error
                time.sleep(1.0)
            if self.get_status(job)["status"] in STATUS_EXIT_CODES:
                show(self.get_logs(job)[shown:])
                break
        return self.wait_ended(job, SETTLE_SECONDS)

    async def _tail_log(self, job: str, shown: int, show: Callable[[str], None]) -> None:
        """Follow the log once, without the first `shown` characters.

        Raises `TimeoutError` after `MAX_QUIET_SECONDS` of silence.
        """
        log = self._client.tail_job_logs(job)
        while True:
            try:
                text = await asyncio.wait_for(anext(log), MAX_QUIET_SECONDS)
            except StopAsyncIteration:
                return
            old = min(shown, len(text))
            shown = max(0, shown - len(text))
            if text[old:]:
                show(text[old:])


def _check_port(address: str) -> None:
    """Raise `ConnectionError` if nothing listens there, within seconds instead of the minutes
    that TCP may take."""
    url = _split_address(address)
    if url.hostname is None or (url.scheme not in ("http", "https") and url.port is None):
        return
    try:
        socket.create_connection(
            (url.hostname, url.port or (443 if url.scheme == "https" else 80)), 5.0
        ).close()
    except OSError as error:
        raise ConnectionError(str(error)) from error


def _split_address(address: str) -> urllib.parse.SplitResult:
    return urllib.parse.urlsplit(address if "://" in address else f"ray://{address}")


def _last_line(text: str) -> str:
    """Return the error in a message of Ray's server, which may contain its whole traceback."""
    lines = [line.strip() for line in text.replace("\\n", "\n").splitlines() if line.strip(" .'\"")]
    return lines[-1] if lines else text


def write_log(text: str) -> None:
    """Write to stdout at once, without control sequences that a terminal would obey."""
    sys.stdout.write(clean_log_output(text))
    sys.stdout.flush()
