"""Metrics of a process's time: its stages' seconds, and how late its event loop is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from r3async.world import Processes
from r3async.world.real import REAL_WORLD

LAG_WINDOW_SAMPLES = 1200
"""Number of event loop lag samples in the window of `LagMeter`: one minute."""


# -- processor time --------------------------------------------------------------------------------


class CounterGrowth:
    """The growth of process counters since each was first read.

    A counter that restarts with its process counts from the first value read after the restart.
    """

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self.totals: dict[str, float] = {}

    def add(self, name: str, value: float, role: str) -> None:
        """Record that the counter `name` is now at `value`, and add its growth to the
        total of `role`."""
        before = self._last.get(name, value)
        self._last[name] = value
        self.totals[role] = self.totals.get(role, 0.0) + max(0.0, value - before)


class StageTimer:
    """The time that this process spends in each stage (`world/stages.py`), as
    metrics of its `role`.

    `cpu/ROLE_STAGE_seconds` add up to the processor time of the process; `wall/ROLE_STAGE_seconds`
    are wall times of its event loop.
    """

    def __init__(self, role: str, processes: Processes = REAL_WORLD.processes):
        self._role = role
        self._processes = processes
        self._last_totals: dict[str, float] = {}

    def total_seconds(self) -> dict[str, float]:
        """Return the seconds since the event loop was first measured; a simulated
        process has none."""
        kinds = zip(("cpu", "wall"), self._processes.stage_seconds(), strict=True)
        return {
            f"{kind}/{self._role}_{name}_seconds": seconds
            for kind, spent in kinds
            for name, seconds in spent.items()
        }

    def read_increment(self) -> dict[str, float]:
        """Return the seconds spent since the last call."""
        before = self._last_totals
        self._last_totals = self.total_seconds()
        return {
            name: seconds - before.get(name, 0.0) for name, seconds in self._last_totals.items()
        }


# -- event loops -----------------------------------------------------------------------------------


class LagMeter:
    """A meter of event loop lag over the last minute: how late a sleeping task wakes up.

    `own` lag is the part during which the loop's thread was computing. While it measures, the
    loop's time is also booked to stages.
    """

    METRIC_NAMES = ("p50_ms", "p99_ms", "max_ms", "own_p99_ms", "own_max_ms")

    def __init__(self, processes: Processes = REAL_WORLD.processes):
        self._processes = processes
        self._lags: deque[float] = deque(maxlen=LAG_WINDOW_SAMPLES)
        self._computing: deque[float] = deque(maxlen=LAG_WINDOW_SAMPLES)
        self._stop_measuring: Callable[[], None] | None = None

    def start(self) -> None:
        """Measure on the running event loop until `stop`. Idempotent."""
        if self._stop_measuring is None:
            self._stop_measuring = self._processes.measure_event_loop(self.add)

    def stop(self) -> None:
        if self._stop_measuring is not None:
            self._stop_measuring()
            self._stop_measuring = None

    def add(self, seconds: float, computing_seconds: float = 0.0) -> None:
        self._lags.append(max(0.0, seconds))
        self._computing.append(max(0.0, computing_seconds))

    def collect_metrics(self) -> dict[str, float]:
        """Return the lag in milliseconds by `METRIC_NAMES`; zeros before the first measurement."""
        lags = sorted(self._lags) or [0.0]
        own = sorted(self._computing) or [0.0]

        def quantile(values: list[float], q: float) -> float:
            return 1000 * values[round(q * (len(values) - 1))]

        found = (
            quantile(lags, 0.5),
            quantile(lags, 0.99),
            quantile(lags, 1.0),
            quantile(own, 0.99),
            quantile(own, 1.0),
        )
        return dict(zip(self.METRIC_NAMES, found, strict=True))
