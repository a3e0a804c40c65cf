"""A checkpoint as a person wants to see it: which files are as they were written, the run's state, and the tensors by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from r3async.checkpoint.directory import STATE, Checkpoints, open_checkpoint
from r3async.checkpoint.state import MANIFEST, CheckpointError, RunState, check_file, decode_manifest, decode_state
from r3async.data.versions import UNKNOWN, Lineage

if TYPE_CHECKING:
    from r3async.checkpoint.tensors import Part


class FileSeen(msgspec.Struct, frozen=True):
    """`problem`: "" if every byte is as it was written."""

    name: str
    size: int
    problem: str


class TensorSeen(msgspec.Struct, frozen=True):
    """A piece in one file. `shape`: of the whole tensor; `size`: of the piece, at `offset`."""

    name: str
    dtype: str
    shape: list[int]
    size: list[int]
    offset: list[int]
    nbytes: int
    file: str


class CheckpointSeen(msgspec.Struct):
    """`learner`: what the ranks say that is no tensor. `problems` names what is wrong; none if it can be resumed from."""

    path: str
    step: int | None = None
    files: list[FileSeen] = []
    state: RunState | None = None
    learner: dict[str, Any] = {}
    tensors: list[TensorSeen] = []
    problems: list[str] = []


def look(path: Path) -> CheckpointSeen:
    """Everything that can be read, also of one that is damaged. Takes as long as reading it."""
    from r3async.checkpoint.tensors import Part  # loads torch

    seen = CheckpointSeen(str(path))
    try:
        manifest = decode_manifest((path / MANIFEST).read_bytes())
    except OSError as error:
        seen.problems.append(f"{MANIFEST}: {error.strerror or error}")
    except CheckpointError as error:
        seen.problems.append(str(error))
    else:
        seen.step = manifest.step
        for record in manifest.files:
            problem = _problem(path, record)
            seen.files.append(FileSeen(record.name, record.size, problem))
            seen.problems += [problem] if problem else []
    listed = {file.name for file in seen.files}
    if not listed:  # what is there, with nothing to compare it with
        for entry in sorted(path.iterdir()):
            seen.files.append(FileSeen(entry.name, entry.stat().st_size, "the manifest does not vouch for it"))
    try:
        seen.state = decode_state((path / STATE).read_bytes())
    except (OSError, CheckpointError) as error:
        _add(seen, f"{STATE}: {error}" if isinstance(error, OSError) else str(error))
    for part in sorted(path.glob("learner-*.safetensors")):
        try:
            header = Part(part)
        except CheckpointError as error:
            _add(seen, str(error))
            continue
        seen.learner = seen.learner or msgspec.to_builtins(header.facts)
        seen.tensors += _tensors(header)
    if not seen.problems:
        try:
            open_checkpoint(path, check_tensors=False).learner()
        except CheckpointError as error:
            _add(seen, str(error))
    return seen


def _add(seen: CheckpointSeen, problem: str) -> None:
    """Unless the file is known to be broken already."""
    name = problem.partition(":")[0]
    if not any(known.startswith(f"{name}:") for known in seen.problems):
        seen.problems.append(problem)


def _problem(path: Path, record: Any) -> str:
    try:
        check_file(path, record)
    except CheckpointError as error:
        return str(error)
    return ""


def _tensors(part: Part) -> list[TensorSeen]:
    """What the header of a rank's file says, by name."""
    seen = []
    for name, tensor in sorted(part.tensors.items()):
        place, (begin, end) = part.places[name], tensor.data_offsets
        shape, size, offset = list(place.shape), list(place.size), list(place.offset)
        seen.append(TensorSeen(name, tensor.dtype, shape, size, offset, end - begin, part.name))
    return seen


def describe(seen: CheckpointSeen, limit: int) -> list[str]:
    """In words. `limit`: tensors to name; 0: all."""
    size = sum(file.size for file in seen.files)
    intact = "intact" if not seen.problems else "BROKEN: it cannot be resumed from"
    step = "unknown step" if seen.step is None else f"after step {seen.step}"
    lines = [f"checkpoint {seen.path}: {step}, {size:,} bytes, {intact}", "files"]
    for file in seen.files:
        _, _, why = file.problem.partition(": ")
        lines.append(f"  {file.name:<40} {file.size:>15,}  {(why or file.problem) or 'as written'}")
    if seen.state is not None:
        lines += ["state", *_state(seen.state)]
    if seen.learner:
        lines.append(f"learner  {', '.join(f'{k} {v}' for k, v in seen.learner.items())}")
    if seen.tensors:
        values = sum(math.prod(t.size) for t in seen.tensors)
        nbytes = sum(t.nbytes for t in seen.tensors)
        lines.append(f"tensors  {len(seen.tensors)} pieces, {values:,} values, {nbytes:,} bytes")
    shown = seen.tensors[:limit] if limit else seen.tensors
    width = max((len(t.name) for t in shown), default=0)
    for t in shown:
        part = "" if t.size == t.shape else f"  {t.size} at {t.offset}, {t.file}"
        lines.append(f"  {t.name:<{width}} {t.dtype:<5} {t.shape!s:<20} {t.nbytes:>13,}{part}")
    if len(shown) < len(seen.tensors):
        lines.append(f"and {len(seen.tensors) - len(shown)} more; --limit 0 shows all")
    return lines


def _state(state: RunState) -> list[str]:
    facts = {
        "run": state.run_id,
        "model": state.model_path,
        "steps": state.steps,
        "version": state.version,
        "lineage": _lineage(state.lineage),
        "groups trained": state.consumed + len(state.consumed_beyond),
        "tokens generated": f"{state.generated_tokens:,}",
        "seconds of running": f"{state.elapsed:.0f}",
    }
    return [f"  {name:<22} {value}" for name, value in facts.items()]


def _lineage(lineage: Lineage) -> str:
    if lineage.number == UNKNOWN:
        return "unknown: made by a release without lineages"
    past = ", ".join(f"{number} up to version {last}" for number, last in sorted(lineage.past.items()))
    return f"{lineage.number}, began with version {lineage.version}; before it: {past or 'none'}"


def overview(directory: Path) -> tuple[list[str], list[str]]:
    """A line for each checkpoint of a run, oldest first, and what is wrong. Files of the learner are compared by their size
    only; `look` reads them."""
    lines, problems = [], []
    checkpoints = Checkpoints(directory)
    for step in checkpoints.steps():
        path = checkpoints.path(step)
        size = sum(file.stat().st_size for file in path.iterdir())
        try:
            opened = open_checkpoint(path, check_tensors=False)
            short = [f for f in opened.manifest.files if (path / f.name).stat().st_size != f.size]
            if short:
                raise CheckpointError(f"{short[0].name}: it is not {short[0].size} bytes long")
            state = opened.state
            about = f"version {state.version} of lineage {state.lineage.number}, {state.consumed} groups trained"
        except (CheckpointError, OSError) as error:
            about = f"BROKEN: {error}"
            problems.append(f"{path}: {error}")
        lines.append(f"{path.name}  {size:>15,} bytes  {about}")
    for path in sorted(directory.glob("step-*.*")):
        lines.append(f"{path.name}  (set aside, or being written)")
    return lines, problems
