"""The intake of trajectories: those that arrived, in the order in which they came, decoded a few
at a time off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from r3async.data.control_messages import DeliveryItem, join_item_frames
from r3async.data.tokens import Trajectory
from r3async.data.wire import decode_trajectory, decoded_bytes
from r3async.data.wire_frames import Frame, WireError
from r3async.transport.memory_budget import MIN_TOKEN_BYTES
from r3async.world import TURN_SECONDS, World
from r3async.world.threads import OFFLOAD_BYTES, run_off_loop

INTAKE_BATCH = 16
"""Trajectories that are decoded together, at most."""


@dataclass(slots=True)
class IncomingTrajectory:
    """A trajectory that arrived and was not answered yet.

    Attributes:
        sender_identities: The senders of the trajectory; the first one's message is judged.
        frames: The frames in pieces, until `join_frames` joins them.
    """

    sender_identities: list[bytes]
    item: DeliveryItem
    frames: Sequence[Frame]

    @property
    def trajectory_id(self) -> str:
        return self.item.trajectory_id

    @property
    def nbytes(self) -> int:
        """The bytes of memory that it takes, as its sender says."""
        return self.item.nbytes

    @property
    def wire_bytes(self) -> int:
        return sum(map(len, self.frames))

    def join_frames(self) -> None:
        """Join the frames, off the event loop, because this may copy. Raises `WireError`."""
        self.frames = join_item_frames(self.item, self.frames)


@dataclass(slots=True, eq=False)
class ReceivedTrajectory:
    """A trajectory that a receiver has and did not answer yet.

    Attributes:
        trajectory: The trajectory, of which the arrays are read-only. `store` may replace it by
            the same one mapped from disk.
        nbytes: Bytes of memory that it holds.
        arrival: What arrived; None for one that the store kept from an earlier start.
        is_stored: True if it is in the store.
    """

    trajectory: Trajectory
    nbytes: int
    arrival: IncomingTrajectory | None
    is_stored: bool = False

    @property
    def payload_bytes(self) -> int:
        """Bytes to read, also if they are mapped from disk and hold no memory; at least that."""
        return max(self.nbytes, self.trajectory.num_tokens * MIN_TOKEN_BYTES)

    @property
    def is_recovered(self) -> bool:
        """True if it is of an earlier start. Its sender has its acknowledgement."""
        return self.arrival is None


class TrajectoryIntake:
    """A queue of trajectories that arrived, which are decoded in the order of deliveries, so that
    answers come in that order."""

    def __init__(self, world: World):
        self._clock = world.clock.monotonic
        self._threads = world.threads
        self.unanswered_bytes = 0
        """Bytes of the trajectories that arrived and are not answered yet."""
        self._unanswered: dict[str, IncomingTrajectory] = {}
        self._inbox: asyncio.Queue[IncomingTrajectory] = asyncio.Queue()
        self._turn_began = self._clock()

    def add_duplicate_sender(self, identity: bytes, trajectory_id: str) -> bool:
        """Return True if this trajectory is in hand already; its sender is then answered
        together with the first."""
        arrival = self._unanswered.get(trajectory_id)
        if arrival is not None and identity not in arrival.sender_identities:
            arrival.sender_identities.append(identity)
        return arrival is not None

    def __len__(self) -> int:
        """Return the number of trajectories that arrived and are not answered yet."""
        return len(self._unanswered)

    def unanswered_of(self, identity: bytes) -> list[str]:
        """Return the ids of one sender's trajectories that are in hand."""
        return [
            p.trajectory_id for p in self._unanswered.values() if identity in p.sender_identities
        ]

    def add(self, arrival: IncomingTrajectory) -> None:
        self._unanswered[arrival.trajectory_id] = arrival
        self.unanswered_bytes += arrival.nbytes
        self._inbox.put_nowait(arrival)

    def is_unanswered(self, arrival: IncomingTrajectory) -> bool:
        return self._unanswered.get(arrival.trajectory_id) is arrival

    def remove(self, arrival: IncomingTrajectory) -> None:
        """Remove a trajectory that is answered now."""
        del self._unanswered[arrival.trajectory_id]
        self.unanswered_bytes -= arrival.nbytes

    async def decode_next(self) -> list[tuple[IncomingTrajectory, ReceivedTrajectory | Exception]]:
        """Wait for trajectories, and decode those that arrived next: one, or several small ones.
        Returns each with what it is, or with the error that prevented decoding it."""
        # Whatever else the event loop has to do gets its turn.
        if self._inbox.empty() or self._clock() - self._turn_began > TURN_SECONDS:
            await asyncio.sleep(0)
            self._turn_began = self._clock()
        arrivals = self._next_batch(await self._inbox.get())
        nbytes = sum(arrival.nbytes for arrival in arrivals)
        decoded = await run_off_loop(self._threads, nbytes, decode_arrivals, arrivals)
        return list(zip(arrivals, decoded, strict=True))

    def _next_batch(self, arrival: IncomingTrajectory) -> list[IncomingTrajectory]:
        """Return a trajectory and those behind it that are decoded with it: small ones, which
        cost less together."""
        arrivals = [arrival]
        nbytes = arrival.nbytes
        while nbytes < OFFLOAD_BYTES and len(arrivals) < INTAKE_BATCH and not self._inbox.empty():
            arrivals.append(self._inbox.get_nowait())
            nbytes += arrivals[-1].nbytes
        return arrivals


def decode_arrivals(
    arrivals: Sequence[IncomingTrajectory],
) -> list[ReceivedTrajectory | Exception]:
    """Decode trajectories. An error of one does not affect the others, and is returned."""
    decoded: list[ReceivedTrajectory | Exception] = []
    for arrival in arrivals:
        try:
            decoded.append(decode_arrival(arrival))
        except Exception as error:
            decoded.append(error)
    return decoded


def decode_arrival(arrival: IncomingTrajectory) -> ReceivedTrajectory:
    """Decode one trajectory. Raises `WireError`."""
    arrival.join_frames()
    trajectory = decode_trajectory(arrival.frames)
    if (trajectory.trajectory_id, trajectory.group_index) != (
        arrival.trajectory_id,
        arrival.item.group_index,
    ):
        raise WireError(
            f"the payload is trajectory {trajectory.trajectory_id!r} of {trajectory.group_index}"
        )
    nbytes = decoded_bytes(arrival.frames, trajectory)
    if nbytes > arrival.nbytes:
        raise WireError(f"it takes {nbytes} bytes, and {arrival.nbytes} were announced")
    return ReceivedTrajectory(trajectory, nbytes, arrival)
