"""Trajectories wait to be validated and encoded (`data/wire.py`) before they are sent, small ones
of a group together."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

from r3async.config import TransportConfig
from r3async.data.tokens import Trajectory
from r3async.data.wire import decoded_bytes, encode_trajectory
from r3async.transport.null_socket import TrajectoryValidator
from r3async.transport.outbox import OutgoingTrajectory
from r3async.world import TURN_SECONDS, World
from r3async.world.curve_keys import TransportError
from r3async.world.real import REAL_WORLD
from r3async.world.stages import stage
from r3async.world.threads import OFFLOAD_BYTES

LINGER_SECONDS = 0.05
"""Seconds that a trajectory waits, at most, for others that are sent with it. Nobody waits for it:
its group lacks others."""
ENCODE_BATCH = 8
"""Trajectories that are validated and encoded together, at most."""

EncodeResult = OutgoingTrajectory | str | Exception
"""Result of encoding: the trajectory to send, the reason why the learner would not accept it, or
the error for the caller of `send`."""
SendWaiter = asyncio.Future[None]
"""Future of a caller of `send`, resolved when the trajectory is on its way."""


class EncodingQueue:
    """A queue of trajectories that are validated and encoded before they are sent.

    `on_encoded([(trajectory, waiter, encoded), ...])` is called on the event loop with what was
    encoded together.
    """

    def __init__(
        self,
        settings: TransportConfig,
        validate: TrajectoryValidator,
        on_encoded: Callable[[Sequence[tuple[Trajectory, SendWaiter, EncodeResult]]], None],
        world: World = REAL_WORLD,
    ):
        self._settings = settings
        self._validate = validate
        self._on_encoded = on_encoded
        self._threads = world.threads
        self._clock = world.clock.monotonic
        self.unencoded: dict[str, tuple[Trajectory, SendWaiter]] = {}
        """Small trajectories that wait to be encoded, by id."""
        self._linger_timer: asyncio.TimerHandle | None = None
        self._is_scheduled = False
        """True if the event loop's next round encodes them."""
        self._large_lock = asyncio.Lock()
        """Lock that limits encoding of large trajectories to one thread, which keeps up
        with the connection."""

    async def add(self, trajectory: Trajectory, waiter: SendWaiter, *, more_follow: bool) -> None:
        """Add a trajectory. A small one is only queued, and waits for others with `more_follow`; a
        large one is encoded in a thread when this returns."""
        if sum(sample.table.nbytes for sample in trajectory.samples) > OFFLOAD_BYTES:
            async with self._large_lock:
                with stage("encode"):
                    encoded = await self._threads.run(self._encode_batch, [trajectory])
            self._on_encoded([(trajectory, waiter, encoded[0])])
            return
        self.unencoded[trajectory.trajectory_id] = trajectory, waiter
        if not more_follow:
            self.encode_soon()
        elif self._linger_timer is None:
            self._linger_timer = asyncio.get_running_loop().call_later(
                LINGER_SECONDS, self.encode_soon
            )

    def encode_soon(self) -> None:
        """Encode the waiting trajectories in the next round of the event loop."""
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None
        if self.unencoded and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._encode_waiting)

    def _encode_waiting(self) -> None:
        """Encode as many trajectories as `TURN_SECONDS` allows, because many episodes may end
        together. The rest follows in the next round."""
        until = self._clock() + TURN_SECONDS
        made: list[tuple[Trajectory, SendWaiter, EncodeResult]] = []
        with stage("encode"):
            while self.unencoded and (not made or self._clock() < until):
                some = list(itertools.islice(self.unencoded.values(), ENCODE_BATCH))
                for trajectory, _ in some:
                    del self.unencoded[trajectory.trajectory_id]
                encoded = self._encode_batch([trajectory for trajectory, _ in some])
                made += [(*each, result) for each, result in zip(some, encoded, strict=True)]
        self._is_scheduled = False
        self.encode_soon()
        self._on_encoded(made)

    def _encode_batch(self, trajectories: Sequence[Trajectory]) -> list[EncodeResult]:
        try:
            wrong = self._validate(trajectories)
        except Exception as error:
            return [error] * len(trajectories)
        return [wrong[i] if i in wrong else self._encode_one(t) for i, t in enumerate(trajectories)]

    def _encode_one(self, trajectory: Trajectory) -> OutgoingTrajectory | Exception:
        try:
            frames = encode_trajectory(trajectory, routes="bits")
        except Exception as error:
            return error
        nbytes = decoded_bytes(frames, trajectory)
        most = self._settings.max_message_bytes
        if nbytes > most:
            return TransportError(
                f"trajectory {trajectory.trajectory_id!r} takes {nbytes} bytes, more than "
                f"`transport.max_message_bytes` = {most}: raise that, or shorten the episode"
            )
        return OutgoingTrajectory(trajectory, nbytes, frames)
