"""Two environments in one run, with an engine and a learner: a few steps, evaluated each by itself."""

import io

import pytest
from rich.console import Console

from r3async.config import load_config
from r3async.record.reading import read_json_objects
from r3async.tools.train import train

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("local_ray")]


def test_two_environments_are_trained_and_evaluated_each_by_its_label(tmp_path):
    settings = {
        "env": [
            {"name": "reverse-text", "args": {"letters": 3}, "weight": 3},
            {"name": "guess", "label": "small", "args": {"highest": 8}, "max_turns": 2, "max_new_tokens": 4},
        ],
        "steps": 3,
        "schedule": {"prompts_per_step": 4, "group_size": 4},
        "generator": {"kv_cache_gib": 0.25},
        "evaluation": {"every_steps": 3, "tasks": 4},
        "model": {"init": {"max_warm_steps": 10}},
        "name": "mixed",
    }
    train(load_config("quickstart", settings), "quickstart", Console(file=io.StringIO(), width=120), tmp_path)
    rows = read_json_objects(tmp_path / "mixed" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert (row["env/reverse-text/episodes"], row["env/small/episodes"]) == (12, 4)
        assert row["env/small/episode_tokens_mean"] <= 2 * 4
        assert 0 < row["env/small/episode_turns_mean"] <= 2
        assert row["rollout_kl/k3_turn_0"] >= 0
    (evaluated,) = read_json_objects(tmp_path / "mixed" / "evaluation.jsonl")
    for label in ("reverse-text", "small"):
        assert 0 <= evaluated[f"evaluation/{label}/reward_mean"] <= 1
    assert evaluated["evaluation/small/turns_mean"] <= 2
