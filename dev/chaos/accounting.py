"""Checks that everything was trained once, as it was sent, and that nothing acknowledged was
lost. Pure functions.

The run's own record (`trained.jsonl`) shows what was trained; the messages that passed the relays
show what was sent and acknowledged.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from r3async.record.trained_trajectories import TrainedStep


class SentRecord(msgspec.Struct, frozen=True, tag="sent", tag_field="kind"):
    """A record that a trajectory's payload left its generator.

    Attributes:
        play: Identifier of this rollout of the episode, unique among its rollouts.
        newest: Version that sampled the newest token; -1 if no token was sampled.
        began: Time at which the rollout began; None for just now.
    """

    at: float
    trajectory_id: str
    group: int
    play: str
    newest: int
    crc32: int
    began: float | None = None


class AcknowledgedRecord(msgspec.Struct, frozen=True, tag="acknowledged", tag_field="kind"):
    """A record that the learner acknowledged these trajectories."""

    at: float
    trajectory_ids: list[str]


class DamageRecord(msgspec.Struct, frozen=True, tag="damaged", tag_field="kind"):
    """A record that one bit of a message was flipped in transit."""

    at: float


class RunRestart(msgspec.Struct, frozen=True):
    """A restart of the run from a checkpoint of `version`, after which groups before `groups`
    may have a slot."""

    at: float
    version: int
    groups: int


class LineageStart(msgspec.Struct, frozen=True):
    """A start of the run: `lineage` began with version `version` of lineage `parent`, or with the
    start model if that is 0."""

    lineage: int
    parent: int
    version: int


RelayRecord = SentRecord | AcknowledgedRecord | DamageRecord


def check_trained(
    steps: Sequence[TrainedStep], expected: int, prompts_per_step: int, group_size: int
) -> list[str]:
    """Return problems in the record of `expected` steps: each step, each group and each episode
    must be there once."""
    problems = []
    if [s.step for s in steps] != list(range(1, expected + 1)):
        problems.append(
            f"steps are not 1 to {expected}, each once and in order: {[s.step for s in steps]}"
        )
    groups = Counter(g for s in steps for g in s.groups)
    problems += [f"group {g} was trained {n} times" for g, n in groups.items() if n > 1]
    lost = sorted(set(range(expected * prompts_per_step)) - set(groups))
    if lost:
        problems.append(f"groups {lost} were never trained")
    names = Counter(name for s in steps for name in s.trajectories)
    problems += [f"trajectory {name} was trained {n} times" for name, n in names.items() if n > 1]
    for step in steps:
        if len(step.trajectories) != len(step.groups) * group_size:
            problems.append(
                f"step {step.step} trained {len(step.trajectories)} trajectories of "
                f"{len(step.groups)} groups of {group_size}"
            )
    return problems


def check_lineages(steps: Sequence[TrainedStep], starts: Iterable[LineageStart]) -> list[str]:
    """Return a problem for each trajectory that was sampled by weights from which the trained
    weights do not descend.

    The record has the lineage that made each version that was not rolled back. A version also has
    other names: those of the lineages that began with a copy of it.
    """
    start_by_lineage = {start.lineage: start for start in starts}
    lineage_by_version: dict[int, int] = {}

    def is_past(lineage: int, version: int) -> bool:
        if lineage_by_version.get(version) == lineage:
            return True
        start = start_by_lineage.get(lineage)
        if start is None or start.version != version:
            return False
        return is_past(start.parent, version) if start.parent else version == 0

    problems = []
    for step in steps:
        if not is_past(step.lineage, step.version):
            problems.append(
                f"step {step.step} changed version {step.version} of lineage {step.lineage}, "
                "which is not left"
            )
        for name, lineage, newest in zip(
            step.trajectories, step.lineages, step.newest, strict=True
        ):
            if newest >= 0 and not is_past(lineage, newest):
                problems.append(
                    f"step {step.step} trained {name}, sampled by version {newest} of lineage "
                    f"{lineage}: these weights were taken back"
                )
        lineage_by_version[step.version + 1] = step.lineage
    return problems


def check_content(steps: Sequence[TrainedStep], records: Iterable[RelayRecord]) -> list[str]:
    """Return a problem for each trained trajectory whose tokens are not those of any rollout of
    it that was sent."""
    sent: dict[str, set[int]] = defaultdict(set)
    for message in records:
        if isinstance(message, SentRecord):
            sent[message.trajectory_id].add(message.crc32)
    problems = []
    for step in steps:
        for name, crc32 in zip(step.trajectories, step.crc32, strict=True):
            if crc32 not in sent[name]:
                what = (
                    "was never sent"
                    if not sent[name]
                    else "was trained with other tokens than were sent"
                )
                problems.append(f"trajectory {name} {what}")
    return problems


def check_durable(records: Iterable[RelayRecord], restarts: Sequence[RunRestart]) -> list[str]:
    """Return a problem for each trajectory that was acknowledged and then played again, and so
    was not durable.

    A rollout that had begun before the acknowledgement is no problem: its generator was silent and
    woke up. Nor is it a problem if the run went back to weights that are older than the
    trajectory's tokens, or to where its group has no slot: such a trajectory is dropped.
    """
    problems: list[str] = []
    playing: dict[str, SentRecord] = {}
    acknowledged: dict[str, tuple[float, SentRecord]] = {}
    for message in sorted(records, key=lambda m: m.at):
        if isinstance(message, AcknowledgedRecord):
            for name in message.trajectory_ids:
                if name in playing and name not in acknowledged:
                    acknowledged[name] = (message.at, playing[name])
            continue
        if isinstance(message, DamageRecord):
            continue
        at, before = acknowledged.get(message.trajectory_id, (0.0, message))
        if message.began is not None and message.began <= at:
            continue
        if before.play != message.play:
            back = [r for r in restarts if at <= r.at <= message.at]
            if not any(r.version < before.newest or r.groups <= before.group for r in back):
                problems.append(
                    f"trajectory {message.trajectory_id} was acknowledged and then played again: "
                    "it had been lost"
                )
            del acknowledged[message.trajectory_id]
        playing[message.trajectory_id] = message
    return problems
