"""Checkpoints of a run: weights, optimizer and state in one directory, which is either
complete or absent."""

from r3async.checkpoint.directory import (
    Checkpoint,
    CheckpointDirectory,
    find_checkpoint,
    open_checkpoint,
)
from r3async.checkpoint.manifest import CheckpointError, FileEntry
from r3async.checkpoint.resume_checks import (
    check_resume_settings,
    check_start_model,
)
from r3async.checkpoint.rewind import restore_admission, rewind_records
from r3async.checkpoint.state import RunState
from r3async.checkpoint.writer import CheckpointSchedule, CheckpointWriter

__all__ = [
    "Checkpoint",
    "CheckpointDirectory",
    "CheckpointError",
    "CheckpointSchedule",
    "CheckpointWriter",
    "FileEntry",
    "RunState",
    "check_resume_settings",
    "check_start_model",
    "find_checkpoint",
    "open_checkpoint",
    "restore_admission",
    "rewind_records",
]
