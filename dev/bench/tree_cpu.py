"""CPU time of a process and all its children, by the role of each process, read while they run."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from types import TracebackType

import msgspec
import numpy as np
import psutil

READ_SECONDS = 1.0
ROLE_BY_COMMAND = {
    "ray::Conductor": "conductor",
    "ray::GeneratorActor": "generator",
    "VLLM::EngineCore": "engine",
    "ray::LearnerActor": "learner",
    "ray::RankActor": "learner",
    "ray::": "ray",
    "raylet": "ray",
    "gcs_server": "ray",
}
"""Roles by the beginning of the command line; the first match counts. Any other process has the
role of its parent."""


class CpuReading(msgspec.Struct, frozen=True):
    """CPU seconds since the watch began, read at unix time `time`: by role, and of all processes
    of the `machine`."""

    time: float
    by_role: dict[str, float]
    machine: float


class TreeCpu:
    """A monitor that reads the processes below this one every second, in a thread,
    while its block runs.

    A process that starts and ends between two readings is not seen. `first`: the role of processes
    that `ROLE_BY_COMMAND` does not name.
    """

    def __init__(self, first: str = "driver"):
        self.readings: list[CpuReading] = []
        self._first = first
        self._me = psutil.Process()
        self._last: dict[tuple[int, float], tuple[str, float]] = {}
        """Role and CPU seconds of each process by pid and start time, kept when it has ended."""
        self._before = machine_seconds()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read_often, name="tree-cpu", daemon=True)

    def __enter__(self) -> TreeCpu:
        self.take_reading()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        self.take_reading()

    def _read_often(self) -> None:
        while not self._ended.wait(READ_SECONDS):
            self.take_reading()

    def take_reading(self) -> None:
        """Take one reading now."""
        roles = {os.getpid(): self._first}
        for process in self._me.children(recursive=True):  # parents come before their children
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                key = (process.pid, process.create_time())
                role = _find_role(process.cmdline()) or roles.get(process.ppid(), self._first)
                roles[process.pid] = role
                self._last[key] = role, times.user + times.system
        by_role: dict[str, float] = {}
        for role, seconds in self._last.values():
            by_role[role] = by_role.get(role, 0.0) + seconds
        self.readings.append(CpuReading(time.time(), by_role, machine_seconds() - self._before))

    def seconds_between(self, start: float, end: float) -> dict[str, float]:
        """Return the CPU seconds by role from unix time `start` to `end`, interpolated linearly
        between readings."""
        roles = sorted({role for reading in self.readings for role in reading.by_role})
        return {role: self._seconds_at(end, role) - self._seconds_at(start, role) for role in roles}

    def cores_of_others(self, start: float, end: float) -> float:
        """Return the number of cores that all other processes of the machine kept
        busy, on average."""
        times = [r.time for r in self.readings]
        machine = np.interp([start, end], times, [r.machine for r in self.readings])
        mine = sum(self.seconds_between(start, end).values())
        return max(0.0, float(machine[1] - machine[0]) - mine) / max(end - start, 1e-9)

    def _seconds_at(self, when: float, role: str) -> float:
        times = [r.time for r in self.readings]
        return float(np.interp(when, times, [r.by_role.get(role, 0.0) for r in self.readings]))


def machine_seconds() -> float:
    """Return the CPU seconds that the machine has spent on all processes since it was started."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def _find_role(command: list[str]) -> str:
    name = os.path.basename(command[0]) if command else ""  # Ray starts its own by their whole path
    return next((role for begin, role in ROLE_BY_COMMAND.items() if name.startswith(begin)), "")
