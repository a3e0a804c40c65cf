"""`/v1/responses` of OpenAI's API: items instead of messages, and a conversation may go on by the id of its last answer."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

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
)
from r3async.rollout.agents.rendering import with_effort

TEXTS = ("input_text", "output_text", "text")


class Reasoning(msgspec.Struct, forbid_unknown_fields=True):
    """Of a response. No summary is made; `auto` asks for the best that there is."""

    effort: str | None = None
    summary: Literal["auto"] | None = None


class ResponseRequest(msgspec.Struct):
    """What is honoured of `/v1/responses`."""

    input: str | list[dict[str, Any]] = []
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_logprobs": (0,),
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "max_tool_calls": (),
    "text": ({}, {"format": {"type": "text"}}),
    "truncation": ("disabled",),
    "include": ([], ["reasoning.encrypted_content"]),
}
"""Parameters that cannot be granted, and the values with which they ask for nothing."""


def read_response(body: Any, settings: EpisodeConfig, remembered: Remembered) -> Asked:
    asked: ResponseRequest = read_fields(ResponseRequest, body, settings, _NEUTRAL)
    before: Sequence[Mapping[str, Any]] = ()
    if asked.previous_response_id is not None:
        known = remembered.get(asked.previous_response_id)
        if known is None:
            raise Refused(
                f"Previous response with id {asked.previous_response_id[:100]!r} not found: it is not of this episode, or was "
                "made with store = false",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        before = known
    talk = [*before, *_messages(asked.input)]
    system = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
    return Asked(
        [*system, *talk],
        offered([_tool(i, tool) for i, tool in enumerate(asked.tools or [])], asked.tool_choice),
        asked.max_output_tokens,
        template_args=with_effort({}, asked.reasoning.effort if asked.reasoning else None),
        stream=bool(asked.stream),
        one_call=asked.parallel_tool_calls is False,
        request=asked,
        remembered=talk if asked.store is not False else None,
    )


def _tool(index: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise Refused(
            f"tools[{index}] has type {tool.get('type')!r}: only functions are supported, which the agent runs itself",
            param="tools",
        )
    return chat_tool(tool["name"], tool.get("description"), tool.get("parameters"))


def _messages(items: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Items as messages: the calls that follow an assistant's message are part of it."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        kind, where = item.get("type", "message"), f"input[{i}]"
        if kind == "message":
            content = joined_text(item.get("content"), TEXTS, where)
            messages.append({"role": item.get("role"), "content": content})
        elif kind == "function_call":
            call = chat_call(*_texts(item, where, "call_id", "name", "arguments"))
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = joined_text(item.get("output"), TEXTS, where)
            (call_id,) = _texts(item, where, "call_id")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        else:
            raise Refused(
                f"{where} has type {kind!r}: only messages, function calls and their outputs are supported",
                param="input",
            )
    return messages


def _texts(item: Mapping[str, Any], where: str, *names: str) -> list[str]:
    for name in names:
        if not isinstance(item.get(name), str):
            raise Refused(f"{where}.{name} must be text", param="input")
    return [item[name] for name in names]


def response_answer(asked: Asked, answer: Answer) -> dict[str, Any]:
    """The body of an answer to `/v1/responses`."""
    request: ResponseRequest = asked.request
    cut = answer.sampled.finish == "length"
    usage = answer.sampled.usage
    return {
        "id": answer.id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "model": answer.model,
        "output": _items(answer, "incomplete" if cut else "completed"),
        "parallel_tool_calls": not asked.one_call,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": request.reasoning and request.reasoning.effort, "summary": None},
        "store": asked.remembered is not None,
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


def _items(answer: Answer, status: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if answer.message["content"] or not answer.calls:
        part = {"type": "output_text", "text": answer.message["content"], "annotations": [], "logprobs": []}
        items.append(
            {"id": f"item-{answer.id}-0", "type": "message", "role": "assistant", "status": status, "content": [part]}
        )
    for call in answer.calls:
        function = call["function"]
        items.append(
            {
                "id": f"item-{answer.id}-{len(items)}",
                "type": "function_call",
                "call_id": call["id"],
                "name": function["name"],
                "arguments": function["arguments"],
                "status": "completed",
            }
        )
    return items


def response_events(asked: Asked, body: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each item is added, filled and done; the whole response comes at the end."""
    numbers = itertools.count()

    def event(name: str, /, **data: Any) -> tuple[str, dict[str, Any]]:
        return name, {"type": name, "sequence_number": next(numbers), **data}

    begun = {**body, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for i, item in enumerate(body["output"]):
        at = {"item_id": item["id"], "output_index": i}
        if item["type"] == "message":
            (part,) = item["content"]
            yield event(
                "response.output_item.added", output_index=i, item={**item, "status": "in_progress", "content": []}
            )
            at["content_index"] = 0
            yield event("response.content_part.added", **at, part={**part, "text": ""})
            if part["text"]:
                yield event("response.output_text.delta", **at, delta=part["text"], logprobs=[])
            yield event("response.output_text.done", **at, text=part["text"], logprobs=[])
            yield event("response.content_part.done", **at, part=part)
        else:
            yield event(
                "response.output_item.added", output_index=i, item={**item, "status": "in_progress", "arguments": ""}
            )
            yield event("response.function_call_arguments.delta", **at, delta=item["arguments"])
            yield event("response.function_call_arguments.done", **at, name=item["name"], arguments=item["arguments"])
        yield event("response.output_item.done", output_index=i, item=item)
    yield event(f"response.{body['status']}", response=body)


RESPONSES = Edge("resp", read_response, response_answer, response_events)
