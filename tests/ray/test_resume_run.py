"""A whole run that is killed and continued: real Ray, ZeroMQ, Megatron and checkpoints, an engine without a model. What else may
happen to one: `sim/test_resumed.py`.

What a run has trained is in `trained.jsonl`: which trajectories, and a checksum of their tokens.
"""

import io
import os
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console

from r3async.checkpoint import CheckpointDirectory
from r3async.config import load_config
from r3async.record.reading import read_json_objects
from r3async.tools.training_session import train
from tests.helpers.models import load_weights

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("local_ray")]

SCRIPTED = [
    "generator.engine=scripted",
    "weights.probe=false",
    "schedule.prompts_per_step=2",
    "schedule.group_size=4",
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
    return read_json_objects(run_dir / "trained.jsonl")


def events(run_dir, name):
    return [e for e in read_json_objects(run_dir / "events.jsonl") if e["event"] == name]


def check_books(run_dir, steps, prompts_per_step=2, samples=4):
    """Every step once, in order; every group once; every episode of it once; a row for every step."""
    lines = trained(run_dir)
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert [r["step"] for r in read_json_objects(run_dir / "metrics.jsonl")] == list(range(1, steps + 1))
    groups = [g for line in lines for g in line["groups"]]
    assert sorted(groups) == list(range(steps * prompts_per_step))
    names = [t for line in lines for t in line["trajectories"]]
    assert len(set(names)) == len(names) == len(groups) * samples


def finished_weights(run_dir):
    """Return all tensors of the model of a run that ended, of which each rank wrote a file."""
    tensors = load_weights(run_dir / "model")
    assert tensors
    return tensors


def test_a_run_that_is_killed_and_resumed_ends_with_the_same_weights_bit_by_bit(untrained, tmp_path):
    """First its learner, for which it restarts by itself; then all of it, also where the newest checkpoint was cut off, and
    another was being written."""
    exact = ["schedule.max_staleness=0", "steps=20", "learner.dtype=float32", "checkpoint.every_steps=4"]
    straight, _ = run(untrained, tmp_path, "straight", *exact)
    killed = tmp_path / "killed"
    command = [sys.executable, "-m", "r3async", "train", "quickstart", "--runs", str(tmp_path)]
    with (tmp_path / "screen").open("w") as screen:
        driver = subprocess.Popen([*command, *settings(untrained, "killed", *exact)], stdout=screen, stderr=screen)
    checkpoints = CheckpointDirectory(killed / "checkpoints")
    try:
        wait_for(lambda: checkpoints.list_steps() and len(trained(killed)) >= 5, driver, tmp_path / "screen")
        os.kill(events(killed, "learner_started")[0]["pid"], signal.SIGKILL)
        wait_for(lambda: len(events(killed, "learner_started")) == 2, driver, tmp_path / "screen")
        wait_for(lambda: checkpoints.list_steps()[-1] >= 8 and len(trained(killed)) >= 10, driver, tmp_path / "screen")
        for role in ("conductor", "learner"):
            os.kill(events(killed, f"{role}_started")[-1]["pid"], signal.SIGKILL)
    finally:
        driver.kill()
        driver.wait(120)
    *_, back, last = checkpoints.list_steps()
    newest = checkpoints.step_path(last)
    part = next(newest.glob("learner-*"))
    os.truncate(part, part.stat().st_size // 2)
    (checkpoints.directory / "step-00000019.partial").mkdir(exist_ok=True)
    (checkpoints.directory / "step-00000019.partial" / "run.json").write_text("{")
    again, screen = run(untrained, tmp_path, "killed", *exact)
    assert again == killed
    assert "checkpoint bad" in screen
    assert f"resumes from step {back} " in screen
    assert 4 <= back < last < 20
    assert [e["step"] for e in events(killed, "resumed")] in ([4, back], [8, back])
    assert checkpoints.list_steps()[-1] == 20
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
