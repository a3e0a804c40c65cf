"""`bench overlap`: what it configures, what it makes of a run's rows, and what it predicts from one of them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dev.bench.jobs import ANSWER, BenchError
from dev.bench.overlap import Plan, configure, predict_all, run
from r3async.config import Config, config_to_toml
from r3async.record.timeline import Timeline
from tests.sim.test_capacity import row

FIGURES = {
    "learner/wait_seconds": 1.0,
    "generator/engine_idle_share": 0.5,
    "staleness/max": 1,
    "staleness/mean": 0.5,
    "weights/update_seconds": 0.3,
    "reward/mean": 0.5,
}
PLAN = Plan([0, 1], steps=12, settle=4, prompts_per_step=2, group_size=2)


def write_run(directory: Path, config: Config) -> None:
    """Calls of a second and tools of two, whatever runs beside; a step trains for one and a half."""
    directory.mkdir()
    (directory / "config.toml").write_text(config_to_toml(config))
    timeline = Timeline(directory, "generator-0")
    learner = Timeline(directory, "learner")
    rows = []
    for step in range(config.steps):
        start = 10.0 * step
        for turn in range(3):
            began = start + 3.0 * turn
            timeline.add_span("call", began, began + 1.0, turn=turn, tokens=10, prompt=0, running=4)
            if turn < 2:
                timeline.add_span("environment", began + 1.0, began + 3.0)
        learner.add_span("train", start + 8.0, start + 9.5, step=step + 1)
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


def test_an_interrupted_measurement_continues_with_the_runs_that_are_not_whole(tmp_path, monkeypatch):
    made: list[str] = []
    stops = [12, 5]  # S = 0 is killed after its last step, and then S = 1 in the middle

    def train(config: Config, directory: Path, **_: object) -> None:
        directory.mkdir()
        write_run(directory / config.name, config)
        file = directory / config.name / "metrics.jsonl"
        rows = [FIGURES | msgspec.json.decode(line) for line in file.read_bytes().splitlines()]
        name = directory.name
        if stops and name not in made:
            made.append(name)
            file.write_bytes(b"".join(msgspec.json.encode(r) + b"\n" for r in rows[: stops.pop(0)]))
            raise BenchError("interrupted")
        file.write_bytes(b"".join(msgspec.json.encode(r) + b"\n" for r in rows))
        (directory / ANSWER).write_text("null")
        made.append(name)

    monkeypatch.setattr("dev.bench.overlap.train_apart", train)
    monkeypatch.setattr("r3async.tools.init_model.init_model", lambda model, *_, **__: model.mkdir())
    for _ in range(2):
        with pytest.raises(BenchError, match="interrupted"):
            run(PLAN, print, keep=tmp_path)
    report = run(PLAN, print, keep=tmp_path)
    assert [r.max_staleness for r in report.runs] == [0, 1]
    assert made == ["s0", "s0", "s1", "s1"]
    assert run(PLAN, print, keep=tmp_path) == report
    assert made == ["s0", "s0", "s1", "s1"], "a whole run is not made again"
