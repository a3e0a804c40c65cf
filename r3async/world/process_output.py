"""The output of a process.

On a full disk a `print` must not raise, and text of models, environments and exceptions is made
safe for a terminal.
"""

from __future__ import annotations

import io
import os
import re
import stat
import sys


class _LogFile(io.RawIOBase):
    """A raw stream to a descriptor. Data that the disk does not take are dropped, and the log
    states how much once it takes more."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._dropped_bytes = 0

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: object) -> int:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        try:
            if self._dropped_bytes:
                os.write(
                    self._descriptor,
                    b"\n[%d bytes of this log were not written: no free bytes]\n"
                    % self._dropped_bytes,
                )
                self._dropped_bytes = 0
            return os.write(self._descriptor, view)
        except OSError:
            self._dropped_bytes += len(view)
            return len(view)


def ignore_command_output_errors() -> None:
    """Ignore output errors as `ignore_output_errors` does, for a command whose output and
    errors are files, or a terminal that may be closed. Other streams, and those that tests
    capture, stay unchanged."""
    mine = sys.stdout is sys.__stdout__ and sys.stderr is sys.__stderr__
    if mine and all(
        os.isatty(number) or stat.S_ISREG(os.fstat(number).st_mode) for number in (1, 2)
    ):
        ignore_output_errors()


def ignore_output_errors() -> None:
    """Make writes of Python code to `sys.stdout` or `sys.stderr` raise nothing from now on;
    descriptors stay as they are."""
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


_CONTROL_CODES = [
    *range(
        0x20
        # C0: among them escape, which begins what a terminal obeys, and carriage return, which
        # overwrites a line.
    ),
    *range(0x7F, 0xA0),  # delete, and C1: CSI is one of them
    0x61C,
    0x200E,
    0x200F,
    *range(0x2028, 0x202F),  # line separators, and what turns the direction of text around
    *range(0x2066, 0x206A),
    *range(0xD800, 0xE000),  # halves of a pair, which cannot be written as UTF-8
    *range(0xFFF9, 0xFFFC),
]
_ESCAPES = {code: f"\\u{code:04x}" for code in _CONTROL_CODES}
_ESCAPES |= {
    code: "".join(
        f"\\u{half:04x}" for half in (0xD800 | (code - 0x10000) >> 10, 0xDC00 | (code & 0x3FF))
    )
    for code in range(0xE0000, 0xE0080)  # tags: invisible
}
_LINE_ESCAPES = {code: text for code, text in _ESCAPES.items() if code not in (0x09, 0x0A)}
_COLOR_CODES = re.compile(r"\x1b\[[0-9;]*m")


def escape_control_characters(text: str, *, keep_newlines: bool = True) -> str:
    """Return `text` with every character that a terminal would obey, or that hides or reverses what
    is written, as `\\uXXXX`.

    Newline and tab stay, unless `keep_newlines` is false. The result is unchanged if it is escaped
    again, and JSON stays the same JSON.
    """
    return text.translate(_LINE_ESCAPES if keep_newlines else _ESCAPES)


def clean_log_output(text: str) -> str:
    """Return a program's output with control characters escaped, colours removed, and Windows
    line ends replaced."""
    return escape_control_characters(_COLOR_CODES.sub("", text).replace("\r\n", "\n"))
