"""Which group may be leased, and when: the bound on staleness.

A version of the weights is made by `K` steps, each of which consumes at least `P` groups, in lease order. There are
`(S + 1) * P * K` **slots**. A group takes a slot when it is leased, and its slot is free again only when weights trained
from it are *installed in the engines*. So a group that is leased while version `v` is installed has fewer than
`(S + 1) * P * K` groups before it that `v` was not trained from. As every version consumes at least `P * K` of them, the
group is trained from version `v + S` at the latest: no token trained is older than `S` versions. With `S = 0` training is
exactly on-policy.

A step may take more than `P` groups (until it has enough tokens), but never so many that a later step of the same version
would have to wait for groups that can not be leased yet: `most_groups`.

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


def most_groups(*, slots: int, groups_per_step: int, steps_left: int, consumed_since: int) -> int:
    """Groups that the next step may take at most without waiting for ever.

    `consumed_since`: groups that steps took since the last version was published. `steps_left`: steps until the next one,
    this one included: each of the others needs `groups_per_step`.
    """
    return slots - consumed_since - groups_per_step * (steps_left - 1)


class Admission:
    """Slots and leases. `task_seed(group_index)` names the task of a group. `total_groups`: where leasing ends, if known."""

    def __init__(
        self,
        *,
        max_staleness: int,
        groups_per_step: int,
        samples_per_group: int,
        task_seed: Callable[[int], int],
        steps_per_publication: int = 1,
        total_groups: int | None = None,
    ):
        if max_staleness < 0 or min(groups_per_step, samples_per_group, steps_per_publication) < 1:
            raise ValueError(
                "max_staleness must be >= 0; groups_per_step, samples_per_group and steps_per_publication >= 1"
            )
        self.samples_per_group = samples_per_group
        self.slots = (max_staleness + 1) * groups_per_step * steps_per_publication
        self.total_groups = total_groups
        self._task_seed = task_seed
        self._next_group = 0
        self._consumed = 0
        self._version = 0
        self._returned: list[tuple[int, tuple[int, ...]]] = []
        self._owner: dict[int, str] = {}

    @property
    def slots_taken(self) -> int:
        return self._next_group - self._consumed

    @property
    def exhausted(self) -> bool:
        """Nothing is left to lease, now or later, whoever dies."""
        return self.total_groups is not None and self._consumed >= self.total_groups

    def can_lease(self) -> bool:
        more = self.total_groups is None or self._next_group < self.total_groups
        return bool(self._returned) or (more and self.slots_taken < self.slots)

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

    def installed(self, version: int, consumed: int) -> None:
        """Every live engine has `version`, which was trained from the first `consumed` groups.

        Raises `ValueError` if versions or groups go backwards, or groups were consumed that nobody leased.
        """
        if version < self._version or consumed < self._consumed:
            raise ValueError(
                f"version {version} of {consumed} groups installed after version {self._version} of {self._consumed}"
            )
        if consumed > self._next_group:
            raise ValueError(f"{consumed} groups were consumed, but only {self._next_group} leased")
        self._version, self._consumed = version, consumed
        for group in [g for g in self._owner if g < consumed]:
            del self._owner[group]
