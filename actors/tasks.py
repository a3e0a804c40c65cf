"""Which task each group poses, and which tasks fail: the conductor's part."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from r3async.actors.process import RunFailed
from r3async.config import Config
from r3async.record.reading import QUARANTINE, QuarantinedTask, read_quarantine
from r3async.schedule.admission import slots_of
from r3async.schedule.failures import By, EpisodeEnd, FailedTask, TaskFailures
from r3async.schedule.tasks import Cursor
from r3async.world import World
from r3async.world.appending import AppendFile
from r3async.world.real import REAL

ERROR_CHARACTERS = 500


class Tasks:
    """Poses tasks, and quarantines those of which every episode fails. `events`: a structlog logger.

    The quarantine is a file of the run, written before a group is leased that it changes, so that a resumed run poses the same
    tasks for the groups that it kept, and none of the quarantined for others.
    """

    def __init__(self, config: Config, run_dir: Path, events: Any, *, world: World = REAL):
        self._config, self._run_dir, self._events, self._world = config, run_dir, events, world
        self._file = AppendFile(run_dir / QUARANTINE, world=world)
        self._quarantined = {t.task_seed: t.from_group for t in read_quarantine(run_dir, files=world.files)}
        schedule = config.schedule
        self._failures = TaskFailures(
            config.supervise.max_failed_fraction, schedule.samples_per_group, slots_of(schedule) + schedule.window
        )
        self._too_many = asyncio.Event()
        self._reason = ""
        self._cursor = Cursor(config.seed, quarantined=self._quarantined)

    def open(self, size: int | None) -> None:
        """The environment has `size` tasks; None: it does not say."""
        self._cursor = Cursor(self._config.seed, size, self._quarantined)

    def task_seed(self, group: int) -> int:
        return self._cursor.task_seed(group)

    def figures(self, groups: int) -> dict[str, float]:
        """Metrics, after so many groups were leased."""
        figures = {"data/quarantined_tasks": float(len(self._quarantined))}
        return figures | ({"data/epochs": self._cursor.epochs(groups)} if self._cursor.size else {})

    def resumed(self, next_group: int) -> None:
        """Nothing is left of groups from `next_group` on: those that are leased again pose no quarantined task."""
        for task in read_quarantine(self._run_dir, files=self._world.files):
            if task.from_group > next_group:
                self._write(msgspec.structs.replace(task, from_group=next_group))

    def ended(self, ends: Sequence[EpisodeEnd], next_group: int) -> None:
        """Episodes are over. No group from `next_group` on was leased yet."""
        for end in ends:
            failed = self._failures.ended(end)
            if failed is not None and failed.task_seed not in self._quarantined:
                self._quarantine(failed, next_group)
            if end.failed_by is not None and self._failures.too_many(end.failed_by):
                self._stop(end.failed_by, end)

    def _quarantine(self, failed: FailedTask, next_group: int) -> None:
        error = failed.error.strip()[-ERROR_CHARACTERS:]
        task = QuarantinedTask(
            failed.task_seed, failed.group_index, next_group, failed.failed_by, error, time=self._world.clock.time()
        )
        self._events.warning(
            "task_quarantined", task_seed=task.task_seed, group=task.group, failed_by=task.failed_by, error=error
        )
        self._write(task)

    def _write(self, task: QuarantinedTask) -> None:
        self._quarantined[task.task_seed] = task.from_group
        self._file.append(msgspec.json.encode(task))

    def _stop(self, by: By, end: EpisodeEnd) -> None:
        self._reason = self._reason or f"too many tasks fail: {self._failures.describe(by)}. The last one: {end.error}"
        self._too_many.set()

    async def watch(self) -> None:
        """Raises `RunFailed` with the last traceback as soon as too many tasks have failed."""
        await self._too_many.wait()
        raise RunFailed(self._reason)
