"""The ledger of accepted trajectories, which makes redelivery harmless."""

from __future__ import annotations

import sys

from r3async.data.consumed_groups import ConsumedGroups


class TrajectoryLedger:
    """The ids of accepted trajectories, by group that is not over.

    Args:
        consumed: The groups that are over, shared by the owner that consumes them; by default the
            ledger keeps its own, in which groups may end in any order.
    """

    def __init__(self, consumed: ConsumedGroups | None = None) -> None:
        self._consumed = ConsumedGroups(window=sys.maxsize) if consumed is None else consumed
        self._accepted_ids: dict[int, set[str]] = {}

    def __contains__(self, key: tuple[int, str]) -> bool:
        """Return True if `(group_index, trajectory_id)` was accepted, or its group is over."""
        group_index, trajectory_id = key
        return self.is_group_consumed(group_index) or trajectory_id in self._accepted_ids.get(
            group_index, ()
        )

    def is_group_consumed(self, group_index: int) -> bool:
        return group_index in self._consumed

    @property
    def oldest_group(self) -> int:
        """The first group that is not over."""
        return self._consumed.head

    def add(self, group_index: int, trajectory_id: str) -> None:
        if not self.is_group_consumed(group_index):
            self._accepted_ids.setdefault(group_index, set()).add(trajectory_id)

    def forget_group(self, group_index: int) -> set[str]:
        """Mark a group as over, so that whatever still arrives for it is a duplicate. Returns the
        ids it had. Idempotent."""
        if not self.is_group_consumed(group_index):
            self._consumed.add(group_index)
        return self._accepted_ids.pop(group_index, set())

    def forget_unconsumed(self) -> None:
        """Forget all ids of groups that are not over: nothing of them has been kept, or what was
        kept is added again."""
        self._accepted_ids.clear()
