"""This process, and the processes of actors on this host."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from r3async.world import Figures

USER_PATH = "R3ASYNC_USER_PATH"
"""Environment variable: where the user's own modules are (where the run was started)."""

LAG_SECONDS = 0.05
"""Between two measurements of how late the event loop is."""


def environment(threads: int) -> dict[str, str]:
    """Environment variables of an actor that computes with that many threads."""
    return {"OMP_NUM_THREADS": str(threads), USER_PATH: os.environ.get(USER_PATH, os.getcwd())}


def find_user_modules() -> None:
    """Let `module:name` of a configuration name a module beside which the run was started. Ours come first."""
    path = os.environ.get(USER_PATH, os.getcwd())
    if path not in sys.path:
        sys.path.append(path)


class SystemProcesses:
    """See `world.Processes`."""

    def __init__(self) -> None:
        self._figures: Figures | None = None

    @property
    def pid(self) -> int:
        return os.getpid()

    @property
    def host(self) -> str:
        return socket.gethostname()

    def redirect_output(self, log: Path) -> None:
        from r3async.world.streams import survive_full_disk

        sys.stdout.flush()
        sys.stderr.flush()
        with contextlib.suppress(OSError):  # without free bytes for a new file, output stays where it went
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.close(descriptor)
        survive_full_disk()
        # The stacks of all threads, also where the event loop, or all of Python, is held up.
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)

    def serve_figures(self, serve: Callable[[], Figures | None]) -> None:
        self._figures = self._figures or serve()

    def show_figures(self, read: Callable[[], Mapping[str, Any]]) -> None:
        if self._figures is not None:
            self._figures.read = read

    def measure_lag(self, tell: Callable[[float], None]) -> Callable[[], None]:
        async def measure() -> None:
            while True:
                due = time.monotonic() + LAG_SECONDS
                await asyncio.sleep(LAG_SECONDS)
                tell(time.monotonic() - due)

        task = asyncio.create_task(measure(), name="lag-meter")

        def end() -> None:
            task.cancel()

        return end

    def dump_stacks(self, path: Path, reason: str) -> Path:
        from r3async.world.stacks import dump_stacks

        return dump_stacks(path, reason)

    def ask_for_stacks(self, pid: int, host: str) -> bool:
        return host == self.host and _signal(pid, signal.SIGUSR1)

    def kill(self, pid: int, host: str) -> bool:
        return host == self.host and _signal(pid, signal.SIGKILL)


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
