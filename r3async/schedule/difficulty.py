"""Difficulty filter and curriculum, which choose a group's task by past scores. Pure.

A task that is always solved, or never, teaches nothing: its advantages are 0. Such a settled task
is posed rarely, and with a curriculum, tasks that are solved about as often as `target` come first.

The task of a group depends on what was trained when the group was first leased, and not on its
index alone. So it is decided once, and kept until the group is trained: an owner that is leased a
part of the group or plays it again, and a run that resumes, have the same task.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from statistics import fmean
from typing import Any, Literal, TypedDict

import msgspec

from r3async.config.schedule import DifficultyConfig
from r3async.data.tokens import Trajectory

MAX_CANDIDATES = 64
"""Maximum number of tasks looked at for one group. If nearly all are settled, one of them is
posed all the same."""
CURRICULUM_TASKS = 4
"""Number of tasks that the curriculum (`schedule.difficulty.target`) chooses from."""

NO_SIZE_MESSAGE = (
    "`schedule.difficulty` needs tasks that come again, and this environment does not know how "
    "many it has (`size`): unset `settled_share` and `target`, or train rows (data=FILE)"
)
"""Message for a run that chooses tasks by past rewards, but never poses a task again."""

TaskScore = tuple[int, float]
"""A task seed, and the mean reward of one of its groups."""


def score_groups(groups: Iterable[Sequence[Trajectory]]) -> list[TaskScore]:
    """Return the score of each group that was played. Failed episodes, which have no
    turns, do not count."""
    played = ([t for t in group if t.turns] for group in groups)
    return [
        (members[0].task_seed, fmean(t.reward for t in members)) for members in played if members
    ]


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
        self._settings = settings
        self._seed = seed
        self._scores: dict[int, list[float]] = {}
        """Mean rewards of each task's last groups, oldest first."""
        self._task_by_group: dict[int, int] = {}
        """Task of each group that was leased and is not trained."""
        self._settled_counts: Counter[str] = Counter()
        """Number of tasks that are `easy`, and `hard`."""
        self._replaced_count = 0

    def choose_task(self, group: int, candidates: Iterator[int]) -> int:
        """Return the task of a group. `candidates` yields the task whose turn it is, and then
        others, without end."""
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

        found = list(islice(wanted(), 1 if settings.target is None else CURRICULUM_TASKS))
        return min(found, key=self._distance_to_target) if found else looked_at[0]

    def _distance_to_target(self, task: int) -> float:
        """Return the distance of a task from the target; 0 for a task without past groups.

        Of two tasks that are equally near, the first is posed.
        """
        past = self._scores.get(task)
        target = self._settings.target
        return abs(fmean(past) - target) if past and target is not None else 0.0

    def _classify_task(self, task: int) -> Literal["easy", "hard", ""]:
        past = self._scores.get(task, [])
        settings = self._settings
        if len(past) < settings.groups:
            return ""
        return (
            "easy" if min(past) >= settings.easy else "hard" if max(past) <= settings.hard else ""
        )

    def record_scores(self, groups: Iterable[int], scores: Iterable[TaskScore]) -> None:
        """Record that a step consumed these groups, and the scores of their
        tasks, in this order."""
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

    # -- checkpoints -------------------------------------------------------------------------------

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
            buffered_tasks: Tasks of the groups of which the learner kept episodes. After
                the checkpoint, these groups may have been leased with other tasks than
                would be chosen now.
        """
        if state:
            saved = msgspec.convert(state, _TaskHistoryState)
            self._scores = {}
            self._settled_counts = Counter()
            self._replaced_count = saved["replaced"]
            for task, past in saved["scores"]:
                self._add_scores(task, past)
            self._task_by_group = dict(saved["posed"])
        if self._settings.is_active:
            self._task_by_group |= buffered_tasks
