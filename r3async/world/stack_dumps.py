"""Stack dumps of every thread and asyncio task, which are written before a stall is acted upon."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import linecache
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def dump_stacks(path: Path, reason: str = "") -> Path:
    """Append the stacks of all threads, and of all tasks of the running event loop, to
    `path`; return `path`.

    On the event loop's thread the dump has its tasks; elsewhere it has threads only. Never raises
    for what it finds; what the disk does not take goes to stderr.
    """
    out = io.StringIO()
    out.write(f"==== {time.strftime('%Y-%m-%d %H:%M:%S')} {reason}\n")
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        out.write(f"\n-- thread {names.get(ident, ident)}\n")
        out.write("".join(traceback.format_stack(frame)))
    for task in sorted(_running_tasks(), key=lambda t: t.get_name()):
        out.write(
            f"\n-- task {task.get_name()}: "
            f"{getattr(task.get_coro(), '__qualname__', task.get_coro())}\n"
        )
        out.write("".join(f"  {line}\n" for line in _describe_awaits(task.get_coro())))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(out.getvalue() + "\n")
    except OSError as error:
        with contextlib.suppress(OSError):
            print(f"{path}: {error}\n{out.getvalue()}", file=sys.stderr)
    return path


def _describe_awaits(awaited: Any) -> Iterator[str]:
    """Yield a line for each coroutine from a task's outermost one to what it finally waits for,
    with the source line at which each is suspended. asyncio's own listing ends at the first
    coroutine that is compiled, as Ray's are, and has no frame."""
    while awaited is not None:
        frame = next(
            (f for k in ("cr_frame", "gi_frame", "ag_frame") if (f := getattr(awaited, k, None))),
            None,
        )
        name = getattr(awaited, "__qualname__", None)
        if frame is not None:
            path = frame.f_code.co_filename
            line = frame.f_lineno
            yield f"{name}, {path}:{line}: {linecache.getline(path, line).strip()}"
        elif name:
            yield f"{name}"
        inner = [getattr(awaited, k, None) for k in ("cr_await", "gi_yieldfrom", "ag_await")]
        # An iterator that asyncio or a compiler made: of a future, or of another coroutine.
        if not name:
            inner = [x for x in gc.get_referents(awaited) if asyncio.iscoroutine(x)]
            if not inner:
                yield f"{awaited!r} of {gc.get_referents(awaited)!r}"
        awaited = next((x for x in inner if x is not None), None)


def _running_tasks() -> set[asyncio.Task[Any]]:
    try:
        return asyncio.all_tasks()
    except RuntimeError:  # no loop runs in this thread
        return set()
