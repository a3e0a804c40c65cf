"""The directory of a run's checkpoints: written aside and renamed, verified when opened, pruned, never half there. And who uses
the run's directory: a run that is resumed must not begin while a process of its past still writes.

`checkpoints/step-00000010/` is complete whenever it has that name. Everything else has a name that says so: `.partial` is
being written, `.removing` is being removed (both are removed at the next start), `.bad` could not be read when it was the
newest, `.superseded` was made by steps that a resume from an older checkpoint took back (both stay until a person removes
them).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from r3async.checkpoint.evaluations import find_best_evaluation, read_evaluations, remove_evaluations
from r3async.checkpoint.state import (
    MANIFEST_FILE,
    MANIFEST_SCHEMA,
    CheckpointError,
    CheckpointManifest,
    CheckpointUnreadable,
    FileEntry,
    IncompatibleCheckpoint,
    RunState,
    decode_manifest,
    decode_state,
    encode_state,
    make_read_error,
    verify_checkpoint_file,
    write_checkpoint_file,
)
from r3async.config import Config
from r3async.world import Files
from r3async.world.appending import EventReporter
from r3async.world.files import make_directory, read_file
from r3async.world.real import REAL_WORLD

if TYPE_CHECKING:
    from r3async.checkpoint.tensors import LearnerStateReader
import asyncio
import errno

STATE_FILE = "run.json"
_STEP_PATTERN = re.compile(r"step-(\d{8,})")
READ_ATTEMPTS = 3
"""To read a checkpoint that the disk does not give."""


def ignore_event(event: str, /, **facts: object) -> None:
    """A `EventReporter` to nobody."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose every byte is as it was written. `path`: its directory."""

    path: Path
    state: RunState
    manifest: CheckpointManifest
    files: Files = REAL_WORLD.files

    def open_learner_state(self) -> LearnerStateReader:
        """What the ranks wrote, for `LearnerBackend.restore_state`. Raises `CheckpointError`."""
        from r3async.checkpoint.tensors import LearnerStateReader

        names = [f.name for f in self.manifest.files if f.name.startswith("learner-")]
        return LearnerStateReader([self.path / name for name in names], files=self.files)


def open_checkpoint(path: Path, *, check_tensors: bool = True, files: Files = REAL_WORLD.files) -> Checkpoint:
    """Read and verify one. `check_tensors`: also the learner's files, which takes as long as reading them.

    Raises `CheckpointError` naming the file and what is wrong with it; `CheckpointUnreadable` if the disk does not give it.
    """
    try:
        data = read_file(path / MANIFEST_FILE, files=files)
    except OSError as error:
        raise make_read_error(MANIFEST_FILE, error) from error
    manifest = decode_manifest(data)
    named = _STEP_PATTERN.fullmatch(path.name)
    if named and int(named[1]) != manifest.step:
        raise CheckpointError(
            f"{MANIFEST_FILE}: it is of step {manifest.step}, not of the step in the directory's name"
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
        raise CheckpointError(f"{STATE_FILE}: it is of step {state.steps}, and {MANIFEST_FILE} of step {manifest.step}")
    return Checkpoint(path, state, manifest, files)


class CheckpointDirectory:
    """A run's checkpoints. One process at a time writes, prunes or opens them for resuming."""

    def __init__(
        self,
        directory: Path,
        *,
        keep_last: int = 3,
        keep_every: int = 0,
        keep_best: str = "",
        report: EventReporter = ignore_event,
        files: Files = REAL_WORLD.files,
    ):
        if keep_last < 1:
            raise ValueError(f"keep_last must be 1 or more, got {keep_last}")
        self.directory, self.files, self._report = Path(directory), files, report
        self._keep_last, self._keep_every, self._keep_best = keep_last, keep_every, keep_best

    @classmethod
    def from_config(
        cls, config: Config, run_dir: Path, *, report: EventReporter = ignore_event, files: Files = REAL_WORLD.files
    ) -> CheckpointDirectory:
        """Those of a run, where `checkpoint.directory` says."""
        settings = config.checkpoint
        where = Path(settings.directory) if settings.directory else run_dir / "checkpoints"
        last, every, best = settings.keep_last, settings.keep_every, settings.keep_best
        return cls(where, keep_last=last, keep_every=every, keep_best=best, report=report, files=files)

    def list_steps(self) -> list[int]:
        """Of the complete checkpoints, oldest first."""
        return sorted(
            int(m[1]) for name in self.files.list_names(self.directory) if (m := _STEP_PATTERN.fullmatch(name))
        )

    @property
    def is_empty(self) -> bool:
        """There is no checkpoint, and none that could not be read."""
        return not self.list_steps() and not self._list_bad()

    def step_path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"

    def remove_leftovers(self) -> None:
        """Remove what a process that was killed left behind. At the start of a run, before anything else."""
        for path in (self.directory / name for name in self.files.list_names(self.directory)):
            if path.suffix in (".partial", ".removing") and _STEP_PATTERN.fullmatch(path.stem):
                self.files.remove_tree(path)
                self._report("checkpoint_remains_removed", path=str(path))
        remove_evaluations(self.directory, files=self.files)  # those that were not finished

    def remove_later_evaluations(self, resume: Checkpoint | None) -> None:
        """The run goes on from `resume`, or from its start: evaluations of later steps are of weights that no longer exist."""
        remove_evaluations(self.directory, after=resume.state.steps if resume else 0, files=self.files)

    def begin_checkpoint(self, step: int) -> Path:
        """An empty directory, in which all files of that step's checkpoint are to be written."""
        make_directory(self.directory, files=self.files)
        partial = self.discard_partial(step)
        self.files.create_directory(partial)
        return partial

    def discard_partial(self, step: int) -> Path:
        """Remove what has been written of a checkpoint that was begun. Returns where that was."""
        partial = self.directory / f"step-{step:08d}.partial"
        self.files.remove_tree(partial)
        return partial

    def commit_checkpoint(self, state: RunState, parts: Iterable[FileEntry]) -> Path:
        """Make the checkpoint that was begun visible. When this returns it outlives a power failure.

        `parts`: what has been written to it, and is on the disk. One of the same step, from before a resume, is superseded.
        """
        partial, final = self.directory / f"step-{state.steps:08d}.partial", self.step_path(state.steps)
        records = [*parts, write_checkpoint_file(partial / STATE_FILE, encode_state(state), files=self.files)]
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
        """That of `step`, verified. Raises `CheckpointError`; `CheckpointUnreadable` if the disk does not give it, asked
        `READ_ATTEMPTS` times."""
        for _ in range(READ_ATTEMPTS - 1):
            with contextlib.suppress(CheckpointUnreadable):
                return open_checkpoint(self.step_path(step), files=self.files)
        return open_checkpoint(self.step_path(step), files=self.files)

    def find_newest_intact(self, on_bad: Callable[[int, CheckpointError], object]) -> Checkpoint | None:
        """The newest checkpoint that is intact; `on_bad(step, error)` for each newer one. Raises `CheckpointUnreadable` or
        `IncompatibleCheckpoint`: a checkpoint that the disk does not give, or that another version wrote, may be intact, and
        an older one must not take its place in silence."""
        for step in reversed(self.list_steps()):
            try:
                return self.open_step(step)
            except CheckpointUnreadable as error:
                raise CheckpointUnreadable(
                    f"{self.step_path(step)} cannot be read now ({error}), and may be intact: mend the disk and resume, or set "
                    "`resume` to the path of an older checkpoint"
                ) from error
            except IncompatibleCheckpoint as error:
                raise IncompatibleCheckpoint(f"{self.step_path(step)}: {error}") from error
            except CheckpointError as error:
                on_bad(step, error)
        return None

    def recover_newest(self) -> Checkpoint | None:
        """The newest checkpoint that is intact; None if there never was one. Those that are not are set aside and reported.

        Raises `CheckpointError` if there are some and none is intact: to start over would throw the run away in silence. Raises
        `CheckpointUnreadable` or `IncompatibleCheckpoint`, and sets nothing aside for it, if the disk does not give one, or
        another version wrote it.
        """
        reasons: list[str] = []

        def set_aside(step: int, error: CheckpointError) -> None:
            aside = self._set_aside(self.step_path(step), "bad")
            reasons.append(f"step {step}: {error}")
            self._report("checkpoint_bad", step=step, reason=str(error), kept_as=str(aside))

        found = self.find_newest_intact(set_aside)
        if found is None and (reasons or self._list_bad()):
            said = "; ".join(reasons) or "only those are left that could not be read before"
            raise CheckpointError(
                f"no checkpoint in {self.directory} can be read ({said}); they are kept there as *.bad. Set "
                'resume="none" to start over'
            )
        return found

    def _list_bad(self) -> list[Path]:
        """Those set aside because they could not be read."""
        names = self.files.list_names(self.directory)
        return [self.directory / name for name in names if name.startswith("step-") and ".bad" in name]

    def supersede_later(self, step: int) -> None:
        """Set aside all checkpoints of later steps: the run resumes from `step`, and makes them again. Before step 0, where
        a run begins, also those that could not be read."""
        for later in self.list_steps():
            if later > step:
                aside = self._set_aside(self.step_path(later), "superseded")
                self._report("checkpoint_superseded", step=later, kept_as=str(aside))
        remove_evaluations(self.directory, after=step, files=self.files)
        for bad in self._list_bad() if step < 0 else ():
            self._set_aside(bad, "superseded")

    def _set_aside(self, path: Path, suffix: str) -> Path:
        aside, count = path.with_suffix(f".{suffix}"), 1
        while self.files.stat(aside) is not None:
            count += 1
            aside = path.with_suffix(f".{suffix}-{count}")
        self.files.rename(path, aside)
        self.files.fsync_directory(self.directory)
        return aside

    def find_best(self) -> tuple[int, float] | None:
        """The step of the checkpoint that is the best by its evaluation's `keep_best`, and that figure. None without either."""
        if not self._keep_best:
            return None
        return find_best_evaluation(
            read_evaluations(self.directory, files=self.files), self._keep_best, self.list_steps()
        )

    def _protected_steps(self) -> set[int]:
        """Steps of the best, and of those that are being evaluated."""
        if not self._keep_best:
            return set()
        evaluations, best = read_evaluations(self.directory, files=self.files), self.find_best()
        playing = {step for step, one in evaluations.items() if not one.is_finished}
        return playing | ({best[0]} if best else set())

    def prune_old(self) -> list[int]:
        """Remove all but the last `keep_last`, every step that `keep_every` divides, the newest that is intact, and with
        `keep_best` the best and those that are being evaluated.

        Nothing is removed before one of those that stay has been read again and is intact. Returns the steps removed.
        """
        steps = self.list_steps()
        kept = set(steps[-self._keep_last :])
        kept |= {s for s in steps if self._keep_every and s % self._keep_every == 0} | self._protected_steps()
        extra = [s for s in steps if s not in kept]
        if not extra:
            return []
        intact = self.find_newest_intact(
            lambda step, error: self._report("checkpoint_bad", step=step, reason=str(error))
        )
        removed = [s for s in extra if intact is not None and s != intact.state.steps]
        for step in removed:
            # Renamed first: a directory half removed must not pass for a checkpoint.
            going = self.step_path(step).with_suffix(".removing")
            self.files.remove_tree(going)
            self.files.rename(self.step_path(step), going)
            self.files.fsync_directory(self.directory)
            self.files.remove_tree(going)
        return removed


def find_checkpoint(path: Path, *, files: Files = REAL_WORLD.files) -> Checkpoint:
    """The checkpoint at `path`, or the newest intact one of the run at `path`. Changes nothing.

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
        raise CheckpointError(f"no checkpoint in {inside.directory} can be read ({'; '.join(reasons)})")
    raise CheckpointError(f"{path} is neither a checkpoint nor a run with checkpoints (checkpoints/step-*)")


RUN_LOCK_FILE = ".lock"
LOCK_POLL_SECONDS = 0.1


class RunLock:
    """`flock` on a file in the run's directory. The kernel lets go of it when the process ends, however it ends.

    Whoever prepares the directory holds it alone; every process that writes the run's records then shares it.
    """

    def __init__(self, run_dir: Path, *, files: Files = REAL_WORLD.files):
        self._run_dir, self._file = run_dir, files.open(run_dir / RUN_LOCK_FILE, create=True)

    async def acquire_exclusive(
        self,
        timeout: float,
        on_wait: Callable[[], object] = lambda: None,
        *,
        clock: Callable[[], float] = REAL_WORLD.clock.monotonic,
    ) -> bool:
        """Hold it alone, as soon as nobody else has it; False if that takes longer than `timeout` seconds.

        `on_wait` is called once if it is not free at once. One that was held beside others is given up for that.
        """
        deadline, reported = clock() + timeout, False
        while True:
            try:
                self._file.lock()
                return True
            except BlockingIOError:
                if clock() > deadline:
                    return False
                if not reported:
                    on_wait()
                reported = True
                await asyncio.sleep(LOCK_POLL_SECONDS)

    def acquire_shared(self) -> None:
        """Hold it beside others, from now on; one that was held alone is given up for that.

        Raises `BlockingIOError`, at once, if another process holds it alone: that one prepares the directory for another start,
        to which the process that asks does not belong.
        """
        try:
            self._file.lock(shared=True)
        except BlockingIOError as error:
            said = f"another process prepares {self._run_dir} for a start of its own"
            raise BlockingIOError(errno.EWOULDBLOCK, said) from error

    def close(self) -> None:
        """Let go. Idempotent."""
        self._file.close()
