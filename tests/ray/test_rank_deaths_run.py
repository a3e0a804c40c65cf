"""A run of which a learner's ranks are killed: Ray, ZeroMQ, Megatron on two ranks of gloo, an engine without a model.

`R3ASYNC_RANK_KILLS=10` kills ten, which takes some minutes.
"""

import os
import signal
import subprocess
import sys

import pytest

from r3async.record.reading import read_json_objects
from tests.ray.test_resume_run import check_books, events, finished_weights, run, settings, trained, wait_for

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1500), pytest.mark.usefixtures("local_ray")]

KILLS = int(os.environ.get("R3ASYNC_RANK_KILLS", "2"))
STEPS = 4 + KILLS
EXACT = [
    "schedule.max_staleness=0",
    f"steps={STEPS}",
    "learner.dtype=float32",
    "learner.parallel.dp=2",
    "learner.shard_optimizer=true",  # each rank alone has a half of the moments
    "checkpoint.every_steps=4",
]


def ranks_of(run_dir):
    """The ranks' processes, those of the newest start."""
    (first,) = (e["ranks"] for e in events(run_dir, "learner_started"))
    return [first, *(e["pids"] for e in events(run_dir, "ranks_restarted"))][-1]


def test_a_run_whose_ranks_are_killed_again_and_again_ends_with_the_same_weights_bit_by_bit(untrained, tmp_path):
    """And is not restarted for it, nor is a generator."""
    straight, _ = run(untrained, tmp_path, "straight", *EXACT)
    killed = tmp_path / "killed"
    command = [sys.executable, "-m", "r3async", "train", "quickstart", "--runs", str(tmp_path)]
    with (tmp_path / "screen").open("w") as screen:
        driver = subprocess.Popen([*command, *settings(untrained, "killed", *EXACT)], stdout=screen, stderr=screen)
    try:
        for kill in range(KILLS):
            wait_for(lambda kill=kill: len(trained(killed)) >= kill + 1, driver, tmp_path / "screen", 300)
            os.kill(ranks_of(killed)[kill % 2], signal.SIGKILL)
            wait_for(
                lambda kill=kill: len(events(killed, "ranks_restarted")) == kill + 1, driver, tmp_path / "screen", 300
            )
        assert driver.wait(200) == 0, (tmp_path / "screen").read_text()
    finally:
        driver.kill()
        driver.wait(120)
    check_books(killed, STEPS)
    assert len(events(killed, "conductor_started")) == len(events(killed, "learner_started")) == 1
    assert not events(killed, "generator_lost")
    assert [e["restarts"] for e in events(killed, "ranks_restarted")] == list(range(1, KILLS + 1))
    assert read_json_objects(killed / "metrics.jsonl")[-1]["learner/rank_restarts"] == KILLS
    assert [(x["groups"], x["version"], x["crc32"]) for x in trained(killed)] == [
        (x["groups"], x["version"], x["crc32"]) for x in trained(straight)
    ]
    weights, expected = finished_weights(killed), finished_weights(straight)
    assert set(weights) == set(expected)
    assert all(weights[name].equal(expected[name]) for name in expected)
