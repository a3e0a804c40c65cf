"""Who holds up the event loop of a generator: an environment of `async def` that computes, or waits without `await`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

from r3async.envs import EnvironmentProtocolError
from r3async.world.real import REAL_WORLD

BLOCKING_SECONDS = 0.5
"""Between two waits of a call. All episodes of the generator, its leases and its heartbeat wait meanwhile."""

T = TypeVar("T")


class BlockingDetector:
    """Names environments that hold up the loop: `report(event, **fields)` gets the first time of each, and then each that took
    twice as long as any before."""

    def __init__(self, report: Callable[..., object], clock: Callable[[], float] = REAL_WORLD.clock.time):
        self._report, self._clock = report, clock
        self._longest_seconds: dict[str, float] = {}

    async def run(self, environment: object, method: str, call: Awaitable[T]) -> T:
        """What `call`, to `method` of `environment`, returns or raises."""
        if not asyncio.iscoroutine(call):
            return await call
        kind = type(environment)
        return await _TimedAwaitable(
            call, self._clock, lambda took: self._record_stretch(f"{kind.__module__}:{kind.__name__}", method, took)
        )

    def _record_stretch(self, name: str, method: str, seconds: float) -> None:
        if seconds < max(BLOCKING_SECONDS, 2 * self._longest_seconds.get(name, 0.0)):
            return
        self._longest_seconds[name] = seconds
        self._report(
            "environment_blocks",
            environment=name,
            method=method,
            seconds=round(seconds, 2),
            remedy="make reset and step plain `def`, to be played in processes, or await what takes time",
        )


class _TimedAwaitable(Awaitable[T]):
    """A coroutine; `record_seconds` gets the seconds of each stretch in which it did not wait."""

    def __init__(self, call: Any, clock: Callable[[], float], record_seconds: Callable[[float], None]):
        self._call, self._clock, self._record_seconds = call, clock, record_seconds

    def __await__(self) -> Generator[Any, Any, T]:
        inner = self._call.__await__()
        go, given = inner.send, None
        while True:
            began = self._clock()
            try:
                waits_for = go(given)
            except StopIteration as ended:
                return ended.value
            except SystemExit as error:  # which would end this process, and every episode in it
                raise EnvironmentProtocolError(f"the environment called sys.exit({error.code!r})") from error
            finally:
                self._record_seconds(self._clock() - began)
            try:
                given, go = (yield waits_for), inner.send
            except BaseException as error:  # a cancellation, which is the call's to handle
                given, go = error, inner.throw
