"""`python -m dev bench weights`: a real run, and what its updates took."""

from __future__ import annotations

import msgspec
import pytest
from typer.testing import CliRunner

from dev.__main__ import app
from dev.bench.weights import PARTS, Report


@pytest.mark.nightly
@pytest.mark.usefixtures("local_ray")
@pytest.mark.timeout(600)
def test_the_report_has_every_part_of_an_update():
    answer = CliRunner().invoke(app, ["bench", "weights", "--json", "--updates", "3", "--layers", "2"])
    assert answer.exit_code == 0, answer.output
    report = msgspec.json.decode(answer.stdout.splitlines()[-1], type=Report)
    assert (report.benchmark, report.updates) == ("weights", 3)
    assert set(report.seconds) == set(PARTS)
    assert all(0 < f.median <= f.maximum for f in report.seconds.values())
    assert report.seconds["load"].median < report.seconds["pause"].median < report.seconds["update"].median
    assert 0 < report.overlap < 1
    assert 0 < report.paused_share < 1
    assert report.bytes > 2**18
    assert report.tensors == 2 * (3 * 8 + 9) + 3
    assert report.ms_per_tensor["load"] == pytest.approx(1e3 * report.seconds["load"].median / report.tensors)
