"""`bench overlap`: what it configures, what it makes of a run's rows, and what it predicts from one of them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from r3async.config import Config, to_toml
from r3async.record.timeline import Timeline
from r3async.tools.bench.jobs import BenchError
from r3async.tools.bench.overlap import Plan, configure, predict_all, run
from tests.sim.test_capacity import row

PLAN = Plan([0, 1], steps=12, settle=4, groups_per_step=2, samples_per_group=2)


def write_run(directory: Path, config: Config) -> None:
    """Calls of a second and tools of two, whatever runs beside; a step trains for one and a half."""
    directory.mkdir()
    (directory / "config.toml").write_text(to_toml(config))
    timeline = Timeline(directory, "generator-0")
    learner = Timeline(directory, "learner")
    rows = []
    for step in range(config.steps):
        start = 10.0 * step
        for turn in range(3):
            began = start + 3.0 * turn
            timeline.add("call", began, began + 1.0, turn=turn, tokens=10, prompt=0, running=4)
            if turn < 2:
                timeline.add("environment", began + 1.0, began + 3.0)
        learner.add("train", start + 8.0, start + 9.5, step=step + 1)
        rows.append({**row(100, 1.5), "step": step + 1, "time": start + 9.9})
    (directory / "metrics.jsonl").write_bytes(b"".join(msgspec.json.encode(r) + b"\n" for r in rows))


def test_every_bound_is_predicted_from_the_run_with_one(tmp_path: Path) -> None:
    config = configure(PLAN, 1)
    write_run(tmp_path / "run", config)
    made = predict_all({0: 11.0, 1: 5.0}, tmp_path / "run", config, PLAN.settle)
    on_policy, one = made.points
    # Three turns and their tools, a step, and the weights: copied, written and installed (see `row`).
    assert on_policy.predicted == pytest.approx(3 * (1.0 + 2.0) + 1.5 + 0.05 + 0.25 + 0.1, rel=1e-3)
    assert on_policy.error == pytest.approx(on_policy.predicted / 11.0 - 1)
    assert one.predicted == pytest.approx(on_policy.predicted / 2, rel=0.1)


def test_a_prediction_needs_the_run_that_it_is_calibrated_on(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="calibrated on S = 1"):
        run(Plan([0, 2]), print, keep=tmp_path, predicting=True)
