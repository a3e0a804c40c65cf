"""The conductor's evaluations, which generators play beside training."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from r3async.checkpoint import CheckpointDirectory
from r3async.checkpoint.evaluations import (
    EvaluationFile,
    evaluation_path,
    read_evaluations,
    write_evaluation,
)
from r3async.config import Config
from r3async.envs.errors import summarize_error
from r3async.record.reading import EVALUATION_FILE, read_json_objects
from r3async.rollout.engine import EngineLostError
from r3async.rollout.evaluation_results import flatten_evaluation
from r3async.world import ActorLostError, World
from r3async.world.appending import AppendFile
from r3async.world.disk_retries import DiskRetrier
from r3async.world.real import REAL_WORLD

from .fleet import Fleet, FleetGenerator, end_generator
from .process import RPC_SECONDS

EVALUATION_POLL_SECONDS = 0.2
EVALUATION_DISK_HINT = (
    "free bytes there, or file descriptors of this process: its row is written, "
    "and which checkpoint is best is not known"
)
RECENT_EVALUATIONS = 8
"""Number of the last evaluations that the driver can get."""
PING_SECONDS = 1.0
"""Seconds between two checks that a generator which plays an evaluation still answers."""


class GeneratorSilent(RuntimeError):
    """A generator does not answer any more."""


class Evaluator:
    """The evaluations of a run: at most one at a time, beside training and never in its way. A
    failure is only an event.

    One generator plays an evaluation, with the weights of the step, and with newer ones as they are
    installed; with `evaluation.one_version` it keeps those with which it began. If it is lost, or
    does not answer for `supervise.silence_seconds`, another one plays the evaluation from the
    beginning, or the same one when it is back: a generator that had nothing more to play is
    restarted (`Fleet.request_restart`).

    `run_dir/evaluation.jsonl` gets an object for each evaluation,
    `{"step", "time", "evaluation/reward_mean", …}`: the newest step when it began, and the versions
    of the weights that sampled it. The whole result is in a file beside the checkpoints
    (`checkpoint/directory.py`). `events` is a structlog logger.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        events: Any,
        fleet: Fleet,
        *,
        world: World = REAL_WORLD,
    ):
        self.config = config
        self.settings = config.evaluation
        self._limits = config.supervise.limits
        self._disk_wait = DiskRetrier(
            world, events.warning, "evaluation_not_kept", "evaluation_kept"
        )
        self._world = world
        self._clock = world.clock
        self._events = events
        self._fleet = fleet
        self._run_dir = run_dir
        self._file = AppendFile(run_dir / EVALUATION_FILE, world=world)
        self._checkpoint_directory = CheckpointDirectory.from_config(
            config, run_dir, files=world.files
        ).directory
        # Read here, so that a process without file descriptors ends before anything has loaded.
        self._stored_evaluations, self._row_steps = (
            read_evaluations(self._checkpoint_directory, files=world.files),
            self._read_row_steps(),
        )
        self.recent_rows: deque[dict[str, Any]] = deque(maxlen=RECENT_EVALUATIONS)
        """Last rows of `evaluation.jsonl` of this start."""
        self._task: asyncio.Task[None] | None = None
        self._last_step = -1
        """Step after which the last evaluation began."""
        self._abandoned = False

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    def resume_evaluations(self, step: int, version: int) -> None:
        """Resume evaluations when the run begins, or resumes after `step`, with weights `version`.
        Returns at once.

        Rows that the resume took back although their evaluations had ended are written again. An
        evaluation begins if the last one that was due is not there: it was being played when the
        run was stopped or lost, or it was skipped.
        """
        every = self.settings.every_steps
        row_steps = self._row_steps
        before = self._stored_evaluations
        self._stored_evaluations = {}
        for one in before.values():
            if one.is_finished and one.step <= step and one.step not in row_steps:
                self._write_row(one)
                row_steps.add(one.step)
        if step in row_steps:
            self._last_step = step
        due = step - step % every if every else 0
        if (
            every
            and (due or self.settings.at_start)
            and not any(due <= written <= step for written in row_steps)
        ):
            self._begin_evaluation(step, version)

    def _read_row_steps(self) -> set[int]:
        """Return the steps that have a row in the run's record."""
        rows = read_json_objects(self._run_dir / EVALUATION_FILE, files=self._world.files)
        return {row["step"] for row in rows if isinstance(row.get("step"), int)}

    def evaluate_if_due(self, step: int, version: int) -> None:
        """Begin an evaluation if one is due after step `step`, whose weights are `version`.
        Returns at once."""
        every = self.settings.every_steps
        if every and step % every == 0:
            self._begin_evaluation(step, version)

    def _begin_evaluation(self, step: int, version: int) -> None:
        if self.is_running:
            self._events.warning(
                "evaluation_skipped", step=step, running_since_step=self._last_step
            )
            return
        self._last_step = step
        self._task = asyncio.create_task(self._run_evaluation(step, version))

    async def _run_evaluation(self, step: int, version: int) -> None:
        result = None
        begun = EvaluationFile(step, self._clock.time())
        with contextlib.suppress(OSError):  # the evaluation is played all the same
            await self._store_evaluation(begun)
        try:
            result = await self._play_evaluation(step, version)
        finally:
            if result is None:  # failed, or cancelled
                with contextlib.suppress(OSError):
                    self._world.files.remove(evaluation_path(self._checkpoint_directory, step))
        if result is None:
            return
        made = EvaluationFile(step, self._clock.time(), flatten_evaluation(result), result)
        self._write_row(made)
        with contextlib.suppress(TimeoutError):  # its row is written, and the run may end
            async with asyncio.timeout(self._limits.checkpoint_write(0)):
                await self._disk_wait.run_with_retries(
                    EVALUATION_DISK_HINT, self._store_evaluation, made
                )

    def _write_row(self, evaluation: EvaluationFile) -> None:
        """Write the row of an evaluation to `evaluation.jsonl`."""
        figures = {f"evaluation/{name}": value for name, value in evaluation.figures.items()}
        row = {"step": evaluation.step, "time": evaluation.time, **figures}
        self._file.append(msgspec.json.encode(row))
        self.recent_rows.append(row)

    async def _store_evaluation(self, evaluation: EvaluationFile) -> None:
        await self._world.threads.run(
            write_evaluation, self._checkpoint_directory, evaluation, files=self._world.files
        )

    async def _wait_for_generator(
        self, version: int, silent_since: Mapping[str, float]
    ) -> FleetGenerator | None:
        """Wait for a healthy generator that has `version`, and return the one with the newest
        weights. Returns None if there was none for as long as an evaluation may take. Meanwhile
        lost ones are restarted, also if they had nothing more to play.

        A generator in `silent_since` must have answered something after that time
        (monotonic seconds).
        """
        began = self._clock.monotonic()
        while (now := self._clock.monotonic()) < began + self._limits.evaluation:
            able = [
                g
                for g in self._fleet
                if g.state == "healthy"
                and not g.is_leaving
                and g.version >= version
                # One that is being given another version would change in the evaluation.
                and not (self.settings.one_version and g.install_task is not None)
            ]
            able = [
                g
                for g in able
                if g.health.silent_seconds < now - silent_since.get(g.generator_id, -math.inf)
            ]
            if able:
                return max(able, key=lambda g: g.version)
            for lost in [g for g in self._fleet if g.state == "lost"]:
                self._fleet.request_restart(lost)
            await asyncio.sleep(EVALUATION_POLL_SECONDS)
        return None

    async def _wait_for_answer(self, generator: FleetGenerator) -> None:
        """Wait until a generator that does not answer answers, or is lost."""
        try:
            await generator.handle.call("describe_process")
        except ActorLostError:
            self._fleet.request_restart(generator)
        else:
            self._fleet.note_answer(generator)

    async def _play_evaluation(self, step: int, version: int) -> dict[str, Any] | None:
        """Play an evaluation and return it as an `Evaluation` in plain data; None, with an
        event, if it failed."""
        left: dict[str, float] = {}
        hearing: list[asyncio.Task[None]] = []
        try:
            while (generator := await self._wait_for_generator(version, left)) is not None:
                name = generator.generator_id
                try:
                    result = await self._play_on_generator(generator)
                except (GeneratorSilent, ActorLostError, EngineLostError) as error:
                    left[name] = self._clock.monotonic()
                    if isinstance(error, EngineLostError):
                        await end_generator(self._world, generator, f"its engine is lost: {error}")
                    lost = not isinstance(error, GeneratorSilent)
                    if lost:
                        self._fleet.request_restart(generator)
                    else:
                        hearing.append(asyncio.create_task(self._wait_for_answer(generator)))
                    hint = "it was lost" if lost else "it does not answer"
                    self._events.warning("evaluation_moved", step=step, generator=name, hint=hint)
                except Exception as error:
                    if not generator.is_leaving:
                        error_line = summarize_error(error).line
                        self._events.warning(
                            "evaluation_failed", step=step, generator=name, error=error_line
                        )
                        return None
                    self._events.warning(
                        "evaluation_moved", step=step, generator=name, hint="it has left"
                    )
                else:
                    self._events.info(
                        "evaluation_finished",
                        step=step,
                        generator=name,
                        **flatten_evaluation(result),
                    )
                    return result
        finally:
            for each in hearing:
                each.cancel()
        limit = f"within {self._limits.evaluation:g} s (supervise.patience)"
        error_line = f"no generator was healthy and had version {version} of the weights {limit}"
        self._events.warning("evaluation_failed", step=step, error=error_line)
        return None

    async def _play_on_generator(self, generator: FleetGenerator) -> dict[str, Any]:
        """Play an evaluation on a generator and return its result. Raises `GeneratorSilent` if the
        generator stops answering meanwhile, `TimeoutError`, and what the evaluation raised."""
        # The generator's own limit comes first, so that it is free again.
        limit = self._limits.evaluation + RPC_SECONDS
        if self.settings.one_version:
            self._fleet.set_keeps_version(generator, True)
        playing = asyncio.ensure_future(generator.handle.call("evaluate"))
        listening = asyncio.create_task(self._wait_until_silent(generator))
        try:
            await asyncio.wait(
                [playing, listening], timeout=limit, return_when=asyncio.FIRST_COMPLETED
            )
            if playing.done():
                return playing.result()
            if listening.done():
                raise GeneratorSilent
            raise TimeoutError(f"no answer within {limit:g} s (supervise.patience)")
        finally:
            playing.cancel()
            listening.cancel()
            if self.settings.one_version:
                self._fleet.set_keeps_version(generator, False)

    async def _wait_until_silent(self, generator: FleetGenerator) -> None:
        """Wait until a generator has not answered for `supervise.silence_seconds`. Its loss is
        noticed elsewhere."""
        while True:
            try:
                await generator.handle.call(
                    "describe_process", timeout=self.config.supervise.silence_seconds
                )
            except TimeoutError:
                return
            except Exception:
                await asyncio.Event().wait()
            await asyncio.sleep(PING_SECONDS)

    async def finish_evaluations(
        self, step: int, version: int, stop_requested: asyncio.Event
    ) -> bool:
        """Finish the evaluations after the run's last step: wait for the one that runs, then
        evaluate the last weights if that has not been done.

        A run that is stopped begins no evaluation, and waits `supervise.stop_grace_seconds` at
        most. Returns True if something was left undone for that reason.
        """
        await self._wait_for_running(stop_requested)
        if (
            self.settings.every_steps
            and step
            and self._last_step != step
            and not stop_requested.is_set()
        ):
            self._begin_evaluation(step, version)
            await self._wait_for_running(stop_requested)
        return bool(self.settings.every_steps and step) and (
            self._last_step != step or self._abandoned
        )

    async def _wait_for_running(self, stop_requested: asyncio.Event) -> None:
        deadline: float | None = None
        while self._task is not None and not self._task.done():
            await asyncio.wait([self._task], timeout=EVALUATION_POLL_SECONDS)
            if stop_requested.is_set() and deadline is None:
                deadline = self._clock.monotonic() + self.config.supervise.stop_grace_seconds
            if deadline is not None and self._clock.monotonic() > deadline:
                self._events.warning(
                    "evaluation_abandoned",
                    step=self._last_step,
                    hint="the same command, to resume, begins it again",
                )
                self._abandoned = True
                await self.cancel()

    async def cancel(self) -> None:
        """Cancel the evaluation that runs, if there is one."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
