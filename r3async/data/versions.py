"""Policy versions: the weights that a number means, and the version that sampled a token. Pure.

Versions are counted, and a resume undoes steps: the numbers after its checkpoint are used again,
for other weights. So each start of a run is a **lineage** with its own number, and weights are
identified by (lineage, version). A lineage begins with the weights of its parent's checkpoint,
under the version number that they had there. That version has two names, and tokens sampled with it
by the parent, or by another child of that checkpoint, are as valid as its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

UNKNOWN_LINEAGE = 0
"""Number of an unknown lineage. No start has this number."""


class VersionSpan(msgspec.Struct, frozen=True):
    """A span of one engine call: sampled tokens `start:stop` came from weights `version`."""

    version: int
    start: int
    stop: int


class VersionSpanRecorder:
    """A recorder of the version spans of one running request; the engine stamps it while
    paused for an update."""

    def __init__(self, version: int):
        self._version = version
        self._start = 0
        self._spans: list[VersionSpan] = []

    def stamp_version(self, tokens_so_far: int, new_version: int) -> None:
        """Record that tokens from `tokens_so_far` on come from `new_version`.

        Raises `ValueError` if versions or counts go backwards.
        """
        if new_version < self._version or tokens_so_far < self._start:
            raise ValueError(
                f"version span goes backwards: version {self._version} -> {new_version}, token "
                f"{self._start} -> {tokens_so_far}"
            )
        if tokens_so_far > self._start:
            self._spans.append(VersionSpan(self._version, self._start, tokens_so_far))
        self._start = tokens_so_far
        self._version = new_version

    def finish_spans(self, total_tokens: int) -> list[VersionSpan]:
        """Return all spans, which cover `0..total_tokens` without a gap.

        Raises `ValueError` if a span already ends beyond `total_tokens`.
        """
        if total_tokens < self._start:
            raise ValueError(f"{total_tokens} tokens, but a span already ends at {self._start}")
        if total_tokens == self._start:
            return list(self._spans)
        return [*self._spans, VersionSpan(self._version, self._start, total_tokens)]


def expand_version_spans(spans: Sequence[VersionSpan], length: int) -> np.ndarray:
    """Return the version of each token, int32 `[length]`.

    Raises `ValueError` unless the spans cover `0..length` in order, without a gap.
    """
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
    """One start of a run.

    Attributes:
        lineage: Number of its lineage.
        parent: Lineage of the weights that it began with. `UNKNOWN_LINEAGE` if it began with
            version 0, the start model, or with a checkpoint of a release without lineages.
        version: Version of these weights.
        model: Fingerprint of the start model.
        origin: Run whose checkpoint it began with, if that was another run.
    """

    lineage: int
    parent: int
    version: int
    model: str
    origin: str = ""


class Lineage(msgspec.Struct, frozen=True):
    """A start of a run, and the versions of other lineages that belong to its past.

    Attributes:
        past: Last version of each other lineage that belongs to this one's past too. For an
            ancestor, it is the version at which the next lineage branched off; for another lineage
            that began with the same weights, the version that it began with.
    """

    number: int = UNKNOWN_LINEAGE
    parent: int = UNKNOWN_LINEAGE
    version: int = 0
    """Version that it began with."""
    past: dict[int, int] = {}

    def rejection_reason(
        self,
        lineage: int,
        newest_version: int,
        learner_version: int,
        *,
        from_earlier_start: bool = False,
    ) -> str:
        """Return why this lineage must not train certain tokens; "" if it may.

        Args:
            lineage: Lineage of the tokens.
            newest_version: Newest version that sampled any of them; -1 if none did.
            learner_version: Version that the learner is at.
            from_earlier_start: True if the tokens were stored before this lineage began, and so
                cannot belong to it.
        """
        if lineage == self.number and not from_earlier_start and lineage != UNKNOWN_LINEAGE:
            if newest_version <= learner_version:
                return ""
            return (
                f"it was sampled by version {newest_version}, and the learner is at version "
                f"{learner_version}"
            )
        last = self.past.get(lineage, -1)
        if lineage == UNKNOWN_LINEAGE or lineage not in self.past:
            named = "no lineage" if lineage == UNKNOWN_LINEAGE else f"lineage {lineage}"
            return f"it is of {named}, which is not in the past of lineage {self.number}"
        if newest_version <= last:
            return ""
        return (
            f"it was sampled by version {newest_version} of lineage {lineage}, which a resume took "
            f"back: lineage {self.number} knows that lineage up to version {last}"
        )

    def start_child(
        self, starts: Sequence[RunStart], version: int, model: str, origin: str = ""
    ) -> tuple[Lineage, RunStart]:
        """Return the lineage that begins now with a version of this one, and its entry
        among the starts.

        The child of `Lineage()` is the first of its line.

        Args:
            starts: Earlier starts in the run directory.
            version: Version of this lineage with which the child begins.
            model: Fingerprint of the start model.
            origin: Run whose checkpoint the child begins with, if that is another run.
        """
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
        return Lineage(number, self.number, version, past), RunStart(
            number, self.number, version, model, origin
        )


FIRST_LINEAGE = Lineage(1)
"""Lineage of a run without predecessors."""
