"""Parts that all fuzzers share: the report, a trajectory to mutate, and mutations of bytes."""

from __future__ import annotations

import gc
import random
import resource
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from r3async.data.tokens import SCHEMA, Sample, TokenTable, Trajectory, Turn

WARM_SHARE = 0.2
"""Share of the inputs after which memory growth is measured: caches and pools
have filled by then."""


class FuzzReport(msgspec.Struct, frozen=True):
    """The result of fuzzing one reader.

    Attributes:
        slowest: Maximum seconds that one input took.
        growth_mib: Growth of the process in MiB after the first fifth of the inputs.
        outcomes: Count of each outcome.
    """

    inputs: int
    seconds: float
    slowest: float
    growth_mib: float
    outcomes: dict[str, int]


class InputMonitor:
    """A monitor of `count` inputs: the time that each takes, its outcome, and the
    growth of the process."""

    def __init__(self, count: int):
        self.outcomes: Counter[str] = Counter()
        self._count = count
        self._done = 0
        self._slowest = 0.0
        self._warm = 0
        self._began = time.perf_counter()

    @contextmanager
    def measure_input(self) -> Iterator[None]:
        """Measure the handling of one input."""
        began = time.perf_counter()
        yield
        self._slowest = max(self._slowest, time.perf_counter() - began)
        if self._done == int(self._count * WARM_SHARE):
            self._warm = resident_bytes()
        self._done += 1

    def make_report(self) -> FuzzReport:
        seconds = time.perf_counter() - self._began
        return FuzzReport(
            self._count,
            seconds,
            self._slowest,
            (resident_bytes() - self._warm) / 2**20,
            dict(self.outcomes),
        )


def make_specimen(
    seed: int, lengths: tuple[int, ...], routes: tuple[int, int] = (3, 2)
) -> Trajectory:
    """Return a trajectory to mutate, with random columns, nearly constant ones, and routes of
    shape `[n, *routes]`.

    `lengths` has the number of tokens of each sample.
    """
    rng = np.random.default_rng(seed)
    samples = []
    for i, n in enumerate(lengths):
        table = {
            c.name: c.filled_rows(n, routes[: len(c.inner_dims)]) for c in SCHEMA.columns.values()
        }
        table["token_ids"] = rng.integers(0, 1000, n, dtype=np.int32)
        table["rollout_logprobs"] = -rng.random(n, dtype=np.float32)
        table["loss_mask"] = np.arange(n) > n // 2
        table["routing_recorded"] = rng.random(n) < 0.5
        samples.append(Sample(f"s{i}", TokenTable(table), 0.7))
    turns = [Turn(i, i, 0, n, 0.5, "eos") for i, n in enumerate(lengths)]
    return Trajectory(
        f"t{seed}", seed % 5, 0, 1, "g0", "eos", turns, samples, 1.0, 2.0, [{"role": "user"}]
    )


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    kind = rng.randrange(6)
    if kind == 0:
        return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    if kind == 1 and data:
        at = min(at, len(data) - 1)
        return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
    if kind == 2:
        return data[:at]
    if kind == 3:
        return data[:at] + rng.randbytes(rng.randrange(9)) + data[at:]
    if kind == 4:
        return (
            data[:at]
            + rng.choice([b"\xdd\xff\xff\xff\xff", b"\x91" * 200, b"\xc6\xff\xff\xff\xff"])
            + data[at + 5 :]
        )
    return rng.randbytes(rng.randrange(80))


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes, after a garbage collection."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
