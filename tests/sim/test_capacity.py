"""Durations measured from a run or worked out from sizes, and what is advised from them."""

import json
import random
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from r3async.config import config_to_toml, load_config
from r3async.record.timeline import Span, Timeline
from r3async.tools.capacity.cluster import Distribution, EngineSpeed, LearnerSpeed
from r3async.tools.capacity.estimate import (
    HARDWARE,
    CalibrationError,
    engine_speed,
    estimate,
    fit,
    learner_speed,
    measured,
    turns_of,
)
from r3async.tools.capacity.report import best, lines, picture, sweep
from r3async.tools.cli import app


def call(
    turn: int = 0, tokens: int = 10, prompt: int = 0, running: int = 1, seconds: float = 1.0, start: float = 5.0
) -> Span:
    return Span("generator-0", "call", start, start + seconds, None, None, turn, tokens, prompt, running)


def test_an_engine_s_speed_is_found_again_from_its_calls() -> None:
    rng = random.Random(3)
    calls = []
    for _ in range(400):
        tokens, prompt, running = rng.randint(1, 60), rng.randint(0, 300), rng.randint(1, 64)
        seconds = tokens * (0.01 + running * 0.0005) + prompt * 0.0002
        calls.append(call(0, tokens, prompt, running, seconds * rng.uniform(0.9, 1.1)))
    found = engine_speed(calls)
    assert found.step_seconds == pytest.approx(0.01, rel=0.15)
    assert found.request_seconds == pytest.approx(0.0005, rel=0.15)
    assert found.prefill_seconds == pytest.approx(0.0002, rel=0.3)


def test_no_rate_is_below_zero() -> None:
    falling = [call(0, 10, prompt, 1, 1.0 - prompt / 1000) for prompt in (0, 100, 200)]
    found = engine_speed(falling)
    assert min(found.step_seconds, found.request_seconds, found.prefill_seconds) >= 0


def test_turns_are_those_that_episodes_had() -> None:
    # Three episodes: of one, two and two turns.
    assert sorted(turns_of([call(0), call(0), call(0), call(1), call(1)])) == [1, 2, 2]


def test_a_measured_distribution_keeps_its_quantiles() -> None:
    values = [float(i) for i in range(100_000)]
    kept = measured(values).values
    assert len(kept) == 4096
    assert sum(kept) / len(kept) == pytest.approx(sum(values) / len(values), rel=1e-3)
    assert measured([]) == Distribution()


def test_what_could_be_log_normal_is_taken_for_it_and_nothing_else_is() -> None:
    rng = random.Random(5)
    latencies = [min(0.4 * rng.lognormvariate(0.0, 1.0), 8.0) for _ in range(800)]
    found = measured(latencies)
    assert not found.values
    assert (found.median, found.sigma) == (pytest.approx(0.4, rel=0.1), pytest.approx(1.0, rel=0.1))
    assert found.most == max(latencies)
    assert measured([rng.uniform(0, 1) for _ in range(800)]).values
    assert measured(latencies[:20]).values


def test_what_engines_and_learner_lose_to_each_other_is_found_again() -> None:
    rng = random.Random(7)
    spans = []
    for step in range(24):
        start, busy = 10.0 * step, rng.uniform(0.0, 2.0)
        # Alone a step takes 2 s; while the engine works the learner is a third slower.
        spans.append(Span("learner", "train", start, start + 2.0 + busy / 3, step=step + 1))
        spans.append(Span("generator-0", "busy", start, start + busy))
        spans += [call(0, 10, 0, 4, 0.5 * rng.uniform(0.95, 1.05), start + 5.0 + i / 10) for i in range(4)]
        spans += [call(0, 10, 0, 4, 0.75 * rng.uniform(0.95, 1.05), start + i / 10) for i in range(4)]
    rows = [{**row(100, s.end - s.start), "step": s.step} for s in spans if s.what == "train"]
    model = fit(load_config("quickstart"), rows, spans)
    assert model.sharing.engine == pytest.approx(1.5, rel=0.03)
    assert model.sharing.learner == pytest.approx(1.5, rel=0.01)
    assert model.learner.fixed == pytest.approx(2.0, rel=0.01)


def row(tokens: float, seconds: float) -> dict[str, float]:
    return {
        "timing/train_seconds": seconds,
        "batch/trained_tokens": tokens,
        "timing/engine_pause_seconds": 0.1,
        "timing/weight_transfer_seconds": 0.2,
        "timing/weight_load_seconds": 0.15,
        "timing/snapshot_seconds": 0.05,
    }


def test_a_step_costs_by_its_tokens_where_these_differ() -> None:
    rows = [row(t, 0.5 + t * 0.002) for t in (100, 200, 300, 400, 500, 600, 700, 800)]
    found = learner_speed(rows, [Span("learner", "write", 1.0, 1.3)])
    assert (found.fixed, found.token_seconds) == (pytest.approx(0.5), pytest.approx(0.002))
    assert (found.snapshot, found.pause, found.transfer) == (0.05, 0.1, pytest.approx(0.25))
    assert found.write == pytest.approx(0.3)
    same = learner_speed([row(300, 1.0), row(300, 1.2)], [])
    assert (same.fixed, same.token_seconds) == (pytest.approx(1.1), 0.0)


def test_a_run_without_calls_is_refused_with_what_it_lacks() -> None:
    with pytest.raises(CalibrationError, match=r"observe\.timeline"):
        fit(load_config("quickstart"), [row(1, 1)], [])


@pytest.mark.parametrize("preset", ["quickstart", "moe_30b_r3", "moe_235b_r3"])
def test_a_preset_is_estimated_and_more_hardware_is_faster(preset: str) -> None:
    config = load_config(preset)
    small, large = (estimate(config, generators=n, ranks=n) for n in (8, 32))
    assert large.learner.token_seconds == pytest.approx(small.learner.token_seconds / 4)
    slow = estimate(config, generators=8, ranks=8, hardware=HARDWARE["a100"])
    assert slow.engine.step_seconds > small.engine.step_seconds
    assert slow.learner.token_seconds > small.learner.token_seconds


def test_the_advice_is_the_smallest_cluster_that_is_as_fast_as_any() -> None:
    model = estimate(load_config("quickstart"), generators=1, ranks=1, hardware=HARDWARE["cpu"])
    model = msgspec.structs.replace(
        model, engine=EngineSpeed(0.01), answer=Distribution(50), turns=Distribution(1), learner=LearnerSpeed(2.0)
    )
    report = sweep(model, staleness=[0, 1, 3], generators=[1, 2], steps=12, settle=4)
    assert [(p.generators, p.max_staleness) for p in report.points] == [(g, s) for g in (1, 2) for s in (0, 1, 3)]
    chosen = best(report.points)
    assert (chosen.generators, chosen.max_staleness) == (1, 1)
    assert "generator.count = 1 and schedule.max_staleness = 1" in report.advice
    assert len(lines(report)) == len(report.points) + 3
    drawn = ET.fromstring(picture(report))
    assert len(drawn.findall("{http://www.w3.org/2000/svg}polyline")) == 2


# -- the command -------------------------------------------------------------------------------------------------------


def plan(*words: str) -> Result:
    return CliRunner().invoke(app, ["plan", *words])


def test_a_preset_is_predicted_by_bound_and_drawn(tmp_path: Path) -> None:
    drawing = tmp_path / "capacity.svg"
    words = ["quickstart", "--capacity", "--hardware", "cpu", "--staleness", "0,2", "--steps", "12", "--json"]
    answer = plan(*words, "--picture", str(drawing))
    assert answer.exit_code == 0, answer.output
    report = json.loads(answer.stdout.splitlines()[-1])
    assert [point["max_staleness"] for point in report["points"]] == [0, 2]
    assert drawing.read_text().startswith("<svg")


def test_durations_of_a_run_are_taken_and_the_run_itself_is_predicted(tmp_path: Path) -> None:
    config = load_config("quickstart", ["steps=12", "generator.concurrency=16", "schedule.max_staleness=0"])
    (tmp_path / "config.toml").write_text(config_to_toml(config))
    timeline = Timeline(tmp_path, "generator-0")
    rows = []
    for step in range(12):
        for _ in range(4):
            timeline.add_span("call", 10.0 + 3 * step, 11.0 + 3 * step, turn=0, tokens=10, prompt=0, running=8)
        rows.append({**row(100, 1.0), "step": step + 1, "time": 12.0 + 3 * step})
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(msgspec.json.encode(r) + b"\n" for r in rows))
    answer = plan("--calibrate", str(tmp_path), "--steps", "12")
    assert answer.exit_code == 0, answer.output
    assert "took 3 s a step; its durations predict" in answer.stderr
