"""Events of a simulated run, as plain data in order of virtual time. They are observed at the `World` and nowhere else.

`dev.simulation.observe` makes them from calls between actors, frames on the wire, operations on files, and what the
scripted learner is given to train. `invariants.Checker` judges them, and `story` prints them.
"""

from __future__ import annotations

import msgspec


class Facts(msgspec.Struct, frozen=True, array_like=True):
    """Facts about one rollout of an episode, as it was sent or trained.

    Attributes:
        versions: Versions of the weights that sampled its trained tokens, ascending; empty for a placeholder.
        content: Checksum of everything that is trained.
        nbytes: Its size in memory in bytes.
        wrong: Reason why its tokens cannot come from the weights, or have the routes, that it states; "" if they can.
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


class Event(msgspec.Struct, frozen=True, tag_field="event", tag=str.lower):
    """An event of a simulated run. `at` is in virtual seconds since the simulation began."""

    at: float


class Began(Event, frozen=True):
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


class Lost(Event, frozen=True):
    """A process ended. `who` is a generator's name, `learner`, `conductor` or `driver`."""

    who: str


class PowerFailed(Event, frozen=True):
    """A host lost power, and with it all its processes and what was not synced."""

    host: str = ""


class Leased(Event, frozen=True):
    """The conductor answered a generator's request for work.

    Attributes:
        leases: Leased groups with their episodes; may be empty.
        ended: True if the process that asked has ended and the conductor did not know.
        versions: Oldest version of the weights allowed for each lease; if empty, the engine's newest version.
        free: Number of episodes that the generator could have begun; 0 if it has to leave.
    """

    generator: str
    leases: tuple[tuple[int, tuple[int, ...]], ...] = ()
    ended: bool = False
    versions: tuple[int, ...] = ()
    free: int = 0


class Asked(Event, frozen=True):
    """The learner reported which episodes it lacks, by group."""

    missing: dict[int, list[int]]


class Installing(Event, frozen=True):
    """A generator was asked to install a version of the weights."""

    generator: str
    lineage: int
    version: int


class GaveUp(Event, frozen=True):
    """A generator failed to install a version, or was asked to stop."""

    generator: str


class Placed(Event, frozen=True):
    """The learner told a generator from which parent its host gets weights, which must be none of `avoid`."""

    generator: str
    parent: str
    avoid: tuple[str, ...] = ()


class Looked(Event, frozen=True):
    """A generator asked the learner from where its host gets weights."""

    generator: str


class Arrived(Event, frozen=True):
    """A fetched version got its final name on the host of a generator. `weights` is the key that identifies the weights
    in the file; 0 if there are none."""

    generator: str
    version: int
    weights: int


class Fetched(Event, frozen=True):
    """A generator has the file of a version on its host, and uses it from now on. `file` is the host and name of the
    file; empty for a file of the learner."""

    generator: str
    file: str = ""


class Removed(Event, frozen=True):
    """The file of a fetched version was removed from its host."""

    generator: str
    file: str


class Plays(Event, frozen=True):
    """A generator was asked to play."""

    generator: str


class Installed(Event, frozen=True):
    """An engine has new weights. `weights` is the key that identifies those in its file; 0 if there are none."""

    generator: str
    lineage: int
    version: int
    weights: int


class Sent(Event, frozen=True):
    """A trajectory's payload left its generator."""

    generator: str
    trajectory: Facts


class Failed(Event, frozen=True):
    """The environment of an episode failed on a generator: it raised, or its process ended or was ended."""

    generator: str
    task: int


class Delivered(Event, frozen=True):
    """A message with these trajectories arrived at the learner. `current`: it belongs to its sender's newest
    session."""

    generator: str
    ids: tuple[str, ...]
    current: bool


class Acknowledged(Event, frozen=True):
    """The learner acknowledged these trajectories to a generator."""

    generator: str
    ids: tuple[str, ...]


class Refused(Event, frozen=True):
    """The learner refused a trajectory for good. Deliveries that were damaged in transit are not included."""

    generator: str
    trajectory_id: str
    reason: str


class Limited(Event, frozen=True):
    """A generator was told that only groups before `until` are accepted now."""

    generator: str
    until: int


class Taken(Event, frozen=True):
    """A step took these groups, in this order."""

    lineage: int
    step: int
    version: int
    groups: tuple[int, ...]


class Trained(Event, frozen=True):
    """A step ended. `groups` has the trained trajectories by group; `updates` counts the updates of the weights."""

    lineage: int
    step: int
    version: int
    groups: tuple[tuple[Facts, ...], ...]
    updates: int = 1


class Published(Event, frozen=True):
    """The learner published weights, which engines may install."""

    lineage: int
    version: int
    weights: int


class Saved(Event, frozen=True):
    """A checkpoint has its final name, and survives a power failure."""

    step: int


class Stored(Event, frozen=True):
    """A file of the spool grew to `nbytes` bytes."""

    group: int
    file: str
    nbytes: int


class Unlinked(Event, frozen=True):
    """A file of the spool was removed."""

    group: int
    file: str


class Evaluating(Event, frozen=True):
    """An evaluation after step `step` has begun, according to its file."""

    step: int


class Evaluated(Event, frozen=True):
    """The result of the evaluation after step `step` is in its file. It covers `tasks`, sampled by weights from version
    `oldest` to `newest`."""

    step: int
    tasks: tuple[int, ...]
    oldest: int
    newest: int


class NotEvaluated(Event, frozen=True):
    """A generator gave up the evaluation that it was playing, though its process lives."""

    generator: str


class Slots(Event, frozen=True):
    """The conductor reported its slots."""

    taken: int
    total: int


class Injected(Event, frozen=True):
    """A fault began or ended; for the story. `what` describes it in words."""

    what: str


class Quiet(Event, frozen=True):
    """The last fault ended."""


class Passed(Event, frozen=True):
    """Time has passed. `frozen` names the processes that are stopped."""

    frozen: tuple[str, ...] = ()


class Finished(Event, frozen=True):
    """The run ended.

    Attributes:
        steps: Number of its steps.
        failed: The error with which it failed; "" if it did not.
        evaluated: Steps in its record of evaluations.
    """

    steps: int
    failed: str = ""
    evaluated: tuple[int, ...] = ()


History = (
    Began
    | Lost
    | PowerFailed
    | Leased
    | Asked
    | Installing
    | GaveUp
    | Looked
    | Placed
    | Arrived
    | Fetched
    | Removed
    | Plays
    | Installed
    | Failed
    | Delivered
    | Sent
    | Acknowledged
    | Refused
    | Limited
    | Taken
    | Trained
    | Published
    | Saved
    | Stored
    | Unlinked
    | Evaluating
    | Evaluated
    | NotEvaluated
    | Slots
    | Injected
    | Quiet
    | Passed
    | Finished
)
