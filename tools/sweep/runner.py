"""Make the runs of a sweep, several at once, each in a separate process; finished runs are not repeated."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from r3async.config import ConfigError
from r3async.record.reading import read_json_objects
from r3async.views.summary import format_seconds, summarize_run
from r3async.views.sweeps import FINISHED_FILE, is_run_complete, read_finished_runs

from .plan import PlannedRun

POLL_SECONDS = 0.5
PROGRESS_SECONDS = 30.0
"""Seconds between two lines of progress."""
KILL_SECONDS = 20.0
"""Seconds after which a run that was asked twice to end is killed."""
REFUSED_EXIT_CODE = 2
"""Exit code of a run that cannot start with its settings."""
LOGS_DIRECTORY = "logs"


class RunProcess(Protocol):
    """The part of `subprocess.Popen` that is used."""

    def poll(self) -> int | None: ...
    def send_signal(self, number: int, /) -> None: ...
    def kill(self) -> None: ...


StartRun = Callable[[PlannedRun, int], RunProcess]
"""Start a run in a slot (from 0)."""


class StopFlag(Protocol):
    """A flag that is set when the user or the system requests the end."""

    requested: bool


class SweepRunner:
    """The runner of a sweep's runs.

    Args:
        directory: Directory of the sweep.
        on_run_ended: Called after each run that ended.
        metrics: Metrics of a run to keep.
    """

    def __init__(
        self,
        directory: Path,
        runs: Sequence[PlannedRun],
        slots: int,
        start_run: StartRun,
        stop_flag: StopFlag,
        print_line: Callable[[str], object],
        on_run_ended: Callable[[PlannedRun], object] = lambda run: None,
        sleep: Callable[[float], object] = time.sleep,
        metrics: Sequence[str] = (),
    ):
        self._directory, self._runs, self._start, self._stop = directory, runs, start_run, stop_flag
        self._say, self._ended, self._sleep = print_line, on_run_ended, sleep
        self._finished_names = read_finished_runs(directory / FINISHED_FILE, metrics).keys()
        self._free = list(range(slots))
        self._running: dict[int, tuple[PlannedRun, RunProcess, float]] = {}
        self._durations: list[float] = []
        self._stop_sent = False
        self.failed_names: list[str] = []
        """Names of runs that ended before they had made their steps, without a requested stop."""

    def is_complete(self, run: PlannedRun) -> bool:
        path = self._directory / run.name
        return run.name in self._finished_names or (path.is_dir() and is_run_complete(summarize_run(path)))

    def run_all(self) -> bool:
        """Make all runs, or stop on request once the running ones have ended. Returns whether all are complete.

        Raises `ConfigError` for a run that was refused, after the others have ended, and `KeyboardInterrupt`.
        """
        waiting = deque(run for run in self._runs if not self.is_complete(run))
        self._say(f"{len(self._runs) - len(waiting)} of {len(self._runs)} runs are finished")
        refused, spoke = "", time.monotonic()
        try:
            while self._running or (waiting and not self._stop.requested and not refused):
                while waiting and self._free and not self._stop.requested and not refused:
                    self._start_next(waiting.popleft())
                if self._stop.requested or refused:
                    self._request_stop()
                self._sleep(POLL_SECONDS)
                refused = self._collect_ended() or refused
                if self._running and time.monotonic() - spoke > PROGRESS_SECONDS:
                    spoke = time.monotonic()
                    self._say(self._describe_progress(len(waiting)))
        finally:
            self._stop_all()
        if refused:
            raise ConfigError(refused)
        return all(map(self.is_complete, self._runs))

    def _start_next(self, run: PlannedRun) -> None:
        slot = self._free.pop(0)
        self._running[slot] = (run, self._start(run, slot), time.monotonic())
        self._say(f"{run.name}: started")

    def _request_stop(self) -> None:
        """Ask the runs to stop, once: each finishes its step and writes a checkpoint."""
        if not self._stop_sent:
            self._stop_sent = True
            self._say(f"stopping: {len(self._running)} runs finish their steps; once more ends them at once")
            for _, process, _ in self._running.values():
                process.send_signal(signal.SIGTERM)

    def _collect_ended(self) -> str:
        """Collect runs that ended. Returns the reason if one was refused, else ""."""
        refused = ""
        for slot, (run, process, began) in list(self._running.items()):
            code = process.poll()
            if code is None:
                continue
            del self._running[slot]
            self._free = sorted([*self._free, slot])
            summary = summarize_run(self._directory / run.name)
            if is_run_complete(summary):
                self._durations.append(time.monotonic() - began)
                self._say(f"{run.name}: {summary.status}, {summary.progress_text}")
            elif not self._stop_sent:
                why = (
                    summary.reason
                    or read_last_line(self._directory / LOGS_DIRECTORY / f"{run.name}.txt")
                    or f"exit code {code}"
                )
                self.failed_names.append(run.name)
                self._say(f"{run.name}: failed: {why}")
                refused = f"run {run.name} was refused: {why}" if code == REFUSED_EXIT_CODE else refused
            self._ended(run)
        return refused

    def _describe_progress(self, waiting: int) -> str:
        runs = [run for run, _, _ in self._running.values()]
        steps = ", ".join(
            f"{run.name} step {len(read_json_objects(self._directory / run.name / 'metrics.jsonl'))}" for run in runs
        )
        done = sum(map(self.is_complete, self._runs))
        left = ""
        if self._durations:
            mean, slots = sum(self._durations) / len(self._durations), len(self._running) + len(self._free)
            left = f"; about {format_seconds(mean * (waiting + len(runs)) / slots)} left"
        return f"{done} of {len(self._runs)} finished; {steps}{left}"

    def _stop_all(self) -> None:
        """End all runs; none is left when this returns."""
        deadline = time.monotonic() + KILL_SECONDS
        for _, process, _ in self._running.values():
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        while any(process.poll() is None for _, process, _ in self._running.values()) and time.monotonic() < deadline:
            self._sleep(POLL_SECONDS)
        for _, process, _ in self._running.values():
            if process.poll() is None:
                process.kill()
                while process.poll() is None:
                    self._sleep(POLL_SECONDS)


def read_last_line(log: Path) -> str:
    """Return the last line of a run's output; "" if there is none."""
    try:
        lines = log.read_text(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def make_starter(directory: Path, slot_environment: Callable[[int], Mapping[str, str]]) -> StartRun:
    """Return a function that starts `r3async train` for a run, with its output in a log.

    The run ends when this process does, however that happens.

    Args:
        slot_environment: Returns the environment of a slot, in addition to this process's.
    """

    def start(run: PlannedRun, slot: int) -> RunProcess:
        (directory / LOGS_DIRECTORY).mkdir(parents=True, exist_ok=True)
        # -P keeps a folder `tools` in the current directory from shadowing ours.
        command = [sys.executable, "-P", "-m", "r3async.tools.program", str(os.getpid())]
        words = ["train", run.preset, *run.overrides, "--runs", str(directory)]
        with (directory / LOGS_DIRECTORY / f"{run.name}.txt").open("ab") as log:
            return subprocess.Popen(
                [*command, *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **slot_environment(slot)},
                start_new_session=True,  # a Ctrl-C reaches only the sweep, which then ends its runs in order
            )

    return start
