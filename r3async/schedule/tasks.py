"""Which task a group poses: the data cursor. Pure: a group's index, and from where tasks are quarantined, say everything."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from functools import lru_cache

import numpy as np


class Cursor:
    """Tasks of a run, for ever. The same `seed` and `size` name the same tasks, whatever was played before.

    Without a `size`, every group has a random task seed of 63 bits. With one (an environment that knows how many tasks
    it has), group `g` is of epoch `g // size`, and its task seed is an index `0 .. size - 1`: every epoch poses every task
    once, in an order of its own. Groups of two epochs may be played at once; nothing waits for an epoch's end.

    `quarantined`: by task seed, the first group that does not pose that task any more. Such a group poses another task, drawn
    from the run's seed and its index. It may grow, but only by groups that were never leased: what a group poses is fixed.
    """

    def __init__(self, seed: int, size: int | None = None, quarantined: Mapping[int, int] | None = None):
        if size is not None and size < 1:
            raise ValueError(f"an environment with `size` = {size} has no task")
        self.seed, self.size = seed, size
        self._quarantined = {} if quarantined is None else quarantined
        # Two epochs overlap in flight, or a few if they are short.
        self._order = lru_cache(maxsize=8)(self._shuffled)

    def task_seed(self, group_index: int) -> int:
        """Raises `ValueError` if every task is quarantined."""
        task = self._in_order(group_index)
        if not self._skipped(task, group_index):
            return task
        if self.size is not None and sum(self._skipped(t, group_index) for t in self._quarantined) >= self.size:
            raise ValueError(f"all {self.size} tasks of the environment are quarantined")
        return next(t for t in self._others(group_index) if not self._skipped(t, group_index))

    def _skipped(self, task: int, group_index: int) -> bool:
        return self._quarantined.get(task, group_index + 1) <= group_index

    def _others(self, group_index: int) -> Iterator[int]:
        """Tasks in place of one that is quarantined, without end."""
        rng = random.Random(f"{self.seed}/instead/{group_index}")
        while True:
            yield rng.getrandbits(63) & ~1 if self.size is None else rng.randrange(self.size)

    def _in_order(self, group_index: int) -> int:
        if self.size is None:
            return training_seed(self.seed, group_index)
        epoch, position = divmod(group_index, self.size)
        return int(self._order(epoch)[position])

    def epochs(self, groups: int) -> float:
        """How often all tasks were posed by the first `groups` groups; 0 without a size."""
        return groups / self.size if self.size else 0.0

    def _shuffled(self, epoch: int) -> np.ndarray:
        assert self.size is not None
        seed = random.Random(f"{self.seed}/epoch {epoch}").getrandbits(64)
        return np.random.default_rng(seed).permutation(self.size)


def training_seed(seed: int, group_index: int) -> int:
    """Seed of the task that a group plays, in `0..2^63 - 1`."""
    return random.Random(f"{seed}/{group_index}").getrandbits(63) & ~1


def evaluation_seed(seed: int, index: int) -> int:
    """Seed of the task of an evaluation's episode `index`; `seed` is `evaluation.seed`."""
    return random.Random(f"evaluation/{seed}/{index}").getrandbits(63) | 1
