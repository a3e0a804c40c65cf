"""Who uses a run's directory. A run that is resumed must not begin while a process of its past still writes."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path

from r3async.world import Files
from r3async.world.real import REAL

FILE = ".lock"
POLL_SECONDS = 0.1


class RunLock:
    """`flock` on a file in the run's directory. The kernel lets go of it when the process ends, however it ends.

    Whoever prepares the directory holds it alone; every process that writes the run's records then shares it.
    """

    def __init__(self, run_dir: Path, *, files: Files = REAL.files):
        self._run_dir, self._file = run_dir, files.open(run_dir / FILE, create=True)

    async def alone(
        self,
        timeout: float,
        waiting: Callable[[], object] = lambda: None,
        *,
        clock: Callable[[], float] = REAL.clock.monotonic,
    ) -> bool:
        """Hold it alone, as soon as nobody else has it; False if that takes longer than `timeout` seconds.

        `waiting` is called once if it is not free at once. One that was held beside others is given up for that.
        """
        deadline, reported = clock() + timeout, False
        while True:
            try:
                self._file.lock()
                return True
            except BlockingIOError:
                if clock() > deadline:
                    return False
                if not reported:
                    waiting()
                reported = True
                await asyncio.sleep(POLL_SECONDS)

    def shared(self) -> None:
        """Hold it beside others, from now on; one that was held alone is given up for that.

        Raises `BlockingIOError`, at once, if another process holds it alone: that one prepares the directory for another start,
        to which the process that asks does not belong.
        """
        try:
            self._file.lock(shared=True)
        except BlockingIOError as error:
            said = f"another process prepares {self._run_dir} for a start of its own"
            raise BlockingIOError(errno.EWOULDBLOCK, said) from error

    def close(self) -> None:
        """Let go. Idempotent."""
        self._file.close()
