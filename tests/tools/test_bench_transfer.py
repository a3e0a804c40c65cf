"""`python -m dev bench transfer`: every engine has the learner's bits, once a host, in bounded memory. Times are never judged."""

from __future__ import annotations

import msgspec
import pytest
from typer.testing import CliRunner

from dev.__main__ import app
from dev.bench.transfer import Report


@pytest.mark.nightly
def test_transfer():
    result = CliRunner().invoke(app, ["bench", "transfer", "--quick", "--json"])
    assert result.exit_code == 0, result.output
    report = msgspec.json.decode(result.stdout.splitlines()[-1], type=Report)
    layouts = [(case.engines, case.hosts) for case in report.cases]
    assert layouts == [(1, 1), (2, 1), (1, 2), (2, 2), (2, 3)]
    for case in report.cases:
        assert case.equal
        assert case.files == max(1, case.hosts - 1)
        assert case.dense_bytes >= (case.hosts - 1) * report.bytes
        assert case.delta_bytes <= case.dense_bytes / 5
        assert max(case.engine_extra, case.learner_extra) < report.engine_limit
    assert report.rank_extra < report.rank_limit
