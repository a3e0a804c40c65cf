"""What every actor process does first."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from r3async.observe.prometheus import Endpoint

import psutil

from r3async.checkpoint.lock import RunLock
from r3async.files import make_directory
from r3async.streams import survive_full_disk

USER_PATH = "R3ASYNC_USER_PATH"
"""Environment variable that tells an actor where the person's own modules are: where the run was started."""


class NotLoaded(RuntimeError):
    """This process was started in place of one that died, and was told nothing yet."""


def whereabouts() -> dict[str, Any]:
    """This process's `pid` and `host`, to tell who may have to end it."""
    return {"pid": os.getpid(), "host": socket.gethostname()}


def here(host: str) -> bool:
    """`host`, of a `whereabouts`, is this one."""
    return host == socket.gethostname()


def environment(threads: int) -> dict[str, str]:
    """Environment variables of an actor that computes with that many threads."""
    return {"OMP_NUM_THREADS": str(threads), USER_PATH: os.environ.get(USER_PATH, os.getcwd())}


def find_user_modules() -> None:
    """Let `module:name` of a configuration name a module beside which the run was started. Ours come first."""
    path = os.environ.get(USER_PATH, os.getcwd())
    if path not in sys.path:
        sys.path.append(path)


_endpoint: Endpoint | None = None
"""This process's, as long as it lives."""
_lock: RunLock | None = None
"""On the run's directory, to which every actor writes: nobody prepares it anew before this process has ended."""


def begin(path: Path) -> None:
    """Share the lock on the run's directory, find the person's modules, and send this process's stdout and stderr, and those of
    its children, to `path`, which is `logs/ROLE.log` there. If the run's configuration sets `observe.prometheus_port`, serve
    this process's memory and CPU time."""
    global _lock
    find_user_modules()
    make_directory(path.parent)
    if _lock is not None:
        _lock.close()
    _lock = RunLock(path.parent.parent)
    _lock.shared()
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(OSError):  # without free bytes for a new file, output stays where it went
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
    survive_full_disk()
    # The stacks of all threads, also where the event loop, or all of Python, is held up.
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    _serve(path.parent.parent, path.stem)


def ask_for_stacks(pid: int) -> bool:
    """Have a process of this host that did `begin` write what its threads do to its log. False if it is not (any more) there.

    A process that is stopped does so when it goes on.
    """
    return _signal(pid, signal.SIGUSR1)


def end(pid: int) -> bool:
    """Kill an actor's process of this host at once. False if it is not (any more) there."""
    return _signal(pid, signal.SIGKILL)


def _signal(pid: int, number: signal.Signals) -> bool:
    """Process ids are used again: nothing is sent but to what calls itself a worker of Ray and is of this user."""
    try:
        process = psutil.Process(pid)
        command = process.cmdline()
        if process.uids().real != os.getuid() or not command or not command[0].startswith("ray::"):
            return False
        process.send_signal(number)
    except psutil.Error:
        return False
    return True


def _serve(run_dir: Path, role: str) -> None:
    """An endpoint of an earlier actor in this process is kept."""
    global _endpoint
    from r3async.observe.prometheus import serve_actor

    _endpoint = _endpoint or serve_actor(role, run_dir)


def show_figures(read: Callable[[], Mapping[str, Any]]) -> None:
    """Where this process serves its figures, also those that `read()` returns whenever they are asked for, in another thread."""
    if _endpoint is not None:
        _endpoint.read = read
