"""OpenAI's `/v1/responses` API, with items instead of messages, and conversations that continue
by an answer's id."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from r3async.config import EpisodeConfig
from r3async.rollout.endpoint.protocol import (
    AgentRequest,
    AgentResponse,
    ApiDialect,
    ApiError,
    StoredConversations,
    StreamOptions,
    build_tool_call,
    join_text_parts,
    parse_request_body,
    refuse_unknown_fields,
    select_tools,
    translate_tools,
)
from r3async.rollout.endpoint.template_args import add_reasoning_effort
from r3async.untrusted import format_value

_ITEM_FIELDS = {
    "message": ("type", "id", "status", "phase", "role", "content"),
    "function_call": ("type", "id", "status", "call_id", "name", "arguments"),
    "function_call_output": ("type", "id", "status", "call_id", "output"),
}
"""Fields of each item that are shown to the model, or change nothing."""
TEXT_PART_TYPES = ("input_text", "output_text", "text")


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True):
    """The supported fields of `reasoning`. No summary is made; a `summary` of `auto` accepts
    the best there is."""

    effort: str | None = None
    summary: Literal["auto"] | None = None


class ResponsesRequest(msgspec.Struct):
    """The supported fields of a `/v1/responses` request."""

    input: str | list[dict[str, Any]] = []
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    reasoning: ReasoningOptions | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None


_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "top_logprobs": (0,),
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "max_tool_calls": (),
    "text": (
        {},
        {"format": {"type": "text"}},
        {"verbosity": "medium"},
        {"format": {"type": "text"}, "verbosity": "medium"},
    ),
    "truncation": ("disabled",),
    "include": ([], ["reasoning.encrypted_content"]),
}
"""Parameters that cannot be granted, and the values with which they request nothing."""


def parse_responses_request(
    body: Any, settings: EpisodeConfig, stored_conversations: StoredConversations
) -> AgentRequest:
    asked: ResponsesRequest = parse_request_body(ResponsesRequest, body, settings, _NEUTRAL_VALUES)
    before: Sequence[Mapping[str, Any]] = ()
    if asked.previous_response_id is not None:
        known = stored_conversations.get(asked.previous_response_id)
        if known is None:
            raise ApiError(
                f"Previous response with id {asked.previous_response_id[:100]!r} not found: it is "
                "not of this episode, or was made with store = false",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        before = known
    talk = [*before, *_translate_items(asked.input)]
    system = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
    return AgentRequest(
        [*system, *talk],
        select_tools(translate_tools(asked.tools, ("function",), "parameters"), asked.tool_choice),
        asked.max_output_tokens,
        template_args=add_reasoning_effort({}, asked.reasoning.effort if asked.reasoning else None),
        stream=bool(asked.stream),
        single_tool_call=asked.parallel_tool_calls is False,
        dialect_request=asked,
        stored_conversation=talk if asked.store is not False else None,
    )


def _translate_items(items: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Translate items to messages. The calls that follow an assistant's message
    become part of it."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        kind = item.get("type", "message")
        where = f"input[{i}]"
        if isinstance(kind, str) and kind in _ITEM_FIELDS:
            refuse_unknown_fields(item, _ITEM_FIELDS[kind], where)
        if kind == "message":
            content = join_text_parts(item.get("content"), TEXT_PART_TYPES, where)
            messages.append({"role": item.get("role"), "content": content})
        elif kind == "function_call":
            call = build_tool_call(*_require_texts(item, where, "call_id", "name", "arguments"))
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = join_text_parts(item.get("output"), TEXT_PART_TYPES, where)
            (call_id,) = _require_texts(item, where, "call_id")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        else:
            raise ApiError(
                (
                    f"{where} has type {format_value(kind)}: only messages, function calls and "
                    "their outputs are supported"
                ),
                param="input",
            )
    return messages


def _require_texts(item: Mapping[str, Any], where: str, *names: str) -> list[str]:
    for name in names:
        if not isinstance(item.get(name), str):
            raise ApiError(f"{where}.{name} must be text", param="input")
    return [item[name] for name in names]


def build_responses_body(agent_request: AgentRequest, response: AgentResponse) -> dict[str, Any]:
    """Return the body of an answer to `/v1/responses`."""
    request: ResponsesRequest = agent_request.dialect_request
    cut = response.answer.finish_reason == "length"
    usage = response.answer.usage
    return {
        "id": response.id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "model": response.model,
        "output": _build_output_items(response, "incomplete" if cut else "completed"),
        "parallel_tool_calls": not agent_request.single_tool_call,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": request.reasoning and request.reasoning.effort, "summary": None},
        "store": agent_request.stored_conversation is not None,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def _build_output_items(response: AgentResponse, status: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if response.message["content"] or not response.tool_calls:
        part = {
            "type": "output_text",
            "text": response.message["content"],
            "annotations": [],
            "logprobs": [],
        }
        items.append(
            {
                "id": f"item-{response.id}-0",
                "type": "message",
                "role": "assistant",
                "status": status,
                "content": [part],
            }
        )
    for call in response.tool_calls:
        function = call["function"]
        items.append(
            {
                "id": f"item-{response.id}-{len(items)}",
                "type": "function_call",
                "call_id": call["id"],
                "name": function["name"],
                "arguments": function["arguments"],
                "status": "completed",
            }
        )
    return items


def iter_responses_events(
    request: AgentRequest, body: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events of a stream: each item is added, filled and done; the last event has
    the whole response."""
    numbers = itertools.count()

    def make_event(name: str, /, **data: Any) -> tuple[str, dict[str, Any]]:
        return name, {"type": name, "sequence_number": next(numbers), **data}

    begun = {
        **body,
        "status": "in_progress",
        "incomplete_details": None,
        "output": [],
        "usage": None,
    }
    yield make_event("response.created", response=begun)
    yield make_event("response.in_progress", response=begun)
    for i, item in enumerate(body["output"]):
        at = {"item_id": item["id"], "output_index": i}
        if item["type"] == "message":
            (part,) = item["content"]
            yield make_event(
                "response.output_item.added",
                output_index=i,
                item={**item, "status": "in_progress", "content": []},
            )
            at["content_index"] = 0
            yield make_event("response.content_part.added", **at, part={**part, "text": ""})
            if part["text"]:
                yield make_event(
                    "response.output_text.delta", **at, delta=part["text"], logprobs=[]
                )
            yield make_event("response.output_text.done", **at, text=part["text"], logprobs=[])
            yield make_event("response.content_part.done", **at, part=part)
        else:
            yield make_event(
                "response.output_item.added",
                output_index=i,
                item={**item, "status": "in_progress", "arguments": ""},
            )
            yield make_event(
                "response.function_call_arguments.delta", **at, delta=item["arguments"]
            )
            yield make_event(
                "response.function_call_arguments.done",
                **at,
                name=item["name"],
                arguments=item["arguments"],
            )
        yield make_event("response.output_item.done", output_index=i, item=item)
    yield make_event(f"response.{body['status']}", response=body)


RESPONSES_DIALECT = ApiDialect(
    "resp", parse_responses_request, build_responses_body, iter_responses_events
)
