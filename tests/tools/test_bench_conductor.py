"""`python -m dev bench conductor`: a small simulated measurement. Processor time is never judged."""

from __future__ import annotations

import msgspec
import pytest
from typer.testing import CliRunner

from dev.__main__ import app
from dev.bench.conductor import Job, Report, simulated
from dev.bench.fleet import Load


def test_quick_one_reports_each_size():
    answer = CliRunner().invoke(app, ["bench", "conductor", "--quick", "--json"])
    assert answer.exit_code == 0, answer.output
    report = msgspec.json.decode(answer.stdout.splitlines()[-1], type=Report)
    assert report.benchmark == "conductor"
    assert [row.measured.generators for row in report.rows] == [4, 16]
    for row in report.rows:
        m = row.measured
        assert row.groups_per_second == pytest.approx(m.generators * 64 / 8 / 4.0, rel=0.3)
        assert m.busy > 0.8
        assert row.cores > 0
        assert m.steps > 0


def test_a_group_takes_few_messages_however_many_generators_there_are():
    """A call for each group, heartbeats, and what the conductor asks."""
    load = Load(24, places=32, episode_seconds=4.0, warm_up=4.0, seconds=12.0, tensors=1)
    few, many = (simulated(msgspec.structs.replace(load, generators=n), print) for n in (6, 48))
    for measured in (few, many):
        assert measured.leases < 2.5 * measured.groups
        assert measured.busy > 0.75
    assert many.leases / many.groups < 1.1 * few.leases / few.groups
    assert Job(load, "ray").way == "ray"
