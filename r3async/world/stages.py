"""Where the time of a process goes: the wall time and processor time of its threads, by named stage.

An event loop's time is booked while one of its tasks makes a step: to the stage that the task was made in, or to what
`with stage("encode"):` names inside it, also across an `await`. What lies between two steps is the loop's own (`loop`: selector,
timers, callbacks) or nobody's (`idle`). Of a thread of `world.Threads`, what it is given is booked to its lane, or in a shared
thread to the stage of whoever gave it. Whatever else the process computes (threads of Ray, ZeroMQ and torch) is `runtime`. So
the stages' processor times add up to the process's, and the wall times of a loop to what has passed.

A step costs a look at the clock before and after it. The processor-time clock is 30 times as slow, and is read when
`WINDOW_SECONDS` have passed since it was last; in between, processor time follows wall time. Nothing is measured on a thread that
is not accounted for: there, `stage` does nothing.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

R = TypeVar("R")

WINDOW_SECONDS = 0.004
LOOP, IDLE, CALLS, RUNTIME = "loop", "idle", "calls", "runtime"
"""Stages that nothing else is called. `calls`: tasks that were made outside of any stage, as those for calls of other actors."""
SHARED = "threads"
"""What a shared thread does for nobody's stage."""


class Meter:
    """Of one thread, which alone calls it: `wall` and `cpu` by stage, in seconds. `base`: the stage of what has none."""

    def __init__(self, base: str):
        self.base = self.current = base
        self.wall: dict[str, float] = {}
        self.cpu: dict[str, float] = {}
        self.thread = threading.current_thread()
        self.running = False
        self._fresh: dict[str, float] = {}
        """Wall times since the processor-time clock was read."""
        self._at = self._read_at = self.cpu_at = 0.0

    def start(self, stage: str) -> None:
        """Measure from now on."""
        self.current, self.running = stage, True
        self._at = self._read_at = time.perf_counter()
        self.cpu_at = time.thread_time()

    def stop(self) -> None:
        """What the thread does from now on is not measured."""
        self.settle()
        self.current, self.running = self.base, False

    def switch(self, stage: str) -> str:
        """What follows belongs to `stage`. Returns what the thread did until now."""
        now, before = time.perf_counter(), self.current
        self._fresh[before] = self._fresh.get(before, 0.0) + now - self._at
        self._at, self.current = now, stage
        if now - self._read_at > WINDOW_SECONDS:
            self._read(now)
        return before

    def settle(self) -> None:
        """`wall` and `cpu` are as of now."""
        self.switch(self.current)
        self._read(self._at)

    def _read(self, now: float) -> None:
        """Read the processor-time clock. Stages get as much of it as they took of wall time, or their share of it if others had
        the core meanwhile; the base gets the rest."""
        cpu, base = time.thread_time(), self.base
        spent, self.cpu_at, self._read_at = cpu - self.cpu_at, cpu, now
        busy = sum(seconds for name, seconds in self._fresh.items() if name != base)
        share = min(1.0, spent / busy) if busy > 0 else 0.0
        for name, seconds in self._fresh.items():
            self.wall[name] = self.wall.get(name, 0.0) + seconds
            if name != base:
                self.cpu[name] = self.cpu.get(name, 0.0) + seconds * share
        self.cpu[base] = self.cpu.get(base, 0.0) + max(0.0, spent - busy * share)
        self._fresh.clear()


_thread = threading.local()
_meters: list[Meter] = []
"""Of this process."""


class stage:
    """`with stage("encode"):` what is done inside belongs to that stage."""

    __slots__ = ("_before", "_meter", "_name")

    def __init__(self, name: str):
        self._name = name

    def __enter__(self) -> None:
        meter = getattr(_thread, "meter", None)
        self._meter: Meter | None = meter if meter is not None and meter.running else None
        if self._meter is not None:
            self._before = self._meter.switch(self._name)

    def __exit__(self, *error: object) -> None:
        if self._meter is not None:
            self._meter.switch(self._before)


# -- event loops -------------------------------------------------------------------------------------------------------


class _Steps(Coroutine[Any, Any, Any]):
    """A coroutine whose steps are booked to the stage in which it was suspended; `stage` at first."""

    __slots__ = ("__weakref__", "_coroutine", "_meter", "_stage")

    def __init__(self, meter: Meter, stage: str, coroutine: Coroutine[Any, Any, Any]):
        self._meter, self._stage, self._coroutine = meter, stage, coroutine

    def __next__(self) -> Any:  # a task's step
        meter = self._meter
        before = meter.switch(self._stage)
        try:
            return self._coroutine.send(None)
        finally:
            self._stage = meter.switch(before)

    def send(self, value: Any) -> Any:
        before = self._meter.switch(self._stage)
        try:
            return self._coroutine.send(value)
        finally:
            self._stage = self._meter.switch(before)

    def throw(self, *error: Any) -> Any:
        before = self._meter.switch(self._stage)
        try:
            return self._coroutine.throw(*error)
        finally:
            self._stage = self._meter.switch(before)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Any:
        return self

    def __iter__(self) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:  # where it stands (`cr_frame`, `cr_await`), and what it is called
        return getattr(self._coroutine, name)


def booked(name: str, coroutine: Coroutine[Any, Any, R]) -> Coroutine[Any, Any, R]:
    """`coroutine`, whose steps belong to the stage `name`. On a thread that is not accounted for it stays as it is."""
    meter = getattr(_thread, "meter", None)
    return coroutine if meter is None or not meter.running else _Steps(meter, name, coroutine)


def begin_task(name: str, coroutine: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
    """A new task, whose steps belong to the stage `name`."""
    return asyncio.create_task(booked(name, coroutine))


def account() -> Callable[[], None]:
    """From now on, account for this thread's time, which is that of the running event loop. Calling what is returned ends it.

    Tasks that exist already are the loop's own, except for what they `await booked(...)`. Does nothing where it is done already.
    """
    loop = asyncio.get_running_loop()
    meter = getattr(_thread, "meter", None)
    if meter is not None and meter.running:
        return lambda: None
    if meter is None:
        _thread.meter = meter = Meter(LOOP)
        _meters.append(meter)
    own = meter

    def accounted(loop: Any, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        if not isinstance(coroutine, _Steps):
            coroutine = _Steps(own, CALLS if own.current == LOOP else own.current, coroutine)
        return asyncio.Task(coroutine, loop=loop, **options)

    before = loop.get_task_factory()
    loop.set_task_factory(accounted)
    loop.set_default_executor(AccountedThreads())
    meter.start(LOOP)

    def end() -> None:
        if own.running:
            own.stop()
            loop.set_task_factory(before)

    return end


# -- other threads -----------------------------------------------------------------------------------------------------


class AccountedThreads(ThreadPoolExecutor):
    """An executor whose calls belong to its lane, or without one to the stage in which they are given to it."""

    def __init__(self, lane: str = ""):
        super().__init__(1 if lane else None, thread_name_prefix=lane or SHARED)
        self._lane = lane

    def submit(self, function: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        name = self._lane
        if not name:
            giver = getattr(_thread, "meter", None)
            name = SHARED if giver is None or giver.current == LOOP else giver.current
        return super().submit(_accounted, name, function, *args, **kwargs)


def _accounted(name: str, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    meter = getattr(_thread, "meter", None)
    if meter is None:
        _thread.meter = meter = Meter(name)
        _meters.append(meter)
    if meter.running:
        return function(*args, **kwargs)
    meter.base = name
    meter.start(name)
    try:
        return function(*args, **kwargs)
    finally:
        meter.stop()


# -- all of it ---------------------------------------------------------------------------------------------------------


def processor_seconds() -> dict[str, float]:
    """Of this process so far, by stage; they add up to its processor time. Its loop's thread calls this."""
    own, totals = getattr(_thread, "meter", None), dict[str, float]()
    if own is not None and own.running:
        own.settle()
    for meter in list(_meters):
        for name, seconds in dict(meter.cpu).items():
            totals[name] = totals.get(name, 0.0) + seconds
        if meter is not own and meter.running and meter.thread.is_alive():
            clock = time.pthread_getcpuclockid(meter.thread.ident or 0)
            pending = time.clock_gettime(clock) - meter.cpu_at
            totals[meter.current] = totals.get(meter.current, 0.0) + max(0.0, pending)
    totals[RUNTIME] = max(0.0, time.process_time() - sum(totals.values()))
    return totals


def wall_seconds() -> dict[str, float]:
    """Of this event loop since `account`, by stage; they add up to what has passed. Its thread calls this."""
    meter = getattr(_thread, "meter", None)
    if meter is None:
        return {}
    if meter.running:
        meter.settle()
    own = meter.cpu.get(LOOP, 0.0)
    return {**meter.wall, LOOP: own, IDLE: max(0.0, meter.wall.get(LOOP, 0.0) - own)}
