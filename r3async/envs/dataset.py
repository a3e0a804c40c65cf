"""`dataset:PATH`: single-turn tasks from a JSONL file and a function that rewards answers."""

from __future__ import annotations

import inspect
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from r3async.config import ConfigError, EnvConfig, did_you_mean
from r3async.envs import Action, EnvironmentFactory, Message, StepResult
from r3async.envs.factory import accept_arguments, load
from r3async.envs.pool import pooled

Row = dict[str, Any]
USER_PATH = "R3ASYNC_USER_PATH"  # set for every actor: where the run was started


def exact(answer: str, want: str) -> float:
    """1 if the answer is `want`, white space around both aside; else 0."""
    return float(answer.strip() == want.strip())


def contains(answer: str, want: str) -> float:
    """1 if `want` is somewhere in the answer; else 0."""
    return float(want.strip() in answer)


def number(answer: str, want: str) -> float:
    """1 if the last number in the answer equals `want` to one part in a million (commas between thousands aside); else 0."""
    found = re.findall(r"-?\d+(?:,\d{3})*(?:\.\d+)?", answer)
    if not found:
        return 0.0
    return float(math.isclose(float(found[-1].replace(",", "")), float(want.replace(",", "")), rel_tol=1e-6))


REWARDS: dict[str, Callable[[str, str], float]] = {"exact": exact, "contains": contains, "number": number}


class Dataset:
    """Rows of a JSONL file; a task seed is the number of a row. Not to be named in a configuration: `dataset:PATH` makes it.

    `reward`: `exact`, `contains` or `number`, with the answer's text and the row's answer; or `module:function`, with the
    answer's text and the whole row, which may be `async def`. The reward is what it returns.
    """

    def __init__(
        self, path: str, prompt: str = "prompt", answer: str = "answer", system: str = "", reward: str = "exact"
    ):
        self._rows = rows_of(find(path), prompt, answer if reward in REWARDS else "", number=reward == "number")
        self._prompt, self._answer, self._system = prompt, answer, system
        self._built_in = REWARDS.get(reward)
        self._function = None if self._built_in else reward_function(reward)
        self._row: Row = {}

    @property
    def size(self) -> int:
        return len(self._rows)

    def __deepcopy__(self, memo: dict[int, Any]) -> Dataset:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)  # rows are only read
        return other

    async def reset(self, task_seed: int) -> list[Message]:
        return self.begin(task_seed)

    def begin(self, task_seed: int) -> list[Message]:
        self._row = self._rows[task_seed % self.size]
        asked = [Message("user", self._row[self._prompt])]
        return [Message("system", self._system), *asked] if self._system else asked

    def oracle(self) -> str:
        """The row's answer; empty where it has none."""
        return str(self._row.get(self._answer, ""))

    async def step(self, action: Action) -> StepResult:
        reward = self.score(action.text)
        return StepResult(await reward if inspect.isawaitable(reward) else reward, done=True)

    def score(self, text: str) -> Any:
        if self._built_in:
            return self._built_in(text, str(self._row[self._answer]))
        assert self._function is not None
        return self._function(text, self._row)


class BlockingDataset(Dataset):
    """The same for a plain function of the person's, which may take its time: played in a process of the pool."""

    def reset(self, task_seed: int) -> list[Message]:  # type: ignore[override]
        return self.begin(task_seed)

    def step(self, action: Action) -> StepResult:  # type: ignore[override]
        return StepResult(self.score(action.text), done=True)


def reward_function(reward: str) -> Callable[[str, Row], Any]:
    if ":" not in reward:
        hint = did_you_mean(reward, REWARDS, f"built in: {', '.join(REWARDS)}")
        raise ConfigError(
            f"`env.args.reward` = {reward!r}: no such reward; {hint} Your own is `module:function(answer, row)`."
        )
    function = load(reward, "env.args.reward")
    try:
        inspect.signature(function).bind("", {})
    except TypeError as error:
        raise ConfigError(f"`env.args.reward` = {reward!r} must be called with (answer, row): {error}") from error
    return function


def find(path: str) -> Path:
    """A relative path is one from where the run was started. Raises `ConfigError` if there is no such file."""
    file = Path(os.environ.get(USER_PATH, os.getcwd())) / Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"`env.name` = 'dataset:{path}': there is no file {file}")
    return file


def rows_of(file: Path, prompt: str, answer: str, *, number: bool) -> list[Row]:
    """Objects of a JSONL file; blank lines are skipped. Raises `ConfigError` with the line that does not fit."""
    rows: list[Row] = []
    with file.open(encoding="utf-8") as lines:
        try:
            for at, line in enumerate(lines, 1):
                if line.strip():
                    rows.append(row_of(line, f"{file}, line {at}", prompt, answer, number))
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file} is not UTF-8 text: {error}") from error
    if not rows:
        raise ConfigError(f"{file} has no rows")
    return rows


def row_of(line: str, where: str, prompt: str, answer: str, number: bool) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: a row must be an object, such as {{{prompt!r}: ..., {answer!r}: ...}}")
    for field, setting in ((prompt, "prompt"), (answer, "answer")):
        if field and field not in row:
            hint = did_you_mean(field, row, f"its fields: {', '.join(row)}")
            raise ConfigError(f"{where}: no field {field!r}; {hint} Name the field with `env.args.{setting}`.")
    if not isinstance(row[prompt], str):
        raise ConfigError(f"{where}: field {prompt!r} must be a string, not {row[prompt]!r}")
    if answer and (isinstance(row[answer], bool) or not isinstance(row[answer], str | int | float)):
        raise ConfigError(f"{where}: field {answer!r} must be a string or a number, not {row[answer]!r}")
    if number:
        try:
            float(str(row[answer]).replace(",", ""))
        except ValueError as error:
            raise ConfigError(f'{where}: `reward = "number"`, but {answer!r} is {row[answer]!r}') from error
    return row


def make(target: str, config: EnvConfig) -> EnvironmentFactory:
    """The file is read once in a process; a plain function of the person's own is called in the pool."""
    accept_arguments(Dataset, config, extra=["path"])
    arguments = {"path": target, **config.arguments()}
    dataset = Dataset(**arguments)
    if dataset._function is None or inspect.iscoroutinefunction(dataset._function):
        return lambda: dataset.__deepcopy__({})
    return pooled("r3async.envs.dataset:BlockingDataset", arguments, config, has_oracle=True, size=dataset.size)
