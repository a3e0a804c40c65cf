"""Policy versions: which weights a number means, which version sampled which token, and which groups were consumed. Pure.

Versions are counted, and a resume takes steps back: the numbers after its checkpoint are used again, for other weights. So each
start of a run is a **lineage** with a number of its own, and weights are named by (lineage, version). A lineage begins with the
weights of its parent's checkpoint, under the number that they had there: that version has two names, and tokens that the
parent, or another child of that checkpoint, sampled with it are as good as its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
import numpy as np

UNKNOWN_LINEAGE = 0
"""Lineage of what nobody named. No start has this number."""


class VersionSpan(msgspec.Struct, frozen=True):
    """Sampled tokens `start:stop` of one engine call came from weights `version`."""

    version: int
    start: int
    stop: int


class VersionSpanRecorder:
    """Builds version spans of one running request; the engine stamps it while paused for an update."""

    def __init__(self, version: int):
        self._version = version
        self._start = 0
        self._spans: list[VersionSpan] = []

    def stamp_version(self, tokens_so_far: int, new_version: int) -> None:
        """Tokens sampled from here on come from `new_version`. Raises `ValueError` if versions or counts go backwards."""
        if new_version < self._version or tokens_so_far < self._start:
            raise ValueError(
                f"version span goes backwards: version {self._version} -> {new_version}, token {self._start} -> {tokens_so_far}"
            )
        if tokens_so_far > self._start:
            self._spans.append(VersionSpan(self._version, self._start, tokens_so_far))
        self._start, self._version = tokens_so_far, new_version

    def finish_spans(self, total_tokens: int) -> list[VersionSpan]:
        """All spans, covering `0..tokens` without gap."""
        if total_tokens < self._start:
            raise ValueError(f"{total_tokens} tokens, but a span already ends at {self._start}")
        if total_tokens == self._start:
            return list(self._spans)
        return [*self._spans, VersionSpan(self._version, self._start, total_tokens)]


def expand_version_spans(spans: Sequence[VersionSpan], length: int) -> np.ndarray:
    """int32 `[length]` of versions. Raises `ValueError` unless the spans cover `0..length` in order, without gap."""
    out = np.empty(length, np.int32)
    at = 0
    for span in spans:
        if span.start != at or span.stop <= span.start or span.stop > length:
            raise ValueError(f"version spans {list(spans)} do not cover {length} tokens in order")
        out[span.start : span.stop] = span.version
        at = span.stop
    if at != length:
        raise ValueError(f"version spans {list(spans)} cover {at} of {length} tokens")
    return out


class RunStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One start of a run. It began with version `version` of lineage `parent`; without a parent (`UNKNOWN_LINEAGE`), with
    version 0, the start model, or a checkpoint of a release without lineages. `model`: fingerprint of the start model.
    `origin`: the run whose checkpoint it was, if it was of another one."""

    lineage: int
    parent: int
    version: int
    model: str
    origin: str = ""


class Lineage(msgspec.Struct, frozen=True):
    """A start, and what it has behind it.

    `past`: by lineage, the last of its versions that are this one's past too: of ancestors the version at which the next one
    branched off, of others that began with the same weights the version that they began with.
    """

    number: int = UNKNOWN_LINEAGE
    parent: int = UNKNOWN_LINEAGE
    version: int = 0
    """That it began with."""
    past: dict[int, int] = {}

    def rejection_reason(
        self, lineage: int, newest_version: int, learner_version: int, *, from_earlier_start: bool = False
    ) -> str:
        """Why tokens of `lineage`, the newest of them sampled by version `newest_version` (-1: none), must not be trained by
        this one when the learner is at version `learner_version`; "" if they may.

        `from_earlier_start`: they were stored before this lineage began, so that they cannot be of it.
        """
        if lineage == self.number and not from_earlier_start and lineage != UNKNOWN_LINEAGE:
            if newest_version <= learner_version:
                return ""
            return f"it was sampled by version {newest_version}, and the learner is at version {learner_version}"
        last = self.past.get(lineage, -1)
        if lineage == UNKNOWN_LINEAGE or lineage not in self.past:
            named = "no lineage" if lineage == UNKNOWN_LINEAGE else f"lineage {lineage}"
            return f"it is of {named}, which is not in the past of lineage {self.number}"
        if newest_version <= last:
            return ""
        return (
            f"it was sampled by version {newest_version} of lineage {lineage}, which a resume took back: lineage "
            f"{self.number} knows that lineage up to version {last}"
        )

    def start_child(
        self, starts: Sequence[RunStart], version: int, model: str, origin: str = ""
    ) -> tuple[Lineage, RunStart]:
        """The lineage that begins now with version `version` of this one (of `Lineage()`: the first of its line), in a run
        directory in which there were `starts` before. And its entry among the starts."""
        past = dict(self.past)
        if self.number != UNKNOWN_LINEAGE:
            past[self.number] = version
        for start in sorted(starts, key=lambda s: s.lineage):
            if start.lineage in past:
                continue
            if start.parent == UNKNOWN_LINEAGE:
                here = version if self.number == UNKNOWN_LINEAGE else 0
                same = start.model == model and start.version in (0, here)
            else:
                same = past.get(start.parent, -1) >= start.version
            if same:
                past[start.lineage] = start.version
        number = 1 + max([self.number, *past, *(s.lineage for s in starts)])
        return Lineage(number, self.number, version, past), RunStart(number, self.number, version, model, origin)


FIRST_LINEAGE = Lineage(1)
"""Of a run that nothing came before."""


# Which groups are trained next: the oldest complete one within a window, repeatedly.
#
# The window reaches from the oldest group that is not consumed, its **head**, to the group `W - 1` leases behind it. Each
# choice takes the oldest complete group in it; then the window moves on with the head. `W = 1` is strict lease order. With a
# larger one a straggler may be overtaken, by `W - 1` younger groups at most.


class ConsumedGroups:
    """The groups that were consumed: all below `head`, and a few beyond it."""

    def __init__(self, window: int = 1, head: int = 0, beyond_head: Sequence[int] = ()):
        if window < 1:
            raise ValueError(f"schedule.window = {window} must be at least 1, which is strict lease order")
        self.window, self.head = window, head
        self.beyond_head = set(beyond_head)
        """Consumed groups above `head`; fewer than `window`."""

    def __contains__(self, group: int) -> bool:
        return group < self.head or group in self.beyond_head

    def __len__(self) -> int:
        return self.head + len(self.beyond_head)

    def after_consuming(self, groups: Iterable[int]) -> ConsumedGroups:
        """What is consumed when these are too, in this order. Raises `ValueError` as `add` does."""
        future = ConsumedGroups(self.window, self.head, tuple(self.beyond_head))
        for group in groups:
            future.add(group)
        return future

    def untrained_groups(self) -> Iterator[int]:
        """All groups that are not consumed, oldest first, without an end."""
        return (g for g in itertools.count(self.head) if g not in self.beyond_head)

    def groups_in_window(self) -> Iterator[int]:
        """Those of them that are in the window."""
        return itertools.takewhile(lambda g: g < self.head + self.window, self.untrained_groups())

    def add(self, group: int) -> None:
        """Consume `group`. Raises `ValueError` if it was consumed before or is beyond the window."""
        if group in self:
            raise ValueError(f"group {group} was consumed already")
        if group >= self.head + self.window:
            raise ValueError(
                f"group {group} may not overtake group {self.head}: schedule.window = {self.window} lets "
                f"{self.window - 1} younger groups be consumed before it"
            )
        self.beyond_head.add(group)
        while self.head in self.beyond_head:
            self.beyond_head.remove(self.head)
            self.head += 1

    def add_groups(self, groups: Iterable[int]) -> None:
        """Consume all of them, in this order, or, where `add` raises `ValueError`, none."""
        future = self.after_consuming(groups)
        self.head, self.beyond_head = future.head, future.beyond_head

    def trainable_groups(self, is_complete: Callable[[int], bool]) -> Iterator[int]:
        """The groups that would be consumed one after the other from here, until none in the window is complete."""
        future = self.after_consuming(())
        while (group := next(filter(is_complete, future.groups_in_window()), None)) is not None:
            future.add(group)
            yield group
