"""Rewards for answers to rows: a built-in one, or a user's function in the form of TRL, of verl, or
plain.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from r3async.config import ConfigError, RewardConfig, did_you_mean
from r3async.envs import EnvironmentProtocolError
from r3async.envs.builtin_rewards import (
    BLOCKING_REWARDS,
    BUILTIN_REWARDS,
    find_last_number,
    reward_number,
)
from r3async.envs.factory import import_for_setting
from r3async.envs.passed_objects import is_object_name, load_object
from r3async.envs.reward_arguments import (
    FOREIGN_NAMES,
    TRL_ARGUMENTS,
    TRL_RESERVED_COLUMNS,
    TRL_TOKEN_ID_NAMES,
    PlainArguments,
    RewardForm,
    bind_plain_arguments,
    call_by_name,
    find_form,
    get_signature,
    list_named,
    list_required,
    refuse_unknown_arguments,
    takes_any_name,
)
from r3async.envs.row_tasks import MISSING, DatasetTask, list_field_names
from r3async.envs.rows import INSTALL_HINT
from r3async.untrusted import format_value, to_finite_float

# -- user-defined rewards --------------------------------------------------------------------------


class RewardInputs(msgspec.Struct, frozen=True):
    """An answer and its task, as sent to the process that judges it.

    Attributes:
        prompt: Messages, or a text if the row has one.
        row: All columns.
        token_ids: The sampled token ids; empty where no reward asks for them.
    """

    completion: str
    prompt: list[dict[str, Any]] | str
    row: dict[str, Any]
    answer: Any = None
    token_ids: list[int] = []


class RewardFunction(NamedTuple):
    """A reward of the configuration, ready to be called.

    Attributes:
        is_nonblocking: True if it may be called on an event loop.
        arguments: What the parameters of a plain function get.
        required_columns: Columns that it requires.
        needs_answer: True if it requires an answer.
    """

    name: str
    weight: float
    function: Callable[..., Any]
    form: RewardForm
    is_nonblocking: bool
    is_builtin: bool = False
    arguments: PlainArguments = PlainArguments({})
    required_columns: Sequence[str] = ()
    needs_answer: bool = False
    needs_token_ids: bool = False

    @property
    def metric_name(self) -> str:
        """The name of the reward's value among the metrics of an episode."""
        return f"rewards/{self.name}"

    async def __call__(self, inputs: RewardInputs, logged: dict[str, float]) -> float | None:
        """Return the reward of an answer, or None if it does not apply.

        Raises `EnvironmentProtocolError` for a value that is not a reward, and whatever the
        function raises. Other values that the function logs are added to `logged` by name.
        """
        try:
            made = CALLERS_BY_FORM[self.form](self, inputs, logged)
            made = await made if inspect.isawaitable(made) else made
        except SystemExit as error:  # which would end this process
            raise EnvironmentProtocolError(
                f"reward {self.name!r} called sys.exit({error.code!r})"
            ) from error
        return self._check_value(made, logged)

    def _check_value(self, returned: Any, logged: dict[str, float]) -> float | None:
        if self.form == "trl":
            returned = self._unwrap_single(returned)
        if self.form == "verl" and isinstance(returned, Mapping):
            logged |= {
                name: value
                for name, value in returned.items()
                if name != "score" and isinstance(value, int | float)
            }
            returned = returned.get("score", "a table without `score`")
        if returned is None:
            return None
        try:
            return to_finite_float(returned)
        except (TypeError, ValueError):
            raise EnvironmentProtocolError(
                f"reward {self.name!r} must return a finite number or None, not "
                f"{format_value(returned, 200)}"
            ) from None

    def _unwrap_single(self, returned: Any) -> Any:
        try:
            (one,) = returned
        except (TypeError, ValueError):
            raise EnvironmentProtocolError(
                f"reward {self.name!r} must return a list with one reward for each completion, "
                f"here one, not {format_value(returned, 200)}"
            ) from None
        return one


def _call_trl(reward: RewardFunction, asked: RewardInputs, logged: dict[str, float]) -> Any:
    chat = not isinstance(asked.prompt, str)
    completion: Any = (
        [{"role": "assistant", "content": asked.completion}] if chat else asked.completion
    )
    columns = {
        name: [value] for name, value in asked.row.items() if name not in TRL_RESERVED_COLUMNS
    }
    given = {
        "prompts": [asked.prompt],
        "completions": [completion],
        "log_metric": logged.__setitem__,
    }
    return call_by_name(
        reward.function,
        columns | given | {name: [list(asked.token_ids)] for name in TRL_TOKEN_ID_NAMES},
    )


def _call_verl(reward: RewardFunction, asked: RewardInputs, logged: dict[str, float]) -> Any:
    row = asked.row
    given = {
        "data_source": row.get("data_source", ""),
        "solution_str": asked.completion,
        "ground_truth": asked.answer,
        "extra_info": row.get("extra_info") or {},
    }
    return call_by_name(reward.function, given)


def _call_plain(reward: RewardFunction, asked: RewardInputs, logged: dict[str, float]) -> Any:
    answer = str(asked.answer) if reward.is_builtin else asked.answer
    given = {
        "completion": asked.completion,
        "answer": answer,
        "prompt": asked.prompt,
        "row": asked.row,
    }
    if answer is None and not reward.needs_answer:
        del given["answer"]  # the parameter keeps its default
    named = {name: given[role] for name, role in reward.arguments.roles.items() if role in given}
    return call_by_name(reward.function, asked.row | given | named)


CALLERS_BY_FORM: dict[
    RewardForm, Callable[[RewardFunction, RewardInputs, dict[str, float]], Any]
] = {
    "trl": _call_trl,
    "verl": _call_verl,
    "plain": _call_plain,
}


def load_reward(config: RewardConfig) -> RewardFunction:
    """Return the reward that a configuration names. Raises `ConfigError` for one that does not
    exist or cannot be called."""
    if ":" in config.fn:
        return _load_user_reward(config)
    function = BUILTIN_REWARDS.get(config.fn)
    if function is None:
        hint = did_you_mean(config.fn, BUILTIN_REWARDS, f"built in: {', '.join(BUILTIN_REWARDS)}.")
        raise ConfigError(
            f"`reward` = {config.fn!r}: no such reward; {hint} Your own is `module:function` or "
            "`file.py:function`."
        )
    if config.fn == "math" and importlib.util.find_spec("math_verify") is None:
        raise ConfigError(
            f"`reward` = 'math' needs math-verify, which is not installed: {INSTALL_HINT}"
        )
    quick = config.fn not in BLOCKING_REWARDS
    return RewardFunction(
        config.name,
        config.weight,
        function,
        "plain",
        quick,
        is_builtin=True,
        arguments=PlainArguments({"completion": "completion", "answer": "answer"}),
        needs_answer=True,
    )


def _load_user_reward(config: RewardConfig) -> RewardFunction:
    function = load_reward_function(config.fn)
    if not callable(function):
        raise ConfigError(
            f"`reward` = {config.fn!r} is a {type(function).__name__}, not a function"
        )
    signature = get_signature(function, config.fn)
    quick = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    )
    required = list_required(signature)
    form = find_form(signature)
    refuse_unknown_arguments(signature, config.fn, form)
    made = functools.partial(RewardFunction, config.name, config.weight, function, form, quick)
    if form == "verl":
        return made(needs_answer="ground_truth" in required)
    if form == "trl":
        any_name = takes_any_name(signature)  # which may be one of these
        return made(
            required_columns=[name for name in required if name not in TRL_ARGUMENTS],
            needs_token_ids=any_name or not {*TRL_TOKEN_ID_NAMES}.isdisjoint(list_named(signature)),
        )
    arguments = bind_plain_arguments(signature, config.fn, getattr(function, "__name__", "it"))
    needs_answer = any(
        role == "answer" and name in required for name, role in arguments.roles.items()
    )
    return made(arguments=arguments, required_columns=arguments.columns, needs_answer=needs_answer)


def load_reward_function(path: str) -> Any:
    """Return the function that `module:function` or `file.py:function` names.
    Raises `ConfigError`."""
    return (
        load_object(path, "reward") if is_object_name(path) else import_for_setting(path, "reward")
    )


# -- checking and scoring rows ---------------------------------------------------------------------


def check_reward_row(reward: RewardFunction, task: DatasetTask) -> None:
    """Raise `ConfigError`, which names the row, if `task` lacks something that `reward` needs."""
    _refuse_shadowed_columns(reward, task)
    if reward.needs_answer and task.answer is MISSING:
        raise ConfigError(
            f"{task.location}: no answer, which reward {reward.name!r} asks for; its fields: "
            f"{', '.join(list_field_names(task.row))}. Name the answer's with `data.answer`."
        )
    for column in reward.required_columns:
        if column not in task.row:
            hint = did_you_mean(column, task.row, f"its fields: {', '.join(task.row)}")
            hint = FOREIGN_NAMES.get(column, hint)
            raise ConfigError(
                f"{task.location}: no field {column!r}, which reward {reward.name!r} "
                f"asks for; {hint}"
            )
    if not reward.is_builtin:
        return
    if isinstance(task.answer, bool) or not isinstance(task.answer, str | int | float):
        raise ConfigError(
            f"{task.location}: the answer must be a text or a number for `{reward.name}`, not "
            f"{task.answer!r:.80}"
        )
    if reward.function is reward_number and find_last_number(str(task.answer)) is None:
        raise ConfigError(
            f"{task.location}: `number` finds no number in the answer {task.answer!r:.80}"
        )


def _refuse_shadowed_columns(reward: RewardFunction, task: DatasetTask) -> None:
    """Raise `ConfigError` for a parameter that has the name of a column, and would
    get something else."""
    given = (
        {"answer": task.answer}
        if task.is_chat
        else {"answer": task.answer, "prompt": task.messages[0].content}
    )
    for name, role in reward.arguments.roles.items():
        if name == role or name not in task.row or task.row[name] == given.get(role, MISSING):
            continue
        remedy = f", or set `data.answer` = {name!r}" if role == "answer" else ""
        raise ConfigError(
            f"{task.location}: reward {reward.name!r} asks for {name!r}, which the row has as a "
            f"column, and would get the {role}: call the parameter `{role}`, or take "
            f"(completion, row){remedy}"
        )


async def compute_rewards(
    rewards: Sequence[RewardFunction], inputs: RewardInputs
) -> dict[str, float]:
    """Return the metrics of an answer: the unweighted value of each reward that applies
    (`RewardFunction.metric_name`), and the values that rewards log.

    Rewards that wait are awaited together. Each user function gets its own copy of `inputs`, so no
    other reward sees what it changes in the row.
    """
    logged: dict[str, float] = {}
    copies = (inputs if reward.is_builtin else copy.deepcopy(inputs) for reward in rewards)
    made = await asyncio.gather(
        *(reward(each, logged) for reward, each in zip(rewards, copies, strict=True))
    )
    return logged | {
        reward.metric_name: value
        for reward, value in zip(rewards, made, strict=True)
        if value is not None
    }
