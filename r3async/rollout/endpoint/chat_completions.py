"""OpenAI's `/v1/chat/completions` and `/v1/completions` APIs: their requests and answers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from r3async.config import EpisodeConfig
from r3async.rollout.endpoint.protocol import (
    AgentRequest,
    AgentResponse,
    ApiDialect,
    ApiError,
    StoredConversations,
    StreamOptions,
    parse_request_body,
    parse_stop_strings,
    select_tools,
)
from r3async.rollout.endpoint.template_args import add_reasoning_effort

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` in `/v1/completions`. In chat the default is the
rest of the context."""


class ChatRequest(msgspec.Struct):
    """The supported fields of a `/v1/chat/completions` request."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(msgspec.Struct):
    """The supported fields of a `/v1/completions` request."""

    prompt: str | list[Any]
    max_tokens: int | None = DEFAULT_COMPLETION_TOKENS
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: int | None = None

    @property
    def single_prompt(self) -> str | list[int]:
        """The prompt, as text or token ids, also if it is the only item of a list. Raises
        `ApiError` for several."""
        prompt: Any = self.prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
            if len(prompt) > 1:
                raise ApiError("one prompt a request", param="prompt")
            prompt = prompt[0]
        if isinstance(prompt, list) and not all(type(token) is int for token in prompt):
            raise ApiError("a prompt must be text or a list of token ids", param="prompt")
        return prompt


_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("auto", "none"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "include_reasoning": (True,),
}
"""Parameters of chats that cannot be granted, and the values with which they request nothing."""
_COMPLETION_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "add_special_tokens": (True,),
    "response_format": ({"type": "text"},),
}


def parse_chat_request(
    body: Any, settings: EpisodeConfig, stored_conversations: StoredConversations
) -> AgentRequest:
    asked: ChatRequest = parse_request_body(ChatRequest, body, settings, _NEUTRAL_VALUES)
    return AgentRequest(
        asked.messages,
        select_tools(asked.tools, asked.tool_choice),
        asked.token_limit,
        parse_stop_strings(asked.stop),
        add_reasoning_effort(asked.chat_template_kwargs or {}, asked.reasoning_effort),
        stream=bool(asked.stream),
        single_tool_call=asked.parallel_tool_calls is False,
        dialect_request=asked,
    )


def build_chat_body(request: AgentRequest, response: AgentResponse) -> dict[str, Any]:
    """Return the body of an answer to `/v1/chat/completions`."""
    sampled = response.answer
    logprobs = None
    if request.dialect_request.logprobs:
        entries = build_token_logprobs(
            response.decode_tokens(),
            sampled.logprobs.tolist(),
            bool(request.dialect_request.top_logprobs),
        )
        logprobs = {"content": entries, "refusal": None}
    finish = "tool_calls" if response.tool_calls else sampled.finish_reason
    choice = {
        "index": 0,
        "message": response.message,
        "finish_reason": finish,
        "logprobs": logprobs,
    }
    return _build_body(response.id, "chat.completion", response.model, [choice]) | {
        "usage": sampled.usage
    }


def iter_chat_events(
    request: AgentRequest, body: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events of a stream: role, content, each tool call's name and then its arguments,
    and the finish reason.

    The last event is `usage`, if the request wants it.
    """
    (choice,) = body["choices"]
    message = choice["message"]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if message["content"]:
        deltas.append({"content": message["content"]})
    for i, call in enumerate(message.get("tool_calls") or []):
        function = call["function"]
        deltas.append(
            {"tool_calls": [{"index": i, **call, "function": {**function, "arguments": ""}}]}
        )
        deltas.append(
            {"tool_calls": [{"index": i, "function": {"arguments": function["arguments"]}}]}
        )
    choices = [
        {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None} for delta in deltas
    ]
    choices[-1]["logprobs"] = choice["logprobs"]
    choices.append(
        {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"], "logprobs": None}
    )
    head = {key: body[key] for key in ("id", "created", "model")} | {
        "object": "chat.completion.chunk"
    }
    yield from _iter_chunks(
        head, choices, body["usage"] if _wants_usage(request.dialect_request) else None
    )


STREAM_DONE = b"data: [DONE]\n\n"
CHAT_DIALECT = ApiDialect(
    "chatcmpl", parse_chat_request, build_chat_body, iter_chat_events, STREAM_DONE
)


def parse_completion_request(body: Any, settings: EpisodeConfig) -> CompletionRequest:
    request: CompletionRequest = parse_request_body(
        CompletionRequest, body, settings, _COMPLETION_NEUTRAL_VALUES
    )
    return request


def build_completion_body(request: CompletionRequest, response: AgentResponse) -> dict[str, Any]:
    """Return the body of an answer to `/v1/completions`."""
    sampled = response.answer
    logprobs = None
    if request.logprobs is not None:
        logprobs = build_completion_logprobs(
            response.decode_tokens(), sampled.logprobs.tolist(), request.logprobs > 0
        )
    choice = {
        "index": 0,
        "text": sampled.text,
        "finish_reason": sampled.finish_reason,
        "logprobs": logprobs,
    }
    return _build_body(response.id, "text_completion", response.model, [choice]) | {
        "usage": sampled.usage
    }


def iter_completion_events(
    request: CompletionRequest, body: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    (choice,) = body["choices"]
    head = {key: body[key] for key in ("id", "created", "model", "object")}
    choices = [{**choice, "finish_reason": None}, {**choice, "text": "", "logprobs": None}]
    yield from _iter_chunks(head, choices, body["usage"] if _wants_usage(request) else None)


def _wants_usage(request: ChatRequest | CompletionRequest) -> bool:
    return bool(request.stream_options and request.stream_options.include_usage)


def _iter_chunks(
    head: dict[str, Any], choices: Sequence[dict[str, Any]], usage: dict[str, int] | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    for choice in choices:
        yield "", {**head, "choices": [choice]}
    if usage is not None:
        yield "", {**head, "choices": [], "usage": usage}


def _build_body(
    answer_id: str, kind: str, model: str, choices: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "id": answer_id,
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
    }


def build_token_logprobs(
    tokens: Sequence[str], logprobs: Sequence[float], with_top: bool
) -> list[dict[str, Any]]:
    """Return the log-prob entry of each sampled token.

    `with_top` lists the token itself as its only alternative, since no other was recorded.
    """
    entries = []
    for token, logprob in zip(tokens, logprobs, strict=True):
        entry = {"token": token, "logprob": float(logprob), "bytes": list(token.encode())}
        entries.append({**entry, "top_logprobs": [entry] if with_top else []})
    return entries


def build_completion_logprobs(
    tokens: Sequence[str], logprobs: Sequence[float], with_top: bool
) -> dict[str, Any]:
    offsets = [0]
    for token in tokens:
        offsets.append(offsets[-1] + len(token))
    values = [float(logprob) for logprob in logprobs]
    return {
        "tokens": list(tokens),
        "token_logprobs": values,
        "top_logprobs": [{t: v} for t, v in zip(tokens, values, strict=True)] if with_top else None,
        "text_offset": offsets[:-1],
    }
