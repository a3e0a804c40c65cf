"""Which group may be leased, and when: the bound on staleness.

A step consumes `P` groups, in lease order. There are `(S + 1) * P` slots. A group takes a slot when it is leased, and
its slot is free again only when weights trained from it are *installed in the engines*. Group `i` is trained in step
`i // P` (from version `i // P`) and can be leased only once version `i // P - S` is installed, so no token trained is
older than `S` versions. With `S = 0` training is exactly on-policy.

A lease stays its owner's until weights trained from it are installed: an owner that has finished a group may still die
with trajectories that the learner never got. Pure: no clock, no sockets. Owners are generators.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import msgspec


class GroupLease(msgspec.Struct, frozen=True):
    """Play the episodes `episode_indices` of group `group_index`, all with `task_seed`."""

    group_index: int
    task_seed: int
    episode_indices: tuple[int, ...]


class Admission:
    """Slots and leases. `task_seed(group_index)` names the task of a group."""

    def __init__(
        self,
        *,
        max_staleness: int,
        groups_per_step: int,
        samples_per_group: int,
        steps: int,
        task_seed: Callable[[int], int],
    ):
        if max_staleness < 0 or groups_per_step < 1 or samples_per_group < 1 or steps < 1:
            raise ValueError("max_staleness must be >= 0; groups_per_step, samples_per_group and steps >= 1")
        self.groups_per_step = groups_per_step
        self.samples_per_group = samples_per_group
        self.slots = (max_staleness + 1) * groups_per_step
        self.total_groups = steps * groups_per_step
        self._task_seed = task_seed
        self._next_group = 0
        self._installed = 0
        self._returned: list[tuple[int, tuple[int, ...]]] = []
        self._owner: dict[int, str] = {}

    @property
    def slots_taken(self) -> int:
        return self._next_group - min(self._next_group, self._installed * self.groups_per_step)

    @property
    def exhausted(self) -> bool:
        """Nothing is left to lease, now or later, whoever dies."""
        return self._installed * self.groups_per_step >= self.total_groups

    def can_lease(self) -> bool:
        return bool(self._returned) or (self._next_group < self.total_groups and self.slots_taken < self.slots)

    def lease(self, owner: str) -> GroupLease:
        """Lease the oldest group that waits. Raises `ValueError` if `can_lease()` is False."""
        if not self.can_lease():
            raise ValueError("no slot is free")
        if self._returned:
            group, episodes = heapq.heappop(self._returned)
        else:
            group, episodes = self._next_group, tuple(range(self.samples_per_group))
            self._next_group += 1
        self._owner[group] = owner
        return GroupLease(group, self._task_seed(group), episodes)

    def leases(self, owner: str) -> list[int]:
        """Groups leased to `owner` that are not trained and installed yet."""
        return sorted(g for g, who in self._owner.items() if who == owner)

    def lose(self, owner: str, missing: Callable[[int], Sequence[int]]) -> list[int]:
        """The owner died: its leases return, for the episodes that the learner still lacks. Returns those groups."""
        back = []
        for group in self.leases(owner):
            del self._owner[group]
            episodes = tuple(missing(group))
            if episodes:
                heapq.heappush(self._returned, (group, episodes))
                back.append(group)
        return back

    def installed(self, version: int) -> None:
        """Every live engine has `version`. Raises `ValueError` if versions go backwards."""
        if version < self._installed:
            raise ValueError(f"version {version} installed after {self._installed}")
        self._installed = version
        for group in [g for g in self._owner if g < version * self.groups_per_step]:
            del self._owner[group]
