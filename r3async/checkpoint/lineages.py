"""The starts of a run: a file in its directory that is on the disk before any process of a start exists.

So two crashes without a checkpoint between them still leave two lineages. The file also tells the directory of a run from any
other: it is made with the directory.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from r3async.checkpoint.directory import Opened
from r3async.checkpoint.error import CheckpointError
from r3async.files import read_file, replace_file
from r3async.lineage import Lineage, Start
from r3async.world import Files
from r3async.world.real import REAL

FILE = "lineages.json"


class _Starts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    starts: list[Start] = []


def read_starts(run_dir: Path, *, files: Files = REAL.files) -> list[Start] | None:
    """All starts of the run, oldest first; None if this is not the directory of a run. Raises `CheckpointError` for a file that
    cannot be read."""
    try:
        return msgspec.json.decode(read_file(run_dir / FILE, files=files), type=_Starts).starts
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{run_dir / FILE} cannot be read ({error}): it numbers the starts of the run, and without it tokens of weights "
            'that are gone could be trained. Move it and spool/ aside, or set resume="none"'
        ) from error


def mark(run_dir: Path, *, files: Files = REAL.files) -> None:
    """`run_dir` is the directory of a run, if it was not one before."""
    if read_starts(run_dir, files=files) is None:
        _write(run_dir, [], files)


def take_lineage(
    run_dir: Path, resume: Opened | None, model: str, origin: str = "", *, files: Files = REAL.files
) -> Lineage:
    """The lineage of a start that begins now, from a checkpoint (of the run `origin`, if it is another one) or, without one, from
    the start model of fingerprint `model`. Its number was never taken in this directory before, and is on the disk when this
    returns. Raises `CheckpointError`."""
    starts = read_starts(run_dir, files=files) or []
    parent, version = (resume.state.lineage, resume.state.version) if resume else (Lineage(), 0)
    lineage, start = parent.child(starts, version, model, origin)
    _write(run_dir, [*starts, start], files)
    return lineage


def origin_of(resume: Opened, checkpoints: Path) -> str:
    """Names the run and step of a checkpoint that is not in `checkpoints`, the run's own; "" for one that is."""
    ours = resume.path.parent.absolute() == checkpoints.absolute()
    return "" if ours else f"{resume.state.run_id} step {resume.state.steps}"


def _write(run_dir: Path, starts: list[Start], files: Files) -> None:
    replace_file(run_dir / FILE, msgspec.json.format(msgspec.json.encode(_Starts(starts))) + b"\n", files=files)
