"""Paths in a TOML file are those of what lies beside it, wherever the command is typed."""

import json
from pathlib import Path

import pytest

from r3async.config import EnvConfig, load_config
from r3async.config.algorithm import import_policy_loss
from r3async.envs.factory import build_environment_factory
from r3async.tools.preflight import make_checked_plan

ENVIRONMENT = """
from helper import REWARD
from r3async.envs import Message, StepResult

class Once:
    def __init__(self, word="one"):
        self.word = word
    {async_}def reset(self, task_seed):
        return [Message("user", self.word)]
    {async_}def step(self, action):
        return StepResult(REWARD, done=True)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder of a person's own files; the command is typed elsewhere."""
    folder = tmp_path / "mine"
    (folder / "test").mkdir(parents=True)
    rows = "".join(json.dumps({"prompt": f"{i}?", "answer": str(i)}) + "\n" for i in range(8))
    for name in ("train.jsonl", "other.jsonl"):
        (folder / name).write_text(rows)
    (folder / "rewards.py").write_text("def correct(completion, answer):\n    return completion == answer\n")
    (folder / "helper.py").write_text("REWARD = 0.5\n")
    (folder / "waiting.py").write_text(ENVIRONMENT.replace("{async_}", "async "))
    (folder / "blocking.py").write_text(ENVIRONMENT.replace("{async_}", ""))
    (folder / "losses.py").write_text("def mine(inputs):\n    return inputs\n")
    (folder / "base.toml").write_text('extends = "math"\nreward = "rewards.py:correct"\n')
    (folder / "run.toml").write_text('extends = "base.toml"\n[data]\npath = "train.jsonl"\neval = 2\n')
    monkeypatch.delenv("R3ASYNC_USER_PATH", raising=False)
    monkeypatch.chdir(tmp_path)
    return folder


def test_what_lies_beside_a_file_is_found_from_elsewhere(folder, tmp_path, monkeypatch):
    args = load_config("mine/run.toml").env.args
    assert (args["path"], args["reward"]) == ("mine/train.jsonl", "mine/rewards.py:correct")
    (tmp_path / "deep").mkdir()
    monkeypatch.chdir(tmp_path / "deep")
    assert load_config("../mine/run.toml").env.args["path"] == "../mine/train.jsonl"
    assert load_config(str(folder / "run.toml")).env.args["path"] == str(folder / "train.jsonl")
    assert "data: 6 rows are trained" in make_checked_plan(load_config("../mine/run.toml")).notes[0]


def test_a_file_beside_the_command_is_named_as_before(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert load_config("run.toml").env.args["path"] == "train.jsonl"
    assert load_config("./run.toml").env.args["reward"] == "rewards.py:correct"


def test_what_does_not_lie_beside_the_file_is_looked_for_where_the_command_is_typed(folder, tmp_path):
    (tmp_path / "typed.toml").write_text('extends = "math"\nsteps = 3\n')
    (tmp_path / "here.jsonl").write_text((folder / "train.jsonl").read_text())
    (folder / "far.toml").write_text(
        'extends = "typed.toml"\nreward = "exact"\n[data]\npath = "here.jsonl"\neval = "test"\n[model]\npath = "org/name"\n'
    )
    config = load_config("mine/far.toml")
    args = config.env.args
    assert (config.steps, args["path"], args["reward"], config.model.path) == (3, "here.jsonl", "exact", "org/name")
    assert args["eval"] == "test"  # a split, though a folder of that name lies beside the file


def test_what_the_command_line_names_is_not_of_the_file(folder, tmp_path):
    (tmp_path / "train.jsonl").write_text((folder / "train.jsonl").read_text())
    assert load_config("mine/run.toml", ["data=train.jsonl"]).env.args["path"] == "train.jsonl"


@pytest.mark.parametrize("name", ["waiting", "blocking", "waiting.py", "blocking.py"])
async def test_an_environment_beside_the_file_plays(folder, name):
    (folder / "env.toml").write_text(
        f'extends = "quickstart"\n[env]\nname = "{name}:Once"\nargs = {{ word = "two" }}\n'
    )
    env = load_config("mine/env.toml").env
    assert env.name == f"mine/{name.removesuffix('.py')}.py:Once"
    factory = build_environment_factory(env)
    played = factory()
    try:
        assert (await played.reset(0))[0].content == "two"
    finally:
        close = getattr(factory, "close", None)
        if close is not None:
            close()


def test_names_in_mixes_evaluations_and_of_losses_are_found_too(folder, monkeypatch):
    (folder / "mix.toml").write_text(
        'extends = "quickstart"\nalgorithm.policy_loss = "losses:mine"\n'
        '[[env]]\nlabel = "a"\nname = "waiting:Once"\n'
        '[[env]]\nlabel = "b"\ndata = "train.jsonl"\nreward = ["rewards:correct", { fn = "rewards.py:correct", name = "x" }]\n'
        '[evaluation.env]\nname = "dataset:other.jsonl"\n[evaluation.sets.s.env]\nname = "agent:waiting:Once"\n'
    )
    config = load_config("mine/mix.toml")
    assert config.env.args["a"]["name"] == "mine/waiting.py:Once"
    b = config.env.args["b"]["args"]
    assert b["path"] == "mine/train.jsonl"
    assert b["reward"] == ["mine/rewards.py:correct", {"fn": "mine/rewards.py:correct", "name": "x"}]
    assert config.evaluation.env.name == "dataset:mine/other.jsonl"
    assert config.evaluation.sets["s"].env.name == "agent:mine/waiting.py:Once"
    assert import_policy_loss(config.algorithm.policy_loss)(3) == 3


def test_an_environment_file_that_is_not_there_or_has_no_such_class_is_named(folder):
    for name, message in (("mine/none.py:Once", "there is no file"), ("mine/waiting.py:Onc", "did you mean 'Once'")):
        with pytest.raises(ValueError, match=message):
            build_environment_factory(EnvConfig(name=name))
