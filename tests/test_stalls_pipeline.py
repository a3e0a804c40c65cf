"""A real run, with Ray, sockets and a learner, whose generator is held up. The engine is scripted: no vLLM."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from actors.learner import LearnerActor
from actors.pipeline import Pipeline
from r3async.config import load_config
from r3async.envs.base import Message, StepResult
from r3async.observe.metrics import read_metrics
from tools.train import train

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400), pytest.mark.usefixtures("local_ray")]

STEPS = 6
SMALL = [
    f"steps={STEPS}",
    "schedule.groups_per_step=2",
    "schedule.samples_per_group=4",
    "generator.engine=scripted",
    "generator.engine_args={ token_seconds = 0.02 }",
    "weights.probe=false",
    "supervise.silence_seconds=2",
]


class HoldsUp:
    """Once `directory/begun` exists, one episode never ends, and lets nothing else of its process go on. Others are easy."""

    def __init__(self, directory: str):
        self.begun, self.once = Path(directory, "begun"), Path(directory, "once")

    async def reset(self, task_seed):
        self.hold_everything_up()
        return [Message("user", "go")]

    def hold_everything_up(self):
        if self.begun.exists() and not self.once.exists():
            self.once.touch()
            time.sleep(600)

    async def step(self, action):
        return StepResult(float(len(action.text) % 2), done=True)


class Slow:
    """Whoever plays it is in the middle of an episode."""

    async def reset(self, task_seed):
        return [Message("user", "go")]

    async def step(self, action):
        await asyncio.sleep(2)
        return StepResult(float(len(action.text) % 2), done=True)


def run(model, tmp_path, meddle, *overrides, pipeline=None):
    """The run's events, after it has made all its steps. `meddle(run_dir)` runs beside it."""
    screen = io.StringIO()
    config = load_config("quickstart", [*SMALL, f"model.path={model}", "name=run", *overrides])
    meddling = threading.Thread(target=meddle, args=(tmp_path / "run",), daemon=True)
    meddling.start()
    try:
        run_dir = train(config, "quickstart", Console(file=screen, width=120), tmp_path, pipeline)
    except BaseException:
        print(screen.getvalue())
        raise
    meddling.join(timeout=10)
    assert not meddling.is_alive()
    assert [row["step"] for row in read_metrics(run_dir / "metrics.jsonl")] == list(range(1, STEPS + 1))
    assert (run_dir / "model" / "model.safetensors").stat().st_size > 0
    return events(run_dir)


def events(run_dir):
    path = run_dir / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def until(condition):
    deadline = time.monotonic() + 300
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def first_step(run_dir):
    until(lambda: (run_dir / "metrics.jsonl").exists() and read_metrics(run_dir / "metrics.jsonl"))


def named(seen, event):
    return [e for e in seen if e["event"] == event]


def test_a_generator_that_is_stopped_for_a_while_is_suspect_and_recovers(untrained, tmp_path):
    def stop_and_go_on(run_dir):
        first_step(run_dir)
        pid = named(events(run_dir), "generator_started")[0]["pid"]
        os.kill(pid, signal.SIGSTOP)
        until(lambda: named(events(run_dir), "generator_suspect"))
        os.kill(pid, signal.SIGCONT)

    seen = run(untrained, tmp_path, stop_and_go_on)
    assert named(seen, "generator_suspect")[0]["seconds"] > 2
    recovered = named(seen, "generator_recovered")
    assert len(recovered) == len(named(seen, "generator_suspect"))
    assert {e["pid"] for e in recovered} == {named(seen, "generator_started")[0]["pid"]}
    assert not named(seen, "generator_died")
    assert not named(seen, "stalled")


def test_a_generator_that_is_held_up_for_good_is_named_writes_its_stacks_and_is_restarted(untrained, tmp_path):
    def begin(run_dir):
        first_step(run_dir)
        (tmp_path / "begun").touch()

    env = [
        "env.name=tests.test_stalls_pipeline:HoldsUp",
        f"env.args={{ directory = '{tmp_path}' }}",
        "episode.max_turns=1",
    ]
    seen = run(untrained, tmp_path, begin, *env, "supervise.stall_seconds=5", "algorithm.credit=trajectory")
    (stalled,) = named(seen, "stalled")
    assert stalled["stage"] == "playing/generator-0"
    assert stalled["seconds"] >= stalled["limit"] == 5
    assert stalled["action"] == "restart"
    assert stalled["did_not_answer"] == ["generator-0"]
    assert stalled["queues"]["playing/generator-0"]["waiting"] > 0
    assert len(named(seen, "generator_died")) == len(named(seen, "generator_restarted")) == 1
    run_dir = tmp_path / "run"
    assert "in hold_everything_up" in (run_dir / "logs" / "generator-0.log").read_text()
    assert "Reception.wait_for_groups" in (run_dir / "stacks" / "learner.txt").read_text()
    assert "Conductor.run" in (run_dir / "stacks" / "conductor.txt").read_text()


def test_a_generator_that_is_stopped_for_good_holds_nobody_up(untrained, tmp_path):
    """Its groups are played by the other, which gets every version without waiting for it; evaluations find the other."""

    def stop(run_dir):
        first_step(run_dir)
        time.sleep(1)
        os.kill(named(events(run_dir), "generator_started")[0]["pid"], signal.SIGSTOP)

    settings = ["generator.count=2", "supervise.stop_grace_seconds=2", "evaluation.every=2", "evaluation.episodes=4"]
    settings += ["env.name=tests.test_stalls_pipeline:Slow", "episode.max_turns=1", "algorithm.credit=trajectory"]
    seen = run(untrained, tmp_path, stop, *settings)
    assert not named(seen, "stalled")
    assert not named(seen, "generator_died")
    (suspect,) = {e["generator"] for e in named(seen, "generator_suspect")}
    (returned,) = named(seen, "leases_returned")
    assert returned["generator"] == suspect
    assert returned["leased_again"]
    assert not named(seen, "generator_recovered")
    finished = named(seen, "evaluation_finished")
    assert finished[-1]["generator"] != suspect
    pid = next(e["pid"] for e in named(seen, "generator_started") if e["role"] == suspect)
    until(lambda: not psutil.pid_exists(pid))


@pytest.mark.parametrize("role", ["conductor", "learner"])
def test_a_run_whose_conductor_or_learner_is_stopped_restarts_from_its_checkpoint(untrained, tmp_path, role):
    def stop(run_dir):
        first_step(run_dir)
        until(lambda: named(events(run_dir), "checkpoint_written"))
        os.kill(named(events(run_dir), f"{role}_started")[0]["pid"], signal.SIGSTOP)

    settings = ["supervise.stall_seconds=8", "supervise.max_run_restarts=1", "checkpoint.every_steps=1"]
    seen = run(untrained, tmp_path, stop, *settings, "supervise.stop_grace_seconds=2")
    (stalled,) = [e for e in named(seen, "stalled") if e["stage"] == f"answering/{role}"]
    assert stalled["action"] == "restart"
    assert stalled["seconds"] >= 8
    first, second = named(seen, "conductor_started")
    assert second["step"] > first["step"] == 0
    assert not psutil.pid_exists(named(seen, f"{role}_started")[0]["pid"])


class DiskIsFull(LearnerActor):
    """Once `full` exists in the run's directory, nothing can be written to the spool."""

    async def listen(self, *args):
        heard = await super().listen(*args)
        write, full = self._spool._write, self.run_dir / "full"

        def refuse(*frames):
            if full.exists():
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(*frames)

        self._spool._write = refuse
        return heard


class Full(Pipeline):
    learner = DiskIsFull


def test_a_spool_whose_disk_is_full_is_named_and_waited_for_and_no_generator_is_blamed(untrained, tmp_path):
    def fill_up(run_dir):
        first_step(run_dir)
        (run_dir / "full").touch()
        until(lambda: named(events(run_dir), "stalled"))
        time.sleep(10)  # longer than generators may send in vain
        (run_dir / "full").unlink()

    settings = ["supervise.stall_seconds=8", "buffer.durability=disk"]
    seen = run(untrained, tmp_path, fill_up, *settings, pipeline=Full)
    assert {(e["stage"], e["action"]) for e in named(seen, "stalled")} == {("storing", "warn")}
    assert "No space left" in named(seen, "stalled")[0]["learner"]["storing"]["why"]
    assert not named(seen, "generator_died")
    assert len(named(seen, "spool_stalled")) == len(named(seen, "spool_goes_on")) == 1
