"""Simulated threads: a function runs at one instant, a little after it was given, and what it returns comes later by as long
as its work on files takes."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

from r3async.world.simulated.delays import draw
from r3async.world.simulated.loop import Future, Killed
from r3async.world.simulated.processes import HostProcess

P = ParamSpec("P")
R = TypeVar("R")


class SimulatedThreads:
    """See `world.Threads`."""

    def __init__(self, process: HostProcess):
        self._process = process
        self._loop, self._rng = process.simulation.loop, process.rng("threads")

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        self._process.check()
        answer = self._loop.create_future()
        self._loop.call_later(self._delay(), self._work, answer, functools.partial(function, *args, **kwargs))
        return await answer

    def _delay(self) -> float:
        return draw(self._process.simulation.delays.thread, self._rng)

    def _work(self, answer: Future, call: Callable[[], Any]) -> float:
        """Returns how long the call takes."""
        if answer.cancelled():
            return 0.0
        self._process.disk_seconds = 0.0  # what the event loop did itself
        failed, result = False, None
        try:
            result = call()
        except Killed:
            raise
        except BaseException as error:
            failed, result = True, error
        seconds, self._process.disk_seconds = self._process.disk_seconds, 0.0
        if seconds > 0:
            self._loop.call_later(seconds, _settle, answer, failed, result)
        else:
            _settle(answer, failed, result)
        return seconds

    def lane(self, name: str) -> SimulatedLane:
        return SimulatedLane(self)

    def repeat(self, name: str, seconds: float, function: Callable[[], bool]) -> None:
        self._process.check()

        def work() -> None:
            if not function():
                self._loop.call_later(seconds, work)

        self._loop.call_later(seconds, work, context=self._process.context.copy())

    def lock(self) -> AbstractContextManager[Any]:
        """Nobody else runs meanwhile."""
        return nullcontext()


class SimulatedLane:
    """See `world.Lane`."""

    def __init__(self, threads: SimulatedThreads):
        self._threads = threads
        self._waiting: deque[tuple[Future, Callable[[], Any]]] = deque()
        self._busy = self._closed = False
        self._idle: list[Future] = []

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        self._threads._process.check()
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        answer = self._threads._loop.create_future()
        self._waiting.append((answer, functools.partial(function, *args, **kwargs)))
        if not self._busy:
            self._next()
        return await answer

    def _next(self) -> None:
        while self._waiting and self._waiting[0][0].cancelled():
            self._waiting.popleft()
        self._busy = bool(self._waiting)
        if self._busy:
            self._threads._loop.call_later(self._threads._delay(), self._work)
        else:
            for waiting in self._idle:
                _settle(waiting, False, None)
            self._idle.clear()

    def _work(self) -> None:
        seconds = self._threads._work(*self._waiting.popleft()) if self._waiting else 0.0
        self._threads._loop.call_later(seconds, self._next)

    async def close(self) -> None:
        self._closed = True
        for answer, _ in self._waiting:
            answer.cancel()
        self._waiting.clear()
        if self._busy:
            idle = self._threads._loop.create_future()
            self._idle.append(idle)
            await idle


def _settle(answer: Future, failed: bool, result: Any) -> None:
    if answer.done():
        return
    if failed:
        answer.set_exception(result)
    else:
        answer.set_result(result)


__all__ = ["SimulatedLane", "SimulatedThreads"]
