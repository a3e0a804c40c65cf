"""Tasks that fail: how many may, and the quarantine of what will never be trained.

Pure, but for the quarantine's files. All episodes of a group play one task, so they fail together:
the limit is on the share of tasks, not of episodes. A task of which some episodes fail counts for
their share.

Trajectories that will never be trained are kept in a quarantine, to be inspected
(`r3async inspect runs/NAME/quarantine`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from r3async.data.tokens import Trajectory
from r3async.data.wire import encode_trajectory
from r3async.data.wire_frames import Frame, WireError
from r3async.transport.spool import SPOOL_FORMAT
from r3async.world import EventReporter, Files
from r3async.world.files import make_directory
from r3async.world.real import REAL_WORLD

RECENT_TASKS = 100
"""Minimum number of tasks over which the share is taken; fewer, at the beginning, count as
`MIN_COUNTED_TASKS`."""
MIN_COUNTED_TASKS = 20

FailureSource = Literal["environment", "engine", "learner"]


class EpisodeEnd(msgspec.Struct, frozen=True):
    """The end of an episode.

    Attributes:
        failed_by: Source of the failure after all retries, or `learner` if the learner refused the
            episode; None if the episode did not fail.
        error: One line for the user, and below it the traceback where there is one.
    """

    group_index: int
    episode_index: int
    task_seed: int
    failed_by: FailureSource | None = None
    error: str = ""

    @property
    def description(self) -> str:
        return (
            f"task seed {self.task_seed}, group {self.group_index}, {self.failed_by}: {self.error}"
        )


class FailedTask(msgspec.Struct, frozen=True):
    """A task of which every episode of group `group_index` failed, and not by the engine. `error`
    is the last one's."""

    task_seed: int
    group_index: int
    failed_by: FailureSource
    error: str


class TaskFailures:
    """Counter of failed episodes by group, whichever generators play its parts, and however
    often one is played.

    An environment that always fails exceeds the limit with its third task (at 0.1); one bad task
    among many never does.

    Args:
        max_failed_fraction: Share of the last tasks that may fail, for each of environment,
            engine and learner.
        in_flight: Number of groups that may begin between the first and the last end of one
            group's episodes. The last `RECENT_TASKS` groups are remembered, or that many if they
            are more: a group that is forgotten while it is played would never be known to have
            failed as a whole.
    """

    def __init__(self, max_failed_fraction: float, group_size: int, in_flight: int = 0):
        if not 0 <= max_failed_fraction <= 1:
            raise ValueError(f"a share of failed tasks is in 0..1, got {max_failed_fraction}")
        self.max_failed_fraction = max_failed_fraction
        self._group_size = group_size
        self._max_recent = max(RECENT_TASKS, in_flight + 1)
        self._recent_groups: dict[int, dict[int, FailureSource]] = {}
        """Source of the failure of each episode, by group, in the order in which the groups'
        first episodes ended."""

    def record_end(self, end: EpisodeEnd) -> FailedTask | None:
        """Record the end of an episode; the last record counts.

        Returns the episode's task if no episode of it is left that could be trained.
        """
        failed = self._recent_groups.setdefault(end.group_index, {})
        if len(self._recent_groups) > self._max_recent:
            del self._recent_groups[next(iter(self._recent_groups))]
        known = failed.pop(end.episode_index, None)
        if end.failed_by is None:
            return None
        failed[end.episode_index] = end.failed_by
        if known is not None or len(failed) < self._group_size or "engine" in failed.values():
            return None
        return FailedTask(end.task_seed, end.group_index, end.failed_by, end.error)

    def exceeds_limit(self, source: FailureSource) -> bool:
        """Return whether more episodes have failed by `source` than may fail."""
        return self._count_failed(source) > self._allowed_episodes

    def describe_failures(self, source: FailureSource) -> str:
        tasks = sum(source in failed.values() for failed in self._recent_groups.values())
        return (
            f"{self._count_failed(source)} episodes of {tasks} tasks, of the last "
            f"{len(self._recent_groups)} tasks, failed by the {source}; "
            f"supervise.max_failed_fraction = {self.max_failed_fraction:g} allows "
            f"{int(self._allowed_episodes)} of {self._group_size} a task"
        )

    def _count_failed(self, source: FailureSource) -> int:
        return sum(
            who == source for failed in self._recent_groups.values() for who in failed.values()
        )

    @property
    def _allowed_episodes(self) -> float:
        """The number of episodes that may fail."""
        return (
            self.max_failed_fraction
            * max(len(self._recent_groups), MIN_COUNTED_TASKS)
            * self._group_size
        )


class TrajectoryQuarantine:
    """A directory of spool files, one for each trajectory.

    They take at most `max_bytes` bytes together: the oldest are removed. Each trajectory is
    reported, with its reason, by `report_event("trajectory_quarantined", **facts)`, even if it
    could not be stored. One thread at a time.
    """

    def __init__(
        self,
        directory: Path,
        max_bytes: int,
        report_event: EventReporter,
        *,
        files: Files = REAL_WORLD.files,
    ):
        self.directory = directory
        self._max_bytes = max_bytes
        self._report_event = report_event
        self._files = files

    def add_trajectory(
        self, trajectory: Trajectory, reason: str, frames: Sequence[Frame] | None = None
    ) -> None:
        """Store a trajectory and report it. `frames` are the trajectory as it arrived, if
        they are at hand.

        Blocks for as long as the disk does, and never raises for it: a trajectory that is not
        stored is only reported.
        """
        path = None
        problem = ""
        try:
            path = self._write_trajectory(
                trajectory.group_index, encode_trajectory(trajectory) if frames is None else frames
            )
        except (OSError, WireError) as error:
            problem = str(error)
        self._report_event(
            "trajectory_quarantined",
            trajectory_id=trajectory.trajectory_id,
            group=trajectory.group_index,
            lineage=trajectory.lineage,
            reason=reason,
            kept_as=str(path) if path else "",
            **({"not_kept": problem} if problem else {}),
        )

    def _write_trajectory(self, group: int, frames: Sequence[Frame]) -> Path | None:
        size = sum(memoryview(frame).nbytes for frame in frames)
        if size > self._max_bytes:
            return None
        make_directory(self.directory, files=self._files)
        names = [name for name in self._files.list_names(self.directory) if name.endswith(".spool")]
        found = [
            (stat.modified, name, stat.size)
            for name in names
            if (stat := self._files.stat(self.directory / name))
        ]
        numbers = [name.removesuffix(".spool").rpartition("-")[2] for name in names]
        number = max([int(digits) for digits in numbers if digits.isdigit()], default=-1) + 1
        path = self.directory / f"{group:09d}-{number:06d}.spool"
        _, size = SPOOL_FORMAT.append_record(path, frames, fsync=False, files=self._files)
        total = size + sum(nbytes for _, _, nbytes in found)
        for _, name, nbytes in sorted(found):
            if total <= self._max_bytes:
                break
            total -= nbytes
            self._files.remove(self.directory / name)
        return path
