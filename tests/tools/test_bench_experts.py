"""`python -m dev bench experts`: both forms compute the same, and what the stacks are for is in the report."""

from __future__ import annotations

import msgspec
from typer.testing import CliRunner

from dev.__main__ import app
from dev.bench.experts import Report


def test_stacks_equal_the_loop_in_fewer_operations():
    answer = CliRunner().invoke(app, ["bench", "experts", "--quick", "--json"])
    assert answer.exit_code == 0, answer.output
    (compared,) = msgspec.json.decode(answer.stdout.splitlines()[-1], type=Report).compared
    assert compared.difference <= 1e-6
    assert compared.stacks.operations < compared.loop.operations / 2
    assert compared.stacks.waits == 0 < compared.loop.waits
