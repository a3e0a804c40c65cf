"""The scenarios `rewind` and `first-checkpoint`: a run that is lost again before it has made up for the loss before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from r3async.record.reading import read_objects
from r3async.record.steps import TRAINED
from r3async.tools.chaos.sabotage import Role, Saboteur

EVERY = 5
"""Steps from one checkpoint to the next."""
LOST: tuple[Role, ...] = ("learner", "conductor")


class Losses(Saboteur):
    """Kills learner or conductor, whose loss takes the run back."""

    settings: ClassVar[Sequence[str]] = (
        f"checkpoint.every_steps={EVERY}",
        f"steps={3 * EVERY + 1}",
        "env.args={ seconds = 0.1 }",
    )

    @classmethod
    def steps(cls, faults: int) -> int:
        return 3 * EVERY + 1

    def lose(self, lineage: int, step: int) -> bool:
        """When that lineage has made that step. False if the run ended before."""
        if not self.wait_for(lambda: self.reached() >= (lineage, step)):
            return False
        return self.kill(self.rng.choice(LOST))

    def reached(self) -> tuple[int, int]:
        """Lineage and step of the newest line that says what was trained."""
        return max(((line["lineage"], line["step"]) for line in read_objects(self.run_dir / TRAINED)), default=(0, 0))

    def began(self) -> list[int]:
        """The step that each lineage began after."""
        events = read_objects(self.run_dir / "events.jsonl")
        return [e["step"] for e in events if e["event"] == "lineage_began"]


class Rewind(Losses):
    """Twice between the first checkpoint and the second, so that steps and versions are made three times; and once more as soon
    as the second is there, where numbers of the first two timelines are in the spool again if nothing took them out."""

    def sabotage(self) -> None:
        for lineage in (1, 2):
            if not self.lose(lineage, EVERY + self.rng.randint(2, 3)):
                return
        second = self.run_dir / "checkpoints" / f"step-{2 * EVERY:08d}"
        if self.wait_for(second.is_dir):
            self.kill(self.rng.choice(LOST))

    def problems(self) -> list[str]:
        began = self.began()
        right = began == [0, EVERY, EVERY, 2 * EVERY]
        return (
            [] if right else [f"lineages began after steps {began}, and not twice after {EVERY}: kills came too late"]
        )


class FirstCheckpoint(Losses):
    """Twice before there is any checkpoint: what was acknowledged then is in the spool alone."""

    def sabotage(self) -> None:
        for lineage in (1, 2):
            if not self.lose(lineage, self.rng.randint(1, 2)):
                return

    def problems(self) -> list[str]:
        events = read_objects(self.run_dir / "events.jsonl")
        adopted = [e for e in events if e["event"] == "resumed" and not e["checkpoint"]]
        problems = (
            [] if self.began() == [0, 0, 0] else [f"lineages began after steps {self.began()}, not all with none"]
        )
        return problems + ([] if adopted else ["nothing of the spool was adopted without a checkpoint"])
