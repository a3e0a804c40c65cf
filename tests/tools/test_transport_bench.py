"""The benchmarks of the wire and the transport: the path, and the figures that do not depend on the machine."""

from __future__ import annotations

import msgspec
import pytest
from typer.testing import CliRunner

from dev.__main__ import app
from dev.bench.transport import render as render_transport
from dev.bench.transport import run as run_transport
from dev.bench.wire import Report
from dev.bench.wire import run as run_wire


def test_bytes_per_token_stay_within_their_budget():
    report = run_wire(quick=True)
    without, *routed = report.cases
    assert without.wire.bytes_per_token <= 10
    for case, budget in zip(routed, (394, 345, 268), strict=True):
        # A short one carries a larger share of its header.
        assert case.wire.bytes_per_token <= budget + 1500 / case.tokens, case.form


def test_bench_wire_prints_one_json_object_last():
    result = CliRunner().invoke(app, ["bench", "wire", "--quick", "--json"])
    assert result.exit_code == 0, result.output
    assert msgspec.json.decode(result.stdout.splitlines()[-1], type=Report).benchmark == "wire"


@pytest.mark.nightly
def test_bench_transport_measures_every_path():
    report = run_transport(quick=True, rounds=1, say=lambda line: None)
    for size in report.sizes:
        assert list(size.paths) == ["raw", "raw, CURVE", "memory", "disk"]
        assert all(rate.gb_per_s > 0 for rate in size.paths.values())
        assert size.paths["raw"].share_of_raw == size.paths["raw, CURVE"].share_of_curve == 1.0
        assert all(rate.share_of_curve_cpu > rate.share_of_raw_cpu for rate in size.paths.values())
        assert all(len(size.paths[p].generator_lag_ms) == 3 for p in ("memory", "disk"))
    assert "of raw" in render_transport(report)
