"""GRPO on rows of one's own, from the file to the metrics: Ray, vLLM and a learner of adapters, with chat prompts and three
rewards, one each in the forms of TRL and of verl."""

import io
import json

import pytest
from rich.console import Console

from r3async.checkpoint.manifest import CheckpointError
from r3async.config import load_config
from r3async.record.reading import read_json_objects
from r3async.tools.training_session import train

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("local_ray")]

REWARDS = '''
def right(completions, answer, **columns):
    """TRL's form, for chat prompts."""
    return [float(text[0]["content"].strip() == want) for text, want in zip(completions, answer)]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """verl's form, for its rows."""
    assert data_source == "sums" and extra_info["split"] == "train"
    return float(ground_truth in solution_str)

def brief(completion, answer):
    return 1 / (1 + len(completion))
'''
SUMS = [(a, b) for a in range(5) for b in range(5)]
ROWS = [
    {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"{a}+{b}="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        "extra_info": {"split": "train", "index": index},
        "answer": str(a + b),
    }
    for index, (a, b) in enumerate(SUMS)
]
WEIGHTS = {"right": 1.0, "brief": 0.5, "compute_score": 0.25}


def test_rows_and_rewards_of_ones_own_are_trained_evaluated_and_told_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("R3ASYNC_USER_PATH", str(tmp_path))
    (tmp_path / "rewards.py").write_text(REWARDS)
    write(tmp_path, ROWS)
    settings = {
        "data": {"path": "sums.jsonl", "eval": 5},
        "reward": [{"fn": f"rewards.py:{name}", "weight": weight} for name, weight in WEIGHTS.items()],
        "schedule": {"prompts_per_step": 4, "group_size": 4},
        "generator": {"dtype": "float32", "kv_cache_gib": 0.25},
        "learner": {"dtype": "float32", "lr": 2e-4, "lora": {"rank": 4}},
        "evaluation": {"every_steps": 3, "tasks": 8},
        "model": {"init": {"warm_reward": 0.1}},
        "episode": {"max_new_tokens": 8, "max_prompt_tokens": 64, "max_total_tokens": 128},
        "name": "own",
    }
    screen = io.StringIO()
    train(load_config("math", settings | {"steps": 3}), "math", Console(file=screen, width=120), tmp_path)
    assert "data: 20 rows are trained, 0 dropped" in screen.getvalue()
    assert "data: 5 rows are evaluated, 0 dropped" in screen.getvalue()
    rows = read_json_objects(tmp_path / "own" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        parts = sum(weight * row[f"rewards/{name}/mean"] for name, weight in WEIGHTS.items())
        assert row["reward/mean"] == pytest.approx(parts)
        assert 0 < row["rewards/brief/mean"] <= 0.5
        assert row["rewards/brief/std"] >= 0
    assert rows[-1]["data/epochs"] > 0.5
    evaluated = read_json_objects(tmp_path / "own" / "evaluation.jsonl")
    assert [each["step"] for each in evaluated][-1] == 3
    assert evaluated[-1]["evaluation/episodes"] == 5
    episodes = read_json_objects(tmp_path / "own" / "episodes.jsonl")
    assert {e["turns"][0]["user"] for e in episodes} <= {row["prompt"][0]["content"] for row in ROWS}
    write(tmp_path, ROWS[1:])
    with pytest.raises(CheckpointError, match=r"the rows of `data` = 'sums.jsonl'.*have changed since the run began"):
        train(load_config("math", settings | {"steps": 4}), "math", Console(file=screen, width=120), tmp_path)


def write(folder, rows):
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
