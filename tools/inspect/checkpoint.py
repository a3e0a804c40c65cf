"""Describe a checkpoint: the integrity of its files, the run's state, and the tensors by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from r3async.checkpoint.directory import STATE_FILE, CheckpointDirectory, open_checkpoint
from r3async.checkpoint.manifest import (
    MANIFEST_FILE,
    CheckpointError,
    decode_manifest,
    verify_checkpoint_file,
)
from r3async.checkpoint.state import RunState, decode_state
from r3async.data.versions import UNKNOWN_LINEAGE, Lineage
from r3async.world.files import read_file

if TYPE_CHECKING:
    from r3async.checkpoint.rank_files import RankFile


class FileStatus(msgspec.Struct, frozen=True):
    """A file of a checkpoint.

    Attributes:
        problem: What is wrong with it; "" if every byte is as it was written.
    """

    name: str
    size: int
    problem: str


class TensorPiece(msgspec.Struct, frozen=True):
    """A piece of a tensor in one file.

    Attributes:
        shape: Shape of the whole tensor.
        size: Shape of the piece.
        offset: Position of the piece in the tensor.
    """

    name: str
    dtype: str
    shape: list[int]
    size: list[int]
    offset: list[int]
    nbytes: int
    file: str


class CheckpointContents(msgspec.Struct):
    """The readable contents of a checkpoint.

    Attributes:
        learner: The ranks' metadata besides tensors.
        problems: What is wrong; empty if a run can resume from it.
    """

    path: str
    step: int | None = None
    files: list[FileStatus] = []
    state: RunState | None = None
    learner: dict[str, Any] = {}
    tensors: list[TensorPiece] = []
    problems: list[str] = []


def inspect_checkpoint(path: Path) -> CheckpointContents:
    """Read everything that is readable, even of a damaged checkpoint. Takes as long as reading the
    whole checkpoint."""
    from r3async.checkpoint.rank_files import RankFile  # loads torch

    seen = CheckpointContents(str(path))
    try:
        manifest = decode_manifest(read_file(path / MANIFEST_FILE))
    except OSError as error:
        seen.problems.append(f"{MANIFEST_FILE}: {error.strerror or error}")
    except CheckpointError as error:
        seen.problems.append(str(error))
    else:
        seen.step = manifest.step
        for record in manifest.files:
            problem = _describe_problem(path, record)
            seen.files.append(FileStatus(record.name, record.size, problem))
            seen.problems += [problem] if problem else []
    listed = {file.name for file in seen.files}
    if not listed:  # list the existing files, with nothing to compare them with
        for entry in sorted(path.iterdir()):
            seen.files.append(
                FileStatus(entry.name, entry.lstat().st_size, "the manifest does not vouch for it")
            )
    try:
        seen.state = decode_state(read_file(path / STATE_FILE))
    except (OSError, CheckpointError) as error:
        _add_problem(seen, f"{STATE_FILE}: {error}" if isinstance(error, OSError) else str(error))
    for part in sorted(path.glob("learner-*.safetensors")):
        try:
            header = RankFile(part)
        except CheckpointError as error:
            _add_problem(seen, str(error))
            continue
        seen.learner = seen.learner or msgspec.to_builtins(header.metadata)
        seen.tensors += _list_tensors(header)
    if not seen.problems:
        try:
            open_checkpoint(path, check_tensors=False).open_learner_state()
        except CheckpointError as error:
            _add_problem(seen, str(error))
    return seen


def _add_problem(contents: CheckpointContents, problem: str) -> None:
    """Add a problem, unless the file is already known to be broken."""
    name = problem.partition(":")[0]
    if not any(known.startswith(f"{name}:") for known in contents.problems):
        contents.problems.append(problem)


def _describe_problem(path: Path, record: Any) -> str:
    try:
        verify_checkpoint_file(path, record)
    except CheckpointError as error:
        return str(error)
    return ""


def _list_tensors(part: RankFile) -> list[TensorPiece]:
    """List the pieces in the header of a rank's file, by name."""
    seen = []
    for name, tensor in sorted(part.tensors.items()):
        place = part.slices[name]
        begin, end = tensor.data_offsets
        shape = list(place.shape)
        size = list(place.size)
        offset = list(place.offset)
        seen.append(TensorPiece(name, tensor.dtype, shape, size, offset, end - begin, part.name))
    return seen


def describe_checkpoint(contents: CheckpointContents, limit: int) -> list[str]:
    """Describe a checkpoint in lines of text.

    Args:
        limit: Number of tensors to list; 0 for all.
    """
    size = sum(file.size for file in contents.files)
    intact = "intact" if not contents.problems else "BROKEN: it cannot be resumed from"
    step = "unknown step" if contents.step is None else f"after step {contents.step}"
    lines = [f"checkpoint {contents.path}: {step}, {size:,} bytes, {intact}", "files"]
    for file in contents.files:
        _, _, why = file.problem.partition(": ")
        lines.append(f"  {file.name:<40} {file.size:>15,}  {(why or file.problem) or 'as written'}")
    if contents.state is not None:
        lines += ["state", *_describe_state(contents.state)]
    if contents.learner:
        lines.append(f"learner  {', '.join(f'{k} {v}' for k, v in contents.learner.items())}")
    if contents.tensors:
        values = sum(math.prod(t.size) for t in contents.tensors)
        nbytes = sum(t.nbytes for t in contents.tensors)
        lines.append(
            f"tensors  {len(contents.tensors)} pieces, {values:,} values, {nbytes:,} bytes"
        )
    shown = contents.tensors[:limit] if limit else contents.tensors
    width = max((len(t.name) for t in shown), default=0)
    for t in shown:
        part = "" if t.size == t.shape else f"  {t.size} at {t.offset}, {t.file}"
        lines.append(f"  {t.name:<{width}} {t.dtype:<5} {t.shape!s:<20} {t.nbytes:>13,}{part}")
    if len(shown) < len(contents.tensors):
        lines.append(f"and {len(contents.tensors) - len(shown)} more; --limit 0 shows all")
    return lines


def _describe_state(state: RunState) -> list[str]:
    facts = {
        "run": state.run_id,
        "model": state.model_path,
        "steps": state.steps,
        "version": state.version,
        "lineage": _describe_lineage(state.lineage),
        "groups trained": state.consumed + len(state.consumed_beyond),
        "tokens generated": f"{state.generated_tokens:,}",
        "seconds of running": f"{state.elapsed:.0f}",
    }
    return [f"  {name:<22} {value}" for name, value in facts.items()]


def _describe_lineage(lineage: Lineage) -> str:
    if lineage.number == UNKNOWN_LINEAGE:
        return "unknown: made by a release without lineages"
    past = ", ".join(
        f"{number} up to version {last}" for number, last in sorted(lineage.past.items())
    )
    return f"{lineage.number}, began with version {lineage.version}; before it: {past or 'none'}"


def summarize_checkpoints(directory: Path) -> tuple[list[str], list[str]]:
    """Summarise the checkpoints of a run, one line each, oldest first, and list their problems.

    The learner's files are compared by size only; `inspect_checkpoint` reads them.
    """
    lines = []
    problems = []
    checkpoints = CheckpointDirectory(directory)
    for step in checkpoints.list_steps():
        path = checkpoints.step_path(step)
        size = sum(file.lstat().st_size for file in path.iterdir())
        try:
            opened = open_checkpoint(path, check_tensors=False)
            short = [f for f in opened.manifest.files if (path / f.name).stat().st_size != f.size]
            if short:
                raise CheckpointError(f"{short[0].name}: it is not {short[0].size} bytes long")
            state = opened.state
            about = (
                f"version {state.version} of lineage {state.lineage.number}, "
                f"{state.consumed} groups trained"
            )
        except (CheckpointError, OSError) as error:
            about = f"BROKEN: {error}"
            problems.append(f"{path}: {error}")
        lines.append(f"{path.name}  {size:>15,} bytes  {about}")
    for path in sorted(directory.glob("step-*.*")):
        lines.append(f"{path.name}  (set aside, or being written)")
    return lines, problems
