"""What an answer to a row is worth: built-in rewards, and functions of the user's own in the forms of TRL, of verl, or plain."""

from __future__ import annotations

import asyncio
import copy
import functools
import importlib.util
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from r3async.config import ConfigError, RewardConfig, did_you_mean
from r3async.envs import WrongEnvironment
from r3async.envs.factory import load
from r3async.envs.forms import MISSING, Task, names_of
from r3async.envs.objects import is_object, loaded
from r3async.envs.rows import INSTALL
from r3async.untrusted import finite_number, shown_value

# -- built in ----------------------------------------------------------------------------------------------------------

_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|-?\.\d+")


def exact(completion: str, answer: str) -> float:
    """1 if the completion is `answer`, white space around both aside; else 0."""
    return float(completion.strip() == answer.strip())


def contains(completion: str, answer: str) -> float:
    """1 if `answer` is somewhere in the completion; else 0."""
    return float(answer.strip() in completion)


def number(completion: str, answer: str) -> float:
    r"""1 if both say the same number, to one part in a million; else 0. What a text says: the number in its last `\boxed{}`,
    else the one after its last `####`, else its last one."""
    said, wanted = last_number(completion), last_number(answer)
    return float(said is not None and wanted is not None and math.isclose(said, wanted, rel_tol=1e-6, abs_tol=1e-9))


def last_number(text: str) -> float | None:
    """See `number`. Commas between thousands are no part of it. None if there is none."""
    for mark in (r"\boxed{", "####"):
        _, there, after = text.rpartition(mark)
        if there and (found := _NUMBER.search(after.partition("}")[0] if mark != "####" else after)):
            return _value(found.group())
    every = _NUMBER.findall(text)
    return _value(every[-1]) if every else None


def _value(text: str) -> float:
    return float(text.replace(",", ""))


def math_verified(completion: str, answer: str) -> float:
    """1 if `math-verify` holds both for the same mathematical expression; else 0."""
    from math_verify import parse, verify

    # A reference may stand in LaTeX without its marks; answers must mark theirs.
    wanted = parse(answer) or parse(f"${answer}$")
    return float(bool(wanted) and verify(wanted, parse(completion)))


BUILT_IN: dict[str, Callable[[str, str], float]] = {
    "exact": exact,
    "contains": contains,
    "number": number,
    "math": math_verified,
}
BLOCKING = ("math",)
"""Built in, and takes its time."""

# -- functions of the user's own ---------------------------------------------------------------------------------------

Form = Literal["trl", "verl", "plain"]
Second = Literal["", "answer", "row"]
IDS_TRL = ("completion_ids", "completions_ids")
"""Token ids of completions; the second is how TRL's page on GRPO spelt it before version 1."""
GIVEN_TRL = ("prompts", "completions", *IDS_TRL, "log_metric")
NOT_GIVEN_TRL = ("trainer_state", "environments", "log_extra")
"""What TRL's trainer hands to rewards, and nobody has here."""
GIVEN_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
NOT_COLUMNS = ("prompt", "completion", "completion_ids")
"""Columns that TRL does not hand to rewards."""


class Asked(msgspec.Struct, frozen=True):
    """An answer and what it answers, as it travels to the process that judges it. `prompt`: messages, or a text where the row has
    one. `row`: all columns. `token_ids`: that were sampled; empty where no reward asks for them."""

    completion: str
    prompt: list[dict[str, Any]] | str
    row: dict[str, Any]
    answer: Any = None
    token_ids: list[int] = []


class Reward(NamedTuple):
    """A reward of the configuration, ready to be called. `quick`: it may be called on an event loop. `second`: what a plain
    function gets beside the completion. `columns`: those that it cannot do without; `answered`: nor without an answer."""

    name: str
    weight: float
    function: Callable[..., Any]
    form: Form
    quick: bool
    built_in: bool = False
    second: Second = ""
    columns: Sequence[str] = ()
    answered: bool = False
    tokens: bool = False

    @property
    def metric(self) -> str:
        """What its value is called among the metrics of an episode."""
        return f"reward/{self.name}"

    async def __call__(self, asked: Asked, logged: dict[str, float]) -> float | None:
        """What it returned for the answer; None: it does not apply. `logged` gets what it logs besides, by name. Raises
        `WrongEnvironment` for what is no reward, and whatever the function raises."""
        try:
            made = CALLS[self.form](self, asked, logged)
            made = await made if inspect.isawaitable(made) else made
        except SystemExit as error:  # which would end this process
            raise WrongEnvironment(f"reward {self.name!r} called sys.exit({error.code!r})") from error
        return self._checked(made, logged)

    def _checked(self, made: Any, logged: dict[str, float]) -> float | None:
        if self.form == "trl":
            made = self._only_one(made)
        if self.form == "verl" and isinstance(made, Mapping):
            logged |= {
                name: value for name, value in made.items() if name != "score" and isinstance(value, int | float)
            }
            made = made.get("score", "a table without `score`")
        if made is None:
            return None
        try:
            return finite_number(made)
        except (TypeError, ValueError):
            raise WrongEnvironment(
                f"reward {self.name!r} must return a finite number or None, not {shown_value(made, 200)}"
            ) from None

    def _only_one(self, made: Any) -> Any:
        try:
            (one,) = made
        except (TypeError, ValueError):
            raise WrongEnvironment(
                f"reward {self.name!r} must return a list with one reward for each completion, here one, not "
                f"{shown_value(made, 200)}"
            ) from None
        return one


def _call_trl(reward: Reward, asked: Asked, logged: dict[str, float]) -> Any:
    chat = not isinstance(asked.prompt, str)
    completion: Any = [{"role": "assistant", "content": asked.completion}] if chat else asked.completion
    columns = {name: [value] for name, value in asked.row.items() if name not in NOT_COLUMNS}
    given = {"prompts": [asked.prompt], "completions": [completion], "log_metric": logged.__setitem__}
    return _by_name(reward.function, columns | given | {name: [list(asked.token_ids)] for name in IDS_TRL})


def _call_verl(reward: Reward, asked: Asked, logged: dict[str, float]) -> Any:
    row = asked.row
    given = {
        "data_source": row.get("data_source", ""),
        "solution_str": asked.completion,
        "ground_truth": asked.answer,
        "extra_info": row.get("extra_info") or {},
    }
    return _by_name(reward.function, given)


def _by_name(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Called with those of `given` that it takes."""
    parameters = inspect.signature(function).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        given = {name: value for name, value in given.items() if name in parameters}
    return function(**given)


def _call_plain(reward: Reward, asked: Asked, logged: dict[str, float]) -> Any:
    answer = str(asked.answer) if reward.built_in else asked.answer
    second: dict[str, list[Any]] = {"": [], "answer": [answer], "row": [asked.row]}
    return reward.function(asked.completion, *second[reward.second])


CALLS: dict[Form, Callable[[Reward, Asked, dict[str, float]], Any]] = {
    "trl": _call_trl,
    "verl": _call_verl,
    "plain": _call_plain,
}


def reward_of(config: RewardConfig) -> Reward:
    """Raises `ConfigError` for one that there is not, or that cannot be called."""
    if ":" in config.fn:
        return _own(config)
    function = BUILT_IN.get(config.fn)
    if function is None:
        hint = did_you_mean(config.fn, BUILT_IN, f"built in: {', '.join(BUILT_IN)}.")
        raise ConfigError(
            f"`reward` = {config.fn!r}: no such reward; {hint} Your own is `module:function` or `file.py:function`."
        )
    if config.fn == "math" and importlib.util.find_spec("math_verify") is None:
        raise ConfigError(f"`reward` = 'math' needs math-verify, which is not installed: {INSTALL}")
    quick = config.fn not in BLOCKING
    return Reward(config.name, config.weight, function, "plain", quick, built_in=True, second="answer", answered=True)


def _own(config: RewardConfig) -> Reward:
    function = load_function(config.fn)
    if not callable(function):
        raise ConfigError(f"`reward` = {config.fn!r} is a {type(function).__name__}, not a function")
    quick = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    parameters = list(inspect.signature(function).parameters.values())
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    must = [p.name for p in named if p.default is p.empty]
    made = functools.partial(Reward, config.name, config.weight, function)
    names = [p.name for p in named]
    if "solution_str" in names:
        if unknown := [name for name in must if name not in GIVEN_VERL]:
            raise ConfigError(
                f"`reward` = {config.fn!r} asks for {unknown[0]!r}; a reward in verl's form gets {', '.join(GIVEN_VERL)}"
            )
        return made("verl", quick, answered="ground_truth" in must)
    if {"prompts", "completions", *IDS_TRL}.intersection(names) or (parameters and not names):
        if lacking := [name for name in must if name in NOT_GIVEN_TRL]:
            raise ConfigError(
                f"`reward` = {config.fn!r} asks for `{lacking[0]}`, which only TRL's trainer has: give it a default"
            )
        columns = [name for name in must if name not in GIVEN_TRL]
        any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)  # which may be one of these
        return made("trl", quick, columns=columns, tokens=any_name or not {*IDS_TRL}.isdisjoint(names))
    positional = [p.name for p in named if p.kind is not p.KEYWORD_ONLY]
    if not positional or not set(must) <= {*positional[:2]}:
        raise ConfigError(
            f"`reward` = {config.fn!r} is called `{getattr(function, '__name__', 'it')}{inspect.signature(function)}`; it must "
            "take (completion, answer), or (completion, row), or as in TRL (completions, **columns), or as in verl "
            "(data_source, solution_str, ground_truth, extra_info)"
        )
    second: Second = "" if len(positional) < 2 else "row" if positional[1] == "row" else "answer"
    return made("plain", quick, second=second, answered=second == "answer" and positional[1] in must)


def load_function(path: str) -> Any:
    """What `module:function` or `file.py:function` names. Raises `ConfigError`."""
    return loaded(path, "reward") if is_object(path) else load(path, "reward")


# -- against rows ------------------------------------------------------------------------------------------------------


def check_row(reward: Reward, task: Task) -> None:
    """Raise `ConfigError`, with the row, for one that lacks what `reward` needs."""
    if reward.answered and task.answer is MISSING:
        raise ConfigError(
            f"{task.where}: no answer, which reward {reward.name!r} asks for; its fields: {', '.join(names_of(task.row))}. Name "
            "the answer's with `data.answer`."
        )
    for column in reward.columns:
        if column not in task.row:
            hint = did_you_mean(column, task.row, f"its fields: {', '.join(task.row)}")
            raise ConfigError(f"{task.where}: no field {column!r}, which reward {reward.name!r} asks for; {hint}")
    if not reward.built_in:
        return
    if isinstance(task.answer, bool) or not isinstance(task.answer, str | int | float):
        raise ConfigError(
            f"{task.where}: the answer must be a text or a number for `{reward.name}`, not {task.answer!r:.80}"
        )
    if reward.function is number and last_number(str(task.answer)) is None:
        raise ConfigError(f"{task.where}: `number` finds no number in the answer {task.answer!r:.80}")


async def judge(rewards: Sequence[Reward], asked: Asked) -> dict[str, float]:
    """Metrics of an answer: what it is worth, unweighted, for each reward that applies (`Reward.metric`), and what rewards log.
    Those that wait are awaited together. Each of the user's own has a copy: what it changes in the row, no other sees."""
    logged: dict[str, float] = {}
    copies = (asked if reward.built_in else copy.deepcopy(asked) for reward in rewards)
    made = await asyncio.gather(*(reward(each, logged) for reward, each in zip(rewards, copies, strict=True)))
    return logged | {reward.metric: value for reward, value in zip(rewards, made, strict=True) if value is not None}
