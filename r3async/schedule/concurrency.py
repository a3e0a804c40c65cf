"""The number of episodes that a generator plays at once. Pure: the clock is an argument."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from r3async.config import ScheduleConfig


def useful_concurrency(schedule: ScheduleConfig, generators: int) -> float:
    """Return how many episodes the slots let each generator play while the groups of one version
    are being trained.

    This is `max(S, 1) * P * K * G / generators`. Places beyond it cannot be filled for long, and do
    not count as idle.
    """
    groups = (
        max(schedule.max_staleness, 1) * schedule.prompts_per_step * schedule.steps_per_publication
    )
    return groups * schedule.group_size / generators


HIGH_CACHE_USAGE = 0.95
"""Share of the KV cache above which the limit is lowered, if requests wait in
the engine's queue."""
LOW_CACHE_USAGE = 0.85
"""Share of the KV cache below which the limit may rise."""
DECREASE_FACTOR = 0.75
INCREASE_SHARE = 1 / 16
"""Share of the maximum number of episodes by which the limit may rise at each
look at the engine."""
MIN_CHANGE_SECONDS = 2.0
"""Minimum seconds between two changes, so that the last one has had its effect on the engine."""


class ConcurrencyLimiter:
    """Controller of the number of episodes that a generator plays at once.

    The limit is between `min_limit` and `max_limit`, and begins at `max_limit`. It follows additive
    increase, multiplicative decrease, as TCP finds the width of a path (Chiu and Jain 1989). An
    engine whose cache is full preempts requests and computes them again: the work is done twice,
    and answers grow old. An engine that reports no `kv_cache_usage` is left at `max_limit`.
    """

    def __init__(self, min_limit: int, max_limit: int, clock: Callable[[], float]):
        self.min_limit = min_limit
        self.max_limit = max_limit
        self.limit = max_limit
        self._clock = clock
        self._changed_at = clock()
        self._preemptions = 0.0
        self._has_preempted = False
        """True if requests were preempted since the last look that could change the limit."""

    def update_limit(self, stats: Mapping[str, float], playing: int) -> int:
        """Look at the engine while `playing` episodes run, and return the limit from now on.

        `stats` has `kv_cache_usage` (0..1), `preemptions` (a counter) and `waiting` (requests in
        the engine's queue).
        """
        usage = stats.get("kv_cache_usage")
        preemptions = stats.get("preemptions", 0)
        if usage is None:
            return self.limit
        self._has_preempted |= preemptions > self._preemptions
        self._preemptions = preemptions
        now = self._clock()
        if now - self._changed_at < MIN_CHANGE_SECONDS:
            return self.limit
        pressed = self._has_preempted
        self._has_preempted = False
        old = self.limit
        if playing > self.limit:
            pass  # the last cut has not taken effect yet
        elif pressed or (usage > HIGH_CACHE_USAGE and stats.get("waiting", 0) > 0):
            self.limit = max(self.min_limit, int(playing * DECREASE_FACTOR))
        elif usage < LOW_CACHE_USAGE and playing >= self.limit:
            self.limit = min(
                self.max_limit, self.limit + max(1, int(self.max_limit * INCREASE_SHARE))
            )
        if self.limit != old:
            self._changed_at = now
        return self.limit
