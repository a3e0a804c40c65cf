"""Which tokens may be trained after any history of checkpoints, crashes and resumes: those of the learner's own past."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3async.checkpoint import CheckpointDirectory, CheckpointError, open_checkpoint
from r3async.checkpoint.manifest import CheckpointUnreadable
from r3async.checkpoint.run_starts import LINEAGES_FILE, begin_lineage, mark_run_directory, read_run_starts
from r3async.data.versions import Lineage, RunStart
from tests.helpers.checkpoint import write_checkpoint


class History:
    """What a run directory goes through. Each set of weights has an identity of its own: a copy in a checkpoint has the same."""

    def __init__(self) -> None:
        self.starts: list[RunStart] = []
        self.weights: dict[tuple[int, int], int] = {}
        """By (lineage, version)."""
        self.checkpoints: list[tuple[Lineage, int, list[int]]] = []
        self.made = 0
        self.begin(None)

    def new(self) -> int:
        self.made += 1
        return self.made

    def begin(self, checkpoint: int | None) -> None:
        """With the start model, or one of the checkpoints."""
        if checkpoint is None:
            parent, self.version, self.timeline = Lineage(), 0, [0]
        else:
            parent, self.version, timeline = self.checkpoints[checkpoint % len(self.checkpoints)]
            self.timeline = list(timeline)
        self.lineage, start = parent.start_child(self.starts, self.version, "model")
        assert start.lineage not in {s.lineage for s in self.starts}
        self.starts.append(start)
        self.weights[start.lineage, self.version] = self.timeline[-1]

    def step(self) -> None:
        self.version += 1
        self.timeline.append(self.new())
        self.weights[self.lineage.number, self.version] = self.timeline[-1]

    def save(self) -> None:
        self.checkpoints.append((self.lineage, self.version, list(self.timeline)))

    def check(self) -> None:
        """Of all weights that ever were, exactly those that the learner came by may have sampled what it trains."""
        for (lineage, version), weights in self.weights.items():
            valid = not self.lineage.rejection_reason(lineage, version, self.version)
            assert valid is (weights in self.timeline), (lineage, version, self.lineage, self.timeline)


moves = st.lists(st.tuples(st.sampled_from(["step", "save", "resume", "restart"]), st.integers(0, 20)), max_size=40)


@settings(max_examples=400)
@given(moves)
def test_exactly_the_weights_of_the_learners_own_past_may_have_sampled_what_it_trains(moves: Any) -> None:
    history = History()
    for what, number in moves:
        if what == "step":
            history.step()
        elif what == "save":
            history.save()
        else:
            history.begin(number if what == "resume" and history.checkpoints else None)
        history.check()


def test_the_number_of_a_version_that_was_taken_back_is_not_its_name() -> None:
    """Version 40, a checkpoint of 38, a crash; trained on to 40 again: what the first 39 sampled stays refused."""
    first, start = Lineage().start_child([], 0, "m")
    second, again = first.start_child([start], 38, "m")
    third, _ = first.start_child([start, again], 38, "m")
    assert [x.number for x in (first, second, third)] == [1, 2, 3]
    for lineage, other in ((second, 1), (third, 1), (third, 2)):
        assert not lineage.rejection_reason(other, 38, 40)
        assert f"version 39 of lineage {other}, which a resume took back" in lineage.rejection_reason(other, 39, 40)
    assert not third.rejection_reason(3, 39, 40)
    assert "sampled by version 41, and the learner is at version 40" in third.rejection_reason(3, 41, 40)
    assert "no lineage, which is not in the past of lineage 3" in third.rejection_reason(0, 0, 40)
    assert "lineage 9, which is not in the past of lineage 3" in third.rejection_reason(9, 0, 40)
    assert "lineage 3" in third.rejection_reason(3, 38, 40, from_earlier_start=True)


def test_another_start_model_is_another_version_0() -> None:
    first, start = Lineage().start_child([], 0, "m")
    same, _ = Lineage().start_child([start], 0, "m")
    other, _ = Lineage().start_child([start], 0, "n")
    assert not same.rejection_reason(1, 0, 0)
    assert same.rejection_reason(1, 1, 5)
    assert other.rejection_reason(1, 0, 0)
    assert (first.number, same.number, other.number) == (1, 2, 2)


def opened(directory: Path, step: int, **changes: Any) -> Any:
    return open_checkpoint(write_checkpoint(CheckpointDirectory(directory), step, **changes))


def test_a_number_is_on_the_disk_before_its_start_and_never_taken_twice(tmp_path: Path) -> None:
    assert read_run_starts(tmp_path) is None
    mark_run_directory(tmp_path)
    assert read_run_starts(tmp_path) == []
    first = begin_lineage(tmp_path, None, "m")
    kept = opened(tmp_path / "checkpoints", 4, lineage=first)
    assert kept.state.lineage == first
    crashed = [begin_lineage(tmp_path, kept, "m") for _ in range(3)]
    assert [x.number for x in crashed] == [2, 3, 4]
    assert crashed[2].past == {1: 4, 2: 4, 3: 4}
    mark_run_directory(tmp_path)
    assert [s["lineage"] for s in json.loads((tmp_path / LINEAGES_FILE).read_text())["starts"]] == [1, 2, 3, 4]
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == [LINEAGES_FILE]


def test_a_run_that_begins_where_another_one_was_takes_no_number_of_it(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    numbers = [begin_lineage(tmp_path / "a", None, "m") for _ in range(3)]
    other = opened(tmp_path / "a" / "checkpoints", 4, lineage=numbers[-1])
    first = begin_lineage(tmp_path / "b", other, "m", "a step 4")
    assert (first.number, first.past) == (4, {1: 0, 2: 0, 3: 4})
    (start,) = read_run_starts(tmp_path / "b") or []
    assert start == RunStart(4, 3, 4, "m", "a step 4")


def test_a_record_of_starts_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / LINEAGES_FILE).write_text('{"starts": [')
    with pytest.raises(CheckpointError, match=r"lineages\.json is damaged.*spool/ aside"):
        begin_lineage(tmp_path, None, "m")


def test_a_record_of_starts_that_the_system_does_not_return_now_is_not_called_damaged(tmp_path, monkeypatch) -> None:
    """Who reads that it is damaged moves it aside, and with it the run."""

    def has_no_descriptor(path: Path, **_: Any) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    begin_lineage(tmp_path, None, "m")
    monkeypatch.setattr("r3async.checkpoint.run_starts.read_file", has_no_descriptor)
    with pytest.raises(CheckpointUnreadable, match="the same command tries again") as refused:
        begin_lineage(tmp_path, None, "m")
    assert "aside" not in str(refused.value)
