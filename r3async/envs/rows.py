"""The user's rows: reading them from files or the Hugging Face hub, checking them, and making prompts and
conversations."""

from __future__ import annotations

import contextlib
import csv
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from r3async.config import ConfigError, DataConfig, did_you_mean
from r3async.config.paths import resolve_user_path
from r3async.config.rollout import PromptTemplate
from r3async.envs import REASONING_KEYS, Message
from r3async.untrusted import MalformedError, decode_json, decode_python_json

Row = dict[str, Any]
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
VALUE_OVERHEAD_BYTES = 64
"""Bytes of memory that a value takes besides its content."""
PARQUET_BATCH_ROWS = 256
MAX_COMPRESSION_RATIO = 100
"""Highest compression ratio of a parquet column that can be text. In a file with a better packed column, rows are made
one by one."""
UNCHECKED_BYTES, MAX_EXPANSION_RATIO = 64 * 2**20, 1000
"""Limits of the memory that the rows of a parquet file or of the hub may take: the former in bytes, or the latter times
the bytes of their source, whichever is more."""
_SUBSET_HINT = "`data.limit` takes the first rows, and `data.eval` a share or a file to evaluate"
INSTALL_HINT = "pip install 'r3async[data]'"


class LocatedRow(NamedTuple):
    """A row and its location: `file`, and the number, from 1, of its `unit` (line or row)."""

    row: Row
    file: str
    unit: str
    number: int

    @property
    def location(self) -> str:
        return f"{self.file}, {self.unit} {self.number}"


def read_rows(data: DataConfig, path: str, split: str) -> list[LocatedRow]:
    """Return all rows of `path`, in order; `path` is a file, a directory of files, or an id on the hub.

    Raises `ConfigError` that says what is missing, or names the line or row that is not valid.
    """
    found = resolve_user_path(path)
    if not found.exists():
        return _load_hub_dataset(data, path, split, found)
    if data.subset and path == data.path:
        raise ConfigError(
            f"`data.subset` = {data.subset!r}: {found} is not on the hub, and has no subsets: leave it out"
        )
    if found.is_dir():
        files = _list_split_files(found, split)
    elif split == DataConfig().split:
        files = [found]
    else:
        raise ConfigError(f"{found} is one file and has no split {split!r}: leave `data.split` out; {_SUBSET_HINT}")
    rows = [each for file in files for each in _read_file(file)]
    if not rows:
        raise ConfigError(f"{found} has no rows")
    return rows


def collect_file_stamps(place: Path) -> list[tuple[str, int, int]]:
    """Return name, modification time and size of the files at `place`; the list differs when one of them has
    changed."""
    files = [place, *sorted(place.iterdir())] if place.is_dir() else [place]
    return [(str(file), (found := file.stat()).st_mtime_ns, found.st_size) for file in files if file.exists()]


def _list_split_files(directory: Path, split: str) -> list[Path]:
    known = sorted(
        file for file in directory.iterdir() if file.suffix in FILE_READERS and not file.name.startswith(".")
    )
    if not known:
        raise ConfigError(f"`data.path`: {directory} has no file that ends in {', '.join(FILE_READERS)}")
    chosen = [file for file in known if file.name.startswith(split)]
    if not chosen and split != DataConfig().split:
        names = ", ".join(file.name for file in known)
        raise ConfigError(f"no file of {directory} begins with the split {split!r}; it has {names}; {_SUBSET_HINT}")
    return chosen or known


def _read_file(file: Path) -> Iterator[LocatedRow]:
    read = FILE_READERS.get(file.suffix)
    if read is None:
        raise ConfigError(f"`data.path`: {file} does not end in one of {', '.join(FILE_READERS)}")
    try:
        for unit, number, row in read(file):
            if not isinstance(row, dict):
                raise ConfigError(
                    f"{file}, {unit} {number}: a row must be an object, such as {{'prompt': ..., 'answer': ...}}"
                )
            yield LocatedRow(row, str(file), unit, number)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error


# -- formats -----------------------------------------------------------------------------------------------------------

NumberedRows = Iterator[tuple[str, int, Any]]
"""Iterator over rows, as unit, number and row."""


def _read_jsonl(file: Path) -> NumberedRows:
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield "line", number, decode_python_json(line)
            except MalformedError as error:
                raise ConfigError(f"{file}, line {number}: not JSON: {error}") from error


def _read_json(file: Path) -> NumberedRows:
    try:
        rows = decode_python_json(file.read_bytes())
    except MalformedError as error:
        hint = "; a file with an object a line must end in .jsonl" if "Extra data" in str(error) else ""
        raise ConfigError(f"{file}: not JSON: {error}{hint}") from error
    if not isinstance(rows, list):
        raise ConfigError(f"{file} must be a list of rows; a file with an object a line must end in .jsonl")
    yield from (("row", number, row) for number, row in enumerate(rows, 1))


def _read_csv(file: Path) -> NumberedRows:
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, strict=True)
        try:
            for row in reader:
                if None in row or None in row.values():
                    columns = len(reader.fieldnames or ())
                    raise ConfigError(
                        f"{file}, line {reader.line_num}: not the {columns} values that the first line names"
                    )
                yield "line", reader.line_num, row
        except csv.Error as error:
            raise ConfigError(f"{file}, line {reader.line_num}: not CSV: {error}") from error


def _read_parquet(file: Path) -> NumberedRows:
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ConfigError(f"{file} needs pyarrow, which is not installed: {INSTALL_HINT}") from error
    number, used, size = 0, 0, file.stat().st_size
    try:
        with ParquetFile(file) as table:
            groups = [table.metadata.row_group(at) for at in range(table.num_row_groups)]
            columns = [group.column(at) for group in groups for at in range(group.num_columns)]
            least = table.metadata.num_rows * VALUE_OVERHEAD_BYTES + sum(group.total_byte_size for group in groups)
            _check_expansion(file, size, least)
            packed = any(
                each.total_uncompressed_size > MAX_COMPRESSION_RATIO * each.total_compressed_size for each in columns
            )
            for batch in table.iter_batches(1 if packed else PARQUET_BATCH_ROWS):
                rows = batch.to_pylist()
                _check_expansion(file, size, used := used + _estimate_memory(rows))
                for row in rows:
                    number += 1
                    yield "row", number, row
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{file} is no parquet file: {str(error).splitlines()[0]}") from error


def _check_expansion(source: Path | str, size: int, used: int) -> None:
    """Raise `ConfigError` for rows that take far more memory than their source has bytes: a few hundred bytes can
    become gigabytes."""
    if used > max(UNCHECKED_BYTES, MAX_EXPANSION_RATIO * size):
        raise ConfigError(
            f"`data.path`: {source} has {size} bytes and its rows take {used} and more, so it holds the same over and over: "
            "write the rows that you mean as .jsonl"
        )


def _estimate_memory(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return VALUE_OVERHEAD_BYTES + sum(map(_estimate_memory, value))
    return VALUE_OVERHEAD_BYTES + (len(value) if isinstance(value, str | bytes) else 0)


FILE_READERS: dict[str, Callable[[Path], NumberedRows]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


# -- the hub -----------------------------------------------------------------------------------------------------------


def _load_hub_dataset(data: DataConfig, path: str, split: str, file: Path) -> list[LocatedRow]:
    if not _HUB_ID.fullmatch(path) or Path(path).suffix in FILE_READERS:
        raise ConfigError(f"`data.path` = {path!r}: there is no file {file}")
    if "/" not in path:
        near = did_you_mean(path, [each.name for each in file.parent.glob("*")], "and an id on the hub is NAME/NAME")
        raise ConfigError(f"`data.path` = {path!r}: there is no file {file}; {near}")
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"`data.path` = {path!r}: there is no file {file}, and to take it from the Hugging Face hub needs `datasets`, which "
            f"is not installed: {INSTALL_HINT}"
        ) from error
    found, used = [], 0
    try:
        rows = datasets.load_dataset(path, data.subset or None, split=split)
        for number, row in enumerate(rows, 1):
            _check_expansion(path, rows.download_size or 0, used := used + _estimate_memory(row))
            found.append(LocatedRow(dict(row), f"{path} ({split})", "row", number))
    except ConfigError:
        raise
    except Exception as error:  # the hub, the network and the dataset's files may raise anything
        line = next(iter(str(error).splitlines()), type(error).__name__)
        name = path.split("/")[1]
        elsewhere = (
            f". Where there is a network: hf download {path} --repo-type dataset --local-dir {name}, and set `data.path` to the "
            f"folder of its files here, such as {name}/data"
        )
        raise ConfigError(
            f"`data.path` = {path!r} cannot be loaded from the Hugging Face hub: {line}"
            + elsewhere * isinstance(error, ConnectionError)
        ) from error
    if not found:
        raise ConfigError(f"{path} ({split}) has no rows")
    return found


# Making tasks from rows: which column is the prompt and which the answer, in the forms of TRL and verl or by templates.
#
# Everything that a row has for the chat template is passed to it, or the row is refused: nothing is dropped silently.


ANSWER_COLUMNS = ("reward_model.ground_truth", "answer", "solution", "ground_truth")
"""Columns that are searched for an answer, in this order, unless `data.answer` names one."""
UNSUPPORTED_COLUMNS = {
    "chat_template_kwargs": "a row has no variables of its own: set `episode.template_args`, which is for all rows",
    "images": "only text is shown",
    "videos": "only text is shown",
    "audios": "only text is shown",
}
"""Columns that a chat template or a model would use elsewhere, and what to do instead."""
NOT_SHOWN_OF_A_MESSAGE = {
    "function_call": "write it as one of `tool_calls`",
    "tool_responses": "write each as a message of the role `tool`",
    "tools": "write them into the row's column `tools`",
    "functions": "write them into the row's column `tools`",
    "recipient": "write a call as one of `tool_calls`",
    "channel": "write a thought as `reasoning_content`, and a call as one of `tool_calls`",
}
"""Keys of a message that some chat templates would show, and what to write instead."""
TRAIN_FLAG_KEYS = ("weight", "train", "loss")
"""Keys of a message that say whether an answer is trained on."""
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
    """Return the value of a column, or of `a.b` in nested ones; `MISSING` if there is none. A column whose own name
    contains dots comes first."""
    if name in row:
        return row[name]
    head, dot, rest = name.partition(".")
    inner = row.get(head, MISSING) if dot else MISSING
    return look_up_field(inner, rest) if isinstance(inner, Mapping) else MISSING


def list_field_names(row: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted names of all fields of a row."""
    out = []
    for key, value in row.items():
        out += [f"{prefix}{key}", *(list_field_names(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [])]
    return out


def fill_template(template: str, row: Mapping[str, Any], where: str) -> str:
    """Return `template` with each `{name}` replaced by the row's value of that name; `{{` and `}}` stand for braces.

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
                    f"{where}: field {part[1:-1]!r} must be a text or a number, not {_abbreviate_repr(value)}"
                )
            out.append(str(value))
        else:
            out.append(part)
    return "".join(out)


def parse_task(located_row: LocatedRow, data: DataConfig) -> DatasetTask:
    """Return the task of a row. Raises `ConfigError` that names the row and the field."""
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
    """Return the tools that the chat template gets besides the messages: the row's column `tools`, a list or a list in
    JSON.

    Raises `ConfigError` if they are not tools, and for a row with other columns that the chat template would need.
    """
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
    """Return the prompt's messages, and True if it was written as messages."""
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
    """Return the chat messages of a row. Raises `ConfigError` if they are not messages, or contain something that
    cannot be shown."""
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
    """Return the joined text of content in blocks, or any other content unchanged."""
    if not isinstance(content, list):
        return content
    texts = [each.get("text") if isinstance(each, Mapping) and each.get("type") == "text" else None for each in content]
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(
            f"{where}: the content of a message must be text, or blocks of text, not {_abbreviate_repr(content)}"
        )
    return "".join(text for text in texts if text)


def _decode_call_arguments(call: Any) -> Any:
    """Return a call with its arguments as an object, which templates write best; without such arguments, the call
    unchanged."""
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


# Making whole conversations with answers from rows, for supervised training.


MESSAGES_COLUMN, COMPLETION_COLUMN = "messages", "completion"


def parse_conversation(located_row: LocatedRow, data: DataConfig) -> DatasetTask:
    """Return a row as a task whose `messages` are the whole conversation; the assistant's messages in it are trained
    on.

    The messages are those of the column `messages`; or else the prompt, as `data.prompt` says, and the answer:
    `data.answer`, or the first of `completion` and the columns where rewards look for one. Raises `ConfigError` that
    names the row and what it lacks.
    """
    row, where = located_row.row, located_row.location
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
                f"{where}: there is no answer to learn: none of the columns {MESSAGES_COLUMN}, {COMPLETION_COLUMN}, "
                f"{', '.join(ANSWER_COLUMNS)} is there; name it with `data.answer`"
            )
        said = (
            parse_messages(answer, where)
            if isinstance(answer, list)
            else [Message("assistant", _format_answer(answer, where))]
        )
        task = task._replace(messages=[*task.messages, *said], is_chat=True)
    _check_conversation(task.messages, where)
    parse_tools(task)
    return task


def _format_answer(answer: Any, where: str) -> str:
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ConfigError(f"{where}: the answer must be a text, a number or chat messages, not {answer!r:.80}")
    return str(answer)


def _check_conversation(messages: list[Message], where: str) -> None:
    """Raise `ConfigError` unless the assistant answers something, with texts: the conversation ends with an answer,
    does not begin with one, no two follow each other, none is empty, and at least one is trained on."""
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
    if all(isinstance(message, MaskedAnswer) for message in messages if message.role == "assistant"):
        raise ConfigError(f"{where}: no answer of the assistant is to be learnt: leave the row out")
