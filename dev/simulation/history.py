"""Events of a simulated run, as plain data in order of virtual time. They are observed at the
`World` and nowhere else.

`dev.simulation.observe` makes them from calls between actors, frames on the wire, operations on
files, and what the scripted learner is given to train. `invariants.InvariantChecker` judges them,
and `story` prints them.
"""

from __future__ import annotations

import msgspec


class RolloutFacts(msgspec.Struct, frozen=True, array_like=True):
    """Facts about one rollout of an episode, as it was sent or trained.

    Attributes:
        versions: Versions of the weights that sampled its trained tokens, ascending; empty
            for a placeholder.
        content: Checksum of everything that is trained.
        nbytes: Its size in memory in bytes.
        wrong: Reason why its tokens cannot come from the weights, or have the routes, that it
            states; "" if they can.
        task: Seed of its task.
        reward: Its reward; None if nothing was played.
    """

    trajectory_id: str
    group: int
    episode: int
    lineage: int
    versions: tuple[int, ...]
    content: int
    nbytes: int = 0
    wrong: str = ""
    task: int = 0
    reward: float | None = None


class RunEvent(msgspec.Struct, frozen=True, tag_field="event", tag=str.lower):
    """An event of a simulated run. `at` is in virtual seconds since the simulation began."""

    at: float


class LineageBegan(RunEvent, frozen=True, tag="began"):
    """A start of the run took a lineage number.

    Attributes:
        lineage: The number that it took.
        parent: Lineage that it continues; 0 for none.
        version: Version of the weights with which it starts.
        step: Number of the parent's first steps that it continues from.
        consumed: First group that its checkpoint does not report as consumed.
        beyond: Groups after that one that its checkpoint reports as consumed.
    """

    lineage: int
    parent: int = 0
    version: int = 0
    step: int = 0
    consumed: int = 0
    beyond: tuple[int, ...] = ()


class ProcessEnded(RunEvent, frozen=True, tag="lost"):
    """A process ended. `who` is a generator's name, `learner`, `conductor` or `driver`."""

    who: str


class PowerFailed(RunEvent, frozen=True):
    """A host lost power, and with it all its processes and what was not synced."""

    host: str = ""


class GroupsLeased(RunEvent, frozen=True, tag="leased"):
    """The conductor answered a generator's request for work.

    Attributes:
        leases: Leased groups with their episodes; may be empty.
        ended: True if the process that asked has ended and the conductor did not know.
        versions: Oldest version of the weights allowed for each lease; if empty, the
            engine's newest version.
        free: Number of episodes that the generator could have begun; 0 if it has to leave.
        outdated: True if the conductor knows that another process has taken the place of
            the one that asked.
    """

    generator: str
    leases: tuple[tuple[int, tuple[int, ...]], ...] = ()
    ended: bool = False
    versions: tuple[int, ...] = ()
    free: int = 0
    outdated: bool = False


class MissingReported(RunEvent, frozen=True, tag="asked"):
    """The learner reported which episodes it lacks, by group."""

    missing: dict[int, list[int]]


class InstallRequested(RunEvent, frozen=True, tag="installing"):
    """A generator was asked to install a version of the weights."""

    generator: str
    lineage: int
    version: int


class GaveUp(RunEvent, frozen=True):
    """A generator failed to install a version, because of `error`."""

    generator: str
    error: str = ""


class GeneratorStopped(RunEvent, frozen=True):
    """A generator was asked to stop: it installs nothing, and uses no version any more."""

    generator: str


class ParentAssigned(RunEvent, frozen=True, tag="placed"):
    """The learner told a generator from which parent its host gets weights, which must be
    none of `avoid`."""

    generator: str
    parent: str
    avoid: tuple[str, ...] = ()


class ParentRequested(RunEvent, frozen=True, tag="looked"):
    """A generator asked the learner from where its host gets weights."""

    generator: str


class VersionArrived(RunEvent, frozen=True, tag="arrived"):
    """A fetched version got its final name on the host of a generator. `weights` is the key that
    identifies the weights in the file; 0 if there are none. `files` is the number of versions that
    are then on the host."""

    generator: str
    version: int
    weights: int
    files: int = 1


class VersionFetched(RunEvent, frozen=True, tag="fetched"):
    """A generator has the file of a version on its host, and uses it from now on. `file` is the
    host and name of the file; empty for a file of the learner."""

    generator: str
    file: str = ""


class VersionRemoved(RunEvent, frozen=True, tag="removed"):
    """The file of a fetched version was removed from its host."""

    generator: str
    file: str


class PlayRequested(RunEvent, frozen=True, tag="plays"):
    """A generator was asked to play."""

    generator: str


class WeightsInstalled(RunEvent, frozen=True, tag="installed"):
    """An engine has new weights. `weights` is the key that identifies those in its file; 0
    if there are none."""

    generator: str
    lineage: int
    version: int
    weights: int


class TrajectorySent(RunEvent, frozen=True, tag="sent"):
    """A trajectory's payload left its generator."""

    generator: str
    trajectory: RolloutFacts


class EpisodeFailed(RunEvent, frozen=True, tag="failed"):
    """The environment of an episode failed on a generator: it raised, or its process
    ended or was ended."""

    generator: str
    task: int


class TrajectoriesDelivered(RunEvent, frozen=True, tag="delivered"):
    """A message with these trajectories arrived at the learner. `current`: it belongs to its
    sender's newest session."""

    generator: str
    ids: tuple[str, ...]
    current: bool


class TrajectoriesAcknowledged(RunEvent, frozen=True, tag="acknowledged"):
    """The learner acknowledged these trajectories to a generator."""

    generator: str
    ids: tuple[str, ...]


class TrajectoryRefused(RunEvent, frozen=True, tag="refused"):
    """The learner refused a trajectory for good. Deliveries that were damaged in transit
    are not included."""

    generator: str
    trajectory_id: str
    reason: str


class GroupsLimited(RunEvent, frozen=True, tag="limited"):
    """A generator was told that only groups before `until` are accepted now."""

    generator: str
    until: int


class StepBegan(RunEvent, frozen=True, tag="taken"):
    """A step took these groups, in this order."""

    lineage: int
    step: int
    version: int
    groups: tuple[int, ...]


class StepTrained(RunEvent, frozen=True, tag="trained"):
    """A step ended. `groups` has the trained trajectories by group; `updates` counts the
    updates of the weights."""

    lineage: int
    step: int
    version: int
    groups: tuple[tuple[RolloutFacts, ...], ...]
    updates: int = 1


class WeightsPublished(RunEvent, frozen=True, tag="published"):
    """The learner published weights, which engines may install. Its host then has `files` versions,
    of which the conductor had said that engines read `used`."""

    lineage: int
    version: int
    weights: int
    files: int = 1
    used: int = 0


class PublishedRemoved(RunEvent, frozen=True, tag="withdrawn"):
    """The learner removed its file of a published version."""

    version: int


class CheckpointSaved(RunEvent, frozen=True, tag="saved"):
    """A checkpoint has its final name, and survives a power failure."""

    step: int


class SpoolFileGrew(RunEvent, frozen=True, tag="stored"):
    """A file of the spool grew to `nbytes` bytes."""

    group: int
    file: str
    nbytes: int


class SpoolFileRemoved(RunEvent, frozen=True, tag="unlinked"):
    """A file of the spool was removed."""

    group: int
    file: str


class TrajectoryQuarantined(RunEvent, frozen=True, tag="quarantined"):
    """The quarantine got a file with a trajectory of this group."""

    group: int


class EvaluationBegan(RunEvent, frozen=True, tag="evaluating"):
    """An evaluation after step `step` has begun, according to its file."""

    step: int


class EvaluationEnded(RunEvent, frozen=True, tag="evaluated"):
    """The result of the evaluation after step `step` is in its file. It covers `tasks`, sampled by
    weights from version `oldest` to `newest`."""

    step: int
    tasks: tuple[int, ...]
    oldest: int
    newest: int


class EvaluationRemoved(RunEvent, frozen=True, tag="unevaluated"):
    """The file of the evaluation after step `step` was removed."""

    step: int


class EvaluationGivenUp(RunEvent, frozen=True, tag="notevaluated"):
    """A generator gave up the evaluation that it was playing, though its process lives."""

    generator: str


class SlotsReported(RunEvent, frozen=True, tag="slots"):
    """The conductor reported its slots."""

    taken: int
    total: int


class FaultReported(RunEvent, frozen=True, tag="injected"):
    """A fault began or ended; for the story. `what` describes it in words."""

    what: str


class FaultsOver(RunEvent, frozen=True, tag="quiet"):
    """The last fault ended."""


class TimePassed(RunEvent, frozen=True, tag="passed"):
    """Time has passed. `frozen` names the processes that are stopped."""

    frozen: tuple[str, ...] = ()


class RunFinished(RunEvent, frozen=True, tag="finished"):
    """The run ended.

    Attributes:
        steps: Number of its steps.
        failed: The error with which it failed; "" if it did not.
        evaluated: Steps in its record of evaluations.
    """

    steps: int
    failed: str = ""
    evaluated: tuple[int, ...] = ()


AnyRunEvent = (
    LineageBegan
    | ProcessEnded
    | PowerFailed
    | GroupsLeased
    | MissingReported
    | InstallRequested
    | GaveUp
    | GeneratorStopped
    | ParentRequested
    | ParentAssigned
    | VersionArrived
    | VersionFetched
    | VersionRemoved
    | PlayRequested
    | WeightsInstalled
    | EpisodeFailed
    | TrajectoriesDelivered
    | TrajectorySent
    | TrajectoriesAcknowledged
    | TrajectoryRefused
    | GroupsLimited
    | StepBegan
    | StepTrained
    | WeightsPublished
    | PublishedRemoved
    | CheckpointSaved
    | SpoolFileGrew
    | SpoolFileRemoved
    | TrajectoryQuarantined
    | EvaluationBegan
    | EvaluationEnded
    | EvaluationRemoved
    | EvaluationGivenUp
    | SlotsReported
    | FaultReported
    | FaultsOver
    | TimePassed
    | RunFinished
)
