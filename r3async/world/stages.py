"""Accounting of a process's time: the wall time and processor time of its threads, by named stage.

An event loop's time is booked while one of its tasks makes a step: to the stage in which the task
was created, or to the one that `with stage("encode"):` names inside it, even across an `await`. The
time between two steps is the loop's own (`loop`: selector, timers, callbacks) or unused (`idle`).
For a thread of `world.Threads`, calls are booked to its lane, or in a shared thread to the stage of
the caller. Everything else that the process computes (threads of Ray, ZeroMQ and torch) is
`runtime`. So the stages' processor times add up to the process's, and the wall times of a loop to
the time that has passed.

A step costs a look at the clock before and after it. The processor-time clock is 30 times as
slow, and is read when `CPU_READ_SECONDS` have passed since the last reading; in between,
processor time follows wall time. Nothing is measured on a thread that is not accounted for:
there, `stage` does nothing.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

R = TypeVar("R")

CPU_READ_SECONDS = 0.004
LOOP_STAGE = "loop"
IDLE_STAGE = "idle"
CALLS_STAGE = "calls"
RUNTIME_STAGE = "runtime"
"""Reserved names of stages. `calls`: tasks that were created outside of any stage, such as those
for calls of other actors."""
SHARED_THREADS_STAGE = "threads"
"""Stage of a shared thread for calls that come from no stage."""


class StageMeter:
    """A meter of one thread's time, which only that thread calls.

    Attributes:
        base_stage: The stage of time that belongs to no other.
        wall_seconds: Wall time by stage, in seconds.
        cpu_seconds: Processor time by stage, in seconds.
    """

    def __init__(self, base_stage: str):
        self.base_stage = self.current_stage = base_stage
        self.wall_seconds: dict[str, float] = {}
        self.cpu_seconds: dict[str, float] = {}
        self.thread = threading.current_thread()
        self.is_running = False
        self._uncharged_wall: dict[str, float] = {}
        """Wall times by stage since the processor-time clock was last read, in seconds."""
        self._switched_at = self._cpu_read_at = self.cpu_clock_at_read = 0.0

    def start(self, stage: str) -> None:
        """Measure from now on, beginning in `stage`."""
        self.current_stage = stage
        self.is_running = True
        self._switched_at = self._cpu_read_at = time.perf_counter()
        self.cpu_clock_at_read = time.thread_time()

    def stop(self) -> None:
        """Stop measuring the thread."""
        self.bring_up_to_date()
        self.current_stage = self.base_stage
        self.is_running = False

    def switch_stage(self, stage: str) -> str:
        """Book the time from now on to `stage`, and return the stage until now."""
        now = time.perf_counter()
        before = self.current_stage
        self._uncharged_wall[before] = (
            self._uncharged_wall.get(before, 0.0) + now - self._switched_at
        )
        self._switched_at = now
        self.current_stage = stage
        if now - self._cpu_read_at > CPU_READ_SECONDS:
            self._read_cpu_clock(now)
        return before

    def bring_up_to_date(self) -> None:
        """Bring `wall_seconds` and `cpu_seconds` up to the current time."""
        self.switch_stage(self.current_stage)
        self._read_cpu_clock(self._switched_at)

    def _read_cpu_clock(self, now: float) -> None:
        """Read the processor-time clock. Stages get as much of it as they took of wall time, or
        their share of it if other threads had the core meanwhile; the base stage gets the rest."""
        cpu = time.thread_time()
        base = self.base_stage
        spent = cpu - self.cpu_clock_at_read
        self.cpu_clock_at_read = cpu
        self._cpu_read_at = now
        busy = sum(seconds for name, seconds in self._uncharged_wall.items() if name != base)
        share = min(1.0, spent / busy) if busy > 0 else 0.0
        for name, seconds in self._uncharged_wall.items():
            self.wall_seconds[name] = self.wall_seconds.get(name, 0.0) + seconds
            if name != base:
                self.cpu_seconds[name] = self.cpu_seconds.get(name, 0.0) + seconds * share
        self.cpu_seconds[base] = self.cpu_seconds.get(base, 0.0) + max(0.0, spent - busy * share)
        self._uncharged_wall.clear()


_thread_local = threading.local()
_meters: list[StageMeter] = []
"""Meters of this process."""


class stage:
    """A context manager that books the time inside to a stage: `with stage("encode"):`."""

    __slots__ = ("_meter", "_name", "_outer_stage")

    def __init__(self, name: str):
        self._name = name

    def __enter__(self) -> None:
        meter = getattr(_thread_local, "meter", None)
        self._meter: StageMeter | None = meter if meter is not None and meter.is_running else None
        if self._meter is not None:
            self._outer_stage = self._meter.switch_stage(self._name)

    def __exit__(self, *error: object) -> None:
        if self._meter is not None:
            self._meter.switch_stage(self._outer_stage)


# -- event loops -----------------------------------------------------------------------------------


class _MeteredCoroutine(Coroutine[Any, Any, Any]):
    """A coroutine whose steps are booked to the stage in which it was suspended; at
    first to `stage`."""

    __slots__ = ("__weakref__", "_coroutine", "_meter", "_stage")

    def __init__(self, meter: StageMeter, stage: str, coroutine: Coroutine[Any, Any, Any]):
        self._meter = meter
        self._stage = stage
        self._coroutine = coroutine

    def __next__(self) -> Any:  # a task's step
        meter = self._meter
        before = meter.switch_stage(self._stage)
        try:
            return self._coroutine.send(None)
        finally:
            self._stage = meter.switch_stage(before)

    def send(self, value: Any) -> Any:
        before = self._meter.switch_stage(self._stage)
        try:
            return self._coroutine.send(value)
        finally:
            self._stage = self._meter.switch_stage(before)

    def throw(self, *error: Any) -> Any:
        before = self._meter.switch_stage(self._stage)
        try:
            return self._coroutine.throw(*error)
        finally:
            self._stage = self._meter.switch_stage(before)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Any:
        return self

    def __iter__(self) -> Any:
        return self

    # Where it is suspended (`cr_frame`, `cr_await`), and its name.
    def __getattr__(self, name: str) -> Any:
        return getattr(self._coroutine, name)


def in_stage(name: str, coroutine: Coroutine[Any, Any, R]) -> Coroutine[Any, Any, R]:
    """Return `coroutine` with its steps booked to the stage `name`. On a thread that is not
    accounted for, it is returned unchanged."""
    meter = getattr(_thread_local, "meter", None)
    return (
        coroutine
        if meter is None or not meter.is_running
        else _MeteredCoroutine(meter, name, coroutine)
    )


def create_stage_task(name: str, coroutine: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
    """Create a task whose steps are booked to the stage `name`."""
    return asyncio.create_task(in_stage(name, coroutine))


def start_accounting() -> Callable[[], None]:
    """Account for this thread's time from now on, which is the time of the running event loop.
    Calling the returned function ends it.

    Tasks that exist already are the loop's own, except for what they `await in_stage(...)`. Does
    nothing where accounting is running already.
    """
    loop = asyncio.get_running_loop()
    meter = getattr(_thread_local, "meter", None)
    if meter is not None and meter.is_running:
        return lambda: None
    if meter is None:
        _thread_local.meter = meter = StageMeter(LOOP_STAGE)
        _meters.append(meter)
    own = meter

    def accounted(loop: Any, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        if not isinstance(coroutine, _MeteredCoroutine):
            coroutine = _MeteredCoroutine(
                own,
                CALLS_STAGE if own.current_stage == LOOP_STAGE else own.current_stage,
                coroutine,
            )
        return asyncio.Task(coroutine, loop=loop, **options)

    before = loop.get_task_factory()
    loop.set_task_factory(accounted)
    loop.set_default_executor(MeteredExecutor())
    meter.start(LOOP_STAGE)

    def end() -> None:
        if own.is_running:
            own.stop()
            loop.set_task_factory(before)

    return end


# -- other threads ---------------------------------------------------------------------------------


class MeteredExecutor(ThreadPoolExecutor):
    """An executor whose calls belong to its lane, or without a lane to the stage in which
    they are submitted."""

    def __init__(self, worker_name: str = ""):
        super().__init__(
            1 if worker_name else None, thread_name_prefix=worker_name or SHARED_THREADS_STAGE
        )
        self._worker_name = worker_name

    def submit(self, function: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        name = self._worker_name
        if not name:
            giver = getattr(_thread_local, "meter", None)
            name = (
                SHARED_THREADS_STAGE
                if giver is None or giver.current_stage == LOOP_STAGE
                else giver.current_stage
            )
        return super().submit(_run_metered, name, function, *args, **kwargs)


def _run_metered(name: str, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    meter = getattr(_thread_local, "meter", None)
    if meter is None:
        _thread_local.meter = meter = StageMeter(name)
        _meters.append(meter)
    if meter.is_running:
        return function(*args, **kwargs)
    meter.base_stage = name
    meter.start(name)
    try:
        return function(*args, **kwargs)
    finally:
        meter.stop()


# -- totals ----------------------------------------------------------------------------------------


def cpu_seconds_by_stage() -> dict[str, float]:
    """Return the processor time of this process so far, in seconds by stage; the values add up to
    its total. Its loop's thread calls this."""
    own = getattr(_thread_local, "meter", None)
    totals = dict[str, float]()
    if own is not None and own.is_running:
        own.bring_up_to_date()
    for meter in list(_meters):
        for name, seconds in dict(meter.cpu_seconds).items():
            totals[name] = totals.get(name, 0.0) + seconds
        if meter is not own and meter.is_running and meter.thread.is_alive():
            clock = time.pthread_getcpuclockid(meter.thread.ident or 0)
            pending = time.clock_gettime(clock) - meter.cpu_clock_at_read
            totals[meter.current_stage] = totals.get(meter.current_stage, 0.0) + max(0.0, pending)
    totals[RUNTIME_STAGE] = max(0.0, time.process_time() - sum(totals.values()))
    return totals


def wall_seconds_by_stage() -> dict[str, float]:
    """Return the wall time of this event loop since `start_accounting`, in seconds by stage; the
    values add up to the time that has passed. Its thread calls this."""
    meter = getattr(_thread_local, "meter", None)
    if meter is None:
        return {}
    if meter.is_running:
        meter.bring_up_to_date()
    own = meter.cpu_seconds.get(LOOP_STAGE, 0.0)
    return {
        **meter.wall_seconds,
        LOOP_STAGE: own,
        IDLE_STAGE: max(0.0, meter.wall_seconds.get(LOOP_STAGE, 0.0) - own),
    }
