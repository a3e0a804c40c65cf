"""Checkpoints: a run's weights, optimizer and state in one directory that is complete or not there."""

from r3async.checkpoint.directory import Checkpoints, Opened, find_checkpoint, open_checkpoint
from r3async.checkpoint.resume import check_model, check_settings, restore_admission, rewind
from r3async.checkpoint.state import CheckpointError, FileRecord, RunState
from r3async.checkpoint.writer import CheckpointWriter, Due

__all__ = [
    "CheckpointError",
    "CheckpointWriter",
    "Checkpoints",
    "Due",
    "FileRecord",
    "Opened",
    "RunState",
    "check_model",
    "check_settings",
    "find_checkpoint",
    "open_checkpoint",
    "restore_admission",
    "rewind",
]
