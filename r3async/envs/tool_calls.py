"""Tool calls in what a policy wrote, as Hermes and Qwen write them, and their results."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from r3async.envs import Message
from r3async.untrusted import MalformedError, decode_json

# Two forms are read: `<tool_call>{"name": …, "arguments": {…}}</tool_call>` as Hermes and Qwen write it, any number of times; and
# an answer that is nothing but that JSON object, or a list of them (`parameters` for `arguments` is taken too).
_CALL_OPEN_TAG, _CALL_CLOSE_TAG = "<tool_call>", "</tool_call>"
_THINK_TAG = re.compile("</?think>")
_FENCED_BLOCK = re.compile(r"```(?:json)?[^\S\n]*\n(.*?)\n?```", re.DOTALL)
ToolCall = tuple[str, dict[str, Any]]
"""Of a tool: its name and its arguments."""


def parse_tool_calls(
    text: str, tools: Sequence[Mapping[str, Any]], *, thinking: bool = False
) -> tuple[str, list[dict[str, Any]]]:
    """Return `content, tool_calls` of an answer, in OpenAI's shape. Thoughts are content, whatever is in them. Where one call
    cannot be read or is of a tool that was not offered, or no `tools` were, the whole text is content. `thinking`: the answer
    begins within a thought, which its prompt opened."""
    thoughts, spoken = split_reasoning(text, thinking=thinking)
    content, calls = _read_calls(spoken, tools)
    if not calls or not {name for name, _ in calls} <= list_tool_names(tools):
        return text, []
    return (thoughts + content).strip(), [_to_openai_call(*call) for call in calls]


def split_reasoning(text: str, *, thinking: bool = False) -> tuple[str, str]:
    """Return the thoughts of an answer, with `<think>` and `</think>`, and what it says beside them.

    A `</think>` that nothing opened ends a thought which the prompt opened; `thinking` says that it did, for an answer that was
    cut before. A tag in the arguments of a call is no thought's.
    """
    thoughts, spoken, begin, at = "", "", 0, 0
    while tag := _THINK_TAG.search(text, at):
        at = tag.end()
        if not thinking and (end := _find_call_end(text, begin, tag.start())):
            at = end
        elif tag[0] == "</think>":
            thoughts += ("" if thinking else spoken) + text[begin:at]
            spoken, begin, thinking = spoken if thinking else "", at, False
        elif not thinking:
            spoken, begin, thinking = spoken + text[begin : tag.start()], tag.start(), True
    return (thoughts + text[begin:], spoken) if thinking else (thoughts, spoken + text[begin:])


def _find_call_end(text: str, begin: int, at: int) -> int:
    """Return where the call ends that `text[at]` is within the arguments of; 0 if it is in none that begins behind `begin`."""
    start = text.rfind(_CALL_OPEN_TAG, begin, at)
    end = text.find(_CALL_CLOSE_TAG, at) if start >= 0 else -1
    if end < 0 or _parse_tagged_call(text[start + len(_CALL_OPEN_TAG) : end]) is None:
        return 0
    return end + len(_CALL_CLOSE_TAG)


def _read_calls(spoken: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[ToolCall]]:
    """Return what is said beside the calls, and the calls; none where one cannot be read, or no `tools` were offered. A call that
    is tagged as one may be of a tool that was not offered."""
    if not tools:
        return spoken, []
    if blocks := list(_find_tagged_blocks(spoken)):
        calls = [
            _parse_tagged_call(spoken[start + len(_CALL_OPEN_TAG) : stop - len(_CALL_CLOSE_TAG)])
            for start, stop in blocks
        ]
        beside = zip([0, *(stop for _, stop in blocks)], [*(start for start, _ in blocks), len(spoken)], strict=True)
        read = [call for call in calls if call is not None]
        return "".join(spoken[a:b] for a, b in beside), read if len(read) == len(calls) else []
    bare = spoken.strip()
    if fenced := _FENCED_BLOCK.fullmatch(bare):
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
    """Yield where each `<tool_call>…</tool_call>` begins and ends. (An expression that looks for both reads the rest of the text
    for every tag that is not closed: seconds, for an answer that is nothing but open tags.)"""
    at = 0
    while (start := text.find(_CALL_OPEN_TAG, at)) >= 0 and (end := text.find(_CALL_CLOSE_TAG, start)) >= 0:
        at = end + len(_CALL_CLOSE_TAG)
        yield start, at


def list_tool_names(tools: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the names of the tools, in OpenAI's shape or bare, that have one."""
    functions = [tool.get("function", tool) for tool in tools]
    names = [function.get("name") if isinstance(function, Mapping) else None for function in functions]
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
    """One message for each tool call in an answer, in their order; none if it has none. The calls run at the same time.

    `call_tool(name, arguments)`: what the tool of that name says. What it raises, does not answer in `seconds`, or says beyond
    `max_characters` is told to the policy, as are calls beyond `max_calls`, which are not made. `thinking`: `Action.thinking`.
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
    return [Message("tool", said, name=name) for said, (name, _) in zip(results, calls, strict=True)]
