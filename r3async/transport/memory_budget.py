"""The memory budget of the receiver, which is divided among its senders."""

from __future__ import annotations

import math

MIN_TOKEN_BYTES = 16
"""Least bytes of columns per token, for the decision whether to process a trajectory
off the event loop."""


NO_GROUP_LIMIT = 2**62
"""Value of `MemoryBudget.group_limit` while everything is accepted: no group is beyond it."""


class MemoryBudget:
    """The budget for bytes of trajectories that arrived and are not released.

    `oldest_group` is the first group that is not consumed, and the `window` groups from there on
    are what the next step may wait for. The rule: a trajectory of the window is always accepted.
    Any other is accepted if it fits into `total_bytes`, or if nothing is held. From the first one
    that does not fit until it would, senders are asked for the window only (`group_limit`).

    * It cannot deadlock: whatever else is held, all trajectories of the window are accepted, so the
      step gets its groups, consumes them, and the window moves. A trajectory waits at most until
      its group is in the window.
    * It is bounded: beyond `total_bytes` there are only trajectories that were accepted in the
      window, and they leave it only by being consumed: `reserved_bytes <= max(total, largest
      trajectory) + bytes of the groups oldest .. oldest + window - 1`. Whatever senders claim,
      these are at most `window` times the trajectories that a group may have times the largest (see
      `TrajectoryReceiver`).
    """

    def __init__(self, total_bytes: int, window: int = 1):
        self.total_bytes = total_bytes
        self.window = window
        self.oldest_group = 0
        self.reserved_bytes = 0
        self._reserved: dict[str, int] = {}
        self._first_refused_bytes: int | None = None
        """Bytes of the first trajectory that did not fit; None while everything is accepted."""

    def advance_window(self, oldest_group: int) -> None:
        """Move the window to `oldest_group`: all groups before it are consumed."""
        self.oldest_group = max(self.oldest_group, oldest_group)

    def try_reserve(
        self, trajectory_id: str, group_index: int, nbytes: int, free_disk_bytes: float = math.inf
    ) -> bool:
        """Reserve memory for an arriving trajectory, if the rule allows it. Outside of the window
        it must also fit into `free_disk_bytes`, the free bytes of the store."""
        urgent = self.oldest_group <= group_index < self.oldest_group + self.window
        if not urgent and not (self._fits_in_memory(nbytes) and nbytes <= free_disk_bytes):
            if self._first_refused_bytes is None:
                self._first_refused_bytes = nbytes
            return False
        self.set_reserved(trajectory_id, nbytes)
        return True

    def group_limit(self, free_disk_bytes: float = math.inf) -> int:
        """Return the group before which all groups are accepted now, however large they are;
        `NO_GROUP_LIMIT` if every group may be."""
        if (
            self._first_refused_bytes is not None
            and self._fits_in_memory(self._first_refused_bytes)
            and self._first_refused_bytes <= free_disk_bytes
        ):
            self._first_refused_bytes = None
        return (
            NO_GROUP_LIMIT if self._first_refused_bytes is None else self.oldest_group + self.window
        )

    def lacks_only_disk(self, free_disk_bytes: float) -> bool:
        """Return True if what did not fit would fit with more `free_disk_bytes`."""
        return (
            self._first_refused_bytes is not None
            and self._fits_in_memory(self._first_refused_bytes)
            and self._first_refused_bytes > free_disk_bytes
        )

    def set_reserved(self, trajectory_id: str, nbytes: int) -> None:
        """Record that a trajectory holds `nbytes`, instead of what it held before."""
        self.release_trajectory(trajectory_id)
        self._reserved[trajectory_id] = nbytes
        self.reserved_bytes += nbytes

    def release_trajectory(self, trajectory_id: str) -> None:
        """Free what a trajectory holds. Harmless if it holds nothing."""
        self.reserved_bytes -= self._reserved.pop(trajectory_id, 0)

    def _fits_in_memory(self, nbytes: int) -> bool:
        return not self.reserved_bytes or self.reserved_bytes + nbytes <= self.total_bytes
