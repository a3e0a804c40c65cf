"""The tasks of groups: their order, their difficulty, the mix of environments, and how many may fail. Pure, but for
the quarantine, which writes files.

The data cursor needs no state but a group's index, and the group from which on each task is quarantined. All episodes
of a group play one task, so they fail together: the limit is on the share of tasks, not of episodes. A task of which
some episodes fail counts for their share.

Trajectories that will never be trained are kept in a quarantine, to be inspected
(`r3async inspect runs/NAME/quarantine`).
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, TypedDict

import msgspec
import numpy as np

from r3async.config.schedule import DifficultyConfig
from r3async.data.mixed import ENV_SEED_BITS, join_seed, split_seed
from r3async.data.tokens import Trajectory
from r3async.data.wire import encode_trajectory
from r3async.data.wire_frames import Frame, WireError
from r3async.transport.spool import SPOOL_FORMAT
from r3async.world import EventReporter, Files
from r3async.world.files import make_directory
from r3async.world.real import REAL_WORLD


class TaskCursor:
    """The endless sequence of a run's tasks.

    The same `seed` and `size` give the same tasks, whatever was played before.

    Without a `size`, every group has a random task seed of `bits` bits. With one (an environment that knows how many
    tasks it has), group `g` belongs to epoch `g // size`, and its task seed is an index `0 .. size - 1`: every epoch
    poses every task once, in its own order. Groups of two epochs may be played at once; none waits for an epoch's end.

    `quarantined` maps a task seed to the first group that no longer poses that task. Such a group poses another task,
    drawn from the run's seed and the group's index. The mapping may grow, but only by groups that were never leased:
    the task of a leased group is fixed.
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
        """Return the task of a group. Raises `ValueError` if every task is quarantined."""
        task = self._task_in_order(group_index)
        if not self._is_quarantined(task, group_index):
            return task
        if self.size is not None and sum(self._is_quarantined(t, group_index) for t in self._quarantined) >= self.size:
            raise ValueError(f"all {self.size} tasks of the environment are quarantined")
        return next(t for t in self._iter_substitutes(group_index) if not self._is_quarantined(t, group_index))

    def iter_tasks(self, group_index: int) -> Iterator[int]:
        """Yield the group's task, and then others that could replace it, without end; none of them is quarantined."""
        yield self.pick_task(group_index)
        yield from (t for t in self._iter_substitutes(group_index) if not self._is_quarantined(t, group_index))

    def _is_quarantined(self, task: int, group_index: int) -> bool:
        return self._quarantined.get(task, group_index + 1) <= group_index

    def _iter_substitutes(self, group_index: int) -> Iterator[int]:
        """Yield tasks in place of one that is quarantined, without end."""
        rng = random.Random(f"{self.seed}/instead/{group_index}")
        while True:
            yield rng.getrandbits(self._bits) & ~1 if self.size is None else rng.randrange(self.size)

    def _task_in_order(self, group_index: int) -> int:
        if self.size is None:
            return training_seed(self.seed, group_index, self._bits)
        epoch, position = divmod(group_index, self.size)
        return int(self._epoch_order(epoch)[position])

    def count_epochs(self, groups: int) -> float:
        """Return how often the first `groups` groups posed all tasks; 0 without a size."""
        return groups / self.size if self.size else 0.0

    def _shuffle_epoch(self, epoch: int) -> np.ndarray:
        assert self.size is not None
        seed = random.Random(f"{self.seed}/epoch {epoch}").getrandbits(64)
        return np.random.default_rng(seed).permutation(self.size)


def training_seed(seed: int, group_index: int, bits: int = 63) -> int:
    """Return the seed of the task that a group plays, in `0..2^bits - 1`."""
    return random.Random(f"{seed}/{group_index}").getrandbits(bits) & ~1


def evaluation_seed(seed: int, index: int) -> int:
    """Return the seed of the task of an evaluation's episode `index`; `seed` is `evaluation.seed`."""
    return random.Random(f"evaluation/{seed}/{index}").getrandbits(63) | 1


RECENT_TASKS = 100
"""Minimum number of tasks over which the share is taken; fewer, at the beginning, count as `MIN_COUNTED_TASKS`."""
MIN_COUNTED_TASKS = 20

FailureSource = Literal["environment", "engine", "learner"]


class EpisodeEnd(msgspec.Struct, frozen=True):
    """The end of an episode.

    Attributes:
        failed_by: Source of the failure after all retries, or `learner` if the learner refused the episode; None if the
            episode did not fail.
        error: One line for the user, and below it the traceback where there is one.
    """

    group_index: int
    episode_index: int
    task_seed: int
    failed_by: FailureSource | None = None
    error: str = ""

    @property
    def description(self) -> str:
        return f"task seed {self.task_seed}, group {self.group_index}, {self.failed_by}: {self.error}"


class FailedTask(msgspec.Struct, frozen=True):
    """A task of which every episode of group `group_index` failed, and not by the engine. `error` is the last one's."""

    task_seed: int
    group_index: int
    failed_by: FailureSource
    error: str


class TaskFailures:
    """Counter of failed episodes by group, whichever generators play its parts, and however often one is played.

    An environment that always fails exceeds the limit with its third task (at 0.1); one bad task among many never does.

    Args:
        max_failed_fraction: Share of the last tasks that may fail, for each of environment, engine and learner.
        in_flight: Number of groups that may begin between the first and the last end of one group's episodes. The last
            `RECENT_TASKS` groups are remembered, or that many if they are more: a group that is forgotten while it is
            played would never be known to have failed as a whole.
    """

    def __init__(self, max_failed_fraction: float, group_size: int, in_flight: int = 0):
        if not 0 <= max_failed_fraction <= 1:
            raise ValueError(f"a share of failed tasks is in 0..1, got {max_failed_fraction}")
        self.max_failed_fraction, self._group_size = max_failed_fraction, group_size
        self._max_recent = max(RECENT_TASKS, in_flight + 1)
        self._recent_groups: dict[int, dict[int, FailureSource]] = {}
        """Source of the failure of each episode, by group, in the order in which the groups' first episodes ended."""

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
            f"{self._count_failed(source)} episodes of {tasks} tasks, of the last {len(self._recent_groups)} tasks, failed by "
            f"the {source}; "
            f"supervise.max_failed_fraction = {self.max_failed_fraction:g} allows {int(self._allowed_episodes)} of "
            f"{self._group_size} a task"
        )

    def _count_failed(self, source: FailureSource) -> int:
        return sum(who == source for failed in self._recent_groups.values() for who in failed.values())

    @property
    def _allowed_episodes(self) -> float:
        """The number of episodes that may fail."""
        return self.max_failed_fraction * max(len(self._recent_groups), MIN_COUNTED_TASKS) * self._group_size


class TrajectoryQuarantine:
    """A directory of spool files, one for each trajectory.

    They take at most `max_bytes` bytes together: the oldest are removed. Each trajectory is reported, with its reason,
    by `report_event("trajectory_quarantined", **facts)`, even if it could not be stored. One thread at a time.
    """

    def __init__(
        self, directory: Path, max_bytes: int, report_event: EventReporter, *, files: Files = REAL_WORLD.files
    ):
        self.directory, self._max_bytes, self._report_event, self._files = directory, max_bytes, report_event, files

    def add_trajectory(self, trajectory: Trajectory, reason: str, frames: Sequence[Frame] | None = None) -> None:
        """Store a trajectory and report it. `frames` are the trajectory as it arrived, if they are at hand.

        Blocks for as long as the disk does, and never raises for it: a trajectory that is not stored is only reported.
        """
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


# Difficulty filter and curriculum: they choose the task of a group by past scores of the tasks. Pure.
#
# A task that is always solved, or never, teaches nothing: its advantages are 0. Such a settled task is posed rarely,
# and with a curriculum, tasks that are solved about as often as `target` come first.
#
# The task of a group depends on what was trained when the group was first leased, and not on its index alone. So it is
# decided once, and kept until the group is trained: an owner that is leased a part of the group or plays it again, and
# a run that resumes, have the same task.


MAX_CANDIDATES = 64
"""Maximum number of tasks looked at for one group. If nearly all are settled, one of them is posed all the same."""

NO_SIZE_MESSAGE = (
    "`schedule.difficulty` needs tasks that come again, and this environment does not know how many it has (`size`): unset "
    "`settled_share` and `target`, or train rows (data=FILE)"
)
"""Message for a run that chooses tasks by past rewards, but never poses a task again."""

TaskScore = tuple[int, float]
"""A task seed, and the mean reward of one of its groups."""


def score_groups(groups: Iterable[Sequence[Trajectory]]) -> list[TaskScore]:
    """Return the score of each group that was played. Failed episodes, which have no turns, do not count."""
    played = ([t for t in group if t.turns] for group in groups)
    return [(members[0].task_seed, fmean(t.reward for t in members)) for members in played if members]


class _TaskHistoryState(TypedDict):
    """The state that `TaskHistory.state_dict` returns."""

    scores: list[tuple[int, list[float]]]
    posed: list[tuple[int, int]]
    replaced: int


class TaskHistory:
    """The only record of the scores of each task. `seed` is the run's.

    Without an active setting it records nothing, and every task has its turn.
    """

    def __init__(self, settings: DifficultyConfig, seed: int):
        self._settings, self._seed = settings, seed
        self._scores: dict[int, list[float]] = {}
        """Mean rewards of each task's last groups, oldest first."""
        self._task_by_group: dict[int, int] = {}
        """Task of each group that was leased and is not trained."""
        self._settled_counts: Counter[str] = Counter()
        """Number of tasks that are `easy`, and `hard`."""
        self._replaced_count = 0

    def choose_task(self, group: int, candidates: Iterator[int]) -> int:
        """Return the task of a group. `candidates` yields the task whose turn it is, and then others, without end."""
        turn = next(candidates)
        if not self._settings.is_active:
            return turn
        if group not in self._task_by_group:
            self._task_by_group[group] = self._draw_task(group, chain([turn], candidates))
            self._replaced_count += self._task_by_group[group] != turn
        return self._task_by_group[group]

    def _draw_task(self, group: int, tasks: Iterator[int]) -> int:
        settings, rng = self._settings, random.Random(f"{self._seed}/difficulty/{group}")
        looked_at: list[int] = []

        def wanted() -> Iterator[int]:
            for task in islice(tasks, MAX_CANDIDATES):
                looked_at.append(task)
                if not self._classify_task(task) or rng.random() < settings.settled_share:
                    yield task

        found = list(islice(wanted(), 1 if settings.target is None else settings.among))
        return min(found, key=self._distance_to_target) if found else looked_at[0]

    def _distance_to_target(self, task: int) -> float:
        """Return the distance of a task from the target; 0 for a task without past groups.

        Of two tasks that are equally near, the first is posed.
        """
        past, target = self._scores.get(task), self._settings.target
        return abs(fmean(past) - target) if past and target is not None else 0.0

    def _classify_task(self, task: int) -> Literal["easy", "hard", ""]:
        past, settings = self._scores.get(task, []), self._settings
        if len(past) < settings.groups:
            return ""
        return "easy" if min(past) >= settings.easy else "hard" if max(past) <= settings.hard else ""

    def record_scores(self, groups: Iterable[int], scores: Iterable[TaskScore]) -> None:
        """Record that a step consumed these groups, and the scores of their tasks, in this order."""
        for group in groups:
            self._task_by_group.pop(group, None)
        if self._settings.is_active:
            for task, score in scores:
                self._add_scores(task, [score])

    def _add_scores(self, task: int, scores: Sequence[float]) -> None:
        self._settled_counts[self._classify_task(task)] -= 1
        self._scores[task] = [*self._scores.get(task, ()), *scores][-self._settings.groups :]
        self._settled_counts[self._classify_task(task)] += 1

    def collect_metrics(self) -> dict[str, float]:
        """Return the metrics; none while no setting is active."""
        if not self._settings.is_active:
            return {}
        return {
            "data/easy_tasks": float(self._settled_counts["easy"]),
            "data/hard_tasks": float(self._settled_counts["hard"]),
            "data/replaced_tasks": float(self._replaced_count),
        }

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data for `load_state_dict`."""
        if not self._settings.is_active:
            return {}
        return {
            "scores": [[task, list(past)] for task, past in self._scores.items()],
            "posed": list(self._task_by_group.items()),
            "replaced": self._replaced_count,
        }

    def load_state_dict(self, state: Mapping[str, Any], buffered_tasks: Mapping[int, int]) -> None:
        """Restore the state of a snapshot. Raises `msgspec.ValidationError` if it is none.

        Args:
            state: Snapshot from `state_dict`; `{}` is that of a run without an active setting.
            buffered_tasks: Tasks of the groups of which the learner kept episodes. After the checkpoint, these groups
                may have been leased with other tasks than would be chosen now.
        """
        if state:
            saved = msgspec.convert(state, _TaskHistoryState)
            self._scores, self._settled_counts, self._replaced_count = {}, Counter(), saved["replaced"]
            for task, past in saved["scores"]:
                self._add_scores(task, past)
            self._task_by_group = dict(saved["posed"])
        if self._settings.is_active:
            self._task_by_group |= buffered_tasks


# The mix of several environments: it chooses the one that poses the task of a group. Pure: the choice depends only on
# the group's index, so a run that resumes continues with the same tasks.
#
# The order is the smoothest possible: in any stretch of groups, each environment has its share of them, up to one or
# two groups. So every step trains all environments, as far as it has enough groups.


MAX_PERIOD = 1000
"""Number of groups after which the order repeats: weights are rounded to that. It is larger if a weight is below 1/1000."""


class EnvironmentOrder:
    """The order of environments over groups, by weights. Immutable."""

    def __init__(self, weights: Sequence[float]):
        quotas = _round_quotas(weights)
        self.period = sum(quotas)
        chosen = np.zeros(self.period, np.int64)
        counts = [0] * len(quotas)
        for at in range(self.period):
            # The environment that is furthest behind its share.
            entry = max(range(len(quotas)), key=lambda e: (quotas[e] * (at + 1) - self.period * counts[e], -e))
            chosen[at] = entry
            counts[entry] += 1
        self._chosen = chosen
        # [entry, at]: groups of the period before `at` that belong to the entry; the last column is the quota.
        self._before = np.stack([np.append(0, np.cumsum(chosen == e)) for e in range(len(quotas))])

    def environment_of(self, group: int) -> int:
        """Return the number of the environment that poses the task of a group."""
        return int(self._chosen[group % self.period])

    def count_before(self, entry: int, group: int) -> int:
        """Return how many groups before `group` belong to environment number `entry`."""
        periods, at = divmod(group, self.period)
        return int(periods * self._before[entry, -1] + self._before[entry, at])


def _round_quotas(weights: Sequence[float]) -> list[int]:
    """Return how many groups of a period each environment has: at least one; the largest remainders are rounded up."""
    total = sum(weights)
    exact = [MAX_PERIOD * weight / total for weight in weights]
    quotas = [max(1, math.floor(share)) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda e: (math.floor(exact[e]) - exact[e], e))
    for entry in by_remainder[: max(0, MAX_PERIOD - sum(quotas))]:
        quotas[entry] += 1
    common = math.gcd(*quotas)
    return [quota // common for quota in quotas]


class _EnvironmentQuarantine(Mapping[int, int]):
    """A view of the quarantined tasks of one environment, among those of all.

    It maps the environment's own seed of a task to the first of its own groups that no longer poses the task.
    """

    def __init__(self, environment: int, order: EnvironmentOrder, entries: int, quarantined: Mapping[int, int]):
        self._entry, self._order, self._entries, self._all = environment, order, entries, quarantined

    def __getitem__(self, seed: int) -> int:
        return self._order.count_before(self._entry, self._all[join_seed(self._entry, seed)])

    def __iter__(self) -> Iterator[int]:
        parts = (split_seed(task, self._entries) for task in self._all)
        return (seed for entry, seed in parts if entry == self._entry)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class MixedTaskCursor:
    """A `TaskCursor` over several environments with these `weights` and `sizes`.

    Each environment has its own tasks, epochs and quarantined tasks, in the order of its own groups.
    """

    def __init__(
        self,
        seed: int,
        weights: Sequence[float],
        sizes: Sequence[int | None],
        quarantined: Mapping[int, int] | None = None,
    ):
        self._order, known = EnvironmentOrder(weights), {} if quarantined is None else quarantined
        self._cursors = [
            TaskCursor(
                random.Random(f"{seed}/environment {entry}").getrandbits(63),
                size,
                _EnvironmentQuarantine(entry, self._order, len(weights), known),
                bits=ENV_SEED_BITS,
            )
            for entry, size in enumerate(sizes)
        ]

    def pick_task(self, group_index: int) -> int:
        """Return the task of a group. Raises `ValueError` if every task of the group's environment is quarantined."""
        entry = self._order.environment_of(group_index)
        return join_seed(entry, self._cursors[entry].pick_task(self._order.count_before(entry, group_index)))

    def iter_tasks(self, group_index: int) -> Iterator[int]:
        """Return the tasks of `TaskCursor.iter_tasks` for the group's environment."""
        entry = self._order.environment_of(group_index)
        own = self._cursors[entry].iter_tasks(self._order.count_before(entry, group_index))
        return (join_seed(entry, task) for task in own)

    def count_epochs(self, groups: int) -> list[float]:
        """Return, by environment, how often the first `groups` groups posed all its tasks; 0 without a size."""
        return [
            cursor.count_epochs(self._order.count_before(entry, groups)) for entry, cursor in enumerate(self._cursors)
        ]
