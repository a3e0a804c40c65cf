"""Callbacks that tell a program about its run, in the process that called `r3async.train`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from r3async.actors.process import RunFailed
from r3async.checkpoint import CheckpointDirectory
from r3async.config import Config, ConfigError, did_you_mean

CALLBACK_HOOKS = ("on_step", "on_evaluation", "on_checkpoint", "on_end")


class StepRecord(msgspec.Struct, frozen=True):
    """The report that a step was trained and its weights were delivered.

    Attributes:
        metrics: The step's row of `metrics.jsonl`, with names such as `reward/mean`.
    """

    run: Path
    step: int
    metrics: Mapping[str, Any]


class EvaluationRecord(msgspec.Struct, frozen=True):
    """The report of a finished evaluation that began after `step`.

    Attributes:
        figures: `reward_mean`, `reward_low`, `pass@1` and so on. With several sets, those of one
            set are named `SET/reward_mean`.
    """

    run: Path
    step: int
    figures: Mapping[str, Any]


class CheckpointRecord(msgspec.Struct, frozen=True):
    """The report that the checkpoint of `step` is on disk, in the directory `path`."""

    run: Path
    step: int
    path: Path


class EndRecord(msgspec.Struct, frozen=True):
    """The report that the run has ended, after `step`.

    Attributes:
        error: The exception that `r3async.train` is about to raise, if any.
    """

    run: Path
    step: int
    error: BaseException | None = None


class Callback:
    """A base class for your callbacks: override the methods that you need.

    All methods are called in the process that called `r3async.train`, one after the other. Training
    continues meanwhile, but nothing monitors the run during a call, so return quickly. After a
    restart of the run, repeated steps are reported again. An exception from a callback stops the
    run in order (`CallbackFailed`).
    """

    def on_step(self, record: StepRecord) -> object: ...

    def on_evaluation(self, record: EvaluationRecord) -> object: ...

    def on_checkpoint(self, record: CheckpointRecord) -> object: ...

    def on_end(self, record: EndRecord) -> object: ...


class CallbackFailed(RunFailed):
    """An exception raised by a callback (`__cause__`); the run was stopped in
    order and can resume."""


class CallbackRunner:
    """The caller of all callbacks of a run.

    After a callback raises, no other callback is called except `on_end`; `failure` is then set, and
    the run should end.

    Args:
        callbacks: `Callback`s, objects with some of its methods, or plain functions, which
            receive every step.

    Raises:
        ConfigError: An entry is none of these.
    """

    def __init__(self, callbacks: Sequence[Any] = ()):
        self._callbacks = list(callbacks)
        for at, each in enumerate(self._callbacks):
            if isinstance(each, type):
                raise ConfigError(
                    f"`callbacks[{at}]` is the class {each.__name__}: give an instance, "
                    f"{each.__name__}()"
                )
            # Other frameworks' callbacks have further methods; of ours a further one is misspelt,
            # and would never be called.
            unknown = {name for name in dir(each) if name.startswith("on_")} - {*CALLBACK_HOOKS}
            if isinstance(each, Callback) and unknown:
                wrong = min(unknown)
                raise ConfigError(
                    f"`callbacks[{at}]` has `{wrong}`, which nothing calls: "
                    f"{did_you_mean(wrong, CALLBACK_HOOKS)}"
                )
            if not any(
                callable(getattr(each, hook, None)) for hook in CALLBACK_HOOKS
            ) and not callable(each):
                raise ConfigError(
                    f"`callbacks[{at}]` = {each!r:.80} hears of nothing: give an "
                    f"r3async.Callback, an object with one of {', '.join(CALLBACK_HOOKS)}, or a "
                    "function, which gets each step"
                )
        self._run = Path()
        self._checkpoints: CheckpointDirectory | None = None
        self._step = 0
        self._last_evaluation_time = 0.0
        self._seen_checkpoints: list[int] = []
        self.failure: CallbackFailed | None = None

    def begin_run(self, config: Config, run: Path, step: int) -> None:
        """Record that the run begins, or resumes after `step`."""
        self._run = run
        self._step = step
        self._checkpoints = CheckpointDirectory.from_config(config, run)
        self._seen_checkpoints = self._checkpoints.list_steps()

    def rewind_to_step(self, step: int) -> None:
        """Record that the run restarts after `step`."""
        self._step = step
        self._seen_checkpoints = [seen for seen in self._seen_checkpoints if seen <= step]

    def show_status(self, status: Mapping[str, Any]) -> None:
        """Call the callbacks for everything that is new in a status of the conductor."""
        if not self._callbacks or self._checkpoints is None:
            return
        for row in status["rows"]:
            if row["step"] > self._step:
                self._step = row["step"]
                self._call_hook("on_step", StepRecord(self._run, row["step"], row))
        for row in status["evaluations"]:
            if row["time"] > self._last_evaluation_time:
                self._last_evaluation_time = row["time"]
                figures = {
                    name.removeprefix("evaluation/"): value
                    for name, value in row.items()
                    if name.startswith("evaluation/")
                }
                self._call_hook("on_evaluation", EvaluationRecord(self._run, row["step"], figures))
        for step in self._checkpoints.list_steps():
            if step not in self._seen_checkpoints:
                self._seen_checkpoints.append(step)
                self._call_hook(
                    "on_checkpoint",
                    CheckpointRecord(self._run, step, self._checkpoints.step_path(step)),
                )

    def end_run(self, error: BaseException | None) -> None:
        """Call `on_end`, unless the run never began.

        Raises:
            CallbackFailed: A callback raised, now or before, and the run did not.
        """
        if self._checkpoints is None:
            return
        ended = EndRecord(self._run, self._step, self.failure or error)
        for each in self._callbacks:
            self._call_guarded(each, "on_end", getattr(each, "on_end", None), ended)
        if self.failure is not None and error is None:
            raise self.failure

    def _call_hook(
        self, hook: str, record: StepRecord | EvaluationRecord | CheckpointRecord
    ) -> None:
        for each in self._callbacks:
            if self.failure is None:
                plain = (
                    each
                    if hook == "on_step"
                    and not any(hasattr(each, other) for other in CALLBACK_HOOKS)
                    else None
                )
                self._call_guarded(each, hook, getattr(each, hook, plain), record)

    def _call_guarded(
        self, callback: object, hook: str, call: Callable[[Any], object] | None, record: Any
    ) -> None:
        if call is None:
            return
        try:
            call(record)
        except Exception as error:
            name = getattr(callback, "__name__", type(callback).__name__)
            failed = CallbackFailed(
                f"the callback {name} raised in `{hook}` of step {record.step}: "
                f"{type(error).__name__}: {error}; the run was stopped in order, and the same call "
                f"with name={self._run.name!r} resumes it"
            )
            failed.__cause__ = error
            self.failure = self.failure or failed
