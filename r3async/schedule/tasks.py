"""Which task a group poses, how many of a run's tasks may fail before it stops, and which task is posed no more. Pure.

The data cursor: a group's index, and from where tasks are quarantined, say everything. All episodes of a group play one task, so
they fail together: what is judged is the share of tasks, not of episodes. A task of which some episodes fail counts for their
share.

And trajectories that will never be trained, kept aside to be inspected (`r3async inspect runs/NAME/quarantine`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from r3async.data.records import Trajectory
from r3async.schedule.spool import SPOOL_FORMAT
from r3async.transport.wire import Frame, WireError, encode_trajectory
from r3async.world import Files
from r3async.world.files import make_directory
from r3async.world.real import REAL_WORLD


class TaskCursor:
    """Tasks of a run, for ever. The same `seed` and `size` name the same tasks, whatever was played before.

    Without a `size`, every group has a random task seed of `bits` bits. With one (an environment that knows how many tasks
    it has), group `g` is of epoch `g // size`, and its task seed is an index `0 .. size - 1`: every epoch poses every task
    once, in an order of its own. Groups of two epochs may be played at once; nothing waits for an epoch's end.

    `quarantined`: by task seed, the first group that does not pose that task any more. Such a group poses another task, drawn
    from the run's seed and its index. It may grow, but only by groups that were never leased: what a group poses is fixed.
    """

    def __init__(
        self, seed: int, size: int | None = None, quarantined: Mapping[int, int] | None = None, *, bits: int = 63
    ):
        if size is not None and size < 1:
            raise ValueError(f"an environment with `size` = {size} has no task")
        self.seed, self.size, self._bits = seed, size, bits
        self._quarantined = {} if quarantined is None else quarantined
        # Two epochs overlap in flight, or a few if they are short.
        self._epoch_order = lru_cache(maxsize=8)(self._shuffle_epoch)

    def pick_task(self, group_index: int) -> int:
        """Raises `ValueError` if every task is quarantined."""
        task = self._task_in_order(group_index)
        if not self._is_quarantined(task, group_index):
            return task
        if self.size is not None and sum(self._is_quarantined(t, group_index) for t in self._quarantined) >= self.size:
            raise ValueError(f"all {self.size} tasks of the environment are quarantined")
        return next(t for t in self._iter_substitutes(group_index) if not self._is_quarantined(t, group_index))

    def iter_tasks(self, group_index: int) -> Iterator[int]:
        """The group's task, and then others that could be in its place, without end; none of them is quarantined."""
        yield self.pick_task(group_index)
        yield from (t for t in self._iter_substitutes(group_index) if not self._is_quarantined(t, group_index))

    def _is_quarantined(self, task: int, group_index: int) -> bool:
        return self._quarantined.get(task, group_index + 1) <= group_index

    def _iter_substitutes(self, group_index: int) -> Iterator[int]:
        """Tasks in place of one that is quarantined, without end."""
        rng = random.Random(f"{self.seed}/instead/{group_index}")
        while True:
            yield rng.getrandbits(self._bits) & ~1 if self.size is None else rng.randrange(self.size)

    def _task_in_order(self, group_index: int) -> int:
        if self.size is None:
            return training_seed(self.seed, group_index, self._bits)
        epoch, position = divmod(group_index, self.size)
        return int(self._epoch_order(epoch)[position])

    def count_epochs(self, groups: int) -> float:
        """How often all tasks were posed by the first `groups` groups; 0 without a size."""
        return groups / self.size if self.size else 0.0

    def _shuffle_epoch(self, epoch: int) -> np.ndarray:
        assert self.size is not None
        seed = random.Random(f"{self.seed}/epoch {epoch}").getrandbits(64)
        return np.random.default_rng(seed).permutation(self.size)


def training_seed(seed: int, group_index: int, bits: int = 63) -> int:
    """Seed of the task that a group plays, in `0..2^bits - 1`."""
    return random.Random(f"{seed}/{group_index}").getrandbits(bits) & ~1


def evaluation_seed(seed: int, index: int) -> int:
    """Seed of the task of an evaluation's episode `index`; `seed` is `evaluation.seed`."""
    return random.Random(f"evaluation/{seed}/{index}").getrandbits(63) | 1


RECENT_TASKS = 100
"""Tasks that the share is taken over, at least; fewer at the beginning count as `MIN_COUNTED_TASKS`."""
MIN_COUNTED_TASKS = 20

FailureSource = Literal["environment", "engine", "learner"]


class EpisodeEnd(msgspec.Struct, frozen=True):
    """An episode is over. `failed_by`: who failed, after all retries, or refused it (`learner`); None if nobody did. `error`:
    a line for the user, and below it the traceback where there is one."""

    group_index: int
    episode_index: int
    task_seed: int
    failed_by: FailureSource | None = None
    error: str = ""

    @property
    def description(self) -> str:
        return f"task seed {self.task_seed}, group {self.group_index}, {self.failed_by}: {self.error}"


class FailedTask(msgspec.Struct, frozen=True):
    """Every episode of group `group_index` failed, and not by the engine. `error`: of the last one."""

    task_seed: int
    group_index: int
    failed_by: FailureSource
    error: str


class TaskFailures:
    """Counts failed episodes by group, whichever generators play its parts, and however often one is played.

    `max_failed_fraction`: share of the last tasks that may fail, for each of environment, engine and learner. An environment
    that always fails is over it with its third task (at 0.1); one bad task among many never is. `in_flight`: groups that may
    begin between the first and the last end of one group's episodes. The last `RECENT_TASKS`, or that many, are remembered: a
    group that is forgotten while it is played would never be known to have failed whole.
    """

    def __init__(self, max_failed_fraction: float, samples_per_group: int, in_flight: int = 0):
        if not 0 <= max_failed_fraction <= 1:
            raise ValueError(f"a share of failed tasks is in 0..1, got {max_failed_fraction}")
        self.max_failed_fraction, self._samples_per_group = max_failed_fraction, samples_per_group
        self._max_recent = max(RECENT_TASKS, in_flight + 1)
        self._recent_groups: dict[int, dict[int, FailureSource]] = {}
        """By group, in the order in which their first episodes ended: who failed, by episode."""

    def record_end(self, end: EpisodeEnd) -> FailedTask | None:
        """The last word on an episode counts. Returns its task if no episode of it is left that could be trained."""
        failed = self._recent_groups.setdefault(end.group_index, {})
        if len(self._recent_groups) > self._max_recent:
            del self._recent_groups[next(iter(self._recent_groups))]
        known = failed.pop(end.episode_index, None)
        if end.failed_by is None:
            return None
        failed[end.episode_index] = end.failed_by
        if known is not None or len(failed) < self._samples_per_group or "engine" in failed.values():
            return None
        return FailedTask(end.task_seed, end.group_index, end.failed_by, end.error)

    def exceeds_limit(self, source: FailureSource) -> bool:
        return self._count_failed(source) > self._allowed_episodes

    def describe_failures(self, source: FailureSource) -> str:
        tasks = sum(source in failed.values() for failed in self._recent_groups.values())
        return (
            f"{self._count_failed(source)} episodes of {tasks} tasks, of the last {len(self._recent_groups)} tasks, failed by "
            f"the {source}; "
            f"supervise.max_failed_fraction = {self.max_failed_fraction:g} allows {int(self._allowed_episodes)} of "
            f"{self._samples_per_group} a task"
        )

    def _count_failed(self, source: FailureSource) -> int:
        return sum(who == source for failed in self._recent_groups.values() for who in failed.values())

    @property
    def _allowed_episodes(self) -> float:
        """Episodes."""
        return self.max_failed_fraction * max(len(self._recent_groups), MIN_COUNTED_TASKS) * self._samples_per_group


class TrajectoryQuarantine:
    """A directory of spool files, one a trajectory, of `max_bytes` bytes together: the oldest make way. One thread at a time.

    Each is named, with its reason, by `report_event("trajectory_quarantined", **facts)`, also where it could not be kept.
    """

    def __init__(
        self, directory: Path, max_bytes: int, report_event: Callable[..., object], *, files: Files = REAL_WORLD.files
    ):
        self.directory, self._max_bytes, self._report_event, self._files = directory, max_bytes, report_event, files

    def add_trajectory(self, trajectory: Trajectory, reason: str, frames: Sequence[Frame] | None = None) -> None:
        """`frames`: the trajectory as it came, if they are at hand. Blocks for as long as the disk does, and never raises for
        it: what is not kept is only named."""
        path, problem = None, ""
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
            (stat.modified, name, stat.size) for name in names if (stat := self._files.stat(self.directory / name))
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
