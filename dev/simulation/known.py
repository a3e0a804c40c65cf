"""Knowledge about a simulated run, derived from its events: the tree of its starts, and the state for the rules. Pure.

Each start of the run is a branch. It shares the steps before its checkpoint with its parent, as the very same objects.
So two names (lineage, version) of weights are compared by the steps that made them, and not by what the run states
about itself.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

from dev.simulation.history import (
    Acknowledged,
    Arrived,
    Asked,
    Began,
    Delivered,
    Evaluated,
    Evaluating,
    Event,
    Facts,
    Failed,
    Fetched,
    Finished,
    GaveUp,
    Injected,
    Installed,
    Installing,
    Leased,
    Looked,
    Lost,
    NotEvaluated,
    Passed,
    Placed,
    Plays,
    PowerFailed,
    Published,
    Quiet,
    Saved,
    Sent,
    Stored,
    Trained,
    Unlinked,
)
from r3async.data.tokens import format_trajectory_id


@dataclass(frozen=True, eq=False)
class Step:
    """One training step. `version` is the newest one when the step was made; this step, or a later one, makes the
    next."""

    number: int
    version: int
    groups: tuple[int, ...]
    updates: int = 1
    """Number of updates of the weights."""


class Branch:
    """The steps of one lineage, beginning with those that it shares with its parent."""

    def __init__(self, lineage: int, parent: Branch | None = None, step: int = 0, version: int = 0):
        """Create a branch that begins with the first `step` steps of `parent`, whose weights it calls `version`."""
        self.lineage, self.version = lineage, version
        self.steps: list[Step] = parent.steps[:step] if parent is not None else []
        self.trained: dict[int, int] = {group: step.number for step in self.steps for group in step.groups}
        """The step that trained each group, by group."""
        self.made: dict[int, int] = {}
        """The number of steps that made each version, by version."""
        if parent is not None:
            self.made = {v: count for v, count in parent.made.items() if v < version}
        self.made[version] = len(self.steps)
        self.head = 0
        """The oldest untrained group."""
        self._move()

    @property
    def since(self) -> int:
        """The number of steps since the newest version was made."""
        return sum(step.version == self.version for step in self.steps)

    def add(self, groups: tuple[int, ...], updates: int = 1, *, makes_version: bool) -> None:
        """Add a step. Its groups are not judged here."""
        self.steps.append(Step(len(self.steps) + 1, self.version, groups, updates))
        for group in groups:
            self.trained.setdefault(group, len(self.steps))
        self._move()
        if makes_version:
            self.version += 1
            self.made[self.version] = len(self.steps)

    def _move(self) -> None:
        while self.head in self.trained:
            self.head += 1

    def behind(self, version: int) -> Sequence[Step] | None:
        """Return the steps that made weights `version`; None if no step made them."""
        count = self.made.get(version)
        return None if count is None else self.steps[:count]

    def groups_in(self, version: int) -> int:
        """Return how many groups weights `version` were trained from."""
        return sum(len(step.groups) for step in self.behind(version) or ())


def same_weights(one: Branch, its: int, other: Branch, others: int) -> bool:
    """Return whether version `its` of `one` and version `others` of `other` were made by the same steps."""
    ours, theirs = one.behind(its), other.behind(others)
    return ours is not None and theirs is not None and _same(ours, theirs) and len(ours) == len(theirs)


def leads_to(sampled_by: Branch, version: int, learner: Branch) -> bool:
    """Return whether weights `version` of `sampled_by` are in the past of the current weights of `learner`: the steps
    that made them are the first steps of `learner`."""
    steps = sampled_by.behind(version)
    return steps is not None and len(steps) <= len(learner.steps) and _same(steps, learner.steps)


def _same(ours: Sequence[Step], theirs: Sequence[Step]) -> bool:
    """Return whether two sequences of steps are the same, up to the end of the shorter one."""
    return all(a is b for a, b in zip(ours, theirs, strict=False))


# What is known about a run after the events so far. The invariants use it to judge the next event.


CALM_SECONDS = 90.0
"""Seconds from the end of the last fault until its effects are over: silent connections are noticed after a minute."""
PAUSE_SECONDS = 10.0
"""Seconds between two answers of the conductor that count as a pause. Generators ask at least twice as often."""


class Rules(msgspec.Struct, frozen=True):
    """The guarantees that follow from the run's configuration.

    Attributes:
        age_bound: Maximum age of a trained token in versions.
        window: The setting `schedule.window`.
        urgent: Number of groups, from the oldest on, that are accepted regardless of memory credit and disk.
        more_groups: True if a step takes more groups to reach its number of tokens.
        replaced_groups: Maximum number of additional groups that replace groups with zero variance.
        durable: What an acknowledged trajectory survives: `nothing`, the end of any `process`, or a failure of `power`.
        first_seconds: Seconds within which the first step after the last fault is made.
        step_seconds: Seconds within which each later step is made.
        install_seconds: Seconds within which an installation ends if nothing is wrong.
        fetch_seconds: Seconds within which a host has weights, or asks for another source.
    """

    steps: int
    prompts_per_step: int
    group_size: int
    slots: int
    age_bound: int
    steps_per_publication: int = 1
    window: int = 1
    urgent: int = 1
    more_groups: bool = False
    replaced_groups: int = 0
    durable: Literal["nothing", "process", "power"] = "nothing"
    credit_bytes: float = math.inf
    disk_bytes: float = math.inf
    silence_seconds: float = math.inf
    first_seconds: float = math.inf
    step_seconds: float = math.inf
    install_seconds: float = math.inf
    fetch_seconds: float = math.inf
    evaluate_every: int = 0
    evaluate_first: bool = False
    evaluated_tasks: int = 0


class Lease(NamedTuple):
    """A lease. `process` is the number of processes of its owner that had ended before."""

    owner: str
    process: int
    at: float


class Engine:
    """The state of one generator."""

    def __init__(self) -> None:
        self.process = 0
        """Number of its processes that have ended."""
        self.versions: list[int] = []
        """Versions that its current process installed."""
        self.newest = -1
        """The newest version that any of its processes installed in this lineage."""
        self.heard = -math.inf
        """Time of the last answer to its requests for work."""
        self.loose = -math.inf
        """Time before which its leases may have been taken back, because it was silent."""
        self.told = -math.inf
        """Time at which it last reported an installation."""
        self.installing: float | None = None
        """Time since which its current process is installing a version; None if it is not."""
        self.fetching: float | None = None
        """Time since which it waits for weights: of its last request for a source, or when it was last seen stopped.
        None if it does not wait."""
        self.uses = ""
        """File of the version that its current process fetched last."""
        self.plays: float | None = None
        """Time since which its current process plays; None if it does not."""
        self.current = -1
        """The newest version that others had when its current process completed its last installation."""

    def ended(self) -> None:
        self.process += 1
        self.versions, self.current, self.uses = [], -1, ""
        self.installing = self.fetching = self.plays = None

    def begins(self) -> None:
        """Reset for a new lineage."""
        self.ended()
        self.newest, self.heard, self.loose, self.told = -1, -math.inf, -math.inf, -math.inf


class Known:
    """The state of a run that follows from its events. Call `apply` with each event after it was judged."""

    def __init__(self, rules: Rules):
        self.rules = rules
        self.branches: dict[int, Branch] = {}
        self.lineage = 0
        """Lineage of the newest start."""
        self.safe = 0
        """Steps of the newest checkpoint that survives whatever this run promises to survive."""
        self.ever_head = 0
        """Maximum head of any branch."""
        self.engines: dict[str, Engine] = defaultdict(Engine)
        self.published: dict[tuple[int, int], int] = {}
        """Keys that identify published weights, by lineage and version."""
        self.newest, self.newest_at = -1, math.inf
        """The version that this lineage published last, and the time."""
        self.sent: dict[str, dict[int, Facts]] = defaultdict(dict)
        """All rollouts that were ever sent, by trajectory and content."""
        self.kept: dict[str, list[Facts]] = {}
        """Acknowledged trajectories that are not in a safe checkpoint, each with all its rollouts that were sent."""
        self.here: dict[str, float] = {}
        """Time since which each untrained trajectory is here in this lineage."""
        self.held: dict[str, int] = {}
        """Bytes of each trajectory that this learner acknowledged and has not trained."""
        self.leases: dict[tuple[int, int], Lease] = {}
        """The last lease of each episode in this lineage, by group and episode."""
        self.leased_to = -1
        """The newest group that has or had a slot."""
        self.asked: dict[int, float] = {}
        """Time of the learner's last report of missing episodes, by group."""
        self.files: dict[int, dict[str, int]] = defaultdict(dict)
        """Sizes of the files of the spool in bytes, by group and name."""
        self.spoiled = False
        """True if a disk failed: files that could not be removed stay until the next start."""
        self.cut_short = False
        """True if a process of this start was killed, or power failed: leftovers are removed by the next start."""
        self.quiet = False
        """True if the last fault is over."""
        self.calm = math.inf
        """Time from which on the effects of the last fault are over, too: connections that it silenced are given up."""
        self.answering = math.inf
        """Time since which the conductor answers without a pause."""
        self._answered = -math.inf
        """Time of the conductor's last answer."""
        self.late: dict[tuple[str, str], bool] = {}
        """Deliveries to this learner, by generator and trajectory: True if all of them were in outdated sessions."""
        self.deadline = math.inf
        """Time by which the next step must be made."""
        self.failed: Counter[int] = Counter()
        """Number of failures of the environment, by task."""
        self.evaluating: int | None = None
        """The step whose evaluation is being played; None if there is none."""
        self.skipped: set[int] = set()
        """Steps of this branch whose evaluation was due while another one was being played."""
        self.given_up: set[int] = set()
        """Steps whose evaluation was given up by a generator, or ended with the run when a later one was due by the
        next start."""
        self.evaluated_tasks: tuple[int, ...] = ()
        """Tasks of the last evaluation."""
        self._sent_here: dict[str, dict[int, Facts]] = defaultdict(dict)
        """All rollouts that were sent to this learner, by trajectory and content."""
        self._apply = {
            Began: self._began,
            Lost: self._lost,
            PowerFailed: self._power_failed,
            Leased: self._leased,
            Asked: self._asked,
            Installing: self._installing,
            Installed: self._installed,
            GaveUp: self._gave_up,
            Looked: self._looked,
            Placed: self._placed,
            Arrived: self._arrived,
            Fetched: self._fetched,
            Passed: self._passed,
            Plays: self._plays,
            Failed: self._failed,
            Delivered: self._delivered,
            Sent: self._was_sent,
            Acknowledged: self._acknowledged,
            Trained: self._trained,
            Published: self._published,
            Saved: self._saved,
            Stored: self._stored,
            Unlinked: self._unlinked,
            Evaluating: self._evaluating,
            Evaluated: self._evaluated,
            NotEvaluated: self._not_evaluated,
            Injected: self._injected,
            Quiet: self._quiet,
            Finished: self._finished,
        }

    def apply(self, event: Event) -> None:
        """Record that an event has happened."""
        if (change := self._apply.get(type(event))) is not None:
            change(event)  # type: ignore[operator]

    @property
    def branch(self) -> Branch:
        """The branch of the newest start."""
        return self.branches[self.lineage]

    @property
    def horizon(self) -> int:
        """The first group that was never accepted for being urgent, regardless of memory credit and disk."""
        return self.ever_head + self.rules.urgent

    def size(self, name: str) -> int:
        """Return the bytes that this learner holds of an acknowledged trajectory: those of its smallest rollout."""
        return min((f.nbytes for f in self._sent_here[name].values()), default=0)

    def most_held(self) -> int:
        """Return the maximum bytes that this learner may hold: of everything that was sent to it, except what steps
        before the newest one trained."""
        branch = self.branch
        playings = (list(of.values()) for of in self._sent_here.values())
        untrained = (p for p in playings if branch.trained.get(p[0].group, len(branch.steps)) >= len(branch.steps))
        return sum(max(f.nbytes for f in p) for p in untrained)

    def is_complete(self, group: int) -> bool:
        """Return whether all episodes of a group were acknowledged and none is trained."""
        return all(format_trajectory_id(group, i) in self.here for i in range(self.rules.group_size))

    def is_unsaved(self, name: str) -> bool:
        """Return whether a trajectory was sampled by weights that a start from the newest checkpoint rolls back, though
        its group has a slot then."""
        branch = self.branch
        f = next((f for f in self.kept.get(name, ()) if f.lineage == self.lineage and f.versions), None)
        if f is None or branch.made[f.versions[-1]] <= self.safe:
            return False
        return f.group < sum(len(step.groups) for step in branch.steps[: self.safe]) + self.rules.slots

    def may_train(self, playings: Iterable[Facts], branch: Branch) -> bool:
        """Return whether a learner that begins with this branch accepts a kept trajectory, whichever of its rollouts
        was kept."""
        return all(self._may_train(playing, branch) for playing in playings)

    def _may_train(self, f: Facts, branch: Branch) -> bool:
        oldest, newest = (f.versions[0], f.versions[-1]) if f.versions else (branch.version, -1)
        of = self.branches[f.lineage]
        return (
            f.group not in branch.trained
            and f.group < len(branch.trained) + self.rules.slots
            and branch.version - oldest <= self.rules.age_bound
            and newest <= branch.version
            and leads_to(of, newest if f.versions else min(of.made), branch)
        )

    # -- what each event changes ---------------------------------------------------------------------------------------

    def _began(self, event: Began) -> None:
        branch = Branch(event.lineage, self.branches.get(event.parent), event.step, event.version)
        self.branches[event.lineage], self.lineage = branch, event.lineage
        self.cut_short = False
        if self.rules.durable != "power":  # the end of a process undoes no rename
            self.safe = max(self.safe, event.step)
        for engine in self.engines.values():
            engine.begins()
        self.newest, self.newest_at = -1, math.inf
        for steps in (self.skipped, self.given_up):  # a start begins the last one that was due, if it is missing
            steps &= set(range(self.last_due(event.step)))
        if self.evaluating is not None and self.evaluating < self.last_due(event.step):
            self.given_up |= {self.evaluating, self.last_due(self.evaluating)}
        self.evaluating = None
        for of_the_past in (self.leases, self.asked, self.held, self._sent_here, self.late):
            of_the_past.clear()
        if self.rules.durable == "nothing":
            self.kept.clear()
        taken = [name for name, playings in self.kept.items() if self.may_train(playings, branch)]
        self.here = dict.fromkeys(taken, -math.inf)
        # Trained only in a checkpoint that is not safe: the training may be rolled back once more.
        held = [name for name, playings in self.kept.items() if branch.trained.get(playings[0].group, 0) > self.safe]
        self.kept = {name: self.kept[name] for name in (*taken, *held)}
        self.leased_to = max([-1, *branch.trained, *(playings[0].group for playings in self.kept.values())])

    def _lost(self, event: Lost) -> None:
        if event.who in self.engines:
            self.engines[event.who].ended()
        if event.who == "learner" and self.rules.durable == "nothing":
            self.kept.clear()
            self.here.clear()

    def _power_failed(self, event: PowerFailed) -> None:
        if self.rules.durable != "power":
            self.kept.clear()
            self.here.clear()
            self.files.clear()

    def _leased(self, event: Leased) -> None:
        engine = self.engines[event.generator]
        if event.at - engine.heard > self.rules.silence_seconds:
            engine.loose = event.at
        engine.heard = event.at
        if event.at - self._answered > PAUSE_SECONDS:
            self.answering = event.at
        self._answered = event.at
        for group, episodes in event.leases:
            self.leased_to = max(self.leased_to, group)
            for episode in episodes:
                self.leases[group, episode] = Lease(event.generator, engine.process - event.ended, event.at)

    def _asked(self, event: Asked) -> None:
        self.asked |= dict.fromkeys(event.missing, event.at)
        for group, lacking in event.missing.items():
            for episode in range(self.rules.group_size):
                name = format_trajectory_id(group, episode)
                if episode not in lacking and group not in self.branch.trained and name not in self.here:
                    self._is_here(name, list(self.sent[name].values()), event.at)

    def _is_here(self, name: str, playings: list[Facts], at: float) -> None:
        """Record that the learner says that it has a trajectory."""
        if playings:
            self.here[name], self.kept[name] = at, playings

    def _installing(self, event: Installing) -> None:
        self.engines[event.generator].installing = event.at

    def _installed(self, event: Installed) -> None:
        engine = self.engines[event.generator]
        engine.versions.append(event.version)
        engine.newest = max(engine.newest, event.version)
        engine.installing, engine.told = None, event.at
        others = (other for name, other in self.engines.items() if name != event.generator)
        engine.current = max((other.versions[-1] for other in others if other.versions), default=-1)

    def _looked(self, event: Looked) -> None:
        self.engines[event.generator].fetching = event.at

    def _gave_up(self, event: GaveUp) -> None:
        engine = self.engines[event.generator]
        engine.installing = engine.fetching = None

    def _placed(self, event: Placed) -> None:
        engine = self.engines[event.generator]
        if engine.fetching is not None:  # otherwise the answer is late
            engine.fetching = event.at

    def _arrived(self, event: Arrived) -> None:
        self.engines[event.generator].fetching = None

    def _fetched(self, event: Fetched) -> None:
        engine = self.engines[event.generator]
        engine.uses, engine.fetching = event.file, None

    def _passed(self, event: Passed) -> None:
        for name in event.frozen:
            if name in self.engines and self.engines[name].fetching is not None:
                self.engines[name].fetching = event.at

    def _plays(self, event: Plays) -> None:
        self.engines[event.generator].plays = event.at

    def _failed(self, event: Failed) -> None:
        self.failed[event.task] += 1

    def _delivered(self, event: Delivered) -> None:
        for name in event.ids:
            self.late[event.generator, name] = self.late.get((event.generator, name), True) and not event.current

    def _was_sent(self, event: Sent) -> None:
        f = event.trajectory
        self.sent[f.trajectory_id].setdefault(f.content, f)
        self._sent_here[f.trajectory_id].setdefault(f.content, f)

    def _acknowledged(self, event: Acknowledged) -> None:
        for name in event.ids:
            playings = list(self._sent_here[name].values())
            if playings and playings[0].group not in self.branch.trained and name not in self.held:
                self.held[name] = self.size(name)
                if name not in self.here:
                    self._is_here(name, playings, event.at)

    def _trained(self, event: Trained) -> None:
        rules, branch = self.rules, self.branch
        groups = tuple(members[0].group for members in event.groups)
        publishes = branch.since + 1 == rules.steps_per_publication or len(branch.steps) + 1 == rules.steps
        branch.add(groups, event.updates, makes_version=publishes)
        self.ever_head = max(self.ever_head, branch.head)
        for members in event.groups:
            for f in members:
                self.here.pop(f.trajectory_id, None)
                self.held.pop(f.trajectory_id, None)
        if self.evaluating is not None and rules.evaluate_every and event.step % rules.evaluate_every == 0:
            self.skipped.add(event.step)
        if self.quiet:
            self.deadline = event.at + rules.step_seconds

    def _published(self, event: Published) -> None:
        self.published[event.lineage, event.version] = event.weights
        if event.lineage == self.lineage:
            self.newest, self.newest_at = event.version, event.at

    def _saved(self, event: Saved) -> None:
        self.safe = max(self.safe, event.step)
        over = {group for group, step in self.branch.trained.items() if step <= event.step}
        self.kept = {name: playings for name, playings in self.kept.items() if playings[0].group not in over}

    def _stored(self, event: Stored) -> None:
        self.files[event.group][event.file] = event.nbytes

    def _unlinked(self, event: Unlinked) -> None:
        self.files[event.group].pop(event.file, None)

    def last_due(self, step: int) -> int:
        """Return the last step up to `step` whose evaluation is due."""
        return step - step % self.rules.evaluate_every if self.rules.evaluate_every else 0

    def _evaluating(self, event: Evaluating) -> None:
        self.evaluating = event.step

    def _evaluated(self, event: Evaluated) -> None:
        self.evaluating, self.evaluated_tasks = None, event.tasks

    def _not_evaluated(self, event: NotEvaluated) -> None:
        if self.evaluating is not None:
            self.given_up |= {self.evaluating, self.last_due(self.evaluating)}
            self.evaluating = None

    def _injected(self, event: Injected) -> None:
        self.spoiled |= any(each in event.what for each in ("disk", "short", "descriptors"))
        self.cut_short |= "kill" in event.what or "power" in event.what

    def _quiet(self, event: Quiet) -> None:
        self.quiet, self.deadline = True, event.at + self.rules.first_seconds
        self.calm = event.at + CALM_SECONDS

    def _finished(self, event: Finished) -> None:
        self.deadline = math.inf
