"""Trajectories that arrived, gathered into groups and handed over in lease order."""

from __future__ import annotations

import numpy as np

from r3async.config import Config
from r3async.engines.base import RoutingShape
from r3async.records import SCHEMA, Trajectory

HEADER_BYTES = 4096
"""Allowed for what is not token data in one trajectory."""


def largest_buffer(config: Config, routing: RoutingShape | None) -> int:
    """Bytes of all trajectories that the slots allow, each as long as it may be.

    Groups are consumed in lease order. With less credit than this, later groups could hold all of it while the oldest one
    waits to be sent, and nothing would ever move again.
    """
    sizes = {"layers": routing.layers if routing else 0, "top_k": routing.top_k if routing else 0}
    wide = routing is not None and routing.num_experts > 256
    per_token = 0
    for column in SCHEMA.columns.values():
        count = 1
        for dimension in column.inner:
            count *= sizes[dimension]
        per_token += count * np.dtype(column.dtypes[-1 if wide else 0]).itemsize
    schedule = config.schedule
    groups = (schedule.max_staleness + 1) * schedule.groups_per_step * schedule.steps_per_publication
    episodes = groups * schedule.samples_per_group
    return episodes * (config.episode.max_total_tokens * per_token + HEADER_BYTES)


class GroupBuffer:
    """Holds at most what the slots allow: groups `next_group ..`. Pure; the receiver and the learner share it."""

    def __init__(self, samples_per_group: int):
        self.samples_per_group = samples_per_group
        self.next_group = 0
        """The oldest group not taken yet."""
        self._groups: dict[int, dict[int, tuple[Trajectory, int]]] = {}

    def add(self, trajectory: Trajectory, nbytes: int) -> bool:
        """False if that episode is here, or was trained, already. Raises `ValueError` for an index out of range."""
        if not 0 <= trajectory.episode_index < self.samples_per_group:
            raise ValueError(f"episode {trajectory.episode_index} of a group of {self.samples_per_group}")
        if trajectory.group_index < self.next_group:
            return False
        group = self._groups.setdefault(trajectory.group_index, {})
        if trajectory.episode_index in group:
            return False
        group[trajectory.episode_index] = (trajectory, nbytes)
        return True

    def missing(self, group_index: int) -> list[int]:
        """Episodes of the group that have not arrived; none for a group that was trained."""
        if group_index < self.next_group:
            return []
        have = self._groups.get(group_index, {})
        return [i for i in range(self.samples_per_group) if i not in have]

    def enough(self, at_least: int, at_most: int, tokens: int) -> int:
        """How many of the next groups make a batch: `at_least`, and more until they have `tokens` trainable tokens or are
        `at_most`. 0 while one of those is not complete."""
        held = 0
        for count in range(1, at_most + 1):
            if self.missing(self.next_group + count - 1):
                return 0
            members = self._groups[self.next_group + count - 1].values()
            held += sum(int(s.table["loss_mask"].sum()) for t, _ in members for s in t.samples) if tokens else 0
            if count >= at_least and held >= tokens:
                return count
        return at_most

    def ready_groups(self) -> int:
        """Complete groups, in or out of order."""
        return sum(len(g) == self.samples_per_group for g in self._groups.values())

    def take(self, count: int) -> tuple[list[list[Trajectory]], int]:
        """The next `count` groups, episodes in order, and their bytes on the wire."""
        if any(self.missing(self.next_group + i) for i in range(count)):
            raise ValueError(f"groups {self.next_group}..{self.next_group + count - 1} are not complete")
        groups, nbytes = [], 0
        for _ in range(count):
            members = self._groups.pop(self.next_group)
            groups.append([members[i][0] for i in range(self.samples_per_group)])
            nbytes += sum(size for _, size in members.values())
            self.next_group += 1
        return groups, nbytes
