"""Anthropic's `/v1/messages` API, which has content blocks instead of tool messages, and its
own form of errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from r3async.config import EpisodeConfig
from r3async.rollout.endpoint.protocol import (
    AgentRequest,
    AgentResponse,
    ApiDialect,
    ApiError,
    StoredConversations,
    build_tool_call,
    join_text_parts,
    parse_request_body,
    parse_stop_strings,
    refuse_unknown_fields,
    select_tools,
    translate_tools,
)
from r3async.rollout.endpoint.template_args import add_reasoning_effort
from r3async.untrusted import decode_json_object, format_value


class AnthropicOutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    """The supported fields of `output_config`."""

    effort: str | None = None


class CountTokensRequest(msgspec.Struct):
    """The supported fields of a `/v1/messages/count_tokens` request."""

    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: AnthropicOutputConfig | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """The supported fields of a `/v1/messages` request."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None


_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "thinking": ({"type": "disabled"},),
    "mcp_servers": ([],),
}
"""Parameters that cannot be granted, and the values with which they request nothing."""

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def build_anthropic_error(refused: ApiError) -> dict[str, Any]:
    """Return the body of an error in Anthropic's form. It has no field for the code, which
    precedes the message."""
    other = "api_error" if refused.status >= 500 else "invalid_request_error"
    message = f"{refused.code}: {refused}" if refused.code else str(refused)
    return {
        "type": "error",
        "error": {"type": _ERROR_TYPES.get(refused.status, other), "message": message},
    }


def parse_messages_request(
    body: Any, settings: EpisodeConfig, stored_conversations: StoredConversations
) -> AgentRequest:
    asked: MessagesRequest = parse_request_body(MessagesRequest, body, settings, _NEUTRAL_VALUES)
    read = _translate_request(asked)
    if read.messages[-1]["role"] == "assistant":
        raise ApiError(
            "the last message is the assistant's: an answer that was begun cannot be continued",
            param="messages",
        )
    read.max_tokens = asked.max_tokens
    read.stream = bool(asked.stream)
    read.stop_strings = parse_stop_strings(asked.stop_sequences, "stop_sequences")
    return read


def parse_count_request(body: Any, settings: EpisodeConfig) -> AgentRequest:
    """Parse a `/v1/messages/count_tokens` request. Raises `ApiError`."""
    return _translate_request(
        parse_request_body(CountTokensRequest, body, settings, _NEUTRAL_VALUES)
    )


def _translate_request(request: CountTokensRequest) -> AgentRequest:
    choice = request.tool_choice or {"type": "auto"}
    kind = choice.get("type")
    tools = translate_tools(request.tools, (None, "custom"), "input_schema")
    messages: list[dict[str, Any]] = []
    if request.system:
        messages.append(
            {"role": "system", "content": join_text_parts(request.system, ("text",), "system")}
        )
    for i, message in enumerate(request.messages):
        messages += _translate_message(f"messages[{i}]", message)
    if not messages:
        raise ApiError("messages is empty", param="messages")
    return AgentRequest(
        messages,
        select_tools(tools, kind if kind in ("auto", "none") else choice),
        template_args=add_reasoning_effort(
            {}, request.output_config.effort if request.output_config else None
        ),
        single_tool_call=bool(choice.get("disable_parallel_tool_use")),
    )


_BLOCK_FIELDS = {
    "text": ("type", "text", "cache_control"),
    "thinking": ("type", "thinking", "signature"),
    "tool_use": ("type", "id", "name", "input", "cache_control"),
    "tool_result": ("type", "tool_use_id", "content", "is_error", "cache_control"),
}
"""Fields of each content block that are shown to the model, or change nothing."""


def _translate_message(where: str, message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the chat messages of one message, with a separate message for each tool result and
    for text between."""
    role = message.get("role")
    blocks = message.get("content")
    if role not in ("user", "assistant"):
        raise ApiError(f"{where} has role {format_value(role)}", param="messages")
    refuse_unknown_fields(message, ("role", "content"), where)
    if isinstance(blocks, str):
        yield {"role": role, "content": blocks}
        return
    if not isinstance(blocks, list):
        raise ApiError(f"{where}.content must be text or a list of blocks", param="messages")
    calls: list[dict[str, Any]] = []
    texts: list[str] = []
    thoughts: list[str] = []
    for j, block in enumerate(blocks):
        at = f"{where}.content[{j}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if isinstance(kind, str) and kind in _BLOCK_FIELDS:
            refuse_unknown_fields(block, _BLOCK_FIELDS[kind], at)
        if kind == "text":
            texts.append(join_text_parts([block], ("text",), at))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(
                join_text_parts([{**block, "text": block.get("thinking")}], ("thinking",), at)
            )
        elif kind == "tool_use" and role == "assistant":
            calls.append(_translate_tool_use(at, block))
        elif kind == "tool_result" and role == "user":
            if texts:
                yield {"role": "user", "content": "".join(texts)}
                texts = []
            yield _translate_tool_result(at, block)
        else:
            raise ApiError(
                (
                    f"{at}: a block of type {format_value(kind)} is not supported in a "
                    f"message of the {role}"
                ),
                param="messages",
            )
    if role == "assistant":
        said = {"role": role, "content": "".join(texts), "tool_calls": calls}
        yield {**said, "reasoning_content": "".join(thoughts)} if thoughts else said
    elif texts or not blocks:
        yield {"role": role, "content": "".join(texts)}


def _translate_tool_use(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    call_id = block.get("id")
    name = block.get("name")
    given = block.get("input")
    if not isinstance(call_id, str) or not isinstance(name, str) or not isinstance(given, Mapping):
        raise ApiError(
            f"{where} must have an id, a name, and an object as its input", param="messages"
        )
    return build_tool_call(call_id, name, msgspec.json.encode(given).decode())


def _translate_tool_result(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    call_id = block.get("tool_use_id")
    if not isinstance(call_id, str):
        raise ApiError(f"{where}.tool_use_id must be text", param="messages")
    text = join_text_parts(block.get("content") or "", ("text",), where)
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def build_messages_body(request: AgentRequest, response: AgentResponse) -> dict[str, Any]:
    """Return the body of an answer to `/v1/messages`."""
    content: list[dict[str, Any]] = []
    if response.message["content"]:
        content.append({"type": "text", "text": response.message["content"]})
    for call in response.tool_calls:
        function = call["function"]
        given = decode_json_object(function["arguments"])
        content.append(
            {"type": "tool_use", "id": call["id"], "name": function["name"], "input": given}
        )
    sampled = response.answer
    ended = (
        "stop_sequence"
        if sampled.stop_string
        else {"stop": "end_turn", "length": "max_tokens"}[sampled.finish_reason]
    )
    return {
        "id": response.id,
        "type": "message",
        "role": "assistant",
        "model": response.model,
        "content": content,
        "stop_reason": "tool_use" if response.tool_calls else ended,
        "stop_sequence": sampled.stop_string or None,
        "usage": {
            "input_tokens": sampled.prompt_tokens,
            "output_tokens": len(sampled.token_ids),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }


def iter_messages_events(
    request: AgentRequest, body: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events of a stream.

    They are the message without content; start, delta and stop of each block; and the stop reason.
    """

    def make_event(name: str, /, **data: Any) -> tuple[str, dict[str, Any]]:
        return name, {"type": name, **data}

    usage = body["usage"]
    begun = {
        **body,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**usage, "output_tokens": 0},
    }
    yield make_event("message_start", message=begun)
    for i, block in enumerate(body["content"]):
        if block["type"] == "text":
            empty = {**block, "text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            whole = msgspec.json.encode(block["input"]).decode()
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": whole}
        yield make_event("content_block_start", index=i, content_block=empty)
        yield make_event("content_block_delta", index=i, delta=delta)
        yield make_event("content_block_stop", index=i)
    ended = {"stop_reason": body["stop_reason"], "stop_sequence": body["stop_sequence"]}
    yield make_event("message_delta", delta=ended, usage={"output_tokens": usage["output_tokens"]})
    yield make_event("message_stop")


def build_anthropic_models(name: str) -> dict[str, Any]:
    """Return the list of one model with which `/v1/models` answers a client of this protocol."""
    model = {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
    }
    return {"data": [model], "has_more": False, "first_id": name, "last_id": name}


MESSAGES_DIALECT = ApiDialect(
    "msg", parse_messages_request, build_messages_body, iter_messages_events
)
