"""Invariants of weights on their way, and of who waits for whom; see `invariants`. Pure."""

from __future__ import annotations

import math

from r3async.data.tokens import format_trajectory_id
from r3async.tools.simulate.history import Acknowledged, Arrived, Leased, Passed, Placed, Plays, Removed
from r3async.tools.simulate.known import Known
from r3async.tools.simulate.rules import Rule, rule

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
