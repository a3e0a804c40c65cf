"""What both ends share: a socket before there is one, errors, and work that is kept off the event loop."""

from __future__ import annotations

import asyncio
import errno
import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from r3async.transport.wire import Frame
from r3async.world import TURN_SECONDS, Threads
from r3async.world.keys import TransportError
from r3async.world.real import REAL
from r3async.world.stages import stage

OFFLOAD_BYTES = 256 * 2**10
"""Larger payloads are encoded, checksummed and decoded in a thread. Smaller ones take less than the hop there."""

P = ParamSpec("P")
R = TypeVar("R")


class TransportRefused(TransportError):
    """The receiver belongs to another run, has another schema, or does not know this key. Trying again cannot help."""


class NoSocket:
    """The `MessageSocket` of an end that is not started."""

    endpoint = denied = ""

    def send(self, frames: Sequence[Frame]) -> int:
        return errno.ENOTSOCK

    def drain(self, limit: float = 0.0) -> None:
        pass

    def close(self) -> None:
        pass


class Turns:
    """Short work of many tasks, in order: as much in each round of the event loop as `TURN_SECONDS` allow, so that they do
    not hold it up together, and no round is spent on one of them alone. All of it belongs to one `stage`."""

    def __init__(self, stage: str, clock: Callable[[], float] = REAL.clock.monotonic) -> None:
        self._stage, self._clock = stage, clock
        self._waiting: deque[tuple[asyncio.Future[Any], Callable[[], Any]]] = deque()

    async def do(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """What it returns or raises. Cancelled before its turn, it is not called."""
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._turn)
        self._waiting.append((done, functools.partial(function, *args, **kwargs)))
        return await done

    def _turn(self) -> None:
        until = self._clock() + TURN_SECONDS
        with stage(self._stage):
            while self._waiting and self._clock() < until:
                done, work = self._waiting.popleft()
                if done.done():
                    continue
                try:
                    done.set_result(work())
                except Exception as error:
                    done.set_exception(error)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._turn)


async def off_loop(threads: Threads, nbytes: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run work on `nbytes` of payload: in a thread if that would hold up the event loop."""
    if nbytes <= OFFLOAD_BYTES:
        return function(*args, **kwargs)
    return await threads.run(function, *args, **kwargs)
