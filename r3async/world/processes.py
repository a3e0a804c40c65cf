"""This process, and the processes of actors on this host."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import functools
import gc
import os
import signal
import socket
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
from r3async.world import MetricsServer, stages
from r3async.world.process_output import ignore_output_errors

T = TypeVar("T")

HOST_NAME_VARIABLE = "R3ASYNC_HOST"
"""Environment variable with this host's name, for hosts whose names are equal. Processes of one
name share memory and files."""

GRPC_KEEPALIVE_VARIABLE = "RAY_grpc_keepalive_timeout_ms"
GRPC_KEEPALIVE_SECONDS = 120
"""Seconds for which a cut line breaks no connection of our actors' processes. Ray's nodes have a
separate setting."""

HASH_SEED_VARIABLE = "PYTHONHASHSEED"

LAG_INTERVAL_SECONDS = 0.05
"""Seconds between two measurements of how late the event loop is."""


def hash_seed_variables() -> dict[str, str]:
    """Return the environment variable that gives sets of strings one order in all processes of a
    run; a value that the user has set stays. Tasks that are drawn from a set would otherwise differ
    from process to process."""
    return {HASH_SEED_VARIABLE: os.environ.get(HASH_SEED_VARIABLE) or "0"}


def actor_environment(threads: int) -> dict[str, str]:
    """Return the environment variables of an actor that computes with `threads` threads.

    Ray starts its workers at nice 15: any other work on the host would starve the learner and the
    engines. Its servers drop a connection whose line is cut for 20 s, and the other end is not
    notified: it waits for its answer, for minutes.
    """
    return {
        GRPC_KEEPALIVE_VARIABLE: os.environ.get(
            GRPC_KEEPALIVE_VARIABLE, str(1000 * GRPC_KEEPALIVE_SECONDS)
        ),
        "OMP_NUM_THREADS": str(max(1, threads)),
        "RAY_worker_niceness": "0",
        USER_PATH_VARIABLE: os.environ.get(USER_PATH_VARIABLE, os.getcwd()),
        **hash_seed_variables(),
    }


@contextlib.contextmanager
def pause_garbage_collector() -> Iterator[None]:
    """Pause the garbage collector while torch, vLLM or a model is loaded. Loading creates a
    million objects that stay, and the collector would walk them again and again, for a tenth to a
    fifth of the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextlib.contextmanager
def hide_main_module() -> Iterator[None]:
    """Hide the main module from processes that are spawned inside, so that they do not
    import the running program: without `if __name__ == "__main__":` in it, it would run
    again in each of them."""
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
    """Run `call` as `asyncio.run` does, but on one event loop of this process for every call:
    for calls into the user's code. What a user's module keeps between calls, such as an HTTP
    client, belongs to the loop on which it was first used. If another thread is running that
    loop, `call` gets a new one."""
    runner, lock = _shared_loop()
    if not lock.acquire(blocking=False):
        return asyncio.run(call)
    try:
        return runner.run(call)
    finally:
        lock.release()


def run_on_own_loop(call: Coroutine[Any, Any, T]) -> T:
    """Run `call` to its end on an event loop in a thread of its own: for a short check in a plain
    function, which may have been called on a running loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, call).result()


def add_user_module_path() -> None:
    """Let `module:name` of a configuration name a module in the directory where the run was
    started. Our modules come first."""
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
        # Without free bytes for a new file, output stays where it went.
        with contextlib.suppress(OSError):
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
                lag = time.monotonic() - due
                before = computed
                computed = time.thread_time()
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
        from r3async.world.stack_dumps import dump_stacks

        return dump_stacks(path, reason)

    def request_stack_dump(self, pid: int, host: str) -> bool:
        return host == self.host and _signal_worker(pid, signal.SIGUSR1)

    def is_alive(self, pid: int, host: str) -> bool:
        return host == self.host and _find_worker(pid) is not None

    def kill_process(self, pid: int, host: str) -> bool:
        return host == self.host and _signal_worker(pid, signal.SIGKILL)


def _find_worker(pid: int) -> psutil.Process | None:
    """Return the process with this id if it calls itself a worker of Ray and belongs to this user,
    as process ids are reused; else None."""
    try:
        process = psutil.Process(pid)
        command = process.cmdline()
        ours = (
            process.uids().real == os.getuid() and bool(command) and command[0].startswith("ray::")
        )
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
