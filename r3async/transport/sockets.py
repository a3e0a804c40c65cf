"""What both ends share: a socket before there is one, errors, and work that is kept off the event loop."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, TypeVar

from r3async.data.tokens import Trajectory
from r3async.data.wire import Frame
from r3async.world import Threads
from r3async.world.sockets import TransportError

OFFLOAD_BYTES = 256 * 2**10
"""Larger payloads are encoded, checksummed and decoded in a thread. Smaller ones take less than the hop there."""

P = ParamSpec("P")
R = TypeVar("R")


TrajectoryValidator = Callable[[Sequence[Trajectory]], Mapping[int, str]]
"""By their place, why trajectories will never be taken; those that may be are not named."""


class SenderRefusedError(TransportError):
    """The receiver belongs to another run, has another schema, or does not know this key. Trying again cannot help."""


class NullSocket:
    """The `MessageSocket` of an end that is not started."""

    endpoint = denial_reason = ""

    def send(self, frames: Sequence[Frame]) -> int:
        return errno.ENOTSOCK

    def receive_pending(self, seconds: float = 0.0) -> None:
        pass

    def close(self) -> None:
        pass


async def run_off_loop(threads: Threads, nbytes: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run work on `nbytes` of payload: in a thread if that would hold up the event loop."""
    if nbytes <= OFFLOAD_BYTES:
        return function(*args, **kwargs)
    return await threads.run(function, *args, **kwargs)
