"""The invariants of a simulated run, checked at every event whatever happens to the
run. Pure functions.

A rule judges the next event, given what is known from the events before. Its docstring
states the invariant.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from dev.simulation.history import (
    EvaluationBegan,
    EvaluationEnded,
    GaveUp,
    GroupsLeased,
    GroupsLimited,
    LineageBegan,
    MissingReported,
    ParentAssigned,
    PlayRequested,
    PublishedRemoved,
    RunEvent,
    RunFinished,
    SlotsReported,
    SpoolFileGrew,
    SpoolFileRemoved,
    StepBegan,
    StepTrained,
    TimePassed,
    TrajectoriesAcknowledged,
    TrajectoryRefused,
    TrajectorySent,
    VersionArrived,
    VersionRemoved,
    WeightsInstalled,
    WeightsPublished,
)
from dev.simulation.observed_state import (
    EpisodeLease,
    ObservedState,
    RunGuarantees,
    leads_to,
    same_weights,
)
from r3async.data.tokens import format_trajectory_id
from r3async.schedule.run_ahead import max_groups_for_step

__all__ = ["RULES", "InvariantChecker", "InvariantViolated", "RunGuarantees"]


class InvariantViolated(Exception):
    """The error of a violated invariant. `name` is that of the rule; `reason` is for the user."""

    def __init__(self, name: str, reason: str):
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason


EventJudge = Callable[[ObservedState, Any], str]
"""A function that returns what is wrong with an event that is about to be applied;
"" if nothing is."""


class InvariantRule(NamedTuple):
    name: str
    events: tuple[type[RunEvent], ...]
    judge: EventJudge


def add_rule(
    rules: list[InvariantRule], name: str, *events: type[RunEvent]
) -> Callable[[EventJudge], EventJudge]:
    """Return a decorator that adds a function to `rules` as the rule `name` for these events."""

    def add_judge(judge: EventJudge) -> EventJudge:
        rules.append(InvariantRule(name, events, judge))
        return judge

    return add_judge


# Invariants of leases, delivery, storage, and the end of the run.


RECORD_BYTES = 256
"""Bytes that a trajectory takes in the spool beyond its size in memory."""

DELIVERY_RULES: list[InvariantRule] = []


@add_rule(DELIVERY_RULES, "lost", MissingReported)
def what_is_here_is_not_lacked(state: ObservedState, event: MissingReported) -> str:
    """An acknowledged trajectory is here until it is trained. The learner never reports that it
    lacks what is here.

    Without a spool, a trajectory is lost with the learner's process. With a spool it survives the
    end of every process, and with `buffer.fsync` a power failure too. It is then here in every
    later lineage that may train it: one that descends from the weights that sampled it, has not
    trained its group, has a slot for it, and may train tokens of its age."""
    for group, episodes in event.missing.items():
        for episode in episodes:
            name = format_trajectory_id(group, episode)
            if name in state.present_since:
                return (
                    f"{name} was acknowledged{_describe_since(state.present_since[name])}, and the "
                    "learner lacks it"
                )
    return ""


def _describe_since(at: float) -> str:
    return f" at {at:.3f} s" if at >= 0 else " in an earlier lineage, and kept"


@add_rule(DELIVERY_RULES, "again", GroupsLeased)
def nothing_is_played_again(state: ObservedState, event: GroupsLeased) -> str:
    """An episode is leased only if nobody has played it, nobody is playing it, and its
    group is not trained.

    An episode that is here may be leased only if it arrived after the learner was last asked what
    it lacks of the group. An episode that another generator has may be leased only when the process
    of that generator has ended, or has not reported for `supervise.silence_seconds`."""
    for group, episodes in event.leases:
        if group in state.current_branch.step_by_group:
            return (
                f"group {group} is leased, and step "
                f"{state.current_branch.step_by_group[group]} trained it"
            )
        for episode in episodes:
            name = format_trajectory_id(group, episode)
            reported_at = state.missing_reported_at.get(group)
            if name in state.present_since and (
                reported_at is None or state.present_since[name] <= reported_at
            ):
                return (
                    f"{name} is leased to {event.generator}, and was "
                    f"acknowledged{_describe_since(state.present_since[name])}"
                )
            lease = state.leases.get((group, episode))
            if lease is not None and not _may_return(state, lease, event.at):
                return (
                    f"{name} is leased to {event.generator}, and {lease.owner} has it since "
                    f"{lease.at:.3f} s"
                )
    return ""


def _may_return(state: ObservedState, lease: EpisodeLease, now: float) -> bool:
    owner = state.generators[lease.owner]
    ended = owner.ended_processes != lease.ended_processes
    return (
        ended
        or lease.at < owner.loose_before
        or now - owner.last_answer > state.guarantees.silence_seconds
    )


@add_rule(DELIVERY_RULES, "process", GroupsLeased)
def nothing_goes_to_a_process_that_was_replaced(state: ObservedState, event: GroupsLeased) -> str:
    """A call is answered with leases, or to ask again, only if the conductor knows of no later
    process of its generator: one that has ended plays nothing, and the conductor would not take
    its leases back."""
    if event.outdated and (event.leases or event.free):
        groups = [group for group, _ in event.leases]
        return (
            f"a call of an earlier process of {event.generator} is believed, and leased "
            f"groups {groups}"
        )
    return ""


@add_rule(DELIVERY_RULES, "slots", GroupsLeased)
def slots_are_conserved(state: ObservedState, event: GroupsLeased) -> str:
    """A group is leased for the first time only while a slot is free, and no group is passed over.

    Each group that was leased before and is not part of the weights that the lease names takes a
    slot. So tokens that these or newer weights sample cannot become too old."""
    guarantees = state.guarantees
    newest = state.newest_leased
    named = event.versions or [state.generators[event.generator].newest_version] * len(event.leases)
    for (group, _), version in zip(event.leases, named, strict=True):
        for passed in range(newest + 1, group):
            names = [format_trajectory_id(passed, i) for i in range(guarantees.group_size)]
            if not all(name in state.sent_rollouts for name in names):
                return f"group {group} is leased, and group {passed} never was"
        if group > newest:
            slots_taken = group + 1 - state.current_branch.groups_in(version)
            if slots_taken > guarantees.slots:
                return (
                    f"group {group} is leased to {event.generator} for version {version}: "
                    f"{slots_taken} groups are then not in these weights, and there are "
                    f"{guarantees.slots} slots"
                )
        newest = max(newest, group)
    return ""


@add_rule(DELIVERY_RULES, "slots", SlotsReported)
def no_more_slots_than_there_are(state: ObservedState, event: SlotsReported) -> str:
    """The conductor reports the right number of slots, and takes no more than there are."""
    if event.total != state.guarantees.slots or not 0 <= event.taken <= event.total:
        return (
            f"{event.taken} slots of {event.total} are taken, and there are "
            f"{state.guarantees.slots}"
        )
    return ""


@add_rule(DELIVERY_RULES, "content", TrajectoriesAcknowledged)
def only_what_was_sent_is_acknowledged(
    state: ObservedState, event: TrajectoriesAcknowledged
) -> str:
    """Every acknowledged trajectory was sent."""
    for name in event.ids:
        if name not in state.sent_rollouts:
            return f"{name} is acknowledged to {event.generator}, and nobody sent it"
    return ""


@add_rule(DELIVERY_RULES, "refused", TrajectoryRefused)
def what_is_sound_is_taken(state: ObservedState, event: TrajectoryRefused) -> str:
    """The learner accepts every trajectory that a generator of its lineage sends, unless its
    group is trained."""
    playings = state.sent_rollouts.get(event.trajectory_id, {}).values()
    if any(
        f.lineage == state.lineage and f.group not in state.current_branch.step_by_group
        for f in playings
    ):
        return f"{event.trajectory_id} of {event.generator} is refused: {event.reason}"
    return ""


@add_rule(DELIVERY_RULES, "failed", TrajectorySent)
def what_failed_once_is_played_again(state: ObservedState, event: TrajectorySent) -> str:
    """A placeholder is sent for an episode only if its environment failed more than once: it
    raised, or its process ended or hung."""
    f = event.trajectory
    if f.reward is None and state.failure_counts[f.task] < 2:
        return (
            f"{f.trajectory_id} was given up, and its environment failed "
            f"{state.failure_counts[f.task]} times"
        )
    return ""


@add_rule(DELIVERY_RULES, "memory", TrajectoriesAcknowledged)
def memory_is_bounded(state: ObservedState, event: TrajectoriesAcknowledged) -> str:
    """Acknowledged trajectories that are not trained take at most the credit of memory, or are a
    single trajectory.

    Groups that a step might have waited for are not counted. The rule applies without a spool: with
    one, trajectories may be on disk."""
    if state.guarantees.durable != "nothing":
        return ""
    sizes = state.held_bytes | {
        name: state.acknowledged_bytes(name) for name in event.ids if name not in state.held_bytes
    }
    beyond = {n: size for n, size in sizes.items() if _group_of(state, n) >= state.urgent_end}
    held_bytes = sum(beyond.values())
    if held_bytes > max(state.guarantees.credit_bytes, max(beyond.values(), default=0)):
        credit = state.guarantees.credit_bytes
        return (
            f"{held_bytes} bytes are held of groups from {state.urgent_end} on, and the "
            f"credit is {credit:g}"
        )
    return ""


@add_rule(DELIVERY_RULES, "memory", GroupsLimited)
def nobody_waits_for_memory_that_is_free(state: ObservedState, event: GroupsLimited) -> str:
    """Generators are told to wait only while the trajectories that were sent and are not trained
    may exceed the credit.

    Those that the newest step trained may still be held. The rule applies without a spool."""
    if state.guarantees.durable != "nothing":
        return ""
    most = state.max_held_bytes()
    if most <= state.guarantees.credit_bytes:
        return (
            f"{event.generator} may send groups before {event.until} only, and at most "
            f"{most} bytes are held"
        )
    return ""


def _group_of(state: ObservedState, name: str) -> int:
    return next(iter(state.sent_rollouts[name].values())).group


@add_rule(DELIVERY_RULES, "disk", SpoolFileGrew)
def the_spool_has_a_limit(state: ObservedState, event: SpoolFileGrew) -> str:
    """The spool takes at most `buffer.disk_bytes`, not counting groups that a step might
    have waited for."""
    if event.group < state.urgent_end:
        return ""
    sizes = {
        group: sum(files.values())
        for group, files in state.spool_files.items()
        if group >= state.urgent_end
    }
    sizes[event.group] = event.nbytes + sum(
        size for file, size in state.spool_files.get(event.group, {}).items() if file != event.file
    )
    allowed = state.guarantees.disk_bytes + RECORD_BYTES * state.guarantees.group_size * len(sizes)
    spool_bytes = sum(sizes.values())
    if spool_bytes > allowed:
        return (
            f"the spool takes {spool_bytes} bytes for groups from {state.urgent_end} on, and may "
            f"take {allowed:g}"
        )
    return ""


@add_rule(DELIVERY_RULES, "store", SpoolFileRemoved)
def what_is_needed_stays_stored(state: ObservedState, event: SpoolFileRemoved) -> str:
    """A file of the spool is removed only when nothing in it is needed: a safe checkpoint trained
    its group, nothing of the group was acknowledged, or the group is in another file."""
    if any(
        size for file, size in state.spool_files.get(event.group, {}).items() if file != event.file
    ):
        return ""
    if (
        state.branches
        and state.current_branch.step_by_group.get(event.group, state.safe_steps + 1)
        <= state.safe_steps
    ):
        return ""
    needed = [
        name
        for name, playings in state.unsaved_rollouts.items()
        if playings[0].group == event.group
    ]
    return (
        (
            f"the spool removes group {event.group}, and {needed[0]} is needed: no "
            "checkpoint trained it"
        )
        if needed
        else ""
    )


@add_rule(DELIVERY_RULES, "quarantine", SpoolFileRemoved)
def what_is_refused_is_quarantined(state: ObservedState, event: SpoolFileRemoved) -> str:
    """A file of the spool is removed before its group is trained only when the quarantine
    has what was refused of it, unless a disk failed: a trajectory that cannot be stored
    there is only reported."""
    size = state.spool_files.get(event.group, {}).get(event.file, 0)
    if not size or state.disk_failed or event.group in state.current_branch.step_by_group:
        return ""
    if event.group not in state.quarantined_groups:
        return (
            f"the spool removes {event.file}, which is not trained, and the quarantine has nothing "
            f"of group {event.group}"
        )
    return ""


@add_rule(DELIVERY_RULES, "store", RunFinished)
def nothing_stays_stored_for_ever(state: ObservedState, event: RunFinished) -> str:
    """The spool contains nothing of groups that a safe checkpoint trained when the run has ended,
    unless a disk failed meanwhile, or the last start was cut short."""
    if state.disk_failed or state.cut_short or not state.branches or event.failed:
        return ""
    over = [
        g
        for g, files in state.spool_files.items()
        if any(files.values())
        and state.current_branch.step_by_group.get(g, 10**9) <= state.safe_steps
    ]
    return f"the run has ended, and the spool still has groups {sorted(over)}" if over else ""


@add_rule(DELIVERY_RULES, "ended", RunFinished)
def the_run_ends_whole(state: ObservedState, event: RunFinished) -> str:
    """The run ends with all its steps, and with every group up to the last one trained once.

    (That the run makes progress is the rule `stuck` of `InvariantChecker`: after the last fault, a
    step is made within `first_seconds`, and each later one within `step_seconds`.)"""
    if event.failed:
        return f"the run failed after step {event.steps}: {event.failed}"
    guarantees = state.guarantees
    branch = state.current_branch
    if event.steps != guarantees.steps or len(branch.steps) != guarantees.steps:
        return (
            f"the run says {event.steps} steps, {len(branch.steps)} were made, of "
            f"{guarantees.steps}"
        )
    if not (guarantees.more_groups or guarantees.replaced_groups) and sorted(
        branch.step_by_group
    ) != list(range(guarantees.steps * guarantees.prompts_per_step)):
        return f"the run ended, and trained groups {sorted(branch.step_by_group)}"
    return ""


# Invariants of starts, steps and weights.


TRAINING_RULES: list[InvariantRule] = []


# -- starts ----------------------------------------------------------------------------------------


@add_rule(TRAINING_RULES, "lineage", LineageBegan)
def starts_continue_their_parent(state: ObservedState, event: LineageBegan) -> str:
    """Every start takes a new lineage number, and continues after the first `step` steps of its
    parent. The version and the groups that its checkpoint names are those of these steps."""
    if event.lineage <= max(state.branches, default=0):
        return f"a start took lineage {event.lineage}, and {max(state.branches)} was taken before"
    parent = state.branches.get(event.parent)
    if event.parent and parent is None:
        return f"lineage {event.lineage} has parent {event.parent}, which never began"
    if event.step > (len(parent.steps) if parent else 0):
        return (
            f"lineage {event.lineage} begins after step {event.step} of lineage {event.parent}, "
            "which made fewer"
        )
    steps = parent.steps[: event.step] if parent else []
    trained = {group for step in steps for group in step.groups}
    consumed = {*range(event.consumed), *event.beyond}
    if consumed != trained:
        return (
            f"the checkpoint of step {event.step} names groups {sorted(consumed)}, and its steps "
            f"had {sorted(trained)}"
        )
    newest = (
        max((v for v, count in parent.step_counts.items() if count <= event.step), default=0)
        if parent
        else 0
    )
    if event.version != newest:
        return (
            f"the checkpoint of step {event.step} names version {event.version}, and its "
            f"steps made {newest}"
        )
    return ""


@add_rule(TRAINING_RULES, "lineage", StepBegan, StepTrained)
def only_the_newest_trains(state: ObservedState, event: StepBegan | StepTrained) -> str:
    """Training happens in the newest lineage alone, and its steps are numbered consecutively."""
    if event.lineage != state.lineage:
        return (
            f"lineage {event.lineage} made step {event.step}, and lineage {state.lineage} has begun"
        )
    step_count = len(state.current_branch.steps)
    if event.step != step_count + 1:
        return f"step {event.step} came after step {step_count}"
    return ""


@add_rule(TRAINING_RULES, "checkpoint", LineageBegan)
def nothing_safe_is_passed_over(state: ObservedState, event: LineageBegan) -> str:
    """A start resumes from the newest checkpoint that was ever safe, or from a newer one."""
    if event.step < state.safe_steps:
        safe = state.safe_steps
        return (
            f"lineage {event.lineage} begins after step {event.step}, though the checkpoint of "
            f"step {safe} was safe"
        )
    return ""


# -- steps -----------------------------------------------------------------------------------------


@add_rule(TRAINING_RULES, "twice", StepBegan, StepTrained)
def no_group_twice(state: ObservedState, event: StepBegan | StepTrained) -> str:
    """A group, and so a trajectory, is in at most one step of a branch. Groups of steps that a
    resume rolled back may be trained again."""
    groups = event.groups if isinstance(event, StepBegan) else [m[0].group for m in event.groups]
    for at, group in enumerate(groups):
        if group in state.current_branch.step_by_group:
            return (
                f"step {event.step} takes group {group}, which step "
                f"{state.current_branch.step_by_group[group]} trained"
            )
        if group in groups[:at]:
            return f"step {event.step} takes group {group} twice"
    return ""


@add_rule(TRAINING_RULES, "whole", StepTrained)
def groups_are_whole(state: ObservedState, event: StepTrained) -> str:
    """A step trains whole groups, each episode once and in order. It trains as many groups as the
    schedule says, and more only to reach the number of tokens or to replace groups."""
    guarantees = state.guarantees
    count = len(event.groups)
    most = (
        guarantees.slots
        if guarantees.more_groups
        else guarantees.prompts_per_step + guarantees.replaced_groups
    )
    if not guarantees.prompts_per_step <= count <= most:
        return (
            f"step {event.step} trains {count} groups, and schedule.prompts_per_step is "
            f"{guarantees.prompts_per_step}"
        )
    for members in event.groups:
        group = members[0].group
        names = [format_trajectory_id(group, i) for i in range(guarantees.group_size)]
        if [f.trajectory_id for f in members] != names:
            return (
                f"step {event.step} trains {[f.trajectory_id for f in members]} for group {group}"
            )
    return ""


@add_rule(TRAINING_RULES, "replaced", StepTrained)
def groups_are_replaced_for_want_of_contrast(state: ObservedState, event: StepTrained) -> str:
    """A step with `schedule.replaced_groups` takes groups until the rewards of enough of
    them differ. It stops earlier only at the end of the budget, or of the groups that
    may be in flight."""
    guarantees = state.guarantees
    branch = state.current_branch
    if not guarantees.replaced_groups:
        return ""
    wanted = guarantees.prompts_per_step
    count = len(event.groups)
    differ = [
        len({f.reward for f in members if f.reward is not None}) > 1 for members in event.groups
    ]
    since = [step for step in branch.steps if step.version == branch.version]
    in_flight = max_groups_for_step(
        slots=guarantees.slots,
        prompts_per_step=wanted,
        steps_left=guarantees.steps_per_publication - len(since),
        consumed_since=sum(len(step.groups) for step in since),
    )
    budget = min(wanted + guarantees.replaced_groups, in_flight)
    if count > budget:
        return f"step {event.step} trains {count} groups, and may take {budget}"
    if sum(differ[:-1]) >= wanted:
        return (
            f"step {event.step} takes group {event.groups[-1][0].group}, though {wanted} "
            "before it differ"
        )
    if sum(differ) < wanted and count < budget:
        return (
            f"step {event.step} trains {count} groups, {sum(differ)} that differ, and "
            f"may take {budget}"
        )
    return ""


@add_rule(TRAINING_RULES, "task", StepTrained)
def a_group_plays_one_task(state: ObservedState, event: StepTrained) -> str:
    """All episodes of a group play the same task, regardless of generator and time."""
    for members in event.groups:
        tasks = sorted({f.task for f in members})
        if len(tasks) > 1:
            return (
                f"step {event.step} trains group {members[0].group}, whose episodes "
                f"play tasks {tasks}"
            )
    return ""


@add_rule(TRAINING_RULES, "window", StepBegan)
def groups_are_in_order(state: ObservedState, event: StepBegan) -> str:
    """Each group of a step is within the window, which begins with the oldest untrained group. No
    older group of the window was complete (all its episodes acknowledged) when the step began."""
    branch = state.current_branch
    window = state.guarantees.window
    trained = set(branch.step_by_group)
    head = branch.oldest_untrained
    for group in event.groups:
        while head in trained:
            head += 1
        if group >= head + window:
            return (
                f"step {event.step} takes group {group}, and group {head} waits: "
                f"schedule.window is {window}"
            )
        for older in range(head, group):
            if older not in trained and state.is_complete_group(older):
                return f"step {event.step} takes group {group}, though group {older} is complete"
        trained.add(group)
    return ""


@add_rule(TRAINING_RULES, "weights", StepTrained)
def sampled_by_its_past(state: ObservedState, event: StepTrained) -> str:
    """A trained token was sampled by weights in the past of those that it changes: the steps that
    made them are the first steps of the learner's branch. This must hold for the (lineage, version)
    of the token, and its log-prob and routes must match."""
    for f in (f for members in event.groups for f in members):
        of = state.branches.get(f.lineage)
        for version in f.versions:
            if (
                of is None
                or version > event.version
                or not leads_to(of, version, state.current_branch)
            ):
                return (
                    f"step {event.step} trains {f.trajectory_id}, sampled by version {version} of "
                    f"lineage {f.lineage}: these weights are not in the past of version "
                    f"{event.version} of lineage {event.lineage}"
                )
        if f.wrong:
            return f"step {event.step} trains {f.trajectory_id}: {f.wrong}"
    return ""


@add_rule(TRAINING_RULES, "content", StepTrained)
def trained_as_sent(state: ObservedState, event: StepTrained) -> str:
    """Every trained trajectory was sent by a generator, with every column as it was sent."""
    for f in (f for members in event.groups for f in members):
        if f.content not in state.sent_rollouts.get(f.trajectory_id, {}):
            return f"step {event.step} trains {f.trajectory_id} as nobody sent it"
    return ""


@add_rule(TRAINING_RULES, "age", StepTrained)
def none_is_too_old(state: ObservedState, event: StepTrained) -> str:
    """Every trained token is at most as old, in versions, as the schedule allows."""
    for f in (f for members in event.groups for f in members):
        if f.versions and event.version - f.versions[0] > state.guarantees.age_bound:
            return (
                f"step {event.step} trains {f.trajectory_id}, of version {f.versions[0]}, at "
                f"version {event.version}: the schedule allows an age of "
                f"{state.guarantees.age_bound}"
            )
    return ""


# -- weights ---------------------------------------------------------------------------------------


@add_rule(TRAINING_RULES, "version", StepBegan, StepTrained)
def versions_count_publications(state: ObservedState, event: StepBegan | StepTrained) -> str:
    """A version is made by `steps_per_publication` steps, or by the last steps of the run,
    and counts as one."""
    if event.version != state.current_branch.version:
        return (
            f"step {event.step} is of version {event.version}, and {state.current_branch.version} "
            "versions were made"
        )
    return ""


@add_rule(TRAINING_RULES, "version", WeightsPublished)
def published_versions_go_up(state: ObservedState, event: WeightsPublished) -> str:
    """Published versions increase, and were made by steps. A version has other weights than the one
    before exactly if a step between them made an update."""
    branch = state.branches.get(event.lineage)
    if branch is None or event.lineage != state.lineage:
        return (
            f"version {event.version} of lineage {event.lineage} is published, and lineage "
            f"{state.lineage} has begun"
        )
    before = [v for of, v in state.published_keys if of == event.lineage]
    if before and event.version <= max(before):
        return (
            f"version {event.version} of lineage {event.lineage} is published after "
            f"version {max(before)}"
        )
    behind = branch.steps_behind(event.version)
    if behind is None:
        return (
            f"version {event.version} of lineage {event.lineage} is published, and no step made it"
        )
    if before:
        since = branch.steps_behind(max(before))
        if since is not None:
            updated = any(step.updates for step in behind[len(since) :])
            if updated == (state.published_keys[event.lineage, max(before)] == event.weights):
                changed = "the same" if updated else "not the same"
                return (
                    f"version {event.version} of lineage {event.lineage} has {changed} weights as "
                    f"version {max(before)}"
                )
    return ""


@add_rule(TRAINING_RULES, "checkpoint", WeightsPublished)
def equal_steps_make_equal_weights(state: ObservedState, event: WeightsPublished) -> str:
    """Equal steps make bitwise equal weights in every lineage: a checkpoint that
    loads is complete."""
    branch = state.branches[event.lineage]
    for (lineage, version), weights in state.published_keys.items():
        same = same_weights(branch, event.version, state.branches[lineage], version)
        if same and weights != event.weights:
            return (
                f"version {event.version} of lineage {event.lineage} is not version {version} of "
                f"lineage {lineage}, and the same steps made both"
            )
    return ""


@add_rule(TRAINING_RULES, "version", WeightsInstalled)
def engines_install_what_was_published(state: ObservedState, event: WeightsInstalled) -> str:
    """An engine installs only newer weights, of its run's lineage, that were published
    under this name."""
    generator = state.generators[event.generator]
    name = f"version {event.version} of lineage {event.lineage}"
    if event.lineage != state.lineage:
        return f"{event.generator} installs {name}, and the run is of lineage {state.lineage}"
    if generator.versions and event.version < generator.versions[-1]:
        return f"{event.generator} installs {name} after version {generator.versions[-1]}"
    weights = state.published_keys.get((event.lineage, event.version))
    if weights is None:
        return f"{event.generator} installs {name}, which was not published"
    if weights != event.weights:
        return f"{event.generator} installs other weights than were published as {name}"
    return ""


@add_rule(TRAINING_RULES, "generator", TrajectorySent)
def sent_as_sampled(state: ObservedState, event: TrajectorySent) -> str:
    """A generator sends only what was sampled by weights that its current process had installed,
    in their lineage."""
    f = event.trajectory
    generator = state.generators[event.generator]
    if f.lineage != state.lineage:
        return (
            f"{event.generator} sends {f.trajectory_id} of lineage {f.lineage}, in a run of "
            f"lineage {state.lineage}"
        )
    strange = [v for v in f.versions if v not in generator.versions]
    if strange:
        return (
            f"{event.generator} sends {f.trajectory_id} of versions {strange}, and it has had "
            f"{generator.versions}"
        )
    return f"{event.generator} sends {f.trajectory_id}: {f.wrong}" if f.wrong else ""


# Invariants of the transfer of weights, and of waiting.


SILENT_SECONDS = 20.0
"""Seconds beyond twice `supervise.silence_seconds` after which a silent generator's leases must go
to others that ask."""

WEIGHT_RULES: list[InvariantRule] = []


@add_rule(WEIGHT_RULES, "arrived", VersionArrived)
def hosts_have_what_was_published(state: ObservedState, event: VersionArrived) -> str:
    """A file that a host fetched, whole or as a delta, has the published weights, before any
    engine reads it."""
    weights = {w for (_, version), w in state.published_keys.items() if version == event.version}
    if event.weights not in weights:
        return (
            f"{event.generator} has fetched version {event.version}, with other weights "
            "than were published"
        )
    return ""


@add_rule(WEIGHT_RULES, "arrived", GaveUp)
def hosts_have_what_a_delta_changes(state: ObservedState, event: GaveUp) -> str:
    """No installation fails for want of a file: a host that does not have what a delta changes
    fetches the whole version."""
    return (
        f"{event.generator} lacks a file: {event.error}"
        if event.error.startswith("FileNotFoundError")
        else ""
    )


@add_rule(WEIGHT_RULES, "kept", VersionArrived)
def hosts_keep_few_versions(state: ObservedState, event: VersionArrived) -> str:
    """A host that fetches has the version that arrived, the one before, and those that its
    generators still use."""
    host_versions = {g.used_file for name, g in state.generators.items() if g.used_file}
    if event.files > 2 + len(host_versions):
        return (
            f"{event.files} versions are on the host of {event.generator}, and generators use "
            f"{len(host_versions)}"
        )
    return ""


@add_rule(WEIGHT_RULES, "kept", WeightsPublished)
def the_learner_keeps_few_versions(state: ObservedState, event: WeightsPublished) -> str:
    """The learner's host has the last two versions, and those that engines read when the
    newest was written."""
    if event.files > 2 + event.used:
        return (
            f"{event.files} versions are on the learner's host, and engines read "
            f"{event.used} of them"
        )
    return ""


@add_rule(WEIGHT_RULES, "read", PublishedRemoved)
def what_is_being_installed_stays(state: ObservedState, event: PublishedRemoved) -> str:
    """The learner keeps its file of a version while a generator installs it."""
    for name, generator in state.generators.items():
        if generator.installing_since is not None and generator.installing_version == event.version:
            return f"the learner removes version {event.version}, which {name} installs"
    return ""


@add_rule(WEIGHT_RULES, "held", VersionRemoved)
def what_is_used_stays(state: ObservedState, event: VersionRemoved) -> str:
    """The file of a version stays on its host while a process uses it, that is, until the process
    has fetched another version, is asked to stop, or has ended."""
    users = sorted(
        name for name, generator in state.generators.items() if generator.used_file == event.file
    )
    if users:
        return f"{event.generator} removes {event.file}, which {', '.join(users)} uses"
    return ""


@add_rule(WEIGHT_RULES, "parent", ParentAssigned)
def nobody_gets_a_parent_that_failed_it(state: ObservedState, event: ParentAssigned) -> str:
    """A host is never sent for weights to a parent that it reported as failed."""
    if event.parent in event.avoid:
        return f"{event.generator} is to get weights from {event.parent}, which has failed it"
    return ""


@add_rule(WEIGHT_RULES, "current", PlayRequested)
def nobody_begins_to_play_with_old_weights(state: ObservedState, event: PlayRequested) -> str:
    """A process begins to play with weights at least as new as those that others had when
    it installed them."""
    generator = state.generators[event.generator]
    newest = generator.newest_of_others
    if generator.versions and generator.versions[-1] < newest:
        return (
            f"{event.generator} begins to play with version {generator.versions[-1]}, and "
            f"others had {newest}"
        )
    return ""


@add_rule(WEIGHT_RULES, "prompt", TimePassed)
def weights_come_soon(state: ObservedState, event: TimePassed) -> str:
    """An installation ends within `install_seconds`, and a generator that plays has the newest
    version within twice that, when the effects of the last fault are over."""
    limit = state.guarantees.install_seconds
    for name, generator in state.generators.items():
        if (
            generator.installing_since is not None
            and event.at > max(generator.installing_since, state.calm_since) + limit
        ):
            return f"{name} installs a version since {generator.installing_since:.3f} s"
        if (
            generator.playing_since is None
            or not generator.versions
            or generator.versions[-1] >= state.newest_version
        ):
            continue
        if event.at > max(generator.playing_since, state.newest_at, state.calm_since) + 2 * limit:
            return (
                f"{name} has version {generator.versions[-1]}, and {state.newest_version} since "
                f"{state.newest_at:.3f} s"
            )
    return ""


@add_rule(WEIGHT_RULES, "prompt", TimePassed)
def who_gets_nothing_looks_again(state: ObservedState, event: TimePassed) -> str:
    """A host that gets no weights from its source asks for another one, whatever is wrong
    with the source."""
    for name, generator in state.generators.items():
        since = (
            math.inf
            if generator.fetching_since is None or name in event.frozen
            else generator.fetching_since
        )
        if event.at > since + state.guarantees.fetch_seconds:
            return (
                f"{name} waits for weights since {since:.3f} s, and does not look for "
                "them anywhere else"
            )
    return ""


@add_rule(WEIGHT_RULES, "prompt", GroupsLeased)
def nobody_waits_for_who_is_silent(state: ObservedState, event: GroupsLeased) -> str:
    """The leases of a generator that no longer reports go to another one that asks, before anything
    newer, as soon as its silence is noticed. Not after the learner has ended: the next lineage
    leases what was lost with it."""
    if state.learner_ended or event.ended or event.free < state.guarantees.group_size:
        return ""
    leased_now = {(group, episode) for group, episodes in event.leases for episode in episodes}
    newest = max((group for group, _ in event.leases), default=None)
    for (group, episode), lease in state.leases.items():
        if (
            lease.owner == event.generator
            or (group, episode) in leased_now
            or group in state.current_branch.step_by_group
        ):
            continue
        if (newest is not None and group > newest) or format_trajectory_id(
            group, episode
        ) in state.present_since:
            continue
        owner = state.generators[lease.owner]
        if owner.ended_processes != lease.ended_processes:
            continue
        silent = event.at - max(
            owner.last_answer, owner.last_report, state.answering_since(event.at)
        )
        if silent > 2 * state.guarantees.silence_seconds + SILENT_SECONDS:
            return (
                f"{event.generator} asks for work, and is not leased "
                f"{format_trajectory_id(group, episode)}, which {lease.owner} has: that one is "
                f"silent since {owner.last_answer:.3f} s"
            )
    return ""


@add_rule(WEIGHT_RULES, "session", TrajectoriesAcknowledged)
def old_sessions_are_over(state: ObservedState, event: TrajectoriesAcknowledged) -> str:
    """A trajectory that is acknowledged to a sender was not delivered in
    outdated sessions alone."""
    for name in event.ids:
        if state.outdated_deliveries.get((event.generator, name)):
            return (
                f"{name} is acknowledged to {event.generator}, who delivered it in a "
                "session that was over"
            )
    return ""


# Invariants of evaluations.


EVALUATION_RULES: list[InvariantRule] = []


@add_rule(EVALUATION_RULES, "evaluation", EvaluationBegan)
def one_evaluation_at_a_time(state: ObservedState, event: EvaluationBegan) -> str:
    """An evaluation begins after a step that was made, and after the previous evaluation is over.

    A disk that fails for longer than a checkpoint may take hides the end: its row is written,
    its file is not.
    """
    if state.evaluating_step is not None and not state.disk_failed:
        return (
            f"the evaluation of step {event.step} is begun, and that of step "
            f"{state.evaluating_step} is not over"
        )
    step_count = len(state.current_branch.steps)
    if event.step > step_count:
        return f"the evaluation of step {event.step} is begun, and {step_count} were made"
    return ""


@add_rule(EVALUATION_RULES, "evaluation", LineageBegan)
def results_of_lost_weights_are_gone(state: ObservedState, event: LineageBegan) -> str:
    """A start has removed the results of the steps that it takes back."""
    lost = sorted(step for step in state.stored_evaluations if step > event.step)
    if lost:
        return (
            f"lineage {event.lineage} begins after step {event.step}, with the evaluations "
            f"of steps {lost}"
        )
    return ""


@add_rule(EVALUATION_RULES, "evaluation", EvaluationEnded)
def evaluated_by_the_weights_of_its_step(state: ObservedState, event: EvaluationEnded) -> str:
    """The episodes of an evaluation were sampled by the weights of its step, or by newer ones that
    were installed meanwhile. It poses the configured number of tasks, the same ones each time, and
    none that is trained."""
    step_counts = state.current_branch.step_counts
    least = max(version for version, steps in step_counts.items() if steps <= event.step)
    if event.oldest < least or event.newest > state.newest_version:
        return (
            f"the evaluation of step {event.step}, whose weights are version {least}, was sampled "
            f"by versions {event.oldest} to {event.newest}"
        )
    if len(set(event.tasks)) != state.guarantees.evaluated_tasks or event.tasks != (
        state.evaluated_tasks or event.tasks
    ):
        return (
            f"the evaluation of step {event.step} poses tasks {event.tasks}, and there was "
            f"{state.evaluated_tasks}"
        )
    trained = {f.task for playings in state.sent_rollouts.values() for f in playings.values()}
    both = trained & set(event.tasks)
    if both:
        return f"tasks {sorted(both)} are evaluated and trained"
    return ""


@add_rule(EVALUATION_RULES, "evaluation", RunFinished)
def each_step_that_is_due_is_evaluated_once(state: ObservedState, event: RunFinished) -> str:
    """The record of a run that has ended has each evaluation once, in order, and all that were due,
    even after a stop or the end of any process. (A resume begins the last one that was due, if it
    is missing, at the step from which it resumes. If that is the run's last step, it is also the
    evaluation of the last weights.)

    An evaluation may be missing only if the one before was still being played, except after the
    last step; if the generator gave it up; or if a disk failed."""
    guarantees = state.guarantees
    evaluated = event.evaluated
    if event.failed or not guarantees.evaluate_every:
        return ""
    if list(evaluated) != sorted(set(evaluated)):
        return f"the record has evaluations of steps {list(evaluated)}"
    if state.disk_failed:
        return ""
    due = [
        *range(
            0 if guarantees.evaluate_first else guarantees.evaluate_every,
            event.steps,
            guarantees.evaluate_every,
        ),
        event.steps,
    ]
    ends = [*due[1:], event.steps + 1]
    if state.current_branch.first_step == event.steps:
        ends = [event.steps + 1 if end == event.steps else end for end in ends]
    for step, end in zip(due, ends, strict=True):
        excused = step in state.given_up_evaluations or (
            step in state.skipped_evaluations and step < event.steps
        )
        if not excused and not any(step <= one < end for one in evaluated):
            return (
                f"the evaluation of step {step} is missing: there are those of steps "
                f"{list(evaluated)}"
            )
    return ""


# All invariants, and the checker that applies them.
#
# A **branch** is a lineage together with the steps before it (`ObservedState.branches`). An episode
# is **here** in a lineage if the learner has acknowledged it, or if the spool kept it from before.
# A checkpoint is **safe** when it has its final name and its directory is synced. The docstring of
# each rule says what it means across crashes, resumes and lineages. `RULES` contains all rules.


RULES = [*TRAINING_RULES, *DELIVERY_RULES, *WEIGHT_RULES, *EVALUATION_RULES]


class InvariantChecker:
    """A checker that judges one event after the other. `event_count` counts them."""

    def __init__(self, guarantees: RunGuarantees):
        self.state = ObservedState(guarantees)
        self.event_count = 0
        self._judges: dict[type[RunEvent], list[InvariantRule]] = {}
        for each in RULES:
            for kind in each.events:
                self._judges.setdefault(kind, []).append(each)

    def check_event(self, event: RunEvent) -> None:
        """Judge an event, and add it to what is known. Raises `InvariantViolated` if it
        violates an invariant."""
        self.event_count += 1
        state = self.state
        if event.at > state.step_deadline:
            step_count = len(state.current_branch.steps) if state.branches else 0
            raise InvariantViolated(
                "stuck",
                (
                    f"the step after step {step_count} had to be made by {state.step_deadline:.1f} "
                    f"s, and it is {event.at:.1f} s"
                ),
            )
        for each in self._judges.get(type(event), ()):
            reason = each.judge(state, event)
            if reason:
                raise InvariantViolated(each.name, reason)
        state.apply_event(event)
