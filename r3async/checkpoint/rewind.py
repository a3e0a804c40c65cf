"""Taking a run back to a checkpoint: its records, slots and leases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from r3async.checkpoint.directory import STATE_FILE
from r3async.checkpoint.manifest import CheckpointError
from r3async.checkpoint.state import RunState
from r3async.schedule.run_ahead import AdmissionController
from r3async.world import Files
from r3async.world.appending import whole_record_bytes
from r3async.world.real import REAL_WORLD


def rewind_records(
    run_dir: Path,
    record_bytes: Mapping[str, int],
    pending_lines: Mapping[str, Sequence[str]] | None = None,
    *,
    files: Files = REAL_WORLD.files,
) -> dict[str, int]:
    """Cut the run's records back to their lengths at the checkpoint, and append the lines that were
    still in memory then.

    Returns the bytes cut off, by file. Raises `OSError`. A record that is shorter than it was, or
    lost, stays as it is: figures are lost, but training is not.

    Args:
        record_bytes: Length of each record at the checkpoint, by file name.
        pending_lines: Lines of each record that were in memory, by file name.
    """
    cut = {}
    for name in files.list_names(run_dir):
        length = record_bytes.get(name)
        found = files.stat(run_dir / name)
        if (
            length is not None
            and found is not None
            and not found.is_directory
            and found.size > length
        ):
            with files.open(run_dir / name, create=True) as file:
                file.truncate(length)
            cut[name] = found.size - length
    for name, lines in (pending_lines or {}).items():
        with files.open(run_dir / name, create=True) as file:
            file.truncate(whole_record_bytes(run_dir / name, files=files))
            file.append(["".join(lines).encode()])
    return cut


def restore_admission(admission: AdmissionController, state: RunState) -> None:
    """Restore slots and leases as they were, with the checkpoint's weights in every engine. Raises
    `CheckpointError` if they are inconsistent."""
    try:
        admission.load_state_dict(state.admission, state.consumed, state.consumed_beyond)
        admission.version_published(state.version)
    except ValueError as error:
        raise CheckpointError(f"{STATE_FILE}: admission: {error}") from error
