"""The files of this host, through the operating system."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from r3async.world import Buffer, FileStat

WRITEV_BUFFERS = 512
"""Number of buffers in one call of `writev`; the system's limit is 1,024."""

LOCK_RETRY_SECONDS = 0.001
"""Seconds between two attempts to lock a file that is locked by another process."""


class SystemFile:
    """An open file of the operating system, as a `world.File`."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def is_at(self, path: Path) -> bool:
        try:
            return os.path.samestat(os.stat(path), os.fstat(self._descriptor))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def read(self, start: int = 0, length: int | None = None) -> bytes:
        left = self.size() - start if length is None else length
        blocks = []
        while left > 0 and (block := os.pread(self._descriptor, left, start)):
            blocks.append(block)
            start = start + len(block)
            left = left - len(block)
        return b"".join(blocks)

    def map_bytes(self, start: int = 0, length: int | None = None) -> memoryview:
        left = self.size() - start
        length = left if length is None else min(length, left)
        if length <= 0:
            return memoryview(b"")
        first = start - start % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(
            self._descriptor, start + length - first, access=mmap.ACCESS_READ, offset=first
        )
        return memoryview(mapped)[start - first :]

    def append(self, buffers: Sequence[Buffer]) -> int:
        total = 0
        for at in range(0, len(buffers), WRITEV_BUFFERS):
            batch = buffers[at : at + WRITEV_BUFFERS]
            wanted = sum(memoryview(piece).nbytes for piece in batch)
            written = os.writev(self._descriptor, batch)
            if written < wanted:  # the disk fills up, or a signal came: the rest as one piece
                rest = memoryview(b"".join(batch))[written:]
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
            total += wanted
        return total

    def truncate(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)

    def fsync(self) -> None:
        os.fsync(self._descriptor)

    def lock(self, *, shared: bool = False, timeout: float = 0.0) -> None:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        deadline = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(LOCK_RETRY_SECONDS)

    def unlock(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        descriptor = self._descriptor
        self._descriptor = -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> SystemFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class SystemFiles:
    """The file systems of this host, as `world.Files`."""

    def open(
        self, path: Path, *, create: bool = False, exclusive: bool = False, mode: int = 0o644
    ) -> SystemFile:
        if not (create or exclusive):
            return SystemFile(open_for_reading(path))
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        return SystemFile(os.open(path, flags | (os.O_EXCL if exclusive else 0), mode))

    def stat(self, path: Path) -> FileStat | None:
        try:
            found = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return FileStat(
            found.st_size,
            found.st_mtime_ns,
            stat.S_ISDIR(found.st_mode),
            stat.S_IMODE(found.st_mode),
        )

    def list_names(self, directory: Path) -> list[str]:
        try:
            return sorted(os.listdir(directory))
        except FileNotFoundError:
            return []

    def create_directory(self, directory: Path, mode: int = 0o777) -> None:
        os.mkdir(directory, mode)

    def make_private_directory(self, directory: Path) -> None:
        # In a place like /dev/shm anyone may have created a folder, or a link, with the name that
        # we use, and the owner of a folder can replace our files in it.
        try:
            os.mkdir(directory, 0o700)
        except FileExistsError:
            found = os.lstat(directory)
            if stat.S_ISLNK(found.st_mode) and not os.stat(directory.parent).st_mode & 0o022:
                found = os.stat(directory)  # a link that only this user can have made
            if not stat.S_ISDIR(found.st_mode):
                raise _not_private_error(directory, "is a link, or no directory") from None
            if found.st_uid != os.getuid():
                raise _not_private_error(
                    directory, f"belongs to user {found.st_uid}, and this is user {os.getuid()}"
                ) from None
            if found.st_mode & 0o022:
                os.chmod(directory, 0o700)

    def rename(self, path: Path, new_path: Path) -> None:
        if os.path.isdir(new_path):  # an empty one would be replaced
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new_path))
        os.rename(path, new_path)

    def remove(self, path: Path) -> None:
        _remove_path(path, os.rmdir)

    def remove_tree(self, path: Path) -> None:
        _remove_path(path, shutil.rmtree)

    def fsync_directory(self, directory: Path) -> None:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def free_bytes(self, path: Path) -> int:
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def total_bytes(self, path: Path) -> int:
        found = os.statvfs(path)
        return found.f_blocks * found.f_frsize


def open_for_reading(path: Path) -> int:
    """Open a regular file and return its descriptor. Raises `OSError`, at once, for a directory, a
    pipe or a device, whose readers would wait or fail later."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is no regular file", str(path))


SYSTEM_FILES = SystemFiles()
"""The files of this host."""


def write_at(path: Path, start: int, buffers: Iterable[Buffer]) -> None:
    """Write the buffers one after the other into an existing file that is long enough, from `start`
    on. Several processes may do so at once, each in its own region; none of them maps what it
    writes. Raises `OSError`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        for piece in buffers:
            rest = memoryview(piece).cast("B")
            while rest:
                written = os.pwrite(descriptor, rest, start)
                rest = rest[written:]
                start = start + written
    finally:
        os.close(descriptor)


def _remove_path(path: Path, remove_directory: Callable[[Path], object]) -> None:
    """Remove a file, or a directory with `remove_directory`. A link to a directory counts as a
    file. Does nothing if the path does not exist."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if os.path.isdir(path) and not os.path.islink(path):
            remove_directory(path)
        else:
            os.unlink(path)


def _not_private_error(directory: Path, why: str) -> PermissionError:
    return PermissionError(errno.EPERM, why, str(directory))
