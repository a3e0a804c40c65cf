"""When a checkpoint is due, and writing it while training goes on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from r3async.checkpoint.directory import Checkpoints, Report, silent
from r3async.checkpoint.error import CheckpointError
from r3async.checkpoint.manifest import FileRecord
from r3async.checkpoint.state import RunState
from r3async.config import CheckpointConfig
from r3async.world import Clock, Threads
from r3async.world.real import REAL

WriteParts = Callable[[Path], Sequence[FileRecord]]
"""Writes what the learner's ranks copied into a directory, to the disk, and says what that was. It may raise."""


class Due:
    """Whether a step is followed by a checkpoint. Pure but for the clock (seconds, monotonic) that it is given."""

    def __init__(self, config: CheckpointConfig, clock: Callable[[], float] = REAL.clock.monotonic):
        self._config, self._clock = config, clock
        self._step, self._time = 0, clock()

    def __call__(self, step: int) -> bool:
        """`step` was just made. `checkpoint.every_steps` counts from step 0, so that a resumed run keeps its rhythm."""
        every, minutes = self._config.every_steps, self._config.every_minutes
        by_steps = bool(every) and step // every > self._step // every
        return by_steps or (bool(minutes) and self._clock() - self._time >= 60 * minutes)

    def done(self, step: int) -> None:
        """A checkpoint of `step` was begun, or the run was resumed from it."""
        self._step, self._time = step, self._clock()


class CheckpointWriter:
    """Writes checkpoints in a thread of its own, one at a time. Belongs to one event loop, where every call is made.

    A writing that fails is reported at once and raised at the next call, with its reason; it leaves nothing behind that could
    be taken for a checkpoint, and those that are there stay.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        config: CheckpointConfig,
        *,
        report: Report = silent,
        threads: Threads = REAL.threads,
        clock: Clock = REAL.clock,
    ):
        self._checkpoints, self._report, self._clock = checkpoints, report, clock
        self._asynchronous, self._timeout = config.asynchronous, config.write_timeout
        self._lane = threads.lane("checkpoint")
        self._pending: tuple[int, asyncio.Task[CheckpointError | None]] | None = None

    @property
    def busy(self) -> bool:
        """A checkpoint is being written."""
        return self._pending is not None and not self._pending[1].done()

    async def wait(self) -> None:
        """Until what is being written is there. Raises `CheckpointError` if that failed, or takes `checkpoint.write_timeout`."""
        if self._pending is None:
            return
        step, writing = self._pending
        await asyncio.wait([writing], timeout=self._timeout)
        if not writing.done():
            raise CheckpointError(
                f"the checkpoint of step {step} was not written within {self._timeout:g} s (checkpoint.write_timeout)"
            )
        self._pending = None
        if (error := writing.result()) is not None:
            raise error

    async def save(self, state: RunState, parts: WriteParts, then: Callable[[], object] = lambda: None) -> None:
        """Begin to write the checkpoint of `state.steps`, as soon as the one before is written.

        `parts` is called once, in the writer's thread; what it writes must be a copy that later steps do not change. With
        `checkpoint.asynchronous` off it has been written when this returns. `then` is called on the event loop, once the
        checkpoint is visible and on the disk.
        """
        await self.wait()
        self._pending = state.steps, asyncio.get_running_loop().create_task(self._write(state, parts, then))
        if not self._asynchronous:
            await self.wait()

    async def _write(self, state: RunState, parts: WriteParts, then: Callable[[], object]) -> CheckpointError | None:
        began = self._clock.monotonic()
        try:
            path, nbytes = await self._lane.run(self._commit, state, parts)
        except Exception as error:
            self._report("checkpoint_failed", step=state.steps, error=f"{type(error).__name__}: {error}")
            return _failure(state.steps, error)
        seconds = self._clock.monotonic() - began
        then()
        self._report("checkpoint_written", step=state.steps, path=str(path), bytes=nbytes, seconds=seconds)
        try:
            if removed := await self._lane.run(self._checkpoints.prune):
                self._report("checkpoints_pruned", steps=removed)
        except (
            OSError,
            CheckpointError,
        ) as error:  # the one that was written is there all the same; the next one prunes again
            self._report("checkpoint_prune_failed", error=str(error))
        return None

    def _commit(self, state: RunState, parts: WriteParts) -> tuple[Path, int]:
        partial = self._checkpoints.begin(state.steps)
        try:
            records = parts(partial)
            return self._checkpoints.commit(state, records), sum(r.size for r in records)
        except BaseException:
            with contextlib.suppress(OSError):  # else at the next start
                self._checkpoints.abandon(state.steps)
            raise


def _failure(step: int, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint of step {step} could not be written: {type(error).__name__}: {error}. Those before it are intact; "
        "mend the cause (space, rights) and resume"
    )
