"""What every part of this room raises."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint that can not be written, read or continued from; the message says which file, why, and what to do."""
