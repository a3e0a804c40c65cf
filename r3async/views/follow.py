"""Incremental reading of a run that is still being written. Each byte of its files is read once.

`FollowedFile` follows one file of lines. `FollowedRun` follows the directory of a run as views show
it: new rows, events and evaluations, and the state of the run that these imply. Nothing here
waits; call `read_new` as often as the view should change.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from r3async.data.metrics import finite_or_none
from r3async.record.reading import (
    decode_line,
    make_config_events,
    make_skipped_events,
    read_run_config,
)
from r3async.views.summary import UNFINISHED, RunHistory, get_status_change
from r3async.world.disk import open_for_reading

READ_CHUNK_BYTES = 1 << 20


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


class RunNews(NamedTuple):
    """News of a run: the objects that its files got since the last call."""

    rows: list[dict[str, Any]]
    events: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]


class FollowedRun:
    """The directory of a run, followed as it grows.

    Attributes:
        step: The last step that was made.
        status: `UNFINISHED`, or how the run ended.
    """

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self.name = os.path.basename(os.path.realpath(run_dir))
        self.config: dict[str, Any] = {}
        self.step = 0
        self.history = RunHistory()
        self.status = UNFINISHED
        self.reason = ""
        self._loading_phase = "starting"
        self._was_read = False
        self._files = {
            name: FollowedFile(run_dir / f"{name}.jsonl")
            for name in ("metrics", "events", "evaluation")
        }

    def read_new(self) -> RunNews:
        """Read everything written since the last call."""
        if not self.config:
            self.config = read_run_config(self.run_dir)
        # Events first: the event that ends a run is written after its last row, so the row
        # can then be read.
        events, skipped = self._files["events"].read_new()
        rows, more = self._files["metrics"].read_new()
        evaluations, most = self._files["evaluation"].read_new()
        events += skipped + more + most
        if not self._was_read:
            events += make_config_events(self.run_dir)
        self._was_read = True
        for row in rows:
            self.step = int(finite_or_none(row.get("step")) or self.step + 1)
        for event in events:
            self._apply_event(event)
        return RunNews(rows, events, evaluations)

    def _apply_event(self, event: dict[str, Any]) -> None:
        if not self.history.add_event(event):
            return
        what = event.get("event")
        if what == "probe":
            self._loading_phase = "first step"
        elif what in ("learner_started", "generator_started"):
            self._loading_phase = "loading"
        change = get_status_change(event)
        if change is not None:
            self.status, self.reason = change

    @property
    def has_ended(self) -> bool:
        return self.status != UNFINISHED

    @property
    def planned_steps(self) -> int | None:
        steps = self.config.get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def phase(self) -> str:
        """The current phase of the run in a word or two, or its status if it has ended."""
        if self.has_ended:
            return self.status
        if self.step:
            done = self.planned_steps is not None and self.step >= self.planned_steps
            return "saving" if done else "training"
        return self._loading_phase
