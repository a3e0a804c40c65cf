"""`r3async plan` as a person gives it, for a cluster that nobody has."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
from typer.testing import CliRunner, Result

from r3async.config import config_to_toml, load_config
from r3async.record.timeline import Timeline
from r3async.tools.cli import app
from tests.sim.test_capacity import row


def plan(*words: str) -> Result:
    return CliRunner().invoke(app, ["plan", *words])


def test_a_preset_is_predicted_by_bound_and_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "capacity.svg"
    words = ["quickstart", "--capacity", "--hardware", "cpu", "--staleness", "0,2", "--steps", "12", "--json"]
    answer = plan(*words, "--picture", str(picture))
    assert answer.exit_code == 0, answer.output
    report = json.loads(answer.stdout.splitlines()[-1])
    assert [point["max_staleness"] for point in report["points"]] == [0, 2]
    assert picture.read_text().startswith("<svg")


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
