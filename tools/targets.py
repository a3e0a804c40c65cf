"""Errors about a place that the user named for output, in one line that names it."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

_SYSTEM_ERROR = re.compile(r"os error (\d+)|errno (\d+)|\[Errno (\d+)\]|No space left on device")


def describe_os_error(error: BaseException) -> str:
    """Return a line about an error: for an `OSError`, the file, if it names one,
    and what is wrong."""
    name = getattr(error, "filename", None)
    reason = getattr(error, "strerror", None)
    return (
        f"{os.fsdecode(name)}: {reason}"
        if isinstance(name, str | bytes) and reason
        else reason or str(error)
    )


def find_system_error(error: BaseException) -> OSError | None:
    """Return the error of the operating system that `error` is or tells of; None if
    it is another one.

    safetensors and pyarrow raise errors of their own, recognizable only by their text.
    """
    if isinstance(error, OSError):
        return error if error.errno is not None else None
    found = _SYSTEM_ERROR.search(str(error))
    if found is None:
        return None
    number = int(next(filter(None, found.groups()), errno.ENOSPC))
    return OSError(number, os.strerror(number))


@contextlib.contextmanager
def name_target(target: Path) -> Iterator[None]:
    """Name `target` in the error if writing to it fails; the command line prints such an
    error as one line.

    An error about another file keeps the name of that file. Raises `OSError`.
    """
    try:
        yield
    except Exception as error:
        failure = find_system_error(error)
        if failure is None or not _is_about(failure, target):
            raise
        raise OSError(
            failure.errno, f"cannot be written: {failure.strerror}", str(target)
        ) from error


def _is_about(error: OSError, target: Path) -> bool:
    """Return whether an error names no file, the target, something within it, or a
    scratch file beside it."""
    if error.filename is None or isinstance(error.filename, int):
        return True
    path = Path(os.fsdecode(error.filename)).absolute()
    place = target.absolute()
    beside = path.parent == place.parent and path.name.startswith(f".{place.name}")
    return beside or path.is_relative_to(place) or place.is_relative_to(path)
