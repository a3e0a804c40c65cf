"""The progress of a run, as the learner counts it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StepCounts:
    """The progress of a run, as the learner counts it.

    A step without an update (nothing to train, a gradient that is not finite) counts too: slots are
    freed by it, and generators see time pass.

    Attributes:
        steps: Steps made.
        version: Versions published.
        since_publication: Steps made, and groups consumed, since the last version was published.
    """

    steps: int = 0
    version: int = 0
    since_publication: tuple[int, int] = (0, 0)
