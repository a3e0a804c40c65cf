"""Files that records are appended to: a record is in the file whole, or waits in memory until the disk takes it.

A record never ends a run. A write that fails or is cut short (ENOSPC, EDQUOT, EIO, EFBIG, …) is cut back, so no reader meets half
a line; the record, and every later one of that file, waits in order, in at most `KEPT_BYTES`. The process's `Keeper` tries
again until all are written, and reports when that begins and when it ends. Beyond the limit records are lost, and counted.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from r3async.files import make_directory

KEPT_BYTES = 16 * 2**20
"""Of one file's records in memory."""
RETRY_SECONDS = 0.5
EXIT_SECONDS = 1.0
"""For what waits when the process exits."""
LOCK_TRIES, LOCK_SECONDS = 20, 0.001
"""How often, and how long each time, to wait for another process's write."""
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)

Report = Callable[..., object]
"""`report(event, **facts)`"""


class Position(NamedTuple):
    """How far a file is: `nbytes` of whole records in it, and the records behind them that it has not taken yet."""

    nbytes: int
    kept: list[bytes]


class AppendFile:
    """Appends whole records to the file at `path`, which is opened, and its directory made, with the first of them.

    Threads may share one, and processes a file: each write holds a lock on it (`flock`), so a tail without an end is what a
    killed process left, and is cut off. Nothing is buffered but what the disk refused: a written record survives the process's
    end (not the machine's). `kept_bytes`: at most that much waits in memory.
    """

    end = b"\n"
    """Of every record. Without one, the file belongs to this object alone."""

    def __init__(self, path: Path, *, keeper: Keeper | None = None, kept_bytes: int = KEPT_BYTES):
        self.path = Path(path)
        self.lost = 0
        """Records that memory had no capacity for."""
        self._keeper = KEEPER if keeper is None else keeper
        self._limit = kept_bytes
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._fd = -1
        self._size = 0
        self._lock = threading.Lock()

    def append(self, record: bytes) -> bool:
        """Whether it is in the file. If not, it waits in memory, or is lost. Never raises `OSError`."""
        record += self.end
        error: OSError | None = None
        with self._lock:
            if not self._kept:
                error = self._write(record)
                if error is None:
                    return True
            fits = self._kept_bytes + len(record) <= self._limit
            if fits:
                self._kept.append(record)
                self._kept_bytes += len(record)
            self.lost += not fits
        self._keeper.note(self, error, lost=not fits)
        return False

    def flush(self) -> OSError | None:
        """Write what waits, in order, as far as the disk takes it. Returns what it still refuses with."""
        with self._lock:
            while self._kept:
                if (error := self._write(self._kept[0])) is not None:
                    return error
                self._kept_bytes -= len(self._kept.popleft())
        return None

    @property
    def waiting(self) -> int:
        """Records that wait."""
        return len(self._kept)

    def position(self) -> Position:
        """What is in the file, and what waits; together, everything that was appended and not lost."""
        with self._lock:
            return Position(whole_bytes(self.path), list(self._kept))

    def close(self) -> None:
        """Let go of the file. Records that wait are still written."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, record: bytes) -> OSError | None:
        try:
            if self._fd < 0:
                self._fd, self._size = self._open(), 0
            with _locked(self._fd):
                start = self._cut_back()
                try:
                    write_all(self._fd, record)
                except OSError:
                    with contextlib.suppress(OSError):  # else before the next write
                        os.ftruncate(self._fd, start)
                    raise
                self._size = start + len(record)
        except OSError as error:
            if self.end:  # opened again: it may have been mounted again, or replaced
                self._close()
            return error
        return None

    def _open(self) -> int:
        make_directory(self.path.parent)
        return os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def _cut_back(self) -> int:
        """Where the next record begins: behind the last whole one."""
        size = os.fstat(self._fd).st_size
        start = _last_end(self._fd, size, self.end) if self.end else min(size, self._size)
        if start < size:
            os.ftruncate(self._fd, start)
        return start


def write_all(descriptor: int, data: bytes) -> None:
    """Raises `OSError`; then some of it may be in the file."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def whole_bytes(path: Path, end: bytes = b"\n") -> int:
    """Length of the file up to the end of its last whole record; 0 for one that is not there."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    try:
        return _last_end(descriptor, os.fstat(descriptor).st_size, end)
    finally:
        os.close(descriptor)


def _last_end(descriptor: int, size: int, end: bytes, block: int = 4096) -> int:
    if not size or os.pread(descriptor, 1, size - 1) == end:
        return size
    at = size
    while at:
        start = max(0, at - block)
        found = os.pread(descriptor, at - start, start).rfind(end)
        if found >= 0:
            return start + found + 1
        at = start
    return 0


@contextlib.contextmanager
def _locked(descriptor: int) -> Iterator[None]:
    """Raises `BlockingIOError` if another process does not end its write: it may have been stopped."""
    for left in reversed(range(LOCK_TRIES)):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if not left:
                raise
            time.sleep(LOCK_SECONDS)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            yield  # a file system without locks: as well as it can be done
            return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)


class Keeper:
    """The files of one process that have records waiting; a thread of its own tries again while there are any.

    `report` hears `records_kept` when the first record has to wait, `records_lost` when memory is used up, and
    `records_written` when the disk has taken all. Without one, a line on stderr says the same.
    """

    def __init__(
        self,
        report: Report | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        retry_seconds: float = RETRY_SECONDS,
    ):
        self._report, self._clock, self._retry_seconds = report, clock, retry_seconds
        self._lock = threading.Lock()
        self._trying = threading.Lock()
        self._files: dict[AppendFile, int] = {}
        """With the records that each had lost before."""
        self._began = 0.0
        self._told: set[str] = set()
        self._thread: threading.Thread | None = None

    def report_to(self, report: Report) -> None:
        """From now on, tell `report`: the process has opened its events."""
        self._report = report

    def note(self, file: AppendFile, error: OSError | None, *, lost: bool = False) -> None:
        """`file` has a record that waits, or has lost one."""
        with self._lock:
            if not self._files:
                self._began = self._clock()
            self._files.setdefault(file, file.lost - lost)
            if self._thread is None and self._retry_seconds:
                self._thread = threading.Thread(target=self._work, name="records", daemon=True)
                self._thread.start()
        self._tell_failure(file, error)
        if lost and self._first("records_lost"):
            hint = "free bytes on that disk; records that wait in memory are kept, those that come now are not"
            self._tell("records_lost", file=str(file.path), hint=hint)

    def _tell_failure(self, file: AppendFile, error: OSError | None) -> None:
        # One that waits for another process's write is no failure of the disk.
        if error is not None and not isinstance(error, BlockingIOError) and self._first("records_kept"):
            hint = "the run continues; records wait in memory until the disk takes them: free bytes there"
            self._tell("records_kept", file=str(file.path), error=str(error), hint=hint)

    def retry(self) -> bool:
        """Write what can be written. Whether nothing waits any more."""
        with self._trying:
            with self._lock:
                files = list(self._files)
            for file in files:
                self._tell_failure(file, file.flush())
            with self._lock:
                if any(file.waiting for file in self._files):
                    return False
                lost = sum(file.lost - before for file, before in self._files.items())
                seconds, told = self._clock() - self._began, "records_kept" in self._told
                names = sorted({file.path.name for file in self._files})
                self._files.clear()
                self._told.clear()
        if told or lost:
            self._tell("records_written", files=names, lost=lost, seconds=round(seconds, 3))
        return True

    def drain(self, seconds: float) -> int:
        """Try for so long to have everything written. Returns how many records still wait; stderr is told of them."""
        deadline = self._clock() + seconds
        while not self.retry():
            if self._clock() >= deadline:
                with self._lock:
                    left = {f.path.name: f.waiting for f in self._files if f.waiting}
                _say(f"records that the disk did not take are lost with this process: {left}")
                return sum(left.values())
            time.sleep(min(0.1, self._retry_seconds))
        return 0

    def position(self, path: Path) -> Position:
        """Of the file of lines at `path`, which only this process appends to."""
        with self._lock:
            files = [file for file in self._files if file.path == path]
        return files[0].position() if files else Position(whole_bytes(path), [])

    def _work(self) -> None:
        while True:
            time.sleep(self._retry_seconds)
            self.retry()
            with self._lock:
                if not self._files:
                    self._thread = None
                    return

    def _first(self, event: str) -> bool:
        with self._lock:
            new = event not in self._told
            self._told.add(event)
            return new

    def _tell(self, event: str, **facts: object) -> None:
        if self._report is not None:
            self._report(event, **facts)
        else:
            _say(f"{event}: {' '.join(f'{k}={v}' for k, v in facts.items())}")


def _say(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{line}\n")


KEEPER = Keeper()
"""This process's."""
atexit.register(KEEPER.drain, EXIT_SECONDS)
