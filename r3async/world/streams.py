"""Standard output and error of a process whose log is a file: a disk that is full must not raise from a `print`."""

from __future__ import annotations

import io
import os
import stat
import sys


class _LogFile(io.RawIOBase):
    """Writes to a descriptor. What the disk does not take is left out, and the log says how much once it takes more."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._left_out = 0

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: object) -> int:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        try:
            if self._left_out:
                os.write(
                    self._descriptor, b"\n[%d bytes of this log were not written: no free bytes]\n" % self._left_out
                )
                self._left_out = 0
            return os.write(self._descriptor, view)
        except OSError:
            self._left_out += len(view)
            return len(view)


def files_survive_full_disk() -> None:
    """The same for a command whose output and errors were redirected to files; others, and what tests capture, stay."""
    mine = sys.stdout is sys.__stdout__ and sys.stderr is sys.__stderr__
    if mine and all(stat.S_ISREG(os.fstat(descriptor).st_mode) for descriptor in (1, 2)):
        survive_full_disk()


def survive_full_disk() -> None:
    """From now on, nothing raises that Python code writes to `sys.stdout` or `sys.stderr`; descriptors stay as they are."""
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            io.BufferedWriter(_LogFile(descriptor)),
            "utf-8",
            "backslashreplace",
            line_buffering=True,
            write_through=True,
        )
        for descriptor in (1, 2)
    )
