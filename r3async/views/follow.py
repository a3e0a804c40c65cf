"""Incremental reading of a run that is still being written. Each byte of its files is read once.

`FollowedFile` follows one file of lines. `FollowedRun` follows the directory of a run as views show
it: columns of metrics, the last events, and the state of the run that these imply. Nothing here
waits; call `read_new` as often as the view should change.
"""

from __future__ import annotations

import math
import os
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from r3async.data.metrics import finite_or_none
from r3async.record.reading import (
    decode_line,
    make_config_events,
    make_skipped_events,
    parse_schedule,
    read_run_config,
)
from r3async.schedule.admission import compute_staleness_bound, count_slots
from r3async.views.summary import UNFINISHED, RunHistory, get_status_change
from r3async.world.disk import open_for_reading

READ_CHUNK_BYTES = 1 << 20
MAX_EVENTS = 1000
MAX_ROWS = 16


class FollowedFile:
    """A reader of the new complete lines of a file that other processes append to.

    `read_lines` and `read_objects` raise `OSError` for a file that cannot be read;
    `read_new` reports it.

    A torn last line waits until its end arrives, or until its writer cuts it off. If the file is
    replaced (rotated), it is read to its end, then the new file from its beginning. A file that was
    truncated is read from its beginning. A missing file has no lines yet.
    """

    def __init__(self, path: Path):
        self.path = path
        self.skipped_lines = 0
        """Number of lines so far that are not objects of this file."""
        self.error = ""
        """Why the file cannot be read; "" if it can be, or is missing."""
        self._fd = -1
        self._torn_line = b""

    def read_lines(self, limit: int = READ_CHUNK_BYTES) -> list[bytes]:
        """Return lines completed since the last call, from at most `limit` new bytes. Call until
        it returns none."""
        if self._fd < 0 and not self._open():
            return []
        at = os.lseek(self._fd, 0, os.SEEK_CUR)
        size = os.fstat(self._fd).st_size
        if size < at:
            whole = at - len(self._torn_line)
            os.lseek(self._fd, whole if size >= whole else 0, os.SEEK_SET)
            self._torn_line = b""
        data = os.read(self._fd, limit)
        if not data and self._is_replaced():
            self.close()
            if not self._open():
                return []
            data = os.read(self._fd, limit)
        *lines, self._torn_line = (self._torn_line + data).split(b"\n")
        return lines

    def read_objects(self, limit: int = READ_CHUNK_BYTES) -> Iterator[dict[str, Any]]:
        """Yield the JSON objects of new lines until there is nothing new. Other lines are
        skipped and counted."""
        while True:
            before = os.lseek(self._fd, 0, os.SEEK_CUR) if self._fd >= 0 else 0
            for line in self.read_lines(limit):
                value = decode_line(self.path.name, line)
                if value is not None:
                    yield value
                elif line.strip():
                    self.skipped_lines += 1
            if self._fd < 0:
                return
            if os.lseek(self._fd, 0, os.SEEK_CUR) == before:
                # Read the torn line again with its end: meanwhile it may be cut off, and another
                # line take its place.
                os.lseek(self._fd, before - len(self._torn_line), os.SEEK_SET)
                self._torn_line = b""
                return

    def read_new(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the new objects, and an event with the number of skipped lines, or why the file
        cannot be read; each is reported once."""
        before = self.skipped_lines
        error_before = self.error
        found = list[dict[str, Any]]()
        self.error = ""
        try:
            found.extend(self.read_objects())
        except OSError as error:
            self.error = error.strerror or str(error)
        new_error = self.error if self.error != error_before else ""
        return found, make_skipped_events(
            self.path.name, self.skipped_lines - before, error=new_error
        )

    def _open(self) -> bool:
        try:
            self._fd = open_for_reading(self.path)
        except FileNotFoundError:
            return False
        return True

    def _is_replaced(self) -> bool:
        try:
            there = os.stat(self.path)
        except OSError:
            return False  # moved away; a new file may follow
        return not os.path.samestat(there, os.fstat(self._fd))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._torn_line = b""


class MetricColumns:
    """Rows of numbers stored by column, 8 bytes per number: 100,000 steps with 60
    metrics take 48 MB."""

    def __init__(self) -> None:
        self._columns: dict[str, array[float]] = {}
        self.row_count = 0

    def append(self, row: dict[str, Any]) -> None:
        """Append the numbers of a row; other values are left out."""
        for name, value in row.items():
            number = finite_or_none(value)
            if number is not None:
                if name not in self._columns:
                    self._columns[name] = array("d", [math.nan]) * self.row_count
                self._columns[name].append(number)
        self.row_count += 1
        for column in self._columns.values():
            if len(column) < self.row_count:
                column.append(math.nan)

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def last_value(self, name: str) -> float | None:
        """Return the value of the last row; None if it has no such number."""
        column = self._columns.get(name)
        return None if column is None or math.isnan(column[-1]) else column[-1]

    def get_values(self, name: str, rows: int | None = None) -> np.ndarray:
        """Return the values of the last `rows` rows, or of all, as float64 `[rows]`.

        NaN where a row lacks the number, and everywhere if no row has it.
        """
        column = self._columns.get(name)
        taken = self.row_count if rows is None else min(rows, self.row_count)
        if column is None:
            return np.full(taken, np.nan)
        return np.array(column[self.row_count - taken :], np.float64)


class FollowedRun:
    """The directory of a run, followed as it grows. `clock` returns unix seconds."""

    def __init__(self, run_dir: Path, clock: Callable[[], float] = time.time):
        self.run_dir = run_dir
        self._clock = clock
        self.name = os.path.basename(os.path.realpath(run_dir))
        self.config: dict[str, Any] = {}
        self.metrics = MetricColumns()
        self.evaluations = MetricColumns()
        self.recent_rows: deque[dict[str, Any]] = deque(maxlen=MAX_ROWS)
        """The last rows as they were written."""
        self.events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self.warnings = self.errors = 0
        self.history = RunHistory()
        self.generator_states: dict[str, str] = {}
        """State of each generator by name: `playing`, `silent` or `lost`, as far as events tell."""
        self.requested_generators = 0
        """Number of generators, if `r3async scale` requested another number than the
        configuration's; else 0."""
        self.status = UNFINISHED
        self.reason = ""
        self.first_time: float | None = None
        self.last_time: float | None = None
        """Unix seconds of the newest row or event."""
        self._changed_at: float | None = None
        self._files = {
            name: FollowedFile(run_dir / f"{name}.jsonl")
            for name in ("metrics", "events", "evaluation")
        }

    def read_new(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Read everything written since the last call. Returns the new rows and the new events."""
        if not self.config:
            self.config = read_run_config(self.run_dir)
        # Events first: the event that ends a run is written after its last row, so the row
        # can then be read.
        events, skipped = self._files["events"].read_new()
        rows, more = self._files["metrics"].read_new()
        evaluations, most = self._files["evaluation"].read_new()
        events += skipped + more + most
        if self._changed_at is None:
            events += make_config_events(self.run_dir)
        for row in rows:
            self.metrics.append(row)
            self.recent_rows.append(row)
            self._update_times(row)
        for event in events:
            self._apply_event(event)
        for evaluation in evaluations:
            self.evaluations.append(evaluation)
        if rows or events:
            # Entries found at first may be old; later ones are new, whatever the clock of
            # their machine says.
            self._changed_at = 0.0 if self._changed_at is None else self._clock()
        return rows, events

    def _update_times(self, entry: dict[str, Any]) -> None:
        at = entry.get("time")
        if isinstance(at, (int, float)):
            self.first_time = at if self.first_time is None else min(self.first_time, at)
            self.last_time = at if self.last_time is None else max(self.last_time, at)

    def _apply_event(self, event: dict[str, Any]) -> None:
        self._update_times(event)
        if not self.history.add_event(event):
            return
        self.events.append(event)
        self.warnings += event.get("level") == "warning"
        self.errors += event.get("level") in ("error", "critical")
        what = event.get("event")
        who = str(event.get("generator", ""))
        if what == "generator_started":
            self.generator_states[str(event.get("role", ""))] = "playing"
        elif what == "generator_lost":
            self.generator_states[who] = "lost"
        elif what == "generator_suspect":
            self.generator_states[who] = "silent"
        elif what in ("generator_restarted", "generator_recovered", "generator_joined"):
            self.generator_states[who] = "playing"
        elif what in ("generator_left", "generator_refused"):
            self.generator_states.pop(who, None)
        elif what == "scaling" and isinstance(wanted := event.get("generators"), int):
            self.requested_generators = wanted
        elif (found := get_status_change(event)) is not None:
            self.status, self.reason = found

    # -- state of the run --------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        return self.status != UNFINISHED

    @property
    def step(self) -> int:
        return int(self.metrics.last_value("step") or self.metrics.row_count)

    @property
    def planned_steps(self) -> int | None:
        steps = self.config.get("steps")
        return steps if isinstance(steps, int) else None

    def get_setting(self, path: str) -> Any:
        """Return a value of the configuration by its dotted name; None if there is none."""
        found: Any = self.config
        for part in path.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return found

    @property
    def slot_count(self) -> int | None:
        """The number of groups that may be in flight (`schedule/admission.py`); None if no
        schedule is recorded."""
        schedule = parse_schedule(self.config)
        if schedule is None:
            return None
        return count_slots(schedule)

    @property
    def staleness_bound(self) -> int | None:
        """The maximum age of a trained token, in versions (`schedule/admission.py`); None
        without a schedule."""
        schedule = parse_schedule(self.config)
        return None if schedule is None else compute_staleness_bound(schedule)

    @property
    def silent_seconds(self) -> float:
        """The seconds since something was written; 0 for a run that has ended or
        written nothing."""
        if self.has_ended or self.last_time is None:
            return 0.0
        return max(0.0, self._clock() - max(self.last_time, self._changed_at or 0.0))

    @property
    def elapsed_seconds(self) -> float:
        if self.first_time is None or self.last_time is None:
            return 0.0
        return (
            self.last_time if self.has_ended else max(self._clock(), self.last_time)
        ) - self.first_time

    @property
    def remaining_seconds(self) -> float | None:
        """The seconds until the end at the pace of the last steps; None if the pace or
        the end is unknown."""
        planned = self.planned_steps
        times = self.metrics.get_values("time", 50)
        times = times[np.isfinite(times)]
        if planned is None or self.has_ended or len(times) < 2:
            return None
        pace = (times[-1] - times[0]) / (len(times) - 1)
        return max(0.0, (planned - self.step) * pace)

    @property
    def phase(self) -> str:
        """The current phase of the run in a word or two, or its status if it has ended."""
        if self.has_ended:
            return self.status
        if self.metrics.row_count:
            done = self.planned_steps is not None and self.step >= self.planned_steps
            return "saving" if done else "training"
        seen = [str(event.get("event")) for event in self.events]
        if "probe" in seen:
            return "first step"
        if "learner_started" in seen or "generator_started" in seen:
            return "loading"
        return "starting"
