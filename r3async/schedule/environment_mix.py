"""The mix of several environments: it chooses the one that poses the task of a group.

Pure: the choice depends only on the group's index, so a run that resumes continues with the same
tasks.

The order is the smoothest possible: in any stretch of groups, each environment has its share of
them, up to one or two groups. So every step trains all environments, as far as it has enough
groups.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from r3async.data.mixed import ENV_SEED_BITS, join_seed, split_seed
from r3async.schedule.tasks import TaskCursor

MAX_PERIOD = 1000
"""Number of groups after which the order repeats: weights are rounded to that. It is larger if a
weight is below 1/1000."""


class EnvironmentOrder:
    """The order of environments over groups, by weights. Immutable."""

    def __init__(self, weights: Sequence[float]):
        quotas = _round_quotas(weights)
        self.period = sum(quotas)
        chosen = np.zeros(self.period, np.int64)
        counts = [0] * len(quotas)
        for at in range(self.period):
            # The environment that is furthest behind its share.
            entry = max(
                range(len(quotas)),
                key=lambda e: (quotas[e] * (at + 1) - self.period * counts[e], -e),
            )
            chosen[at] = entry
            counts[entry] += 1
        self._chosen = chosen
        # [entry, at]: groups of the period before `at` that belong to the entry; the last
        # column is the quota.
        self._before = np.stack([np.append(0, np.cumsum(chosen == e)) for e in range(len(quotas))])

    def environment_of(self, group: int) -> int:
        """Return the number of the environment that poses the task of a group."""
        return int(self._chosen[group % self.period])

    def count_before(self, entry: int, group: int) -> int:
        """Return how many groups before `group` belong to environment number `entry`."""
        periods, at = divmod(group, self.period)
        return int(periods * self._before[entry, -1] + self._before[entry, at])


def _round_quotas(weights: Sequence[float]) -> list[int]:
    """Return how many groups of a period each environment has: at least one; the largest
    remainders are rounded up."""
    total = sum(weights)
    exact = [MAX_PERIOD * weight / total for weight in weights]
    quotas = [max(1, math.floor(share)) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda e: (math.floor(exact[e]) - exact[e], e))
    for entry in by_remainder[: max(0, MAX_PERIOD - sum(quotas))]:
        quotas[entry] += 1
    common = math.gcd(*quotas)
    return [quota // common for quota in quotas]


class _EnvironmentQuarantine(Mapping[int, int]):
    """A view of the quarantined tasks of one environment, among those of all.

    It maps the environment's own seed of a task to the first of its own groups that no
    longer poses the task.
    """

    def __init__(
        self,
        environment: int,
        order: EnvironmentOrder,
        entries: int,
        quarantined: Mapping[int, int],
    ):
        self._entry = environment
        self._order = order
        self._entries = entries
        self._all = quarantined

    def __getitem__(self, seed: int) -> int:
        return self._order.count_before(self._entry, self._all[join_seed(self._entry, seed)])

    def __iter__(self) -> Iterator[int]:
        parts = (split_seed(task, self._entries) for task in self._all)
        return (seed for entry, seed in parts if entry == self._entry)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class MixedTaskCursor:
    """A `TaskCursor` over several environments with these `weights` and `sizes`.

    Each environment has its own tasks, epochs and quarantined tasks, in the order
    of its own groups.
    """

    def __init__(
        self,
        seed: int,
        weights: Sequence[float],
        sizes: Sequence[int | None],
        quarantined: Mapping[int, int] | None = None,
    ):
        self._order = EnvironmentOrder(weights)
        known = {} if quarantined is None else quarantined
        self._cursors = [
            TaskCursor(
                random.Random(f"{seed}/environment {entry}").getrandbits(63),
                size,
                _EnvironmentQuarantine(entry, self._order, len(weights), known),
                bits=ENV_SEED_BITS,
            )
            for entry, size in enumerate(sizes)
        ]

    def pick_task(self, group_index: int) -> int:
        """Return the task of a group. Raises `ValueError` if every task of the group's
        environment is quarantined."""
        entry = self._order.environment_of(group_index)
        return join_seed(
            entry, self._cursors[entry].pick_task(self._order.count_before(entry, group_index))
        )

    def iter_tasks(self, group_index: int) -> Iterator[int]:
        """Return the tasks of `TaskCursor.iter_tasks` for the group's environment."""
        entry = self._order.environment_of(group_index)
        own = self._cursors[entry].iter_tasks(self._order.count_before(entry, group_index))
        return (join_seed(entry, task) for task in own)

    def count_epochs(self, groups: int) -> list[float]:
        """Return, by environment, how often the first `groups` groups posed all its tasks;
        0 without a size."""
        return [
            cursor.count_epochs(self._order.count_before(entry, groups))
            for entry, cursor in enumerate(self._cursors)
        ]
