"""Whole runs that are killed, stopped and continued: real Ray, ZeroMQ, Megatron and checkpoints, an engine without a model.

What a run has trained is in `trained.jsonl`: which trajectories, and a checksum of their tokens.
"""

import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file

from r3async.checkpoint import Checkpoints, open_checkpoint
from r3async.config import load_config
from r3async.observe.events import read_events
from r3async.observe.jsonl import read_objects
from r3async.observe.metrics import read_metrics
from tools.train import train

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400), pytest.mark.usefixtures("local_ray")]

SCRIPTED = [
    "generator.engine=scripted",
    "weights.probe=false",
    "schedule.groups_per_step=2",
    "schedule.samples_per_group=4",
    "checkpoint.every_steps=2",
    "supervise.restart_backoff=0.1",
]


def settings(model, name, *overrides):
    return [*SCRIPTED, f"model.path={model}", f"name={name}", *overrides]


def run(model, root, name, *overrides):
    screen = io.StringIO()
    try:
        path = train(
            load_config("quickstart", settings(model, name, *overrides)),
            "quickstart",
            Console(file=screen, width=160),
            root,
        )
    except BaseException:
        print(screen.getvalue())
        raise
    return path, screen.getvalue()


def trained(run_dir):
    return list(read_objects(run_dir / "trained.jsonl"))


def events(run_dir, name):
    return [e for e in read_events(run_dir / "events.jsonl") if e["event"] == name]


def check_books(run_dir, steps, groups_per_step=2, samples=4):
    """Every step once, in order; every group once; every episode of it once; a row for every step."""
    lines = trained(run_dir)
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert [r["step"] for r in read_metrics(run_dir / "metrics.jsonl")] == list(range(1, steps + 1))
    groups = [g for line in lines for g in line["groups"]]
    assert sorted(groups) == list(range(steps * groups_per_step))
    names = [t for line in lines for t in line["trajectories"]]
    assert len(set(names)) == len(names) == len(groups) * samples


class Killer(threading.Thread):
    """SIGKILLs the process that said `event` last, once `step` steps are in the record."""

    def __init__(self, run_dir: Path, event: str, step: int):
        super().__init__(daemon=True)
        self.run_dir, self.event, self.step, self.killed = run_dir, event, step, 0
        self.start()

    def run(self):
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and not self.killed:
            time.sleep(0.02)
            path = self.run_dir / "metrics.jsonl"
            if path.exists() and len(read_metrics(path)) >= self.step:
                self.killed = events(self.run_dir, self.event)[-1]["pid"]
                os.kill(self.killed, signal.SIGKILL)


def test_a_run_whose_learner_and_then_its_conductor_are_killed_trains_everything_once(untrained, tmp_path):
    killers = [Killer(tmp_path / "a", "learner_started", 5), Killer(tmp_path / "a", "conductor_started", 9)]
    run_dir, screen = run(
        untrained,
        tmp_path,
        "a",
        "steps=14",
        "schedule.max_staleness=3",
        "schedule.window=3",
        "buffer.durability=disk",
        "generator.engine_args={ token_seconds = 0.01 }",
    )
    assert all(killer.killed for killer in killers)
    assert "the run begins again (1 of 3" in screen
    assert "the run begins again (2 of 3" in screen
    check_books(run_dir, 14)
    first, second = (resumed["step"] for resumed in events(run_dir, "resumed"))
    assert 4 <= first <= second
    assert first % 2 == second % 2 == 0
    assert second >= 8
    assert all(row["staleness/max"] <= row["staleness/bound"] for row in read_metrics(run_dir / "metrics.jsonl"))
    assert not list((run_dir / "spool").iterdir())  # What the last checkpoint trained needs not be kept.


def finished_weights(run_dir):
    return load_file(run_dir / "model" / "model.safetensors")


def test_a_run_that_is_killed_and_resumed_ends_with_the_same_weights_bit_by_bit(untrained, tmp_path):
    """Also where the newest checkpoint was cut off, and another was being written."""
    exact = ["schedule.max_staleness=0", "steps=20", "learner.dtype=float32", "checkpoint.every_steps=4"]
    straight, _ = run(untrained, tmp_path, "straight", *exact)
    killed = tmp_path / "killed"
    command = [sys.executable, "-m", "tools.cli", "train", "quickstart", "--runs", str(tmp_path)]
    with (tmp_path / "screen").open("w") as screen:
        driver = subprocess.Popen([*command, *settings(untrained, "killed", *exact)], stdout=screen, stderr=screen)
    try:
        wait_for(lambda: len(trained(killed)) >= 10, driver, tmp_path / "screen")
        for role in ("conductor", "learner"):
            os.kill(events(killed, f"{role}_started")[-1]["pid"], signal.SIGKILL)
    finally:
        driver.kill()
        driver.wait(30)
    checkpoints = Checkpoints(killed / "checkpoints")
    *_, back, last = checkpoints.steps()
    newest = checkpoints.path(last)
    part = next(newest.glob("learner-*"))
    os.truncate(part, part.stat().st_size // 2)
    (checkpoints.directory / "step-00000019.partial").mkdir(exist_ok=True)
    (checkpoints.directory / "step-00000019.partial" / "run.json").write_text("{")
    again, screen = run(untrained, tmp_path, "killed", *exact)
    assert again == killed
    assert "checkpoint bad" in screen
    assert f"going on from step {back} " in screen
    assert 4 <= back < last < 20
    assert [events(killed, "resumed")[-1]["step"], checkpoints.steps()[-1]] == [back, 20]
    check_books(killed, 20)
    assert [(x["groups"], x["crc32"]) for x in trained(killed)] == [
        (x["groups"], x["crc32"]) for x in trained(straight)
    ]
    weights, expected = finished_weights(killed), finished_weights(straight)
    assert set(weights) == set(expected)
    assert all(weights[name].equal(expected[name]) for name in expected)


def wait_for(condition, process, screen, seconds=200.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, screen.read_text()
        assert time.monotonic() < deadline, screen.read_text()
        time.sleep(0.05)


def test_a_stop_leaves_a_checkpoint_and_ends_well_and_the_same_command_goes_on(untrained, tmp_path):
    overrides = settings(untrained, "stopped", "steps=400", "schedule.max_staleness=1", "checkpoint.every_steps=0")
    command = [sys.executable, "-m", "tools.cli", "train", "quickstart", "--runs", str(tmp_path), *overrides]
    run_dir, screen = tmp_path / "stopped", tmp_path / "screen"
    with screen.open("w") as file:
        driver = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        wait_for(lambda: len(trained(run_dir)) >= 3, driver, screen)
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(90) == 0, screen.read_text()
    finally:
        driver.kill()
    (step,) = Checkpoints(run_dir / "checkpoints").steps()
    state = open_checkpoint(Checkpoints(run_dir / "checkpoints").path(step)).state
    assert len(trained(run_dir)) == step == state.steps < 400
    assert f"stopped after {step} of 400 steps; to go on: the same command with name=stopped" in screen.read_text()
    run_dir, said = run(untrained, tmp_path, "stopped", f"steps={step + 3}", "schedule.max_staleness=1")
    assert f"going on from step {step} " in said
    check_books(run_dir, step + 3)
    rows = read_metrics(run_dir / "metrics.jsonl")
    assert [row["version"] for row in rows] == list(range(1, step + 4))
