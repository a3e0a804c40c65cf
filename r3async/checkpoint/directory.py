"""The directory of a run's checkpoints, which are written aside and renamed, verified when opened, pruned, and resumed
from.

A checkpoint named `checkpoints/step-00000010/` is always complete. All others have a suffix: `.partial` is being
written, `.removing` is being removed (both are removed at the next start), `.bad` could not be read when it was the
newest, and `.superseded` was made by steps that a resume from an older checkpoint took back (both stay until a person
removes them).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from r3async.checkpoint.state import (
    MANIFEST_FILE,
    MANIFEST_SCHEMA,
    CheckpointError,
    CheckpointManifest,
    CheckpointUnreadable,
    FileEntry,
    IncompatibleCheckpoint,
    RunState,
    TrainingState,
    decode_manifest,
    decode_state,
    encode_state,
    make_read_error,
    verify_checkpoint_file,
    write_checkpoint_file,
)
from r3async.config import REDACTED, CheckpointConfig, Config, config_to_dict, flatten_section
from r3async.data.versions import Lineage, RunStart
from r3async.data.write_sizes import read_write_sizes
from r3async.schedule.admission import AdmissionController
from r3async.untrusted import MalformedError, decode_json
from r3async.world import EventReporter, Files, World, ignore_event
from r3async.world.appending import whole_record_bytes
from r3async.world.files import make_directory, read_file, replace_file
from r3async.world.real import REAL_WORLD

if TYPE_CHECKING:
    from r3async.checkpoint.tensors import LearnerStateReader

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
        """Return a reader for the files that the learner's ranks wrote, for `LearnerBackend.restore_state`. Raises
        `CheckpointError`."""
        from r3async.checkpoint.tensors import LearnerStateReader

        names = [f.name for f in self.manifest.files if f.name.startswith("learner-")]
        return LearnerStateReader([self.path / name for name in names], files=self.files)


def open_checkpoint(path: Path, *, check_tensors: bool = True, files: Files = REAL_WORLD.files) -> Checkpoint:
    """Read and verify the checkpoint in the directory `path`.

    Raises `CheckpointError` naming the file and what is wrong with it; `CheckpointUnreadable` if the disk fails to
    return a file.

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
        self.directory, self.files, self._report_event = Path(directory), files, report_event
        self._keep_last, self._keep_every, self._keep_best = keep_last, keep_every, keep_best

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
        last, every, best = settings.keep_last, settings.keep_every, settings.keep_best
        return cls(where, keep_last=last, keep_every=every, keep_best=best, report_event=report_event, files=files)

    def list_steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, oldest first."""
        return sorted(
            int(m[1]) for name in self.files.list_names(self.directory) if (m := _STEP_PATTERN.fullmatch(name))
        )

    @property
    def is_empty(self) -> bool:
        """True if there is no checkpoint, and none that was set aside as unreadable."""
        return not self.list_steps() and not self._list_bad()

    def step_path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"

    def recover_directory(self) -> None:
        """Remove what a killed process did not finish, and have the names of what it did finish survive a power failure.

        Call this at the start of a run, before anything else. A process may have been killed between a checkpoint's
        rename and the sync of its directory, and the run that resumes from it removes from its spool what it trained.
        """
        for path in (self.directory / name for name in self.files.list_names(self.directory)):
            if path.suffix in (".partial", ".removing") and _STEP_PATTERN.fullmatch(path.stem):
                self.files.remove_tree(path)
                self._report_event("checkpoint_remains_removed", path=str(path))
        remove_evaluations(self.directory, files=self.files)  # those that were not finished
        if self.list_steps():
            self.files.fsync_directory(self.directory)

    def remove_later_evaluations(self, resume: Checkpoint | None) -> None:
        """Remove the evaluations of steps after `resume`, or of all steps if the run goes on from its start: their
        weights no longer exist."""
        remove_evaluations(self.directory, after=resume.state.steps if resume else 0, files=self.files)

    def begin_checkpoint(self, step: int) -> Path:
        """Make and return an empty directory in which all files of a step's checkpoint are to be written."""
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
        """Make the checkpoint that was begun visible. When this returns, it survives a power failure.

        An older checkpoint of the same step, from before a resume, is superseded.

        Args:
            parts: Files that have been written to the checkpoint and are on the disk.
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
        """Open and verify the checkpoint of `step`. Raises `CheckpointError`; `CheckpointUnreadable` if the disk fails
        to return it in `READ_ATTEMPTS` attempts."""
        for _ in range(READ_ATTEMPTS - 1):
            with contextlib.suppress(CheckpointUnreadable):
                return open_checkpoint(self.step_path(step), files=self.files)
        return open_checkpoint(self.step_path(step), files=self.files)

    def find_newest_intact(self, on_bad: Callable[[int, CheckpointError], object]) -> Checkpoint | None:
        """Return the newest intact checkpoint, or None, after calling `on_bad(step, error)` for each newer one.

        Raises `CheckpointUnreadable` or `IncompatibleCheckpoint`: a checkpoint that the disk fails to return, or that
        another version wrote, may be intact, and an older one must not silently take its place.
        """
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
        """Return the newest intact checkpoint, or None if there never was one. Damaged ones are set aside and reported.

        Raises `CheckpointError` if there are some and none is intact: starting over would silently discard the run.
        Raises `CheckpointUnreadable` or `IncompatibleCheckpoint` if the disk fails to return a checkpoint or another
        version wrote it; such a checkpoint is not set aside.
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
                f"no checkpoint in {self.directory} can be read ({said}); they are kept there as *.bad. Set "
                'resume="none" to start over'
            )
        return found

    def _list_bad(self) -> list[Path]:
        """Return the checkpoints that were set aside because they could not be read."""
        names = self.files.list_names(self.directory)
        return [self.directory / name for name in names if name.startswith("step-") and ".bad" in name]

    def supersede_later(self, step: int) -> None:
        """Set aside all checkpoints of later steps: the run resumes from `step`, and makes them again. With a `step`
        before 0, where a run begins, also set aside those that could not be read."""
        for later in self.list_steps():
            if later > step:
                aside = self._set_aside(self.step_path(later), "superseded")
                self._report_event("checkpoint_superseded", step=later, kept_as=str(aside))
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
        """Return the step of the best checkpoint by its evaluation's `keep_best`, and that figure; None if there is no
        such setting or no such evaluation."""
        if not self._keep_best:
            return None
        return find_best_evaluation(
            read_evaluations(self.directory, files=self.files), self._keep_best, self.list_steps()
        )

    def _protected_steps(self) -> set[int]:
        """Return the steps of the best checkpoint, and of those that are being evaluated."""
        if not self._keep_best:
            return set()
        evaluations, best = read_evaluations(self.directory, files=self.files), self.find_best()
        playing = {step for step, one in evaluations.items() if not one.is_finished}
        return playing | ({best[0]} if best else set())

    def prune_old(self) -> list[int]:
        """Remove old checkpoints, and return their steps.

        The last `keep_last` stay, every step that `keep_every` divides, the newest that is intact, and with `keep_best`
        the best and those that are being evaluated. Nothing is removed before one of those that stay has been read
        again and found intact.
        """
        steps = self.list_steps()
        kept = set(steps[-self._keep_last :])
        kept |= {s for s in steps if self._keep_every and s % self._keep_every == 0} | self._protected_steps()
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
    """Return the checkpoint at `path`, or the newest intact one of the run at `path`. This changes nothing.

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
    """A `flock` on a file in the run's directory, which the kernel releases when the process ends, however it ends.

    The process that prepares the directory holds it exclusively; then all processes that write the run's records share
    it.
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
        """Acquire the lock exclusively, as soon as nobody else has it. Returns False if that takes longer than
        `timeout` seconds.

        A shared lock that this process holds is given up for it. `on_wait` is called once if the lock is not free at
        once.
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
        """Acquire the lock together with others. An exclusive lock that this process holds is given up for it.

        Raises `BlockingIOError`, at once, if another process holds the lock exclusively: that process prepares the
        directory for another start, to which this process does not belong.
        """
        try:
            self._file.lock(shared=True)
        except BlockingIOError as error:
            said = f"another process prepares {self._run_dir} for a start of its own"
            raise BlockingIOError(errno.EWOULDBLOCK, said) from error

    def close(self) -> None:
        """Release the lock. Idempotent."""
        self._file.close()


def is_run_in_use(run_dir: Path, *, files: Files = REAL_WORLD.files) -> bool:
    """Return whether a process makes the run in that directory, or still writes to it."""
    if files.stat(run_dir / RUN_LOCK_FILE) is None:
        return False
    with files.open(run_dir / RUN_LOCK_FILE, create=True) as file:
        try:
            file.lock()
        except BlockingIOError:
            return True
    return False


# Checkpoint schedule, and writing while training goes on: the state is copied between two steps and written during the
# following ones.


WriteRankFiles = Callable[[Path], Sequence[FileEntry]]
"""Function that writes the copies of the learner's ranks into a directory, durably, and returns the files written. It
may raise."""


class CheckpointSchedule:
    """The schedule of checkpoints: decides after which steps one is made. Pure except for its clock (seconds,
    monotonic)."""

    def __init__(
        self,
        config: CheckpointConfig,
        clock: Callable[[], float] = REAL_WORLD.clock.monotonic,
        evaluated_every: int = 0,
        last_step: int = 0,
    ):
        """Begin the schedule after `last_step`.

        Args:
            evaluated_every: `evaluation.every_steps`; with `checkpoint.keep_best` each evaluated step has a checkpoint.
            last_step: The step that the run resumes from.
        """
        self._config, self._clock = config, clock
        self._evaluation_interval = evaluated_every if config.keep_best else 0
        self.last_step, self._last_time = last_step, clock()
        """Step of the last checkpoint that was begun."""

    def __call__(self, step: int) -> bool:
        """Return True if a checkpoint is due after `step`, which was just made. `checkpoint.every_steps` counts from
        step 0, so that a resumed run keeps its rhythm."""
        every, minutes = self._config.every_steps, self._config.every_minutes
        by_steps = bool(every) and step // every > self.last_step // every
        evaluated = bool(self._evaluation_interval) and step % self._evaluation_interval == 0
        return by_steps or evaluated or (bool(minutes) and self._clock() - self._last_time >= 60 * minutes)

    def mark_begun(self, step: int) -> None:
        """Record that a checkpoint of `step` was begun."""
        self.last_step, self._last_time = step, self._clock()


class CheckpointWriter:
    """A writer of a run's checkpoints, one at a time, in its own thread. It belongs to the learner's event loop.

    A failure is reported at once, and training goes on: the next checkpoint is the next attempt. A failure leaves
    nothing behind that could be taken for a checkpoint, and existing checkpoints stay.

    Args:
        events: A structlog logger.
    """

    def __init__(
        self, config: Config, run_id: str, model_path: Path, run_dir: Path, events: Any, *, world: World = REAL_WORLD
    ):
        self._settings, self._config = config.checkpoint, config_to_dict(config)
        written = read_write_sizes(config, model_path, files=world.files)
        self._write_timeout = config.checkpoint.resolve_write_timeout(written.checkpoint_bytes)
        self._run_id, self._model_path, self._events, self._world = run_id, model_path, events, world
        self._checkpoints = CheckpointDirectory.from_config(
            config, run_dir, report_event=self._report_event, files=world.files
        )
        self._thread = world.threads.new_worker("checkpoint")
        self._fingerprint = ""
        """Fingerprint of the start model, once it has been taken."""
        self._pending: tuple[int, asyncio.Task[None]] | None = None
        """Step of the checkpoint that is being written, and the task that writes it."""
        self._failure: CheckpointError | None = None
        """Failure of the last checkpoint that has ended, if it failed."""

    def _report_event(self, event: str, /, **facts: object) -> None:
        report = self._events.error if event.endswith(("_failed", "_bad")) else self._events.info
        report(event, **facts)

    async def take_fingerprint(self) -> None:
        """Take the fingerprint of the start model, once, while its files are there."""
        if not self._fingerprint:
            run, files = self._world.threads.run, self._world.files
            self._fingerprint = await run(fingerprint_model, self._model_path, files=files)

    async def save_checkpoint(
        self,
        state: TrainingState,
        copy_state: Callable[[], Awaitable[object]],
        write_files: WriteRankFiles,
        on_committed: Callable[[], object] = lambda: None,
    ) -> None:
        """Copy the state of the ranks (`copy_state`) and begin to write it, as soon as the previous checkpoint is
        written.

        With `checkpoint.asynchronous` off, the checkpoint has been written when this returns. Raises `CheckpointError`
        if one takes longer than `checkpoint.write_timeout`.

        Args:
            write_files: Called once, in the writer's thread; what it writes must be a copy that later steps do not
                change.
            on_committed: Called on the event loop once the checkpoint is visible and on the disk.
        """
        await self._wait_for_pending()
        await self.take_fingerprint()
        whole = RunState(
            run_id=self._run_id,
            config=self._config,
            model_path=str(self._model_path),
            model_fingerprint=self._fingerprint,
            **msgspec.structs.asdict(state),
        )
        await copy_state()
        self._pending = state.steps, asyncio.create_task(self._write_checkpoint(whole, write_files, on_committed))
        if not self._settings.asynchronous:
            await self._wait_for_pending()

    async def wait_until_written(self) -> None:
        """Wait for the checkpoint that is being written. Raises `CheckpointError` if the last one failed, or takes too
        long."""
        await self._wait_for_pending()
        if self._failure is not None:
            raise self._failure

    async def _wait_for_pending(self) -> None:
        if self._pending is None:
            return
        step, writing = self._pending
        await asyncio.wait([writing], timeout=self._write_timeout)
        if not writing.done():
            raise CheckpointError(
                f"the checkpoint of step {step} was not written within {self._write_timeout:g} s (checkpoint.write_timeout)"
            )
        self._pending = None
        writing.result()

    async def _write_checkpoint(
        self, state: RunState, write_files: WriteRankFiles, on_committed: Callable[[], object]
    ) -> None:
        clock = self._world.clock.monotonic
        began = clock()
        try:
            path, nbytes = await self._thread.run(self._write_and_commit, state, write_files)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self._report_event("checkpoint_failed", step=state.steps, error=reason)
            self._failure = CheckpointError(
                f"the checkpoint of step {state.steps} could not be written: {reason}. Those before it are intact; mend the "
                "cause (space, rights) and resume"
            )
            return
        self._failure = None
        seconds = clock() - began
        on_committed()
        self._report_event("checkpoint_written", step=state.steps, path=str(path), bytes=nbytes, seconds=seconds)
        try:
            if removed := await self._thread.run(self._checkpoints.prune_old):
                self._report_event("checkpoints_pruned", steps=removed)
        except (OSError, CheckpointError) as error:  # the checkpoint is written anyway; the next one prunes again
            self._report_event("checkpoint_prune_failed", error=str(error))

    def _write_and_commit(self, state: RunState, write_files: WriteRankFiles) -> tuple[Path, int]:
        partial = self._checkpoints.begin_checkpoint(state.steps)
        try:
            records = write_files(partial)
            return self._checkpoints.commit_checkpoint(state, records), sum(r.size for r in records)
        except BaseException:
            with contextlib.suppress(OSError):  # otherwise removed at the next start
                self._checkpoints.discard_partial(state.steps)
            raise


# Resuming a run: checks of configuration and model, rewinding records and leases to the checkpoint's step, and the
# starts of a run.
#
# Each start is an entry of a file in the run's directory, which is on the disk before any process of that start exists:
# so two crashes without a checkpoint between them still leave two lineages. The file also distinguishes the directory
# of a run from any other: it is made with the directory.


LINEAGES_FILE = "lineages.json"

FIXED_SETTINGS = (
    "seed",
    "model.path",
    "model.init",
    "env",
    "schedule.max_staleness",
    "schedule.prompts_per_step",
    "schedule.group_size",
    "schedule.steps_per_publication",
    "schedule.tokens_per_step",
    "schedule.replaced_groups",
    "schedule.window",
    "learner.backend",
    "learner.lora",
    "learner.freeze_router",
    "sft",
)
"""Settings, and whole sections, that may not change during a run: they determine which tasks come next, slots and
leases, what is trained, and the layout of the tensors."""

CHANGEABLE_SETTINGS = (
    "steps, learner.lr and the rest of learner (parallel, dtype, …), algorithm, generator, checkpoint, supervise"
)


def find_changed_settings(saved: Mapping[str, Any], config: Config) -> dict[str, tuple[Any, Any]]:
    """Return the settings that have changed: the saved and the current value, by dotted key.

    A setting that the saved configuration does not know has its default. `name` and `resume` are not training settings,
    and are ignored.
    """
    # In the form that a checkpoint has: without tuples.
    old, new, defaults = (
        flatten_section(decode_json(msgspec.json.encode(each)))
        for each in (saved, config_to_dict(config), config_to_dict(Config()))
    )
    out = {}
    for key in sorted({*old, *new} - {"name", "resume"}):
        was, value = old.get(key, defaults.get(key)), new.get(key, defaults.get(key))
        if not _may_be_equal(was, value):
            out[key] = (was, value)
    return out


def _may_be_equal(was: Any, value: Any) -> bool:
    """Return True if two values are equal, or if one is a redacted secret, whose value is no longer known."""
    if isinstance(was, list) and isinstance(value, list) and len(was) == len(value):
        return all(map(_may_be_equal, was, value))
    return was == value or REDACTED in (was, value)


def check_resume_settings(saved: Mapping[str, Any], config: Config) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ from those `saved` (`config_to_dict`) and may differ. Raises `CheckpointError`
    naming those that may not."""
    changed = find_changed_settings(saved, config)
    refused = {k: v for k, v in changed.items() if any(k == f or k.startswith(f"{f}.") for f in FIXED_SETTINGS)}
    if "env.args.digest" in refused:
        path = config_to_dict(config)["env"]["args"].get("path") or config.env.name
        raise CheckpointError(
            f"the rows of `data` = {path!r}, or which of them are evaluated, have changed since the run began: put the file "
            'back, or set resume="none" to start over'
        )
    if refused:
        said = "; ".join(f"`{key}` was {was!r} and is {now!r}" for key, (was, now) in refused.items())
        raise CheckpointError(
            f"the run cannot be resumed with other settings: {said}. Set them back, or set "
            f'resume="none" to start over. What may differ: {CHANGEABLE_SETTINGS}'
        )
    return changed


def check_start_model(state: RunState, model_path: Path, *, files: Files = REAL_WORLD.files) -> None:
    """Raise `CheckpointError` if the start model is not the one that the run began with, which is its reference
    model."""
    fingerprint = fingerprint_model(model_path, files=files)
    if fingerprint != state.model_fingerprint:
        raise CheckpointError(
            f"the model in {model_path} is not the one that the run began with (in {state.model_path}): its fingerprint is "
            f"{fingerprint[:12]}, not {state.model_fingerprint[:12]}. Put that model back, or set `model.path` to it"
        )


_SAMPLE_BLOCKS, _BLOCK_BYTES = 64, 65536


def fingerprint_model(directory: Path, *, files: Files = REAL_WORLD.files) -> str:
    """Return the SHA-256 over names and sizes of the model's files, all of `config.json`, and a sample of each weight
    file.

    A sample is 64 blocks of 64 KiB spread evenly, the header among them. This covers all of a small file, and enough of
    a large one to tell trained weights from others, without reading hundreds of gigabytes at every start.
    """
    digest = hashlib.sha256()
    names = files.list_names(directory)
    if "config.json" not in names:
        raise CheckpointError(f"{directory} is not a model directory: it has no config.json")
    for name in names:
        if name != "config.json" and Path(name).suffix not in WEIGHT_SUFFIXES:
            continue
        with files.open(directory / name) as file:
            size = file.size()
            digest.update(f"{name}\0{size}\0".encode())
            step = max(_BLOCK_BYTES, -(-max(0, size - _BLOCK_BYTES) // (_SAMPLE_BLOCKS - 1)))
            for at in range(0, size, step):
                digest.update(file.read(at, _BLOCK_BYTES))
    return digest.hexdigest()


def rewind_records(
    run_dir: Path,
    record_bytes: Mapping[str, int],
    pending_lines: Mapping[str, Sequence[str]] | None = None,
    *,
    files: Files = REAL_WORLD.files,
) -> dict[str, int]:
    """Cut the run's records back to their lengths at the checkpoint, and append the lines that were still in memory
    then.

    Returns the bytes cut off, by file. Raises `OSError`. A record that is shorter than it was, or lost, stays as it is:
    figures are lost, but training is not.

    Args:
        record_bytes: Length of each record at the checkpoint, by file name.
        pending_lines: Lines of each record that were in memory, by file name.
    """
    cut = {}
    for name in files.list_names(run_dir):
        length, found = record_bytes.get(name), files.stat(run_dir / name)
        if length is not None and found is not None and not found.is_directory and found.size > length:
            with files.open(run_dir / name, create=True) as file:
                file.truncate(length)
            cut[name] = found.size - length
    for name, lines in (pending_lines or {}).items():
        with files.open(run_dir / name, create=True) as file:
            file.truncate(whole_record_bytes(run_dir / name, files=files))
            file.append(["".join(lines).encode()])
    return cut


def restore_admission(admission: AdmissionController, state: RunState) -> None:
    """Restore slots and leases as they were, with the checkpoint's weights in every engine. Raises `CheckpointError` if
    they are inconsistent."""
    try:
        admission.load_state_dict(state.admission, state.consumed, state.consumed_beyond)
        admission.version_published(state.version)
    except ValueError as error:
        raise CheckpointError(f"{STATE_FILE}: admission: {error}") from error


class _StartsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    starts: list[RunStart] = []


def read_run_starts(run_dir: Path, *, files: Files = REAL_WORLD.files) -> list[RunStart] | None:
    """Return all starts of the run, oldest first; None if this is not the directory of a run.

    Raises `CheckpointError` for a file that is damaged, and `CheckpointUnreadable` if the system does not return it.
    """
    path = run_dir / LINEAGES_FILE
    try:
        return decode_json(read_file(path, files=files), _StartsFile).starts
    except FileNotFoundError:
        return None
    except OSError as error:
        # It may be intact: nobody should move it aside for a moment without a descriptor.
        raise CheckpointUnreadable(f"{path} cannot be read now ({error}): the same command tries again") from error
    except MalformedError as error:
        raise CheckpointError(
            f"{path} is damaged ({error}): it numbers the starts of the run, and without it tokens of weights that a "
            'resume took back could be trained. Move it and spool/ aside, or set resume="none"'
        ) from error


class RunIdentity:
    """The small files without which nobody can resume a run or load its model, kept in memory: its settings, its
    starts, and what its own start model has besides weights. Raises `OSError`."""

    def __init__(self, run_dir: Path, *, files: Files = REAL_WORLD.files):
        self._run_dir, self._files = run_dir, files
        start_model = [run_dir / "init" / name for name in files.list_names(run_dir / "init")]
        small = [path for path in start_model if path.suffix not in WEIGHT_SUFFIXES]
        paths = [run_dir / "config.toml", run_dir / LINEAGES_FILE, *small]
        self._contents = {path: read_file(path, files=files) for path in paths}

    def restore_if_deleted(self) -> bool:
        """Write the files anew if the run's directory was deleted or moved. Returns True if it was. Raises `OSError`."""
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
    run_dir: Path, resume: Checkpoint | None, model: str, origin: str = "", *, files: Files = REAL_WORLD.files
) -> Lineage:
    """Return the lineage of a start that begins now. Its number was never used in this directory before, and is on the
    disk when this returns.

    Raises `CheckpointError`.

    Args:
        resume: Checkpoint to start from; without one, the run starts from the start model.
        model: Fingerprint of the start model.
        origin: The checkpoint's run, if it is another one.
    """
    starts = read_run_starts(run_dir, files=files) or []
    parent, version = (resume.state.lineage, resume.state.version) if resume else (Lineage(), 0)
    lineage, start = parent.start_child(starts, version, model, origin)
    _write_starts(run_dir, [*starts, start], files)
    return lineage


def describe_origin(resume: Checkpoint, checkpoints: Path) -> str:
    """Return the run and step of a checkpoint that is not in `checkpoints`, the run's own; "" for one that is."""
    ours = resume.path.parent.absolute() == checkpoints.absolute()
    return "" if ours else f"{resume.state.run_id} step {resume.state.steps}"


def _write_starts(run_dir: Path, starts: list[RunStart], files: Files) -> None:
    replace_file(
        run_dir / LINEAGES_FILE, msgspec.json.format(msgspec.json.encode(_StartsFile(starts))) + b"\n", files=files
    )


# Results of evaluations beside the checkpoints (`evaluation-00000010.json`), and the best checkpoint according to them.
#
# A file exists as soon as its evaluation begins, so that the checkpoint of that step is not removed before it is known
# whether it is the best.


_FILE_PATTERN = re.compile(r"evaluation-(\d{8,})\.json")


class EvaluationFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """The file of the evaluation after `step`.

    Attributes:
        time: When the file was written, in unix seconds.
        figures: Figures of the evaluation's row in `evaluation.jsonl`; empty while it is played.
        result: The whole result, with the rewards of each task; empty while it is played.
    """

    step: int
    time: float
    figures: dict[str, Any] = {}
    result: dict[str, Any] = {}

    @property
    def is_finished(self) -> bool:
        return bool(self.figures)


def evaluation_path(directory: Path, step: int) -> Path:
    """Return the path of a step's evaluation file in `directory`, the directory of the checkpoints."""
    return directory / f"evaluation-{step:08d}.json"


def write_evaluation(directory: Path, evaluation: EvaluationFile, *, files: Files = REAL_WORLD.files) -> Path:
    """Write the file of an evaluation, and return its path. Raises `OSError`."""
    make_directory(directory, files=files)
    path = evaluation_path(directory, evaluation.step)
    replace_file(path, msgspec.json.format(msgspec.json.encode(evaluation)) + b"\n", files=files)
    return path


def read_evaluations(directory: Path, *, files: Files = REAL_WORLD.files) -> dict[int, EvaluationFile]:
    """Return the evaluations by step, oldest first. Files that are no evaluations are left out.

    Raises `OSError` if the system does not return one now: it may be of the best checkpoint, which is then not pruned.
    """
    found = {}
    for name in files.list_names(directory):
        if not _FILE_PATTERN.fullmatch(name):
            continue
        try:
            one = decode_json(read_file(directory / name, files=files), EvaluationFile)
        except (FileNotFoundError, MalformedError):
            continue
        found[one.step] = one
    return dict(sorted(found.items()))


def remove_evaluations(directory: Path, *, after: int | None = None, files: Files = REAL_WORLD.files) -> None:
    """Remove the evaluations that were not finished; with `after`, those of later steps instead, which a resume takes
    back."""
    for step, one in read_evaluations(directory, files=files).items():
        if step > after if after is not None else not one.is_finished:
            files.remove(evaluation_path(directory, step))


def find_best_evaluation(
    evaluations: dict[int, EvaluationFile], metric: str, steps: list[int]
) -> tuple[int, float] | None:
    """Return the first of `steps` whose evaluation has the largest `metric`, and that value; None if none was
    evaluated."""
    values = {step: evaluations[step].figures.get(metric) for step in sorted(steps) if step in evaluations}
    known = {step: float(value) for step, value in values.items() if isinstance(value, int | float)}
    if not known:
        return None
    best = max(known, key=lambda step: known[step])
    return best, known[best]
