"""Standard output and error of a process whose log is a file: a disk that is full must not raise from a `print`. And text of
models, environments and exceptions, as a terminal may show it.
"""

from __future__ import annotations

import io
import os
import re
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


_ORDERED = [
    *range(
        0x20
    ),  # C0: among them escape, which begins what a terminal obeys, and carriage return, which overwrites a line
    *range(0x7F, 0xA0),  # delete, and C1: CSI is one of them
    0x61C,
    0x200E,
    0x200F,
    *range(0x2028, 0x202F),  # line separators, and what turns the direction of text around
    *range(0x2066, 0x206A),
    *range(0xD800, 0xE000),  # halves of a pair, which cannot be written as UTF-8
    *range(0xFFF9, 0xFFFC),
]
_ESCAPED = {code: f"\\u{code:04x}" for code in _ORDERED}
_ESCAPED |= {
    code: "".join(f"\\u{half:04x}" for half in (0xD800 | (code - 0x10000) >> 10, 0xDC00 | (code & 0x3FF)))
    for code in range(0xE0000, 0xE0080)  # tags: invisible
}
_IN_LINES = {code: text for code, text in _ESCAPED.items() if code not in (0x09, 0x0A)}
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def printable(text: str, *, lines: bool = True) -> str:
    """`text` with every character that a terminal would obey, or that hides or turns around what is written, as `\\uXXXX`.

    Newline and tab stay, unless `lines` is false. What comes out stays as it is if it is given in again, and JSON stays the same
    JSON.
    """
    return text.translate(_IN_LINES if lines else _ESCAPED)


def printable_log(text: str) -> str:
    """The same of a program's output, whose colours are taken out and whose lines may end as on Windows."""
    return printable(_COLOURS.sub("", text).replace("\r\n", "\n"))
