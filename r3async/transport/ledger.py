"""What was accepted already, so that a redelivery is harmless. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any


class Ledger:
    """Ids of accepted trajectories, by group, and the groups that are over.

    Size: the ids of live groups, and one pair of numbers for each unbroken run of forgotten groups. Groups are counted
    and end nearly in order, so that is a handful of pairs however long the run.
    """

    def __init__(self) -> None:
        self._live: dict[int, set[str]] = {}
        # Disjoint, sorted, never touching: [start, stop) of group indices.
        self._forgotten: list[list[int]] = []

    def __contains__(self, key: tuple[int, str]) -> bool:
        """`(group_index, trajectory_id)` was accepted, or its group is over."""
        group_index, trajectory_id = key
        return self.is_forgotten(group_index) or trajectory_id in self._live.get(group_index, ())

    def is_forgotten(self, group_index: int) -> bool:
        i = bisect.bisect_right(self._forgotten, group_index, key=lambda run: run[0]) - 1
        return i >= 0 and group_index < self._forgotten[i][1]

    @property
    def oldest(self) -> int:
        """The first group, from 0, that is not over."""
        i = bisect.bisect_right(self._forgotten, 0, key=lambda run: run[0]) - 1
        return max(0, self._forgotten[i][1]) if i >= 0 else 0

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
            runs = self._forgotten
            i = bisect.bisect_right(runs, group_index, key=lambda run: run[0])
            runs.insert(i, [group_index, group_index + 1])
            if i + 1 < len(runs) and runs[i + 1][0] == group_index + 1:
                runs[i][1] = runs.pop(i + 1)[1]
            if i > 0 and runs[i - 1][1] == group_index:
                runs[i - 1][1] = runs.pop(i)[1]
        return self._live.pop(group_index, set())

    def forget_live(self) -> None:
        """Only what is over stays known: of the rest, nothing has been kept, or what was kept is added again."""
        self._live.clear()

    @classmethod
    def over(cls, head: int, beyond: Sequence[int] = ()) -> Ledger:
        """All groups before `head` are over, and those `beyond` it."""
        ledger = cls()
        ledger._forgotten = [[0, head]] if head else []
        for group in beyond:
            ledger.forget(group)
        return ledger

    def snapshot(self) -> dict[str, Any]:
        """Plain data for a checkpoint; `restore` reads it."""
        return {
            "live": [[group, sorted(ids)] for group, ids in sorted(self._live.items())],
            "forgotten": [list(run) for run in self._forgotten],
        }

    @classmethod
    def restore(cls, snapshot: dict[str, Any]) -> Ledger:
        ledger = cls()
        ledger._live = {group: set(ids) for group, ids in snapshot["live"]}
        ledger._forgotten = [list(run) for run in snapshot["forgotten"]]
        return ledger
