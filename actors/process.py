"""What every actor process does first."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from pathlib import Path

import psutil

USER_PATH = "R3ASYNC_USER_PATH"
"""Environment variable that tells an actor where the person's own modules are: where the run was started."""


def environment(threads: int) -> dict[str, str]:
    """Environment variables of an actor that computes with that many threads."""
    return {"OMP_NUM_THREADS": str(threads), USER_PATH: os.environ.get(USER_PATH, os.getcwd())}


def find_user_modules() -> None:
    """Let `module:name` of a configuration name a module beside which the run was started. Ours come first."""
    path = os.environ.get(USER_PATH, os.getcwd())
    if path not in sys.path:
        sys.path.append(path)


def begin(path: Path) -> None:
    """Find the person's modules, and send this process's stdout and stderr, and those of its children, to `path`: logs belong
    to the run directory."""
    find_user_modules()
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    # The stacks of all threads, also where the event loop, or all of Python, is held up.
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)


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
