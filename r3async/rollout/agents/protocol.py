"""What the endpoint reads and writes: requests, answers, tool calls and errors in the shape of OpenAI's API.

What would change how tokens are sampled, and cannot be granted, is refused and never ignored: an episode is trained with the
log-probs of the distribution that `episode.temperature` gives.
"""

from __future__ import annotations

import contextlib
import math
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from r3async.config import EpisodeConfig
from r3async.envs import Message

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` in `/v1/completions`. In chat the default is what the context has left."""


class Refused(Exception):
    """A request that is answered with an error, in OpenAI's shape. `again`: whether asking again may help."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        kind: str = "invalid_request_error",
        again: bool = False,
    ):
        super().__init__(message)
        self.status, self.again = status, again
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Sampled(msgspec.Struct, frozen=True):
    """One answer. `text` leaves the stop token out; `finish` is `stop` or `length`; `turn` counts the answers of the session."""

    turn: int
    prompt_tokens: int
    token_ids: list[int]
    logprobs: np.ndarray
    text: str
    finish: str

    @property
    def usage(self) -> dict[str, int]:
        n = len(self.token_ids)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": n,
            "total_tokens": self.prompt_tokens + n,
        }


class ChatRequest(msgspec.Struct):
    """What is honoured of `/v1/chat/completions`."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(msgspec.Struct):
    """What is honoured of `/v1/completions`."""

    prompt: str | list[Any]
    max_tokens: int | None = DEFAULT_COMPLETION_TOKENS
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    logprobs: int | None = None

    @property
    def one_prompt(self) -> str | list[int]:
        """Text or token ids; a list of one of them is that one. Raises `Refused` for several."""
        prompt: Any = self.prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
            if len(prompt) > 1:
                raise Refused("one prompt a request", param="prompt")
            prompt = prompt[0]
        if isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt):
            raise Refused("a prompt must be text or a list of token ids", param="prompt")
        return prompt


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "stop": ([], ""),
    "suffix": ("",),
    "echo": (False,),
    "functions": ([],),
    "response_format": ({"type": "text"},),
}
"""Parameters that cannot be granted, and the values with which they ask for nothing. None is one for all."""


def read_request(kind: Any, body: Any, settings: EpisodeConfig) -> Any:
    """`body` as a `kind`. Raises `Refused` for what is ill-formed or cannot be granted."""
    if not isinstance(body, Mapping):
        raise Refused("the body must be a JSON object")
    for name, values in _NEUTRAL.items():
        asked = body.get(name)
        if asked is not None and asked not in values:
            raise Refused(
                f"{name} = {asked!r} is not supported: episodes are trained on what the policy itself samples. Leave it out.",
                param=name,
                code="unsupported_parameter",
            )
    temperature = body.get("temperature")
    if temperature is not None and (
        not isinstance(temperature, (int, float)) or not math.isclose(temperature, settings.temperature, rel_tol=1e-6)
    ):
        raise Refused(
            f"temperature = {temperature!r}: this episode is sampled at episode.temperature = {settings.temperature}. Leave it "
            "out, or change that setting of the run.",
            param="temperature",
            code="unsupported_value",
        )
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise Refused(str(error)) from error


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages of the API as templates take them: text parts are joined, arguments of tool calls are objects.

    Raises `Refused` for what is not text.
    """
    return MessageReader().read(messages)


class MessageReader:
    """`read_messages`, of requests that repeat the conversation: what the request before began with is not read again."""

    def __init__(self) -> None:
        self._asked: list[Mapping[str, Any]] = []
        self._read: list[Message] = []

    def read(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        known = len(self._asked)
        if self._asked != messages[:known]:
            pairs = enumerate(zip(self._asked, messages, strict=False))
            known = next((i for i, (old, new) in pairs if old != new), min(known, len(messages)))
        if not messages:
            raise Refused("messages is empty", param="messages")
        self._read = [*self._read[:known], *(_message(i, messages[i]) for i in range(known, len(messages)))]
        self._asked = list(messages)
        return list(self._read)


def _message(index: int, message: Mapping[str, Any]) -> Message:
    role = message.get("role")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise Refused(f"messages[{index}] has role {role!r}", param="messages")
    content = message.get("content")
    if isinstance(content, list):
        parts = [p.get("text") if isinstance(p, Mapping) and p.get("type") == "text" else None for p in content]
        if not all(isinstance(part, str) for part in parts):
            raise Refused(f"messages[{index}]: only text is supported", param="messages")
        content = "".join(part for part in parts if part)
    if content is not None and not isinstance(content, str):
        raise Refused(f"messages[{index}].content must be text", param="messages")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(
        isinstance(c, Mapping) and isinstance(c.get("function"), Mapping) for c in calls
    ):
        raise Refused(f"messages[{index}].tool_calls must be a list of function calls", param="messages")
    return Message(
        role="system" if role == "developer" else role,
        content=content or "",
        tool_calls=[_structured(call) for call in calls],
        tool_call_id=str(message.get("tool_call_id") or ""),
        name=str(message.get("name") or ""),
    )


def _structured(call: Mapping[str, Any]) -> dict[str, Any]:
    """With arguments as an object, which is what templates write best; where they are none, as they are."""
    arguments = call["function"].get("arguments", {})
    if isinstance(arguments, str):
        with contextlib.suppress(msgspec.DecodeError):
            arguments = msgspec.json.decode(arguments)
    return {**call, "function": {**call["function"], "arguments": arguments}}


# -- answers -----------------------------------------------------------------------------------------------------


def chat_answer(
    answer_id: str, model: str, sampled: Sampled, message: dict[str, Any], logprobs: list[dict[str, Any]] | None
) -> dict[str, Any]:
    """The body of an answer to `/v1/chat/completions`."""
    finish = "tool_calls" if message.get("tool_calls") else sampled.finish
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": finish,
        "logprobs": None if logprobs is None else {"content": logprobs, "refusal": None},
    }
    return _body(answer_id, "chat.completion", model, [choice]) | {"usage": sampled.usage}


def chat_chunks(body: Mapping[str, Any], usage: bool) -> list[dict[str, Any]]:
    """The same answer as a stream: the role, the content, tool calls, the end; then `usage`, if it was asked for."""
    (choice,) = body["choices"]
    message = choice["message"]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if message["content"]:
        deltas.append({"content": message["content"]})
    if calls := message.get("tool_calls"):
        deltas.append({"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]})
    choices = [{"index": 0, "delta": delta, "finish_reason": None, "logprobs": None} for delta in deltas]
    choices[-1]["logprobs"] = choice["logprobs"]
    choices.append({"index": 0, "delta": {}, "finish_reason": choice["finish_reason"], "logprobs": None})
    head = {key: body[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    return _chunks(head, choices, body["usage"] if usage else None)


def completion_answer(answer_id: str, model: str, sampled: Sampled, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    """The body of an answer to `/v1/completions`."""
    choice = {"index": 0, "text": sampled.text, "finish_reason": sampled.finish, "logprobs": logprobs}
    return _body(answer_id, "text_completion", model, [choice]) | {"usage": sampled.usage}


def completion_chunks(body: Mapping[str, Any], usage: bool) -> list[dict[str, Any]]:
    (choice,) = body["choices"]
    head = {key: body[key] for key in ("id", "created", "model", "object")}
    return _chunks(
        head,
        [{**choice, "finish_reason": None}, {**choice, "text": "", "logprobs": None}],
        body["usage"] if usage else None,
    )


def _chunks(
    head: dict[str, Any], choices: Sequence[dict[str, Any]], usage: dict[str, int] | None
) -> list[dict[str, Any]]:
    chunks = [{**head, "choices": [choice]} for choice in choices]
    return chunks if usage is None else [*chunks, {**head, "choices": [], "usage": usage}]


def _body(answer_id: str, kind: str, model: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": answer_id, "object": kind, "created": int(time.time()), "model": model, "choices": choices}


def token_logprobs(tokens: Sequence[str], logprobs: Sequence[float], top: bool) -> list[dict[str, Any]]:
    """Of each sampled token; `top`: with itself as its only alternative, since no other was recorded."""
    entries = []
    for token, logprob in zip(tokens, logprobs, strict=True):
        entry = {"token": token, "logprob": float(logprob), "bytes": list(token.encode())}
        entries.append({**entry, "top_logprobs": [entry] if top else []})
    return entries


def completion_logprobs(tokens: Sequence[str], logprobs: Sequence[float], top: bool) -> dict[str, Any]:
    offsets = [0]
    for token in tokens:
        offsets.append(offsets[-1] + len(token))
    values = [float(logprob) for logprob in logprobs]
    return {
        "tokens": list(tokens),
        "token_logprobs": values,
        "top_logprobs": [{t: v} for t, v in zip(tokens, values, strict=True)] if top else None,
        "text_offset": offsets[:-1],
    }


# -- tool calls -----------------------------------------------------------------------------------------------------

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


class SpokenMessages:
    """Remembers for every answer how it was handed out, so that the message that comes back is given its own words again."""

    def __init__(self) -> None:
        self._text: dict[Any, str] = {}

    def add(self, text: str, message: Message) -> None:
        """The policy sampled `text`; the agent was given `message`."""
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
