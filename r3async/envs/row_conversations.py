"""Making whole conversations with answers from rows, for supervised training."""

from __future__ import annotations

import itertools
from typing import Any

from r3async.config import ConfigError, DataConfig
from r3async.envs import Message
from r3async.envs.row_tasks import (
    ANSWER_COLUMNS,
    MISSING,
    DatasetTask,
    MaskedAnswer,
    check_columns,
    look_up_field,
    parse_messages,
    parse_task,
)
from r3async.envs.rows import LocatedRow

MESSAGES_COLUMN = "messages"
COMPLETION_COLUMN = "completion"


def parse_conversation(located_row: LocatedRow, data: DataConfig) -> DatasetTask:
    """Return a row as a task whose `messages` are the whole conversation; the assistant's messages
    in it are trained on.

    The messages are those of the column `messages`; or else the prompt, as `data.prompt` says, and
    the answer: `data.answer`, or the first of `completion` and the columns where rewards look for
    one. Raises `ConfigError` that names the row and what it lacks.
    """
    row = located_row.row
    where = located_row.location
    given = row.get(MESSAGES_COLUMN)
    if given is not None and data.prompt == DataConfig().prompt and not data.answer:
        messages = parse_messages(given, where)
        if data.system and [m.role for m in messages[:1]] != ["system"]:
            messages.insert(0, Message("system", data.system))
        task = DatasetTask(messages, True, MISSING, row, where)
    else:
        task = parse_task(located_row, data)
        answer = look_up_field(row, COMPLETION_COLUMN) if not data.answer else MISSING
        answer = task.answer if answer in (MISSING, None) else answer
        if answer is MISSING or answer is None:
            raise ConfigError(
                f"{where}: there is no answer to learn: none of the columns "
                f"{MESSAGES_COLUMN}, {COMPLETION_COLUMN}, {', '.join(ANSWER_COLUMNS)} is "
                "there; name it with `data.answer`"
            )
        said = (
            parse_messages(answer, where)
            if isinstance(answer, list)
            else [Message("assistant", _format_answer(answer, where))]
        )
        task = task._replace(messages=[*task.messages, *said], is_chat=True)
    _check_conversation(task.messages, where)
    check_columns(task, data)
    return task


def _format_answer(answer: Any, where: str) -> str:
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ConfigError(
            f"{where}: the answer must be a text, a number or chat messages, not {answer!r:.80}"
        )
    return str(answer)


def _check_conversation(messages: list[Message], where: str) -> None:
    """Raise `ConfigError` unless the assistant answers something, with texts: the conversation ends
    with an answer, does not begin with one, no two follow each other, none is empty, and at least
    one is trained on."""
    if not messages or messages[-1].role != "assistant":
        raise ConfigError(f"{where}: the conversation does not end with an answer of the assistant")
    if messages[0].role == "assistant":
        raise ConfigError(
            f"{where}: the conversation begins with an answer of the assistant, which "
            "nothing asks for"
        )
    for before, message in itertools.pairwise(messages):
        if before.role == message.role == "assistant":
            raise ConfigError(f"{where}: two answers of the assistant follow each other: join them")
    for message in messages:
        if message.role == "assistant" and not (message.content.strip() or message.tool_calls):
            raise ConfigError(f"{where}: an answer of the assistant is empty")
    if all(
        isinstance(message, MaskedAnswer) for message in messages if message.role == "assistant"
    ):
        raise ConfigError(f"{where}: no answer of the assistant is to be learnt: leave the row out")
