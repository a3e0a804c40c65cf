"""From a row to a task: which column is the prompt, which the answer, in the forms of TRL, of verl, or as templates say.

What a row has for the chat template is shown to it, or the row is refused: nothing of that is left out in silence.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from r3async.config import ConfigError, DataConfig, did_you_mean
from r3async.config.data import PromptTemplate
from r3async.envs import REASONING_KEYS, Message
from r3async.envs.rows import LocatedRow, Row
from r3async.untrusted import MalformedError, decode_json

ANSWER_COLUMNS = ("reward_model.ground_truth", "answer", "solution", "ground_truth")
"""Where an answer is looked for, unless `data.answer` says."""
UNSUPPORTED_COLUMNS = {
    "chat_template_kwargs": "a row has no variables of its own: set `episode.template_args`, which is for all rows",
    "images": "only text is shown",
    "videos": "only text is shown",
    "audios": "only text is shown",
}
"""Columns that a chat template, or a model, would be given elsewhere; and what to do."""
NOT_SHOWN_OF_A_MESSAGE = {
    "function_call": "write it as one of `tool_calls`",
    "tool_responses": "write each as a message of the role `tool`",
    "tools": "write them into the row's column `tools`",
    "functions": "write them into the row's column `tools`",
    "recipient": "write a call as one of `tool_calls`",
    "channel": "write a thought as `reasoning_content`, and a call as one of `tool_calls`",
}
"""Keys of a message that some chat template would show, and what it is given instead."""
TRAIN_FLAG_KEYS = ("weight", "train", "loss")
"""Of a message: what says that an answer is not to be learnt."""
_FIELD_PATTERN = re.compile(r"\{([^{}\s]+)\}")
MISSING: Any = msgspec.UNSET


class DatasetTask(NamedTuple):
    """`messages`: what is asked. `is_chat`: the row has messages and not a text, and so rewards get messages. `answer`: `MISSING`
    where there is none."""

    messages: list[Message]
    is_chat: bool
    answer: Any
    row: Row
    location: str


class MaskedAnswer(Message, frozen=True):
    """An answer of the assistant that stands in a conversation, and is not to be learnt."""


def look_up_field(row: Mapping[str, Any], name: str) -> Any:
    """The value of a column, or of `a.b` in nested ones; a column whose own name has dots comes first. `MISSING` if none has."""
    if name in row:
        return row[name]
    head, dot, rest = name.partition(".")
    inner = row.get(head, MISSING) if dot else MISSING
    return look_up_field(inner, rest) if isinstance(inner, Mapping) else MISSING


def list_field_names(row: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of everything in a row."""
    out = []
    for key, value in row.items():
        out += [f"{prefix}{key}", *(list_field_names(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [])]
    return out


def fill_template(template: str, row: Mapping[str, Any], where: str) -> str:
    """`template` with each `{name}` replaced by what the row has of that name; `{{` and `}}` stand for braces.

    Raises `ConfigError` for a name that the row has not, or that is neither text nor number.
    """
    out = []
    for part in re.split(r"(\{\{|\}\}|\{[^{}\s]+\})", template):
        if part in ("{{", "}}"):
            out.append(part[0])
        elif _FIELD_PATTERN.fullmatch(part):
            value = _require_field(row, part[1:-1], "data.prompt", where)
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                raise ConfigError(
                    f"{where}: field {part[1:-1]!r} must be a text or a number, not {_abbreviate_repr(value)}"
                )
            out.append(str(value))
        else:
            out.append(part)
    return "".join(out)


def parse_task(located_row: LocatedRow, data: DataConfig) -> DatasetTask:
    """Raises `ConfigError` that names the row and the field."""
    row, where = located_row.row, located_row.location
    asked, chat = _parse_prompt(data.prompt, row, where)
    if data.system:
        if asked[0].role == "system":
            raise ConfigError(f"{where}: the prompt has a system message of its own: leave `data.system` empty")
        asked, chat = [Message("system", data.system), *asked], True
    task = DatasetTask(asked, chat, _find_answer(data.answer, row, where), row, where)
    parse_tools(task)
    return task


def parse_tools(task: DatasetTask) -> list[dict[str, Any]]:
    """What the chat template is given besides the messages: the row's column `tools`, a list or one in JSON. Raises `ConfigError`
    for what are no tools, and for a row with something else that it would have to be given."""
    for name, remedy in UNSUPPORTED_COLUMNS.items():
        if task.row.get(name):
            raise ConfigError(f"{task.location}: its column {name!r} has no effect: {remedy}; leave the column out")
    tools = task.row.get("tools") or []
    if isinstance(tools, str):
        with contextlib.suppress(MalformedError):
            tools = decode_json(tools) or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError(
            f"{task.location}: `tools` must be a list of JSON schemas, or its text, not {_abbreviate_repr(tools)}"
        )
    return tools


def _parse_prompt(prompt: PromptTemplate, row: Row, where: str) -> tuple[list[Message], bool]:
    """The prompt's messages, and whether it was written as messages."""
    if not isinstance(prompt, str):
        return _parse_prompt_messages(
            [{key: fill_template(text, row, where) for key, text in each.items()} for each in prompt], where
        ), True
    if _FIELD_PATTERN.search(prompt):
        text = fill_template(prompt, row, where)
    else:
        value = _require_field(row, prompt, "data.prompt", where)
        if isinstance(value, list):
            return _parse_prompt_messages(value, where), True
        if not isinstance(value, str):
            raise ConfigError(
                f"{where}: field {prompt!r} must be a text or chat messages, not {_abbreviate_repr(value)}"
            )
        text = value
    if not text.strip():
        raise ConfigError(f"{where}: the prompt is empty")
    return [Message("user", text)], False


def _parse_prompt_messages(value: list[Any], where: str) -> list[Message]:
    messages = parse_messages(value, where)
    if not messages:
        raise ConfigError(f"{where}: the prompt has no messages")
    if messages[-1].role == "assistant":
        raise ConfigError(f"{where}: the prompt ends with an answer of the assistant, so nothing is asked")
    return messages


def parse_messages(value: Any, where: str) -> list[Message]:
    """Chat messages of a row. Raises `ConfigError` for what are none, or have what cannot be shown."""
    if not isinstance(value, list):
        raise ConfigError(
            f"{where}: a chat message must have role and content, and stand in a list, not {_abbreviate_repr(value)}"
        )
    return [_parse_message(each, where) for each in value]


def _parse_message(value: Any, where: str) -> Message:
    kept = {k: v for k, v in value.items() if v is not None} if isinstance(value, Mapping) else value
    if isinstance(kept, dict):
        if name := next((name for name in NOT_SHOWN_OF_A_MESSAGE if kept.get(name)), None):
            raise ConfigError(f"{where}: a message has a `{name}`, which is not shown: {NOT_SHOWN_OF_A_MESSAGE[name]}")
        kept["content"] = _join_text_blocks(kept.get("content", "" if kept.get("tool_calls") else None), where)
        thoughts = [kept.pop(name) for name in REASONING_KEYS if kept.get(name)]
        if any(thought != thoughts[0] for thought in thoughts):
            raise ConfigError(f"{where}: a message has different thoughts in {', '.join(REASONING_KEYS)}")
        kept |= {"reasoning_content": thoughts[0]} if thoughts else {}
        if isinstance(calls := kept.get("tool_calls"), list):
            kept["tool_calls"] = [_decode_call_arguments(call) for call in calls]
    try:
        return msgspec.convert(kept, Message if _is_trained(kept, where) else MaskedAnswer)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: a chat message must have role and content, both texts: {error}") from error


def _join_text_blocks(content: Any, where: str) -> Any:
    """The text of content in blocks; else the content as it is."""
    if not isinstance(content, list):
        return content
    texts = [each.get("text") if isinstance(each, Mapping) and each.get("type") == "text" else None for each in content]
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(
            f"{where}: the content of a message must be text, or blocks of text, not {_abbreviate_repr(content)}"
        )
    return "".join(text for text in texts if text)


def _decode_call_arguments(call: Any) -> Any:
    """A call with arguments as an object, which is what templates write best; where they are none, as it is."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if isinstance(function, Mapping) and isinstance(text := function.get("arguments"), str):
        with contextlib.suppress(MalformedError):
            if isinstance(arguments := decode_json(text), dict):
                return {**call, "function": {**function, "arguments": arguments}}
    return call


def _is_trained(message: Any, where: str) -> bool:
    marks = {name: message[name] for name in TRAIN_FLAG_KEYS if name in message} if isinstance(message, Mapping) else {}
    if wrong := [name for name, mark in marks.items() if mark not in (0, 1)]:
        raise ConfigError(
            f"{where}: `{wrong[0]}` = {_abbreviate_repr(marks[wrong[0]])} of a message: an answer is learnt (1) or only shown (0)"
        )
    return all(marks.values())


def _find_answer(name: str, row: Row, where: str) -> Any:
    if name:
        return _require_field(row, name, "data.answer", where)
    return next(
        (value for each in ANSWER_COLUMNS if (value := look_up_field(row, each)) not in (MISSING, None)), MISSING
    )


def _require_field(row: Mapping[str, Any], name: str, setting: str, where: str) -> Any:
    value = look_up_field(row, name)
    if value is MISSING or value is None:
        names = [each for each in list_field_names(row) if look_up_field(row, each) is not None]
        hint = did_you_mean(name, names, f"its fields: {', '.join(names)}.")
        raise ConfigError(f"{where}: no field {name!r}; {hint} Name the field with `{setting}`.")
    return value


def _abbreviate_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}..."
