"""Directories and small files that survive a power failure."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterable
from pathlib import Path

from r3async.world import Buffer, File, Files
from r3async.world.disk import SYSTEM_FILES

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers for a disk, or a user's quota, that is used up."""


def make_directory(directory: Path, mode: int = 0o777, *, files: Files = SYSTEM_FILES) -> None:
    """Create `directory` and its missing parents; each new name is on the disk when this returns.
    An existing directory is kept.

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
    """Sync the names in `directory`, its own name, and those of all directories above it to the
    disk, as far as this user may.

    This is for a directory that existed already: the process that created it may have been killed
    before it was synced. Raises `OSError`.
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


def replace_file(
    path: Path, data: Buffer, mode: int = 0o644, *, files: Files = SYSTEM_FILES
) -> None:
    """Replace `path` through a temporary file that is renamed to it: afterwards it is whole and on
    the disk, or as it was. Raises `OSError`."""
    write_atomically(path, [data], mode, fsync=True, files=files)
    files.fsync_directory(path.parent)


def write_atomically(
    path: Path,
    parts: Iterable[Buffer],
    mode: int = 0o644,
    *,
    fsync: bool,
    files: Files = SYSTEM_FILES,
) -> None:
    """Write the parts, one after the other, to a temporary file that is renamed to `path`:
    afterwards it is whole, or as it was. With `fsync` its content, though not its name, is on the
    disk. Raises `OSError`, and what `parts` raises."""
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
    """Rename `new`, which is complete, to `directory`. What has that name is first moved aside, as
    a rename cannot replace a directory, and then removed. Raises `OSError`."""
    old = directory.with_name(f".{directory.name}.old")
    files.remove_tree(old)
    if files.stat(directory) is not None:
        files.rename(directory, old)
    files.rename(new, directory)
    files.remove_tree(old)
    files.fsync_directory(directory.parent)


def _open_scratch_file(path: Path, mode: int, files: Files) -> tuple[Path, File]:
    """Open a new file beside `path`. A file that another process is writing, or left when it was
    killed, is not touched."""
    number = 0
    while True:
        scratch = path.with_name(f".{path.name}.{number}")
        with contextlib.suppress(FileExistsError):
            return scratch, files.open(scratch, exclusive=True, mode=mode)
        number += 1
