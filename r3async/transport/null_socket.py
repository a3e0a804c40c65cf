"""Parts that both ends share: a socket before there is one, and errors."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence

from r3async.data.tokens import Trajectory
from r3async.data.wire_frames import Frame
from r3async.world.curve_keys import TransportError

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
