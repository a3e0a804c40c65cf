"""What was accepted already, so that a redelivery is harmless. Pure."""

from __future__ import annotations

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
