"""How much of a run's tasks may fail before it stops, and which task is posed no more. Pure.

All episodes of a group play one task, so they fail together: what is judged is the share of tasks, not of episodes. A task
of which some episodes fail counts for their share.
"""

from __future__ import annotations

from typing import Literal

import msgspec

RECENT = 100
"""Tasks that the share is taken over, at least; fewer at the beginning count as `FEWEST`."""
FEWEST = 20

By = Literal["environment", "engine", "learner"]


class EpisodeEnd(msgspec.Struct, frozen=True):
    """An episode is over. `failed_by`: who failed, after all retries, or refused it (`learner`); None if nobody did. `error`:
    for the user, with a traceback where there is one."""

    group_index: int
    episode_index: int
    task_seed: int
    failed_by: By | None = None
    error: str = ""


class FailedTask(msgspec.Struct, frozen=True):
    """Every episode of group `group_index` failed, and not by the engine. `error`: of the last one."""

    task_seed: int
    group_index: int
    failed_by: By
    error: str


class TaskFailures:
    """Counts failed episodes by group, whichever generators play its parts, and however often one is played.

    `limit`: share of the last tasks that may fail, for each of environment, engine and learner. An environment that always
    fails is over it with its third task (at 0.1); one bad task among many never is. `in_flight`: groups that may begin between
    the first and the last end of one group's episodes. The last `RECENT`, or that many, are remembered: a group that is forgotten
    while it is played would never be known to have failed whole.
    """

    def __init__(self, limit: float, samples_per_group: int, in_flight: int = 0):
        if not 0 <= limit <= 1:
            raise ValueError(f"a share of failed tasks is in 0..1, got {limit}")
        self.limit, self._samples = limit, samples_per_group
        self._remembered = max(RECENT, in_flight + 1)
        self._recent: dict[int, dict[int, By]] = {}
        """By group, in the order in which their first episodes ended: who failed, by episode."""

    def ended(self, end: EpisodeEnd) -> FailedTask | None:
        """The last word on an episode counts. Returns its task if no episode of it is left that could be trained."""
        failed = self._recent.setdefault(end.group_index, {})
        if len(self._recent) > self._remembered:
            del self._recent[next(iter(self._recent))]
        known = failed.pop(end.episode_index, None)
        if end.failed_by is None:
            return None
        failed[end.episode_index] = end.failed_by
        if known is not None or len(failed) < self._samples or "engine" in failed.values():
            return None
        return FailedTask(end.task_seed, end.group_index, end.failed_by, end.error)

    def too_many(self, by: By) -> bool:
        return self._count(by) > self._allowed

    def describe(self, by: By) -> str:
        tasks = sum(by in failed.values() for failed in self._recent.values())
        return (
            f"{self._count(by)} episodes of {tasks} tasks, of the last {len(self._recent)} tasks, failed by the {by}; "
            f"supervise.max_failed_fraction = {self.limit:g} allows {int(self._allowed)} of {self._samples} a task"
        )

    def _count(self, by: By) -> int:
        return sum(who == by for failed in self._recent.values() for who in failed.values())

    @property
    def _allowed(self) -> float:
        """Episodes."""
        return self.limit * max(len(self._recent), FEWEST) * self._samples
