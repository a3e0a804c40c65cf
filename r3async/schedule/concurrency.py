"""How many episodes a generator plays at once: as many as its engine's KV cache carries.

Additive increase, multiplicative decrease, as TCP finds the width of a path (Chiu and Jain 1989). An engine whose cache is
full preempts requests and computes them again: work done twice, and answers that grow old. Pure; the clock is injected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

HIGH_USAGE = 0.95
"""Share of the KV cache above which no further episode is begun."""
LOW_USAGE = 0.85
"""Share of the KV cache below which the limit may rise."""
DECREASE = 0.75
INCREASE = 1 / 16
"""Of the most episodes, for each look at the engine."""
SECONDS_BETWEEN = 2.0
"""Between two changes: the engine must have felt the last one."""


class Concurrency:
    """The limit, between `least` and `most`; it begins at `most`.

    An engine that reports no `kv_cache_usage` is left at `most`.
    """

    def __init__(self, least: int, most: int, clock: Callable[[], float]):
        self.least, self.most, self.limit = least, most, most
        self._clock = clock
        self._changed_at = clock()
        self._preemptions = 0.0
        self._preempted = False
        """Since the last look that could change the limit."""

    def observe(self, stats: Mapping[str, float], playing: int) -> int:
        """Look at the engine while `playing` episodes run; returns the limit from now on.

        `stats`: `kv_cache_usage` (0..1), `preemptions` (a counter) and `waiting` (requests in the engine's queue).
        """
        usage, preemptions = stats.get("kv_cache_usage"), stats.get("preemptions", 0)
        if usage is None:
            return self.limit
        self._preempted |= preemptions > self._preemptions
        self._preemptions = preemptions
        now = self._clock()
        if now - self._changed_at < SECONDS_BETWEEN:
            return self.limit
        pressed, self._preempted = self._preempted, False
        old = self.limit
        if playing > self.limit:
            pass  # the last cut is still to be felt
        elif pressed or (usage > HIGH_USAGE and stats.get("waiting", 0) > 0):
            self.limit = max(self.least, int(playing * DECREASE))
        elif usage < LOW_USAGE and playing >= self.limit:
            self.limit = min(self.most, self.limit + max(1, int(self.most * INCREASE)))
        if self.limit != old:
            self._changed_at = now
        return self.limit
