"""From a row to a task: which column is the prompt, which the answer, in the forms of TRL, of verl, or as templates say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from r3async.config import ConfigError, DataConfig, did_you_mean
from r3async.config.data import Template
from r3async.envs import Message
from r3async.envs.rows import Found, Row

ANSWERS = ("reward_model.ground_truth", "answer", "solution", "ground_truth")
"""Where an answer is looked for, unless `data.answer` says."""
_FIELD = re.compile(r"\{([^{}\s]+)\}")
MISSING: Any = msgspec.UNSET


class Task(NamedTuple):
    """`messages`: what is asked. `chat`: the row has messages and not a text, and so rewards get messages. `answer`: `MISSING`
    where there is none."""

    messages: list[Message]
    chat: bool
    answer: Any
    row: Row
    where: str


def look_up(row: Mapping[str, Any], name: str) -> Any:
    """The value of a column, or of `a.b` in nested ones; a column whose own name has dots comes first. `MISSING` if none has."""
    if name in row:
        return row[name]
    head, dot, rest = name.partition(".")
    inner = row.get(head, MISSING) if dot else MISSING
    return look_up(inner, rest) if isinstance(inner, Mapping) else MISSING


def names_of(row: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of everything in a row."""
    out = []
    for key, value in row.items():
        out += [f"{prefix}{key}", *(names_of(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [])]
    return out


def fill(template: str, row: Mapping[str, Any], where: str) -> str:
    """`template` with each `{name}` replaced by what the row has of that name; `{{` and `}}` stand for braces.

    Raises `ConfigError` for a name that the row has not, or that is neither text nor number.
    """
    out = []
    for part in re.split(r"(\{\{|\}\}|\{[^{}\s]+\})", template):
        if part in ("{{", "}}"):
            out.append(part[0])
        elif _FIELD.fullmatch(part):
            value = _required(row, part[1:-1], "data.prompt", where)
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                raise ConfigError(f"{where}: field {part[1:-1]!r} must be a text or a number, not {_short(value)}")
            out.append(str(value))
        else:
            out.append(part)
    return "".join(out)


def task_of(found: Found, data: DataConfig) -> Task:
    """Raises `ConfigError` that names the row and the field."""
    row, where = found.row, found.where
    asked, chat = _asked(data.prompt, row, where)
    if data.system:
        if asked[0].role == "system":
            raise ConfigError(f"{where}: the prompt has a system message of its own: leave `data.system` empty")
        asked, chat = [Message("system", data.system), *asked], True
    return Task(asked, chat, _answer(data.answer, row, where), row, where)


def _asked(prompt: Template, row: Row, where: str) -> tuple[list[Message], bool]:
    """The prompt's messages, and whether it was written as messages."""
    if not isinstance(prompt, str):
        return _messages([{key: fill(text, row, where) for key, text in each.items()} for each in prompt], where), True
    if _FIELD.search(prompt):
        text = fill(prompt, row, where)
    else:
        value = _required(row, prompt, "data.prompt", where)
        if isinstance(value, list):
            return _messages(value, where), True
        if not isinstance(value, str):
            raise ConfigError(f"{where}: field {prompt!r} must be a text or chat messages, not {_short(value)}")
        text = value
    if not text.strip():
        raise ConfigError(f"{where}: the prompt is empty")
    return [Message("user", text)], False


def _messages(given: list[Any], where: str) -> list[Message]:
    kept = [{k: v for k, v in each.items() if v is not None} if isinstance(each, Mapping) else each for each in given]
    try:
        messages = msgspec.convert(kept, list[Message])
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: a chat message must have role and content, both texts: {error}") from error
    if not messages:
        raise ConfigError(f"{where}: the prompt has no messages")
    if messages[-1].role == "assistant":
        raise ConfigError(f"{where}: the prompt ends with an answer of the assistant, so nothing is asked")
    return messages


def _answer(name: str, row: Row, where: str) -> Any:
    if name:
        return _required(row, name, "data.answer", where)
    return next((value for each in ANSWERS if (value := look_up(row, each)) not in (MISSING, None)), MISSING)


def _required(row: Mapping[str, Any], name: str, setting: str, where: str) -> Any:
    value = look_up(row, name)
    if value is MISSING or value is None:
        names = [each for each in names_of(row) if look_up(row, each) is not None]
        hint = did_you_mean(name, names, f"its fields: {', '.join(names)}.")
        raise ConfigError(f"{where}: no field {name!r}; {hint} Name the field with `{setting}`.")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}..."
