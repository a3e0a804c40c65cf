"""What a sender makes of trajectories before they are sent: validated and encoded, small ones of a group together."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

from r3async.config import TransportConfig
from r3async.data.records import Trajectory
from r3async.transport.outbox import Pending
from r3async.transport.sockets import OFFLOAD_BYTES, Validate
from r3async.transport.wire import decoded_bytes, encode_trajectory
from r3async.world import TURN_SECONDS, World
from r3async.world.keys import TransportError
from r3async.world.real import REAL
from r3async.world.stages import stage

LINGER_SECONDS = 0.05
"""A trajectory waits so long, at most, for others that are sent with it. Nobody is waiting for it: its group lacks others."""
TOGETHER = 8
"""Trajectories that are validated and encoded in one go, at most."""

Encoded = Pending | str | Exception
"""What is to be sent; or why the learner would not take it; or the error of whoever sends it."""
Waiter = asyncio.Future[None]
"""Of whoever sends a trajectory: resolved when it is on its way."""


class Encoding:
    """`done([(trajectory, waiter, encoded), ...])` is called on the event loop with what was encoded together."""

    def __init__(
        self,
        settings: TransportConfig,
        validate: Validate,
        done: Callable[[Sequence[tuple[Trajectory, Waiter, Encoded]]], None],
        world: World = REAL,
    ):
        self._settings, self._validate, self._done = settings, validate, done
        self._threads, self._clock = world.threads, world.clock.monotonic
        self.fresh: dict[str, tuple[Trajectory, Waiter]] = {}
        """Small ones that wait, by id."""
        self._lingering: asyncio.TimerHandle | None = None
        self._due = False
        """The loop's next round encodes them."""
        self._large = asyncio.Lock()
        """One thread is enough: it keeps up with the connection."""

    async def add(self, trajectory: Trajectory, waiter: Waiter, *, more: bool) -> None:
        """A small one only waits, with `more` for others; a large one is encoded in a thread when this returns."""
        if sum(sample.table.nbytes for sample in trajectory.samples) > OFFLOAD_BYTES:
            async with self._large:
                with stage("encode"):
                    encoded = await self._threads.run(self._encoded, [trajectory])
            self._done([(trajectory, waiter, encoded[0])])
            return
        self.fresh[trajectory.trajectory_id] = trajectory, waiter
        if not more:
            self.begin()
        elif self._lingering is None:
            self._lingering = asyncio.get_running_loop().call_later(LINGER_SECONDS, self.begin)

    def begin(self) -> None:
        """What waits is encoded in the next round of the event loop."""
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None
        if self.fresh and not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        """As many as `TURN_SECONDS` allow: many episodes may end together. The rest has its turn in the next round."""
        until = self._clock() + TURN_SECONDS
        made: list[tuple[Trajectory, Waiter, Encoded]] = []
        with stage("encode"):
            while self.fresh and (not made or self._clock() < until):
                some = list(itertools.islice(self.fresh.values(), TOGETHER))
                for trajectory, _ in some:
                    del self.fresh[trajectory.trajectory_id]
                encoded = self._encoded([trajectory for trajectory, _ in some])
                made += [(*each, result) for each, result in zip(some, encoded, strict=True)]
        self._due = False
        self.begin()
        self._done(made)

    def _encoded(self, trajectories: Sequence[Trajectory]) -> list[Encoded]:
        try:
            wrong = self._validate(trajectories)
        except Exception as error:
            return [error] * len(trajectories)
        return [wrong[i] if i in wrong else self._pending(t) for i, t in enumerate(trajectories)]

    def _pending(self, trajectory: Trajectory) -> Pending | Exception:
        try:
            frames = encode_trajectory(trajectory, routes=self._settings.routes)
        except Exception as error:
            return error
        nbytes, most = decoded_bytes(frames, trajectory), self._settings.max_message_bytes
        if nbytes > most:
            return TransportError(
                f"trajectory {trajectory.trajectory_id!r} takes {nbytes} bytes, more than `transport.max_message_bytes` = "
                f"{most}: raise that, or shorten the episode"
            )
        return Pending(trajectory, nbytes, frames)
