"""The conductor's tasks: which task each group poses, and which tasks fail."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from r3async.checkpoint import RunState
from r3async.config import Config, resolve_envs
from r3async.record.reading import QUARANTINE_FILE, QuarantinedTask, read_quarantine
from r3async.schedule.difficulty import NO_SIZE_MESSAGE, TaskHistory, TaskScore
from r3async.schedule.environment_mix import MixedTaskCursor
from r3async.schedule.run_ahead import count_slots
from r3async.schedule.task_failures import EpisodeEnd, FailedTask, FailureSource, TaskFailures
from r3async.schedule.tasks import TaskCursor
from r3async.world import World
from r3async.world.appending import AppendFile
from r3async.world.real import REAL_WORLD

from .process import RunFailed

MAX_ERROR_CHARACTERS = 500


class TaskSource:
    """The source of tasks, which quarantines tasks of which every episode fails. `events` is a
    structlog logger.

    The quarantine is a file of the run. It is written before a group is leased that it changes,
    so that a resumed run poses the same tasks for the groups that it kept, and no quarantined
    task for others.
    """

    def __init__(self, config: Config, run_dir: Path, events: Any, *, world: World = REAL_WORLD):
        self._config = config
        self._events = events
        self._world = world
        self._file = AppendFile(run_dir / QUARANTINE_FILE, world=world)
        self._earlier_quarantined = read_quarantine(run_dir, files=world.files)
        """Tasks that an earlier start of the run quarantined."""
        self._quarantined = {t.task_seed: t.from_group for t in self._earlier_quarantined}
        schedule = config.schedule
        self._failures = TaskFailures(
            config.supervise.max_failed_fraction,
            schedule.group_size,
            count_slots(schedule) + schedule.window,
        )
        self._limit_exceeded = asyncio.Event()
        self._failure_reason = self.last_failure = ""
        self._environments = resolve_envs(config)
        self._task_counts: Sequence[int | None] = [None] * len(self._environments)
        self._cursor = self._build_cursor()
        self._history = TaskHistory(schedule.difficulty, config.seed)

    def set_task_counts(self, task_counts: Sequence[int | None]) -> None:
        """Set the number of tasks of each environment; None if it is not known. Raises `RunFailed`
        if it is known of none, and `schedule.difficulty` should choose tasks by past rewards."""
        if self._config.schedule.difficulty.is_active and not any(task_counts):
            raise RunFailed(NO_SIZE_MESSAGE)
        self._task_counts = task_counts
        self._cursor = self._build_cursor()

    def _build_cursor(self) -> TaskCursor | MixedTaskCursor:
        seed = self._config.seed
        quarantined = self._quarantined
        if len(self._environments) == 1:
            return TaskCursor(seed, self._task_counts[0], quarantined)
        return MixedTaskCursor(
            seed, [each.weight for each in self._environments], self._task_counts, quarantined
        )

    def choose_task(self, group: int) -> int:
        return self._history.choose_task(group, self._cursor.iter_tasks(group))

    def record_scores(self, groups: Sequence[int], scores: Sequence[TaskScore]) -> None:
        """Record the scores of trained groups; see `TaskHistory.record_scores`."""
        self._history.record_scores(groups, scores)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return self._history.state_dict()

    def load_state_dict(self, state: RunState | None, buffered_tasks: Mapping[int, int]) -> None:
        """Resume from `state`, or from the beginning if it is None. `buffered_tasks` has the tasks,
        by group, of which the learner kept episodes."""
        self._history.load_state_dict({} if state is None else state.tasks, buffered_tasks)

    def collect_metrics(self, groups: int) -> dict[str, float]:
        """Return the metrics of tasks after `groups` groups were leased."""
        figures = {
            "data/quarantined_tasks": float(len(self._quarantined)),
            **self._history.collect_metrics(),
        }
        cursor = self._cursor
        if isinstance(cursor, TaskCursor):
            return figures | ({"data/epochs": cursor.count_epochs(groups)} if cursor.size else {})
        each = zip(self._environments, self._task_counts, cursor.count_epochs(groups), strict=True)
        return figures | {
            f"env/{posed.label}/epochs": epochs for posed, size, epochs in each if size
        }

    def extend_quarantine(self, next_group: int) -> None:
        """Extend the quarantine of an earlier start of the run to all groups from `next_group` on:
        nothing is left of them, so when they are leased again they pose no quarantined task."""
        for task in self._earlier_quarantined:
            if task.from_group > next_group:
                self._write_quarantined(msgspec.structs.replace(task, from_group=next_group))

    def record_ends(self, ends: Sequence[EpisodeEnd], next_group: int) -> None:
        """Record the ends of episodes, and quarantine tasks that failed. No group from `next_group`
        on was leased yet."""
        for end in ends:
            failed = self._failures.record_end(end)
            if end.failed_by is not None:
                self.last_failure = end.description
            if failed is not None and failed.task_seed not in self._quarantined:
                self._quarantine_task(failed, next_group)
            if end.failed_by is not None and self._failures.exceeds_limit(end.failed_by):
                self._fail_run(end.failed_by)

    def _quarantine_task(self, failed: FailedTask, next_group: int) -> None:
        error = failed.error.partition("\n")[0][:MAX_ERROR_CHARACTERS]
        task = QuarantinedTask(
            failed.task_seed,
            failed.group_index,
            next_group,
            failed.failed_by,
            error,
            time=self._world.clock.time(),
        )
        # The reason is in the event of the episode that failed last, and is kept with the task.
        self._events.warning(
            "task_quarantined", task_seed=task.task_seed, group=task.group, failed_by=task.failed_by
        )
        self._write_quarantined(task)

    def _write_quarantined(self, task: QuarantinedTask) -> None:
        self._quarantined[task.task_seed] = task.from_group
        self._file.append(msgspec.json.encode(task))

    def _fail_run(self, by: FailureSource) -> None:
        self._failure_reason = self._failure_reason or (
            f"too many tasks fail: {self._failures.describe_failures(by)}. The last one: "
            f"{self.last_failure}"
        )
        self._limit_exceeded.set()

    async def raise_when_failed(self) -> None:
        """Wait until too many tasks have failed, then raise `RunFailed` with the last traceback."""
        await self._limit_exceeded.wait()
        raise RunFailed(self._failure_reason)
