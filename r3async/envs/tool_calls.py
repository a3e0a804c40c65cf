"""Tool calls in what a policy wrote, as Hermes and Qwen write them."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

# Two forms are read: `<tool_call>{"name": …, "arguments": {…}}</tool_call>` as Hermes and Qwen write it, any number of times; and
# an answer that is nothing but that JSON object, or a list of them (`parameters` for `arguments` is taken too).
_TAGGED = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)\n?```", re.DOTALL)


def parse_answer(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """`content, tool_calls` of an answer, in OpenAI's shape. Where one call cannot be read, or no `tools` were offered, the
    whole text is content. A call of a tool that was not offered is a call if it is tagged as one."""
    if not tools:
        return text, []
    if blocks := _TAGGED.findall(text):
        calls = [_read_call(block) for block in blocks]
        if all(call is not None for call in calls):
            return _TAGGED.sub("", text).strip(), [_as_openai(*call) for call in calls if call is not None]
        return text, []
    bare = text.strip()
    if fenced := _FENCED.fullmatch(bare):
        bare = fenced[1]
    offered = {tool.get("function", tool).get("name") for tool in tools}
    try:
        value = msgspec.json.decode(bare)
    except msgspec.DecodeError:
        return text, []
    read = [_call_of(item) for item in (value if isinstance(value, list) else [value])]
    calls_of_offered = [call for call in read if call is not None and call[0] in offered]
    if not read or len(calls_of_offered) < len(read):
        return text, []
    return "", [_as_openai(*call) for call in calls_of_offered]


def _read_call(text: str) -> tuple[str, dict[str, Any]] | None:
    try:
        return _call_of(msgspec.json.decode(text.strip()))
    except msgspec.DecodeError:
        return None


def _call_of(value: Any) -> tuple[str, dict[str, Any]] | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return (value["name"], arguments) if isinstance(arguments, dict) else None


def _as_openai(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": msgspec.json.encode(arguments).decode()},
    }
