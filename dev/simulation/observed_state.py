"""Knowledge about a simulated run, derived from its events: the tree of its starts, and the state
for the rules. Pure.

Each start of the run is a branch. It shares the steps before its checkpoint with its parent, as the
very same objects. So two names (lineage, version) of weights are compared by the steps that made
them, and not by what the run states about itself.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

from dev.simulation.history import (
    CheckpointSaved,
    EpisodeFailed,
    EvaluationBegan,
    EvaluationEnded,
    EvaluationGivenUp,
    EvaluationRemoved,
    FaultReported,
    FaultsOver,
    GaveUp,
    GeneratorStopped,
    GroupsLeased,
    InstallRequested,
    LineageBegan,
    MissingReported,
    ParentAssigned,
    ParentRequested,
    PlayRequested,
    PowerFailed,
    ProcessEnded,
    RolloutFacts,
    RunEvent,
    RunFinished,
    SpoolFileGrew,
    SpoolFileRemoved,
    StepTrained,
    TimePassed,
    TrajectoriesAcknowledged,
    TrajectoriesDelivered,
    TrajectoryQuarantined,
    TrajectorySent,
    VersionArrived,
    VersionFetched,
    WeightsInstalled,
    WeightsPublished,
)
from r3async.data.tokens import format_trajectory_id


@dataclass(frozen=True, eq=False)
class TrainedStep:
    """One training step. `version` is the newest one when the step was made; this step, or a later
    one, makes the next."""

    number: int
    version: int
    groups: tuple[int, ...]
    updates: int = 1
    """Number of updates of the weights."""


class LineageBranch:
    """The steps of one lineage, beginning with those that it shares with its parent."""

    def __init__(
        self, lineage: int, parent: LineageBranch | None = None, step: int = 0, version: int = 0
    ):
        """Create a branch that begins with the first `step` steps of `parent`, whose weights it
        calls `version`."""
        self.lineage = lineage
        self.version = version
        self.steps: list[TrainedStep] = parent.steps[:step] if parent is not None else []
        self.first_step = len(self.steps)
        """The number of steps that it began with."""
        self.step_by_group: dict[int, int] = {
            group: step.number for step in self.steps for group in step.groups
        }
        """The step that trained each group, by group."""
        self.step_counts: dict[int, int] = {}
        """The number of steps that made each version, by version."""
        if parent is not None:
            self.step_counts = {v: count for v, count in parent.step_counts.items() if v < version}
        self.step_counts[version] = len(self.steps)
        self.oldest_untrained = 0
        """The oldest untrained group."""
        self._advance_head()

    @property
    def steps_since_version(self) -> int:
        """The number of steps since the newest version was made."""
        return sum(step.version == self.version for step in self.steps)

    def add_step(self, groups: tuple[int, ...], updates: int = 1, *, makes_version: bool) -> None:
        """Add a step. Its groups are not judged here."""
        self.steps.append(TrainedStep(len(self.steps) + 1, self.version, groups, updates))
        for group in groups:
            self.step_by_group.setdefault(group, len(self.steps))
        self._advance_head()
        if makes_version:
            self.version += 1
            self.step_counts[self.version] = len(self.steps)

    def _advance_head(self) -> None:
        while self.oldest_untrained in self.step_by_group:
            self.oldest_untrained += 1

    def steps_behind(self, version: int) -> Sequence[TrainedStep] | None:
        """Return the steps that made weights `version`; None if no step made them."""
        count = self.step_counts.get(version)
        return None if count is None else self.steps[:count]

    def groups_in(self, version: int) -> int:
        """Return how many groups weights `version` were trained from."""
        return sum(len(step.groups) for step in self.steps_behind(version) or ())


def same_weights(
    one: LineageBranch, one_version: int, other: LineageBranch, other_version: int
) -> bool:
    """Return whether `one_version` of `one` and `other_version` of `other` were made
    by the same steps."""
    ours = one.steps_behind(one_version)
    theirs = other.steps_behind(other_version)
    return (
        ours is not None
        and theirs is not None
        and _share_beginning(ours, theirs)
        and len(ours) == len(theirs)
    )


def leads_to(sampled_by: LineageBranch, version: int, learner: LineageBranch) -> bool:
    """Return whether weights `version` of `sampled_by` are in the past of the current weights of
    `learner`: the steps that made them are the first steps of `learner`."""
    steps = sampled_by.steps_behind(version)
    return (
        steps is not None
        and len(steps) <= len(learner.steps)
        and _share_beginning(steps, learner.steps)
    )


def _share_beginning(ours: Sequence[TrainedStep], theirs: Sequence[TrainedStep]) -> bool:
    """Return whether two sequences of steps are the same, up to the end of the shorter one."""
    return all(a is b for a, b in zip(ours, theirs, strict=False))


# What is known about a run after the events so far. The invariants use it to judge the next event.


CALM_SECONDS = 90.0
"""Seconds from the end of the last fault until its effects are over: silent connections are
noticed after a minute."""
PAUSE_SECONDS = 10.0
"""Seconds between two answers of the conductor that count as a pause. Generators ask at
least twice as often."""


class RunGuarantees(msgspec.Struct, frozen=True):
    """The guarantees that follow from the run's configuration.

    Attributes:
        age_bound: Maximum age of a trained token in versions.
        window: The setting `schedule.window`.
        urgent: Number of groups, from the oldest on, that are accepted regardless of memory
            credit and disk.
        more_groups: True if a step takes more groups to reach its number of tokens.
        replaced_groups: Maximum number of additional groups that replace groups with zero variance.
        durable: What an acknowledged trajectory survives: `nothing`, the end of any `process`, or a
            failure of `power`.
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


class EpisodeLease(NamedTuple):
    """A lease. `ended_processes` is the number of processes of its owner that had ended before."""

    owner: str
    ended_processes: int
    at: float


class GeneratorState:
    """The state of one generator."""

    def __init__(self) -> None:
        self.ended_processes = 0
        """Number of its processes that have ended."""
        self.versions: list[int] = []
        """Versions that its current process installed."""
        self.newest_version = -1
        """The newest version that any of its processes installed in this lineage."""
        self.last_answer = -math.inf
        """Time of the last answer to its requests for work."""
        self.loose_before = -math.inf
        """Time before which its leases may have been taken back, because it was silent."""
        self.last_report = -math.inf
        """Time at which it last reported an installation."""
        self.installing_since: float | None = None
        """Time since which its current process is installing a version; None if it is not."""
        self.installing_version = -1
        """The version that it was last asked to install."""
        self.fetching_since: float | None = None
        """Time since which it waits for weights: of its last request for a source, or when it was
        last seen stopped. None if it does not wait."""
        self.used_file = ""
        """File of the version that its current process fetched last."""
        self.playing_since: float | None = None
        """Time since which its current process plays; None if it does not."""
        self.newest_of_others = -1
        """The newest version that others had when its current process completed its
        last installation."""

    def end_process(self) -> None:
        self.ended_processes += 1
        self.versions = []
        self.newest_of_others = -1
        self.used_file = ""
        self.installing_since = self.fetching_since = self.playing_since = None

    def begin_lineage(self) -> None:
        """Reset for a new lineage."""
        self.end_process()
        self.newest_version = -1
        self.last_answer = -math.inf
        self.loose_before = -math.inf
        self.last_report = -math.inf


class ObservedState:
    """The state of a run that follows from its events. Call `apply_event` with each event
    after it was judged."""

    def __init__(self, guarantees: RunGuarantees):
        self.guarantees = guarantees
        self.branches: dict[int, LineageBranch] = {}
        self.lineage = 0
        """Lineage of the newest start."""
        self.safe_steps = 0
        """Steps of the newest checkpoint that survives whatever this run promises to survive."""
        self.max_untrained = 0
        """Maximum `oldest_untrained` of any branch."""
        self.generators: dict[str, GeneratorState] = defaultdict(GeneratorState)
        self.published_keys: dict[tuple[int, int], int] = {}
        """Keys that identify published weights, by lineage and version."""
        self.newest_version = -1
        self.newest_at = math.inf
        """The version that this lineage published last, and the time."""
        self.sent_rollouts: dict[str, dict[int, RolloutFacts]] = defaultdict(dict)
        """All rollouts that were ever sent, by trajectory and content."""
        self.unsaved_rollouts: dict[str, list[RolloutFacts]] = {}
        """Acknowledged trajectories that are not in a safe checkpoint, each with all its
        rollouts that were sent."""
        self.present_since: dict[str, float] = {}
        """Time since which each untrained trajectory is here in this lineage."""
        self.held_bytes: dict[str, int] = {}
        """Bytes of each trajectory that this learner acknowledged and has not trained."""
        self.leases: dict[tuple[int, int], EpisodeLease] = {}
        """The last lease of each episode in this lineage, by group and episode."""
        self.newest_leased = -1
        """The newest group that has or had a slot."""
        self.missing_reported_at: dict[int, float] = {}
        """Time of the learner's last report of missing episodes, by group."""
        self.spool_files: dict[int, dict[str, int]] = defaultdict(dict)
        """Sizes of the files of the spool in bytes, by group and name."""
        self.disk_failed = False
        """True if a disk failed: files that could not be removed stay until the next start."""
        self.cut_short = False
        """True if a process of this start was killed, or power failed: leftovers are removed
        by the next start."""
        self.faults_over = False
        """True if the last fault is over."""
        self.calm_since = math.inf
        """Time from which on the effects of the last fault are over, too: connections that it
        silenced are given up."""
        self.learner_ended = False
        """True if the learner of this lineage has ended, so that the run is
        about to start again."""
        self._answering_since = math.inf
        """Time since which the conductor answers without a pause, as far as its answers show."""
        self._last_answer = -math.inf
        """Time of the conductor's last answer."""
        self.outdated_deliveries: dict[tuple[str, str], bool] = {}
        """Deliveries to this learner, by generator and trajectory: True if all of them were in
        outdated sessions."""
        self.step_deadline = math.inf
        """Time by which the next step must be made."""
        self.failure_counts: Counter[int] = Counter()
        """Number of failures of the environment, by task."""
        self.evaluating_step: int | None = None
        """The step whose evaluation is being played; None if there is none."""
        self.skipped_evaluations: set[int] = set()
        """Steps of this branch whose evaluation was due while another one was being played."""
        self.given_up_evaluations: set[int] = set()
        """Steps whose evaluation was given up by a generator, or ended with the run when a later
        one was due by the next start."""
        self.evaluated_tasks: tuple[int, ...] = ()
        """Tasks of the last evaluation."""
        self.stored_evaluations: set[int] = set()
        """Steps whose evaluation's result is in a file."""
        self.quarantined_groups: set[int] = set()
        """Groups of which the quarantine got a trajectory in this lineage."""
        self._sent_to_learner: dict[str, dict[int, RolloutFacts]] = defaultdict(dict)
        """All rollouts that were sent to this learner, by trajectory and content."""
        self._handlers = {
            LineageBegan: self._on_lineage_began,
            ProcessEnded: self._on_process_ended,
            PowerFailed: self._on_power_failed,
            GroupsLeased: self._on_groups_leased,
            MissingReported: self._on_missing_reported,
            InstallRequested: self._on_install_requested,
            WeightsInstalled: self._on_weights_installed,
            GaveUp: self._on_gave_up,
            GeneratorStopped: self._on_generator_stopped,
            ParentRequested: self._on_parent_requested,
            ParentAssigned: self._on_parent_assigned,
            VersionArrived: self._on_version_arrived,
            VersionFetched: self._on_version_fetched,
            TimePassed: self._on_time_passed,
            PlayRequested: self._on_play_requested,
            EpisodeFailed: self._on_episode_failed,
            TrajectoriesDelivered: self._on_trajectories_delivered,
            TrajectorySent: self._on_trajectory_sent,
            TrajectoriesAcknowledged: self._on_trajectories_acknowledged,
            StepTrained: self._on_step_trained,
            WeightsPublished: self._on_weights_published,
            CheckpointSaved: self._on_checkpoint_saved,
            SpoolFileGrew: self._on_spool_file_grew,
            SpoolFileRemoved: self._on_spool_file_removed,
            EvaluationBegan: self._on_evaluation_began,
            EvaluationEnded: self._on_evaluation_ended,
            EvaluationGivenUp: self._on_evaluation_given_up,
            EvaluationRemoved: self._on_evaluation_removed,
            TrajectoryQuarantined: self._on_trajectory_quarantined,
            FaultReported: self._on_fault_reported,
            FaultsOver: self._on_faults_over,
            RunFinished: self._on_run_finished,
        }

    def apply_event(self, event: RunEvent) -> None:
        """Record that an event has happened."""
        change = self._handlers.get(type(event))
        if change is not None:
            change(event)  # type: ignore[operator]

    def answering_since(self, at: float) -> float:
        """Return the time since which the conductor answers without a pause, given that it
        answers at `at`."""
        return at if at - self._last_answer > PAUSE_SECONDS else self._answering_since

    @property
    def current_branch(self) -> LineageBranch:
        """The branch of the newest start."""
        return self.branches[self.lineage]

    @property
    def urgent_end(self) -> int:
        """The first group that was never accepted for being urgent, regardless of memory
        credit and disk."""
        return self.max_untrained + self.guarantees.urgent

    def acknowledged_bytes(self, name: str) -> int:
        """Return the bytes that this learner holds of an acknowledged trajectory: those of its
        smallest rollout."""
        return min((f.nbytes for f in self._sent_to_learner[name].values()), default=0)

    def max_held_bytes(self) -> int:
        """Return the maximum bytes that this learner may hold: of everything that was sent to it,
        except what steps before the newest one trained."""
        branch = self.current_branch
        playings = (list(of.values()) for of in self._sent_to_learner.values())
        untrained = (
            p
            for p in playings
            if branch.step_by_group.get(p[0].group, len(branch.steps)) >= len(branch.steps)
        )
        return sum(max(f.nbytes for f in p) for p in untrained)

    def is_complete_group(self, group: int) -> bool:
        """Return whether all episodes of a group were acknowledged and none is trained."""
        return all(
            format_trajectory_id(group, i) in self.present_since
            for i in range(self.guarantees.group_size)
        )

    def is_playing(self, generator: str) -> bool:
        """Return whether a generator was leased episodes of which the learner has nothing yet."""
        return any(
            lease.owner == generator
            and lease.ended_processes == self.generators[generator].ended_processes
            and group not in self.current_branch.step_by_group
            and format_trajectory_id(group, episode) not in self.present_since
            for (group, episode), lease in self.leases.items()
        )

    def is_unsaved(self, name: str) -> bool:
        """Return whether a trajectory was sampled by weights that a start from the newest
        checkpoint rolls back, though its group has a slot then."""
        branch = self.current_branch
        f = next(
            (
                f
                for f in self.unsaved_rollouts.get(name, ())
                if f.lineage == self.lineage and f.versions
            ),
            None,
        )
        if f is None or branch.step_counts[f.versions[-1]] <= self.safe_steps:
            return False
        return (
            f.group
            < sum(len(step.groups) for step in branch.steps[: self.safe_steps])
            + self.guarantees.slots
        )

    def may_train(self, playings: Iterable[RolloutFacts], branch: LineageBranch) -> bool:
        """Return whether a learner that begins with this branch accepts a kept trajectory,
        whichever of its rollouts was kept."""
        return all(self._may_train(playing, branch) for playing in playings)

    def _may_train(self, f: RolloutFacts, branch: LineageBranch) -> bool:
        if f.versions:
            oldest = f.versions[0]
            newest = f.versions[-1]
        else:
            oldest = branch.version
            newest = -1
        of = self.branches[f.lineage]
        return (
            f.group not in branch.step_by_group
            and f.group < len(branch.step_by_group) + self.guarantees.slots
            and branch.version - oldest <= self.guarantees.age_bound
            and newest <= branch.version
            and leads_to(of, newest if f.versions else min(of.step_counts), branch)
        )

    # -- what each event changes -------------------------------------------------------------------

    def _on_lineage_began(self, event: LineageBegan) -> None:
        branch = LineageBranch(
            event.lineage, self.branches.get(event.parent), event.step, event.version
        )
        self.branches[event.lineage] = branch
        self.lineage = event.lineage
        self.cut_short = self.learner_ended = False
        if self.guarantees.durable != "power":  # the end of a process undoes no rename
            self.safe_steps = max(self.safe_steps, event.step)
        for generator in self.generators.values():
            generator.begin_lineage()
        self.newest_version = -1
        self.newest_at = math.inf
        for steps in (
            self.skipped_evaluations,
            self.given_up_evaluations,
        ):  # a start begins the last one that was due, if it is missing
            steps &= set(range(self.last_due_step(event.step)))
        if self.evaluating_step is not None and self.evaluating_step < self.last_due_step(
            event.step
        ):
            self.given_up_evaluations |= {
                self.evaluating_step,
                self.last_due_step(self.evaluating_step),
            }
        self.evaluating_step = None
        for of_the_past in (
            self.leases,
            self.missing_reported_at,
            self.held_bytes,
            self._sent_to_learner,
            self.outdated_deliveries,
            self.quarantined_groups,
        ):
            of_the_past.clear()
        if self.guarantees.durable == "nothing":
            self.unsaved_rollouts.clear()
        trainable = [
            name
            for name, playings in self.unsaved_rollouts.items()
            if self.may_train(playings, branch)
        ]
        self.present_since = dict.fromkeys(trainable, -math.inf)
        # Trained only in a checkpoint that is not safe: the training may be rolled back once more.
        trained_unsafely = [
            name
            for name, playings in self.unsaved_rollouts.items()
            if branch.step_by_group.get(playings[0].group, 0) > self.safe_steps
        ]
        self.unsaved_rollouts = {
            name: self.unsaved_rollouts[name] for name in (*trainable, *trained_unsafely)
        }
        self.newest_leased = max(
            [
                -1,
                *branch.step_by_group,
                *(playings[0].group for playings in self.unsaved_rollouts.values()),
            ]
        )

    def _on_process_ended(self, event: ProcessEnded) -> None:
        if event.who in self.generators:
            self.generators[event.who].end_process()
        self.learner_ended |= event.who == "learner"
        if event.who == "learner" and self.guarantees.durable == "nothing":
            self.unsaved_rollouts.clear()
            self.present_since.clear()

    def _on_power_failed(self, event: PowerFailed) -> None:
        self.stored_evaluations.clear()  # their names may not have survived
        if self.guarantees.durable != "power":
            self.unsaved_rollouts.clear()
            self.present_since.clear()
            self.spool_files.clear()

    def _on_groups_leased(self, event: GroupsLeased) -> None:
        generator = self.generators[event.generator]
        if event.at - generator.last_answer > self.guarantees.silence_seconds:
            generator.loose_before = event.at
        generator.last_answer = event.at
        self._answering_since = self.answering_since(event.at)
        self._last_answer = event.at
        for group, episodes in event.leases:
            self.newest_leased = max(self.newest_leased, group)
            for episode in episodes:
                self.leases[group, episode] = EpisodeLease(
                    event.generator, generator.ended_processes - event.ended, event.at
                )

    def _on_missing_reported(self, event: MissingReported) -> None:
        self.missing_reported_at |= dict.fromkeys(event.missing, event.at)
        for group, lacking in event.missing.items():
            for episode in range(self.guarantees.group_size):
                name = format_trajectory_id(group, episode)
                if (
                    episode not in lacking
                    and group not in self.current_branch.step_by_group
                    and name not in self.present_since
                ):
                    self._add_present(name, list(self.sent_rollouts[name].values()), event.at)

    def _add_present(self, name: str, playings: list[RolloutFacts], at: float) -> None:
        """Record that the learner says that it has a trajectory."""
        if playings:
            self.present_since[name] = at
            self.unsaved_rollouts[name] = playings

    def _on_install_requested(self, event: InstallRequested) -> None:
        generator = self.generators[event.generator]
        generator.installing_since = event.at
        generator.installing_version = event.version

    def _on_weights_installed(self, event: WeightsInstalled) -> None:
        generator = self.generators[event.generator]
        generator.versions.append(event.version)
        generator.newest_version = max(generator.newest_version, event.version)
        generator.installing_since = None
        generator.last_report = event.at
        others = (other for name, other in self.generators.items() if name != event.generator)
        generator.newest_of_others = max(
            (other.versions[-1] for other in others if other.versions), default=-1
        )

    def _on_parent_requested(self, event: ParentRequested) -> None:
        self.generators[event.generator].fetching_since = event.at

    def _on_gave_up(self, event: GaveUp) -> None:
        generator = self.generators[event.generator]
        generator.installing_since = generator.fetching_since = None

    def _on_generator_stopped(self, event: GeneratorStopped) -> None:
        generator = self.generators[event.generator]
        generator.installing_since = generator.fetching_since = None
        generator.used_file = ""

    def _on_parent_assigned(self, event: ParentAssigned) -> None:
        generator = self.generators[event.generator]
        if generator.fetching_since is not None:  # otherwise the answer is late
            generator.fetching_since = event.at

    def _on_version_arrived(self, event: VersionArrived) -> None:
        self.generators[event.generator].fetching_since = None

    def _on_version_fetched(self, event: VersionFetched) -> None:
        generator = self.generators[event.generator]
        generator.used_file = event.file
        generator.fetching_since = None

    def _on_time_passed(self, event: TimePassed) -> None:
        for name in event.frozen:
            if name in self.generators and self.generators[name].fetching_since is not None:
                self.generators[name].fetching_since = event.at

    def _on_play_requested(self, event: PlayRequested) -> None:
        self.generators[event.generator].playing_since = event.at

    def _on_episode_failed(self, event: EpisodeFailed) -> None:
        self.failure_counts[event.task] += 1

    def _on_trajectories_delivered(self, event: TrajectoriesDelivered) -> None:
        for name in event.ids:
            self.outdated_deliveries[event.generator, name] = (
                self.outdated_deliveries.get((event.generator, name), True) and not event.current
            )

    def _on_trajectory_sent(self, event: TrajectorySent) -> None:
        f = event.trajectory
        self.sent_rollouts[f.trajectory_id].setdefault(f.content, f)
        self._sent_to_learner[f.trajectory_id].setdefault(f.content, f)

    def _on_trajectories_acknowledged(self, event: TrajectoriesAcknowledged) -> None:
        for name in event.ids:
            playings = list(self._sent_to_learner[name].values())
            if (
                playings
                and playings[0].group not in self.current_branch.step_by_group
                and name not in self.held_bytes
            ):
                self.held_bytes[name] = self.acknowledged_bytes(name)
                if name not in self.present_since:
                    self._add_present(name, playings, event.at)

    def _on_step_trained(self, event: StepTrained) -> None:
        guarantees = self.guarantees
        branch = self.current_branch
        groups = tuple(members[0].group for members in event.groups)
        publishes = (
            branch.steps_since_version + 1 == guarantees.steps_per_publication
            or len(branch.steps) + 1 == guarantees.steps
        )
        branch.add_step(groups, event.updates, makes_version=publishes)
        self.max_untrained = max(self.max_untrained, branch.oldest_untrained)
        for members in event.groups:
            for f in members:
                self.present_since.pop(f.trajectory_id, None)
                self.held_bytes.pop(f.trajectory_id, None)
        if (
            self.evaluating_step is not None
            and guarantees.evaluate_every
            and event.step % guarantees.evaluate_every == 0
        ):
            self.skipped_evaluations.add(event.step)
        if self.faults_over:
            self.step_deadline = event.at + guarantees.step_seconds

    def _on_weights_published(self, event: WeightsPublished) -> None:
        self.published_keys[event.lineage, event.version] = event.weights
        if event.lineage == self.lineage:
            self.newest_version = event.version
            self.newest_at = event.at

    def _on_checkpoint_saved(self, event: CheckpointSaved) -> None:
        self.safe_steps = max(self.safe_steps, event.step)
        over = {
            group for group, step in self.current_branch.step_by_group.items() if step <= event.step
        }
        self.unsaved_rollouts = {
            name: playings
            for name, playings in self.unsaved_rollouts.items()
            if playings[0].group not in over
        }

    def _on_spool_file_grew(self, event: SpoolFileGrew) -> None:
        self.spool_files[event.group][event.file] = event.nbytes

    def _on_spool_file_removed(self, event: SpoolFileRemoved) -> None:
        self.spool_files[event.group].pop(event.file, None)

    def last_due_step(self, step: int) -> int:
        """Return the last step up to `step` whose evaluation is due."""
        return step - step % self.guarantees.evaluate_every if self.guarantees.evaluate_every else 0

    def _on_trajectory_quarantined(self, event: TrajectoryQuarantined) -> None:
        self.quarantined_groups.add(event.group)

    def _on_evaluation_began(self, event: EvaluationBegan) -> None:
        self.evaluating_step = event.step
        self.stored_evaluations.discard(event.step)

    def _on_evaluation_removed(self, event: EvaluationRemoved) -> None:
        self.stored_evaluations.discard(event.step)

    def _on_evaluation_ended(self, event: EvaluationEnded) -> None:
        self.stored_evaluations.add(event.step)
        self.evaluating_step = None
        self.evaluated_tasks = event.tasks
        self._extend_after_last_step(event.at)

    def _on_evaluation_given_up(self, event: EvaluationGivenUp) -> None:
        if self.evaluating_step is not None:
            self.given_up_evaluations |= {
                self.evaluating_step,
                self.last_due_step(self.evaluating_step),
            }
            self.evaluating_step = None
            self._extend_after_last_step(event.at)

    def _extend_after_last_step(self, at: float) -> None:
        """After the last step, evaluations are what is left to do, one after the other."""
        if self.faults_over and len(self.current_branch.steps) == self.guarantees.steps:
            self.step_deadline = at + self.guarantees.step_seconds

    def _on_fault_reported(self, event: FaultReported) -> None:
        self.disk_failed |= any(each in event.what for each in ("disk", "short", "descriptors"))
        self.cut_short |= "kill" in event.what or "power" in event.what

    def _on_faults_over(self, event: FaultsOver) -> None:
        self.faults_over = True
        self.step_deadline = event.at + self.guarantees.first_seconds
        self.calm_since = event.at + CALM_SECONDS

    def _on_run_finished(self, event: RunFinished) -> None:
        self.step_deadline = math.inf
