"""What every part of this room raises."""

from __future__ import annotations

import errno

MISSING = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP)
"""There is no such file, and there will be none however often it is asked for."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, read or continued from; the message says which file, why, and what to do."""


class Unreadable(CheckpointError):
    """The disk did not give a file of it. Nothing is known against the checkpoint: it may be intact."""


def not_read(name: str, error: OSError) -> CheckpointError:
    """What reading the file `name` failed with: `Unreadable`, except for a file that is not there, which is damage."""
    kind = CheckpointError if error.errno in MISSING else Unreadable
    return kind(f"{name}: {error.strerror or error}")
