"""This process, the processes of actors on this host, and the output of a process: on a full disk a `print` must not
raise, and text of models, environments and exceptions is made safe for a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import functools
import gc
import io
import json
import os
import re
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import psutil

from r3async.config.paths import USER_PATH_VARIABLE
from r3async.world import MetricsServer, keeper, stages

T = TypeVar("T")

HOST_NAME_VARIABLE = "R3ASYNC_HOST"
"""Environment variable with this host's name, for hosts whose names are equal. Processes of one name share memory
and files."""

GRPC_KEEPALIVE_VARIABLE = "RAY_grpc_keepalive_timeout_ms"
GRPC_KEEPALIVE_SECONDS = 120
"""Seconds for which a cut line breaks no connection of our actors' processes. Ray's nodes have a separate setting."""

HASH_SEED_VARIABLE = "PYTHONHASHSEED"

LAG_INTERVAL_SECONDS = 0.05
"""Seconds between two measurements of how late the event loop is."""


def hash_seed_variables() -> dict[str, str]:
    """Return the environment variable that gives sets of strings one order in all processes of a run; a value that the
    user has set stays. Tasks that are drawn from a set would otherwise differ from process to process."""
    return {HASH_SEED_VARIABLE: os.environ.get(HASH_SEED_VARIABLE) or "0"}


def actor_environment(threads: int) -> dict[str, str]:
    """Return the environment variables of an actor that computes with `threads` threads.

    Ray starts its workers at nice 15: any other work on the host would starve the learner and the engines. Its
    servers drop a connection whose line is cut for 20 s, and the other end is not notified: it waits for its answer,
    for minutes.
    """
    return {
        GRPC_KEEPALIVE_VARIABLE: os.environ.get(GRPC_KEEPALIVE_VARIABLE, str(1000 * GRPC_KEEPALIVE_SECONDS)),
        "OMP_NUM_THREADS": str(max(1, threads)),
        "RAY_worker_niceness": "0",
        USER_PATH_VARIABLE: os.environ.get(USER_PATH_VARIABLE, os.getcwd()),
        **hash_seed_variables(),
    }


@contextlib.contextmanager
def pause_garbage_collector() -> Iterator[None]:
    """Pause the garbage collector while torch, vLLM or a model is loaded. Loading creates a million objects that
    stay, and the collector would walk them again and again, for a tenth to a fifth of the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextlib.contextmanager
def hide_main_module() -> Iterator[None]:
    """Hide the main module from processes that are spawned inside, so that they do not import the running program:
    without `if __name__ == "__main__":` in it, it would run again in each of them."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@functools.cache
def _shared_loop() -> tuple[asyncio.Runner, threading.Lock]:
    return asyncio.Runner(), threading.Lock()


def run_on_shared_loop(call: Coroutine[Any, Any, T]) -> T:
    """Run `call` as `asyncio.run` does, but on one event loop of this process for every call: for calls into the
    user's code. What a user's module keeps between calls, such as an HTTP client, belongs to the loop on which it
    was first used. If another thread is running that loop, `call` gets a new one."""
    runner, lock = _shared_loop()
    if not lock.acquire(blocking=False):
        return asyncio.run(call)
    try:
        return runner.run(call)
    finally:
        lock.release()


def run_on_own_loop(call: Coroutine[Any, Any, T]) -> T:
    """Run `call` to its end on an event loop in a thread of its own: for a short check in a plain function, which may
    have been called on a running loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, call).result()


def add_user_module_path() -> None:
    """Let `module:name` of a configuration name a module in the directory where the run was started. Our modules
    come first."""
    path = os.environ.get(USER_PATH_VARIABLE, os.getcwd())
    if path not in sys.path:
        sys.path.append(path)


class SystemProcesses:
    """This process and those of actors, through the operating system, as `world.Processes`."""

    def __init__(self) -> None:
        self._metrics_server: MetricsServer | None = None

    @property
    def pid(self) -> int:
        return os.getpid()

    @property
    def host(self) -> str:
        return os.environ.get(HOST_NAME_VARIABLE) or socket.gethostname()

    def redirect_output(self, log_path: Path) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        with contextlib.suppress(OSError):  # without free bytes for a new file, output stays where it went
            descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.close(descriptor)
        ignore_output_errors()
        # Dump the stacks of all threads, even if the event loop, or all of Python, is blocked.
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)

    def serve_metrics(self, open_endpoint: Callable[[], MetricsServer | None]) -> None:
        self._metrics_server = self._metrics_server or open_endpoint()

    def add_metrics_source(self, read_metrics: Callable[[], Mapping[str, Any]]) -> None:
        if self._metrics_server is not None:
            self._metrics_server.read_metrics = read_metrics

    def measure_event_loop(self, on_lag: Callable[[float, float], None]) -> Callable[[], None]:
        async def measure() -> None:
            computed = time.thread_time()
            while True:
                due = time.monotonic() + LAG_INTERVAL_SECONDS
                await asyncio.sleep(LAG_INTERVAL_SECONDS)
                lag, before, computed = time.monotonic() - due, computed, time.thread_time()
                on_lag(lag, min(lag, computed - before))

        end_account = stages.start_accounting()
        task = asyncio.create_task(stages.in_stage("metrics", measure()), name="lag-meter")

        def end() -> None:
            task.cancel()
            end_account()

        return end

    def stage_seconds(self) -> tuple[dict[str, float], dict[str, float]]:
        return stages.cpu_seconds_by_stage(), stages.wall_seconds_by_stage()

    def cpu_seconds(self, other_pids: Sequence[int] = ()) -> float:
        seconds = time.process_time()
        for pid in other_pids:
            with contextlib.suppress(psutil.Error):
                times = psutil.Process(pid).cpu_times()
                seconds += times.user + times.system
        return seconds

    def dump_stacks(self, path: Path, reason: str) -> Path:
        from r3async.world.threads import dump_stacks

        return dump_stacks(path, reason)

    def request_stack_dump(self, pid: int, host: str) -> bool:
        return host == self.host and _signal_worker(pid, signal.SIGUSR1)

    def is_alive(self, pid: int, host: str) -> bool:
        return host == self.host and _find_worker(pid) is not None

    def kill_process(self, pid: int, host: str) -> bool:
        return host == self.host and _signal_worker(pid, signal.SIGKILL)


def _find_worker(pid: int) -> psutil.Process | None:
    """Return the process with this id if it calls itself a worker of Ray and belongs to this user, as process ids
    are reused; else None."""
    try:
        process = psutil.Process(pid)
        command = process.cmdline()
        ours = process.uids().real == os.getuid() and bool(command) and command[0].startswith("ray::")
    except psutil.Error:
        return None
    return process if ours else None


def _signal_worker(pid: int, number: signal.Signals) -> bool:
    process = _find_worker(pid)
    try:
        if process is not None:
            process.send_signal(number)
    except psutil.Error:
        return False
    return process is not None


class KeptProgram:
    """A running program that is ended with everything that it started, in whatever session, group or environment
    (`keeper.py`): by `end`, and when this process ends, even by SIGKILL.

    Signals that are blocked in this process are not blocked in the program, whose standard input is empty.

    Args:
        words: Program and arguments. If it cannot be run, its exit code is 127.
        grace: Seconds between SIGTERM and SIGKILL in `end`; 0 to kill at once.
        pass_fds: Descriptors that the program inherits.
        options: Further arguments of `subprocess.Popen`.
    """

    def __init__(self, words: Sequence[str], *, grace: float = 0.0, pass_fds: Sequence[int] = (), **options: Any):
        lifeline, self._lifeline = os.pipe()
        self._report, report = os.pipe()
        os.set_blocking(self._report, False)
        settings = json.dumps({"lifeline": lifeline, "report": report, "passed": list(pass_fds), "grace": grace})
        self._grace = grace
        self._said = b""
        try:
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", str(keeper.__file__), settings, *words],
                stdin=subprocess.DEVNULL,
                pass_fds=[lifeline, report, *pass_fds],
                start_new_session=True,
                **options,
            )
        except BaseException:
            os.close(self._lifeline)
            os.close(self._report)
            raise
        finally:
            os.close(lifeline)
            os.close(report)

    @property
    def keeper_pid(self) -> int:
        """The id of the keeper, of which all processes of the program are descendants."""
        return self._keeper.pid

    def wait(self, timeout: float | None = None) -> int | None:
        """Return the program's exit code, negative for the signal that ended it; None if it has not ended within
        `timeout` seconds. What it started may still run."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self._parse_exit_code()) is None and self._read_report(deadline):
            pass
        return code

    async def wait_async(self) -> int | None:
        """Return the program's exit code as `wait` does. None if the keeper was killed, and the program with it."""
        while (code := self._parse_exit_code()) is None and await self._read_report_async():
            pass
        return code

    def end(self) -> None:
        """End everything that is left of the program, and wait until it has ended. Idempotent."""
        if self._close_lifeline():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._keeper.wait(self._grace + 2 * keeper.KILL_SECONDS)
            self.wait(0.0)
            self._close_report()

    async def end_async(self) -> None:
        """End everything that is left of the program, as `end` does."""
        if self._close_lifeline():
            try:
                async with asyncio.timeout(self._grace + 2 * keeper.KILL_SECONDS):
                    while await self._read_report_async():
                        pass
            except TimeoutError:
                return
            finally:
                self._close_report()
            self._keeper.wait()  # which has closed its report, and so ends

    def _close_lifeline(self) -> bool:
        """Ask the keeper to end everything. Returns False if it was asked before."""
        lifeline, self._lifeline = self._lifeline, -1
        if lifeline >= 0:
            os.close(lifeline)
        return lifeline >= 0

    def _close_report(self) -> None:
        os.close(self._report)
        self._report = -1

    def _parse_exit_code(self) -> int | None:
        _, *code = self._said.split(b"\n")[:-1] or [b""]
        return int(code[0]) if code else None

    def _read_report(self, deadline: float | None = None) -> bool:
        """Read what the keeper reports next. Returns False if it has ended, or reports nothing before `deadline`."""
        if self._report < 0:
            return False
        poll = select.poll()
        poll.register(self._report, select.POLLIN)
        if not poll.poll(None if deadline is None else 1000 * max(0.0, deadline - time.monotonic())):
            return False
        return self._read_available_report()

    async def _read_report_async(self) -> bool:
        """Read what the keeper reports next, as `_read_report` does."""
        if self._report < 0:
            return False
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        # A descriptor has one reader in an event loop: calls that overlap would remove each other's.
        descriptor = os.dup(self._report)
        loop.add_reader(descriptor, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        return self._read_available_report()

    def _read_available_report(self) -> bool:
        if self._report < 0:  # another call saw the end
            return False
        try:
            said = os.read(self._report, 256)
        except BlockingIOError:  # another call read it
            return True
        self._said += said
        return bool(said)


def list_process_trees(pids: Sequence[int]) -> list[psutil.Process]:
    """Return these processes and all that they started, in whatever session, except that whose parent has ended."""
    found = dict[psutil.Process, None]()
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(pid)
            found |= dict.fromkeys([root, *root.children(recursive=True)])
    return list(found)


def kill_processes(processes: Sequence[psutil.Process]) -> None:
    """Kill processes, and wait until they have ended."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=keeper.KILL_SECONDS)


def exit_with_owner(owner_pid: int) -> None:
    """Start a daemon thread that ends this process as soon as process `owner_pid` has ended, for whatever reason.

    An owner that is killed cannot clean up, and nothing else would ever end this process.
    """

    def watch_owner() -> None:
        _wait_for_exit(owner_pid)
        os._exit(1)

    threading.Thread(target=watch_owner, name="r3async-owner-watch", daemon=True).start()


def _wait_for_exit(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # not Linux, or an old kernel or sandbox
        while _process_exists(pid):
            time.sleep(1.0)
        return
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    while not poller.poll(60_000):
        pass


def _process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


class _LogFile(io.RawIOBase):
    """A raw stream to a descriptor. Data that the disk does not take are dropped, and the log states how much once
    it takes more."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._dropped_bytes = 0

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: object) -> int:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        try:
            if self._dropped_bytes:
                os.write(
                    self._descriptor,
                    b"\n[%d bytes of this log were not written: no free bytes]\n" % self._dropped_bytes,
                )
                self._dropped_bytes = 0
            return os.write(self._descriptor, view)
        except OSError:
            self._dropped_bytes += len(view)
            return len(view)


def ignore_command_output_errors() -> None:
    """Ignore output errors as `ignore_output_errors` does, for a command whose output and errors are files, or a
    terminal that may be closed. Other streams, and those that tests capture, stay unchanged."""
    mine = sys.stdout is sys.__stdout__ and sys.stderr is sys.__stderr__
    if mine and all(os.isatty(number) or stat.S_ISREG(os.fstat(number).st_mode) for number in (1, 2)):
        ignore_output_errors()


def ignore_output_errors() -> None:
    """Make writes of Python code to `sys.stdout` or `sys.stderr` raise nothing from now on; descriptors stay as they
    are."""
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            io.BufferedWriter(_LogFile(descriptor)),
            "utf-8",
            "backslashreplace",
            line_buffering=True,
            write_through=True,
        )
        for descriptor in (1, 2)
    )


_CONTROL_CODES = [
    *range(
        0x20
    ),  # C0: among them escape, which begins what a terminal obeys, and carriage return, which overwrites a line
    *range(0x7F, 0xA0),  # delete, and C1: CSI is one of them
    0x61C,
    0x200E,
    0x200F,
    *range(0x2028, 0x202F),  # line separators, and what turns the direction of text around
    *range(0x2066, 0x206A),
    *range(0xD800, 0xE000),  # halves of a pair, which cannot be written as UTF-8
    *range(0xFFF9, 0xFFFC),
]
_ESCAPES = {code: f"\\u{code:04x}" for code in _CONTROL_CODES}
_ESCAPES |= {
    code: "".join(f"\\u{half:04x}" for half in (0xD800 | (code - 0x10000) >> 10, 0xDC00 | (code & 0x3FF)))
    for code in range(0xE0000, 0xE0080)  # tags: invisible
}
_LINE_ESCAPES = {code: text for code, text in _ESCAPES.items() if code not in (0x09, 0x0A)}
_COLOR_CODES = re.compile(r"\x1b\[[0-9;]*m")


def escape_control_characters(text: str, *, keep_newlines: bool = True) -> str:
    """Return `text` with every character that a terminal would obey, or that hides or reverses what is written, as
    `\\uXXXX`.

    Newline and tab stay, unless `keep_newlines` is false. The result is unchanged if it is escaped again, and JSON
    stays the same JSON.
    """
    return text.translate(_LINE_ESCAPES if keep_newlines else _ESCAPES)


def clean_log_output(text: str) -> str:
    """Return a program's output with control characters escaped, colours removed, and Windows line ends replaced."""
    return escape_control_characters(_COLOR_CODES.sub("", text).replace("\r\n", "\n"))
