"""Directories and small files that survive a power failure, and retries on a full disk."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from r3async.world import Buffer, EventReporter, File, Files, World
from r3async.world.disk import SYSTEM_FILES

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers for a disk, or a user's quota, that is used up."""


def make_directory(directory: Path, mode: int = 0o777, *, files: Files = SYSTEM_FILES) -> None:
    """Create `directory` and its missing parents; each new name is on the disk when this returns. An existing
    directory is kept.

    Raises `OSError`, and `FileExistsError` if something else has the name.
    """
    directory = Path(directory)
    if _is_directory(directory, files):
        # An earlier call may have created it and then failed: its name may not be on the disk yet.
        with contextlib.suppress(PermissionError):
            files.fsync_directory(directory.parent)
        return
    make_directory(directory.parent, files=files)
    with contextlib.suppress(FileExistsError):  # another process was faster
        files.create_directory(directory, mode)
    if not _is_directory(directory, files):
        raise FileExistsError(errno.EEXIST, "it is no directory", str(directory))
    files.fsync_directory(directory)
    files.fsync_directory(directory.parent)


def fsync_with_parents(directory: Path, *, files: Files = SYSTEM_FILES) -> None:
    """Sync the names in `directory`, its own name, and those of all directories above it to the disk, as far as this
    user may.

    This is for a directory that existed already: the process that created it may have been killed before it was
    synced. Raises `OSError`.
    """
    for path in (directory, *directory.parents):
        with contextlib.suppress(PermissionError):
            files.fsync_directory(path)


def _is_directory(path: Path, files: Files) -> bool:
    found = files.stat(path)
    return found is not None and found.is_directory


def read_file(path: Path, *, files: Files = SYSTEM_FILES) -> bytes:
    """Return the whole content of a file. Raises `OSError`."""
    with files.open(path) as file:
        return file.read()


def replace_file(path: Path, data: Buffer, mode: int = 0o644, *, files: Files = SYSTEM_FILES) -> None:
    """Replace `path` through a temporary file that is renamed to it: afterwards it is whole and on the disk, or as
    it was. Raises `OSError`."""
    write_atomically(path, [data], mode, fsync=True, files=files)
    files.fsync_directory(path.parent)


def write_atomically(
    path: Path, parts: Iterable[Buffer], mode: int = 0o644, *, fsync: bool, files: Files = SYSTEM_FILES
) -> None:
    """Write the parts, one after the other, to a temporary file that is renamed to `path`: afterwards it is whole,
    or as it was. With `fsync` its content, though not its name, is on the disk. Raises `OSError`, and what `parts`
    raises."""
    scratch, file = _open_scratch_file(path, mode, files)
    try:
        with file:
            for part in parts:
                file.append([part])
            if fsync:
                file.fsync()
        files.rename(scratch, path)
    except BaseException:
        with contextlib.suppress(OSError):
            files.remove(scratch)
        raise


def replace_directory(new: Path, directory: Path, *, files: Files = SYSTEM_FILES) -> None:
    """Rename `new`, which is complete, to `directory`. What has that name is first moved aside, as a rename cannot
    replace a directory, and then removed. Raises `OSError`."""
    old = directory.with_name(f".{directory.name}.old")
    files.remove_tree(old)
    if files.stat(directory) is not None:
        files.rename(directory, old)
    files.rename(new, directory)
    files.remove_tree(old)
    files.fsync_directory(directory.parent)


def _open_scratch_file(path: Path, mode: int, files: Files) -> tuple[Path, File]:
    """Open a new file beside `path`. A file that another process is writing, or left when it was killed, is not
    touched."""
    number = 0
    while True:
        scratch = path.with_name(f".{path.name}.{number}")
        with contextlib.suppress(FileExistsError):
            return scratch, files.open(scratch, exclusive=True, mode=mode)
        number += 1


# Retries of work on a disk that is full, or fails, until the disk does it; nothing is lost in between.


P = ParamSpec("P")
R = TypeVar("R")

RETRY_SECONDS = 1.0


def is_disk_error(error: BaseException) -> bool:
    """Return whether the disk, or the operating system, refused something that may succeed later: no space, no
    descriptor, a failing device. A missing answer (`TimeoutError`) and a broken connection do not count."""
    return isinstance(error, OSError) and not isinstance(error, TimeoutError | ConnectionError)


class DiskRetrier:
    """A retrier of work that the disk refuses. Use one for each disk and kind of work, on one event loop.

    Args:
        world: The world whose clock is used.
        report_event: Gets each event.
        stalled_event: Event when work is first refused.
        resumed_event: Event when the work is done after all.
        retry_seconds: Seconds between two attempts.
        facts: Facts that both events carry.
    """

    def __init__(
        self,
        world: World,
        report_event: EventReporter,
        stalled_event: str,
        resumed_event: str,
        *,
        retry_seconds: float = RETRY_SECONDS,
        **facts: object,
    ):
        self._clock, self._report_event, self._retry_seconds = world.clock.monotonic, report_event, retry_seconds
        self._stalled_event, self._resumed_event, self._facts = stalled_event, resumed_event, facts
        self._waiting_since: tuple[float, str] | None = None
        self.waited_seconds = 0.0
        """Total seconds that work has waited."""

    @property
    def current_wait(self) -> dict[str, Any] | None:
        """The reason why work waits (`why`), and for how many `seconds`; None while no work waits."""
        if self._waiting_since is None:
            return None
        since, error = self._waiting_since
        return {"why": error, "seconds": self._clock() - since}

    async def run_with_retries(
        self, hint: str, work: Callable[P, Awaitable[R]], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Return what `work` returns, once the disk does it. Raises any other error of `work`. `hint` tells a person
        what to do."""
        began, failed = self._clock(), False
        try:
            while True:
                try:
                    done = await work(*args, **kwargs)
                    break
                except OSError as error:
                    if not is_disk_error(error):
                        raise
                    if not failed:
                        self._report_event(self._stalled_event, error=str(error), hint=hint, **self._facts)
                    failed, self._waiting_since = True, (began, str(error))
                    await asyncio.sleep(self._retry_seconds)
        finally:
            self._waiting_since = None
            if failed:
                self.waited_seconds += self._clock() - began
        if failed:
            self._report_event(self._resumed_event, seconds=self._clock() - began, **self._facts)
        return done
