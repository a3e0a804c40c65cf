"""Supervised training of the answers in your own rows: `r3async sft`.

It is a run like any other: a directory with its configuration, metrics, checkpoints and the trained
model. A stop finishes the step, and the same command with the run's name resumes. Nothing is
generated, so there are no engines; with one rank, everything is in one process.
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
from r3async.checkpoint import Checkpoint, CheckpointError, CheckpointSchedule, CheckpointWriter
from r3async.checkpoint.resume_checks import fingerprint_model
from r3async.checkpoint.run_starts import begin_lineage
from r3async.checkpoint.state import TrainingState
from r3async.config import Config
from r3async.data.tokens import Sample
from r3async.record.events import open_event_log
from r3async.record.step_writer import MetricsFile
from r3async.world.real import REAL_WORLD

from .memory import estimate_rank_memory
from .preflight import check_dry_run, check_start
from .run_dir import explain_full_disk, open_named_run
from .sft_data import SupervisedRows
from .tail.live import LiveView, describe_step
from .terminal import SafeConsole
from .traffic import format_bytes
from .training_session import (
    MetricsForwarder,
    StoppedWhileLoading,
    StopRequest,
    handle_stop_signals,
    make_reporter,
    report_ended_run,
)

if TYPE_CHECKING:
    from r3async.actors.run_directory import RunDirectory
    from r3async.data.versions import Lineage
    from r3async.learner.micro_batches import MicroBatch

METRICS_FILE = "metrics.jsonl"


def run_sft(
    config: Config, preset: str, console: Console | None = None, root: Path = Path("runs")
) -> Path:
    """Train to the end and return the run directory.

    Raises `ConfigError`, `CheckpointError` or `LearnerError` with a remedy.
    """
    request = StopRequest()
    with (
        handle_stop_signals(request),
        LiveView(console or SafeConsole(file=sys.stderr), config.steps) as view,
    ):
        try:
            return _prepare_and_run(config, preset, view, root, request)
        except StoppedWhileLoading:
            if not view.shown_step:
                raise StoppedBeforeStep("stopped while loading, before a step was made") from None
            view.print_line(f"stopped while loading, after step {view.shown_step}")
            return root / config.name


def describe_supervised_plan(config: Config, root: Path) -> str:
    """Check a start that does not follow, and describe it as text. Raises
    `ConfigError` like `run_sft`."""
    start = check_dry_run(config, command="sft", runs=root)
    config = start.config
    learner = start.config.learner
    rank = estimate_rank_memory(start.shape, config)
    rows = len(start.supervised_rows.rows) if start.supervised_rows else "unknown"
    return "\n".join(
        [
            f"model       {start.shape.name}: {start.shape.num_parameters:,} parameters",
            f"schedule    {config.steps} steps of {config.sft.rows_per_step} rows, of {rows}",
            f"ranks       {learner.parallel.world_size}, {learner.backend}",
            f"memory      {format_bytes(rank.total_bytes)} a rank, estimated",
            *(f"note: {note}" for note in start.notes),
        ]
    )


def _prepare_and_run(
    config: Config, preset: str, view: LiveView, root: Path, request: StopRequest
) -> Path:
    view.show_phase("reading the rows")
    start = check_start(config, root, "sft")
    config = start.config
    rows = start.supervised_rows
    assert rows is not None
    for line in start.notes:
        view.print_line(line)
    view.set_total_steps(config.steps)
    with explain_full_disk(root):
        run = open_named_run(config, preset, view.print_line, root, make_reporter(view))
    view.print_line(f"run directory: {run.path}")
    try:
        model_path = run.find_start_model(config)
        assert model_path is not None
        with MetricsForwarder(config, run.path, view.print_line) as outlets:
            asyncio.run(SupervisedRun(config, run, model_path, rows, view, outlets, request).run())
    finally:
        REAL_WORLD.actors.leave_cluster()
        run.lock.close()
        report_ended_run(run.path, view)
    return run.path


class SupervisedRun:
    """One start of a supervised run. The event loop only waits for checkpoints; all torch work
    is in its thread."""

    def __init__(
        self,
        config: Config,
        run: RunDirectory,
        model_path: Path,
        rows: SupervisedRows,
        view: LiveView,
        outlets: MetricsForwarder,
        request: StopRequest,
    ):
        self._config = config
        self._run = run
        self._model_path = model_path
        self._data = rows
        self._view = view
        self._outlets = outlets
        self._request = request
        self._step = run.resume_from.state.steps if run.resume_from else 0
        self._elapsed = run.resume_from.state.elapsed if run.resume_from else 0.0
        self._made = 0
        """Updates made since this start."""

    async def run(self) -> None:
        """Run all steps, or those before a stop; then write the model and a checkpoint."""
        config = self._config
        directory = self._run.path
        lineage = self._take_lineage(self._run.resume_from)
        self._view.rewind_to_step(self._step)
        self._view.show_phase("loading the model")
        from r3async.actors.driver import load_standalone_learner

        learner = load_standalone_learner(
            config, self._model_path, directory.absolute(), REAL_WORLD
        )
        events = open_event_log(directory, "learner")
        events.info("learner_started", lineage=lineage.number, step=self._step)
        writer = CheckpointWriter(
            config, f"{directory.name}-sft", self._model_path, directory, events
        )
        due, rows = CheckpointSchedule(config.checkpoint), MetricsFile(directory)
        due.mark_begun(self._step)
        try:
            if self._run.resume_from:
                learner.restore_checkpoint(self._run.resume_from.path)
            self._confirm_started()

            async def save() -> None:
                due.mark_begun(self._step)
                state = await self._make_state(lineage).with_record_positions(
                    directory, [METRICS_FILE], keeper=REAL_WORLD.record_flusher
                )
                await writer.save_checkpoint(
                    state, lambda: _call_now(learner.stage_checkpoint), learner.write_checkpoint
                )

            while self._step < config.steps and not self._request.requested:
                row = self._make_update(learner, lineage)
                rows.write(row)
                self._outlets.show_status({"rows": [row]})
                self._view.show_row(row, describe_step(row))
                if due(self._step):
                    await save()
                await asyncio.sleep(0)
            if self._step > due.last_step:
                await save()
            await writer.wait_until_written()
            self._save_model(learner)
            events.info("run_finished", steps=self._step, stopped=self._step < config.steps)
        finally:
            rows.close()
            learner.close()

    def _take_lineage(self, resume: Checkpoint | None) -> Lineage:
        if resume is not None and resume.state.admission:
            raise CheckpointError(
                f"{resume.path} is of `r3async train`, and has leases of episodes: to train its "
                "model, `r3async export` it and set `model.path`"
            )
        return begin_lineage(self._run.path, resume, fingerprint_model(self._model_path))

    def _confirm_started(self) -> None:
        self._request.install_handlers()  # Ray installs its own handlers
        self._request.is_loading = False
        if self._request.requested:
            raise StoppedWhileLoading

    def _make_update(self, learner: Any, lineage: Lineage) -> dict[str, Any]:
        """Train one step and return its row of metrics."""
        began = time.monotonic()
        metrics = learner.train_supervised(
            self._pack_for_ranks(self._data.select_step_samples(self._step))
        )
        seconds = time.monotonic() - began
        self._step += 1
        self._made += int(metrics["optimizer/updates"])
        self._elapsed += seconds
        every = self._config.evaluation.every_steps
        last = self._step == self._config.steps
        if self._data.held_out and (last or (every and self._step % every == 0)):
            total, tokens = learner.compute_supervised_loss(
                self._pack_for_ranks(self._data.held_out)
            )
            metrics["loss/answers_held_out"] = total / max(tokens, 1.0)
        return {
            "step": self._step,
            "version": self._step,
            "lineage": lineage.number,
            "time": time.time(),
            **metrics,
            "data/epochs": self._step * self._config.sft.rows_per_step / len(self._data.rows),
            "timing/step_seconds": seconds,
            "throughput/trained_tokens_per_second": metrics["batch/trained_tokens"]
            / max(seconds, 1e-9),
        }

    def _pack_for_ranks(self, samples: Sequence[Sample]) -> list[list[MicroBatch]]:
        from r3async.learner.micro_batches import pack_for_ranks

        learner = self._config.learner
        return pack_for_ranks(
            samples,
            learner.max_tokens_per_micro_batch,
            ranks=learner.parallel.dp,
            cost=self._data.cost,
            share_prefixes=learner.share_prefixes,
        )

    def _make_state(self, lineage: Lineage) -> TrainingState:
        return TrainingState(
            steps=self._step,
            version=self._step,
            lineage=lineage,
            consumed=self._step,
            elapsed=self._elapsed,
        )

    def _save_model(self, learner: Any) -> None:
        name = self._run.path.name
        done = self._step == self._config.steps
        if self._step:
            self._view.show_phase("saving the model")
            learner.save_model(self._run.path / "model")
            self._view.print_line(f"trained model: {self._run.path / 'model'}")
        if not done:
            self._view.print_line(
                f"stopped after {self._step} of {self._config.steps} steps; to resume: the same "
                f"command with name={name}"
            )


async def _call_now(call: Callable[[], object]) -> None:
    call()
