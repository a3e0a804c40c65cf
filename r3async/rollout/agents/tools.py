"""Tool calls in what a policy writes: found in its text, and found again in what an agent sends back.

Two forms are read: `<tool_call>{"name": …, "arguments": {…}}</tool_call>` as Hermes and Qwen write it, any number of times; and
an answer that is nothing but that JSON object, or a list of them (`parameters` for `arguments` is taken too).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from r3async.envs.base import Message

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


class SpokenMessages:
    """Remembers for every answer how it was handed out, so that the message that comes back is given its own words again."""

    def __init__(self) -> None:
        self._text: dict[Any, str] = {}

    def add(self, text: str, message: Message) -> None:
        """The policy said `text`; the agent was given `message`."""
        self._text[_key(message, ids=True)] = text
        self._text[_key(message, ids=False)] = text

    def restored(self, message: Message) -> Message:
        """`message` in the policy's own words, if it is an answer of ours unchanged; else as it is.

        Of several answers that read the same, the one whose calls have these ids counts, then the newest.
        """
        if message.role != "assistant":
            return message
        for ids in (True, False):
            text = self._text.get(_key(message, ids))
            if text is not None:
                return Message("assistant", text)
        return message


def _key(message: Message, ids: bool) -> Any:
    calls = tuple(
        (
            call.get("id") if ids else None,
            call["function"].get("name"),
            msgspec.json.encode(call["function"].get("arguments"), order="sorted"),
        )
        for call in message.tool_calls
    )
    # White space around the words beside a call was not handed out; frameworks drop such content altogether, or send "".
    return (message.content.strip() if calls else message.content, calls)
