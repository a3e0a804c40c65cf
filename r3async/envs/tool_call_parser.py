"""Tool calls in a policy's answer, as Hermes and Qwen write them: parsing, and running them."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from r3async.envs import Message
from r3async.untrusted import MalformedError, decode_json

# Two forms are read: `<tool_call>{"name": …, "arguments": {…}}</tool_call>` as Hermes and Qwen
# write it, any number of times; and an answer that is only that JSON object, or a list of them
# (`parameters` is accepted for `arguments`).
_CALL_OPEN_TAG = "<tool_call>"
_CALL_CLOSE_TAG = "</tool_call>"
_JSON_TEXT = re.compile(r'(?:[^"<\\]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)
"""Text that may be JSON, up to the first `<` or backslash that is in no string."""
_THINK_TAG = re.compile("</?think>")
_FENCED_BLOCK = re.compile(r"```(?:json)?[^\S\n]*\n(.*?)\n?```", re.DOTALL)
ToolCall = tuple[str, dict[str, Any]]
"""Tool call: the name of the tool and its arguments."""


def parse_tool_calls(
    text: str, tools: Sequence[Mapping[str, Any]], *, thinking: bool = False
) -> tuple[str, list[dict[str, Any]]]:
    """Return `content, tool_calls` of an answer, in OpenAI's shape.

    Reasoning is part of the content, whatever it contains. The whole text is content if any call
    cannot be parsed or names a tool that was not offered, or if there are no `tools`. With
    `thinking`, the answer begins inside reasoning that its prompt opened.
    """
    thoughts, spoken = split_reasoning(text, thinking=thinking)
    content, calls = _read_calls(spoken, tools)
    if not calls or not {name for name, _ in calls} <= list_tool_names(tools):
        return text, []
    return (thoughts + content).strip(), [_to_openai_call(*call) for call in calls]


def split_reasoning(text: str, *, thinking: bool = False) -> tuple[str, str]:
    """Return the reasoning of an answer, with `<think>` and `</think>`, and the rest of the text.

    A `</think>` that nothing opened ends reasoning that the prompt opened; `thinking` says that the
    prompt did so, for an answer that was cut before its `</think>`. A tag in the arguments of a
    call does not count. Time is linear in the length of the answer.
    """
    thoughts: list[str] = []
    spoken: list[str] = []
    calls = _CallSearch(text)
    begin = at = 0
    while tag := _THINK_TAG.search(text, at):
        at = tag.end()
        if not thinking and (end := calls.find_end(begin, tag.start())):
            at = end
        elif tag[0] == "</think>":
            if not thinking:
                thoughts += spoken
                spoken = []
            thoughts.append(text[begin:at])
            begin = at
            thinking = False
        elif not thinking:
            spoken.append(text[begin : tag.start()])
            begin = tag.start()
            thinking = True
    (thoughts if thinking else spoken).append(text[begin:])
    return "".join(thoughts), "".join(spoken)


class _CallSearch:
    """A search for the calls around places in a text, which must be asked for in order.

    Each tag is found once, and the text behind each opening tag is read once, up to the first `<`
    in no string. That may be behind later opening tags only if they are in strings. Of two tags of
    which one is in a string of the other, only one can be so again in a third. So all searches
    together take time that is linear in the text's length.
    """

    def __init__(self, text: str):
        self._text = text
        self._start = -1
        self._next_start = text.find(_CALL_OPEN_TAG)
        """The last opening tag before the place, and the first one behind it; -1
        if there is none."""
        self._end = 0
        """The first closing tag behind the place; -1 if there is none."""
        self._call_end = -1
        """The closing tag of the call that begins at `_start`; -1 if none begins there."""

    def find_end(self, begin: int, at: int) -> int:
        """Return the end of the call whose arguments contain `text[at]`; 0 if no call that begins
        behind `begin` does."""
        while 0 <= self._next_start <= at - len(_CALL_OPEN_TAG):
            self._start = self._next_start
            self._next_start = self._text.find(_CALL_OPEN_TAG, self._start + len(_CALL_OPEN_TAG))
            self._call_end = -2
        if 0 <= self._end < at:
            self._end = self._text.find(_CALL_CLOSE_TAG, at)
        if self._start < begin or self._end < 0:
            return 0
        if self._call_end == -2:
            self._call_end = self._read_call(self._start + len(_CALL_OPEN_TAG))
        return self._end + len(_CALL_CLOSE_TAG) if self._end == self._call_end else 0

    def _read_call(self, start: int) -> int:
        """Return the place of the closing tag behind the call that begins at `start`;
        -1 if none does."""
        end = _JSON_TEXT.match(self._text, start).end()  # type: ignore[union-attr]
        is_closed = self._text.startswith(_CALL_CLOSE_TAG, end)
        return end if is_closed and _parse_tagged_call(self._text[start:end]) is not None else -1


def _read_calls(spoken: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[ToolCall]]:
    """Return the text beside the calls, and the calls; no calls if one cannot be parsed, or if
    there are no `tools`. A call in tags may name a tool that was not offered."""
    if not tools:
        return spoken, []
    blocks = list(_find_tagged_blocks(spoken))
    if blocks:
        calls = [
            _parse_tagged_call(spoken[start + len(_CALL_OPEN_TAG) : stop - len(_CALL_CLOSE_TAG)])
            for start, stop in blocks
        ]
        beside = zip(
            [0, *(stop for _, stop in blocks)],
            [*(start for start, _ in blocks), len(spoken)],
            strict=True,
        )
        read = [call for call in calls if call is not None]
        return "".join(spoken[a:b] for a, b in beside), read if len(read) == len(calls) else []
    bare = spoken.strip()
    fenced = _FENCED_BLOCK.fullmatch(bare)
    if fenced:
        bare = fenced[1]
    try:
        value = decode_json(bare)
    except MalformedError:
        return spoken, []
    found = [_parse_call(item) for item in (value if isinstance(value, list) else [value])]
    offered = list_tool_names(tools)
    read = [call for call in found if call is not None and call[0] in offered]
    return "", read if len(read) == len(found) else []


def _find_tagged_blocks(text: str) -> Iterator[tuple[int, int]]:
    """Yield the begin and the end of each `<tool_call>…</tool_call>`. A regular expression for both
    tags would read the rest of the text for every unclosed tag, which takes seconds for an answer
    of open tags alone."""
    at = 0
    while (start := text.find(_CALL_OPEN_TAG, at)) >= 0 and (
        end := text.find(_CALL_CLOSE_TAG, start)
    ) >= 0:
        at = end + len(_CALL_CLOSE_TAG)
        yield start, at


def list_tool_names(tools: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the names of the tools, in OpenAI's shape or bare, that have one."""
    functions = [tool.get("function", tool) for tool in tools]
    names = [
        function.get("name") if isinstance(function, Mapping) else None for function in functions
    ]
    return {name for name in names if isinstance(name, str)}


def _parse_tagged_call(text: str) -> ToolCall | None:
    try:
        return _parse_call(decode_json(text.strip()))
    except MalformedError:
        return None


def _parse_call(value: Any) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return (value["name"], arguments) if isinstance(arguments, dict) else None


def _to_openai_call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": msgspec.json.encode(arguments).decode()},
    }


async def run_tool_calls(
    text: str,
    tools: Sequence[Mapping[str, Any]],
    call_tool: Callable[[str, dict[str, Any]], Awaitable[str]],
    *,
    seconds: float,
    max_calls: int = 8,
    max_characters: int = 8192,
    thinking: bool = False,
) -> list[Message]:
    """Run the tool calls in an answer at the same time. Returns one message for each call, in
    order; none if there are no calls.

    Errors, time-outs, and output that is cut off are reported to the policy, as are calls beyond
    `max_calls`, which are not made.

    Args:
        call_tool: Function of name and arguments that returns the tool's text.
        seconds: Time limit of each call.
        max_characters: Characters of a tool's text that the policy gets.
        thinking: See `Action.thinking`.
    """
    _, calls = _read_calls(split_reasoning(text, thinking=thinking)[1], tools)

    async def run_one_call(index: int, name: str, arguments: dict[str, Any]) -> str:
        if index >= max_calls:
            return f"error: not called, an answer may have {max_calls} calls"
        try:
            async with asyncio.timeout(seconds):
                said = await call_tool(name, arguments)
        except TimeoutError:
            return f"error: {name} took longer than {seconds:g} s"
        except Exception as error:
            return f"error: {str(error) or repr(error)}"[:max_characters]
        cut = len(said) - max_characters
        return said if cut <= 0 else f"{said[:max_characters]}\n[{cut} characters left out]"

    results = await asyncio.gather(*(run_one_call(i, *each) for i, each in enumerate(calls)))
    return [
        Message("tool", said, name=name) for said, (name, _) in zip(results, calls, strict=True)
    ]
