"""The directory of a run's checkpoints: written aside and renamed, verified when opened, pruned, never half there.

`checkpoints/step-00000010/` is complete whenever it has that name. Everything else has a name that says so: `.partial` is
being written, `.removing` is being removed (both are removed at the next start), `.bad` could not be read when it was the
newest, `.superseded` was made by steps that a resume from an older checkpoint took back (both stay until a person removes
them).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from r3async.checkpoint.books import RunState, decode_state, encode_state
from r3async.checkpoint.error import CheckpointError
from r3async.checkpoint.manifest import (
    MANIFEST,
    SCHEMA,
    FileRecord,
    Manifest,
    check_file,
    decode_manifest,
    write_file,
)
from r3async.files import make_directory, sync_directory

if TYPE_CHECKING:
    from r3async.checkpoint.tensors import LearnerParts

STATE = "run.json"
_STEP = re.compile(r"step-(\d{8,})")


class Report(Protocol):
    """Where findings go: `events.warning`."""

    def __call__(self, event: str, /, **facts: object) -> object: ...


def silent(event: str, /, **facts: object) -> None:
    """A `Report` to nobody."""


@dataclass(frozen=True)
class Opened:
    """A checkpoint whose every byte is as it was written. `path`: its directory."""

    path: Path
    state: RunState
    manifest: Manifest

    def learner(self) -> LearnerParts:
        """What the ranks wrote, for `LearnerBackend.restore`. Raises `CheckpointError`."""
        from r3async.checkpoint.tensors import LearnerParts

        names = [f.name for f in self.manifest.files if f.name.startswith("learner-")]
        return LearnerParts([self.path / name for name in names])


def open_checkpoint(path: Path, *, check_tensors: bool = True) -> Opened:
    """Read and verify one. `check_tensors`: also the learner's files, which takes as long as reading them.

    Raises `CheckpointError` naming the file and what is wrong with it.
    """
    try:
        data = (path / MANIFEST).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{MANIFEST}: {error.strerror or error}") from error
    manifest = decode_manifest(data)
    named = _STEP.fullmatch(path.name)
    if named and int(named[1]) != manifest.step:
        raise CheckpointError(f"{MANIFEST}: it is of step {manifest.step}, not of the step in the directory's name")
    files = {f.name: f for f in manifest.files}
    if STATE not in files:
        raise CheckpointError(f"{MANIFEST}: it lists no {STATE}")
    for file in manifest.files:
        if check_tensors or not file.name.startswith("learner-"):
            check_file(path, file)
    try:
        state = decode_state((path / STATE).read_bytes())
    except OSError as error:
        raise CheckpointError(f"{STATE}: {error.strerror or error}") from error
    if state.steps != manifest.step:
        raise CheckpointError(f"{STATE}: it is of step {state.steps}, and {MANIFEST} of step {manifest.step}")
    return Opened(path, state, manifest)


class Checkpoints:
    """A run's checkpoints. One process at a time writes, prunes or opens them for resuming."""

    def __init__(self, directory: Path, *, keep_last: int = 3, keep_every: int = 0, report: Report = silent):
        if keep_last < 1:
            raise ValueError(f"keep_last must be 1 or more, got {keep_last}")
        self.directory, self._report = Path(directory), report
        self._keep_last, self._keep_every = keep_last, keep_every

    def steps(self) -> list[int]:
        """Of the complete checkpoints, oldest first."""
        names = [p.name for p in self.directory.iterdir()] if self.directory.is_dir() else []
        return sorted(int(m[1]) for name in names if (m := _STEP.fullmatch(name)))

    @property
    def empty(self) -> bool:
        """There is no checkpoint, and none that could not be read."""
        return not self.steps() and not self._bad()

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"

    def clean(self) -> None:
        """Remove what a process that was killed left behind. At the start of a run, before anything else."""
        if not self.directory.is_dir():
            return
        for path in sorted(self.directory.iterdir()):
            if path.suffix in (".partial", ".removing") and _STEP.fullmatch(path.stem):
                shutil.rmtree(path)
                self._report("checkpoint_remains_removed", path=str(path))

    def begin(self, step: int) -> Path:
        """An empty directory, in which all files of that step's checkpoint are to be written."""
        make_directory(self.directory)
        partial = self.directory / f"step-{step:08d}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        return partial

    def commit(self, state: RunState, files: Iterable[FileRecord], texts: Mapping[str, bytes] | None = None) -> Path:
        """Make the checkpoint that was begun visible. When this returns it outlives a power failure.

        `files`: what has been written to it, and is on the disk. `texts`: further small files. One of the same step, from
        before a resume, is superseded.
        """
        partial, final = self.directory / f"step-{state.steps:08d}.partial", self.path(state.steps)
        records = [*files, write_file(partial / STATE, encode_state(state))]
        records += [write_file(partial / name, data) for name, data in (texts or {}).items()]
        write_file(partial / MANIFEST, Manifest(SCHEMA, state.steps, records).encode())
        sync_directory(partial)
        if final.exists():
            self._set_aside(final, "superseded")
        partial.rename(final)
        sync_directory(self.directory)
        return final

    def newest(self) -> Opened | None:
        """The newest checkpoint that is intact; None if there never was one. Those that are not are set aside and reported.

        Raises `CheckpointError` if there are some and none is intact: to begin anew would throw the run away in silence.
        """
        steps = self.steps()
        reasons = []
        for step in reversed(steps):
            try:
                return open_checkpoint(self.path(step))
            except CheckpointError as error:
                aside = self._set_aside(self.path(step), "bad")
                reasons.append(f"step {step}: {error}")
                self._report("checkpoint_bad", step=step, reason=str(error), kept_as=str(aside))
        if reasons or self._bad():
            said = "; ".join(reasons) or "only those are left that could not be read before"
            raise CheckpointError(
                f"no checkpoint in {self.directory} can be read ({said}); they are kept there as *.bad. Set "
                'resume="none" to begin anew'
            )
        return None

    def _bad(self) -> list[Path]:
        """Those set aside because they could not be read."""
        return sorted(self.directory.glob("step-*.bad*")) if self.directory.is_dir() else []

    def supersede(self, step: int) -> None:
        """Set aside all checkpoints of later steps: the run goes on from `step`, and will make them anew. Before step 0, where
        a run begins, also those that could not be read."""
        for later in self.steps():
            if later > step:
                aside = self._set_aside(self.path(later), "superseded")
                self._report("checkpoint_superseded", step=later, kept_as=str(aside))
        for bad in self._bad() if step < 0 else ():
            self._set_aside(bad, "superseded")

    def _set_aside(self, path: Path, why: str) -> Path:
        aside, count = path.with_suffix(f".{why}"), 1
        while aside.exists():
            count += 1
            aside = path.with_suffix(f".{why}-{count}")
        path.rename(aside)
        sync_directory(self.directory)
        return aside

    def prune(self) -> list[int]:
        """Remove all but the last `keep_last`, every step that `keep_every` divides, and the newest that is intact.

        Nothing is removed before one of those that stay has been read again and is intact. Returns the steps removed.
        """
        steps = self.steps()
        kept = set(steps[-self._keep_last :])
        kept |= {s for s in steps if self._keep_every and s % self._keep_every == 0}
        extra = [s for s in steps if s not in kept]
        if not extra:
            return []
        for step in reversed(steps):
            try:
                open_checkpoint(self.path(step))
            except CheckpointError as error:
                self._report("checkpoint_bad", step=step, reason=str(error))
                continue
            removed = [s for s in extra if s != step]
            break
        else:
            return []
        for step in removed:
            # Renamed first: a directory half removed must not pass for a checkpoint.
            going = self.path(step).with_suffix(".removing")
            shutil.rmtree(going, ignore_errors=True)
            self.path(step).rename(going)
            sync_directory(self.directory)
            shutil.rmtree(going)
        return removed


def find_checkpoint(path: Path) -> Opened:
    """The checkpoint at `path`, or the newest intact one of the run at `path`. Changes nothing.

    Raises `CheckpointError` if there is none.
    """
    if (path / MANIFEST).exists():
        try:
            return open_checkpoint(path)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
    inside = Checkpoints(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
    reasons = []
    for step in reversed(inside.steps()):
        try:
            return open_checkpoint(inside.path(step))
        except CheckpointError as error:
            reasons.append(f"step {step}: {error}")
    if reasons:
        raise CheckpointError(f"no checkpoint in {inside.directory} can be read ({'; '.join(reasons)})")
    raise CheckpointError(f"{path} is neither a checkpoint nor a run with checkpoints (checkpoints/step-*)")
