"""A folder with typical wrong inputs, and the judge of a command's answer to them."""

import json
from pathlib import Path

from tests.helpers.cli import Said

LINES = 3
"""Maximum number of lines: a message, and what a library or a progress bar has printed before it."""

ENVIRONMENTS = """
from r3async.envs import Message, StepResult


class Gym:
    def reset(self, task_seed): return "hello"
    def step(self, action): return "there", 1.0, True, False, {}


class AsyncGym:
    async def reset(self, task_seed): return [Message("user", "hello")]
    async def step(self, action): return [], 1.0, True, {}


class Rewards:
    def reset(self, task_seed): return "hello"
    def step(self, action): return StepResult(reward=[1.0, 0.0], done=True)


class Number:
    def reset(self, task_seed): return "hello"
    def step(self, action): return 1.0


class WithInfo:
    def reset(self, task_seed): return "hello", {}
    def step(self, action): return StepResult(1.0, done=True)


class Mixed:
    async def reset(self, task_seed): return [Message("user", "hello")]
    def step(self, action): return StepResult(1.0, done=True)


class NoStep:
    def reset(self, task_seed): return "hello"


class Needs:
    def __init__(self, path): ...
    def reset(self, task_seed): return "hello"
    def step(self, action): return StepResult(1.0, done=True)


number = 3
def function(): ...
"""


def make_folder(folder: Path) -> None:
    """Make files and directories that no command can use, named after their fault."""
    folder.mkdir(exist_ok=True)
    (folder / "file").write_text("x")
    (folder / "empty").mkdir()
    (folder / "broken.toml").write_text("steps =\n")
    (folder / "twice.toml").write_text("steps = 1\nsteps = 2\n")
    (folder / "binary.toml").write_bytes(b"\xff\xfe\x00")
    (folder / "circle.toml").write_text('extends = "circle.toml"\n')
    (folder / "number.toml").write_text("extends = 3\n")
    (folder / "base.toml").write_text('extends = "nowhere"\n')
    (folder / "section.toml").write_text("learner = 3\n")
    (folder / "other.toml").write_text("[trainer]\ntotal_epochs = 3\n")
    (folder / "folder.toml").mkdir()
    (folder / "unreadable.toml").symlink_to("/proc/self/mem")
    (folder / "mine.py").write_text(ENVIRONMENTS)
    (folder / "syntax.py").write_text("def f(:\n")
    (folder / "raises.py").write_text("raise RuntimeError('no licence')\n")
    (folder / "rows.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\nnot json\n')
    make_models(folder / "models")


def make_models(folder: Path) -> None:
    """Make model directories that each lack one thing."""
    parts = {
        "config.json": json.dumps({"model_type": "qwen3_moe"}),
        "model.safetensors": "x",
        "tokenizer.json": "{}",
        "tokenizer_config.json": json.dumps({"chat_template": "{{ messages }}"}),
    }
    changes: dict[str, dict[str, str | None]] = {
        "no_config": {"config.json": None},
        "bad_config": {"config.json": "{"},
        "no_type": {"config.json": "{}"},
        "no_weights": {"model.safetensors": None},
        "no_tokenizer": {"tokenizer.json": None, "tokenizer_config.json": None},
        "no_template": {"tokenizer_config.json": "{}"},
        "bad_tokenizer": {"tokenizer_config.json": "["},
    }
    for name, changed in changes.items():
        (folder / name).mkdir(parents=True)
        for part, text in (parts | changed).items():
            if text is not None:
                (folder / name / part).write_text(text)


def judge(said: Said, parts: tuple[str, ...], code: int = 2) -> None:
    """Assert one clear line on stderr with each of `parts`, nothing on stdout, and that exit code."""
    shown = f"\nexit code {said.returncode}\nstdout: {said.stdout}\nstderr: {said.stderr}"
    assert said.returncode == code, shown
    assert "Traceback" not in said.stderr + said.stdout, shown
    lines = [line for line in said.stderr.strip().splitlines() if line.strip()]
    assert 1 <= len(lines) <= LINES, shown
    for part in parts:
        assert part in lines[-1], (part, shown)
