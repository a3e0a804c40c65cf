"""Which weights a version number means. Pure.

Versions are counted, and a resume takes steps back: the numbers after its checkpoint are used again, for other weights. So each
start of a run is a **lineage** with a number of its own, and weights are named by (lineage, version). A lineage begins with the
weights of its parent's checkpoint, under the number that they had there: that version has two names, and tokens that the
parent, or another child of that checkpoint, sampled with it are as good as its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

UNKNOWN = 0
"""Lineage of what nobody named. No start has this number."""


class Start(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One start of a run. It began with version `version` of lineage `parent`; without a parent (`UNKNOWN`), with version 0, the
    start model, or a checkpoint of a release without lineages. `model`: fingerprint of the start model. `origin`: the run whose
    checkpoint it was, if it was of another one."""

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

    number: int = UNKNOWN
    parent: int = UNKNOWN
    version: int = 0
    """That it began with."""
    past: dict[int, int] = {}

    def refusal(self, lineage: int, newest: int, learner: int, *, kept: bool = False) -> str:
        """Why tokens of `lineage`, the newest of them sampled by version `newest` (-1: none), must not be trained by this one
        when the learner is at version `learner`; "" if they may.

        `kept`: they were stored before this lineage began, so that they cannot be of it.
        """
        if lineage == self.number and not kept and lineage != UNKNOWN:
            if newest <= learner:
                return ""
            return f"it was sampled by version {newest}, and the learner is at version {learner}"
        last = self.past.get(lineage, -1)
        if lineage == UNKNOWN or lineage not in self.past:
            named = "no lineage" if lineage == UNKNOWN else f"lineage {lineage}"
            return f"it is of {named}, which is not in the past of lineage {self.number}"
        if newest <= last:
            return ""
        return (
            f"it was sampled by version {newest} of lineage {lineage}, which a resume took back: lineage {self.number} knows "
            f"that lineage up to version {last}"
        )

    def child(self, starts: Sequence[Start], version: int, model: str, origin: str = "") -> tuple[Lineage, Start]:
        """The lineage that begins now with version `version` of this one (of `Lineage()`: the first of its line), in a run
        directory in which there were `starts` before. And its entry among the starts."""
        past = dict(self.past)
        if self.number != UNKNOWN:
            past[self.number] = version
        for start in sorted(starts, key=lambda s: s.lineage):
            if start.lineage in past:
                continue
            if start.parent == UNKNOWN:
                here = version if self.number == UNKNOWN else 0
                same = start.model == model and start.version in (0, here)
            else:
                same = past.get(start.parent, -1) >= start.version
            if same:
                past[start.lineage] = start.version
        number = 1 + max([self.number, *past, *(s.lineage for s in starts)])
        return Lineage(number, self.number, version, past), Start(number, self.number, version, model, origin)


FIRST = Lineage(1)
"""Of a run that nothing came before."""
