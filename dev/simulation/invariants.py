"""The invariants of a simulated run, checked at every event whatever happens to the run. Pure functions.

A rule judges the next event, given what is known from the events before. Its docstring states the invariant.
"""

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
    """The error of a violated invariant. `name` is that of the rule; `reason` is for the user."""

    def __init__(self, name: str, reason: str):
        super().__init__(f"{name}: {reason}")
        self.name, self.reason = name, reason


Judge = Callable[[Known, Any], str]
"""A function that returns what is wrong with an event that is about to be applied; "" if nothing is."""


class Rule(NamedTuple):
    name: str
    events: tuple[type[Event], ...]
    judge: Judge


def rule(rules: list[Rule], name: str, *events: type[Event]) -> Callable[[Judge], Judge]:
    """Return a decorator that adds a function to `rules` as the rule `name` for these events."""

    def add(judge: Judge) -> Judge:
        rules.append(Rule(name, events, judge))
        return judge

    return add


# Invariants of leases, delivery, storage, and the end of the run.


RECORD_BYTES = 256
"""Bytes that a trajectory takes in the spool beyond its size in memory."""

DELIVERY: list[Rule] = []


@rule(DELIVERY, "lost", Asked)
def what_is_here_is_not_lacked(known: Known, event: Asked) -> str:
    """An acknowledged trajectory is here until it is trained. The learner never reports that it lacks what is here.

    Without a spool, a trajectory is lost with the learner's process. With a spool it survives the end of every process,
    and with `buffer.fsync` a power failure too. It is then here in every later lineage that may train it: one that
    descends from the weights that sampled it, has not trained its group, has a slot for it, and may train tokens of its
    age."""
    for group, episodes in event.missing.items():
        for episode in episodes:
            if (name := format_trajectory_id(group, episode)) in known.here:
                return f"{name} was acknowledged{_since(known.here[name])}, and the learner lacks it"
    return ""


def _since(at: float) -> str:
    return f" at {at:.3f} s" if at >= 0 else " in an earlier lineage, and kept"


@rule(DELIVERY, "again", Leased)
def nothing_is_played_again(known: Known, event: Leased) -> str:
    """An episode is leased only if nobody has played it, nobody is playing it, and its group is not trained.

    An episode that is here may be leased only if it arrived after the learner was last asked what it lacks of the
    group. An episode that another generator has may be leased only when the process of that generator has ended, or has
    not reported for `supervise.silence_seconds`."""
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
    """A group is leased for the first time only while a slot is free, and no group is passed over.

    Each group that was leased before and is not part of the weights that the lease names takes a slot. So tokens that
    these or newer weights sample cannot become too old."""
    rules, newest = known.rules, known.leased_to
    named = event.versions or [known.engines[event.generator].newest] * len(event.leases)
    for (group, _), version in zip(event.leases, named, strict=True):
        for passed in range(newest + 1, group):
            names = [format_trajectory_id(passed, i) for i in range(rules.group_size)]
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
    """The conductor reports the right number of slots, and takes no more than there are."""
    if event.total != known.rules.slots or not 0 <= event.taken <= event.total:
        return f"{event.taken} slots of {event.total} are taken, and there are {known.rules.slots}"
    return ""


@rule(DELIVERY, "content", Acknowledged)
def only_what_was_sent_is_acknowledged(known: Known, event: Acknowledged) -> str:
    """Every acknowledged trajectory was sent."""
    for name in event.ids:
        if name not in known.sent:
            return f"{name} is acknowledged to {event.generator}, and nobody sent it"
    return ""


@rule(DELIVERY, "refused", Refused)
def what_is_sound_is_taken(known: Known, event: Refused) -> str:
    """The learner accepts every trajectory that a generator of its lineage sends, unless its group is trained."""
    playings = known.sent.get(event.trajectory_id, {}).values()
    if any(f.lineage == known.lineage and f.group not in known.branch.trained for f in playings):
        return f"{event.trajectory_id} of {event.generator} is refused: {event.reason}"
    return ""


@rule(DELIVERY, "failed", Sent)
def what_failed_once_is_played_again(known: Known, event: Sent) -> str:
    """A placeholder is sent for an episode only if its environment failed more than once: it raised, or its process
    ended or hung."""
    f = event.trajectory
    if f.reward is None and known.failed[f.task] < 2:
        return f"{f.trajectory_id} was given up, and its environment failed {known.failed[f.task]} times"
    return ""


@rule(DELIVERY, "memory", Acknowledged)
def memory_is_bounded(known: Known, event: Acknowledged) -> str:
    """Acknowledged trajectories that are not trained take at most the credit of memory, or are a single trajectory.

    Groups that a step might have waited for are not counted. The rule applies without a spool: with one, trajectories
    may be on disk."""
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
    """Generators are told to wait only while the trajectories that were sent and are not trained may exceed the credit.

    Those that the newest step trained may still be held. The rule applies without a spool."""
    if known.rules.durable != "nothing":
        return ""
    if (most := known.most_held()) <= known.rules.credit_bytes:
        return f"{event.generator} may send groups before {event.until} only, and at most {most} bytes are held"
    return ""


def _group(known: Known, name: str) -> int:
    return next(iter(known.sent[name].values())).group


@rule(DELIVERY, "disk", Stored)
def the_spool_has_a_limit(known: Known, event: Stored) -> str:
    """The spool takes at most `buffer.disk_bytes`, not counting groups that a step might have waited for."""
    if event.group < known.horizon:
        return ""
    sizes = {group: sum(files.values()) for group, files in known.files.items() if group >= known.horizon}
    sizes[event.group] = event.nbytes + sum(
        size for file, size in known.files.get(event.group, {}).items() if file != event.file
    )
    allowed = known.rules.disk_bytes + RECORD_BYTES * known.rules.group_size * len(sizes)
    if (taken := sum(sizes.values())) > allowed:
        return f"the spool takes {taken} bytes for groups from {known.horizon} on, and may take {allowed:g}"
    return ""


@rule(DELIVERY, "store", Unlinked)
def what_is_needed_stays_stored(known: Known, event: Unlinked) -> str:
    """A file of the spool is removed only when nothing in it is needed: a safe checkpoint trained its group, nothing of
    the group was acknowledged, or the group is in another file."""
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
    """The spool contains nothing of groups that a safe checkpoint trained when the run has ended, unless a disk failed
    meanwhile, or the last start was cut short."""
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
    """The run ends with all its steps, and with every group up to the last one trained once.

    (That the run makes progress is the rule `stuck` of `Checker`: after the last fault, a step is made within
    `first_seconds`, and each later one within `step_seconds`.)"""
    if event.failed:
        return f"the run failed after step {event.steps}: {event.failed}"
    rules, branch = known.rules, known.branch
    if event.steps != rules.steps or len(branch.steps) != rules.steps:
        return f"the run says {event.steps} steps, {len(branch.steps)} were made, of {rules.steps}"
    if not (rules.more_groups or rules.replaced_groups) and sorted(branch.trained) != list(
        range(rules.steps * rules.prompts_per_step)
    ):
        return f"the run ended, and trained groups {sorted(branch.trained)}"
    return ""


# Invariants of starts, steps and weights.


TRAINING: list[Rule] = []


# -- starts ------------------------------------------------------------------------------------------------------------


@rule(TRAINING, "lineage", Began)
def begins(known: Known, event: Began) -> str:
    """Every start takes a new lineage number, and continues after the first `step` steps of its parent. The version and
    the groups that its checkpoint names are those of these steps."""
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
    """Training happens in the newest lineage alone, and its steps are numbered consecutively."""
    if event.lineage != known.lineage:
        return f"lineage {event.lineage} made step {event.step}, and lineage {known.lineage} has begun"
    if event.step != (made := len(known.branch.steps)) + 1:
        return f"step {event.step} came after step {made}"
    return ""


@rule(TRAINING, "checkpoint", Began)
def nothing_safe_is_passed_over(known: Known, event: Began) -> str:
    """A start resumes from the newest checkpoint that was ever safe, or from a newer one."""
    if event.step < known.safe:
        return f"lineage {event.lineage} begins after step {event.step}, though the checkpoint of step {known.safe} was safe"
    return ""


# -- steps -------------------------------------------------------------------------------------------------------------


@rule(TRAINING, "twice", Taken, Trained)
def no_group_twice(known: Known, event: Taken | Trained) -> str:
    """A group, and so a trajectory, is in at most one step of a branch. Groups of steps that a resume rolled back may
    be trained again."""
    groups = event.groups if isinstance(event, Taken) else [m[0].group for m in event.groups]
    for at, group in enumerate(groups):
        if group in known.branch.trained:
            return f"step {event.step} takes group {group}, which step {known.branch.trained[group]} trained"
        if group in groups[:at]:
            return f"step {event.step} takes group {group} twice"
    return ""


@rule(TRAINING, "whole", Trained)
def groups_are_whole(known: Known, event: Trained) -> str:
    """A step trains whole groups, each episode once and in order. It trains as many groups as the schedule says, and
    more only to reach the number of tokens or to replace groups."""
    rules, count = known.rules, len(event.groups)
    most = rules.slots if rules.more_groups else rules.prompts_per_step + rules.replaced_groups
    if not rules.prompts_per_step <= count <= most:
        return f"step {event.step} trains {count} groups, and schedule.prompts_per_step is {rules.prompts_per_step}"
    for members in event.groups:
        group = members[0].group
        names = [format_trajectory_id(group, i) for i in range(rules.group_size)]
        if [f.trajectory_id for f in members] != names:
            return f"step {event.step} trains {[f.trajectory_id for f in members]} for group {group}"
    return ""


@rule(TRAINING, "replaced", Trained)
def groups_are_replaced_for_want_of_contrast(known: Known, event: Trained) -> str:
    """A step with `schedule.replaced_groups` takes groups until the rewards of enough of them differ. It stops earlier only at
    the end of the budget, or of the groups that may be in flight."""
    rules, branch = known.rules, known.branch
    if not rules.replaced_groups:
        return ""
    wanted, count = rules.prompts_per_step, len(event.groups)
    differ = [len({f.reward for f in members if f.reward is not None}) > 1 for members in event.groups]
    since = [step for step in branch.steps if step.version == branch.version]
    in_flight = max_groups_for_step(
        slots=rules.slots,
        prompts_per_step=wanted,
        steps_left=rules.steps_per_publication - len(since),
        consumed_since=sum(len(step.groups) for step in since),
    )
    budget = min(wanted + rules.replaced_groups, in_flight)
    if count > budget:
        return f"step {event.step} trains {count} groups, and may take {budget}"
    if sum(differ[:-1]) >= wanted:
        return f"step {event.step} takes group {event.groups[-1][0].group}, though {wanted} before it differ"
    if sum(differ) < wanted and count < budget:
        return f"step {event.step} trains {count} groups, {sum(differ)} that differ, and may take {budget}"
    return ""


@rule(TRAINING, "task", Trained)
def a_group_plays_one_task(known: Known, event: Trained) -> str:
    """All episodes of a group play the same task, regardless of generator and time."""
    for members in event.groups:
        if len(tasks := sorted({f.task for f in members})) > 1:
            return f"step {event.step} trains group {members[0].group}, whose episodes play tasks {tasks}"
    return ""


@rule(TRAINING, "window", Taken)
def groups_are_in_order(known: Known, event: Taken) -> str:
    """Each group of a step is within the window, which begins with the oldest untrained group. No older group of the
    window was complete (all its episodes acknowledged) when the step began."""
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
    """A trained token was sampled by weights in the past of those that it changes: the steps that made them are the
    first steps of the learner's branch. This must hold for the (lineage, version) of the token, and its log-prob and
    routes must match."""
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
    """Every trained trajectory was sent by a generator, with every column as it was sent."""
    for f in (f for members in event.groups for f in members):
        if f.content not in known.sent.get(f.trajectory_id, {}):
            return f"step {event.step} trains {f.trajectory_id} as nobody sent it"
    return ""


@rule(TRAINING, "age", Trained)
def none_is_too_old(known: Known, event: Trained) -> str:
    """Every trained token is at most as old, in versions, as the schedule allows."""
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
    """A version is made by `steps_per_publication` steps, or by the last steps of the run, and counts as one."""
    if event.version != known.branch.version:
        return f"step {event.step} is of version {event.version}, and {known.branch.version} versions were made"
    return ""


@rule(TRAINING, "version", Published)
def published_versions_go_up(known: Known, event: Published) -> str:
    """Published versions increase, and were made by steps. A version has other weights than the one before exactly if a
    step between them made an update."""
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
    """Equal steps make bitwise equal weights in every lineage: a checkpoint that loads is complete."""
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
    """An engine installs only newer weights, of its run's lineage, that were published under this name."""
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
    """A generator sends only what was sampled by weights that its current process had installed, in their lineage."""
    f, engine = event.trajectory, known.engines[event.generator]
    if f.lineage != known.lineage:
        return f"{event.generator} sends {f.trajectory_id} of lineage {f.lineage}, in a run of lineage {known.lineage}"
    if strange := [v for v in f.versions if v not in engine.versions]:
        return f"{event.generator} sends {f.trajectory_id} of versions {strange}, and it has had {engine.versions}"
    return f"{event.generator} sends {f.trajectory_id}: {f.wrong}" if f.wrong else ""


# Invariants of the transfer of weights, and of waiting.


SILENT_SECONDS = 20.0
"""Seconds beyond twice `supervise.silence_seconds` after which a silent generator's leases must go to others that
ask."""

WEIGHTS: list[Rule] = []


@rule(WEIGHTS, "arrived", Arrived)
def hosts_have_what_was_published(known: Known, event: Arrived) -> str:
    """A file that a host fetched, whole or as a delta, has the published weights, before any engine reads it."""
    weights = {w for (_, version), w in known.published.items() if version == event.version}
    if event.weights not in weights:
        return f"{event.generator} has fetched version {event.version}, with other weights than were published"
    return ""


@rule(WEIGHTS, "held", Removed)
def what_is_used_stays(known: Known, event: Removed) -> str:
    """The file of a version stays on its host while a process uses it, that is, until the process has fetched another
    version or has ended."""
    if users := sorted(name for name, engine in known.engines.items() if engine.uses == event.file):
        return f"{event.generator} removes {event.file}, which {', '.join(users)} uses"
    return ""


@rule(WEIGHTS, "parent", Placed)
def nobody_gets_a_parent_that_failed_it(known: Known, event: Placed) -> str:
    """A host is never sent for weights to a parent that it reported as failed."""
    if event.parent in event.avoid:
        return f"{event.generator} is to get weights from {event.parent}, which has failed it"
    return ""


@rule(WEIGHTS, "current", Plays)
def nobody_begins_to_play_with_old_weights(known: Known, event: Plays) -> str:
    """A process begins to play with weights at least as new as those that others had when it installed them."""
    engine = known.engines[event.generator]
    if engine.versions and engine.versions[-1] < engine.current:
        return f"{event.generator} begins to play with version {engine.versions[-1]}, and others had {engine.current}"
    return ""


@rule(WEIGHTS, "prompt", Passed)
def weights_come_soon(known: Known, event: Passed) -> str:
    """An installation ends within `install_seconds`, and a generator that plays has the newest version within twice
    that, when the effects of the last fault are over."""
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
    """A host that gets no weights from its source asks for another one, whatever is wrong with the source."""
    for name, engine in known.engines.items():
        since = math.inf if engine.fetching is None or name in event.frozen else engine.fetching
        if event.at > since + known.rules.fetch_seconds:
            return f"{name} waits for weights since {since:.3f} s, and does not look for them anywhere else"
    return ""


@rule(WEIGHTS, "prompt", Leased)
def nobody_waits_for_who_is_silent(known: Known, event: Leased) -> str:
    """The leases of a generator that no longer reports go to another one that asks, before anything newer, as soon as
    its silence is noticed."""
    if event.ended or event.free < known.rules.group_size:
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
    """A trajectory that is acknowledged to a sender was not delivered in outdated sessions alone."""
    for name in event.ids:
        if known.late.get((event.generator, name)):
            return f"{name} is acknowledged to {event.generator}, who delivered it in a session that was over"
    return ""


# Invariants of evaluations.


EVALUATIONS: list[Rule] = []


@rule(EVALUATIONS, "evaluation", Evaluating)
def one_evaluation_at_a_time(known: Known, event: Evaluating) -> str:
    """An evaluation begins after a step that was made, and after the previous evaluation is over."""
    if known.evaluating is not None:
        return f"the evaluation of step {event.step} is begun, and that of step {known.evaluating} is not over"
    if event.step > (made := len(known.branch.steps)):
        return f"the evaluation of step {event.step} is begun, and {made} were made"
    return ""


@rule(EVALUATIONS, "evaluation", Evaluated)
def evaluated_by_the_weights_of_its_step(known: Known, event: Evaluated) -> str:
    """The episodes of an evaluation were sampled by the weights of its step, or by newer ones that were installed
    meanwhile. It poses the configured number of tasks, the same ones each time, and none that is trained."""
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
    """The record of a run that has ended has each evaluation once, in order, and all that were due, even after a stop
    or the end of any process. (A resume begins the last one that was due, if it is missing, at the step from which it
    resumes.)

    An evaluation may be missing only if the one before was still being played, except after the last step; if the
    generator gave it up; or if a disk failed."""
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


# All invariants, and the checker that applies them.
#
# A **branch** is a lineage together with the steps before it (`Known.branches`). An episode is **here** in a lineage if the
# learner has acknowledged it, or if the spool kept it from before. A checkpoint is **safe** when it has its final name and its
# directory is synced. The docstring of each rule says what it means across crashes, resumes and lineages. `RULES` contains
# all rules.


RULES = [*TRAINING, *DELIVERY, *WEIGHTS, *EVALUATIONS]


class Checker:
    """A checker that judges one event after the other. `seen` counts them."""

    def __init__(self, rules: Rules):
        self.known = Known(rules)
        self.seen = 0
        self._judges: dict[type[Event], list[Rule]] = {}
        for each in RULES:
            for kind in each.events:
                self._judges.setdefault(kind, []).append(each)

    def see(self, event: Event) -> None:
        """Judge an event, and add it to what is known. Raises `Violated` if it violates an invariant."""
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
