"""The order in which groups are trained: repeatedly, the oldest complete group within a window.

The window reaches from the oldest group that is not consumed, its **head**, to the group `W - 1`
leases behind it. Each choice takes the oldest complete group in it; then the window moves on with
the head. `W = 1` is strict lease order. With a larger window, a straggler may be overtaken by at
most `W - 1` younger groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence


class ConsumedGroups:
    """The groups that were consumed: all below `head`, and a few beyond it."""

    def __init__(self, window: int = 1, head: int = 0, beyond_head: Sequence[int] = ()):
        if window < 1:
            raise ValueError(
                f"schedule.window = {window} must be at least 1, which is strict lease order"
            )
        self.window = window
        self.head = head
        self.beyond_head = set(beyond_head)
        """Consumed groups above `head`; fewer than `window`."""

    def __contains__(self, group: int) -> bool:
        return group < self.head or group in self.beyond_head

    def __len__(self) -> int:
        return self.head + len(self.beyond_head)

    def after_consuming(self, groups: Iterable[int]) -> ConsumedGroups:
        """Return a copy that has consumed these groups too, in this order. Raises
        `ValueError` as `add` does."""
        future = ConsumedGroups(self.window, self.head, tuple(self.beyond_head))
        for group in groups:
            future.add(group)
        return future

    def untrained_groups(self) -> Iterator[int]:
        """Yield all groups that are not consumed, oldest first, without an end."""
        return (g for g in itertools.count(self.head) if g not in self.beyond_head)

    def groups_in_window(self) -> Iterator[int]:
        """Yield the groups in the window that are not consumed, oldest first."""
        return itertools.takewhile(lambda g: g < self.head + self.window, self.untrained_groups())

    def add(self, group: int) -> None:
        """Consume `group`. Raises `ValueError` if it was consumed before or is
        beyond the window."""
        if group in self:
            raise ValueError(f"group {group} was consumed already")
        if group >= self.head + self.window:
            raise ValueError(
                f"group {group} may not overtake group {self.head}: schedule.window = "
                f"{self.window} lets {self.window - 1} younger groups be consumed before it"
            )
        self.beyond_head.add(group)
        while self.head in self.beyond_head:
            self.beyond_head.remove(self.head)
            self.head += 1

    def add_groups(self, groups: Iterable[int]) -> None:
        """Consume all of these groups, in this order, or none: then it raises
        `ValueError` as `add` does."""
        future = self.after_consuming(groups)
        self.head = future.head
        self.beyond_head = future.beyond_head

    def trainable_groups(self, is_complete: Callable[[int], bool]) -> Iterator[int]:
        """Yield the groups that would be consumed in turn from here, until none in the
        window is complete."""
        future = self.after_consuming(())
        while (group := next(filter(is_complete, future.groups_in_window()), None)) is not None:
            future.add(group)
            yield group
