"""Which policy version sampled which token of one engine call, and which weights a version number means. Pure.

Versions are counted, and a resume takes steps back: the numbers after its checkpoint are used again, for other weights. So each
start of a run is a **lineage** with a number of its own, and weights are named by (lineage, version). A lineage begins with the
weights of its parent's checkpoint, under the number that they had there: that version has two names, and tokens that the
parent, or another child of that checkpoint, sampled with it are as good as its own.
"""

from __future__ import annotations

from collections.abc import Sequence

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
