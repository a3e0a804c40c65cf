"""A few of the mutations that `python -m dev fuzz` makes a million of; R3ASYNC_FUZZ=N makes N messages here."""

import os

import pytest

from dev.fuzz.checkpoints import EQUAL, LATE, OTHER, REFUSED, fuzz_checkpoints
from dev.fuzz.messages import fuzz_receiver, fuzz_spool

COUNT = int(os.environ.get("R3ASYNC_FUZZ", "3000"))


async def test_mutated_messages_are_refused_with_a_reason_or_taken_as_they_were_sent():
    report = await fuzz_receiver(COUNT, seed=1)
    assert sum(report.outcomes.values()) == COUNT
    assert min(report.outcomes.values()) > COUNT // 500, report.outcomes
    assert len(report.outcomes) == 3, "every kind of answer was met"
    assert report.slowest < 5
    assert report.growth_mib < 32


async def test_mutated_spool_files_give_back_only_what_was_written(tmp_path):
    report = await fuzz_spool(COUNT // 10, seed=1, directory=tmp_path)
    assert report.outcomes["refused with a reason"] > COUNT // 50
    assert report.outcomes["trajectories that were saved from damaged files"] > COUNT // 50
    assert report.slowest < 5
    assert report.growth_mib < 32


@pytest.mark.long
def test_mutated_checkpoints_are_refused_with_a_reason_or_read_as_they_were_written(tmp_path):
    report = fuzz_checkpoints(COUNT // 10, seed=1, directory=tmp_path)
    assert sum(report.outcomes.values()) == COUNT // 10
    assert set(report.outcomes) == {REFUSED, LATE, OTHER, EQUAL}, "every kind of outcome was met"
    assert report.outcomes[REFUSED] > COUNT // 20
    assert report.slowest < 5
    assert report.growth_mib < 32
