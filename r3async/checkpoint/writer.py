"""When a checkpoint is due, and writing it while training goes on."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from r3async.checkpoint.books import RunState
from r3async.checkpoint.directory import Checkpoints, Report, silent
from r3async.checkpoint.error import CheckpointError
from r3async.checkpoint.manifest import FileRecord
from r3async.config import CheckpointConfig

WriteParts = Callable[[Path], Sequence[FileRecord]]
"""Writes what the learner's ranks copied into a directory, to the disk, and says what that was. It may raise."""


class Due:
    """Whether a step is followed by a checkpoint. Pure but for the clock (seconds, monotonic) that it is given."""

    def __init__(self, config: CheckpointConfig, clock: Callable[[], float] = time.monotonic):
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
    """Writes checkpoints in a thread of its own, one at a time. Belongs to one thread, which makes every call.

    A writing that fails is reported at once and raised at the next call, with its reason; it leaves nothing behind that could
    be taken for a checkpoint, and those that are there stay.
    """

    def __init__(self, checkpoints: Checkpoints, config: CheckpointConfig, *, report: Report = silent):
        self._checkpoints, self._report = checkpoints, report
        self._asynchronous, self._timeout = config.asynchronous, config.write_timeout
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: tuple[int, Future[None]] | None = None

    @property
    def busy(self) -> bool:
        """A checkpoint is being written."""
        return self._pending is not None and not self._pending[1].done()

    def check(self) -> None:
        """Raises `CheckpointError` with what the last writing failed with, once. Does not wait."""
        if self._pending is not None and self._pending[1].done():
            self.wait()

    def wait(self) -> None:
        """Until what is being written is there. Raises `CheckpointError` if that failed, or takes `checkpoint.write_timeout`."""
        if self._pending is None:
            return
        step, writing = self._pending
        try:
            writing.result(self._timeout)
        except Exception as error:
            if not writing.done():
                raise CheckpointError(
                    f"the checkpoint of step {step} was not written within {self._timeout:g} s (checkpoint.write_timeout)"
                ) from error
            self._pending = None
            raise _failure(step, error) from error
        self._pending = None

    def save(
        self,
        state: RunState,
        parts: WriteParts,
        texts: Mapping[str, bytes] | None = None,
        then: Callable[[], object] = lambda: None,
    ) -> float:
        """Begin to write the checkpoint of `state.steps`; returns the seconds that it had to wait for the one before.

        `parts` is called once, in the writer's thread; what it writes must be a copy that later steps do not change. With
        `checkpoint.asynchronous` off it has been written when this returns. `then` is called in that thread too, once the
        checkpoint is visible and on the disk.
        """
        began = time.monotonic()
        self.wait()
        waited = time.monotonic() - began
        self._pending = state.steps, self._thread.submit(self._write, state, parts, texts, then)
        if not self._asynchronous:
            self.wait()
        return waited

    def _write(
        self, state: RunState, parts: WriteParts, texts: Mapping[str, bytes] | None, then: Callable[[], object]
    ) -> None:
        began = time.monotonic()
        try:
            partial = self._checkpoints.begin(state.steps)
            try:
                records = parts(partial)
                path = self._checkpoints.commit(state, records, texts)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
        except BaseException as error:
            self._report("checkpoint_failed", step=state.steps, error=f"{type(error).__name__}: {error}")
            raise
        then()
        self._report(
            "checkpoint_written",
            step=state.steps,
            path=str(path),
            bytes=sum(r.size for r in records),
            seconds=time.monotonic() - began,
        )
        if removed := self._checkpoints.prune():
            self._report("checkpoints_pruned", steps=removed)

    def close(self) -> None:
        """Finish what is being written; see `wait`."""
        try:
            self.wait()
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)


def _failure(step: int, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint of step {step} could not be written: {type(error).__name__}: {error}. Those before it are intact; "
        "mend the cause (space, rights) and resume"
    )
