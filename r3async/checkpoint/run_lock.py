"""The lock of a run's directory: one program at a time trains in it."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path

from r3async.world import Files
from r3async.world.real import REAL_WORLD

RUN_LOCK_FILE = ".lock"
LOCK_POLL_SECONDS = 0.1


class RunLock:
    """A `flock` on a file in the run's directory, which the kernel releases when the process ends,
    however it ends.

    The process that prepares the directory holds it exclusively; then all processes that write the
    run's records share it.
    """

    def __init__(self, run_dir: Path, *, files: Files = REAL_WORLD.files):
        self._run_dir = run_dir
        self._file = files.open(run_dir / RUN_LOCK_FILE, create=True)

    async def acquire_exclusive(
        self,
        timeout: float,
        on_wait: Callable[[], object] = lambda: None,
        *,
        clock: Callable[[], float] = REAL_WORLD.clock.monotonic,
    ) -> bool:
        """Acquire the lock exclusively, as soon as nobody else has it. Returns False if that takes
        longer than `timeout` seconds.

        A shared lock that this process holds is given up for it. `on_wait` is called once if the
        lock is not free at once.
        """
        deadline = clock() + timeout
        reported = False
        while True:
            try:
                self._file.lock()
                return True
            except BlockingIOError:
                if clock() > deadline:
                    return False
                if not reported:
                    on_wait()
                reported = True
                await asyncio.sleep(LOCK_POLL_SECONDS)

    def acquire_shared(self) -> None:
        """Acquire the lock together with others. An exclusive lock that this process holds is
        given up for it.

        Raises `BlockingIOError`, at once, if another process holds the lock exclusively: that
        process prepares the directory for another start, to which this process does not belong.
        """
        try:
            self._file.lock(shared=True)
        except BlockingIOError as error:
            said = f"another process prepares {self._run_dir} for a start of its own"
            raise BlockingIOError(errno.EWOULDBLOCK, said) from error

    def close(self) -> None:
        """Release the lock. Idempotent."""
        self._file.close()


def is_run_in_use(run_dir: Path, *, files: Files = REAL_WORLD.files) -> bool:
    """Return whether a process makes the run in that directory, or still writes to it."""
    if files.stat(run_dir / RUN_LOCK_FILE) is None:
        return False
    with files.open(run_dir / RUN_LOCK_FILE, create=True) as file:
        try:
            file.lock()
        except BlockingIOError:
            return True
    return False
