"""A stranger's configuration runs none of his code while one only looks at it."""

import os
import pty
import subprocess
import sys
import uuid

import pytest

from r3async.config import ConfigError, EnvConfig, load_config
from r3async.envs.factory import build_environment_factory
from r3async.tools.user_code import find_named_code
from tests.helpers.cli import typed

MODULE = """
from pathlib import Path
Path({mark!r}).write_text("it ran")

from r3async.envs import Environment, StepResult


class Env:
    def reset(self, task_seed): return "hello"
    def step(self, action): return StepResult(1.0, done=True)


class Needs(Env):
    def __init__(self, path): ...


def make() -> Environment: return Env()
def undeclared(): return Env()
def reward(completion, answer): return 1.0
def play(base_url, api_key, task_seed): return 1.0
def loss(inputs): return inputs
def move(observation, rng): return ""
"""

NAMES = {
    "an environment": '[env]\nname = "{module}:Env"',
    "a function that makes one": '[env]\nname = "{module}:make"',
    "a function of the system": '[env]\nname = "os:system"\nargs = {{ command = "touch {mark}" }}',
    "an agent": '[env]\nname = "agent:{module}:play"',
    "a task with tools": '[env]\nname = "mcp:{module}:Env"\n[env.args.servers.a]\ncommand = ["python"]',
    "a module of games": '[env]\nname = "gymnasium:{module}:CartPole-v1"',
    "a taskset": '[env]\nname = "verifiers:{module}"',
    "an opponent": '[env]\nname = "textarena:TicTacToe-v0"\nargs = {{ opponent = "{module}:move" }}',
    "one of several environments": '[[env]]\nname = "guess"\n[[env]]\nlabel = "b"\nname = "{module}:Env"',
    "an evaluation": '[evaluation]\nevery_steps = 5\n[evaluation.env]\nname = "{module}:Env"',
    "one of several evaluations": '[evaluation]\nevery_steps = 5\n[evaluation.sets.a.env]\nname = "{module}:Env"',
    "a reward of a module": 'data = "rows.jsonl"\nreward = ["exact", {{ fn = "{module}:reward" }}]',
    "a reward of a file": 'data = "rows.jsonl"\nreward = "{module}.py:reward"',
    "an advantage": '[algorithm]\nadvantage = "{module}:loss"',
    "a loss": '[algorithm]\npolicy_loss = "{module}:loss"',
}
LOOKS = {
    "dry run": "train theirs.toml --dry-run",
    "dry run as JSON": "train theirs.toml --dry-run --json",
    "submit": "submit theirs.toml --dry-run --address http://127.0.0.1:9",
}


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """Writes `theirs.toml`, with a module beside it that leaves a mark when it is imported. Returns its name and the mark."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    name, mark = f"stranger_{uuid.uuid4().hex}", tmp_path / "mark"
    (tmp_path / f"{name}.py").write_text(MODULE.format(mark=str(mark)))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n{"prompt": "2+2", "answer": "4"}\n')

    def write(settings):
        text = settings.format(module=name, mark=mark)
        (tmp_path / "theirs.toml").write_text(f'extends = "quickstart"\n{text}\n')
        return name, mark

    yield write
    sys.modules.pop(name, None)


LOOKED_AT = [
    *((what, "dry run") for what in NAMES),
    # The commands have one rule: three kinds of code show it of the others.
    *((what, look) for what in ("an environment", "a loss", "a reward of a file") for look in list(LOOKS)[1:]),
]


@pytest.mark.parametrize(("what", "look"), LOOKED_AT)
def test_a_command_that_shows_imports_nothing_that_a_file_names(what, look, stranger, tmp_path):
    _, mark = stranger(NAMES[what])
    said = typed(*LOOKS[look].split(), cwd=tmp_path)
    assert not mark.exists(), said
    if look != "submit":
        assert said.returncode == 0, said
        assert "It was not imported" in said.stdout


@pytest.mark.parametrize("what", NAMES)
def test_every_name_is_found_with_its_setting(what, stranger, tmp_path, monkeypatch):
    module, _ = stranger(NAMES[what])
    monkeypatch.chdir(tmp_path)
    ((setting, name),) = find_named_code(load_config("theirs.toml")).items()
    assert module in name or name == "os:system"
    assert setting.rpartition(".")[2] in ("name", "opponent", "reward", "policy_loss", "advantage")


def test_what_is_ours_is_no_code_of_somebody_s():
    for name in ("quickstart", "reverse-text", "alphabet-sort", "math"):
        assert find_named_code(load_config(name)) == {}
    assert find_named_code(load_config("quickstart", ["env.name=gymnasium:CartPole-v1"])) == {}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("env.name={module}:Needs", "it takes (path)"),
        ("env.name={module}:undeclared", "annotate it, as in `def undeclared(…) -> Environment`"),
        ("data=rows.jsonl reward={module}.py:nothing", "has no 'nothing'"),
        ("algorithm.policy_loss={module}:move", "must be a function of one argument"),
    ],
)
def test_a_name_that_was_typed_is_imported_and_checked(words, says, stranger, tmp_path):
    module, mark = stranger("")
    said = typed("train", "quickstart", "--dry-run", *words.format(module=module).split(), cwd=tmp_path)
    assert (said.returncode, says in said.stderr) == (2, True), said
    assert mark.exists()


def test_a_typed_name_allows_no_other_of_the_file(stranger, tmp_path):
    module, mark = stranger(NAMES["an environment"])
    for other in ("algorithm.policy_loss=tests.helpers.envs:Echo", f"algorithm.policy_loss=my.{module}:Environment"):
        said = typed("train", "theirs.toml", "--dry-run", other, cwd=tmp_path)
        assert said.returncode == 0, said
        assert not mark.exists()
    said = typed("train", "theirs.toml", "--dry-run", f"env.name={module}:Env", cwd=tmp_path)
    assert said.returncode == 0, said
    assert mark.exists()


@pytest.mark.parametrize(("answer", "imported"), [(b"y\n", True), (b"n\n", False), (b"\n", False)])
def test_a_person_at_a_terminal_is_asked(answer, imported, stranger, tmp_path):
    module, mark = stranger(NAMES["an environment"])
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "r3async", "train", "theirs.toml", "--dry-run"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdin=theirs, stderr=theirs, stdout=subprocess.PIPE, text=True
    ) as process:
        os.write(ours, answer)
        shown, _ = process.communicate(timeout=180)
    asked = os.read(ours, 65536).decode()
    os.close(theirs)
    os.close(ours)
    assert process.returncode == 0, (shown, asked)
    assert f"`env.name` = {module}:Env. Importing it runs it." in " ".join(asked.split())
    assert mark.exists() == imported
    assert ("It was not imported" in shown) != imported


@pytest.mark.parametrize("name", ["os:system", "os:getcwd", "subprocess:run", "subprocess:Popen", "builtins:exec"])
def test_only_what_says_that_it_is_an_environment_is_called(name, tmp_path):
    args = {"command": f"touch {tmp_path / 'mark'}", "args": ["touch", str(tmp_path / "mark")]}
    for given in ({}, args, {"command": args["command"]}, {"args": args["args"]}):
        with pytest.raises(ConfigError, match="is no environment"):
            build_environment_factory(EnvConfig(name=name, args=given))
    assert list(tmp_path.iterdir()) == []


def test_a_function_that_says_what_it_makes_is_an_environment(stranger, tmp_path, monkeypatch):
    module, _ = stranger("")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert build_environment_factory(EnvConfig(name=f"{module}:make"))()


def test_a_module_of_games_beside_the_file_stays_a_module(stranger, tmp_path, monkeypatch):
    """gymnasium imports it, in the processes of the pool too, and takes no file."""
    module, _ = stranger(NAMES["a module of games"])
    monkeypatch.chdir(tmp_path.parent)
    assert load_config(f"{tmp_path.name}/theirs.toml").env.name == f"gymnasium:{module}:CartPole-v1"
