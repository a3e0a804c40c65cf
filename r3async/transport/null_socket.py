"""Parts that both ends share: a socket before there is one, errors, and work that is kept
off the event loop."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, TypeVar

from r3async.data.tokens import Trajectory
from r3async.data.wire_frames import Frame
from r3async.world import Threads
from r3async.world.curve_keys import TransportError

OFFLOAD_BYTES = 256 * 2**10
"""Bytes of payload above which it is encoded, checksummed and decoded in a thread. Smaller payloads
take less time than the hop to a thread."""

P = ParamSpec("P")
R = TypeVar("R")


TrajectoryValidator = Callable[[Sequence[Trajectory]], Mapping[int, str]]
"""Function that returns, by position, why trajectories will never be accepted; those that may
be are left out."""


class SenderRefusedError(TransportError):
    """Refusal of a sender by the receiver, which belongs to another run, has another schema, or
    does not know the sender's key. Trying again cannot help."""


class NullSocket:
    """The `MessageSocket` of an end that is not started."""

    endpoint = denial_reason = ""

    def send(self, frames: Sequence[Frame]) -> int:
        return errno.ENOTSOCK

    def receive_pending(self, seconds: float = 0.0) -> None:
        pass

    def close(self) -> None:
        pass


async def run_off_loop(
    threads: Threads, nbytes: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
) -> R:
    """Run `function` on `nbytes` bytes of payload: in a thread if it would otherwise
    block the event loop."""
    if nbytes <= OFFLOAD_BYTES:
        return function(*args, **kwargs)
    return await threads.run(function, *args, **kwargs)
