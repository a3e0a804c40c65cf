"""What both sides of `bench transport` measure with: a trajectory of a size, the event loop's lag, memory."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import numpy as np

from r3async.data.records import Trajectory
from r3async.tools.bench.wire import sampled_trajectory

TICK = 0.001
ROUTES = (48, 8)
DENSE_BELOW = 100_000


def specimen(nbytes: int) -> Trajectory:
    """About `nbytes` on the wire: dense if it is small, with 48x8 routes otherwise."""
    if nbytes < DENSE_BELOW:
        return sampled_trajectory(max(1, (nbytes - 1000) // 8))
    return sampled_trajectory(max(1, nbytes // 392), routes=ROUTES)


class Lag:
    """How late a sleep of one millisecond ends, over and over: what anything else on this event loop has to wait.

    `own` is the part of it that the loop's own thread was computing, and not waiting for a processor that others had.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.own: list[float] = []
        self.at: list[float] = []
        """When each sleep ended."""

    async def __aenter__(self) -> Lag:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _watch(self) -> None:
        computed = time.thread_time()
        while True:
            began = time.perf_counter()
            await asyncio.sleep(TICK)
            self.at.append(time.perf_counter())
            self.seconds.append(self.at[-1] - began - TICK)
            before, computed = computed, time.thread_time()  # once a tick: this clock can take 50 µs to read
            self.own.append(computed - before)

    def between(self, began: float, ended: float) -> tuple[list[float], list[float]]:
        """What is reported of lag and own lag, of the ticks that ended then: milliseconds, median, 99th percentile, maximum."""
        chosen = [i for i, at in enumerate(self.at) if began <= at <= ended]
        return _summary([self.seconds[i] for i in chosen]), _summary([self.own[i] for i in chosen])


def _summary(seconds: list[float]) -> list[float]:
    if not seconds:
        return []
    late = np.array(seconds) * 1e3
    return [float(np.median(late)), float(np.percentile(late, 99)), float(late.max())]


def reset_high_water() -> None:
    """Forget the process's highest resident size, where the kernel allows it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def high_water_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024
