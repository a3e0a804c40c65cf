"""The buffer that gathers trajectories into groups and hands these over in lease order,
within a window."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from r3async.config import Config
from r3async.data.consumed_groups import ConsumedGroups
from r3async.data.model_shape import RoutingShape
from r3async.data.tokens import SCHEMA, Trajectory
from r3async.data.wire import MAX_HEADER_BYTES
from r3async.schedule.run_ahead import count_slots

TRAJECTORY_HEADER_BYTES = 4096
"""Bytes allowed for everything but token data in one trajectory."""


def max_trajectory_bytes(config: Config, routing: RoutingShape | None) -> int:
    """Return the bytes that one trajectory may take in memory: every turn a separate row, each as
    long as it may be."""
    if config.episode.truncates_sampling:
        # A support takes up to a bit for each token of the vocabulary.
        return config.transport.max_message_bytes
    rows = config.episode.max_turns * config.episode.max_total_tokens * _bytes_per_token(routing)
    return min(config.transport.max_message_bytes, rows + MAX_HEADER_BYTES)


def max_buffer_bytes(config: Config, routing: RoutingShape | None) -> int:
    """Return the bytes of all trajectories that the slots allow, each as long as it may be.

    With less credit than this, groups that are not trained yet could hold all of it while the group
    to be trained next waits to be sent: a deadlock. The window does not matter, because a group
    that is overtaken keeps its slot.
    """
    schedule = config.schedule
    groups = count_slots(schedule)
    episodes = groups * schedule.group_size
    per_token = _bytes_per_token(routing, config.episode.truncates_sampling)
    return episodes * (config.episode.max_total_tokens * per_token + TRAJECTORY_HEADER_BYTES)


SUPPORT_BYTES_PER_TOKEN = 64
"""Bytes of a token's support, where it is recorded: about twice of what top-p 0.95 leaves."""


def _bytes_per_token(routing: RoutingShape | None, supports: bool = False) -> int:
    sizes = routing.column_sizes if routing else {}
    wide = routing is not None and routing.num_experts > 256
    per_token = 0
    for column in SCHEMA.columns.values():
        if column.holds_sets:
            per_token += SUPPORT_BYTES_PER_TOKEN * supports
            continue
        count = 1
        for dimension in column.inner_dims:
            count *= sizes.get(dimension, 0)
        per_token += count * np.dtype(column.dtypes[-1 if wide else 0]).itemsize
    return per_token


class GroupBuffer:
    """The buffer of groups that wait for the learner: at most as many as the slots allow.

    Pure; the receiver and the learner share it.
    """

    def __init__(
        self, group_size: int, window: int = 1, *, head: int = 0, beyond: Sequence[int] = ()
    ):
        """Create an empty buffer.

        `head` and `beyond` are the groups that a resumed run has trained already; see
        `ConsumedGroups`.
        """
        self.group_size = group_size
        self._consumed = ConsumedGroups(window, head, beyond)
        self._groups: dict[int, dict[int, tuple[Trajectory, int]]] = {}
        self._counted_groups: dict[int, bool] = {}
        """Results of `counts_group` in `choose_groups`, by complete group."""

    @property
    def oldest_group(self) -> int:
        """The oldest group not taken yet: all others that may be taken are within the
        window from here."""
        return self._consumed.head

    @property
    def consumed(self) -> ConsumedGroups:
        """The groups that were taken. This is the only record of them in the learner; the
        receiver reads it too."""
        return self._consumed

    @property
    def newest_group(self) -> int:
        """The newest group of which any trajectory has arrived and that is not taken; -1
        if there is none."""
        return max(self._groups, default=-1)

    def needs_trajectory(self, trajectory: Trajectory) -> bool:
        """Return whether the episode is neither here nor trained. Raises `ValueError` for an
        index out of range."""
        group = trajectory.group_index
        episode = trajectory.episode_index
        if not 0 <= episode < self.group_size:
            raise ValueError(f"episode {episode} of a group of {self.group_size}")
        return group not in self._consumed and episode not in self._groups.get(group, {})

    def add(self, trajectory: Trajectory, nbytes: int) -> bool:
        """Add a trajectory if it is needed, and return whether it was. Raises what
        `needs_trajectory` raises."""
        if not self.needs_trajectory(trajectory):
            return False
        self._groups.setdefault(trajectory.group_index, {})[trajectory.episode_index] = (
            trajectory,
            nbytes,
        )
        return True

    def missing_in_group(self, group_index: int) -> list[int]:
        """Return the episodes of the group that have not arrived; none for a group
        that was trained."""
        if group_index in self._consumed:
            return []
        have = self._groups.get(group_index, {})
        return [i for i in range(self.group_size) if i not in have]

    def list_task_seeds(self) -> dict[int, int]:
        """Return the task seed of each group of which any trajectory has arrived and
        that is not taken."""
        return {
            group: next(iter(held.values()))[0].task_seed
            for group, held in sorted(self._groups.items())
            if held
        }

    def is_complete(self, group_index: int) -> bool:
        """Return whether no episode of the group is missing."""
        return (
            group_index in self._consumed
            or len(self._groups.get(group_index, ())) == self.group_size
        )

    def choose_groups(
        self,
        at_least: int,
        at_most: int,
        min_tokens: int,
        counts_group: Callable[[Sequence[Trajectory]], bool] | None = None,
    ) -> list[int]:
        """Return the groups that make a batch, in order; none while there are not enough of them.

        Each is the oldest complete group within the window.

        Args:
            at_least: Minimum number of groups.
            at_most: Maximum number of groups.
            min_tokens: Number of trainable tokens up to which further groups are added.
            counts_group: Function that returns whether a group counts towards `at_least`; called
                once for each group.
        """
        chosen: list[int] = []
        held = counted = 0
        for group in itertools.islice(self._consumed.trainable_groups(self.is_complete), at_most):
            chosen.append(group)
            members = self._groups[group].values()
            held += (
                sum(int(s.table["loss_mask"].sum()) for t, _ in members for s in t.samples)
                if min_tokens
                else 0
            )
            counted += counts_group is None or self._group_counts(group, counts_group)
            if len(chosen) == at_most or (counted >= at_least and held >= min_tokens):
                return chosen
        return []

    def _group_counts(self, group: int, counts: Callable[[Sequence[Trajectory]], bool]) -> bool:
        if group not in self._counted_groups:
            self._counted_groups[group] = counts(self.episodes_of([group])[0])
        return self._counted_groups[group]

    def missing_episodes(self, groups: int) -> dict[int, list[int]]:
        """Return the missing episodes, by group, of the oldest `groups` groups
        that are not taken."""
        oldest = itertools.islice(self._consumed.untrained_groups(), groups)
        return {g: missing for g in oldest if (missing := self.missing_in_group(g))}

    def count_ready_groups(self) -> int:
        """Return the number of complete groups, in or out of order."""
        return sum(map(self.is_complete, self._groups))

    def take_groups(self, groups: Sequence[int]) -> list[list[Trajectory]]:
        """Consume these groups, in this order, and return their episodes in order.

        Raises `ValueError`, and takes nothing, if a group is not complete, was taken before, or is
        beyond the window.
        """
        incomplete = [g for g in groups if self.missing_in_group(g)]
        if incomplete:
            raise ValueError(f"groups {incomplete} are not complete")
        self._consumed.add_groups(groups)
        episodes = self.episodes_of(groups)
        for group in groups:
            del self._groups[group]
            self._counted_groups.pop(group, None)
        return episodes

    def episodes_of(self, groups: Sequence[int]) -> list[list[Trajectory]]:
        """Return the episodes of complete groups as `take_groups` does, and leave the
        groups in the buffer."""
        return [[self._groups[group][i][0] for i in range(self.group_size)] for group in groups]
