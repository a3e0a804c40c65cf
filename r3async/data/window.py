"""Which groups are trained next: the oldest complete one within a window, repeatedly.

The window reaches from the oldest group that is not consumed, its **head**, to the group `W - 1` leases behind it. Each
choice takes the oldest complete group in it; then the window moves on with the head. `W = 1` is strict lease order. With a
larger one a straggler may be overtaken, by `W - 1` younger groups at most.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence


class Consumed:
    """The groups that were consumed: all below `head`, and a few beyond it."""

    def __init__(self, window: int = 1, head: int = 0, beyond: Sequence[int] = ()):
        if window < 1:
            raise ValueError(f"schedule.window = {window} must be at least 1, which is strict lease order")
        self.window, self.head = window, head
        self.beyond = set(beyond)
        """Consumed groups above `head`; fewer than `window`."""

    def __contains__(self, group: int) -> bool:
        return group < self.head or group in self.beyond

    def __len__(self) -> int:
        return self.head + len(self.beyond)

    def after(self, groups: Iterable[int]) -> Consumed:
        """What is consumed when these are too, in this order. Raises `ValueError` as `add` does."""
        future = Consumed(self.window, self.head, tuple(self.beyond))
        for group in groups:
            future.add(group)
        return future

    def outstanding(self) -> Iterator[int]:
        """All groups that are not consumed, oldest first, without an end."""
        return (g for g in itertools.count(self.head) if g not in self.beyond)

    def within(self) -> Iterator[int]:
        """Those of them that are in the window."""
        return itertools.takewhile(lambda g: g < self.head + self.window, self.outstanding())

    def add(self, group: int) -> None:
        """Consume `group`. Raises `ValueError` if it was consumed before or is beyond the window."""
        if group in self:
            raise ValueError(f"group {group} was consumed already")
        if group >= self.head + self.window:
            raise ValueError(
                f"group {group} may not overtake group {self.head}: schedule.window = {self.window} lets "
                f"{self.window - 1} younger groups be consumed before it"
            )
        self.beyond.add(group)
        while self.head in self.beyond:
            self.beyond.remove(self.head)
            self.head += 1

    def take(self, groups: Iterable[int]) -> None:
        """Consume all of them, in this order, or, where `add` raises `ValueError`, none."""
        future = self.after(groups)
        self.head, self.beyond = future.head, future.beyond

    def choices(self, complete: Callable[[int], bool]) -> Iterator[int]:
        """The groups that would be consumed one after the other from here, until none in the window is complete."""
        future = self.after(())
        while (group := next(filter(complete, future.within()), None)) is not None:
            future.add(group)
            yield group
