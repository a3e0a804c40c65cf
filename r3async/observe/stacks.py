"""What every thread and every asyncio task of this process is doing: the last words before a stall is acted upon."""

from __future__ import annotations

import asyncio
import io
import sys
import threading
import time
import traceback
from pathlib import Path


def dump_stacks(path: Path, reason: str = "") -> Path:
    """Append the stacks of all threads, and of all tasks of the running event loop, to `path`; returns it.

    Call it on the event loop's thread to see its tasks; elsewhere threads only. Never raises for what it finds.
    """
    out = io.StringIO()
    out.write(f"==== {time.strftime('%Y-%m-%d %H:%M:%S')} {reason}\n")
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        out.write(f"\n-- thread {names.get(ident, ident)}\n")
        out.write("".join(traceback.format_stack(frame)))
    for task in sorted(_tasks(), key=lambda t: t.get_name()):
        out.write(f"\n-- task {task.get_name()}: {getattr(task.get_coro(), '__qualname__', task.get_coro())}\n")
        task.print_stack(file=out)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(out.getvalue() + "\n")
    return path


def _tasks() -> set[asyncio.Task]:
    try:
        return asyncio.all_tasks()
    except RuntimeError:  # no loop runs in this thread
        return set()
