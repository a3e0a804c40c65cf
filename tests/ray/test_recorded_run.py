"""A run that is recorded, ended by a stop, resumed, and made again without it."""

import pytest
from rich.console import Console

from r3async.config import load_config
from r3async.record.reading import read_json_objects
from r3async.record.recording import find_recorded_steps
from r3async.tools.replay import replay_run
from r3async.tools.training_session import train

pytestmark = [pytest.mark.nightly, pytest.mark.ray, pytest.mark.timeout(400)]

SETTINGS = (
    *("name=recorded", "observe.record=full", "checkpoint.every_steps=2", "evaluation.every_steps=0"),
    *("model.init.max_warm_steps=1", "model.init.warm_reward=0", "generator.kv_cache_gib=0.25", "learner.threads=1"),
    *("schedule.prompts_per_step=2", "schedule.group_size=4", "schedule.max_staleness=2"),
)


def test_a_resumed_runs_steps_are_made_again_bit_by_bit_without_it(tmp_path):
    for steps in (3, 6):
        config = load_config("quickstart", [*SETTINGS, f"steps={steps}"])
        run = train(config, "quickstart", Console(width=120), tmp_path)
    assert [row["step"] for row in read_json_objects(run / "metrics.jsonl")] == list(range(1, 7))
    names = [path.name for path in find_recorded_steps(run)]
    assert len(names) == 6
    assert {name.partition("-")[2] for name in names} == {"0001.step", "0002.step"}
    done = replay_run(run)
    assert done.difference is None
    assert (done.first, done.last) == (1, 6)
    done = replay_run(run, start_step=4, steps=2)
    assert done.difference is None
    assert (done.first, done.last) == (5, 6)
