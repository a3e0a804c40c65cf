"""A rule: what must hold of the next event, given what is known. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from dev.simulation.history import (
    Acknowledged,
    Arrived,
    Asked,
    Began,
    Evaluated,
    Evaluating,
    Event,
    Finished,
    Installed,
    Leased,
    Limited,
    Passed,
    Placed,
    Plays,
    Published,
    Refused,
    Removed,
    Sent,
    Slots,
    Stored,
    Taken,
    Trained,
    Unlinked,
)
from dev.simulation.known import Known, Lease, Rules, leads_to, same_weights
from r3async.data.tokens import format_trajectory_id
from r3async.schedule.admission import max_groups_for_step

__all__ = ["RULES", "Checker", "Rules", "Violated"]


class Violated(Exception):
    """An invariant does not hold. `name`: of the rule; `reason`: for a person."""

    def __init__(self, name: str, reason: str):
        super().__init__(f"{name}: {reason}")
        self.name, self.reason = name, reason


Judge = Callable[[Known, Any], str]
"""What is wrong with an event that is about to be applied; "" if nothing is."""


class Rule(NamedTuple):
    name: str
    events: tuple[type[Event], ...]
    judge: Judge


def rule(rules: list[Rule], name: str, *events: type[Event]) -> Callable[[Judge], Judge]:
    """Add to `rules` one that judges these events."""

    def add(judge: Judge) -> Judge:
        rules.append(Rule(name, events, judge))
        return judge

    return add


# Invariants of leases, delivery and storage, and that the run moves; see `invariants`. Pure.


RECORD_BYTES = 256
"""Of the spool, for a trajectory, beyond what it takes in memory."""

DELIVERY: list[Rule] = []


@rule(DELIVERY, "lost", Asked)
def what_is_here_is_not_lacked(known: Known, event: Asked) -> str:
    """What was acknowledged is here until it is trained. Without a spool it ends with the learner's process; with one it outlives
    every process, and with `buffer.fsync` a power failure too: it is then here in every later lineage that may train it. That is
    one that has the weights behind it that sampled it, has not trained its group, has a slot for it, and may train its age.
    The learner never says that it lacks what is here."""
    for group, episodes in event.missing.items():
        for episode in episodes:
            if (name := format_trajectory_id(group, episode)) in known.here:
                return f"{name} was acknowledged{_since(known.here[name])}, and the learner lacks it"
    return ""


def _since(at: float) -> str:
    return f" at {at:.3f} s" if at >= 0 else " in an earlier lineage, and kept"


@rule(DELIVERY, "again", Leased)
def nothing_is_played_again(known: Known, event: Leased) -> str:
    """Nothing that is here is leased, unless it came after the learner was last asked what it lacks of that group; nothing of
    a group that was trained is; and nothing that another generator has, until the process of that one ended, or did not
    report for `supervise.silence_seconds`."""
    for group, episodes in event.leases:
        if group in known.branch.trained:
            return f"group {group} is leased, and step {known.branch.trained[group]} trained it"
        for episode in episodes:
            name = format_trajectory_id(group, episode)
            asked = known.asked.get(group)
            if name in known.here and (asked is None or known.here[name] <= asked):
                return f"{name} is leased to {event.generator}, and was acknowledged{_since(known.here[name])}"
            lease = known.leases.get((group, episode))
            if lease is not None and not _may_return(known, lease, event.at):
                return f"{name} is leased to {event.generator}, and {lease.owner} has it since {lease.at:.3f} s"
    return ""


def _may_return(known: Known, lease: Lease, now: float) -> bool:
    owner = known.engines[lease.owner]
    ended = owner.process != lease.process
    return ended or lease.at < owner.loose or now - owner.heard > known.rules.silence_seconds


@rule(DELIVERY, "slots", Leased)
def slots_are_conserved(known: Known, event: Leased) -> str:
    """A group is leased for the first time only while a slot is free: a slot is taken by each group that was leased before,
    and is not in the weights that the lease names. So whatever these or newer ones sample cannot become too old. No group is
    passed over."""
    rules, newest = known.rules, known.leased_to
    named = event.versions or [known.engines[event.generator].newest] * len(event.leases)
    for (group, _), version in zip(event.leases, named, strict=True):
        for passed in range(newest + 1, group):
            names = [format_trajectory_id(passed, i) for i in range(rules.samples_per_group)]
            if not all(name in known.sent for name in names):
                return f"group {group} is leased, and group {passed} never was"
        if group > newest and (taken := group + 1 - known.branch.groups_in(version)) > rules.slots:
            return (
                f"group {group} is leased to {event.generator} for version {version}: {taken} groups are then not in these "
                f"weights, and there are {rules.slots} slots"
            )
        newest = max(newest, group)
    return ""


@rule(DELIVERY, "slots", Slots)
def no_more_slots_than_there_are(known: Known, event: Slots) -> str:
    """The conductor's count of its slots is within what there are."""
    if event.total != known.rules.slots or not 0 <= event.taken <= event.total:
        return f"{event.taken} slots of {event.total} are taken, and there are {known.rules.slots}"
    return ""


@rule(DELIVERY, "content", Acknowledged)
def only_what_was_sent_is_acknowledged(known: Known, event: Acknowledged) -> str:
    """Nothing is acknowledged that nobody sent."""
    for name in event.ids:
        if name not in known.sent:
            return f"{name} is acknowledged to {event.generator}, and nobody sent it"
    return ""


@rule(DELIVERY, "refused", Refused)
def what_is_sound_is_taken(known: Known, event: Refused) -> str:
    """The learner takes whatever a generator of its lineage sends, as long as its group is not trained."""
    playings = known.sent.get(event.trajectory_id, {}).values()
    if any(f.lineage == known.lineage and f.group not in known.branch.trained for f in playings):
        return f"{event.trajectory_id} of {event.generator} is refused: {event.reason}"
    return ""


@rule(DELIVERY, "failed", Sent)
def what_failed_once_is_played_again(known: Known, event: Sent) -> str:
    """Something stands for an episode that nobody played only if its environment failed more than once: it raised, or its process
    ended, or hung."""
    f = event.trajectory
    if f.reward is None and known.failed[f.task] < 2:
        return f"{f.trajectory_id} was given up, and its environment failed {known.failed[f.task]} times"
    return ""


@rule(DELIVERY, "memory", Acknowledged)
def memory_is_bounded(known: Known, event: Acknowledged) -> str:
    """Without a spool, what is acknowledged and not trained takes at most the credit, or is one trajectory; not counted are
    groups that a step might have waited for. With a spool it may be on the disk."""
    if known.rules.durable != "nothing":
        return ""
    sizes = known.held | {name: known.size(name) for name in event.ids if name not in known.held}
    beyond = {n: size for n, size in sizes.items() if _group(known, n) >= known.horizon}
    held = sum(beyond.values())
    if held > max(known.rules.credit_bytes, max(beyond.values(), default=0)):
        return (
            f"{held} bytes are held of groups from {known.horizon} on, and the credit is {known.rules.credit_bytes:g}"
        )
    return ""


@rule(DELIVERY, "memory", Limited)
def nobody_waits_for_memory_that_is_free(known: Known, event: Limited) -> str:
    """Without a spool, generators are told to wait only while not all that was sent and is not trained would fit; what the newest
    step trained may still be held."""
    if known.rules.durable != "nothing":
        return ""
    if (most := known.most_held()) <= known.rules.credit_bytes:
        return f"{event.generator} may send groups before {event.until} only, and at most {most} bytes are held"
    return ""


def _group(known: Known, name: str) -> int:
    return next(iter(known.sent[name].values())).group


@rule(DELIVERY, "disk", Stored)
def the_spool_has_a_limit(known: Known, event: Stored) -> str:
    """The spool takes at most `buffer.disk_bytes`; not counted are groups that a step might have waited for."""
    if event.group < known.horizon:
        return ""
    sizes = {group: sum(files.values()) for group, files in known.files.items() if group >= known.horizon}
    sizes[event.group] = event.nbytes + sum(
        size for file, size in known.files.get(event.group, {}).items() if file != event.file
    )
    allowed = known.rules.disk_bytes + RECORD_BYTES * known.rules.samples_per_group * len(sizes)
    if (taken := sum(sizes.values())) > allowed:
        return f"the spool takes {taken} bytes for groups from {known.horizon} on, and may take {allowed:g}"
    return ""


@rule(DELIVERY, "store", Unlinked)
def what_is_needed_stays_stored(known: Known, event: Unlinked) -> str:
    """A file of the spool is removed only when nothing in it is needed: a checkpoint that is safe trained its group, nothing
    of the group was acknowledged, or it is in another file."""
    if any(size for file, size in known.files.get(event.group, {}).items() if file != event.file):
        return ""
    if known.branches and known.branch.trained.get(event.group, known.safe + 1) <= known.safe:
        return ""
    needed = [name for name, playings in known.kept.items() if playings[0].group == event.group]
    return (
        f"the spool removes group {event.group}, and {needed[0]} is needed: no checkpoint trained it" if needed else ""
    )


@rule(DELIVERY, "store", Finished)
def nothing_stays_stored_for_ever(known: Known, event: Finished) -> str:
    """When the run has ended, the spool has nothing of groups that a safe checkpoint trained, unless a disk failed meanwhile,
    or the last start was cut short."""
    if known.spoiled or known.cut_short or not known.branches or event.failed:
        return ""
    over = [
        g
        for g, files in known.files.items()
        if any(files.values()) and known.branch.trained.get(g, 10**9) <= known.safe
    ]
    return f"the run has ended, and the spool still has groups {sorted(over)}" if over else ""


@rule(DELIVERY, "ended", Finished)
def the_run_ends_whole(known: Known, event: Finished) -> str:
    """The run ends with all its steps, and every group up to the last trained once. (`stuck`: after the last fault a step is made
    within `first_seconds`, and each later one within `step_seconds`.)"""
    if event.failed:
        return f"the run failed after step {event.steps}: {event.failed}"
    rules, branch = known.rules, known.branch
    if event.steps != rules.steps or len(branch.steps) != rules.steps:
        return f"the run says {event.steps} steps, {len(branch.steps)} were made, of {rules.steps}"
    if not (rules.more_groups or rules.replaced_groups) and sorted(branch.trained) != list(
        range(rules.steps * rules.groups_per_step)
    ):
        return f"the run ended, and trained groups {sorted(branch.trained)}"
    return ""


# Invariants of starts, steps and weights; see `invariants`. Pure.


TRAINING: list[Rule] = []


# -- starts ------------------------------------------------------------------------------------------------------------


@rule(TRAINING, "lineage", Began)
def begins(known: Known, event: Began) -> str:
    """Every start takes a number that none had. It has the first `step` steps of its parent behind it: the version and the groups
    that its checkpoint names are those of these steps."""
    if event.lineage <= max(known.branches, default=0):
        return f"a start took lineage {event.lineage}, and {max(known.branches)} was taken before"
    parent = known.branches.get(event.parent)
    if event.parent and parent is None:
        return f"lineage {event.lineage} has parent {event.parent}, which never began"
    if event.step > (len(parent.steps) if parent else 0):
        return f"lineage {event.lineage} begins after step {event.step} of lineage {event.parent}, which made fewer"
    steps = parent.steps[: event.step] if parent else []
    trained = {group for step in steps for group in step.groups}
    said = {*range(event.consumed), *event.beyond}
    if said != trained:
        return f"the checkpoint of step {event.step} names groups {sorted(said)}, and its steps had {sorted(trained)}"
    newest = max((v for v, count in parent.made.items() if count <= event.step), default=0) if parent else 0
    if event.version != newest:
        return f"the checkpoint of step {event.step} names version {event.version}, and its steps made {newest}"
    return ""


@rule(TRAINING, "lineage", Taken, Trained)
def only_the_newest_trains(known: Known, event: Taken | Trained) -> str:
    """Only the newest start trains, its steps one after the other."""
    if event.lineage != known.lineage:
        return f"lineage {event.lineage} made step {event.step}, and lineage {known.lineage} has begun"
    if event.step != (made := len(known.branch.steps)) + 1:
        return f"step {event.step} came after step {made}"
    return ""


@rule(TRAINING, "checkpoint", Began)
def nothing_safe_is_passed_over(known: Known, event: Began) -> str:
    """A start resumes from the newest checkpoint that ever was safe, or a newer one."""
    if event.step < known.safe:
        return f"lineage {event.lineage} begins after step {event.step}, though the checkpoint of step {known.safe} was safe"
    return ""


# -- steps -------------------------------------------------------------------------------------------------------------


@rule(TRAINING, "twice", Taken, Trained)
def no_group_twice(known: Known, event: Taken | Trained) -> str:
    """No group, and so no trajectory, is in two steps of one branch. What a resume took back may be trained again."""
    groups = event.groups if isinstance(event, Taken) else [m[0].group for m in event.groups]
    for at, group in enumerate(groups):
        if group in known.branch.trained:
            return f"step {event.step} takes group {group}, which step {known.branch.trained[group]} trained"
        if group in groups[:at]:
            return f"step {event.step} takes group {group} twice"
    return ""


@rule(TRAINING, "whole", Trained)
def groups_are_whole(known: Known, event: Trained) -> str:
    """A step trains whole groups, each episode once and in order: as many as the schedule says, and more only to have enough
    tokens, or others in place of some."""
    rules, count = known.rules, len(event.groups)
    most = rules.slots if rules.more_groups else rules.groups_per_step + rules.replaced_groups
    if not rules.groups_per_step <= count <= most:
        return f"step {event.step} trains {count} groups, and schedule.groups_per_step is {rules.groups_per_step}"
    for members in event.groups:
        group = members[0].group
        names = [format_trajectory_id(group, i) for i in range(rules.samples_per_group)]
        if [f.trajectory_id for f in members] != names:
            return f"step {event.step} trains {[f.trajectory_id for f in members]} for group {group}"
    return ""


@rule(TRAINING, "replaced", Trained)
def groups_are_replaced_for_want_of_contrast(known: Known, event: Trained) -> str:
    """With `schedule.replaced_groups`, a step takes groups until enough of them have contrast, and stops before only where the
    budget, or what may be in flight, ends."""
    rules, branch = known.rules, known.branch
    if not rules.replaced_groups:
        return ""
    wanted, count = rules.groups_per_step, len(event.groups)
    differ = [len({f.reward for f in members if f.reward is not None}) > 1 for members in event.groups]
    since = [step for step in branch.steps if step.version == branch.version]
    in_flight = max_groups_for_step(
        slots=rules.slots,
        groups_per_step=wanted,
        steps_left=rules.steps_per_publication - len(since),
        consumed_since=sum(len(step.groups) for step in since),
    )
    budget = min(wanted + rules.replaced_groups, in_flight)
    if count > budget:
        return f"step {event.step} trains {count} groups, and may take {budget}"
    if sum(differ[:-1]) >= wanted:
        return f"step {event.step} takes group {event.groups[-1][0].group}, though {wanted} before it have contrast"
    if sum(differ) < wanted and count < budget:
        return f"step {event.step} trains {count} groups, {sum(differ)} with contrast, and may take {budget}"
    return ""


@rule(TRAINING, "task", Trained)
def a_group_plays_one_task(known: Known, event: Trained) -> str:
    """All episodes of a group play the same task, whoever plays them, and whenever."""
    for members in event.groups:
        if len(tasks := sorted({f.task for f in members})) > 1:
            return f"step {event.step} trains group {members[0].group}, whose episodes play tasks {tasks}"
    return ""


@rule(TRAINING, "window", Taken)
def groups_are_in_order(known: Known, event: Taken) -> str:
    """Each group of a step is within the window, which begins with the oldest that is not trained; and none older in it was
    complete (all its episodes acknowledged) when the step began."""
    branch, window = known.branch, known.rules.window
    gone, head = set(branch.trained), branch.head
    for group in event.groups:
        while head in gone:
            head += 1
        if group >= head + window:
            return f"step {event.step} takes group {group}, and group {head} waits: schedule.window is {window}"
        for older in range(head, group):
            if older not in gone and known.is_complete(older):
                return f"step {event.step} takes group {group}, though group {older} is complete"
        gone.add(group)
    return ""


@rule(TRAINING, "weights", Trained)
def sampled_by_its_past(known: Known, event: Trained) -> str:
    """A trained token was sampled by weights in the past of those that it changes: the steps that made them are the first
    that the learner's branch made. So by its name, (lineage, version); what its log-prob and its routes say has to fit."""
    for f in (f for members in event.groups for f in members):
        of = known.branches.get(f.lineage)
        for version in f.versions:
            if of is None or version > event.version or not leads_to(of, version, known.branch):
                return (
                    f"step {event.step} trains {f.trajectory_id}, sampled by version {version} of lineage {f.lineage}: these "
                    f"weights are not in the past of version {event.version} of lineage {event.lineage}"
                )
        if f.wrong:
            return f"step {event.step} trains {f.trajectory_id}: {f.wrong}"
    return ""


@rule(TRAINING, "content", Trained)
def trained_as_sent(known: Known, event: Trained) -> str:
    """What is trained was sent by a generator, every column as it was sent."""
    for f in (f for members in event.groups for f in members):
        if f.content not in known.sent.get(f.trajectory_id, {}):
            return f"step {event.step} trains {f.trajectory_id} as nobody sent it"
    return ""


@rule(TRAINING, "age", Trained)
def none_is_too_old(known: Known, event: Trained) -> str:
    """No trained token is older than the schedule allows, in versions."""
    for f in (f for members in event.groups for f in members):
        if f.versions and event.version - f.versions[0] > known.rules.age_bound:
            return (
                f"step {event.step} trains {f.trajectory_id}, of version {f.versions[0]}, at version {event.version}: the "
                f"schedule allows an age of {known.rules.age_bound}"
            )
    return ""


# -- weights -----------------------------------------------------------------------------------------------------------


@rule(TRAINING, "version", Taken, Trained)
def versions_count_publications(known: Known, event: Taken | Trained) -> str:
    """A version is made by `steps_per_publication` steps, or by the last ones, and counts one."""
    if event.version != known.branch.version:
        return f"step {event.step} is of version {event.version}, and {known.branch.version} versions were made"
    return ""


@rule(TRAINING, "version", Published)
def published_versions_go_up(known: Known, event: Published) -> str:
    """Published versions only go up, were made, and are of other weights than the one before if a step between made an update."""
    branch = known.branches.get(event.lineage)
    if branch is None or event.lineage != known.lineage:
        return f"version {event.version} of lineage {event.lineage} is published, and lineage {known.lineage} has begun"
    before = [v for of, v in known.published if of == event.lineage]
    if before and event.version <= max(before):
        return f"version {event.version} of lineage {event.lineage} is published after version {max(before)}"
    behind = branch.behind(event.version)
    if behind is None:
        return f"version {event.version} of lineage {event.lineage} is published, and no step made it"
    if before and (since := branch.behind(max(before))) is not None:
        updated = any(step.updates for step in behind[len(since) :])
        if updated == (known.published[event.lineage, max(before)] == event.weights):
            changed = "the same" if updated else "not the same"
            return f"version {event.version} of lineage {event.lineage} has {changed} weights as version {max(before)}"
    return ""


@rule(TRAINING, "checkpoint", Published)
def equal_steps_make_equal_weights(known: Known, event: Published) -> str:
    """What a lineage publishes is bit by bit what the same steps made in another: a checkpoint that loads is whole."""
    branch = known.branches[event.lineage]
    for (lineage, version), weights in known.published.items():
        same = same_weights(branch, event.version, known.branches[lineage], version)
        if same and weights != event.weights:
            return (
                f"version {event.version} of lineage {event.lineage} is not version {version} of lineage {lineage}, and the "
                "same steps made both"
            )
    return ""


@rule(TRAINING, "version", Installed)
def engines_install_what_was_published(known: Known, event: Installed) -> str:
    """An engine installs newer weights only, of its run's lineage, and those that were published under that name."""
    engine, name = known.engines[event.generator], f"version {event.version} of lineage {event.lineage}"
    if event.lineage != known.lineage:
        return f"{event.generator} installs {name}, and the run is of lineage {known.lineage}"
    if engine.versions and event.version < engine.versions[-1]:
        return f"{event.generator} installs {name} after version {engine.versions[-1]}"
    if (weights := known.published.get((event.lineage, event.version))) is None:
        return f"{event.generator} installs {name}, which was not published"
    if weights != event.weights:
        return f"{event.generator} installs other weights than were published as {name}"
    return ""


@rule(TRAINING, "generator", Sent)
def sent_as_sampled(known: Known, event: Sent) -> str:
    """What a generator sends was sampled by weights that this very process of it had installed, in their lineage."""
    f, engine = event.trajectory, known.engines[event.generator]
    if f.lineage != known.lineage:
        return f"{event.generator} sends {f.trajectory_id} of lineage {f.lineage}, in a run of lineage {known.lineage}"
    if strange := [v for v in f.versions if v not in engine.versions]:
        return f"{event.generator} sends {f.trajectory_id} of versions {strange}, and it has had {engine.versions}"
    return f"{event.generator} sends {f.trajectory_id}: {f.wrong}" if f.wrong else ""


# Invariants of weights on their way, and of who waits for whom; see `invariants`. Pure.


SILENT_SECONDS = 20.0
"""Beyond twice `supervise.silence_seconds`, until what a silent generator was leased is leased to others who ask."""

WEIGHTS: list[Rule] = []


@rule(WEIGHTS, "arrived", Arrived)
def hosts_have_what_was_published(known: Known, event: Arrived) -> str:
    """What a host fetched, as a whole or by a delta, has the weights that were published, before any engine looks at it."""
    weights = {w for (_, version), w in known.published.items() if version == event.version}
    if event.weights not in weights:
        return f"{event.generator} has fetched version {event.version}, with other weights than were published"
    return ""


@rule(WEIGHTS, "held", Removed)
def what_is_used_stays(known: Known, event: Removed) -> str:
    """The file of a version stays on its host as long as a process uses it: until that has fetched another one, or ended."""
    if users := sorted(name for name, engine in known.engines.items() if engine.uses == event.file):
        return f"{event.generator} removes {event.file}, which {', '.join(users)} uses"
    return ""


@rule(WEIGHTS, "parent", Placed)
def nobody_gets_a_parent_that_failed_it(known: Known, event: Placed) -> str:
    """A host gets weights from none of those that it said have failed it."""
    if event.parent in event.avoid:
        return f"{event.generator} is to get weights from {event.parent}, which has failed it"
    return ""


@rule(WEIGHTS, "current", Plays)
def nobody_begins_to_play_with_old_weights(known: Known, event: Plays) -> str:
    """A process begins to play with weights that are as new as those that others had when it had installed them."""
    engine = known.engines[event.generator]
    if engine.versions and engine.versions[-1] < engine.current:
        return f"{event.generator} begins to play with version {engine.versions[-1]}, and others had {engine.current}"
    return ""


@rule(WEIGHTS, "prompt", Passed)
def weights_come_soon(known: Known, event: Passed) -> str:
    """When nothing is left of the last fault, an installation ends within `install_seconds`, and whoever plays has the newest
    version within that of two."""
    limit = known.rules.install_seconds
    for name, engine in known.engines.items():
        if engine.installing is not None and event.at > max(engine.installing, known.calm) + limit:
            return f"{name} installs a version since {engine.installing:.3f} s"
        if engine.plays is None or not engine.versions or engine.versions[-1] >= known.newest:
            continue
        if event.at > max(engine.plays, known.newest_at, known.calm) + 2 * limit:
            return f"{name} has version {engine.versions[-1]}, and {known.newest} since {known.newest_at:.3f} s"
    return ""


@rule(WEIGHTS, "prompt", Passed)
def who_gets_nothing_looks_again(known: Known, event: Passed) -> str:
    """A host that gets no weights from where they are to come from looks for them again, whatever is wrong there."""
    for name, engine in known.engines.items():
        since = math.inf if engine.fetching is None or name in event.frozen else engine.fetching
        if event.at > since + known.rules.fetch_seconds:
            return f"{name} waits for weights since {since:.3f} s, and does not look for them anywhere else"
    return ""


@rule(WEIGHTS, "prompt", Leased)
def nobody_waits_for_who_is_silent(known: Known, event: Leased) -> str:
    """What a generator was leased that does not report any more is leased to another one that asks, before anything newer, as
    soon as its silence is noticed."""
    if event.ended or event.free < known.rules.samples_per_group:
        return ""
    taken = {(group, episode) for group, episodes in event.leases for episode in episodes}
    newest = max((group for group, _ in event.leases), default=None)
    for (group, episode), lease in known.leases.items():
        if lease.owner == event.generator or (group, episode) in taken or group in known.branch.trained:
            continue
        if (newest is not None and group > newest) or format_trajectory_id(group, episode) in known.here:
            continue
        owner = known.engines[lease.owner]
        if owner.process != lease.process:
            continue
        silent = event.at - max(owner.heard, owner.told, known.answering)
        if silent > 2 * known.rules.silence_seconds + SILENT_SECONDS:
            return (
                f"{event.generator} asks for work, and is not leased {format_trajectory_id(group, episode)}, which "
                f"{lease.owner} has: that one is silent since {owner.heard:.3f} s"
            )
    return ""


@rule(WEIGHTS, "session", Acknowledged)
def old_sessions_are_over(known: Known, event: Acknowledged) -> str:
    """What is acknowledged to a sender was not delivered only in sessions that were over."""
    for name in event.ids:
        if known.late.get((event.generator, name)):
            return f"{name} is acknowledged to {event.generator}, who delivered it in a session that was over"
    return ""


# Invariants of evaluations; see `invariants`. Pure.


EVALUATIONS: list[Rule] = []


@rule(EVALUATIONS, "evaluation", Evaluating)
def one_evaluation_at_a_time(known: Known, event: Evaluating) -> str:
    """An evaluation is begun of a step that was made, and when the one before is over."""
    if known.evaluating is not None:
        return f"the evaluation of step {event.step} is begun, and that of step {known.evaluating} is not over"
    if event.step > (made := len(known.branch.steps)):
        return f"the evaluation of step {event.step} is begun, and {made} were made"
    return ""


@rule(EVALUATIONS, "evaluation", Evaluated)
def evaluated_by_the_weights_of_its_step(known: Known, event: Evaluated) -> str:
    """What an evaluation says of a step was sampled by the weights of that step, or by newer ones that were installed meanwhile.
    It poses as many tasks as it is to, the same each time, and none that is trained."""
    made = known.branch.made
    least = max(version for version, steps in made.items() if steps <= event.step)
    if event.oldest < least or event.newest > known.newest:
        return (
            f"the evaluation of step {event.step}, whose weights are version {least}, was sampled by versions {event.oldest} to "
            f"{event.newest}"
        )
    if len(set(event.tasks)) != known.rules.evaluated_tasks or event.tasks != (known.evaluated_tasks or event.tasks):
        return f"the evaluation of step {event.step} poses tasks {event.tasks}, and there was {known.evaluated_tasks}"
    trained = {f.task for playings in known.sent.values() for f in playings.values()}
    if both := trained & set(event.tasks):
        return f"tasks {sorted(both)} are evaluated and trained"
    return ""


@rule(EVALUATIONS, "evaluation", Finished)
def each_step_that_is_due_is_evaluated_once(known: Known, event: Finished) -> str:
    """When the run has ended, its record has each evaluation once, in order. None is missing that was due: not for a stop, nor
    for the end of any process. (A resume begins the last one that was due, if it is missing, at the step from which it
    resumes.) There is none only of a step, but the last, at which the one before was still played; where the generator gave it
    up; or where a disk failed."""
    rules, had = known.rules, event.evaluated
    if event.failed or not rules.evaluate_every:
        return ""
    if list(had) != sorted(set(had)):
        return f"the record has evaluations of steps {list(had)}"
    if known.spoiled:
        return ""
    due = [*range(0 if rules.evaluate_first else rules.evaluate_every, event.steps, rules.evaluate_every), event.steps]
    for step, following in zip(due, [*due[1:], event.steps + 1], strict=True):
        excused = step in known.given_up or (step in known.skipped and step < event.steps)
        if not excused and not any(step <= one < following for one in had):
            return f"the evaluation of step {step} is missing: there are those of steps {list(had)}"
    return ""


# What must hold of a run whatever happens to it, checked at every event. Pure.
#
# A **branch** is a lineage with the steps that it has behind it (`branches`). An episode is **here** in a lineage if the
# learner has acknowledged it, or if the spool kept it from before. A checkpoint is **safe** when it has its name and its
# directory is synced. Each rule's docstring (`rules_*.py`) says what it means across
# crashes, resumes and lineages; `RULES` has them all, by name.


RULES = [*TRAINING, *DELIVERY, *WEIGHTS, *EVALUATIONS]


class Checker:
    """Judges one event after the other. `seen`: how many."""

    def __init__(self, rules: Rules):
        self.known = Known(rules)
        self.seen = 0
        self._judges: dict[type[Event], list[Rule]] = {}
        for each in RULES:
            for kind in each.events:
                self._judges.setdefault(kind, []).append(each)

    def see(self, event: Event) -> None:
        """Raises `Violated` at the first event that must not be."""
        self.seen += 1
        known = self.known
        if event.at > known.deadline:
            made = len(known.branch.steps) if known.branches else 0
            raise Violated(
                "stuck",
                f"the step after step {made} had to be made by {known.deadline:.1f} s, and it is {event.at:.1f} s",
            )
        for each in self._judges.get(type(event), ()):
            if reason := each.judge(known, event):
                raise Violated(each.name, reason)
        known.apply(event)
