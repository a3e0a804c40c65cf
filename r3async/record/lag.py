"""How late an event loop is: blocking work on it shows here, and nowhere else before everything is slow."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from r3async.world import Processes
from r3async.world.real import REAL

SAMPLES = 1200
"""Samples that are looked at together: a minute."""


class LagMeter:
    """Gathers how much later than asked a sleeping task wakes up. Figures are of the last minute."""

    NAMES = ("p50_ms", "p99_ms", "max_ms")

    def __init__(self, processes: Processes = REAL.processes):
        self._processes = processes
        self._lags: deque[float] = deque(maxlen=SAMPLES)
        self._end: Callable[[], None] | None = None

    def start(self) -> None:
        """Measure on the running event loop until `stop`. Idempotent."""
        if self._end is None:
            self._end = self._processes.measure_lag(self.add)

    def stop(self) -> None:
        if self._end is not None:
            self._end()
            self._end = None

    def add(self, seconds: float) -> None:
        self._lags.append(max(0.0, seconds))

    def figures(self) -> dict[str, float]:
        """`p50_ms`, `p99_ms`, `max_ms`; zeros before the first measurement."""
        lags = sorted(self._lags) or [0.0]

        def quantile(q: float) -> float:
            return 1000 * lags[round(q * (len(lags) - 1))]

        return {"p50_ms": quantile(0.5), "p99_ms": quantile(0.99), "max_ms": 1000 * lags[-1]}
