"""A new model knows the format of the game and little of the skill."""

import json

import pytest

from r3async.config import ConfigError, load_config
from r3async.rollout.chat import ChatRenderer
from r3async.tools.init_model import byte_tokenizer, init_model

SMALL = ["model.init.hidden_size=64", "model.init.layers=2", "model.init.warm_reward=0.05", "env.args.turns=2"]


class NoOracle:
    """An environment that does not know the answer."""

    async def reset(self, task_seed): ...

    async def step(self, action): ...


def test_a_model_is_made_warmed_up_and_loads_in_transformers(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    lines = []
    made = init_model(tmp_path / "model", load_config("quickstart", SMALL), progress=lines.append)
    assert made["sampled_reward"] >= 0.05
    assert made["warm_steps"] > 0
    assert any("sampled reward" in line for line in lines)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.num_experts == 8
    assert sum(p.numel() for p in model.parameters()) == made["parameters"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.decode(tokenizer.encode("naïve ☃", add_special_tokens=False)) == "naïve ☃"
    assert ChatRenderer.from_model(tmp_path / "model").end_id == tokenizer.eos_token_id
    assert json.loads((tmp_path / "model" / "r3async_init.json").read_text()) == made


def test_equal_seeds_make_equal_models(tmp_path):
    from safetensors.torch import load_file

    config = load_config("quickstart", [*SMALL, "model.init.max_warm_steps=2"])
    for name in ("a", "b"):
        init_model(tmp_path / name, config)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("a", "b"))
    assert all((first[k] == second[k]).all() for k in first)


def test_an_existing_directory_is_not_touched(tmp_path):
    with pytest.raises(FileExistsError):
        init_model(tmp_path, load_config("quickstart"))


def test_an_environment_without_an_oracle_is_refused_with_the_fix(tmp_path):
    config = load_config("quickstart", ["env.name=tests.tools.test_init_model:NoOracle"])
    with pytest.raises(ConfigError, match=r"model\.path"):
        init_model(tmp_path / "model", config)


def test_the_tokenizer_is_one_token_a_byte():
    tokenizer = byte_tokenizer()
    assert len(tokenizer.encode("abc é", add_special_tokens=False)) == 6
    assert len(tokenizer) <= 264
