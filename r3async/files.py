"""Directories and small files that outlive a power failure, and whether a disk has free bytes for a run."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
"""The disk, or what this user may have of it, is used up."""


def sync_directory(directory: Path) -> None:
    """Names of files made, renamed or removed in `directory` are on the disk when this returns."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(directory: Path, mode: int = 0o777) -> None:
    """Make `directory` and the parents that it lacks; each new name is on the disk when this returns. One that exists is kept.

    Raises `OSError`, `FileExistsError` where something else has the name.
    """
    directory = Path(directory)
    if directory.is_dir():
        return
    make_directory(directory.parent)
    with contextlib.suppress(FileExistsError):  # another process was faster
        directory.mkdir(mode=mode)
    if not directory.is_dir():
        raise FileExistsError(errno.EEXIST, "it is no directory", str(directory))
    sync_directory(directory)
    sync_directory(directory.parent)


def replace_file(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write `path` aside and rename it there: whole, on the disk, or as it was. Raises `OSError`."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        scratch.unlink()
    try:
        with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise
    sync_directory(path.parent)
