"""What a learner's ranks did since a state of theirs that is kept elsewhere: ranks that are started again from that state, and do
the same again, have the state that the lost ones had. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SNAPSHOT_CALL, STAGE_CALL = "snapshot_weights", "stage_checkpoint"
"""Calls after which every rank has a copy in its own memory, until it is written."""


@dataclass(frozen=True, eq=False)
class RankCall:
    """A call that every rank made. `is_divided`: of what is `args`, each data-parallel rank gets its own; otherwise all get
    all."""

    name: str
    args: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    is_divided: bool = False

    @property
    def needs_write(self) -> bool:
        """What it copied is to be written."""
        return self.name in (SNAPSHOT_CALL, STAGE_CALL)


class RecoveryLog:
    """A base, and the changes since, in order.

    `base`: copies of their state that the ranks made, one each; the path of a checkpoint; None for the start model. `copy_steps`:
    steps between two copies; 0 keeps nothing. The base does not move past a change whose copy is to be written: ranks that are
    started again have to copy those very weights. The copy of the state waits then, and no other is due. So there are at most
    two.
    """

    def __init__(self, copy_steps: int):
        self.copy_steps = copy_steps
        self.base: Path | tuple[Any, ...] | None = None
        self.calls: list[RankCall] = []
        self._pending_copy: tuple[int, tuple[Any, ...]] | None = None
        """Of the state after so many of the changes."""

    @property
    def repeated_steps(self) -> int:
        """That ranks which are started again have to make again."""
        return sum(not change.needs_write for change in self.calls)

    @property
    def is_copy_due(self) -> bool:
        """The ranks are to copy their state, after the last change."""
        return bool(self.copy_steps) and self._pending_copy is None and self.repeated_steps >= self.copy_steps

    @property
    def has_pending_copy(self) -> bool:
        """There is a copy that the base cannot move to yet."""
        return self._pending_copy is not None

    def add(self, change: RankCall) -> None:
        if self.copy_steps:
            self.calls.append(change)

    def set_checkpoint(self, checkpoint: Path) -> None:
        """The ranks have the state of that checkpoint."""
        self.base, self._pending_copy = checkpoint, None
        self.calls.clear()

    def set_copies(self, copies: Sequence[Any]) -> None:
        """Of the state after all changes so far."""
        self._pending_copy = len(self.calls), tuple(copies)
        self._advance_base()

    def mark_written(self, name: str) -> None:
        """What the oldest change of that name copied is written, or never will be."""
        found = next((i for i, change in enumerate(self.calls) if change.name == name), None)
        if found is None:
            return
        del self.calls[found]
        if self._pending_copy is not None and found < self._pending_copy[0]:
            self._pending_copy = self._pending_copy[0] - 1, self._pending_copy[1]
        self._advance_base()

    def _advance_base(self) -> None:
        if self._pending_copy is None:
            return
        count, copies = self._pending_copy
        if not any(change.needs_write for change in self.calls[:count]):
            self.base, self._pending_copy = copies, None
            del self.calls[:count]

    def disable(self) -> None:
        """Keep nothing any more."""
        self.copy_steps, self.base, self._pending_copy = 0, None, None
        self.calls.clear()
