"""The story of a simulated run, who did what and when in virtual time, and its trace for a
timeline viewer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

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
    GroupsLimited,
    InstallRequested,
    LineageBegan,
    MissingReported,
    ParentAssigned,
    ParentRequested,
    PlayRequested,
    PowerFailed,
    ProcessEnded,
    PublishedRemoved,
    RolloutFacts,
    RunEvent,
    RunFinished,
    SlotsReported,
    SpoolFileGrew,
    SpoolFileRemoved,
    StepBegan,
    StepTrained,
    TimePassed,
    TrajectoriesAcknowledged,
    TrajectoriesDelivered,
    TrajectoryQuarantined,
    TrajectoryRefused,
    TrajectorySent,
    VersionArrived,
    VersionFetched,
    VersionRemoved,
    WeightsInstalled,
    WeightsPublished,
)
from dev.simulation.shrink import SimulationCase
from r3async.record.timeline import Span

E = TypeVar("E", bound=RunEvent)
StoryLine = tuple[str, str]
"""A description of an event: who, and what."""

_TELLERS: dict[type[RunEvent], Callable[[Any], StoryLine]] = {}


def _register_teller(
    kind: type[E],
) -> Callable[[Callable[[E], StoryLine]], Callable[[E], StoryLine]]:
    def add_teller(tell: Callable[[E], StoryLine]) -> Callable[[E], StoryLine]:
        _TELLERS[kind] = tell
        return tell

    return add_teller


def _name_groups(groups: Sequence[int]) -> str:
    return f"group{'s' if len(groups) != 1 else ''} {', '.join(map(str, groups))}"


def _version_range(f: RolloutFacts) -> str:
    """Return the range of versions that sampled the rollout, in words."""
    return (
        f"version {'-'.join(map(str, dict.fromkeys((f.versions[0], f.versions[-1]))))}"
        if f.versions
        else "nobody"
    )


@_register_teller(LineageBegan)
def _tell_lineage_began(e: LineageBegan) -> StoryLine:
    past = f"from step {e.step} of lineage {e.parent}" if e.parent else "from the start model"
    return (
        "driver",
        f"starts lineage {e.lineage} {past}: version {e.version}, {e.consumed} groups consumed",
    )


@_register_teller(ProcessEnded)
def _tell_process_ended(e: ProcessEnded) -> StoryLine:
    return e.who, "ENDS"


@_register_teller(PowerFailed)
def _tell_power_failed(e: PowerFailed) -> StoryLine:
    return e.host or "power", "LOSES what was not synced"


@_register_teller(GroupsLeased)
def _tell_groups_leased(e: GroupsLeased) -> StoryLine:
    return e.generator, ("has ended, and is leased " if e.ended else "is leased ") + "; ".join(
        f"group {group} episodes {', '.join(map(str, episodes))}" for group, episodes in e.leases
    )


@_register_teller(MissingReported)
def _tell_missing_reported(e: MissingReported) -> StoryLine:
    lacking = {group: episodes for group, episodes in e.missing.items() if episodes}
    return "learner", f"lacks {lacking or 'nothing'} of {_name_groups(list(e.missing))}"


@_register_teller(InstallRequested)
def _tell_install_requested(e: InstallRequested) -> StoryLine:
    return e.generator, f"is given version {e.version} of lineage {e.lineage}"


@_register_teller(GaveUp)
def _tell_gave_up(e: GaveUp) -> StoryLine:
    return e.generator, "installs nothing"


@_register_teller(GeneratorStopped)
def _tell_generator_stopped(e: GeneratorStopped) -> StoryLine:
    return e.generator, "is asked to stop"


@_register_teller(ParentRequested)
def _tell_parent_requested(e: ParentRequested) -> StoryLine:
    return e.generator, "asks where it gets weights from"


@_register_teller(ParentAssigned)
def _tell_parent_assigned(e: ParentAssigned) -> StoryLine:
    failed = f", and not from {', '.join(e.avoid)}" if e.avoid else ""
    return e.generator, f"gets weights from {e.parent or 'the learner'}{failed}"


@_register_teller(VersionArrived)
def _tell_version_arrived(e: VersionArrived) -> StoryLine:
    return e.generator, f"has version {e.version} on its host"


@_register_teller(VersionFetched)
def _tell_version_fetched(e: VersionFetched) -> StoryLine:
    return e.generator, f"uses {e.file or 'a file of the learner'}"


@_register_teller(VersionRemoved)
def _tell_version_removed(e: VersionRemoved) -> StoryLine:
    return e.generator, f"removes {e.file}"


@_register_teller(PlayRequested)
def _tell_play_requested(e: PlayRequested) -> StoryLine:
    return e.generator, "begins to play"


@_register_teller(WeightsInstalled)
def _tell_weights_installed(e: WeightsInstalled) -> StoryLine:
    return e.generator, f"installs version {e.version} of lineage {e.lineage}"


@_register_teller(TrajectorySent)
def _tell_trajectory_sent(e: TrajectorySent) -> StoryLine:
    f = e.trajectory
    return (
        e.generator,
        f"sends {f.trajectory_id}, sampled by {_version_range(f)} of lineage {f.lineage}",
    )


@_register_teller(EpisodeFailed)
def _tell_episode_failed(e: EpisodeFailed) -> StoryLine:
    return e.generator, f"has an environment fail at task {e.task}"


@_register_teller(TrajectoriesDelivered)
def _tell_trajectories_delivered(e: TrajectoriesDelivered) -> StoryLine:
    return (
        e.generator,
        f"delivers {', '.join(e.ids)}{'' if e.current else ', of a session that is over'}",
    )


@_register_teller(TrajectoriesAcknowledged)
def _tell_trajectories_acknowledged(e: TrajectoriesAcknowledged) -> StoryLine:
    return "learner", f"acknowledges {', '.join(e.ids)} to {e.generator}"


@_register_teller(GroupsLimited)
def _tell_groups_limited(e: GroupsLimited) -> StoryLine:
    return "learner", f"asks {e.generator} for groups before {e.until} only"


@_register_teller(TrajectoryRefused)
def _tell_trajectory_refused(e: TrajectoryRefused) -> StoryLine:
    return "learner", f"refuses {e.trajectory_id} of {e.generator}: {e.reason}"


@_register_teller(StepBegan)
def _tell_step_began(e: StepBegan) -> StoryLine:
    return "learner", f"begins step {e.step} at version {e.version} with {_name_groups(e.groups)}"


@_register_teller(StepTrained)
def _tell_step_trained(e: StepTrained) -> StoryLine:
    return (
        "learner",
        (
            f"has made step {e.step} of lineage {e.lineage}, with "
            f"{_name_groups([m[0].group for m in e.groups])}"
        ),
    )


@_register_teller(WeightsPublished)
def _tell_weights_published(e: WeightsPublished) -> StoryLine:
    return "learner", f"publishes version {e.version} of lineage {e.lineage}"


@_register_teller(CheckpointSaved)
def _tell_checkpoint_saved(e: CheckpointSaved) -> StoryLine:
    return "learner", f"has a safe checkpoint of step {e.step}"


@_register_teller(SpoolFileGrew)
def _tell_spool_file_grew(e: SpoolFileGrew) -> StoryLine:
    return "learner", f"stores group {e.group}: {e.file} has {e.nbytes} bytes"


@_register_teller(SpoolFileRemoved)
def _tell_spool_file_removed(e: SpoolFileRemoved) -> StoryLine:
    return "learner", f"removes {e.file} of group {e.group}"


@_register_teller(EvaluationBegan)
def _tell_evaluation_began(e: EvaluationBegan) -> StoryLine:
    return "conductor", f"begins to evaluate step {e.step}"


@_register_teller(EvaluationEnded)
def _tell_evaluation_ended(e: EvaluationEnded) -> StoryLine:
    return "conductor", f"has evaluated step {e.step}, by versions {e.oldest} to {e.newest}"


@_register_teller(EvaluationGivenUp)
def _tell_evaluation_given_up(e: EvaluationGivenUp) -> StoryLine:
    return e.generator, "gives its evaluation up"


@_register_teller(FaultReported)
def _tell_fault_reported(e: FaultReported) -> StoryLine:
    return "FAULT", e.what


@_register_teller(FaultsOver)
def _tell_faults_over(e: FaultsOver) -> StoryLine:
    return "FAULT", "the last one is over"


@_register_teller(RunFinished)
def _tell_run_finished(e: RunFinished) -> StoryLine:
    return (
        "driver",
        f"the run failed: {e.failed}" if e.failed else f"the run has ended, after step {e.steps}",
    )


@_register_teller(EvaluationRemoved)
def _tell_evaluation_removed(e: EvaluationRemoved) -> StoryLine:
    return "driver", f"removes the evaluation after step {e.step}"


@_register_teller(PublishedRemoved)
def _tell_published_removed(e: PublishedRemoved) -> StoryLine:
    return "learner", f"removes its file of version {e.version}"


@_register_teller(TrajectoryQuarantined)
def _tell_trajectory_quarantined(e: TrajectoryQuarantined) -> StoryLine:
    return "learner", f"quarantines a trajectory of group {e.group}"


def _is_interesting(event: RunEvent) -> bool:
    """Return whether an event is interesting to read."""
    quiet = isinstance(event, TimePassed | SlotsReported) or (
        isinstance(event, TrajectoriesDelivered) and event.current
    )
    return not quiet and not (isinstance(event, GroupsLeased) and not event.leases)


def tell_story(events: Sequence[RunEvent]) -> Iterator[str]:
    """Yield a line for each interesting event."""
    for event in events:
        if _is_interesting(event):
            who, what = _TELLERS[type(event)](event)
            yield f"{event.at:9.3f} s  {who:<12} {what}"


def write_story(
    case: SimulationCase, events: Sequence[RunEvent], verdict: str, last: int = 0
) -> str:
    """Return the story of a run: settings other than the defaults, faults, all or the `last`
    events, and the verdict."""
    usual = type(case.workload)(seed=case.workload.seed)
    settings = {
        name: value
        for name, value in msgspec.structs.asdict(case.workload).items()
        if value != getattr(usual, name)
    }
    lines = [
        f"seed {case.workload.seed}: "
        + ", ".join(f"{name} {value}" for name, value in settings.items())
    ]
    lines += [f"mutant: {case.mutant}"] if case.mutant else []
    lines += [
        "faults: " + ("; ".join(f"at {f.at:g} s {f.to_text()}" for f in case.faults) or "none"),
        "",
    ]
    told_lines = list(tell_story(events))
    if last and len(told_lines) > last:
        lines.append(f"({len(told_lines) - last} events before)")
        told_lines = told_lines[-last:]
    return "\n".join([*lines, *told_lines, "", verdict])


def write_trace(
    path: Path, spans: Sequence[Span], events: Sequence[RunEvent], epoch: float
) -> None:
    """Write a trace.

    A path `*.jsonl` gets the spans, in the format of `timeline.jsonl`. Any other path gets Chrome's
    Trace Event Format, with a row for each actor and a mark for each event. `epoch` is the Unix
    time at virtual second 0.
    """
    if path.suffix == ".jsonl":
        path.write_bytes(b"".join(msgspec.json.encode(span) + b"\n" for span in spans))
        return
    marks = [
        (event.at, *_TELLERS[type(event)](event)) for event in events if _is_interesting(event)
    ]
    rows = {
        who: at
        for at, who in enumerate(
            sorted({span.who for span in spans} | {who for _, who, _ in marks})
        )
    }
    trace: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": who}}
        for who, tid in rows.items()
    ]
    for span in spans:
        facts = {"step": span.step, "version": span.version}
        start = round((span.start - epoch) * 1e6)
        shown = {name: value for name, value in facts.items() if value is not None}
        lasts = max(1, round((span.end - span.start) * 1e6))
        trace.append(
            {
                "ph": "X",
                "name": span.what,
                "pid": 1,
                "tid": rows[span.who],
                "ts": start,
                "dur": lasts,
                "args": shown,
            }
        )
    for at, who, what in marks:
        trace.append(
            {"ph": "i", "s": "t", "name": what, "pid": 1, "tid": rows[who], "ts": round(at * 1e6)}
        )
    path.write_bytes(msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": trace}))
