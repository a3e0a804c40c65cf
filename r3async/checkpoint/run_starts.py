"""The starts of a run: its name, and the lineage that each start begins.

Each start is an entry of a file in the run's directory, which is on the disk before any process of
that start exists: so two crashes without a checkpoint between them still leave two lineages. The
file also distinguishes the directory of a run from any other: it is made with the directory.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from r3async.checkpoint.directory import WEIGHT_SUFFIXES, Checkpoint
from r3async.checkpoint.manifest import CheckpointError, CheckpointUnreadable
from r3async.data.versions import Lineage, RunStart
from r3async.untrusted import MalformedError, decode_json
from r3async.world import Files
from r3async.world.files import make_directory, read_file, replace_file
from r3async.world.real import REAL_WORLD

LINEAGES_FILE = "lineages.json"


class _StartsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    starts: list[RunStart] = []


def read_run_starts(run_dir: Path, *, files: Files = REAL_WORLD.files) -> list[RunStart] | None:
    """Return all starts of the run, oldest first; None if this is not the directory of a run.

    Raises `CheckpointError` for a file that is damaged, and `CheckpointUnreadable` if the system
    does not return it.
    """
    path = run_dir / LINEAGES_FILE
    try:
        return decode_json(read_file(path, files=files), _StartsFile).starts
    except FileNotFoundError:
        return None
    except OSError as error:
        # It may be intact: nobody should move it aside for a moment without a descriptor.
        raise CheckpointUnreadable(
            f"{path} cannot be read now ({error}): the same command tries again"
        ) from error
    except MalformedError as error:
        raise CheckpointError(
            f"{path} is damaged ({error}): it numbers the starts of the run, and without it "
            "tokens of weights that a resume took back could be trained. Move it and spool/ "
            'aside, or set resume="none"'
        ) from error


class RunIdentity:
    """The small files without which nobody can resume a run or load its model, kept in memory: its
    settings, its starts, and what its own start model has besides weights. Raises `OSError`."""

    def __init__(self, run_dir: Path, *, files: Files = REAL_WORLD.files):
        self._run_dir = run_dir
        self._files = files
        start_model = [run_dir / "init" / name for name in files.list_names(run_dir / "init")]
        small = [path for path in start_model if path.suffix not in WEIGHT_SUFFIXES]
        paths = [run_dir / "config.toml", run_dir / LINEAGES_FILE, *small]
        self._contents = {path: read_file(path, files=files) for path in paths}

    def restore_if_deleted(self) -> bool:
        """Write the files anew if the run's directory was deleted or moved. Returns True if it was.
        Raises `OSError`."""
        if self._files.stat(self._run_dir / LINEAGES_FILE) is not None:
            return False
        for path, content in self._contents.items():
            make_directory(path.parent, files=self._files)
            replace_file(path, content, files=self._files)
        return True


def mark_run_directory(run_dir: Path, *, files: Files = REAL_WORLD.files) -> None:
    """Mark `run_dir` as the directory of a run, unless it is one already."""
    if read_run_starts(run_dir, files=files) is None:
        _write_starts(run_dir, [], files)


def begin_lineage(
    run_dir: Path,
    resume: Checkpoint | None,
    model: str,
    origin: str = "",
    *,
    files: Files = REAL_WORLD.files,
) -> Lineage:
    """Return the lineage of a start that begins now. Its number was never used in this directory
    before, and is on the disk when this returns.

    Raises `CheckpointError`.

    Args:
        resume: Checkpoint to start from; without one, the run starts from the start model.
        model: Fingerprint of the start model.
        origin: The checkpoint's run, if it is another one.
    """
    starts = read_run_starts(run_dir, files=files) or []
    if resume:
        parent = resume.state.lineage
        version = resume.state.version
    else:
        parent = Lineage()
        version = 0
    lineage, start = parent.start_child(starts, version, model, origin)
    _write_starts(run_dir, [*starts, start], files)
    return lineage


def describe_origin(resume: Checkpoint, checkpoints: Path) -> str:
    """Return the run and step of a checkpoint that is not in `checkpoints`, the run's own; ""
    for one that is."""
    ours = resume.path.parent.absolute() == checkpoints.absolute()
    return "" if ours else f"{resume.state.run_id} step {resume.state.steps}"


def _write_starts(run_dir: Path, starts: list[RunStart], files: Files) -> None:
    replace_file(
        run_dir / LINEAGES_FILE,
        msgspec.json.format(msgspec.json.encode(_StartsFile(starts))) + b"\n",
        files=files,
    )
