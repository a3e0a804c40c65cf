"""A small history of a run that keeps every invariant, to be spoiled: two steps, a checkpoint, a step that a crash takes back,
and from the checkpoint on to the end. Steps of one group of two episodes, window 2, one slot a staleness, a spool."""

from collections.abc import Sequence

from dev.simulation.history import (
    CheckpointSaved,
    FaultsOver,
    GroupsLeased,
    LineageBegan,
    MissingReported,
    ProcessEnded,
    RolloutFacts,
    RunEvent,
    RunFinished,
    SpoolFileGrew,
    SpoolFileRemoved,
    StepBegan,
    StepTrained,
    TrajectoriesAcknowledged,
    TrajectorySent,
    WeightsInstalled,
    WeightsPublished,
)
from dev.simulation.observed_state import RunGuarantees
from r3async.data.tokens import format_trajectory_id

RULES = RunGuarantees(
    steps=4,
    prompts_per_step=1,
    group_size=2,
    slots=3,
    age_bound=3,
    window=2,
    urgent=2,
    durable="process",
    silence_seconds=10.0,
    first_seconds=100.0,
    step_seconds=50.0,
)


def playing(group: int, episode: int, lineage: int, *versions: int, take: int = 0, nbytes: int = 100) -> RolloutFacts:
    """`take`: tells playings of one episode apart."""
    content = hash((group, episode, lineage, versions, take))
    return RolloutFacts(
        format_trajectory_id(group, episode), group, episode, lineage, versions, content, nbytes, reward=0.0
    )


class Writer:
    """Writes events, each a second after the one before."""

    def __init__(self) -> None:
        self.events: list[RunEvent] = []
        self.lineage = 0

    def add(self, kind: type[RunEvent], *args: object, **facts: object) -> None:
        self.events.append(kind(float(len(self.events)), *args, **facts))

    def begin(self, lineage: int, parent: int = 0, version: int = 0, step: int = 0, consumed: int = 0) -> None:
        self.lineage = lineage
        self.add(LineageBegan, lineage, parent, version, step, consumed)

    def publish(self, version: int, weights: int, *engines: str) -> None:
        self.add(WeightsPublished, self.lineage, version, weights)
        for engine in engines:
            self.add(WeightsInstalled, engine, self.lineage, version, weights)

    def play(self, engine: str, group: int, *versions: int, episodes: Sequence[int] = (0, 1)) -> None:
        self.add(GroupsLeased, engine, ((group, tuple(episodes)),))
        self.deliver(engine, group, *versions, episodes=episodes)

    def deliver(self, engine: str, group: int, *versions: int, episodes: Sequence[int] = (0, 1)) -> None:
        for episode in episodes:
            self.add(TrajectorySent, engine, playing(group, episode, self.lineage, *versions))
        self.add(SpoolFileGrew, group, f"{group}-{self.lineage}", 100 * len(episodes))
        self.add(TrajectoriesAcknowledged, engine, tuple(format_trajectory_id(group, episode) for episode in episodes))

    def train(self, step: int, version: int, *members: RolloutFacts) -> None:
        self.add(StepBegan, self.lineage, step, version, (members[0].group,))
        self.add(StepTrained, self.lineage, step, version, (members,))


def pair(group: int, lineage: int, *versions: int) -> tuple[RolloutFacts, RolloutFacts]:
    return playing(group, 0, lineage, *versions), playing(group, 1, lineage, *versions)


def good() -> list[RunEvent]:
    """See above. Group 3 is acknowledged in the first lineage, and trained in the second, which did not play it again."""
    w = Writer()
    w.begin(1)
    w.publish(0, 100, "a", "b")
    w.play("a", 0, 0)
    w.play("b", 1, 0)
    w.train(1, 0, *pair(0, 1, 0))
    w.publish(1, 101, "a", "b")
    w.play("a", 2, 1)
    w.train(2, 1, *pair(1, 1, 0))
    w.add(CheckpointSaved, 2)
    w.add(SpoolFileRemoved, 0, "0-1")
    w.publish(2, 102, "a", "b")
    w.play("b", 3, 2)
    w.train(3, 2, *pair(2, 1, 1))
    w.add(ProcessEnded, "learner")
    w.begin(2, 1, 2, 2, 2)
    w.add(MissingReported, {2: [], 3: [], 4: [0, 1]})
    w.publish(2, 102, "a", "b")
    w.train(3, 2, *pair(2, 1, 1))
    w.add(FaultsOver)
    w.publish(3, 103, "a", "b")
    w.train(4, 3, *pair(3, 1, 2))
    w.add(CheckpointSaved, 4)
    for group, file in ((1, "1-1"), (2, "2-1"), (3, "3-1")):
        w.add(SpoolFileRemoved, group, file)
    w.add(RunFinished, 4)
    return w.events
