"""Threads of this process."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class ThreadLane:
    """See `world.Lane`. The thread is started with the first call."""

    def __init__(self, name: str):
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        call = functools.partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    async def close(self) -> None:
        await asyncio.to_thread(self._executor.shutdown, wait=True, cancel_futures=True)


class SystemThreads:
    """See `world.Threads`."""

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.to_thread(function, *args, **kwargs)

    def lane(self, name: str) -> ThreadLane:
        return ThreadLane(name)

    def repeat(self, name: str, seconds: float, function: Callable[[], bool]) -> None:
        def work() -> None:
            while True:
                time.sleep(seconds)
                if function():
                    return

        threading.Thread(target=work, name=name, daemon=True).start()

    def lock(self) -> threading.Lock:
        return threading.Lock()
