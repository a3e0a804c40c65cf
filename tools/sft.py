"""`r3async sft`: supervised training of the answers in rows of your own.

A run like any other: a directory with its configuration, metrics, checkpoints and the trained model; a stop finishes the step,
and the same command with its name resumes. Nothing is generated, so there are no engines; with one rank all of it is one process.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from r3async.actors.process import StoppedBeforeStep
from r3async.checkpoint import CheckpointError, CheckpointWriter, Due, Opened
from r3async.checkpoint.resume import fingerprint_model, take_lineage
from r3async.checkpoint.state import TrainingState
from r3async.config import Config, ConfigError
from r3async.data.records import Sample
from r3async.record.events import open_events
from r3async.record.steps import MetricsWriter
from r3async.tools.preflight import check_model
from r3async.tools.run_dir import check_capacity, full_disk_is_named, open_run
from r3async.tools.sft_data import SupervisedRows
from r3async.tools.tail.live import LiveView, describe_step
from r3async.tools.terminal import Terminal
from r3async.tools.train import Outlets, StoppedWhileLoading, StopRequest, report_run, reporter, stop_signals
from r3async.world.real import REAL

if TYPE_CHECKING:
    from r3async.actors.run_dir import RunDir
    from r3async.data.versions import Lineage
    from r3async.learner.batch.packing import MicroBatch

METRICS = "metrics.jsonl"


def sft(config: Config, preset: str, console: Console | None = None, root: Path = Path("runs")) -> Path:
    """Train to the end; returns the run directory. Raises `ConfigError`, `CheckpointError` or `LearnerError` with what to do."""
    request = StopRequest()
    with stop_signals(request), LiveView(console or Terminal(file=sys.stderr), config.steps) as view:
        try:
            return _sft(config, preset, view, root, request)
        except StoppedWhileLoading:
            if not view.step:
                raise StoppedBeforeStep("stopped while loading, before a step was made") from None
            view.say(f"stopped while loading, after step {view.step}")
            return root / config.name


def _sft(config: Config, preset: str, view: LiveView, root: Path, request: StopRequest) -> Path:
    if not config.model.path:
        raise ConfigError("`model.path` is empty: name the model that is to learn, a directory with config.json in it")
    check_model(config.model.path)
    if config.learner.backend == "scripted":
        raise ConfigError('`learner.backend` = "scripted" has no model that could learn')
    check_capacity(root)
    view.phase("reading the rows")
    rows = SupervisedRows.of(config, view.say)
    config = rows.noted(config)
    view.expect(config.steps)
    with full_disk_is_named(root):
        run = open_run(config, preset, view.say, root, reporter(view))
    view.say(f"run directory: {run.path}")
    try:
        model_path = run.model_path(config)
        assert model_path is not None
        with Outlets(config, run.path, view.say) as outlets:
            asyncio.run(Supervised(config, run, model_path, rows, view, outlets, request).run())
    finally:
        REAL.actors.disconnect()
        run.lock.close()
        report_run(run.path, view)
    return run.path


class Supervised:
    """One start of a supervised run. The event loop only waits for checkpoints; everything of torch is in its thread."""

    def __init__(
        self,
        config: Config,
        run: RunDir,
        model_path: Path,
        rows: SupervisedRows,
        view: LiveView,
        outlets: Outlets,
        request: StopRequest,
    ):
        self._config, self._run, self._model_path, self._data = config, run, model_path, rows
        self._view, self._outlets, self._request = view, outlets, request
        self._step = run.resume.state.steps if run.resume else 0
        self._elapsed = run.resume.state.elapsed if run.resume else 0.0
        self._made = 0
        """Updates of this start."""

    async def run(self) -> None:
        """All steps, or those before a stop; then the model and a checkpoint."""
        config, directory = self._config, self._run.path
        lineage = self._begin(self._run.resume)
        self._view.rewind(self._step)
        self._view.phase("loading the model")
        from r3async.actors.loading import load_learner_alone

        learner = load_learner_alone(config, self._model_path, directory.absolute(), REAL)
        events = open_events(directory, "learner")
        events.info("learner_started", lineage=lineage.number, step=self._step)
        writer = CheckpointWriter(config, f"{directory.name}-sft", self._model_path, directory, events)
        due, rows = Due(config.checkpoint), MetricsWriter(directory)
        due.done(self._step)
        try:
            if self._run.resume:
                learner.restore(self._run.resume.path)
            self._started()

            async def save() -> None:
                due.done(self._step)
                state = await self._state(lineage).with_records(directory, [METRICS], keeper=REAL.keeper)
                await writer.save(state, lambda: _now(learner.hold), learner.write_state)

            while self._step < config.steps and not self._request.requested:
                row = self._one(learner, lineage)
                rows.write(row)
                self._outlets.show({"rows": [row]})
                self._view.show_row(row, describe_step(row))
                if due(self._step):
                    await save()
                await asyncio.sleep(0)
            if self._step > due.last:
                await save()
            await writer.finish()
            self._end(learner)
            events.info("run_finished", steps=self._step, stopped=self._step < config.steps)
        finally:
            rows.close()
            learner.close()

    def _begin(self, resume: Opened | None) -> Lineage:
        if resume is not None and resume.state.admission:
            raise CheckpointError(
                f"{resume.path} is of `r3async train`, and has leases of episodes: to train its model, `r3async export` it and "
                "set `model.path`"
            )
        return take_lineage(self._run.path, resume, fingerprint_model(self._model_path))

    def _started(self) -> None:
        self._request.install()  # Ray installs its own handlers
        self._request.loading = False
        if self._request.requested:
            raise StoppedWhileLoading

    def _one(self, learner: Any, lineage: Lineage) -> dict[str, Any]:
        """One step, and its row."""
        began = time.monotonic()
        metrics = learner.train_supervised(self._shares(self._data.of_step(self._step)))
        seconds = time.monotonic() - began
        self._step += 1
        self._made += int(metrics["optimizer/updates"])
        self._elapsed += seconds
        every, last = self._config.evaluation.every, self._step == self._config.steps
        if self._data.held_out and (last or (every and self._step % every == 0)):
            total, tokens = learner.supervised_loss_of(self._shares(self._data.held_out))
            metrics["loss/answers_held_out"] = total / max(tokens, 1.0)
        return {
            "step": self._step,
            "version": self._step,
            "lineage": lineage.number,
            "time": time.time(),
            **metrics,
            "data/epochs": self._step * self._config.sft.rows_per_step / len(self._data.rows),
            "learner/step_seconds": seconds,
            "throughput/trained_tokens_per_second": metrics["batch/trained_tokens"] / max(seconds, 1e-9),
        }

    def _shares(self, samples: Sequence[Sample]) -> list[list[MicroBatch]]:
        from r3async.learner.batch.packing import pack_for_ranks

        learner = self._config.learner
        return pack_for_ranks(
            samples,
            learner.max_tokens_per_micro_batch,
            ranks=learner.parallel.dp,
            cost=self._data.cost,
            share_prefixes=learner.share_prefixes,
        )

    def _state(self, lineage: Lineage) -> TrainingState:
        return TrainingState(
            steps=self._step, version=self._step, lineage=lineage, consumed=self._step, elapsed=self._elapsed
        )

    def _end(self, learner: Any) -> None:
        name, done = self._run.path.name, self._step == self._config.steps
        if self._step:
            self._view.phase("saving the model")
            learner.save(self._run.path / "model")
            self._view.say(f"trained model: {self._run.path / 'model'}")
        if not done:
            self._view.say(
                f"stopped after {self._step} of {self._config.steps} steps; to resume: the same command with name={name}"
            )


async def _now(call: Callable[[], object]) -> None:
    call()
