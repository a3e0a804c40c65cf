"""`python -m dev bench loss`: both forms compute the same, and the report says so."""

from __future__ import annotations

import msgspec
import pytest
from typer.testing import CliRunner

from dev.__main__ import app
from dev.bench.loss import Report


@pytest.mark.long
def test_both_forms_give_the_same_loss_and_gradient():
    answer = CliRunner().invoke(app, ["bench", "loss", "--quick", "--json"])
    assert answer.exit_code == 0, answer.output
    report = msgspec.json.decode(answer.stdout.splitlines()[-1], type=Report)
    assert report.benchmark == "loss"
    assert abs(report.naive.loss - report.chunked.loss) < 1e-5 * report.naive.loss
    assert report.gradient_difference < 1e-5
    # Logits of all tokens in float32 are 32 MiB, of one chunk as many: at least two copies of them are there at once.
    assert report.naive.peak_mib > 64
    assert report.chunked.peak_mib > 0
    assert len(report.chunked.seconds) == report.job.repeats
