"""Which task a group poses, by what the groups of each task scored before: difficulty filter and curriculum. Pure.

A task that is always solved, or never, teaches nothing: its advantages are 0. So one that is settled is posed rarely, and with a
curriculum tasks that are solved about as often as `target` come first.

What a group poses depends on what was trained when it was first leased, and not on its index alone. So it is decided once, and
kept until the group is trained: whoever is leased a part of it, plays it again, or resumes the run plays the same task.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from statistics import fmean
from typing import Any, Literal, TypedDict

import msgspec

from r3async.config.difficulty import DifficultyConfig
from r3async.data.records import Trajectory

MAX_CANDIDATES = 64
"""Tasks that are looked at for one group: where nearly all are settled, one of them is posed all the same."""

NO_SIZE_MESSAGE = (
    "`schedule.difficulty` needs tasks that come again, and this environment does not know how many it has (`size`): unset "
    "`settled_share` and `target`, or train rows (data=FILE)"
)
"""Where past rewards are to choose tasks, and none is ever posed again."""

TaskScore = tuple[int, float]
"""A task seed, and the mean reward of one of its groups."""


def score_groups(groups: Iterable[Sequence[Trajectory]]) -> list[TaskScore]:
    """Of each group that was played: failed episodes have no turns, and count for nothing."""
    played = ([t for t in group if t.turns] for group in groups)
    return [(members[0].task_seed, fmean(t.reward for t in members)) for members in played if members]


class _TaskHistoryState(TypedDict):
    """What `TaskHistory.state_dict` gives."""

    scores: list[tuple[int, list[float]]]
    posed: list[tuple[int, int]]
    replaced: int


class TaskHistory:
    """The one holder of what each task scored. `seed`: of the run. Without an active setting it holds nothing, and every task has
    its turn."""

    def __init__(self, settings: DifficultyConfig, seed: int):
        self._settings, self._seed = settings, seed
        self._scores: dict[int, list[float]] = {}
        """By task: mean rewards of its last groups, oldest first."""
        self._task_by_group: dict[int, int] = {}
        """By group that was leased and is not trained: its task."""
        self._settled_counts: Counter[str] = Counter()
        """How many tasks are `easy`, and `hard`."""
        self._replaced_count = 0

    def choose_task(self, group: int, candidates: Iterator[int]) -> int:
        """The task of a group. `candidates`: that whose turn it is, and then others, without end."""
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
        """From the target; 0 for a task without past groups. Of two that are equally near, the first is posed."""
        past, target = self._scores.get(task), self._settings.target
        return abs(fmean(past) - target) if past and target is not None else 0.0

    def _classify_task(self, task: int) -> Literal["easy", "hard", ""]:
        past, settings = self._scores.get(task, []), self._settings
        if len(past) < settings.groups:
            return ""
        return "easy" if min(past) >= settings.easy else "hard" if max(past) <= settings.hard else ""

    def record_scores(self, groups: Iterable[int], scores: Iterable[TaskScore]) -> None:
        """A step consumed these groups; their tasks scored this, in this order."""
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
        """Metrics; none while no setting is active."""
        if not self._settings.is_active:
            return {}
        return {
            "data/easy_tasks": float(self._settled_counts["easy"]),
            "data/hard_tasks": float(self._settled_counts["hard"]),
            "data/replaced_tasks": float(self._replaced_count),
        }

    # -- for a checkpoint ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain data; `load_state_dict` reads it."""
        if not self._settings.is_active:
            return {}
        return {
            "scores": [[task, list(past)] for task, past in self._scores.items()],
            "posed": list(self._task_by_group.items()),
            "replaced": self._replaced_count,
        }

    def load_state_dict(self, state: Mapping[str, Any], buffered_tasks: Mapping[int, int]) -> None:
        """Resume as the one that made the snapshot; `{}` is of a run without. `buffered_tasks`: tasks, by group, of which the
        learner kept
        episodes: after the checkpoint these groups may have been leased with other tasks than would be chosen now. Raises
        `msgspec.ValidationError` if it is none."""
        if state:
            saved = msgspec.convert(state, _TaskHistoryState)
            self._scores, self._settled_counts, self._replaced_count = {}, Counter(), saved["replaced"]
            for task, past in saved["scores"]:
                self._add_scores(task, past)
            self._task_by_group = dict(saved["posed"])
        if self._settings.is_active:
            self._task_by_group |= buffered_tasks
