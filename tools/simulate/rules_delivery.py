"""Invariants of leases, delivery and storage, and that the run moves; see `invariants`. Pure."""

from __future__ import annotations

from r3async.data.tokens import format_trajectory_id
from r3async.tools.simulate.history import (
    Acknowledged,
    Asked,
    Finished,
    Leased,
    Limited,
    Refused,
    Sent,
    Slots,
    Stored,
    Unlinked,
)
from r3async.tools.simulate.known import Known, Lease
from r3async.tools.simulate.rules import Rule, rule

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
