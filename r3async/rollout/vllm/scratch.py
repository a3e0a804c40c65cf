"""What an engine's processes leave on their host, by one name: a directory of sockets, semaphores
and shared memory.

Whoever owns the engine holds a lock on the directory. An owner that is killed leaves everything.
The command removes it when its run ends, or else the next engine of the same user on that host.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

PREFIX = "r3async-engine-"
SHARED_MEMORY = Path("/dev/shm")


class EngineScratch:
    """The directory of a new engine, which this process has locked."""

    def __init__(self) -> None:
        remove_abandoned()
        while True:
            self.directory = Path(tempfile.mkdtemp(prefix=PREFIX))
            self._lock = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(self._lock, fcntl.LOCK_SH)
            # Or another engine took it for abandoned before it was locked.
            if self.directory.exists():
                return
            os.close(self._lock)

    def remove(self) -> None:
        """Remove everything that the engine's processes left. They must have ended."""
        for kind, path in _list_shared_memory(self.directory):
            with contextlib.suppress(OSError):
                path.unlink()
                resource_tracker.unregister("/" + path.name.removeprefix("sem."), kind)
        shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self._lock)


def remove_abandoned() -> None:
    """Remove what engines of this user left whose owners were killed: nobody locks their
    directory any more."""
    for directory in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
        with contextlib.suppress(OSError), _locked_alone(directory):
            for _, path in _list_shared_memory(directory):
                path.unlink(missing_ok=True)
            shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _locked_alone(directory: Path) -> Iterator[None]:
    """Lock a directory of this user. Raises `OSError` if anybody else has locked it, or it
    is another user's."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid != os.getuid():
            raise PermissionError(str(directory))
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _list_shared_memory(directory: Path) -> list[tuple[str, Path]]:
    """Return the semaphores and the shared memory of an engine, each with its kind as
    `resource_tracker` calls it."""
    kinds = {"semaphore": f"sem.{directory.name}-*", "shared_memory": f"{directory.name}-*"}
    return [(kind, path) for kind, pattern in kinds.items() for path in SHARED_MEMORY.glob(pattern)]


def name_shared_memory() -> None:
    """Name the shared memory that this process makes as its semaphores are named, after the
    engine's directory."""
    prefix = multiprocessing.current_process()._config["semprefix"]  # type: ignore[attr-defined]
    shared_memory._make_filename = lambda: f"{prefix}-{secrets.token_hex(4)}"  # type: ignore[attr-defined]
