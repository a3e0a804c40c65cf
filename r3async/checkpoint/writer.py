"""The schedule of checkpoints, and their writing while training goes on.

The state is copied between two steps and written during the following ones.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from r3async.checkpoint.directory import CheckpointDirectory
from r3async.checkpoint.manifest import CheckpointError, FileEntry
from r3async.checkpoint.resume_checks import fingerprint_model
from r3async.checkpoint.state import RunState, TrainingState
from r3async.config import CheckpointConfig, Config, config_to_dict
from r3async.data.write_sizes import read_write_sizes
from r3async.world import World
from r3async.world.real import REAL_WORLD

WriteRankFiles = Callable[[Path], Sequence[FileEntry]]
"""Function that writes the copies of the learner's ranks into a directory, durably, and returns the
files written. It may raise."""


class CheckpointSchedule:
    """The schedule of checkpoints: decides after which steps one is made. Pure except for its clock
    (seconds, monotonic)."""

    def __init__(
        self,
        config: CheckpointConfig,
        clock: Callable[[], float] = REAL_WORLD.clock.monotonic,
        evaluated_every: int = 0,
        last_step: int = 0,
    ):
        """Begin the schedule after `last_step`.

        Args:
            evaluated_every: `evaluation.every_steps`; with `checkpoint.keep_best` each evaluated
                step has a checkpoint.
            last_step: The step that the run resumes from.
        """
        self._config = config
        self._clock = clock
        self._evaluation_interval = evaluated_every if config.keep_best else 0
        self.last_step = last_step
        self._last_time = clock()
        """Step of the last checkpoint that was begun."""

    def __call__(self, step: int) -> bool:
        """Return True if a checkpoint is due after `step`, which was just made.
        `checkpoint.every_steps` counts from step 0, so that a resumed run keeps its rhythm."""
        every = self._config.every_steps
        minutes = self._config.every_minutes
        by_steps = bool(every) and step // every > self.last_step // every
        evaluated = bool(self._evaluation_interval) and step % self._evaluation_interval == 0
        return (
            by_steps
            or evaluated
            or (bool(minutes) and self._clock() - self._last_time >= 60 * minutes)
        )

    def mark_begun(self, step: int) -> None:
        """Record that a checkpoint of `step` was begun."""
        self._last_time = self._clock()
        self.last_step = step


class CheckpointWriter:
    """A writer of a run's checkpoints, one at a time, in its own thread. It belongs to the
    learner's event loop.

    A failure is reported at once, and training goes on: the next checkpoint is the next attempt.
    A failure leaves nothing behind that could be taken for a checkpoint, and existing
    checkpoints stay.

    Args:
        events: A structlog logger.
    """

    def __init__(
        self,
        config: Config,
        run_id: str,
        model_path: Path,
        run_dir: Path,
        events: Any,
        *,
        world: World = REAL_WORLD,
    ):
        self._settings = config.checkpoint
        self._config = config_to_dict(config)
        written = read_write_sizes(config, model_path, files=world.files)
        self._write_timeout = config.supervise.limits.checkpoint_write(written.checkpoint_bytes)
        self._run_id = run_id
        self._model_path = model_path
        self._events = events
        self._world = world
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
            run = self._world.threads.run
            files = self._world.files
            self._fingerprint = await run(fingerprint_model, self._model_path, files=files)

    async def save_checkpoint(
        self,
        state: TrainingState,
        copy_state: Callable[[], Awaitable[object]],
        write_files: WriteRankFiles,
        on_committed: Callable[[], object] = lambda: None,
    ) -> None:
        """Copy the state of the ranks (`copy_state`) and begin to write it, as soon as the previous
        checkpoint is written.

        With `checkpoint.asynchronous` off, the checkpoint has been written when this returns.
        Raises `CheckpointError` if one takes longer than `TimeLimits.checkpoint_write`.

        Args:
            write_files: Called once, in the writer's thread; what it writes must be a copy that
                later steps do not change.
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
        self._pending = (
            state.steps,
            asyncio.create_task(self._write_checkpoint(whole, write_files, on_committed)),
        )
        if not self._settings.asynchronous:
            await self._wait_for_pending()

    async def wait_until_written(self) -> None:
        """Wait for the checkpoint that is being written. Raises `CheckpointError` if the last one
        failed, or takes too long."""
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
                f"the checkpoint of step {step} was not written within {self._write_timeout:g} s "
                "(supervise.patience)"
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
                f"the checkpoint of step {state.steps} could not be written: {reason}. Those "
                "before it are intact; mend the cause (space, rights) and resume"
            )
            return
        self._failure = None
        seconds = clock() - began
        on_committed()
        self._report_event(
            "checkpoint_written", step=state.steps, path=str(path), bytes=nbytes, seconds=seconds
        )
        try:
            removed = await self._thread.run(self._checkpoints.prune_old)
            if removed:
                self._report_event("checkpoints_pruned", steps=removed)
        except (OSError, CheckpointError) as error:
            # The checkpoint is written anyway; the next one prunes again.
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
