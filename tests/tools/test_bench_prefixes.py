"""`python -m dev bench prefixes`: the rows saved are those of the prompts. Times are never judged."""

from __future__ import annotations

import msgspec
import pytest
from typer.testing import CliRunner

from dev.__main__ import app
from dev.bench.prefixes import Report, render


@pytest.mark.long
def test_all_but_one_prompt_of_each_group_are_saved():
    answer = CliRunner().invoke(app, ["bench", "prefixes", "--quick", "--json"])
    assert answer.exit_code == 0, answer.output
    report = msgspec.json.decode(answer.stdout.splitlines()[-1], type=Report)
    assert report.benchmark == "prefixes"
    assert len(report.cases) == 2
    for case in report.cases:
        assert case.saved == pytest.approx((case.size - 1) / case.size * case.prompt / case.tokens)
        assert min(case.plain_ms, case.shared_ms, case.pack_ms, case.pack_shared_ms) > 0
    assert "rows saved" in render(report)
