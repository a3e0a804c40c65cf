"""The story of a simulated run, who did what and when in virtual time, and its trace for a timeline viewer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

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
    Limited,
    Looked,
    Lost,
    NotEvaluated,
    Passed,
    Placed,
    Plays,
    PowerFailed,
    Published,
    Quiet,
    Refused,
    Removed,
    Saved,
    Sent,
    Slots,
    Stored,
    Taken,
    Trained,
    Unlinked,
)
from dev.simulation.shrink import Case
from r3async.record.timeline import Span

E = TypeVar("E", bound=Event)
Words = tuple[str, str]
"""A description of an event: who, and what."""

_TELL: dict[type[Event], Callable[[Any], Words]] = {}


def _of(kind: type[E]) -> Callable[[Callable[[E], Words]], Callable[[E], Words]]:
    def add(tell: Callable[[E], Words]) -> Callable[[E], Words]:
        _TELL[kind] = tell
        return tell

    return add


def _groups(groups: Sequence[int]) -> str:
    return f"group{'s' * (len(groups) != 1)} {', '.join(map(str, groups))}"


def _versions(f: Facts) -> str:
    """Return the range of versions that sampled the rollout, in words."""
    return f"version {'-'.join(map(str, dict.fromkeys((f.versions[0], f.versions[-1]))))}" if f.versions else "nobody"


@_of(Began)
def _began(e: Began) -> Words:
    past = f"from step {e.step} of lineage {e.parent}" if e.parent else "from the start model"
    return "driver", f"starts lineage {e.lineage} {past}: version {e.version}, {e.consumed} groups consumed"


@_of(Lost)
def _lost(e: Lost) -> Words:
    return e.who, "ENDS"


@_of(PowerFailed)
def _power_failed(e: PowerFailed) -> Words:
    return e.host or "power", "LOSES what was not synced"


@_of(Leased)
def _leased(e: Leased) -> Words:
    return e.generator, ("has ended, and is leased " if e.ended else "is leased ") + "; ".join(
        f"group {group} episodes {', '.join(map(str, episodes))}" for group, episodes in e.leases
    )


@_of(Asked)
def _asked(e: Asked) -> Words:
    lacking = {group: episodes for group, episodes in e.missing.items() if episodes}
    return "learner", f"lacks {lacking or 'nothing'} of {_groups(list(e.missing))}"


@_of(Installing)
def _installing(e: Installing) -> Words:
    return e.generator, f"is given version {e.version} of lineage {e.lineage}"


@_of(GaveUp)
def _gave_up(e: GaveUp) -> Words:
    return e.generator, "installs nothing"


@_of(Looked)
def _looked(e: Looked) -> Words:
    return e.generator, "asks where it gets weights from"


@_of(Placed)
def _placed(e: Placed) -> Words:
    failed = f", and not from {', '.join(e.avoid)}" if e.avoid else ""
    return e.generator, f"gets weights from {e.parent or 'the learner'}{failed}"


@_of(Arrived)
def _arrived(e: Arrived) -> Words:
    return e.generator, f"has version {e.version} on its host"


@_of(Fetched)
def _fetched(e: Fetched) -> Words:
    return e.generator, f"uses {e.file or 'a file of the learner'}"


@_of(Removed)
def _removed(e: Removed) -> Words:
    return e.generator, f"removes {e.file}"


@_of(Plays)
def _plays(e: Plays) -> Words:
    return e.generator, "begins to play"


@_of(Installed)
def _installed(e: Installed) -> Words:
    return e.generator, f"installs version {e.version} of lineage {e.lineage}"


@_of(Sent)
def _sent(e: Sent) -> Words:
    f = e.trajectory
    return e.generator, f"sends {f.trajectory_id}, sampled by {_versions(f)} of lineage {f.lineage}"


@_of(Failed)
def _failed(e: Failed) -> Words:
    return e.generator, f"has an environment fail at task {e.task}"


@_of(Delivered)
def _delivered(e: Delivered) -> Words:
    return e.generator, f"delivers {', '.join(e.ids)}{'' if e.current else ', of a session that is over'}"


@_of(Acknowledged)
def _acknowledged(e: Acknowledged) -> Words:
    return "learner", f"acknowledges {', '.join(e.ids)} to {e.generator}"


@_of(Limited)
def _limited(e: Limited) -> Words:
    return "learner", f"asks {e.generator} for groups before {e.until} only"


@_of(Refused)
def _refused(e: Refused) -> Words:
    return "learner", f"refuses {e.trajectory_id} of {e.generator}: {e.reason}"


@_of(Taken)
def _taken(e: Taken) -> Words:
    return "learner", f"begins step {e.step} at version {e.version} with {_groups(e.groups)}"


@_of(Trained)
def _trained(e: Trained) -> Words:
    return "learner", f"has made step {e.step} of lineage {e.lineage}, with {_groups([m[0].group for m in e.groups])}"


@_of(Published)
def _published(e: Published) -> Words:
    return "learner", f"publishes version {e.version} of lineage {e.lineage}"


@_of(Saved)
def _saved(e: Saved) -> Words:
    return "learner", f"has a safe checkpoint of step {e.step}"


@_of(Stored)
def _stored(e: Stored) -> Words:
    return "learner", f"stores group {e.group}: {e.file} has {e.nbytes} bytes"


@_of(Unlinked)
def _unlinked(e: Unlinked) -> Words:
    return "learner", f"removes {e.file} of group {e.group}"


@_of(Evaluating)
def _evaluating(e: Evaluating) -> Words:
    return "conductor", f"begins to evaluate step {e.step}"


@_of(Evaluated)
def _evaluated(e: Evaluated) -> Words:
    return "conductor", f"has evaluated step {e.step}, by versions {e.oldest} to {e.newest}"


@_of(NotEvaluated)
def _not_evaluated(e: NotEvaluated) -> Words:
    return e.generator, "gives its evaluation up"


@_of(Injected)
def _injected(e: Injected) -> Words:
    return "FAULT", e.what


@_of(Quiet)
def _quiet(e: Quiet) -> Words:
    return "FAULT", "the last one is over"


@_of(Finished)
def _finished(e: Finished) -> Words:
    return "driver", f"the run failed: {e.failed}" if e.failed else f"the run has ended, after step {e.steps}"


def _told(event: Event) -> bool:
    """Return whether an event is interesting to read."""
    quiet = isinstance(event, Passed | Slots) or (isinstance(event, Delivered) and event.current)
    return not quiet and not (isinstance(event, Leased) and not event.leases)


def tell(events: Sequence[Event]) -> Iterator[str]:
    """Yield a line for each interesting event."""
    for event in events:
        if _told(event):
            who, what = _TELL[type(event)](event)
            yield f"{event.at:9.3f} s  {who:<12} {what}"


def write_story(case: Case, events: Sequence[Event], verdict: str, last: int = 0) -> str:
    """Return the story of a run: settings other than the defaults, faults, all or the `last` events, and the
    verdict."""
    usual = type(case.workload)(seed=case.workload.seed)
    settings = {
        name: value for name, value in msgspec.structs.asdict(case.workload).items() if value != getattr(usual, name)
    }
    lines = [f"seed {case.workload.seed}: " + ", ".join(f"{name} {value}" for name, value in settings.items())]
    lines += [f"mutant: {case.mutant}"] if case.mutant else []
    lines += ["faults: " + ("; ".join(f"at {f.at:g} s {f.describe()}" for f in case.faults) or "none"), ""]
    told = list(tell(events))
    if last and len(told) > last:
        lines.append(f"({len(told) - last} events before)")
        told = told[-last:]
    return "\n".join([*lines, *told, "", verdict])


def write_trace(path: Path, spans: Sequence[Span], events: Sequence[Event], epoch: float) -> None:
    """Write a trace.

    A path `*.jsonl` gets the spans, in the format of `timeline.jsonl`. Any other path gets Chrome's Trace Event Format,
    with a row for each actor and a mark for each event. `epoch` is the Unix time at virtual second 0.
    """
    if path.suffix == ".jsonl":
        path.write_bytes(b"".join(msgspec.json.encode(span) + b"\n" for span in spans))
        return
    marks = [(event.at, *_TELL[type(event)](event)) for event in events if _told(event)]
    rows = {who: at for at, who in enumerate(sorted({span.who for span in spans} | {who for _, who, _ in marks}))}
    trace: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": who}} for who, tid in rows.items()
    ]
    for span in spans:
        facts = {"step": span.step, "version": span.version}
        start = round((span.start - epoch) * 1e6)
        shown = {name: value for name, value in facts.items() if value is not None}
        lasts = max(1, round((span.end - span.start) * 1e6))
        trace.append(
            {"ph": "X", "name": span.what, "pid": 1, "tid": rows[span.who], "ts": start, "dur": lasts, "args": shown}
        )
    for at, who, what in marks:
        trace.append({"ph": "i", "s": "t", "name": what, "pid": 1, "tid": rows[who], "ts": round(at * 1e6)})
    path.write_bytes(msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": trace}))
