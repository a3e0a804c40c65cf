"""The order of tasks: which task the group of an index poses. Pure.

The data cursor needs no state but a group's index, and the group from which on each task is
quarantined.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from functools import lru_cache

import numpy as np


class TaskCursor:
    """The endless sequence of a run's tasks.

    The same `seed` and `size` give the same tasks, whatever was played before.

    Without a `size`, every group has a random task seed of `bits` bits. With one (an environment
    that knows how many tasks it has), group `g` belongs to epoch `g // size`, and its task seed is
    an index `0 .. size - 1`: every epoch poses every task once, in its own order. Groups of two
    epochs may be played at once; none waits for an epoch's end.

    `quarantined` maps a task seed to the first group that no longer poses that task. Such a group
    poses another task, drawn from the run's seed and the group's index. The mapping may grow, but
    only by groups that were never leased: the task of a leased group is fixed.
    """

    def __init__(
        self,
        seed: int,
        size: int | None = None,
        quarantined: Mapping[int, int] | None = None,
        *,
        bits: int = 63,
    ):
        if size is not None and size < 1:
            raise ValueError(f"an environment with `size` = {size} has no task")
        self.seed = seed
        self.size = size
        self._bits = bits
        self._quarantined = {} if quarantined is None else quarantined
        # Two epochs overlap in flight, or a few if they are short.
        self._epoch_order = lru_cache(maxsize=8)(self._shuffle_epoch)

    def pick_task(self, group_index: int) -> int:
        """Return the task of a group. Raises `ValueError` if every task is quarantined."""
        task = self._task_in_order(group_index)
        if not self._is_quarantined(task, group_index):
            return task
        if (
            self.size is not None
            and sum(self._is_quarantined(t, group_index) for t in self._quarantined) >= self.size
        ):
            raise ValueError(f"all {self.size} tasks of the environment are quarantined")
        return next(
            t
            for t in self._iter_substitutes(group_index)
            if not self._is_quarantined(t, group_index)
        )

    def iter_tasks(self, group_index: int) -> Iterator[int]:
        """Yield the group's task, and then others that could replace it, without end; none of
        them is quarantined."""
        yield self.pick_task(group_index)
        yield from (
            t
            for t in self._iter_substitutes(group_index)
            if not self._is_quarantined(t, group_index)
        )

    def _is_quarantined(self, task: int, group_index: int) -> bool:
        return self._quarantined.get(task, group_index + 1) <= group_index

    def _iter_substitutes(self, group_index: int) -> Iterator[int]:
        """Yield tasks in place of one that is quarantined, without end."""
        rng = random.Random(f"{self.seed}/instead/{group_index}")
        while True:
            yield (
                rng.getrandbits(self._bits) & ~1 if self.size is None else rng.randrange(self.size)
            )

    def _task_in_order(self, group_index: int) -> int:
        if self.size is None:
            return training_seed(self.seed, group_index, self._bits)
        epoch, position = divmod(group_index, self.size)
        return int(self._epoch_order(epoch)[position])

    def count_epochs(self, groups: int) -> float:
        """Return how often the first `groups` groups posed all tasks; 0 without a size."""
        return groups / self.size if self.size else 0.0

    def _shuffle_epoch(self, epoch: int) -> np.ndarray:
        assert self.size is not None
        seed = random.Random(f"{self.seed}/epoch {epoch}").getrandbits(64)
        return np.random.default_rng(seed).permutation(self.size)


def training_seed(seed: int, group_index: int, bits: int = 63) -> int:
    """Return the seed of the task that a group plays, in `0..2^bits - 1`."""
    return random.Random(f"{seed}/{group_index}").getrandbits(bits) & ~1


def evaluation_seed(seed: int, index: int) -> int:
    """Return the seed of the task of an evaluation's episode `index`; `seed` is
    `evaluation.seed`."""
    return random.Random(f"evaluation/{seed}/{index}").getrandbits(63) | 1
