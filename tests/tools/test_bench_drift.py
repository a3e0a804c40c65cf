"""`bench drift`: its formulas, the simulated step response, and one small measurement with real runs."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from dev.bench.drift import Plan, Report, burst_of, phase_of, render, run, simulate, tables
from dev.bench.jobs import ANSWER, BenchError
from dev.bench.step_response import Response, response


def test_steps_above_the_target_are_counted_and_the_worst_window_is_a_mean():
    drifts = [1.0, 1.5, 4.0, 2.0, 1.4, 1.6, *[1.0] * 30]
    found = response(drifts)
    assert (found.above, found.tamed) == (3, 6)
    assert found.worst == pytest.approx((sum(drifts[:6]) + 19) / 25)
    assert response([2.0] * 3) == Response(3, None, 2.0)
    assert response([1.0] * 6) == Response(0, 0, 1.0)


def test_drifts_of_an_age_are_means_over_the_steps_that_have_it():
    rows = [
        {
            "rollout_kl/k3": 0.1,
            "rollout_kl/served_k3": 0.15,
            "rollout_kl/k3_staleness_1": 0.02,
            "rollout_kl/served_k3_staleness_1": 0.03,
        },
        {
            "rollout_kl/k3": 0.3,
            "rollout_kl/served_k3": 0.45,
            "rollout_kl/k3_staleness_1": 0.04,
            "rollout_kl/served_k3_staleness_1": 0.07,
        },
        {"rollout_kl/k3": 0.2, "rollout_kl/served_k3": 0.30, "rollout_kl/k3_staleness_2": 0.04},
    ]
    phase = phase_of("calm", rows)
    (one,) = phase.ages
    assert (one.age, one.steps) == (1, 2)
    assert (one.replayed, one.served, one.above) == pytest.approx((0.03, 0.05, 0.02))
    assert one.error == pytest.approx(0.01)
    assert one.ratio == pytest.approx(5 / 3)
    assert (phase.all.steps, phase.all.ratio) == (3, pytest.approx(1.5))


def test_a_burst_is_judged_by_its_served_drift_and_needs_it_of_every_step():
    row = {
        "rollout_kl/served_k3": 0.2,
        "rollout_kl/served_tokens": 9.0,
        "optimizer/step_share": 1.0,
        "rollout_kl/coef": 0.01,
        "reward/mean": 0.5,
    }
    rows = [row, row | {"optimizer/step_share": 0.5, "rollout_kl/coef": 0.04}, row | {"rollout_kl/served_k3": 0.1}]
    found = burst_of("soft", 3, 0.1, [row | {"reward/mean": 0.9}], rows)
    assert (found.response.above, found.shortened, found.coef) == (2, 1, 0.04)
    assert (found.before, found.reward) == (0.9, 0.5)
    with pytest.raises(BenchError, match="2 of 3 steps"):
        burst_of("soft", 3, 0.1, rows, [*rows[:2], row | {"rollout_kl/served_tokens": None}])


def test_a_controller_tames_every_simulated_burst_and_a_fixed_coefficient_none():
    found = simulate(0.05)
    assert {s.response.tamed for s in found if not s.every} == {None}
    controlled = [s.response for s in found if s.every]
    assert max(200 if r.tamed is None else r.tamed for r in controlled) <= 18
    assert [s.every for s in found[:3]] == [0, 1, 4]


def test_without_seeds_it_is_the_simulation_alone():
    report = run(Plan([]), print)
    assert (report.phases, report.bursts) == ([], [])
    assert len(render(report).splitlines()) == 3 + len(report.simulated)


@pytest.mark.parametrize("steps", [1, 3], ids=["in-the-middle", "before-the-last-checkpoint"])
@pytest.mark.parametrize("interrupted", ["calm", "fixed", "soft and hard"])
def test_an_interrupted_measurement_continues_with_the_runs_that_are_not_whole(
    tmp_path, monkeypatch, interrupted, steps
):
    plan = Plan([0, 1], calm=3, burst=3, settle=0)
    row = {
        "rollout_kl/k3": 0.1,
        "rollout_kl/served_k3": 0.2,
        "rollout_kl/served_tokens": 9.0,
        "optimizer/step_share": 1.0,
        "rollout_kl/coef": 0.01,
        "reward/mean": 0.5,
    }
    made, stops = [], {("seed-1", interrupted.replace(" ", "-"))}

    def train(config, directory, *, timeout, say):
        name = directory.parent.name, directory.name
        file = directory / config.name / "metrics.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        first = file.read_text().count("\n") if file.exists() else 0
        assert first in (0, plan.calm), "begun again over what was left"
        stop = name in stops
        for step in range(first + 1, first + 1 + steps if stop else config.steps + 1):
            with file.open("a") as lines:
                lines.write(json.dumps(row | {"step": step}) + "\n")
        if stop:
            stops.clear()
            raise BenchError("interrupted")
        (directory / ANSWER).write_text("null")
        made.append(name)

    monkeypatch.setattr("dev.bench.drift.train_apart", train)
    monkeypatch.setattr("r3async.tools.init_model.init_model", lambda model, *_, **__: model.mkdir(parents=True))
    with pytest.raises(BenchError, match="interrupted"):
        run(plan, print, keep=tmp_path)
    report = run(plan, print, keep=tmp_path)
    assert len(report.bursts) == 6
    every = [(f"seed-{seed}", way) for seed in (0, 1) for way in ("calm", "fixed", "soft", "soft-and-hard")]
    assert made == every, "each was made to its end once"
    assert run(plan, print, keep=tmp_path) == report
    assert made == every


def test_the_page_has_the_tables_of_the_report_kept_beside_it_and_they_show_what_it_says():
    docs = Path(__file__).parents[2] / "docs"
    report = msgspec.json.decode((docs / "figures" / "drift.json").read_bytes(), type=Report)
    page = (docs / "trust-region.md").read_text()
    for title, lines in tables(report).items():
        assert "\n".join(lines) in page, title
    assert report.simulated == simulate(report.plan.target), "the controller is another now: measure again"


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.engine
@pytest.mark.timeout(900)
def test_a_small_measurement_of_real_runs(tmp_path):
    words = ["bench", "drift", "--quick", "--json", "--keep", str(tmp_path / "kept")]
    done = subprocess.run(
        [sys.executable, "-m", "dev", *words],
        capture_output=True,
        text=True,
        timeout=880,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = msgspec.json.decode(done.stdout.splitlines()[-1], type=Report)
    assert report.benchmark == "drift"
    assert [phase.name for phase in report.phases] == ["calm", "burst"]
    for phase in report.phases:
        assert phase.all.steps == 3
        assert {each.age for each in phase.ages} <= {0, 1}
        assert all(math.isfinite(each.served) and each.served >= 0 for each in [*phase.ages, phase.all])
    assert [b.way for b in report.bursts] == list(report.plan.ways())
    soft = tmp_path / "kept" / "seed-0" / "soft" / "run"
    assert (soft / "metrics.jsonl").read_text().count("\n") == 6, "the calm steps are the copy's"
    assert "learning rate x" in render(report)
