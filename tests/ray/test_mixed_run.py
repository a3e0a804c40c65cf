"""Two environments in one run, one of them a game of textarena, with an engine and a learner: a few steps, evaluated each by
itself. What a mixture promises beyond that: `sim/test_mix_run.py`."""

import contextlib
import json

import pytest
from rich.console import Console

from r3async.actors.process import NotTrained
from r3async.config import load_config
from r3async.record.reading import read_json_objects
from r3async.tools.training_session import train

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(400), pytest.mark.usefixtures("local_ray")]


def test_a_game_of_textarena_and_another_environment_are_trained_and_evaluated_each_by_its_label(warm_model, tmp_path):
    """The game's processes are started by a Ray actor that holds an engine."""
    settings = {
        "env": [
            {"name": "textarena:GuessTheNumber-v0", "label": "game"},
            {
                "name": "guess",
                "label": "small",
                "args": {"highest": 8},
                "max_turns": 2,
                "max_new_tokens": 4,
                "weight": 3,
            },
        ],
        "steps": 2,
        "episode": {"max_turns": 3, "max_new_tokens": 8, "max_prompt_tokens": 768, "max_total_tokens": 1024},
        "schedule": {"prompts_per_step": 4, "group_size": 4},
        "generator": {"kv_cache_gib": 0.25},
        "evaluation": {"every_steps": 2, "tasks": 4},
        "model": {"path": str(warm_model)},
        "name": "mixed",
    }
    with contextlib.suppress(NotTrained):  # the episodes of a model that knows nothing may all be worth the same
        train(load_config("quickstart", settings), "quickstart", Console(width=120), tmp_path)
    rows = read_json_objects(tmp_path / "mixed" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert (row["env/game/episodes"], row["env/small/episodes"]) == (4, 12)
        assert row["env/small/response_length_mean"] <= 2 * 4
        assert 0 < row["env/small/episode_turns_mean"] <= 2
        assert row["rollout_kl/k3_turn_0"] >= 0
    assert rows[-1]["env/game/episode_turns_mean"] > 1
    assert "Guess The Number" in json.dumps(read_json_objects(tmp_path / "mixed" / "episodes.jsonl"))
    (evaluated,) = read_json_objects(tmp_path / "mixed" / "evaluation.jsonl")
    for label in ("game", "small"):
        assert 0 <= evaluated[f"evaluation/{label}/reward_mean"] <= 1
    assert evaluated["evaluation/small/turns_mean"] <= 2
