"""What a receiver may hold in memory. Pure."""

from __future__ import annotations

import math

OPEN = 2**62
"""`Capacity.until` while everything is taken: no group is behind it."""


class Capacity:
    """Bytes of trajectories that arrived and are not released.

    `oldest` is the first group that is not consumed, and the `window` groups from there on are what the next step may wait
    for. Rule: a trajectory of the window is always taken. Any other is taken if it fits into `total`, or if nothing is held.
    From the first one that does not fit until it would, senders are asked for the window only (`until`).

    * It can not deadlock: whatever else is held, all trajectories of the window are taken, so the step gets its groups,
      consumes them, and the window moves. A trajectory waits at most until its group is in the window.
    * It is bounded: beyond `total` there are only trajectories that were taken in the window, and they leave it only by being
      consumed: `held <= max(total, largest trajectory) + bytes of the groups oldest .. oldest + window - 1`. Whatever senders
      claim, these are at most `window` times the trajectories that a group may have times the largest (see `Receiver`).
    """

    def __init__(self, total: int, window: int = 1):
        self.total = total
        self.window = window
        self.oldest = 0
        self.held = 0
        self._held: dict[str, int] = {}
        self._short: int | None = None
        """Bytes of the first trajectory that did not fit; None while everything is taken."""

    def advance(self, oldest: int) -> None:
        """Groups before `oldest` are consumed."""
        self.oldest = max(self.oldest, oldest)

    def take(self, trajectory_id: str, group_index: int, nbytes: int, disk: float = math.inf) -> bool:
        """Hold one that arrives, if the rule allows it. `disk`: bytes that are free there, where it has to go, too, unless it
        is of the window."""
        urgent = self.oldest <= group_index < self.oldest + self.window
        if not urgent and not (self._fits(nbytes) and nbytes <= disk):
            if self._short is None:
                self._short = nbytes
            return False
        self.hold(trajectory_id, nbytes)
        return True

    def until(self, disk: float = math.inf) -> int:
        """Groups before this one are taken now, however large they are; `OPEN` if it may be all of them."""
        if self._short is not None and self._fits(self._short) and self._short <= disk:
            self._short = None
        return OPEN if self._short is None else self.oldest + self.window

    def lacks_only_disk(self, disk: float) -> bool:
        """What did not fit would, if `disk` had more free bytes."""
        return self._short is not None and self._fits(self._short) and self._short > disk

    def hold(self, trajectory_id: str, nbytes: int) -> None:
        """A trajectory holds `nbytes`, and no longer what it held before."""
        self.release(trajectory_id)
        self._held[trajectory_id] = nbytes
        self.held += nbytes

    def release(self, trajectory_id: str) -> None:
        """Free what a trajectory holds. Harmless if it holds nothing."""
        self.held -= self._held.pop(trajectory_id, 0)

    def _fits(self, nbytes: int) -> bool:
        return not self.held or self.held + nbytes <= self.total
