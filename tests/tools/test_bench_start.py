"""`bench start`: every stage of a start ends, in order, and what its processes cost is counted."""

import pytest

from dev.bench.start import render, run
from r3async.config import ConfigError

STAGES = ("model", "ray", "learner", "generator", "step")


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.engine
def test_a_start_without_a_model_is_measured_by_stage_and_by_process(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    report = run(["none", "help"], 1, print, quick=True)
    (start,), (asked,) = report.cases["none"], report.cases["help"]
    assert set(start.stages) == set(STAGES)
    assert 0 < start.stages["model"] < start.stages["ray"] < start.stages["generator"] < start.stages["step"]
    assert start.seconds == start.stages["step"]
    assert {"driver", "learner", "generator", "conductor", "ray"} <= set(start.cpu)
    assert start.cpu_seconds == pytest.approx(sum(start.cpu.values()), abs=0.01)
    assert asked.cpu_seconds > 0.05
    text = render(report)
    assert "| none" in text
    assert "learner" in text


def test_a_case_that_there_is_not_is_refused():
    with pytest.raises(ConfigError, match="'warm': there are model, none, help"):
        run(["warm"], 1, print)
