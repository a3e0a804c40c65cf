"""From a row to a whole conversation with its answers, for supervised training."""

from __future__ import annotations

import itertools
from typing import Any

from r3async.config import ConfigError, DataConfig
from r3async.envs import Message
from r3async.envs.forms import ANSWERS, MISSING, ShownAnswer, Task, look_up, messages_of, task_of, tools_of
from r3async.envs.rows import Found

MESSAGES, COMPLETION = "messages", "completion"


def conversation_of(found: Found, data: DataConfig) -> Task:
    """A row as a task whose `messages` are the whole conversation; what the assistant says in it is learnt.

    `messages`: the column `messages`; or else the prompt, as `data.prompt` says, and the answer: `data.answer`, or the first of
    `completion` and the columns where rewards look for one. Raises `ConfigError` that names the row and what it lacks.
    """
    row, where = found.row, found.where
    given = row.get(MESSAGES)
    if given is not None and data.prompt == DataConfig().prompt and not data.answer:
        messages = messages_of(given, where)
        if data.system and [m.role for m in messages[:1]] != ["system"]:
            messages.insert(0, Message("system", data.system))
        task = Task(messages, True, MISSING, row, where)
    else:
        task = task_of(found, data)
        answer = look_up(row, COMPLETION) if not data.answer else MISSING
        answer = task.answer if answer in (MISSING, None) else answer
        if answer is MISSING or answer is None:
            raise ConfigError(
                f"{where}: there is no answer to learn: none of the columns {MESSAGES}, {COMPLETION}, {', '.join(ANSWERS)} is "
                "there; name it with `data.answer`"
            )
        said = messages_of(answer, where) if isinstance(answer, list) else [Message("assistant", _text(answer, where))]
        task = task._replace(messages=[*task.messages, *said], chat=True)
    _check(task.messages, where)
    tools_of(task)
    return task


def _text(answer: Any, where: str) -> str:
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ConfigError(f"{where}: the answer must be a text, a number or chat messages, not {answer!r:.80}")
    return str(answer)


def _check(messages: list[Message], where: str) -> None:
    """Raises `ConfigError` unless an assistant answers something, with texts."""
    if not messages or messages[-1].role != "assistant":
        raise ConfigError(f"{where}: the conversation does not end with an answer of the assistant")
    if messages[0].role == "assistant":
        raise ConfigError(f"{where}: the conversation begins with an answer of the assistant, which nothing asks for")
    for before, message in itertools.pairwise(messages):
        if before.role == message.role == "assistant":
            raise ConfigError(f"{where}: two answers of the assistant follow each other: join them")
    for message in messages:
        if message.role == "assistant" and not (message.content.strip() or message.tool_calls):
            raise ConfigError(f"{where}: an answer of the assistant is empty")
    if all(isinstance(message, ShownAnswer) for message in messages if message.role == "assistant"):
        raise ConfigError(f"{where}: no answer of the assistant is to be learnt: leave the row out")
