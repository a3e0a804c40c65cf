"""What a learner's ranks did since a state of theirs that is kept elsewhere: ranks that are started again from that state, and do
the same again, have the state that the lost ones had. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SNAPSHOT, HOLD = "snapshot", "hold"
"""Calls after which every rank has a copy in its own memory, until it is written."""


@dataclass(frozen=True, eq=False)
class Change:
    """A call that every rank made. `divided`: of what is `given`, each data-parallel rank gets its own; otherwise all get all."""

    name: str
    given: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    divided: bool = False

    @property
    def to_write(self) -> bool:
        """What it copied is to be written."""
        return self.name in (SNAPSHOT, HOLD)


class RedoLog:
    """A base, and the changes since, in order.

    `base`: copies of their state that the ranks made, one each; the path of a checkpoint; None for the start model. `every`:
    steps between two copies; 0 keeps nothing. The base does not move past a change whose copy is to be written: ranks that are
    started again have to copy those very weights. The copy of the state waits then, and no other is due. So there are at most
    two.
    """

    def __init__(self, every: int):
        self.every = every
        self.base: Path | tuple[Any, ...] | None = None
        self.changes: list[Change] = []
        self._copy: tuple[int, tuple[Any, ...]] | None = None
        """Of the state after so many of the changes."""

    @property
    def steps(self) -> int:
        """That ranks which are started again have to make again."""
        return sum(not change.to_write for change in self.changes)

    @property
    def due(self) -> bool:
        """The ranks are to copy their state, after the last change."""
        return bool(self.every) and self._copy is None and self.steps >= self.every

    @property
    def waits(self) -> bool:
        """There is a copy that the base cannot move to yet."""
        return self._copy is not None

    def add(self, change: Change) -> None:
        if self.every:
            self.changes.append(change)

    def restored(self, checkpoint: Path) -> None:
        """The ranks have the state of that checkpoint."""
        self.base, self._copy = checkpoint, None
        self.changes.clear()

    def copied(self, copies: Sequence[Any]) -> None:
        """Of the state after all changes so far."""
        self._copy = len(self.changes), tuple(copies)
        self._move()

    def wrote(self, name: str) -> None:
        """What the oldest change of that name copied is written, or never will be."""
        found = next((i for i, change in enumerate(self.changes) if change.name == name), None)
        if found is None:
            return
        del self.changes[found]
        if self._copy is not None and found < self._copy[0]:
            self._copy = self._copy[0] - 1, self._copy[1]
        self._move()

    def _move(self) -> None:
        if self._copy is None:
            return
        count, copies = self._copy
        if not any(change.to_write for change in self.changes[:count]):
            self.base, self._copy = copies, None
            del self.changes[:count]

    def stop(self) -> None:
        """Keep nothing any more."""
        self.every, self.base, self._copy = 0, None, None
        self.changes.clear()
