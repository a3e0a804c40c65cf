"""The log of what a learner's ranks did since a state that is kept elsewhere.

Ranks that are started again from that state, and do the same again, have the state that the lost
ones had. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from r3async.actors.rank_actor import LocalRank

R = TypeVar("R")


COPYING_METHODS = LocalRank.snapshot_weights, LocalRank.stage_checkpoint
"""Methods after which every rank has a copy in its own memory, until it is written."""


@dataclass(frozen=True, eq=False)
class RankCall(Generic[R]):
    """A call of a method of `LocalRank` that every rank made. If it `is_divided`, each
    data-parallel rank gets its own item of `args`; otherwise all ranks get all of them."""

    method: Callable[..., R]
    args: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    is_divided: bool = False

    @property
    def needs_write(self) -> bool:
        """True if the call makes a copy that has to be written."""
        return self.method in COPYING_METHODS


class RecoveryLog:
    """A base state, and the changes since, in order.

    The base does not move past a change whose copy has yet to be written, because ranks that are
    started again have to copy exactly those weights. The copy of the state waits then, and no other
    copy is due. So there are at most two.

    Attributes:
        base: Copies of their state that the ranks made, one each; the path of a checkpoint; or None
            for the start model.
        copy_steps: Steps between two copies; 0 keeps nothing.
        calls: Changes since the base.
    """

    def __init__(self, copy_steps: int):
        self.copy_steps = copy_steps
        self.base: Path | tuple[Any, ...] | None = None
        self.calls: list[RankCall[Any]] = []
        self._pending_copy: tuple[int, tuple[Any, ...] | None] | None = None
        """Number of changes after which a copy of the state was made, and that copy, while the base
        cannot move to it; None as long as it is not here."""

    @property
    def repeated_steps(self) -> int:
        """The number of steps that ranks which are started again have to repeat."""
        return sum(not change.needs_write for change in self.calls)

    @property
    def is_copy_due(self) -> bool:
        """True if the ranks should copy their state now, after the last change."""
        return (
            bool(self.copy_steps)
            and self._pending_copy is None
            and self.repeated_steps >= self.copy_steps
        )

    @property
    def has_pending_copy(self) -> bool:
        """True if there is a copy that the base cannot move to yet."""
        return self._pending_copy is not None

    def add(self, change: RankCall[Any]) -> None:
        if self.copy_steps:
            self.calls.append(change)

    def set_checkpoint(self, checkpoint: Path) -> None:
        """Begin the log anew: the ranks have the state of a checkpoint."""
        self.base = checkpoint
        self._pending_copy = None
        self.calls.clear()

    def begin_copy(self) -> None:
        """Expect copies of the state after all changes so far."""
        self._pending_copy = len(self.calls), None

    def set_copies(self, copies: Sequence[Any]) -> None:
        """Add the copies that were expected, and move the base to them as soon as
        that is possible."""
        if self._pending_copy is not None:
            self._pending_copy = self._pending_copy[0], tuple(copies)
            self._advance_base()

    def give_up_copy(self) -> None:
        """Expect no copies any more, unless they are here."""
        if self._pending_copy is not None and self._pending_copy[1] is None:
            self._pending_copy = None

    def mark_written(self, method: Callable[..., object], *, before_copy: bool = False) -> None:
        """Remove the oldest call of a method that copies: its copy is written, or never will be.
        With `before_copy`, only if the pending copy of the state came after it."""
        index = next((i for i, call in enumerate(self.calls) if call.method == method), None)
        if index is None or (
            before_copy and (self._pending_copy is None or index >= self._pending_copy[0])
        ):
            return
        del self.calls[index]
        if self._pending_copy is not None and index < self._pending_copy[0]:
            self._pending_copy = self._pending_copy[0] - 1, self._pending_copy[1]
        self._advance_base()

    def _advance_base(self) -> None:
        if self._pending_copy is None:
            return
        count, copies = self._pending_copy
        if copies is not None and not any(change.needs_write for change in self.calls[:count]):
            self.base = copies
            self._pending_copy = None
            del self.calls[:count]

    def disable(self) -> None:
        """Forget everything, and keep nothing from now on."""
        self.copy_steps = 0
        self.base = None
        self._pending_copy = None
        self.calls.clear()
