"""The directory of a run's checkpoints: written aside and renamed, verified when opened, pruned, resumed from.

`checkpoints/step-00000010/` is complete whenever it has that name. Everything else has a name that says so: `.partial` is
being written, `.removing` is being removed (both are removed at the next start), `.bad` could not be read when it was the
newest, `.superseded` was made by steps that a resume from an older checkpoint took back (both stay until a person removes
them).
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
from r3async.data.models import read_write_sizes
from r3async.data.versions import Lineage, RunStart
from r3async.schedule.admission import AdmissionController
from r3async.untrusted import MalformedError, decode_json
from r3async.world import Files, World
from r3async.world.appending import EventReporter, whole_record_bytes
from r3async.world.files import make_directory, read_file, replace_file
from r3async.world.real import REAL_WORLD

if TYPE_CHECKING:
    from r3async.checkpoint.tensors import LearnerStateReader

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


# When a checkpoint is due, and writing it while training goes on: copied between two steps, written beside those that follow.


WriteRankFiles = Callable[[Path], Sequence[FileEntry]]
"""Writes what the learner's ranks copied into a directory, to the disk, and says what that was. It may raise."""


class CheckpointSchedule:
    """Whether a step is followed by a checkpoint. Pure but for the clock (seconds, monotonic) that it is given."""

    def __init__(
        self,
        config: CheckpointConfig,
        clock: Callable[[], float] = REAL_WORLD.clock.monotonic,
        evaluated_every: int = 0,
        last_step: int = 0,
    ):
        """`evaluated_every`: `evaluation.every`; with `checkpoint.keep_best` each evaluated step has one. `last_step`: the
        step that the run resumes from."""
        self._config, self._clock = config, clock
        self._evaluation_interval = evaluated_every if config.keep_best else 0
        self.last_step, self._last_time = last_step, clock()
        """Step of the last checkpoint that was begun."""

    def __call__(self, step: int) -> bool:
        """`step` was just made. `checkpoint.every_steps` counts from step 0, so that a resumed run keeps its rhythm."""
        every, minutes = self._config.every_steps, self._config.every_minutes
        by_steps = bool(every) and step // every > self.last_step // every
        evaluated = bool(self._evaluation_interval) and step % self._evaluation_interval == 0
        return by_steps or evaluated or (bool(minutes) and self._clock() - self._last_time >= 60 * minutes)

    def mark_begun(self, step: int) -> None:
        """A checkpoint of `step` was begun."""
        self.last_step, self._last_time = step, self._clock()


class CheckpointWriter:
    """Writes a run's checkpoints in a thread of its own, one at a time. Belongs to the learner's event loop.

    A failure is reported at once, and training goes on: the next checkpoint is the next try. It leaves nothing behind that
    could be taken for a checkpoint, and those that are there stay. `events`: a structlog logger.
    """

    def __init__(
        self, config: Config, run_id: str, model_path: Path, run_dir: Path, events: Any, *, world: World = REAL_WORLD
    ):
        self._settings, self._config = config.checkpoint, config_to_dict(config)
        written = read_write_sizes(config, model_path, files=world.files)
        self._write_timeout = config.checkpoint.resolve_write_timeout(written.checkpoint_bytes)
        self._run_id, self._model_path, self._events, self._world = run_id, model_path, events, world
        self._checkpoints = CheckpointDirectory.from_config(
            config, run_dir, report=self._report_event, files=world.files
        )
        self._thread = world.threads.new_worker("checkpoint")
        self._fingerprint = ""
        """Of the start model, once it has been taken."""
        self._pending: tuple[int, asyncio.Task[None]] | None = None
        """The step of the checkpoint that is being written, and who writes it."""
        self._failure: CheckpointError | None = None
        """Of the last one that has ended."""

    def _report_event(self, event: str, /, **facts: object) -> None:
        report = self._events.error if event.endswith(("_failed", "_bad")) else self._events.info
        report(event, **facts)

    async def save_checkpoint(
        self,
        state: TrainingState,
        copy_state: Callable[[], Awaitable[object]],
        write_files: WriteRankFiles,
        on_committed: Callable[[], object] = lambda: None,
    ) -> None:
        """Copy what the ranks have (`copy_state`), and begin to write it, as soon as the checkpoint before is written.

        `write_files` is called once, in the writer's thread; what it writes must be a copy that later steps do not change. With
        `checkpoint.asynchronous` off it has been written when this returns. `on_committed` is called on the event loop, once the
        checkpoint is visible and on the disk. Raises `CheckpointError` if one takes longer than `checkpoint.write_timeout`.
        """
        await self._wait_for_pending()
        if not self._fingerprint:
            run, files = self._world.threads.run, self._world.files
            self._fingerprint = await run(fingerprint_model, self._model_path, files=files)
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
        """Wait for what is being written. Raises `CheckpointError` if the last one failed, or takes too long."""
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
        except (OSError, CheckpointError) as error:  # what was written is there all the same; the next one prunes again
            self._report_event("checkpoint_prune_failed", error=str(error))

    def _write_and_commit(self, state: RunState, write_files: WriteRankFiles) -> tuple[Path, int]:
        partial = self._checkpoints.begin_checkpoint(state.steps)
        try:
            records = write_files(partial)
            return self._checkpoints.commit_checkpoint(state, records), sum(r.size for r in records)
        except BaseException:
            with contextlib.suppress(OSError):  # else at the next start
                self._checkpoints.discard_partial(state.steps)
            raise


# Whether a checkpoint may be continued with this configuration and model, how records and leases go back to that step, and the
# starts of a run.
#
# Each start is a line of a file in the run's directory, which is on the disk before any process of that start exists: so two
# crashes without a checkpoint between them still leave two lineages. The file also tells the directory of a run from any other:
# it is made with the directory.


LINEAGES_FILE = "lineages.json"

FIXED_SETTINGS = (
    "seed",
    "model.path",
    "model.init",
    "env",
    "schedule.max_staleness",
    "schedule.groups_per_step",
    "schedule.samples_per_group",
    "schedule.steps_per_publication",
    "schedule.tokens_per_step",
    "schedule.replaced_groups",
    "schedule.window",
    "learner.backend",
    "learner.lora",
    "learner.freeze_router",
    "sft",
)
"""Settings, and whole sections, that a run keeps: which tasks come next, slots and leases, what is trained, and the layout
of the tensors."""

CHANGEABLE_SETTINGS = (
    "steps, learner.lr and the rest of learner (parallel, dtype, …), algorithm, generator, checkpoint, supervise"
)


def find_changed_settings(saved: Mapping[str, Any], config: Config) -> dict[str, tuple[Any, Any]]:
    """By dotted key: the value saved and the value now, where they are not the same.

    A setting that the saved configuration does not know has its default. `name` and `resume` are no settings of training.
    """
    # As a checkpoint has them: without tuples.
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
    """What a secret was is not known any more."""
    if isinstance(was, list) and isinstance(value, list) and len(was) == len(value):
        return all(map(_may_be_equal, was, value))
    return was == value or REDACTED in (was, value)


def check_resume_settings(saved: Mapping[str, Any], config: Config) -> dict[str, tuple[Any, Any]]:
    """The settings that differ from those `saved` (`config_to_dict`) and may. Raises `CheckpointError` naming those that
    may not."""
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
    """Raises `CheckpointError` if the start model is not the one that the run began with, which is its reference model."""
    fingerprint = fingerprint_model(model_path, files=files)
    if fingerprint != state.model_fingerprint:
        raise CheckpointError(
            f"the model in {model_path} is not the one that the run began with (in {state.model_path}): its fingerprint is "
            f"{fingerprint[:12]}, not {state.model_fingerprint[:12]}. Put that model back, or set `model.path` to it"
        )


_SAMPLE_BLOCKS, _BLOCK_BYTES = 64, 65536


def fingerprint_model(directory: Path, *, files: Files = REAL_WORLD.files) -> str:
    """SHA-256 over the names and sizes of the model's files, all of `config.json`, and a sample of each weight file.

    A sample: 64 blocks of 64 KiB spread evenly, the header among them. All of a small file, and of a large one enough to tell
    trained weights from others, without reading hundreds of gigabytes at every start.
    """
    digest = hashlib.sha256()
    names = files.list_names(directory)
    if "config.json" not in names:
        raise CheckpointError(f"{directory} is not a model directory: it has no config.json")
    for name in names:
        if name != "config.json" and Path(name).suffix not in (".safetensors", ".bin"):
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
    """Cut the run's records back to the lengths they had, and write the lines behind them that were `pending_lines` in memory
    then. Returns the bytes cut off, by file. Raises `OSError`.

    A record that is shorter than it was, or lost, stays as it is: figures are lost, but training is not.
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
    """Slots and leases as they were, and the checkpoint's weights in every engine. Raises `CheckpointError` if these
    do not add up."""
    try:
        admission.load_state_dict(state.admission, state.consumed, state.consumed_beyond)
        admission.version_published(state.version)
    except ValueError as error:
        raise CheckpointError(f"{STATE_FILE}: admission: {error}") from error


class _StartsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    starts: list[RunStart] = []


def read_run_starts(run_dir: Path, *, files: Files = REAL_WORLD.files) -> list[RunStart] | None:
    """All starts of the run, oldest first; None if this is not the directory of a run. Raises `CheckpointError` for a file that
    cannot be read."""
    try:
        return decode_json(read_file(run_dir / LINEAGES_FILE, files=files), _StartsFile).starts
    except FileNotFoundError:
        return None
    except (OSError, MalformedError) as error:
        raise CheckpointError(
            f"{run_dir / LINEAGES_FILE} cannot be read ({error}): it numbers the starts of the run, and without it tokens of "
            "weights "
            'that a resume took back could be trained. Move it and spool/ aside, or set resume="none"'
        ) from error


def mark_run_directory(run_dir: Path, *, files: Files = REAL_WORLD.files) -> None:
    """`run_dir` is the directory of a run, if it was not one before."""
    if read_run_starts(run_dir, files=files) is None:
        _write_starts(run_dir, [], files)


def begin_lineage(
    run_dir: Path, resume: Checkpoint | None, model: str, origin: str = "", *, files: Files = REAL_WORLD.files
) -> Lineage:
    """The lineage of a start that begins now, from a checkpoint (of the run `origin`, if it is another one) or, without one, from
    the start model of fingerprint `model`. Its number was never taken in this directory before, and is on the disk when this
    returns. Raises `CheckpointError`."""
    starts = read_run_starts(run_dir, files=files) or []
    parent, version = (resume.state.lineage, resume.state.version) if resume else (Lineage(), 0)
    lineage, start = parent.start_child(starts, version, model, origin)
    _write_starts(run_dir, [*starts, start], files)
    return lineage


def describe_origin(resume: Checkpoint, checkpoints: Path) -> str:
    """Names the run and step of a checkpoint that is not in `checkpoints`, the run's own; "" for one that is."""
    ours = resume.path.parent.absolute() == checkpoints.absolute()
    return "" if ours else f"{resume.state.run_id} step {resume.state.steps}"


def _write_starts(run_dir: Path, starts: list[RunStart], files: Files) -> None:
    replace_file(
        run_dir / LINEAGES_FILE, msgspec.json.format(msgspec.json.encode(_StartsFile(starts))) + b"\n", files=files
    )


# Results of evaluations beside the checkpoints, `evaluation-00000010.json` each, and which checkpoint is the best by them.
#
# A file is there from when its evaluation begins, so that the checkpoint of that step is not removed before it is known
# whether it is the best.


_FILE_PATTERN = re.compile(r"evaluation-(\d{8,})\.json")


class EvaluationFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of the evaluation after `step`. `time`: when it was written, in unix seconds. `figures`: of its row in `evaluation.jsonl`;
    `result`: all of it, with the rewards of each task. Both are empty while it is played."""

    step: int
    time: float
    figures: dict[str, Any] = {}
    result: dict[str, Any] = {}

    @property
    def is_finished(self) -> bool:
        return bool(self.figures)


def evaluation_path(directory: Path, step: int) -> Path:
    """`directory`: of the checkpoints."""
    return directory / f"evaluation-{step:08d}.json"


def write_evaluation(directory: Path, evaluation: EvaluationFile, *, files: Files = REAL_WORLD.files) -> Path:
    """Raises `OSError`."""
    make_directory(directory, files=files)
    path = evaluation_path(directory, evaluation.step)
    replace_file(path, msgspec.json.format(msgspec.json.encode(evaluation)) + b"\n", files=files)
    return path


def read_evaluations(directory: Path, *, files: Files = REAL_WORLD.files) -> dict[int, EvaluationFile]:
    """By step, oldest first. What cannot be read, or is none, is left out."""
    found = {}
    for name in files.list_names(directory):
        if not _FILE_PATTERN.fullmatch(name):
            continue
        try:
            one = decode_json(read_file(directory / name, files=files), EvaluationFile)
        except (OSError, MalformedError):
            continue
        found[one.step] = one
    return dict(sorted(found.items()))


def remove_evaluations(directory: Path, *, after: int | None = None, files: Files = REAL_WORLD.files) -> None:
    """Those that were not finished; with `after` those of later steps, which a resume takes back."""
    for step, one in read_evaluations(directory, files=files).items():
        if step > after if after is not None else not one.is_finished:
            files.remove(evaluation_path(directory, step))


def find_best_evaluation(
    evaluations: dict[int, EvaluationFile], metric: str, steps: list[int]
) -> tuple[int, float] | None:
    """Of the checkpoints of `steps`, the first whose evaluation has the largest `metric`, and that. None: none was evaluated."""
    values = {step: evaluations[step].figures.get(metric) for step in sorted(steps) if step in evaluations}
    known = {step: float(value) for step, value in values.items() if isinstance(value, int | float)}
    if not known:
        return None
    best = max(known, key=lambda step: known[step])
    return best, known[best]
