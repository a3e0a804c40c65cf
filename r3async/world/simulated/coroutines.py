"""Where coroutines stand, and how those of ended processes are closed without a trace."""

from __future__ import annotations

from asyncio.tasks import _enter_task, _leave_task, _unregister_task  # what runs a task outside its loop has to say so
from inspect import CORO_CREATED, getcoroutinestate
from pathlib import Path
from types import CodeType, CoroutineType, FrameType
from typing import Any

CLOSE_ATTEMPTS = 100
"""So many awaits of its `finally` an ended coroutine may make: each is interrupted."""


class ProcessKilled(BaseException):
    """Raised in code of a process that has ended, wherever it touches the world. Nothing handles it."""


def close_task(task: Any, loop: Any) -> None:
    """Interrupt a task's coroutine until it has ended. `GeneratorExit` would not do: a `finally` may not await after it."""
    task._log_destroy_pending = False
    coroutine = task.get_coro()
    _discard_unawaited(coroutine)
    _enter_task(loop, task)
    try:
        for _ in range(CLOSE_ATTEMPTS):
            task.context.copy().run(coroutine.throw, ProcessKilled())
    except BaseException:  # also StopIteration: it has returned
        pass
    finally:
        _leave_task(loop, task)
        _unregister_task(task)  # those of the next loop have the same numbers


def _discard_unawaited(coroutine: Any) -> None:
    """Close the coroutines that it has made, or was given, and did not come to await: each would warn."""
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        for made in frame.f_locals.values():
            if isinstance(made, CoroutineType) and getcoroutinestate(made) == CORO_CREATED:
                _discard_unawaited(made)
                made.close()
        coroutine = coroutine.cr_await


def await_stack(task: Any) -> list[str]:
    """Where a task stands: "function file:line", innermost first."""
    found: list[str] = []
    coroutine: Any = task.get_coro()
    while coroutine is not None:
        frame: FrameType | None = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "ag_frame", None)
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


__all__ = ["ProcessKilled", "await_stack", "close_task", "format_raise_location"]
