"""The trajectories of a sender that are not acknowledged yet. Pure."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from r3async.data.control_messages import MAX_DELIVERY_ITEMS, MAX_SHARED_BYTES, DeliveryItem
from r3async.data.tokens import Trajectory
from r3async.data.wire_frames import Frame

MAX_IN_FLIGHT = 256
"""Trajectories in flight, at most: fewer than ZeroMQ holds for a connection (1000), and enough
for a busy machine."""
MAX_DAMAGED_DELIVERIES = 8
"""Damaged deliveries of one trajectory after which the damage is not blamed on the
network any more."""


@dataclass(eq=False, slots=True)
class OutgoingTrajectory:
    """A trajectory that is kept until it is acknowledged.

    Attributes:
        nbytes: Bytes of memory that it takes.
        frames: Views of its arrays, of `wire_bytes` in all.
        sent_waiter: Resolved when the trajectory is first handed over.
    """

    trajectory: Trajectory
    nbytes: int
    frames: Sequence[Frame]
    sent_waiter: asyncio.Future[None] | None = None
    sent_at: float = math.nan
    send_order: int = -1
    damage_count: int = 0
    """Number of times that it was damaged in transit."""
    item: DeliveryItem = field(init=False)
    wire_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        sizes = [len(frame) for frame in self.frames]
        self.item = DeliveryItem(
            self.trajectory.trajectory_id, self.trajectory.group_index, self.nbytes, sizes
        )
        self.wire_bytes = sum(sizes)

    @property
    def trajectory_id(self) -> str:
        return self.item.trajectory_id


class Outbox:
    """The trajectories that wait to be sent, and those in flight: sent in this session
    and not answered."""

    def __init__(self) -> None:
        self.waiting: dict[str, OutgoingTrajectory] = {}
        self.in_flight: dict[str, OutgoingTrajectory] = {}
        self.bytes_in_flight = 0
        self._sent_count = 0
        self._last_acked = -1
        self._progress_at = -math.inf

    def __len__(self) -> int:
        return len(self.waiting) + len(self.in_flight)

    def __contains__(self, trajectory_id: str) -> bool:
        return trajectory_id in self.waiting or trajectory_id in self.in_flight

    def add(self, pending: OutgoingTrajectory) -> None:
        assert pending.trajectory_id not in self
        self.waiting[pending.trajectory_id] = pending

    def withdraw_unsent(self, trajectory_id: str) -> None:
        """Drop a trajectory that was never sent. One that was sent may be accepted
        already, and stays."""
        pending = self.waiting.get(trajectory_id)
        if pending is not None and pending.send_order < 0:
            del self.waiting[trajectory_id]

    def next_batch(self, group_limit: int, max_in_flight_bytes: int) -> list[OutgoingTrajectory]:
        """Return the trajectories that may be sent now, in one message, in the order in which
        they were added.

        They are of groups before `group_limit`. At most `max_in_flight_bytes` bytes and
        `MAX_IN_FLIGHT` trajectories are in flight, or one trajectory alone.
        """
        ready: list[OutgoingTrajectory] = []
        count = len(self.in_flight)
        nbytes = self.bytes_in_flight
        wire_bytes = 0
        for pending in self.waiting.values():
            if pending.item.group_index >= group_limit:
                continue
            count = count + 1
            nbytes = nbytes + pending.nbytes
            wire_bytes = wire_bytes + pending.wire_bytes
            fits = nbytes <= max_in_flight_bytes and count <= MAX_IN_FLIGHT
            if ((ready or self.in_flight) and not fits) or (
                ready and wire_bytes > MAX_SHARED_BYTES
            ):
                break
            ready.append(pending)
            if len(ready) == MAX_DELIVERY_ITEMS:
                break
        return ready

    def mark_sent(self, pending: OutgoingTrajectory, now: float) -> None:
        del self.waiting[pending.trajectory_id]
        pending.sent_at = now
        pending.send_order = self._sent_count
        self._sent_count += 1
        self.in_flight[pending.trajectory_id] = pending
        self.bytes_in_flight += pending.nbytes

    def settle_trajectory(self, trajectory_id: str, now: float) -> OutgoingTrajectory | None:
        """Remove and return a trajectory to which the receiver has given its final answer. None if
        there is no such trajectory (an answer that came twice)."""
        pending = self._remove_in_flight(trajectory_id) or self.waiting.pop(trajectory_id, None)
        if pending is not None:
            self._last_acked = max(self._last_acked, pending.send_order)
            self._progress_at = now
        return pending

    def requeue_trajectory(self, trajectory_id: str, now: float, *, damaged: bool) -> bool:
        """Requeue a trajectory that was not accepted, because it came `damaged` or there
        was no free memory. Returns False if it came damaged `MAX_DAMAGED_DELIVERIES` times,
        or is not known."""
        pending = self.in_flight.get(trajectory_id) or self.waiting.get(trajectory_id)
        if pending is None or (damaged and pending.damage_count == MAX_DAMAGED_DELIVERIES - 1):
            return False
        if damaged:
            pending.damage_count += 1
            self._last_acked = max(self._last_acked, pending.send_order)
        self._progress_at = now
        if self._remove_in_flight(trajectory_id):  # otherwise a new session has requeued it already
            self.waiting = {trajectory_id: pending, **self.waiting}
        return True

    def mark_in_hand(self, trajectory_ids: Iterable[str], now: float) -> None:
        """Record that the receiver has these trajectories in hand: they are not lost, only
        not answered yet."""
        for trajectory_id in trajectory_ids:
            if trajectory_id in self.in_flight:
                self.in_flight[trajectory_id].sent_at = now
                self._progress_at = now

    def is_overdue(self, now: float, timeout: float) -> bool:
        """Return True if an answer is missing.

        The receiver answers in order, so an answer to a later message shows that the oldest
        message, or its answer, was lost. Before that, the clock restarts with every answer, for a
        slow link is not a loss.
        """
        oldest = next(iter(self.in_flight.values()), None)
        if oldest is None:
            return False
        since = (
            oldest.sent_at
            if self._last_acked > oldest.send_order
            else max(oldest.sent_at, self._progress_at)
        )
        return now - since > timeout

    def requeue_all(self) -> int:
        """Requeue all that was sent, in order and before the rest, for a new session. Returns
        how many that is."""
        count = len(self.in_flight)
        self.waiting = {**self.in_flight, **self.waiting}
        self.in_flight = {}
        self.bytes_in_flight = 0
        return count

    def _remove_in_flight(self, trajectory_id: str) -> OutgoingTrajectory | None:
        pending = self.in_flight.pop(trajectory_id, None)
        self.bytes_in_flight -= pending.nbytes if pending is not None else 0
        return pending
