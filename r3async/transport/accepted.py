"""What was accepted already, so that a redelivery is harmless. Pure."""

from __future__ import annotations

import math
import sys

from r3async.data.window import Consumed


class Ledger:
    """Ids of accepted trajectories, by group that is not over.

    `over`: the groups that are over. Whoever consumes groups shares his with the ledger; else it has one of its own, in which
    groups may end in any order.
    """

    def __init__(self, over: Consumed | None = None) -> None:
        self._over = Consumed(window=sys.maxsize) if over is None else over
        self._live: dict[int, set[str]] = {}

    def __contains__(self, key: tuple[int, str]) -> bool:
        """`(group_index, trajectory_id)` was accepted, or its group is over."""
        group_index, trajectory_id = key
        return self.is_forgotten(group_index) or trajectory_id in self._live.get(group_index, ())

    def is_forgotten(self, group_index: int) -> bool:
        return group_index in self._over

    @property
    def oldest(self) -> int:
        """The first group that is not over."""
        return self._over.head

    def add(self, group_index: int, trajectory_id: str) -> None:
        if not self.is_forgotten(group_index):
            self._live.setdefault(group_index, set()).add(trajectory_id)

    def discard(self, group_index: int, trajectory_id: str) -> None:
        """Take back an `add`. Harmless if there was none."""
        ids = self._live.get(group_index, set())
        ids.discard(trajectory_id)
        if not ids:
            self._live.pop(group_index, None)

    def forget(self, group_index: int) -> set[str]:
        """The group is over: whatever still comes for it is a duplicate. Returns the ids it had. Idempotent."""
        if not self.is_forgotten(group_index):
            self._over.add(group_index)
        return self._live.pop(group_index, set())

    def forget_live(self) -> None:
        """Only what is over stays known: of the rest, nothing has been kept, or what was kept is added again."""
        self._live.clear()


OPEN = 2**62
"""`Capacity.until` while everything is taken: no group is behind it."""


class Capacity:
    """Bytes of trajectories that arrived and are not released.

    `oldest` is the first group that is not consumed, and the `window` groups from there on are what the next step may wait
    for. Rule: a trajectory of the window is always taken. Any other is taken if it fits into `total`, or if nothing is held.
    From the first one that does not fit until it would, senders are asked for the window only (`until`).

    * It cannot deadlock: whatever else is held, all trajectories of the window are taken, so the step gets its groups,
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
