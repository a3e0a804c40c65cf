"""Tasks made from rows, in the forms of TRL and verl or by templates: prompts and answers.

Everything that a row has for the chat template is passed to it, or the row is refused: nothing is
dropped silently.
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
from r3async.envs.arrow_rows import Row
from r3async.envs.rows import LocatedRow
from r3async.untrusted import MalformedError, decode_json

ANSWER_COLUMNS = ("reward_model.ground_truth", "answer", "solution", "ground_truth")
"""Columns that are searched for an answer, in this order, unless `data.answer` names one."""
_TOOLS_REMEDY = "write its tools into the column `tools`"
_SYSTEM_REMEDY = (
    "put it into the messages, or show it with `data.prompt`, a list of messages such as "
    '{ role = "system", content = "{NAME}" }'
)
_VARIABLE_REMEDY = (
    "a row has no variables of its own: set `episode.template_args`, which is for all rows"
)
_TOKENS_REMEDY = "rows are texts, and the chat template decides what is learnt of them"
_TEXT_REMEDY = "only text is shown"
UNSUPPORTED_COLUMNS = {
    **dict.fromkeys(("tool_defs", "tool_definitions", "tool_schemas", "functions"), _TOOLS_REMEDY),
    **dict.fromkeys(("system", "system_prompt", "system_message"), _SYSTEM_REMEDY),
    "documents": "put their texts into the messages, or show them with `data.prompt`",
    "history": "put its turns into the messages",
    **dict.fromkeys(
        ("chat_template_kwargs", "enable_thinking", "reasoning_effort", "builtin_tools"),
        _VARIABLE_REMEDY,
    ),
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), _TEXT_REMEDY),
    **dict.fromkeys(
        ("input_ids", "loss_mask", "completion_mask", "assistant_mask", "assistant_masks"),
        _TOKENS_REMEDY,
    ),
    **dict.fromkeys(("loss_weight", "sample_weight"), "every answer has the weight 1"),
}
"""Columns by which other trainers change what is shown or learnt, and what to do instead. They are
refused unless `data.prompt` or `data.answer` reads them."""
NOT_SHOWN_OF_A_MESSAGE = {
    "function_call": "write it as one of `tool_calls`",
    "tool_responses": "write each as a message of the role `tool`",
    "tools": "write them into the row's column `tools`",
    "functions": "write them into the row's column `tools`",
    "recipient": "write a call as one of `tool_calls`",
    "channel": "write a thought as `reasoning_content`, and a call as one of `tool_calls`",
    "from": "write it as `role`, and its `value` as `content`",
}
"""Keys of a message that some chat templates would show, and what to write instead."""
TRAIN_FLAG_KEYS = ("weight", "train", "training", "trainable", "loss", "loss_mask")
"""Keys of a message that say whether an answer is trained on."""
MASK_FLAG_KEY = "masked"
"""Key of a message that says the opposite."""
NEUTRAL_MESSAGE_KEYS = frozenset(
    """
    country created created_at date hash hashed_ip header id index lang language message_id meta metadata model
    model_name openai_id parent_id rank redacted score source state status timestamp token_count toxic turn
    turn_identifier turn_index user_id uuid
    """.split()  # noqa: SIM905
)
"""Keys of a message that record where it is from: no trainer shows or learns them."""
_FIELD_PATTERN = re.compile(r"\{([^{}\s]+)\}")
MISSING: Any = msgspec.UNSET


class DatasetTask(NamedTuple):
    """A task that was made from a row.

    Attributes:
        messages: The prompt.
        is_chat: True if the row has messages and not a text; rewards then get messages.
        answer: The reference answer; `MISSING` if there is none.
    """

    messages: list[Message]
    is_chat: bool
    answer: Any
    row: Row
    location: str


class MaskedAnswer(Message, frozen=True):
    """An assistant answer in a conversation that is not trained on."""


def look_up_field(row: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column, or of `a.b` in nested ones; `MISSING` if there is none. A
    column whose own name contains dots comes first."""
    if name in row:
        return row[name]
    head, dot, rest = name.partition(".")
    inner = row.get(head, MISSING) if dot else MISSING
    return look_up_field(inner, rest) if isinstance(inner, Mapping) else MISSING


def list_field_names(row: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted names of all fields of a row."""
    out = []
    for key, value in row.items():
        out += [
            f"{prefix}{key}",
            *(list_field_names(value, f"{prefix}{key}.") if isinstance(value, Mapping) else []),
        ]
    return out


def fill_template(template: str, row: Mapping[str, Any], where: str) -> str:
    """Return `template` with each `{name}` replaced by the row's value of that name; `{{` and `}}`
    stand for braces.

    Raises `ConfigError` for a name that the row lacks, or whose value is neither text nor number.
    """
    out = []
    for part in re.split(r"(\{\{|\}\}|\{[^{}\s]+\})", template):
        if part in ("{{", "}}"):
            out.append(part[0])
        elif _FIELD_PATTERN.fullmatch(part):
            value = _require_field(row, part[1:-1], "data.prompt", where)
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                raise ConfigError(
                    f"{where}: field {part[1:-1]!r} must be a text or a number, not "
                    f"{_abbreviate_repr(value)}"
                )
            out.append(str(value))
        else:
            out.append(part)
    return "".join(out)


def parse_task(located_row: LocatedRow, data: DataConfig) -> DatasetTask:
    """Return the task of a row. Raises `ConfigError` that names the row and the field."""
    row = located_row.row
    where = located_row.location
    asked, chat = _parse_prompt(data.prompt, row, where)
    if data.system:
        if asked[0].role == "system":
            raise ConfigError(
                f"{where}: the prompt has a system message of its own: leave `data.system` empty"
            )
        asked = [Message("system", data.system), *asked]
        chat = True
    task = DatasetTask(asked, chat, _find_answer(data.answer, row, where), row, where)
    check_columns(task, data)
    return task


def check_columns(task: DatasetTask, data: DataConfig) -> None:
    """Raise `ConfigError` for tools that are none, and for a column that would change what is shown
    or learnt elsewhere, and has no effect here."""
    parse_tools(task)
    read_columns = _list_read_columns(data)
    for name, remedy in UNSUPPORTED_COLUMNS.items():
        if _has_content(task.row.get(name)) and name not in read_columns:
            raise ConfigError(
                f"{task.location}: its column {name!r} has no effect: "
                f"{remedy.replace('NAME', name)}; or leave the column out"
            )
    if data.prompt == "instruction" and _has_content(task.row.get("input")):
        raise ConfigError(
            f"{task.location}: its column 'input' is not shown: set `data.prompt` to a template "
            "such as '{instruction} {input}'"
        )


def _has_content(value: Any) -> bool:
    return value not in (None, "", [], {})


def _list_read_columns(data: DataConfig) -> set[str]:
    """Return the columns that the settings name."""
    texts = (
        [data.prompt]
        if isinstance(data.prompt, str)
        else [text for each in data.prompt for text in each.values()]
    )
    names = [
        data.answer,
        *texts,
        *(name for text in texts for name in _FIELD_PATTERN.findall(text)),
    ]
    return {column for name in names for column in (name, name.partition(".")[0])}


def parse_tools(task: DatasetTask) -> list[dict[str, Any]]:
    """Return the tools that the chat template gets besides the messages: the row's column `tools`,
    a list or a list in JSON. Raises `ConfigError` if they are not tools."""
    tools = task.row.get("tools") or []
    if isinstance(tools, str):
        with contextlib.suppress(MalformedError):
            tools = decode_json(tools) or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError(
            f"{task.location}: `tools` must be a list of JSON schemas, or its text, not "
            f"{_abbreviate_repr(tools)}"
        )
    return tools


def _parse_prompt(prompt: PromptTemplate, row: Row, where: str) -> tuple[list[Message], bool]:
    """Return the prompt's messages, and True if it was written as messages."""
    if not isinstance(prompt, str):
        return _parse_prompt_messages(
            [
                {key: fill_template(text, row, where) for key, text in each.items()}
                for each in prompt
            ],
            where,
        ), True
    if _FIELD_PATTERN.search(prompt):
        text = fill_template(prompt, row, where)
    else:
        value = _require_field(row, prompt, "data.prompt", where)
        if isinstance(value, list):
            return _parse_prompt_messages(value, where), True
        if not isinstance(value, str):
            raise ConfigError(
                f"{where}: field {prompt!r} must be a text or chat messages, not "
                f"{_abbreviate_repr(value)}"
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
        raise ConfigError(
            f"{where}: the prompt ends with an answer of the assistant, so nothing is asked"
        )
    return messages


def parse_messages(value: Any, where: str) -> list[Message]:
    """Return the chat messages of a row. Raises `ConfigError` if they are not messages, or contain
    something that cannot be shown."""
    if not isinstance(value, list):
        raise ConfigError(
            f"{where}: a chat message must have role and content, and stand in a list, not "
            f"{_abbreviate_repr(value)}"
        )
    return [_parse_message(each, where) for each in value]


def _parse_message(value: Any, where: str) -> Message:
    kept = (
        {k: v for k, v in value.items() if v is not None} if isinstance(value, Mapping) else value
    )
    is_trained = True
    if isinstance(kept, dict):
        is_trained = _pop_train_flags(kept, where)
        kept = {key: inner for key, inner in kept.items() if key not in NEUTRAL_MESSAGE_KEYS}
        _refuse_unknown_keys(kept, where)
        kept["content"] = _join_text_blocks(
            kept.get("content", "" if kept.get("tool_calls") else None), where
        )
        thoughts = [kept.pop(name) for name in REASONING_KEYS if kept.get(name)]
        if any(thought != thoughts[0] for thought in thoughts):
            raise ConfigError(
                f"{where}: a message has different thoughts in {', '.join(REASONING_KEYS)}"
            )
        kept |= {"reasoning_content": thoughts[0]} if thoughts else {}
        calls = kept.get("tool_calls")
        if isinstance(calls, list):
            kept["tool_calls"] = [_decode_call_arguments(call) for call in calls]
    try:
        return msgspec.convert(kept, Message if is_trained else MaskedAnswer)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{where}: a chat message must have role and content, both texts: {error}"
        ) from error


def _refuse_unknown_keys(message: Mapping[str, Any], where: str) -> None:
    known = {*Message.__struct_fields__, *REASONING_KEYS}
    name = next(
        (name for name in message if name not in known and _has_content(message[name])), None
    )
    if name in NOT_SHOWN_OF_A_MESSAGE:
        raise ConfigError(
            f"{where}: a message has a `{name}`, which is not shown: {NOT_SHOWN_OF_A_MESSAGE[name]}"
        )
    if name is not None:
        raise ConfigError(
            f"{where}: a message has a `{name}`, which is neither shown nor decides what is learnt "
            f"({', '.join((*TRAIN_FLAG_KEYS, MASK_FLAG_KEY))} do): leave it out"
        )


def _join_text_blocks(content: Any, where: str) -> Any:
    """Return the joined text of content in blocks, or any other content unchanged."""
    if not isinstance(content, list):
        return content
    texts = [
        each.get("text") if isinstance(each, Mapping) and each.get("type") == "text" else None
        for each in content
    ]
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(
            f"{where}: the content of a message must be text, or blocks of text, not "
            f"{_abbreviate_repr(content)}"
        )
    return "".join(text for text in texts if text)


def _decode_call_arguments(call: Any) -> Any:
    """Return a call with its arguments as an object, which templates write best; without such
    arguments, the call unchanged."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if isinstance(function, Mapping):
        text = function.get("arguments")
        if isinstance(text, str):
            with contextlib.suppress(MalformedError):
                arguments = decode_json(text)
                if isinstance(arguments, dict):
                    return {**call, "function": {**function, "arguments": arguments}}
    return call


def _pop_train_flags(message: dict[str, Any], where: str) -> bool:
    """Remove the keys of a message that say whether it is learnt, and return whether an answer
    with them is. Raises `ConfigError` for another value than 0 or 1, and for a message to be
    learnt that is no answer."""
    names = [name for name in (*TRAIN_FLAG_KEYS, MASK_FLAG_KEY) if name in message]
    marks = {name: message.pop(name) for name in names}
    wrong = [name for name, mark in marks.items() if mark not in (0, 1)]
    if wrong:
        raise ConfigError(
            f"{where}: `{wrong[0]}` = {_abbreviate_repr(marks[wrong[0]])} of a message: an answer "
            "is learnt (1) or only shown (0)"
        )
    learnt = [bool(mark) != (name == MASK_FLAG_KEY) for name, mark in marks.items()]
    if message.get("role") != "assistant" and any(learnt):
        raise ConfigError(
            f"{where}: `{names[0]}` of a message of the role {message.get('role')!r}: only answers "
            "of the assistant are learnt; leave it out"
        )
    return all(learnt)


def _find_answer(name: str, row: Row, where: str) -> Any:
    if name:
        return _require_field(row, name, "data.answer", where)
    return next(
        (
            value
            for each in ANSWER_COLUMNS
            if (value := look_up_field(row, each)) not in (MISSING, None)
        ),
        MISSING,
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
