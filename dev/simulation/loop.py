"""An event loop in virtual time that runs the tasks of many simulated processes, which can be
frozen, thawed and ended.

Helpers tell where coroutines wait, and close those of ended processes without side
effects or warnings.

Nothing waits in real time: when no callback is ready, time jumps to the next timer. The order of
callbacks depends on what was scheduled alone, in every Python process: tasks and futures hash by
a number in the order of their creation, so that sets of them iterate in the same order.

A callback belongs to the process that scheduled it (`CURRENT_PROCESS`, a context variable).
Callbacks of a frozen process are put aside until it thaws; those of an ended process are dropped.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import sys

# To run a task outside its loop.
from asyncio.tasks import _enter_task, _leave_task, _unregister_task
from collections import deque
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from inspect import CORO_CREATED, getcoroutinestate
from pathlib import Path
from types import CodeType, CoroutineType, FrameType
from typing import Any

__all__ = [
    "CURRENT_PROCESS",
    "DeadlockError",
    "LimitReachedError",
    "ProcessKilled",
    "VirtualFuture",
    "VirtualHandle",
    "VirtualLoop",
    "VirtualProcess",
    "VirtualTask",
    "VirtualTimer",
    "await_stack",
    "close_task",
    "format_raise_location",
]

CLOSE_ATTEMPTS = 100
"""Maximum number of awaits in `finally` blocks that are interrupted while an ended
coroutine is closed."""


class ProcessKilled(BaseException):
    """The exception that is raised in code of an ended process wherever it touches the world.
    Nothing handles it."""


def close_task(task: Any, loop: Any) -> None:
    """Interrupt a task's coroutine until it has ended. `GeneratorExit` would not do: a `finally`
    may not await after it."""
    task._log_destroy_pending = False
    coroutine = task.get_coro()
    _discard_unawaited(coroutine)
    _enter_task(loop, task)
    try:
        for _ in range(CLOSE_ATTEMPTS):
            task.context.copy().run(coroutine.throw, ProcessKilled())
    except BaseException:  # StopIteration included: the coroutine has returned
        pass
    finally:
        _leave_task(loop, task)
        _unregister_task(task)  # tasks of the next loop have the same numbers


def _discard_unawaited(coroutine: Any) -> None:
    """Close the coroutines that a coroutine created, or received, and never awaited. Each would
    cause a warning."""
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        for made in frame.f_locals.values():
            if isinstance(made, CoroutineType) and getcoroutinestate(made) == CORO_CREATED:
                _discard_unawaited(made)
                made.close()
        coroutine = coroutine.cr_await


def await_stack(task: Any) -> list[str]:
    """Return where a task waits, as "function file:line", innermost first."""
    found: list[str] = []
    coroutine: Any = task.get_coro()
    while coroutine is not None:
        frame: FrameType | None = getattr(coroutine, "cr_frame", None) or getattr(
            coroutine, "ag_frame", None
        )
        if frame is not None:
            found.append(format_location(frame.f_code, frame.f_lineno))
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "ag_await", None)
    return found[::-1] or ["not started"]


def format_location(code: CodeType, line: int) -> str:
    return f"{code.co_qualname} {Path(code.co_filename).name}:{line}"


def format_raise_location(error: BaseException | None) -> str:
    at = error.__traceback__ if error is not None else None
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return f" at {format_location(at.tb_frame.f_code, at.tb_lineno)}" if at is not None else ""


class DeadlockError(RuntimeError):
    """The error of a loop in which nothing is ready and no timer runs, but the main future is
    pending. The message tells where each task waits."""


class LimitReachedError(RuntimeError):
    """The error of a loop that has run its maximum number of callbacks, or its
    maximum virtual time."""


class VirtualProcess:
    """A simulated process: the callbacks and tasks scheduled in its `context`, which freeze, thaw
    and end together."""

    def __init__(self, loop: VirtualLoop, name: str):
        self.name = name
        self.running = True
        """True if the process is neither frozen nor ended."""
        self.ended = False
        self.out_of_descriptors = False
        """True if the process has no free file descriptor, so that it can open nothing (EMFILE)."""
        self.context = Context()
        """Context in which to schedule callbacks of the process from outside:
        `loop.call_later(delay, callback, context=process.context)`."""
        self.context.run(CURRENT_PROCESS.set, self)
        self._loop = loop
        self._deferred_handles: list[VirtualHandle] = []
        self._end_callbacks: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        return f"Process({self.name!r})"

    def add_end_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback`, outside the process, when the process ends."""
        self._end_callbacks.append(callback)

    def raise_if_ended(self) -> None:
        """Raise `ProcessKilled` if the process has ended. Everything in its world that has an
        effect calls this."""
        if self.ended:
            raise ProcessKilled(self.name)

    def freeze(self) -> None:
        """Stop the process, like SIGSTOP. Idempotent."""
        self.running = False

    def thaw(self) -> None:
        """Continue a frozen process, like SIGCONT: what became due meanwhile runs now, in
        order. Idempotent."""
        if not self.ended and not self.running:
            self.running = True
            aside = self._deferred_handles
            self._deferred_handles = []
            self._loop.ready_handles.extend(aside)

    def end(self) -> None:
        """End the process, like SIGKILL: none of its code runs any more, not even a
        `finally`. Idempotent.

        Code of a process that ends itself continues until it returns or awaits; `raise_if_ended`
        stops it earlier.
        """
        if self.ended:
            return
        self.ended = True
        self.running = False
        self._deferred_handles = []
        self._loop.retain_tasks(self)
        for callback in self._end_callbacks:
            callback()
        self._end_callbacks = []


CURRENT_PROCESS: ContextVar[VirtualProcess | None] = ContextVar("process", default=None)


class VirtualHandle:
    """An implementation of `asyncio.Handle`."""

    __slots__ = ("args", "callback", "context")

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...], context: Context):
        self.callback: Callable[..., object] | None = callback
        self.args = args
        self.context = context

    def cancel(self) -> None:
        self.callback = None
        self.args = ()

    def cancelled(self) -> bool:
        return self.callback is None


class VirtualTimer(VirtualHandle):
    """An implementation of `asyncio.TimerHandle`."""

    __slots__ = ("_when",)

    def __init__(
        self, when: float, callback: Callable[..., object], args: tuple[Any, ...], context: Context
    ):
        self.callback = callback
        self.args = args
        self.context = context
        self._when = when

    def when(self) -> float:
        return self._when


class VirtualFuture(asyncio.Future[Any]):
    """A future that hashes by its number."""

    __slots__ = ("_number",)

    def __init__(self, loop: VirtualLoop):
        self._number = next(loop.object_numbers)
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class VirtualTask(asyncio.Task[Any]):
    """A task that hashes by its number and knows its process."""

    __slots__ = ("_number", "context", "process")

    def __init__(self, coroutine: Any, loop: VirtualLoop, name: str | None, context: Context):
        self._number = number = next(loop.object_numbers)
        self.context = context
        self.process = context.get(CURRENT_PROCESS)
        super().__init__(coroutine, loop=loop, name=name or f"task-{number}", context=context)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.AbstractEventLoop):
    """An event loop in virtual time.

    `failures` has what asyncio would log: exceptions of callbacks, and exceptions of tasks that
    were never retrieved.

    Args:
        max_callbacks: Maximum number of callbacks that the loop runs; None for no limit.
        max_seconds: Maximum virtual time in seconds; None for no limit.
    """

    def __init__(
        self, *, max_callbacks: int | None = None, max_seconds: float | None = None
    ) -> None:
        self.object_numbers = itertools.count(1)
        self.callback_count = 0
        """Number of callbacks so far."""
        self.now = 0.0
        self.failures: list[str] = []
        self.max_callbacks = sys.maxsize if max_callbacks is None else max_callbacks
        self.max_seconds = float("inf") if max_seconds is None else max_seconds
        self._retained_tasks: list[VirtualTask] = []
        self.ready_handles: deque[VirtualHandle] = deque()
        """Callbacks to run next, in order."""
        self._timers: list[tuple[float, int, VirtualTimer]] = []
        self._timer_numbers = itertools.count()
        self._stopping = self._closed = self._running = False

    # -- scheduling --------------------------------------------------------------------------------

    def time(self) -> float:
        """Return the virtual seconds since the loop was created."""
        return self.now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> VirtualHandle:
        handle = VirtualHandle(callback, args, copy_context() if context is None else context)
        self.ready_handles.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> VirtualTimer:
        timer = VirtualTimer(when, callback, args, copy_context() if context is None else context)
        heapq.heappush(self._timers, (when, next(self._timer_numbers), timer))
        return timer

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> VirtualTimer:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def retain_tasks(self, process: VirtualProcess) -> None:
        """Keep the tasks of an ended process from the garbage collector, which would run
        their `finally`."""
        self._retained_tasks += [task for task in self.pending_tasks() if task.process is process]

    def pending_tasks(self) -> list[VirtualTask]:
        """Return the tasks that are not done, in the order of their creation."""
        return sorted(
            (task for task in asyncio.all_tasks(self) if isinstance(task, VirtualTask)), key=hash
        )

    def create_future(self) -> VirtualFuture:
        return VirtualFuture(self)

    def create_task(
        self, coro: Any, *, name: str | None = None, context: Context | None = None
    ) -> VirtualTask:
        task = VirtualTask(coro, self, name, copy_context() if context is None else context)
        if task.process is not None and task.process.ended:
            self._retained_tasks.append(task)
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        """Raise `RuntimeError`: there are no threads."""
        raise RuntimeError(
            f"{func!r} was given to an executor: blocking work goes through `world.threads`"
        )

    # -- running -----------------------------------------------------------------------------------

    def run_until_complete(self, future: Any) -> Any:
        """Run the loop until the future is done, and return its result. Raises what the future
        raises, `DeadlockError` and `LimitReachedError`."""
        task = asyncio.ensure_future(future, loop=self)
        task.add_done_callback(self._stop_when_done)
        try:
            self.run_forever()
        finally:
            task.remove_done_callback(self._stop_when_done)
        return task.result()

    def _stop_when_done(self, _: object) -> None:
        self._stopping = True

    def stop(self) -> None:
        self._stopping = True

    def run_forever(self) -> None:
        """Run the loop until `stop`. Raises `DeadlockError` and `LimitReachedError`."""
        if self._closed or self._running:
            raise RuntimeError("the loop is closed" if self._closed else "the loop runs already")
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(finalizer=self._close_generator)
        asyncio._set_running_loop(self)
        self._running = True
        self._stopping = False
        try:
            while not self._stopping:
                try:
                    self._run_callbacks()
                except ProcessKilled:
                    pass
                except (SystemExit, KeyboardInterrupt, DeadlockError, LimitReachedError):
                    raise
                except BaseException as error:
                    self.call_exception_handler(
                        {"message": "exception in a callback", "exception": error}
                    )
        finally:
            self._running = False
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)

    def _run_callbacks(self) -> None:
        """Run one callback after the other, until one stops the loop or raises."""
        ready = self.ready_handles
        while not self._stopping:
            if not ready:
                self._advance_time()
            handle = ready.popleft()
            callback = handle.callback
            if callback is None:
                continue
            context = handle.context
            process = context.get(CURRENT_PROCESS)
            if process is not None and not process.running:
                if not process.ended:
                    process._deferred_handles.append(handle)
                continue
            self.callback_count += 1
            if self.callback_count > self.max_callbacks:
                raise LimitReachedError(f"{self.max_callbacks} callbacks, at {self.now:.3f} s")
            context.run(callback, *handle.args)

    def _advance_time(self) -> None:
        """Jump to the time of the next timer, and make all timers ready that are due then."""
        timers = self._timers
        ready = self.ready_handles
        while timers:
            when, _, timer = heapq.heappop(timers)
            if timer.callback is None:
                continue
            if when > self.now:
                if when > self.max_seconds:
                    raise LimitReachedError(
                        f"{self.max_seconds:g} s of virtual time, after "
                        f"{self.callback_count} callbacks"
                    )
                self.now = when
            ready.append(timer)
            while timers and timers[0][0] <= self.now:
                ready.append(heapq.heappop(timers)[2])
            return
        raise DeadlockError(
            "\n".join(["nothing is ready and no timer runs; what waits:", *self.describe_tasks()])
        )

    def _close_generator(self, generator: Any) -> None:
        """Close an asynchronous generator that was abandoned before its end."""
        process = CURRENT_PROCESS.get()
        if not self._closed and (process is None or not process.ended):
            self.call_soon(self.create_task, generator.aclose())

    # -- looking into it ---------------------------------------------------------------------------

    def describe_tasks(self) -> list[str]:
        """Return a line for each task that is not done: its process, its name,
        and where it waits."""
        alive = [
            task for task in self.pending_tasks() if task.process is None or not task.process.ended
        ]
        return [
            f"  {_process_name(task)} {task.get_name()}: {' < '.join(await_stack(task))}"
            for task in alive
        ]

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Record an error in `failures`. Errors that an ended process leaves behind are ignored."""
        error = context.get("exception")
        source = context.get("task", context.get("future"))
        process = source.process if isinstance(source, VirtualTask) else CURRENT_PROCESS.get()
        if not isinstance(error, ProcessKilled) and (process is None or not process.ended):
            message = context.get("message", "") + (
                f": {type(error).__name__}: {error}" if error else ""
            )
            where = (
                f" in {_process_name(source)} {source.get_name()}"
                if isinstance(source, VirtualTask)
                else ""
            )
            self.failures.append(f"{message}{where}{format_raise_location(error)}")

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """End the coroutines of all tasks, so that they cause no warnings afterwards. Their
        processes must be ended before. Idempotent."""
        if self._closed:
            return
        self._closed = True
        asyncio._set_running_loop(self)
        try:
            while left := self.pending_tasks():  # a `finally` may have created more
                for task in left:
                    close_task(task, self)
        finally:
            asyncio._set_running_loop(None)
        self.ready_handles.clear()
        self._timers.clear()
        self._retained_tasks.clear()


def _process_name(task: Any) -> str:
    process = getattr(task, "process", None)
    return process.name if process is not None else "-"
