"""`/v1/messages` of Anthropic's API: blocks instead of messages of tools, and errors of its own form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from r3async.config import EpisodeConfig
from r3async.rollout.agents.protocol import (
    Answer,
    Asked,
    Edge,
    Refused,
    Remembered,
    chat_call,
    chat_tool,
    joined_text,
    offered,
    read_fields,
    stop_strings,
)
from r3async.rollout.agents.rendering import with_effort
from r3async.untrusted import decode_object


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    """What is honoured of `output_config`."""

    effort: str | None = None


class CountRequest(msgspec.Struct):
    """What is honoured of `/v1/messages/count_tokens`."""

    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """What is honoured of `/v1/messages`."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "thinking": ({"type": "disabled"},),
    "mcp_servers": ([],),
    "container": (),
}
"""Parameters that cannot be granted, and the values with which they ask for nothing."""

_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(refused: Refused) -> dict[str, Any]:
    """The body of an error in Anthropic's form, which has no field for a code: it stands before the message."""
    other = "api_error" if refused.status >= 500 else "invalid_request_error"
    message = f"{refused.code}: {refused}" if refused.code else str(refused)
    return {"type": "error", "error": {"type": _ERRORS.get(refused.status, other), "message": message}}


def read_anthropic(body: Any, settings: EpisodeConfig, remembered: Remembered) -> Asked:
    asked: MessagesRequest = read_fields(MessagesRequest, body, settings, _NEUTRAL)
    read = _read(asked)
    if read.messages[-1]["role"] == "assistant":
        raise Refused(
            "the last message is the assistant's: an answer that was begun cannot be continued", param="messages"
        )
    read.limit, read.stream = asked.max_tokens, bool(asked.stream)
    read.stop = stop_strings(asked.stop_sequences, "stop_sequences")
    return read


def read_count(body: Any, settings: EpisodeConfig) -> Asked:
    """What is to be counted."""
    return _read(read_fields(CountRequest, body, settings, {}))


def _read(asked: CountRequest) -> Asked:
    choice = asked.tool_choice or {"type": "auto"}
    kind = choice.get("type")
    tools = [_tool(i, tool) for i, tool in enumerate(asked.tools or [])]
    messages: list[dict[str, Any]] = []
    if asked.system:
        messages.append({"role": "system", "content": joined_text(asked.system, ("text",), "system")})
    for i, message in enumerate(asked.messages):
        messages += _messages(f"messages[{i}]", message)
    if not messages:
        raise Refused("messages is empty", param="messages")
    return Asked(
        messages,
        offered(tools, kind if kind in ("auto", "none") else choice),
        template_args=with_effort({}, asked.output_config.effort if asked.output_config else None),
        one_call=bool(choice.get("disable_parallel_tool_use")),
    )


def _tool(index: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom") or not isinstance(tool.get("name"), str):
        raise Refused(
            f"tools[{index}] has type {tool.get('type')!r}: only tools with a name, which the agent runs itself, are supported",
            param="tools",
        )
    return chat_tool(tool["name"], tool.get("description"), tool.get("input_schema"))


def _messages(where: str, message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Results of tools are messages of their own, and what is said between them another."""
    role, blocks = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise Refused(f"{where} has role {role!r}", param="messages")
    if isinstance(blocks, str):
        yield {"role": role, "content": blocks}
        return
    if not isinstance(blocks, list):
        raise Refused(f"{where}.content must be text or a list of blocks", param="messages")
    calls: list[dict[str, Any]] = []
    texts: list[str] = []
    for j, block in enumerate(blocks):
        at = f"{where}.content[{j}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "text":
            texts.append(joined_text([block], ("text",), at))
        elif kind == "tool_use" and role == "assistant":
            calls.append(_call(at, block))
        elif kind == "tool_result" and role == "user":
            if texts:
                yield {"role": "user", "content": "".join(texts)}
                texts = []
            yield _result(at, block)
        else:
            raise Refused(
                f"{at}: a block of type {kind!r} is not supported in a message of the {role}", param="messages"
            )
    if role == "assistant":
        yield {"role": role, "content": "".join(texts), "tool_calls": calls}
    elif texts or not blocks:
        yield {"role": role, "content": "".join(texts)}


def _call(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    call_id, name, given = block.get("id"), block.get("name"), block.get("input")
    if not isinstance(call_id, str) or not isinstance(name, str) or not isinstance(given, Mapping):
        raise Refused(f"{where} must have an id, a name, and an object as its input", param="messages")
    return chat_call(call_id, name, msgspec.json.encode(given).decode())


def _result(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    call_id = block.get("tool_use_id")
    if not isinstance(call_id, str):
        raise Refused(f"{where}.tool_use_id must be text", param="messages")
    text = joined_text(block.get("content") or "", ("text",), where)
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def anthropic_answer(asked: Asked, answer: Answer) -> dict[str, Any]:
    """The body of an answer to `/v1/messages`."""
    content: list[dict[str, Any]] = []
    if answer.message["content"]:
        content.append({"type": "text", "text": answer.message["content"]})
    for call in answer.calls:
        function = call["function"]
        given = decode_object(function["arguments"])
        content.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": given})
    sampled = answer.sampled
    ended = "stop_sequence" if sampled.stop else {"stop": "end_turn", "length": "max_tokens"}[sampled.finish]
    return {
        "id": answer.id,
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": content,
        "stop_reason": "tool_use" if answer.calls else ended,
        "stop_sequence": sampled.stop or None,
        "usage": {
            "input_tokens": sampled.prompt_tokens,
            "output_tokens": len(sampled.token_ids),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }


def anthropic_events(asked: Asked, body: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The message without its content, each block begun, filled and ended, and how it ended."""

    def event(name: str, /, **data: Any) -> tuple[str, dict[str, Any]]:
        return name, {"type": name, **data}

    usage = body["usage"]
    begun = {**body, "content": [], "stop_reason": None, "stop_sequence": None, "usage": {**usage, "output_tokens": 0}}
    yield event("message_start", message=begun)
    for i, block in enumerate(body["content"]):
        if block["type"] == "text":
            empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            whole = msgspec.json.encode(block["input"]).decode()
            empty, delta = {**block, "input": {}}, {"type": "input_json_delta", "partial_json": whole}
        yield event("content_block_start", index=i, content_block=empty)
        yield event("content_block_delta", index=i, delta=delta)
        yield event("content_block_stop", index=i)
    ended = {"stop_reason": body["stop_reason"], "stop_sequence": body["stop_sequence"]}
    yield event("message_delta", delta=ended, usage={"output_tokens": usage["output_tokens"]})
    yield event("message_stop")


def anthropic_models(name: str) -> dict[str, Any]:
    """The list of one model that `/v1/models` answers a client of this protocol."""
    model = {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
    return {"data": [model], "has_more": False, "first_id": name, "last_id": name}


MESSAGES = Edge("msg", read_anthropic, anthropic_answer, anthropic_events)
