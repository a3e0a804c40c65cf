"""A real run, with Ray, sockets and a learner, whose generator is held up. The engine is scripted: no vLLM. Who else may be held
up, and what then: `sim/test_held_up.py`."""

import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from r3async.config import load_config
from r3async.envs import Message, StepResult
from r3async.record.reading import read_json_objects
from r3async.tools.training_session import train
from tests.ray.test_resume_run import events

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("local_ray")]

STEPS = 6
SMALL = [
    f"steps={STEPS}",
    "schedule.prompts_per_step=2",
    "schedule.group_size=4",
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


def test_a_generator_that_is_held_up_for_good_is_named_writes_its_stacks_and_is_restarted(untrained, tmp_path):
    run_dir = tmp_path / "run"

    def begin():
        deadline = time.monotonic() + 300
        while not ((run_dir / "metrics.jsonl").exists() and read_json_objects(run_dir / "metrics.jsonl")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (tmp_path / "begun").touch()

    env = [
        "env.name=tests.ray.test_stalls_pipeline:HoldsUp",
        f"env.args={{ directory = '{tmp_path}' }}",
        "episode.max_turns=1",
    ]
    more = ["supervise.stall_seconds=5", "algorithm.credit=trajectory"]
    config = load_config("quickstart", [*SMALL, f"model.path={untrained}", "name=run", *env, *more])
    beginning = threading.Thread(target=begin, daemon=True)
    beginning.start()
    assert train(config, "quickstart", Console(width=120), tmp_path) == run_dir
    beginning.join(timeout=120)
    assert not beginning.is_alive()
    assert [row["step"] for row in read_json_objects(run_dir / "metrics.jsonl")] == list(range(1, STEPS + 1))
    assert (run_dir / "model" / "model.safetensors").stat().st_size > 0
    (stalled,) = events(run_dir, "stalled")
    assert stalled["stage"] == "playing/generator-0"
    assert stalled["seconds"] >= stalled["limit"] == 5
    assert stalled["action"] == "restart"
    assert stalled["did_not_answer"] == ["generator-0"]
    assert stalled["queues"]["playing/generator-0"]["waiting"] > 0
    assert len(events(run_dir, "generator_lost")) == len(events(run_dir, "generator_restarted")) == 1
    assert "in hold_everything_up" in (run_dir / "logs" / "generator-0.log").read_text()
    assert "TrajectoryInbox.wait_for_groups" in (run_dir / "stacks" / "learner.txt").read_text()
    assert "Conductor.run" in (run_dir / "stacks" / "conductor.txt").read_text()
