"""Detection of environments that block a generator's event loop: they compute or wait in it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

from r3async.envs import EnvironmentProtocolError
from r3async.world import EventReporter
from r3async.world.real import REAL_WORLD

BLOCKING_SECONDS = 0.5
"""Seconds that a call may run between two waits before it is reported. Meanwhile all episodes of
the generator, its leases and its heartbeat wait."""

T = TypeVar("T")


class BlockingDetector:
    """A detector of environments that block the event loop.

    `report_event` gets each environment's first blocking stretch, and then each stretch that took
    twice as long as any before it.
    """

    def __init__(
        self, report_event: EventReporter, clock: Callable[[], float] = REAL_WORLD.clock.time
    ):
        self._report_event = report_event
        self.clock = clock
        self._longest_seconds: dict[str, float] = {}

    async def run(self, environment: object, method: str, call: Awaitable[T]) -> T:
        """Await `call`, a call of `method` of `environment`, and return its result or
        raise its exception."""
        if not asyncio.iscoroutine(call):
            return await call
        kind = type(environment)
        return await _TimedAwaitable(call, self, f"{kind.__module__}:{kind.__name__}", method)

    def record_stretch(self, name: str, method: str, seconds: float) -> None:
        """Report it if the environment `name` ran too long between two waits of `method`."""
        if seconds < max(BLOCKING_SECONDS, 2 * self._longest_seconds.get(name, 0.0)):
            return
        self._longest_seconds[name] = seconds
        self._report_event(
            "environment_blocks",
            environment=name,
            method=method,
            seconds=round(seconds, 2),
            remedy=(
                "make reset and step plain `def`, so that they run in other processes, or "
                "await what takes time"
            ),
        )


class _TimedAwaitable(Awaitable[T]):
    """A call of an environment, with a timer of the stretches in which it does not wait."""

    def __init__(self, call: Any, detector: BlockingDetector, environment: str, method: str):
        self._call = call
        self._detector = detector
        self._environment = environment
        self._method = method

    def __await__(self) -> Generator[Any, Any, T]:
        inner = self._call.__await__()
        clock = self._detector.clock
        go = inner.send
        given = None
        while True:
            began = clock()
            try:
                waits_for = go(given)
            except StopIteration as ended:
                return ended.value
            except SystemExit as error:  # it would end this process, and every episode in it
                raise EnvironmentProtocolError(
                    f"the environment called sys.exit({error.code!r})"
                ) from error
            finally:
                self._detector.record_stretch(self._environment, self._method, clock() - began)
            try:
                given = yield waits_for
                go = inner.send
            except BaseException as error:  # a cancellation, which is the call's to handle
                given = error
                go = inner.throw
