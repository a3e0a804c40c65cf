"""Which steps led to which weights: a run with its resumes, as a tree. Pure.

A start of the run is a branch. It shares the steps before its checkpoint with its parent: the very objects, so two names of the
same weights (lineage, version) are compared by what made them, and by nothing that the run says of itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Step:
    """One optimizer step. `version`: the newest when it was made; the next one is made by it, or by a later step."""

    number: int
    version: int
    groups: tuple[int, ...]
    updates: int = 1
    """Of the weights."""


class Branch:
    """The steps of one lineage, those of its past first."""

    def __init__(self, lineage: int, parent: Branch | None = None, step: int = 0, version: int = 0):
        """It begins with the first `step` steps of `parent`, whose weights it calls version `version`."""
        self.lineage, self.version = lineage, version
        self.steps: list[Step] = parent.steps[:step] if parent is not None else []
        self.trained: dict[int, int] = {group: step.number for step in self.steps for group in step.groups}
        """By group: the step that trained it."""
        self.made: dict[int, int] = {}
        """By version: how many steps made it."""
        if parent is not None:
            self.made = {v: count for v, count in parent.made.items() if v < version}
        self.made[version] = len(self.steps)
        self.head = 0
        """The oldest group that is not trained."""
        self._move()

    @property
    def since(self) -> int:
        """Steps since the newest version was made."""
        return sum(step.version == self.version for step in self.steps)

    def add(self, groups: tuple[int, ...], updates: int = 1, *, makes_version: bool) -> None:
        """One more step. Its groups are not judged here."""
        self.steps.append(Step(len(self.steps) + 1, self.version, groups, updates))
        for group in groups:
            self.trained.setdefault(group, len(self.steps))
        self._move()
        if makes_version:
            self.version += 1
            self.made[self.version] = len(self.steps)

    def _move(self) -> None:
        while self.head in self.trained:
            self.head += 1

    def behind(self, version: int) -> Sequence[Step] | None:
        """The steps that made weights `version`; None if nobody made them."""
        count = self.made.get(version)
        return None if count is None else self.steps[:count]

    def groups_in(self, version: int) -> int:
        """How many groups weights `version` were trained from."""
        return sum(len(step.groups) for step in self.behind(version) or ())


def same_weights(one: Branch, its: int, other: Branch, others: int) -> bool:
    """Whether version `its` of `one` and version `others` of `other` were made by the same steps."""
    ours, theirs = one.behind(its), other.behind(others)
    return ours is not None and theirs is not None and _same(ours, theirs) and len(ours) == len(theirs)


def leads_to(sampled_by: Branch, version: int, learner: Branch) -> bool:
    """Whether weights `version` of `sampled_by` are in the past of what `learner` has now: the steps that made them are the first
    that `learner` made."""
    steps = sampled_by.behind(version)
    return steps is not None and len(steps) <= len(learner.steps) and _same(steps, learner.steps)


def _same(ours: Sequence[Step], theirs: Sequence[Step]) -> bool:
    """As far as both go."""
    return all(a is b for a, b in zip(ours, theirs, strict=False))
