"""Threads of this process."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from r3async.world import Threads
from r3async.world.stages import MeteredExecutor

OFFLOAD_BYTES = 256 * 2**10
"""Bytes of payload above which it is encoded, checksummed and decoded in a thread. Smaller payloads
take less time than the hop to a thread."""

P = ParamSpec("P")
R = TypeVar("R")


class SystemWorkerThread:
    """A thread of this process, as a `world.WorkerThread`. It is started with the first call."""

    def __init__(self, name: str):
        self._executor = MeteredExecutor(name)

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        call = functools.partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    async def close(self) -> None:
        await asyncio.to_thread(self._executor.shutdown, wait=True, cancel_futures=True)


class SystemThreads:
    """The threads of this process, as `world.Threads`."""

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.to_thread(function, *args, **kwargs)

    def new_worker(self, name: str) -> SystemWorkerThread:
        return SystemWorkerThread(name)

    def repeat_until_done(self, name: str, seconds: float, function: Callable[[], bool]) -> None:
        def work() -> None:
            while True:
                time.sleep(seconds)
                if function():
                    return

        threading.Thread(target=work, name=name, daemon=True).start()

    def new_lock(self) -> threading.Lock:
        return threading.Lock()


async def run_off_loop(
    threads: Threads, nbytes: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
) -> R:
    """Run `function` on `nbytes` bytes of payload: in a thread if it would otherwise
    block the event loop."""
    if nbytes <= OFFLOAD_BYTES:
        return function(*args, **kwargs)
    return await threads.run(function, *args, **kwargs)
