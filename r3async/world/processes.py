"""This process, what its threads and tasks are doing, and the processes of actors on this host."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import io
import linecache
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from r3async.world import Figures
from r3async.world.files import make_directory

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
        from r3async.world.processes import dump_stacks

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


def dump_stacks(path: Path, reason: str = "") -> Path:
    """Append the stacks of all threads, and of all tasks of the running event loop, to `path`; returns it.

    Call it on the event loop's thread to see its tasks; elsewhere threads only. Never raises for what it finds; what
    the disk does not take goes to stderr.
    """
    out = io.StringIO()
    out.write(f"==== {time.strftime('%Y-%m-%d %H:%M:%S')} {reason}\n")
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        out.write(f"\n-- thread {names.get(ident, ident)}\n")
        out.write("".join(traceback.format_stack(frame)))
    for task in sorted(_tasks(), key=lambda t: t.get_name()):
        out.write(f"\n-- task {task.get_name()}: {getattr(task.get_coro(), '__qualname__', task.get_coro())}\n")
        out.write("".join(f"  {line}\n" for line in _awaited(task.get_coro())))
    try:
        make_directory(path.parent)
        with path.open("a") as file:
            file.write(out.getvalue() + "\n")
    except OSError as error:
        with contextlib.suppress(OSError):
            print(f"{path}: {error}\n{out.getvalue()}", file=sys.stderr)
    return path


def _awaited(awaited: Any) -> Iterator[str]:
    """From a task's outermost coroutine to what it waits for at last, with the line at which each stands. asyncio's own listing
    ends at the first coroutine that is compiled, as Ray's are, and has no frame."""
    while awaited is not None:
        frame = next((f for k in ("cr_frame", "gi_frame", "ag_frame") if (f := getattr(awaited, k, None))), None)
        name = getattr(awaited, "__qualname__", None)
        if frame is not None:
            path, line = frame.f_code.co_filename, frame.f_lineno
            yield f"{name}, {path}:{line}: {linecache.getline(path, line).strip()}"
        elif name:
            yield f"{name}"
        inner = [getattr(awaited, k, None) for k in ("cr_await", "gi_yieldfrom", "ag_await")]
        if not name:  # an iterator that asyncio or a compiler made: of a future, or of another coroutine
            inner = [x for x in gc.get_referents(awaited) if asyncio.iscoroutine(x)]
            if not inner:
                yield f"{awaited!r} of {gc.get_referents(awaited)!r}"
        awaited = next((x for x in inner if x is not None), None)


def _tasks() -> set[asyncio.Task[Any]]:
    try:
        return asyncio.all_tasks()
    except RuntimeError:  # no loop runs in this thread
        return set()
