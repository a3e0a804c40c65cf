"""Files that records are appended to: a record is in the file whole, or waits in memory until
the disk takes it.

A record never ends a run. A write that fails or is cut short (ENOSPC, EDQUOT, EIO, EFBIG, …) is
truncated, so no reader sees half a line; the record, and every later one of that file, waits in
order, in at most `MAX_WAITING_BYTES`. The process's `RecordFlusher` retries until all are
written, and reports when the waiting begins and when it ends. Beyond the limit records are
lost, and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from r3async.world import EventReporter, File, Files, World
from r3async.world.files import make_directory

MAX_WAITING_BYTES = 16 * 2**20
"""Maximum number of bytes of one file's records that wait in memory."""
RETRY_SECONDS = 0.5
LOCK_TIMEOUT_SECONDS = 0.02
"""Seconds to wait for another process's write."""
_NO_LOCK_ERRNOS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class FilePosition(NamedTuple):
    """The state of a file of records.

    Attributes:
        whole_bytes: Bytes of whole records in the file.
        waiting_records: The records after them that the file has not taken yet.
    """

    whole_bytes: int
    waiting_records: list[bytes]


class AppendFile:
    """A file to which whole records are appended.

    The file is opened, and its directory created, with the first record. Threads may share one
    object, and processes a file: each write holds a lock on it (`flock`), so an incomplete last
    record is what a killed process left, and is cut off. Only what the disk refused is buffered: a
    written record survives the process's end (not the machine's).

    Args:
        path: The file.
        world: The world whose files, threads and flusher are used.
        flusher: Retries refused records; by default the world's.
        max_waiting_bytes: Maximum number of bytes that wait in memory.
    """

    terminator = b"\n"
    """Terminator of every record. Without one, only this object may write to the file."""

    def __init__(
        self,
        path: Path,
        *,
        world: World,
        flusher: RecordFlusher | None = None,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
    ):
        self.path = Path(path)
        self.lost_records = 0
        """Number of records for which memory had no capacity."""
        self._files = world.files
        self._flusher = world.record_flusher if flusher is None else flusher
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting_records: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._file: File | None = None
        self._size = 0
        self._lock = world.threads.new_lock()

    def append(self, record: bytes) -> bool:
        """Append a record, and return whether it is in the file. If not, it waits in memory, or is
        lost. Never raises `OSError`."""
        record += self.terminator
        error: OSError | None = None
        with self._lock:
            if not self._waiting_records:
                error = self._write_record(record)
                if error is None:
                    return True
            fits = self._waiting_bytes + len(record) <= self._max_waiting_bytes
            if fits:
                self._waiting_records.append(record)
                self._waiting_bytes += len(record)
            self.lost_records += not fits
        self._flusher.add_waiting_file(self, error, lost=not fits)
        return False

    def flush(self) -> OSError | None:
        """Write the waiting records, in order, as far as the disk takes them. Returns the error of
        the first one refused, or None."""
        with self._lock:
            while self._waiting_records:
                error = self._write_record(self._waiting_records[0])
                if error is not None:
                    return error
                self._waiting_bytes -= len(self._waiting_records.popleft())
        return None

    @property
    def waiting_count(self) -> int:
        """The number of waiting records."""
        return len(self._waiting_records)

    def current_position(self) -> FilePosition:
        """Return the records in the file and those that wait; together, everything that was
        appended and not lost."""
        with self._lock:
            return FilePosition(
                whole_record_bytes(self.path, files=self._files), list(self._waiting_records)
            )

    def close(self) -> None:
        """Close the file. Records that wait are still written."""
        with self._lock:
            self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write_record(self, record: bytes) -> OSError | None:
        try:
            # Deleted, perhaps with its directory.
            if self._file is not None and not self._file.is_at(self.path):
                self._close_file()
            if self._file is None:
                self._file = self._open_file()
                self._size = 0
            with _file_lock(self._file):
                start = self._truncate_partial(self._file)
                try:
                    self._file.append([record])
                except OSError:
                    # Otherwise it is truncated before the next write.
                    with contextlib.suppress(OSError):
                        self._file.truncate(start)
                    raise
                self._size = start + len(record)
        except OSError as error:
            # Reopen: the disk may have been mounted again, or the file replaced.
            if self.terminator:
                self._close_file()
            return error
        return None

    def _open_file(self) -> File:
        make_directory(self.path.parent, files=self._files)
        return self._files.open(self.path, create=True)

    def _truncate_partial(self, file: File) -> int:
        """Cut off an incomplete last record, and return the position of the next one."""
        size = file.size()
        start = (
            _last_record_end(file, size, self.terminator)
            if self.terminator
            else min(size, self._size)
        )
        if start < size:
            file.truncate(start)
        return start


def whole_record_bytes(path: Path, end: bytes = b"\n", *, files: Files) -> int:
    """Return the length of the file up to the end of its last whole record; 0 if the
    file does not exist."""
    try:
        file = files.open(path)
    except FileNotFoundError:
        return 0
    with file:
        return _last_record_end(file, file.size(), end)


def _last_record_end(file: File, size: int, end: bytes, block: int = 4096) -> int:
    if not size or file.read(size - 1, 1) == end:
        return size
    at = size
    while at:
        start = max(0, at - block)
        found = file.read(start, at - start).rfind(end)
        if found >= 0:
            return start + found + 1
        at = start
    return 0


@contextlib.contextmanager
def _file_lock(file: File) -> Iterator[None]:
    """Hold the file's lock. Raises `BlockingIOError` if another process does not finish its write:
    it may have been stopped."""
    try:
        file.lock(timeout=LOCK_TIMEOUT_SECONDS)
    except OSError as error:
        if error.errno not in _NO_LOCK_ERRNOS:
            raise
        yield  # a file system without locks: best effort
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.unlock()


class RecordFlusher:
    """The files of one process that have waiting records; a thread retries while there are any.

    The reporter is called with `records_kept` when the first record has to wait, `records_lost`
    when memory is used up, and `records_written` when the disk has taken all. Without a reporter, a
    line on stderr gives the same facts.
    """

    def __init__(
        self,
        report_event: EventReporter | None = None,
        *,
        world: World,
        retry_seconds: float = RETRY_SECONDS,
    ):
        self._event_reporter = report_event
        self._retry_seconds = retry_seconds
        self._disk = world.files
        self._clock = world.clock.monotonic
        self._threads = world.threads
        self._lock = world.threads.new_lock()
        self._retry_lock = world.threads.new_lock()
        self._waiting_files: dict[AppendFile, int] = {}
        """Files with waiting records, each with the number of records that it had lost before."""
        self._waiting_since = 0.0
        self._reported: set[str] = set()
        self._is_retrying = False

    def set_event_reporter(self, report_event: EventReporter) -> None:
        """Report to `report_event` from now on, as the process has opened its events."""
        self._event_reporter = report_event

    def add_waiting_file(
        self, file: AppendFile, error: OSError | None, *, lost: bool = False
    ) -> None:
        """Register `file`, which has a waiting record, or has lost one."""
        with self._lock:
            if not self._waiting_files:
                self._waiting_since = self._clock()
            self._waiting_files.setdefault(file, file.lost_records - lost)
            begins = not self._is_retrying and self._retry_seconds > 0
            self._is_retrying = True
        if begins:
            self._threads.repeat_until_done("records", self._retry_seconds, self._retry_until_done)
        self._report_failure(file, error)
        if lost and self._is_first_report("records_lost"):
            hint = (
                "free bytes on that disk; records that wait in memory are kept, those that "
                "come now are not"
            )
            self._report_event("records_lost", file=str(file.path), hint=hint)

    def _report_failure(self, file: AppendFile, error: OSError | None) -> None:
        # Waiting for another process's write is no failure of the disk.
        if (
            error is not None
            and not isinstance(error, BlockingIOError)
            and self._is_first_report("records_kept")
        ):
            hint = (
                "the run continues; records wait in memory until the disk takes them: "
                "free bytes there"
            )
            self._report_event("records_kept", file=str(file.path), error=str(error), hint=hint)

    def retry_writes(self) -> bool:
        """Write what can be written. Returns True if nothing waits any more."""
        with self._retry_lock:
            with self._lock:
                files = list(self._waiting_files)
            for file in files:
                self._report_failure(file, file.flush())
            with self._lock:
                if any(file.waiting_count for file in self._waiting_files):
                    return False
                lost = sum(
                    file.lost_records - before for file, before in self._waiting_files.items()
                )
                seconds = self._clock() - self._waiting_since
                reported = "records_kept" in self._reported
                names = sorted({file.path.name for file in self._waiting_files})
                self._waiting_files.clear()
                self._reported.clear()
        if reported or lost:
            self._report_event("records_written", files=names, lost=lost, seconds=round(seconds, 3))
        return True

    async def finish_writes(self, seconds: float) -> int:
        """Retry for at most `seconds` until everything is written. Returns how many records still
        wait; if any do, stderr gets a line."""
        deadline = self._clock() + seconds
        while not await self._threads.run(self.retry_writes):
            if self._clock() >= deadline:
                return self.count_unwritten()
            await asyncio.sleep(min(0.1, self._retry_seconds))
        return 0

    def count_unwritten(self) -> int:
        """Return how many records still wait when this process ends and are lost with it. Writes
        a line to stderr."""
        with self._lock:
            left = {f.path.name: f.waiting_count for f in self._waiting_files if f.waiting_count}
        _print_stderr(f"records that the disk did not take are lost with this process: {left}")
        return sum(left.values())

    def file_position(self, path: Path) -> FilePosition:
        """Return the position of the file of lines at `path`, which only this
        process appends to."""
        with self._lock:
            files = [file for file in self._waiting_files if file.path == path]
        return (
            files[0].current_position()
            if files
            else FilePosition(whole_record_bytes(path, files=self._disk), [])
        )

    async def fsync_files(self, directory: Path, names: Sequence[str]) -> None:
        """Make the content of these files of `directory`, whoever appends to them, survive a power
        failure. A disk that fails to do so is reported."""
        try:
            await self._threads.run(self._fsync_files, directory, names)
        except OSError as error:
            hint = (
                "rows of steps that a checkpoint has may be missing after a power failure: "
                "look at that disk"
            )
            self._report_event(
                "records_not_synced", directory=str(directory), error=str(error), hint=hint
            )

    def _fsync_files(self, directory: Path, names: Sequence[str]) -> None:
        for path in (directory / name for name in names):
            if self._disk.stat(path) is not None:
                with self._disk.open(path) as file:
                    file.fsync()
        self._disk.fsync_directory(directory)

    def _retry_until_done(self) -> bool:
        self.retry_writes()
        with self._lock:
            self._is_retrying = bool(self._waiting_files)
            return not self._waiting_files

    def _is_first_report(self, event: str) -> bool:
        with self._lock:
            new = event not in self._reported
            self._reported.add(event)
            return new

    def _report_event(self, event: str, **facts: object) -> None:
        if self._event_reporter is not None:
            self._event_reporter(event, **facts)
        else:
            _print_stderr(f"{event}: {' '.join(f'{k}={v}' for k, v in facts.items())}")


def _print_stderr(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{line}\n")
