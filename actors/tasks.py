"""The conductor's tasks: which task each group poses, which tasks fail, and evaluations, which are played beside training."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from r3async.actors.fleet import Fleet, Generator
from r3async.actors.process import RPC_SECONDS, RunFailed
from r3async.checkpoint import Checkpoints, RunState
from r3async.checkpoint.evaluations import EvaluationFile, evaluation_path, read_evaluation_files, write_evaluation
from r3async.config import Config, environments
from r3async.envs.raised import describe_raised
from r3async.record.reading import EVALUATION, QUARANTINE, QuarantinedTask, read_objects, read_quarantine
from r3async.rollout.outcomes import figures_of
from r3async.schedule.admission import slots_of
from r3async.schedule.difficulty import NO_SIZE, Score, TaskHistory
from r3async.schedule.mix import MixedCursor
from r3async.schedule.tasks import By, Cursor, EpisodeEnd, FailedTask, TaskFailures
from r3async.world import ActorLost, World
from r3async.world.appending import AppendFile
from r3async.world.disk_waits import DiskWait
from r3async.world.real import REAL

ERROR_CHARACTERS = 500
POLL_SECONDS = 0.2
DISK_HINT = "free bytes there, or file descriptors of this process: its row is written, and which checkpoint is best is not known"
RECENT = 8
"""Evaluations that the driver may ask for."""
PING_SECONDS = 1.0
"""Between two questions to a generator that plays an evaluation, whether it answers."""


class Tasks:
    """Poses tasks, and quarantines those of which every episode fails. `events`: a structlog logger.

    The quarantine is a file of the run, written before a group is leased that it changes, so that a resumed run poses the same
    tasks for the groups that it kept, and none of the quarantined for others.
    """

    def __init__(self, config: Config, run_dir: Path, events: Any, *, world: World = REAL):
        self._config, self._events, self._world = config, events, world
        self._file = AppendFile(run_dir / QUARANTINE, world=world)
        self._before = read_quarantine(run_dir, files=world.files)
        """Tasks that an earlier start of the run quarantined."""
        self._quarantined = {t.task_seed: t.from_group for t in self._before}
        schedule = config.schedule
        self._failures = TaskFailures(
            config.supervise.max_failed_fraction, schedule.samples_per_group, slots_of(schedule) + schedule.window
        )
        self._too_many = asyncio.Event()
        self._reason = self.last_failure = ""
        self._posed = environments(config)
        self._sizes: Sequence[int | None] = [None] * len(self._posed)
        self._cursor = self._made()
        self._history = TaskHistory(schedule.difficulty, config.seed)

    def open(self, sizes: Sequence[int | None]) -> None:
        """How many tasks each environment has; None: that is not known. Raises `RunFailed` if it is of none, and past rewards are
        to say which come next."""
        if self._config.schedule.difficulty.active and not any(sizes):
            raise RunFailed(NO_SIZE)
        self._sizes = sizes
        self._cursor = self._made()

    def _made(self) -> Cursor | MixedCursor:
        seed, quarantined = self._config.seed, self._quarantined
        if len(self._posed) == 1:
            return Cursor(seed, self._sizes[0], quarantined)
        return MixedCursor(seed, [each.weight for each in self._posed], self._sizes, quarantined)

    def task_seed(self, group: int) -> int:
        return self._history.pose(group, self._cursor.tasks(group))

    def trained(self, groups: Sequence[int], scores: Sequence[Score]) -> None:
        """See `TaskHistory.trained`."""
        self._history.trained(groups, scores)

    def snapshot(self) -> dict[str, Any]:
        """For a checkpoint."""
        return self._history.snapshot()

    def restore(self, state: RunState | None, kept: Mapping[int, int]) -> None:
        """Resume from `state`, or without one from the beginning. `kept`: by group, tasks of which the learner kept episodes."""
        self._history.restore({} if state is None else state.tasks, kept)

    def figures(self, groups: int) -> dict[str, float]:
        """Metrics, after so many groups were leased."""
        figures = {"data/quarantined_tasks": float(len(self._quarantined)), **self._history.figures()}
        cursor = self._cursor
        if isinstance(cursor, Cursor):
            return figures | ({"data/epochs": cursor.epochs(groups)} if cursor.size else {})
        each = zip(self._posed, self._sizes, cursor.epochs(groups), strict=True)
        return figures | {f"env/{posed.label}/epochs": epochs for posed, size, epochs in each if size}

    def resumed(self, next_group: int) -> None:
        """Nothing is left of groups from `next_group` on: those that are leased again pose no quarantined task."""
        for task in self._before:
            if task.from_group > next_group:
                self._write(msgspec.structs.replace(task, from_group=next_group))

    def ended(self, ends: Sequence[EpisodeEnd], next_group: int) -> None:
        """Episodes are over. No group from `next_group` on was leased yet."""
        for end in ends:
            failed = self._failures.ended(end)
            if end.failed_by is not None:
                self.last_failure = end.described
            if failed is not None and failed.task_seed not in self._quarantined:
                self._quarantine(failed, next_group)
            if end.failed_by is not None and self._failures.too_many(end.failed_by):
                self._stop(end.failed_by)

    def _quarantine(self, failed: FailedTask, next_group: int) -> None:
        error = failed.error.partition("\n")[0][:ERROR_CHARACTERS]
        task = QuarantinedTask(
            failed.task_seed, failed.group_index, next_group, failed.failed_by, error, time=self._world.clock.time()
        )
        # Why is told by the event of the episode that failed last, and kept with the task.
        self._events.warning("task_quarantined", task_seed=task.task_seed, group=task.group, failed_by=task.failed_by)
        self._write(task)

    def _write(self, task: QuarantinedTask) -> None:
        self._quarantined[task.task_seed] = task.from_group
        self._file.append(msgspec.json.encode(task))

    def _stop(self, by: By) -> None:
        self._reason = (
            self._reason or f"too many tasks fail: {self._failures.describe(by)}. The last one: {self.last_failure}"
        )
        self._too_many.set()

    async def watch(self) -> None:
        """Raises `RunFailed` with the last traceback as soon as too many tasks have failed."""
        await self._too_many.wait()
        raise RunFailed(self._reason)


class Silent(RuntimeError):
    """A generator does not answer any more."""


class Evaluator:
    """At most one evaluation at a time, beside training and never in its way: one that fails is an event.

    One generator plays it, with the weights of the step, and with newer ones as they are installed. If that is lost, or does not
    answer for `supervise.silence_seconds`, another one plays it from the beginning, or the same one when it is back: one that had
    nothing more to play is brought back by `revive`. `run_dir/evaluation.jsonl` gets an object for each,
    `{"step", "time", "evaluation/reward_mean", …}`: the newest step when it began, and the versions of the weights that sampled
    it. All of it is in a file beside the checkpoints (`checkpoint/evaluations.py`). `events`: a structlog logger.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        events: Any,
        fleet: Fleet,
        *,
        revive: Callable[[Generator], object] = lambda generator: None,
        world: World = REAL,
    ):
        self.config, self.settings, self._revive = config, config.evaluation, revive
        self._disk = DiskWait(world, events.warning, "evaluation_not_kept", "evaluation_kept")
        self._world, self._clock, self._events, self._fleet = world, world.clock, events, fleet
        self._run_dir, self._file = run_dir, AppendFile(run_dir / EVALUATION, world=world)
        self._directory = Checkpoints.of(config, run_dir, files=world.files).directory
        # Read here, where a process without descriptors ends before anything has loaded.
        self._before, self._row_steps = read_evaluation_files(self._directory, files=world.files), self._written()
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT)
        """The last rows of `evaluation.jsonl`, of this start."""
        self._task: asyncio.Task[None] | None = None
        self._evaluated = -1
        """The step after which the last one began."""
        self._abandoned = False

    @property
    def running(self) -> bool:
        return self._task is not None and not self._task.done()

    def start(self, step: int, version: int) -> None:
        """The run begins, or resumes after `step`, with weights `version`. Writes rows again that the resume took back though
        their evaluations had ended. Begins an evaluation if the last one that was due is not there: it was played when the run
        was stopped or lost, or was skipped. Returns at once."""
        every, row_steps = self.settings.every, self._row_steps
        before, self._before = self._before, {}
        for one in before.values():
            if one.finished and one.step <= step and one.step not in row_steps:
                self._write(one)
                row_steps.add(one.step)
        if step in row_steps:
            self._evaluated = step
        due = step - step % every if every else 0
        if every and (due or self.settings.at_start) and not any(due <= written <= step for written in row_steps):
            self._begin(step, version)

    def _written(self) -> set[int]:
        """Steps that have a row in the run's record."""
        rows = read_objects(self._run_dir / EVALUATION, files=self._world.files)
        return {row["step"] for row in rows if isinstance(row.get("step"), int)}

    def after(self, step: int, version: int) -> None:
        """Step `step` has been made, and its weights are `version`. Begins an evaluation if one is due; returns at once."""
        every = self.settings.every
        if every and step % every == 0:
            self._begin(step, version)

    def _begin(self, step: int, version: int) -> None:
        if self.running:
            self._events.warning("evaluation_skipped", step=step, running_since_step=self._evaluated)
            return
        self._evaluated = step
        self._task = asyncio.create_task(self._evaluate(step, version))

    async def _evaluate(self, step: int, version: int) -> None:
        result = None
        begun = EvaluationFile(step, self._clock.time())
        with contextlib.suppress(OSError):  # it is played all the same
            await self._keep(begun)
        try:
            result = await self._played(step, version)
        finally:
            if result is None:  # failed, or cancelled
                with contextlib.suppress(OSError):
                    self._world.files.remove(evaluation_path(self._directory, step))
        if result is None:
            return
        made = EvaluationFile(step, self._clock.time(), figures_of(result), result)
        self._write(made)
        with contextlib.suppress(TimeoutError):  # its row is written, and the run may end
            async with asyncio.timeout(self.config.checkpoint.write_timeout):
                await self._disk.insist(DISK_HINT, self._keep, made)

    def _write(self, made: EvaluationFile) -> None:
        """Its row."""
        figures = {f"evaluation/{name}": value for name, value in made.figures.items()}
        row = {"step": made.step, "time": made.time, **figures}
        self._file.append(msgspec.json.encode(row))
        self.recent.append(row)

    async def _keep(self, evaluation: EvaluationFile) -> None:
        await self._world.threads.run(write_evaluation, self._directory, evaluation, files=self._world.files)

    async def _player(self, version: int, left: Mapping[str, float]) -> Generator | None:
        """The healthy generator with the newest weights, as soon as one has these. One that was `left`, by the time, has to have
        answered something since then. None: there was none for as long as an evaluation may take."""
        began = self._clock.monotonic()
        while (now := self._clock.monotonic()) < began + self.settings.timeout:
            able = [g for g in self._fleet if g.state == "healthy" and not g.leaving and g.version >= version]
            able = [g for g in able if g.health.silent_for < now - left.get(g.generator_id, -math.inf)]
            if able:
                return max(able, key=lambda g: g.version)
            await asyncio.sleep(POLL_SECONDS)
        return None

    async def _hear(self, generator: Generator) -> None:
        """Wait until one that does not answer does, or is lost."""
        try:
            await generator.handle.call("whereabouts")
        except ActorLost:
            self._revive(generator)
        else:
            self._fleet.answered(generator)

    async def _played(self, step: int, version: int) -> dict[str, Any] | None:
        """An `Evaluation` in plain data; None, with an event, if it failed."""
        left: dict[str, float] = {}
        hearing: list[asyncio.Task[None]] = []
        try:
            while (generator := await self._player(version, left)) is not None:
                name = generator.generator_id
                try:
                    result = await self._played_by(generator)
                except (Silent, ActorLost) as error:
                    left[name] = self._clock.monotonic()
                    if lost := isinstance(error, ActorLost):
                        self._revive(generator)
                    else:
                        hearing.append(asyncio.create_task(self._hear(generator)))
                    hint = "it was lost" if lost else "it does not answer"
                    self._events.warning("evaluation_moved", step=step, generator=name, hint=hint)
                except Exception as error:
                    if not generator.leaving:
                        error_line = describe_raised(error).line
                        self._events.warning("evaluation_failed", step=step, generator=name, error=error_line)
                        return None
                    self._events.warning("evaluation_moved", step=step, generator=name, hint="it has left")
                else:
                    self._events.info("evaluation_finished", step=step, generator=name, **figures_of(result))
                    return result
        finally:
            for each in hearing:
                each.cancel()
        limit = f"within {self.settings.timeout:g} s (evaluation.timeout)"
        error_line = f"no generator was healthy and had version {version} of the weights {limit}"
        self._events.warning("evaluation_failed", step=step, error=error_line)
        return None

    async def _played_by(self, generator: Generator) -> dict[str, Any]:
        """Its result. Raises `Silent` if it stops answering meanwhile, `TimeoutError`, and what the evaluation raised."""
        # The generator's own limit comes first, and so it is free again.
        limit = self.settings.timeout + RPC_SECONDS
        playing = asyncio.ensure_future(generator.handle.call("evaluate"))
        listening = asyncio.create_task(self._until_silent(generator))
        try:
            await asyncio.wait([playing, listening], timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if playing.done():
                return playing.result()
            raise Silent if listening.done() else TimeoutError(f"no answer within {limit:g} s (evaluation.timeout)")
        finally:
            playing.cancel()
            listening.cancel()

    async def _until_silent(self, generator: Generator) -> None:
        """Returns when it has not answered for `supervise.silence_seconds`. A loss is noticed elsewhere."""
        while True:
            try:
                await generator.handle.call("whereabouts", timeout=self.config.supervise.silence_seconds)
            except TimeoutError:
                return
            except Exception:
                await asyncio.Event().wait()
            await asyncio.sleep(PING_SECONDS)

    async def finish(self, step: int, version: int, stopping: Callable[[], bool]) -> bool:
        """The run has made its last step: wait for what is running, then evaluate the last weights if that has not been done.

        A run that is stopped begins nothing, and waits `supervise.stop_grace_seconds` at most. Returns whether it left anything
        undone for that.
        """
        await self._wait(stopping)
        if self.settings.every and step and self._evaluated != step and not stopping():
            self._begin(step, version)
            await self._wait(stopping)
        return bool(self.settings.every and step) and (self._evaluated != step or self._abandoned)

    async def _wait(self, stopping: Callable[[], bool]) -> None:
        deadline: float | None = None
        while self._task is not None and not self._task.done():
            await asyncio.wait([self._task], timeout=POLL_SECONDS)
            if stopping() and deadline is None:
                deadline = self._clock.monotonic() + self.config.supervise.stop_grace_seconds
            if deadline is not None and self._clock.monotonic() > deadline:
                self._events.warning(
                    "evaluation_abandoned", step=self._evaluated, hint="the same command, to resume, begins it again"
                )
                self._abandoned = True
                await self.cancel()

    async def cancel(self) -> None:
        """Wait for nothing any more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
