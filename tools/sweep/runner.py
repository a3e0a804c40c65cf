"""Makes the runs of a sweep, several at once, each in a process of its own; those that are finished are not made again."""

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
from r3async.record.reading import read_objects
from r3async.tools.sweep.plan import PlannedRun
from r3async.views.summary import format_seconds, summarize
from r3async.views.swept_runs import FINISHED, is_complete, read_finished

POLL_SECONDS = 0.5
SAY_SECONDS = 30.0
"""Between two lines of progress."""
KILL_SECONDS = 20.0
"""After which a run that was asked twice to end is killed."""
REFUSED = 2
"""Exit code of a run that cannot start with its settings."""
LOGS = "logs"


class Process(Protocol):
    """What of `subprocess.Popen` is used."""

    def poll(self) -> int | None: ...
    def send_signal(self, number: int, /) -> None: ...
    def kill(self) -> None: ...


Start = Callable[[PlannedRun, int], Process]
"""Starts a run in a slot, from 0."""


class Wanted(Protocol):
    """Whether a person, or the system, asked for the end."""

    requested: bool


class Runner:
    """`directory`: of the sweep. `ended`: called after each run that ended. `metrics`: what of a run is to be kept."""

    def __init__(
        self,
        directory: Path,
        runs: Sequence[PlannedRun],
        slots: int,
        start: Start,
        stop: Wanted,
        say: Callable[[str], object],
        ended: Callable[[PlannedRun], object] = lambda run: None,
        sleep: Callable[[float], object] = time.sleep,
        metrics: Sequence[str] = (),
    ):
        self._directory, self._runs, self._start, self._stop = directory, runs, start, stop
        self._say, self._ended, self._sleep = say, ended, sleep
        self._kept = read_finished(directory / FINISHED, metrics).keys()
        self._free = list(range(slots))
        self._running: dict[int, tuple[PlannedRun, Process, float]] = {}
        self._lasted: list[float] = []
        self._told = False
        self.failed: list[str] = []
        """Names of runs that ended before they had made their steps, though nobody asked."""

    def complete(self, run: PlannedRun) -> bool:
        path = self._directory / run.name
        return run.name in self._kept or (path.is_dir() and is_complete(summarize(path)))

    def make(self) -> bool:
        """Until all runs are made, or a stop is requested and those that run have ended. Returns whether all are complete. Raises
        `ConfigError` for a run that was refused, when the others have ended, and `KeyboardInterrupt`."""
        waiting = deque(run for run in self._runs if not self.complete(run))
        self._say(f"{len(self._runs) - len(waiting)} of {len(self._runs)} runs are finished")
        refused, spoke = "", time.monotonic()
        try:
            while self._running or (waiting and not self._stop.requested and not refused):
                while waiting and self._free and not self._stop.requested and not refused:
                    self._begin(waiting.popleft())
                if self._stop.requested or refused:
                    self._ask_to_end()
                self._sleep(POLL_SECONDS)
                refused = self._collect() or refused
                if self._running and time.monotonic() - spoke > SAY_SECONDS:
                    spoke = time.monotonic()
                    self._say(self._progress(len(waiting)))
        finally:
            self._end_all()
        if refused:
            raise ConfigError(refused)
        return all(map(self.complete, self._runs))

    def _begin(self, run: PlannedRun) -> None:
        slot = self._free.pop(0)
        self._running[slot] = (run, self._start(run, slot), time.monotonic())
        self._say(f"{run.name}: started")

    def _ask_to_end(self) -> None:
        """Once: each finishes its step, and writes a checkpoint."""
        if not self._told:
            self._told = True
            self._say(f"stopping: {len(self._running)} runs finish their steps; once more ends them at once")
            for _, process, _ in self._running.values():
                process.send_signal(signal.SIGTERM)

    def _collect(self) -> str:
        """Take note of runs that ended. Returns why one was refused, if one was."""
        refused = ""
        for slot, (run, process, began) in list(self._running.items()):
            code = process.poll()
            if code is None:
                continue
            del self._running[slot]
            self._free = sorted([*self._free, slot])
            summary = summarize(self._directory / run.name)
            if is_complete(summary):
                self._lasted.append(time.monotonic() - began)
                self._say(f"{run.name}: {summary.status}, {summary.progress}")
            elif not self._told:
                why = summary.reason or last_line(self._directory / LOGS / f"{run.name}.txt") or f"exit code {code}"
                self.failed.append(run.name)
                self._say(f"{run.name}: failed: {why}")
                refused = f"run {run.name} was refused: {why}" if code == REFUSED else refused
            self._ended(run)
        return refused

    def _progress(self, waiting: int) -> str:
        runs = [run for run, _, _ in self._running.values()]
        steps = ", ".join(
            f"{run.name} step {len(read_objects(self._directory / run.name / 'metrics.jsonl'))}" for run in runs
        )
        done = sum(map(self.complete, self._runs))
        left = ""
        if self._lasted:
            mean, slots = sum(self._lasted) / len(self._lasted), len(self._running) + len(self._free)
            left = f"; about {format_seconds(mean * (waiting + len(runs)) / slots)} left"
        return f"{done} of {len(self._runs)} finished; {steps}{left}"

    def _end_all(self) -> None:
        """Nothing runs when this returns."""
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


def last_line(log: Path) -> str:
    """Of what a run printed; "" if nothing."""
    try:
        lines = log.read_text(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def starter(directory: Path, environment: Callable[[int], Mapping[str, str]]) -> Start:
    """Starts `r3async train` for a run, with its output in a log. `environment`: of a slot, beside what this process has. The run
    ends when this process does, however that happens."""

    def start(run: PlannedRun, slot: int) -> Process:
        (directory / LOGS).mkdir(parents=True, exist_ok=True)
        # -P: a folder `tools` where the command was typed must not stand in for ours.
        command = [sys.executable, "-P", "-m", "r3async.tools.sweep.runner", str(os.getpid())]
        words = ["train", run.preset, *run.overrides, "--runs", str(directory)]
        with (directory / LOGS / f"{run.name}.txt").open("ab") as log:
            return subprocess.Popen(
                [*command, *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **environment(slot)},
                start_new_session=True,  # a Ctrl-C reaches the sweep only, which then ends its runs in order
            )

    return start


def main(owner: int, words: Sequence[str]) -> None:
    """In a run's process."""
    from r3async.rollout.engines.vllm_owner import exit_with
    from r3async.tools.cli import main as command

    exit_with(owner)
    sys.argv = ["r3async", *words]
    command()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
