"""`bench conductor`: processor time and messages of the conductor a group, for fleets of several sizes.

The conductor is a run's own, and generators ask it with a run's own code; their episodes, and the learner's steps, only take time
(`fleet.py`). Measured in two ways. `simulated`: one process, in virtual time, where the processor time is that of the
conductor's callbacks: its own Python, whatever the size. `ray`: real processes and real calls, where it is that of the
conductor's process, Ray's share included.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from r3async.tools.bench.fleet import Load
from r3async.tools.bench.jobs import BenchError, Say, run_job

TIMEOUT = 600.0

Way = Literal["simulated", "ray"]
WAYS: tuple[Way, ...] = ("simulated", "ray")


class Job(msgspec.Struct, frozen=True):
    load: Load
    way: Way


class Measured(msgspec.Struct, frozen=True):
    """Of `seconds`. `groups`: whose episodes were played. `cpu_seconds`: of the conductor. `leases`: calls of generators to it;
    `asked`: its own, to generators and learner. `busy`: share of the places that had an episode."""

    way: Way
    generators: int
    seconds: float
    groups: float
    steps: int
    leases: int
    asked: int
    cpu_seconds: float
    busy: float

    @property
    def cpu_ms_per_group(self) -> float:
        return 1e3 * self.cpu_seconds / self.groups

    @property
    def messages_per_group(self) -> float:
        return (self.leases + self.asked) / self.groups

    @property
    def cores(self) -> float:
        return self.cpu_seconds / self.seconds


class Row(msgspec.Struct, frozen=True):
    """What `Measured` comes to. `cores`: that the conductor takes at this rate of groups."""

    measured: Measured
    groups_per_second: float
    cpu_ms_per_group: float
    messages_per_group: float
    cores: float


class Report(msgspec.Struct, frozen=True):
    """`load`: common to all rows, but for the number of generators."""

    benchmark: str
    load: Load
    rows: list[Row]


def run(load: Load, sizes: Sequence[int], ways: Sequence[Way], say: Say) -> Report:
    """Each size in each way, in a process of its own. Raises `BenchError`."""
    rows = []
    for way in ways:
        for size in sizes:
            say(f"conductor: {size} generators, {way}")
            m = measure(Job(msgspec.structs.replace(load, generators=size), way), say)
            rows.append(Row(m, m.groups / m.seconds, m.cpu_ms_per_group, m.messages_per_group, m.cores))
    return Report("conductor", load, rows)


def measure(job: Job, say: Say) -> Measured:
    """Raises `BenchError`."""
    with tempfile.TemporaryDirectory(prefix="r3async-bench-") as scratch:
        directory = Path(scratch)
        (directory / "job.json").write_bytes(msgspec.json.encode(job))
        run_job("r3async.tools.bench.conductor_job", directory, timeout=TIMEOUT, say=say)
        measured = msgspec.json.decode((directory / "done.json").read_bytes(), type=Measured)
    if not measured.groups:
        raise BenchError(f"{job.load.generators} generators played no group in {measured.seconds:.0f} s")
    return measured


def render(report: Report) -> str:
    load = report.load
    lines = [
        f"{load.places} episodes of {load.episode_seconds:g} s a generator, groups of {load.samples_per_group}",
        f"{'':<11}{'generators':>10}{'groups/s':>10}{'ms CPU/group':>14}{'messages/group':>16}{'cores':>8}{'busy':>7}",
    ]
    for row in report.rows:
        m = row.measured
        lines.append(
            f"{m.way:<11}{m.generators:>10}{row.groups_per_second:>10.1f}{row.cpu_ms_per_group:>14.2f}"
            f"{row.messages_per_group:>16.2f}{row.cores:>8.3f}{m.busy:>7.1%}"
        )
    return "\n".join(lines)
