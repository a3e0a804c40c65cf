"""What a sender has not had acknowledged yet. Pure."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from r3async.records import Trajectory
from r3async.transport.wire import MAX_PARCELS, Frame, Parcel

OFFERED_AT_ONCE = 64
"""As many as one OFFER adds: on a machine that is busy the answer takes long, and what is not offered waits for it."""


@dataclass(eq=False, slots=True)
class Pending:
    """One trajectory, kept until it is acknowledged; `frames` are views of its arrays. The waiter is resolved when it is first
    handed over."""

    trajectory: Trajectory
    parcel: Parcel
    frames: list[Frame]
    handed_over: asyncio.Future[None] | None = None
    sent_at: float = math.nan
    order: int = -1
    damaged: int = 0
    """Times it changed on its way."""


class Outbox:
    """Trajectories that wait for credit, and those that were sent in this session and not acknowledged."""

    def __init__(self) -> None:
        self.waiting: dict[str, Pending] = {}
        self.flying: dict[str, Pending] = {}
        self._offered: dict[str, int] = {}
        """Of those that wait, with their groups: a grant may be on its way for each."""
        # Entries of what was offered meanwhile, or does not wait any more, stay until they are on top.
        self._unoffered: list[tuple[int, int, str]] = []
        self._order = itertools.count()
        self._sent = 0
        self._last_acked = -1
        self._progress_at = -math.inf

    def __len__(self) -> int:
        return len(self.waiting) + len(self.flying)

    def __contains__(self, trajectory_id: str) -> bool:
        return trajectory_id in self.waiting or trajectory_id in self.flying

    def __iter__(self) -> Iterable[Pending]:
        yield from self.flying.values()
        yield from self.waiting.values()

    def add(self, pending: Pending) -> None:
        assert pending.parcel.trajectory_id not in self
        self.waiting[pending.parcel.trajectory_id] = pending
        self._note_unoffered(pending.parcel)

    def _note_unoffered(self, parcel: Parcel) -> None:
        heapq.heappush(self._unoffered, (parcel.group_index, next(self._order), parcel.trajectory_id))

    def withdraw(self, trajectory_id: str) -> None:
        """Give up a trajectory that was never sent. One that was sent may be accepted already, and stays."""
        pending = self.waiting.get(trajectory_id)
        if pending is not None and pending.order < 0:
            del self.waiting[trajectory_id]
            self._offered.pop(trajectory_id, None)

    def offers(self) -> list[Parcel]:
        """All to ask credit for: the oldest groups, so that one the learner waits for is never left out, and whatever was
        offered before. It replaces what was offered before, so to leave that out would withdraw a grant that is on its way."""
        oldest = heapq.nsmallest(OFFERED_AT_ONCE, self.waiting.values(), key=lambda p: p.parcel.group_index)
        wanted = {name: self.waiting[name].parcel for name in self._offered}
        wanted |= {p.parcel.trajectory_id: p.parcel for p in oldest}
        listed = heapq.nsmallest(MAX_PARCELS, wanted.values(), key=lambda parcel: parcel.group_index)
        self._offered = {p.trajectory_id: p.group_index for p in listed}
        self._unoffered = []
        for name, pending in self.waiting.items():
            if name not in self._offered:
                self._note_unoffered(pending.parcel)
        return listed

    def more(self) -> list[Parcel]:
        """What to ask credit for besides: of what was not offered yet the oldest groups, while fewer than `OFFERED_AT_ONCE`
        are offered, and any that is older than one of those. The work is of what is new, however much waits."""
        new: list[Parcel] = []
        while self._unoffered and len(self._offered) < MAX_PARCELS:
            group, _, name = self._unoffered[0]
            pending = self.waiting.get(name)
            if pending is not None and name not in self._offered:
                if len(self._offered) >= OFFERED_AT_ONCE and group >= max(self._offered.values()):
                    break
                self._offered[name] = group
                new.append(pending.parcel)
            heapq.heappop(self._unoffered)
        return new

    def mark_sent(self, trajectory_id: str, now: float) -> None:
        pending = self.waiting.pop(trajectory_id)
        self._offered.pop(trajectory_id, None)
        pending.sent_at, pending.order = now, self._sent
        self._sent += 1
        self.flying[trajectory_id] = pending

    def settle(self, trajectory_id: str, now: float) -> Pending | None:
        """The receiver has answered for good. None if there is no such trajectory (an answer that came twice)."""
        pending = self.flying.pop(trajectory_id, None) or self.waiting.pop(trajectory_id, None)
        self._offered.pop(trajectory_id, None)
        if pending is not None:
            self._last_acked = max(self._last_acked, pending.order)
            self._progress_at = now
        return pending

    def again(self, trajectory_id: str, times: int, now: float) -> bool:
        """It was damaged on its way, and waits again. False if it was so many `times` before, or is not known."""
        pending = self.flying.get(trajectory_id) or self.waiting.get(trajectory_id)
        if pending is None or pending.damaged == times - 1:
            return False
        pending.damaged += 1
        self._last_acked = max(self._last_acked, pending.order)
        self._progress_at = now
        if self.flying.pop(trajectory_id, None):  # or a new session has it wait already
            self.waiting = {trajectory_id: pending, **self.waiting}
            self._note_unoffered(pending.parcel)
        return True

    def touch(self, trajectory_ids: Iterable[str], now: float) -> None:
        """The receiver has these in hand: they are not lost, only not answered yet."""
        for trajectory_id in trajectory_ids:
            if trajectory_id in self.flying:
                self.flying[trajectory_id].sent_at = now
                self._progress_at = now

    def overdue(self, now: float, patience: float) -> bool:
        """An answer is missing. The receiver answers in order, so one for a later message shows that the oldest, or its
        answer, was lost; before that, the clock starts again with every answer, for a slow link is not a loss."""
        oldest = next(iter(self.flying.values()), None)
        if oldest is None:
            return False
        since = oldest.sent_at if self._last_acked > oldest.order else max(oldest.sent_at, self._progress_at)
        return now - since > patience

    def reset(self) -> int:
        """A new session: all that was sent waits again, in order, before the rest. Returns how many that is."""
        count = len(self.flying)
        self.waiting = {**self.flying, **self.waiting}
        self.flying = {}
        self._offered = {}  # until all is offered anew: a session begins with that
        return count
