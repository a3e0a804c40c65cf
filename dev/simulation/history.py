"""What is seen of a simulated run, at the seam and nowhere else. Plain data, in the order of virtual time.

Observers make these of calls between actors, frames on the wire, operations on files, and of what the scripted learner is given
to train (`dev.simulation.observe`). `invariants.Checker` judges them, `story` prints them.
"""

from __future__ import annotations

import msgspec


class Facts(msgspec.Struct, frozen=True, array_like=True):
    """One playing of an episode, as it was sent or trained.

    `versions`: of the weights that sampled its trained tokens, ascending; empty for a stand-in. `content`: checksum of all
    that is trained of it. `nbytes`: what it takes in memory. `wrong`: why its tokens cannot be of the weights, or have the
    routes, that it says; "" if they can. `task`: its seed. `reward`: None if nothing of it was played."""

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
    """`at`: virtual seconds since the simulation began."""

    at: float


class Began(Event, frozen=True):
    """A start of the run took `lineage`. It has its parent's first `step` steps behind it, and version `version` of the weights;
    the checkpoint says that it has consumed all groups before `consumed` and those of `beyond`. `parent`: 0 for none."""

    lineage: int
    parent: int = 0
    version: int = 0
    step: int = 0
    consumed: int = 0
    beyond: tuple[int, ...] = ()


class Lost(Event, frozen=True):
    """A process ended. `who`: a generator's name, `learner`, `conductor` or `driver`."""

    who: str


class PowerFailed(Event, frozen=True):
    """A host lost what it had not synced, and all its processes."""

    host: str = ""


class Leased(Event, frozen=True):
    """The conductor answered a generator's question for work. `leases`: groups with their episodes, maybe none. `ended`: the
    process that asked has ended, and the conductor did not know. `versions`: of each lease, the oldest
    weights for it; those of its engine, if not said. `free`: episodes that it could have begun; 0 if it is to leave."""

    generator: str
    leases: tuple[tuple[int, tuple[int, ...]], ...] = ()
    ended: bool = False
    versions: tuple[int, ...] = ()
    free: int = 0


class Asked(Event, frozen=True):
    """The learner said which episodes it lacks, by group."""

    missing: dict[int, list[int]]


class Installing(Event, frozen=True):
    """A generator is asked to install a version."""

    generator: str
    lineage: int
    version: int


class GaveUp(Event, frozen=True):
    """A generator could not install what it was asked to, or is asked to end."""

    generator: str


class Placed(Event, frozen=True):
    """The learner says to a generator where its host gets weights from, which were to come from none of `avoid`."""

    generator: str
    parent: str
    avoid: tuple[str, ...] = ()


class Looked(Event, frozen=True):
    """A generator asks the learner where its host gets weights from."""

    generator: str


class Arrived(Event, frozen=True):
    """A version has its name on the host of a generator that fetched it. `weights`: what tells those in the file from others; 0:
    it has none."""

    generator: str
    version: int
    weights: int


class Fetched(Event, frozen=True):
    """A generator has the file of a version on its host, and uses it from now on. `file`: its host and name; empty for one that
    is the learner's."""

    generator: str
    file: str = ""


class Removed(Event, frozen=True):
    """The file of a version that was fetched is removed from its host."""

    generator: str
    file: str


class Plays(Event, frozen=True):
    """A generator is asked to play."""

    generator: str


class Installed(Event, frozen=True):
    """An engine has new weights. `weights`: what tells those in its file from others; 0: it has none."""

    generator: str
    lineage: int
    version: int
    weights: int


class Sent(Event, frozen=True):
    """A trajectory's payload left its generator."""

    generator: str
    trajectory: Facts


class Failed(Event, frozen=True):
    """The environment of an episode of a task failed at a generator: it raised, or its process ended, or was ended."""

    generator: str
    task: int


class Delivered(Event, frozen=True):
    """A message with these has arrived at the learner. `current`: it is of the session that its sender opened last."""

    generator: str
    ids: tuple[str, ...]
    current: bool


class Acknowledged(Event, frozen=True):
    """The learner said to a generator that it has these."""

    generator: str
    ids: tuple[str, ...]


class Refused(Event, frozen=True):
    """The learner said that it will never take this one. Not of a delivery that changed on its way."""

    generator: str
    trajectory_id: str
    reason: str


class Limited(Event, frozen=True):
    """A generator is told that only groups before `until` are taken now."""

    generator: str
    until: int


class Taken(Event, frozen=True):
    """A step takes these groups, in this order."""

    lineage: int
    step: int
    version: int
    groups: tuple[int, ...]


class Trained(Event, frozen=True):
    """It has ended. `groups`: what was trained, by group. `updates`: of the weights."""

    lineage: int
    step: int
    version: int
    groups: tuple[tuple[Facts, ...], ...]
    updates: int = 1


class Published(Event, frozen=True):
    """Weights that engines may install."""

    lineage: int
    version: int
    weights: int


class Saved(Event, frozen=True):
    """A checkpoint has its name, and outlives a power failure."""

    step: int


class Stored(Event, frozen=True):
    """A file of the spool is `nbytes` long."""

    group: int
    file: str
    nbytes: int


class Unlinked(Event, frozen=True):
    """A file of the spool is removed."""

    group: int
    file: str


class Evaluating(Event, frozen=True):
    """An evaluation after step `step` is begun. Its file says so."""

    step: int


class Evaluated(Event, frozen=True):
    """The result of the evaluation after step `step` is in its file: of these tasks, sampled by weights from version `oldest` to
    `newest`."""

    step: int
    tasks: tuple[int, ...]
    oldest: int
    newest: int


class NotEvaluated(Event, frozen=True):
    """A generator that plays an evaluation gives it up, though its process lives."""

    generator: str


class Slots(Event, frozen=True):
    """What the conductor says of its slots."""

    taken: int
    total: int


class Injected(Event, frozen=True):
    """A fault begins, or ends; for the story. `what`: in words."""

    what: str


class Quiet(Event, frozen=True):
    """The last fault is over."""


class Passed(Event, frozen=True):
    """Time has passed. `frozen`: processes that are stopped."""

    frozen: tuple[str, ...] = ()


class Finished(Event, frozen=True):
    """The run has ended: with so many steps, or with what it failed with. `evaluated`: steps of its record of evaluations."""

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
