"""The directory of a run's checkpoints, which are written aside and renamed, verified when opened,
and pruned.

A checkpoint named `checkpoints/step-00000010/` is always complete. All others have a suffix:
`.partial` is being written, `.removing` is being removed (both are removed at the next start),
`.bad` could not be read when it was the newest, and `.superseded` was made by steps that a resume
from an older checkpoint took back (both stay until a person removes them).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from r3async.checkpoint.evaluations import (
    find_best_evaluation,
    read_evaluations,
    remove_evaluations,
)
from r3async.checkpoint.manifest import (
    MANIFEST_FILE,
    MANIFEST_SCHEMA,
    CheckpointError,
    CheckpointManifest,
    CheckpointUnreadable,
    FileEntry,
    IncompatibleCheckpoint,
    decode_manifest,
    make_read_error,
    verify_checkpoint_file,
    write_checkpoint_file,
)
from r3async.checkpoint.state import RunState, decode_state, encode_state
from r3async.config import Config
from r3async.world import EventReporter, Files, ignore_event
from r3async.world.files import make_directory, read_file
from r3async.world.real import REAL_WORLD

if TYPE_CHECKING:
    from r3async.checkpoint.rank_files import LearnerStateReader


STATE_FILE = "run.json"
_STEP_PATTERN = re.compile(r"step-(\d{8,})")
WEIGHT_SUFFIXES = (".safetensors", ".bin")
"""Suffixes of a model's files of weights."""
READ_ATTEMPTS = 3
"""Attempts to read a checkpoint when the disk fails to return it."""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint, every byte of which is as it was written; `path` is its directory."""

    path: Path
    state: RunState
    manifest: CheckpointManifest
    files: Files = REAL_WORLD.files

    def open_learner_state(self) -> LearnerStateReader:
        """Return a reader for the files that the learner's ranks wrote, for
        `LearnerBackend.restore_state`. Raises `CheckpointError`."""
        from r3async.checkpoint.rank_files import LearnerStateReader

        names = [f.name for f in self.manifest.files if f.name.startswith("learner-")]
        return LearnerStateReader([self.path / name for name in names], files=self.files)


def open_checkpoint(
    path: Path, *, check_tensors: bool = True, files: Files = REAL_WORLD.files
) -> Checkpoint:
    """Read and verify the checkpoint in the directory `path`.

    Raises `CheckpointError` naming the file and what is wrong with it; `CheckpointUnreadable` if
    the disk fails to return a file.

    Args:
        check_tensors: Also verify the learner's files, which takes as long as reading them.
    """
    try:
        data = read_file(path / MANIFEST_FILE, files=files)
    except OSError as error:
        raise make_read_error(MANIFEST_FILE, error) from error
    manifest = decode_manifest(data)
    named = _STEP_PATTERN.fullmatch(path.name)
    if named and int(named[1]) != manifest.step:
        raise CheckpointError(
            f"{MANIFEST_FILE}: it is of step {manifest.step}, not of the step in the "
            "directory's name"
        )
    if STATE_FILE not in (file.name for file in manifest.files):
        raise CheckpointError(f"{MANIFEST_FILE}: it lists no {STATE_FILE}")
    for file in manifest.files:
        if check_tensors or not file.name.startswith("learner-"):
            verify_checkpoint_file(path, file, files=files)
    try:
        state = decode_state(read_file(path / STATE_FILE, files=files))
    except OSError as error:
        raise make_read_error(STATE_FILE, error) from error
    if state.steps != manifest.step:
        raise CheckpointError(
            f"{STATE_FILE}: it is of step {state.steps}, and {MANIFEST_FILE} of step "
            f"{manifest.step}"
        )
    return Checkpoint(path, state, manifest, files)


class CheckpointDirectory:
    """The checkpoints of a run. One process at a time writes, prunes or opens them for resuming."""

    def __init__(
        self,
        directory: Path,
        *,
        keep_last: int = 3,
        keep_every: int = 0,
        keep_best: str = "",
        report_event: EventReporter = ignore_event,
        files: Files = REAL_WORLD.files,
    ):
        if keep_last < 1:
            raise ValueError(f"keep_last must be 1 or more, got {keep_last}")
        self.directory = Path(directory)
        self.files = files
        self._report_event = report_event
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._keep_best = keep_best

    @classmethod
    def from_config(
        cls,
        config: Config,
        run_dir: Path,
        *,
        report_event: EventReporter = ignore_event,
        files: Files = REAL_WORLD.files,
    ) -> CheckpointDirectory:
        """Return the checkpoints of a run, in the directory that `checkpoint.directory` names."""
        settings = config.checkpoint
        where = Path(settings.directory) if settings.directory else run_dir / "checkpoints"
        last = settings.keep_last
        every = settings.keep_every
        best = settings.keep_best
        return cls(
            where,
            keep_last=last,
            keep_every=every,
            keep_best=best,
            report_event=report_event,
            files=files,
        )

    def list_steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, oldest first."""
        return sorted(
            int(m[1])
            for name in self.files.list_names(self.directory)
            if (m := _STEP_PATTERN.fullmatch(name))
        )

    @property
    def is_empty(self) -> bool:
        """True if there is no checkpoint, and none that was set aside as unreadable."""
        return not self.list_steps() and not self._list_bad()

    def step_path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"

    def recover_directory(self) -> None:
        """Remove what a killed process did not finish, and have the names of what it did finish
        survive a power failure.

        Call this at the start of a run, before anything else. A process may have been killed
        between a checkpoint's rename and the sync of its directory, and the run that resumes from
        it removes from its spool what it trained.
        """
        for path in (self.directory / name for name in self.files.list_names(self.directory)):
            if path.suffix in (".partial", ".removing") and _STEP_PATTERN.fullmatch(path.stem):
                self.files.remove_tree(path)
                self._report_event("checkpoint_remains_removed", path=str(path))
        remove_evaluations(self.directory, files=self.files)  # those that were not finished
        if self.list_steps():
            self.files.fsync_directory(self.directory)

    def remove_later_evaluations(self, resume: Checkpoint | None) -> None:
        """Remove the evaluations of steps after `resume`, or of all steps if the run goes on from
        its start: their weights no longer exist."""
        remove_evaluations(
            self.directory, after=resume.state.steps if resume else 0, files=self.files
        )

    def begin_checkpoint(self, step: int) -> Path:
        """Make and return an empty directory in which all files of a step's checkpoint
        are to be written."""
        make_directory(self.directory, files=self.files)
        partial = self.discard_partial(step)
        self.files.create_directory(partial)
        return partial

    def discard_partial(self, step: int) -> Path:
        """Remove what has been written of a checkpoint that was begun. Returns its former path."""
        partial = self.directory / f"step-{step:08d}.partial"
        self.files.remove_tree(partial)
        return partial

    def commit_checkpoint(self, state: RunState, parts: Iterable[FileEntry]) -> Path:
        """Make the checkpoint that was begun visible. When this returns, it survives
        a power failure.

        An older checkpoint of the same step, from before a resume, is superseded.

        Args:
            parts: Files that have been written to the checkpoint and are on the disk.
        """
        partial = self.directory / f"step-{state.steps:08d}.partial"
        final = self.step_path(state.steps)
        records = [
            *parts,
            write_checkpoint_file(partial / STATE_FILE, encode_state(state), files=self.files),
        ]
        write_checkpoint_file(
            partial / MANIFEST_FILE,
            CheckpointManifest(MANIFEST_SCHEMA, state.steps, records).encode(),
            files=self.files,
        )
        self.files.fsync_directory(partial)
        if self.files.stat(final) is not None:
            self._set_aside(final, "superseded")
        self.files.rename(partial, final)
        self.files.fsync_directory(self.directory)
        return final

    def open_step(self, step: int) -> Checkpoint:
        """Open and verify the checkpoint of `step`. Raises `CheckpointError`;
        `CheckpointUnreadable` if the disk fails to return it in `READ_ATTEMPTS` attempts."""
        for _ in range(READ_ATTEMPTS - 1):
            with contextlib.suppress(CheckpointUnreadable):
                return open_checkpoint(self.step_path(step), files=self.files)
        return open_checkpoint(self.step_path(step), files=self.files)

    def find_newest_intact(
        self, on_bad: Callable[[int, CheckpointError], object]
    ) -> Checkpoint | None:
        """Return the newest intact checkpoint, or None, after calling `on_bad(step, error)`
        for each newer one.

        Raises `CheckpointUnreadable` or `IncompatibleCheckpoint`: a checkpoint that the disk
        fails to return, or that another version wrote, may be intact, and an older one must not
        silently take its place.
        """
        for step in reversed(self.list_steps()):
            try:
                return self.open_step(step)
            except CheckpointUnreadable as error:
                raise CheckpointUnreadable(
                    f"{self.step_path(step)} cannot be read now ({error}), and may be intact: mend "
                    "the disk and resume, or set `resume` to the path of an older checkpoint"
                ) from error
            except IncompatibleCheckpoint as error:
                raise IncompatibleCheckpoint(f"{self.step_path(step)}: {error}") from error
            except CheckpointError as error:
                on_bad(step, error)
        return None

    def recover_newest(self) -> Checkpoint | None:
        """Return the newest intact checkpoint, or None if there never was one. Damaged ones are set
        aside and reported.

        Raises `CheckpointError` if there are some and none is intact: starting over would silently
        discard the run. Raises `CheckpointUnreadable` or `IncompatibleCheckpoint` if the disk fails
        to return a checkpoint or another version wrote it; such a checkpoint is not set aside.
        """
        reasons: list[str] = []

        def set_aside(step: int, error: CheckpointError) -> None:
            aside = self._set_aside(self.step_path(step), "bad")
            reasons.append(f"step {step}: {error}")
            self._report_event("checkpoint_bad", step=step, reason=str(error), kept_as=str(aside))

        found = self.find_newest_intact(set_aside)
        if found is None and (reasons or self._list_bad()):
            said = "; ".join(reasons) or "only those are left that could not be read before"
            raise CheckpointError(
                f"no checkpoint in {self.directory} can be read ({said}); they are kept there as "
                '*.bad. Set resume="none" to start over'
            )
        return found

    def _list_bad(self) -> list[Path]:
        """Return the checkpoints that were set aside because they could not be read."""
        names = self.files.list_names(self.directory)
        return [
            self.directory / name for name in names if name.startswith("step-") and ".bad" in name
        ]

    def supersede_later(self, step: int) -> None:
        """Set aside all checkpoints of later steps: the run resumes from `step`, and makes
        them again. With a `step` before 0, where a run begins, also set aside those that
        could not be read."""
        for later in self.list_steps():
            if later > step:
                aside = self._set_aside(self.step_path(later), "superseded")
                self._report_event("checkpoint_superseded", step=later, kept_as=str(aside))
        remove_evaluations(self.directory, after=step, files=self.files)
        for bad in self._list_bad() if step < 0 else ():
            self._set_aside(bad, "superseded")

    def _set_aside(self, path: Path, suffix: str) -> Path:
        aside = path.with_suffix(f".{suffix}")
        count = 1
        while self.files.stat(aside) is not None:
            count += 1
            aside = path.with_suffix(f".{suffix}-{count}")
        self.files.rename(path, aside)
        self.files.fsync_directory(self.directory)
        return aside

    def find_best(self) -> tuple[int, float] | None:
        """Return the step of the best checkpoint by its evaluation's `keep_best`, and that figure;
        None if there is no such setting or no such evaluation."""
        if not self._keep_best:
            return None
        return find_best_evaluation(
            read_evaluations(self.directory, files=self.files), self._keep_best, self.list_steps()
        )

    def _protected_steps(self) -> set[int]:
        """Return the steps of the best checkpoint, and of those that are being evaluated."""
        if not self._keep_best:
            return set()
        evaluations = read_evaluations(self.directory, files=self.files)
        best = self.find_best()
        playing = {step for step, one in evaluations.items() if not one.is_finished}
        return playing | ({best[0]} if best else set())

    def prune_old(self) -> list[int]:
        """Remove old checkpoints, and return their steps.

        The last `keep_last` stay, every step that `keep_every` divides, the newest that is intact,
        and with `keep_best` the best and those that are being evaluated. Nothing is removed before
        one of those that stay has been read again and found intact.
        """
        steps = self.list_steps()
        kept = set(steps[-self._keep_last :])
        kept |= {
            s for s in steps if self._keep_every and s % self._keep_every == 0
        } | self._protected_steps()
        extra = [s for s in steps if s not in kept]
        if not extra:
            return []
        intact = self.find_newest_intact(
            lambda step, error: self._report_event("checkpoint_bad", step=step, reason=str(error))
        )
        removed = [s for s in extra if intact is not None and s != intact.state.steps]
        for step in removed:
            # Rename first: a half-removed directory must not look like a checkpoint.
            going = self.step_path(step).with_suffix(".removing")
            self.files.remove_tree(going)
            self.files.rename(self.step_path(step), going)
            self.files.fsync_directory(self.directory)
            self.files.remove_tree(going)
        return removed


def find_checkpoint(path: Path, *, files: Files = REAL_WORLD.files) -> Checkpoint:
    """Return the checkpoint at `path`, or the newest intact one of the run at `path`. This
    changes nothing.

    Raises `CheckpointError` if there is none.
    """
    if files.stat(path / MANIFEST_FILE) is not None:
        try:
            return open_checkpoint(path, files=files)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
    within = path / "checkpoints"
    inside = CheckpointDirectory(within if files.stat(within) is not None else path, files=files)
    reasons: list[str] = []
    found = inside.find_newest_intact(lambda step, error: reasons.append(f"step {step}: {error}"))
    if found is not None:
        return found
    if reasons:
        raise CheckpointError(
            f"no checkpoint in {inside.directory} can be read ({'; '.join(reasons)})"
        )
    raise CheckpointError(
        f"{path} is neither a checkpoint nor a run with checkpoints (checkpoints/step-*)"
    )
