"""Tool calls in what a policy wrote, as Hermes and Qwen write them, and their results."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from r3async.envs import Message

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


Call = Callable[[str, dict[str, Any]], Awaitable[str]]
"""What a tool of that name says to these arguments."""


async def tool_results(
    text: str,
    tools: Sequence[Mapping[str, Any]],
    call: Call,
    *,
    seconds: float,
    at_once: int = 8,
    characters: int = 8192,
) -> list[Message]:
    """One message for each tool call in an answer, in their order; none if it has none. The calls run at the same time.

    What a tool raises, does not answer in `seconds`, or says beyond `characters` is told to the policy, as are calls beyond
    `at_once`, which are not made.
    """
    _, calls = parse_answer(text, tools)

    async def result(index: int, name: str, arguments: str) -> str:
        if index >= at_once:
            return f"error: not called, an answer may have {at_once} calls"
        try:
            async with asyncio.timeout(seconds):
                said = await call(name, msgspec.json.decode(arguments))
        except TimeoutError:
            return f"error: {name} took longer than {seconds:g} s"
        except Exception as error:
            return f"error: {str(error) or repr(error)}"[:characters]
        cut = len(said) - characters
        return said if cut <= 0 else f"{said[:characters]}\n[{cut} characters left out]"

    functions = [c["function"] for c in calls]
    results = await asyncio.gather(*(result(i, f["name"], f["arguments"]) for i, f in enumerate(functions)))
    return [Message("tool", said, name=f["name"]) for said, f in zip(results, functions, strict=True)]
