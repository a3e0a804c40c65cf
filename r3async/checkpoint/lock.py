"""Who uses a run's directory. A run that is resumed must not begin while a process of its past still writes."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

FILE = ".lock"


class RunLock:
    """`flock` on a file in the run's directory. The kernel lets go of it when the process dies, however it dies.

    Whoever prepares the directory holds it alone; every process that writes the run's records then shares it.
    """

    def __init__(self, run_dir: Path):
        self._descriptor = os.open(run_dir / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def alone(
        self,
        timeout: float,
        waiting: Callable[[], object] = lambda: None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> bool:
        """Hold it alone, as soon as nobody else has it; False if that takes longer than `timeout` seconds.

        `waiting` is called once if it is not free at once.
        """
        deadline, told = clock() + timeout, False
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if clock() > deadline:
                    return False
                if not told:
                    waiting()
                told = True
                sleep(0.1)

    def shared(self) -> None:
        """Hold it beside others, from now on; one that was held alone is given up for that. Waits for whoever holds it alone."""
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def close(self) -> None:
        """Let go. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
