"""A separate Ray head, started as a user starts it: from a shell that knows nothing of the virtual environment."""

import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from r3async.world.keeper import PR_SET_PDEATHSIG

BARE = "/usr/bin:/bin"
"""A PATH that has neither r3async nor its Python."""
START_SECONDS, START_ATTEMPTS = 120, 3
LIBC = ctypes.CDLL(None)


def bare_environment(**more: str) -> dict[str, str]:
    """Return this process's environment as it is in a shell without an activated virtual environment."""
    return {k: v for k, v in os.environ.items() if k != "VIRTUAL_ENV"} | {"PATH": BARE} | more


def beside_python(script: str) -> str:
    """Return the path of a script beside Python, `.venv/bin/SCRIPT`."""
    return str(Path(sys.executable).with_name(script))


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@contextmanager
def own_cluster() -> Iterator[dict[str, str]]:
    """Start a Ray head with token authentication in a separate process group. Yields the variables that its clients'
    environment needs."""
    secret = secrets.token_hex(32)
    with _home() as home:
        (home / "token").write_text(secret)
        environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(home / "token"),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        words = ["--num-cpus=2", "--object-store-memory=100000000"]
        with _head(home, bare_environment(**environment), words) as ports:
            yield environment | {"RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{ports['dashboard-port']}"}


@contextmanager
def clean_home() -> Iterator[dict[str, str]]:
    """Yield the environment of a user who has set nothing, with a separate home."""
    with _home() as home:
        kept = {key: value for key, value in bare_environment().items() if not key.startswith(("RAY_", "R3ASYNC_"))}
        yield kept | {"HOME": str(home)}


@contextmanager
def head_of(environment: dict[str, str]) -> Iterator[str]:
    """Start a Ray head as a user with that environment would. Yields the address of its dashboard."""
    words = ["--num-cpus=2", "--object-store-memory=100000000"]
    with _head(Path(environment["HOME"]), environment, words) as ports:
        yield f"http://127.0.0.1:{ports['dashboard-port']}"


@contextmanager
def plain_head() -> Iterator[str]:
    """Start a Ray head whose actors find what this process finds. Yields its address."""
    words = ["--num-cpus=32", "--include-dashboard=false"]
    with _home() as home, _head(home, dict(os.environ), words) as ports:
        yield f"127.0.0.1:{ports['port']}"


@contextmanager
def _home() -> Iterator[Path]:
    """Yield a temporary folder outside pytest's own, because a path of a Unix socket has at most 107 bytes."""
    home = Path(tempfile.mkdtemp(prefix="r3"))
    try:
        yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)


@contextmanager
def _head(home: Path, environment: dict[str, str], words: list[str]) -> Iterator[dict[str, int]]:
    """Start a Ray head, and yield its ports. Ray gives a new node 30 s to report itself, however busy the machine is,
    and then ends; it is then started again."""
    for attempt in range(1, START_ATTEMPTS + 1):
        head, ports = _spawn(home / str(attempt), environment, words)
        try:
            port = ports["port" if "--include-dashboard=false" in words else "dashboard-port"]
            _wait(port, home / str(attempt) / "log", head)
            break
        except RuntimeError:
            _end(head)
            if attempt == START_ATTEMPTS:
                raise
    try:
        yield ports
    finally:
        _end(head)


def _spawn(home: Path, environment: dict[str, str], words: list[str]) -> tuple[subprocess.Popen[bytes], dict[str, int]]:
    home.mkdir()
    names = ["port", "dashboard-port", "ray-client-server-port", "node-manager-port", "object-manager-port"]
    names += ["dashboard-agent-listen-port", "dashboard-agent-grpc-port", "metrics-export-port"]
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    command = [beside_python("ray"), "start", "--head", "--block", f"--temp-dir={home}/t", "--disable-usage-stats"]
    command += [*words, *(f"--{name}={port}" for name, port in ports.items())]
    with (home / "log").open("w") as log:
        head = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True, preexec_fn=_end_with_parent
        )
    return head, ports


def _end(head: subprocess.Popen[bytes]) -> None:
    # Asked to end, `ray start --block` takes more than five seconds. Killed, it takes its children along.
    with suppress(ProcessLookupError):
        os.killpg(head.pid, signal.SIGKILL)
    head.wait(120)


def _end_with_parent() -> None:
    """Run in the child: have it killed when this process ends, also by SIGKILL; `ray start --block` does so with its
    own children."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait(port: int, log: Path, head: subprocess.Popen[bytes]) -> None:
    """Wait until something listens on `port`, and Ray reports that it runs."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and head.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
        except OSError:
            time.sleep(0.2)
            continue
        if "Ray runtime started" in log.read_text():
            return
        time.sleep(0.2)
    raise RuntimeError(f"no cluster:\n{log.read_text()}")
