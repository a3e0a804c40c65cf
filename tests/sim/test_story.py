"""A run as a person reads it, and as a timeline viewer does."""

import typing
from pathlib import Path

import msgspec

from dev.simulation import history
from dev.simulation.faults import PlannedFault
from dev.simulation.history import GroupsLeased, SlotsReported, TimePassed
from dev.simulation.shrink import SimulationCase
from dev.simulation.story import _TELLERS, tell_story, write_story, write_trace
from dev.simulation.workload import SimulatedWorkload
from r3async.record.timeline import Span, read_timeline
from tests.sim.histories import good


def test_every_event_that_a_person_wants_to_read_has_words():
    assert set(_TELLERS) | {SlotsReported, TimePassed} == set(typing.get_args(history.AnyRunEvent))
    told = list(tell_story([*good(), GroupsLeased(99.0, "a")]))
    assert len(told) == len(good())
    assert "driver       starts lineage 2 from step 2 of lineage 1: version 2, 2 groups consumed" in "\n".join(told)
    assert "a            sends g00000002e0001, sampled by version 1 of lineage 1" in "\n".join(told)


def test_a_story_has_the_settings_the_faults_the_last_events_and_the_verdict():
    case = SimulationCase(
        SimulatedWorkload(7, generators=3), (PlannedFault(2.0, "freeze", "learner", 9.0),), "no_dedupe"
    )
    story = write_story(case, good(), "twice: group 3", last=4)
    assert story.startswith("seed 7: generators 3\nmutant: no_dedupe\nfaults: at 2 s freeze learner for 9 s\n")
    assert f"({len(good()) - 4} events before)" in story
    assert story.endswith("after step 4\n\ntwice: group 3")


def test_a_trace_is_what_the_viewers_read(tmp_path: Path):
    spans = [Span("learner", "train", 1000.5, 1002.0, step=3), Span("generator-0", "play", 1000.0, 1001.0)]
    write_trace(tmp_path / "timeline.jsonl", spans, good(), 1000.0)
    assert read_timeline(tmp_path) == sorted(spans, key=lambda span: span.start)
    write_trace(tmp_path / "trace.json", spans, good(), 1000.0)
    trace = msgspec.json.decode((tmp_path / "trace.json").read_bytes())["traceEvents"]
    train = next(entry for entry in trace if entry["name"] == "train")
    assert (train["ph"], train["ts"], train["dur"], train["args"]) == ("X", 500_000, 1_500_000, {"step": 3})
    names = {entry["args"]["name"] for entry in trace if entry["ph"] == "M"}
    assert {"learner", "generator-0", "driver", "a"} <= names
    assert sum(entry["ph"] == "i" for entry in trace) == len(good())
