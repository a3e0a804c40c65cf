"""How many episodes may fail for good before the run stops. Pure."""

from __future__ import annotations

from collections import deque

RECENT = 100
"""Episodes that the fraction is taken over; fewer at the beginning count as `FEWEST`."""
FEWEST = 20


class FailureBudget:
    """Counts episodes that ended and those of them that failed, after all their retries.

    `limit`: the fraction of the last `RECENT` that may fail. An environment that always fails is over it after
    `limit * FEWEST + 1` episodes; one that fails now and then never is.
    """

    def __init__(self, limit: float):
        if not 0 <= limit <= 1:
            raise ValueError(f"a fraction of failed episodes is in 0..1, got {limit}")
        self.limit = limit
        self.failed = 0
        """Since the beginning."""
        self._recent: deque[bool] = deque(maxlen=RECENT)

    def ended(self, *, failed: bool) -> bool:
        """An episode is over. Returns whether too many have failed."""
        self._recent.append(failed)
        self.failed += failed
        return failed and sum(self._recent) > self.limit * max(len(self._recent), FEWEST)

    def describe(self) -> str:
        return f"{sum(self._recent)} of the last {len(self._recent)} episodes failed"
