"""What the protocols of the endpoint share: one form of a request, of an answer and of a refusal.

Inside, a conversation is that of `/v1/chat/completions`: `Asked.messages` and the message of an `Answer`. Each protocol is an
`Edge`, which reads its own requests into that form, and writes answers and errors in its own.

What would change how tokens are sampled, and cannot be granted, is refused and never ignored: an episode is trained with the
log-probs of the distribution that `episode.temperature` gives.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from r3async.config import EpisodeConfig
from r3async.envs import Message
from r3async.untrusted import Malformed, decode_json


class Refused(Exception):
    """A request that is answered with an error. `code`, `param` and `kind` are OpenAI's names for it; `again`: whether asking
    again may help."""

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
        self.code, self.param, self.kind = code, param, kind


def openai_error(refused: Refused) -> dict[str, Any]:
    """The body of an error in OpenAI's form."""
    error = {"message": str(refused), "type": refused.kind, "param": refused.param, "code": refused.code}
    return {"error": error}


class Sampled(msgspec.Struct, frozen=True):
    """One answer. `own_words`: what the policy sampled, without its stop token. `stop`: the stop string of the request that ended
    it, if one did. `finish` is `stop` or `length`. `name`: by it the session knows which turn it became."""

    name: str
    prompt_tokens: int
    token_ids: list[int]
    logprobs: np.ndarray
    own_words: str
    finish: str
    stop: str = ""

    @property
    def text(self) -> str:
        """What is handed out: up to the stop string."""
        return self.own_words.partition(self.stop)[0] if self.stop else self.own_words

    @property
    def usage(self) -> dict[str, int]:
        n = len(self.token_ids)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": n,
            "total_tokens": self.prompt_tokens + n,
        }


class Asked(msgspec.Struct):
    """A request, whatever protocol it came by. `messages` and `tools` are in the form of `/v1/chat/completions`; `limit`: of new
    tokens; `stop`: strings that end the answer and are not handed out; `template_args`: variables of the chat template, beside
    the episode's; `one_call`: hand out the first tool call of an answer only; `request`: what else its protocol has to know to
    answer. `remembered`: the conversation that a later request may go on from by the answer's id, if there is to be one."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    limit: int | None = None
    stop: tuple[str, ...] = ()
    template_args: Mapping[str, Any] = {}
    stream: bool = False
    one_call: bool = False
    request: Any = None
    remembered: Sequence[Mapping[str, Any]] | None = None


class Answer(msgspec.Struct, frozen=True):
    """What a request is answered with. `message`: in the form of `/v1/chat/completions`; `token_texts()`: of each sampled
    token."""

    id: str
    model: str
    sampled: Sampled
    message: dict[str, Any]
    token_texts: Callable[[], list[str]]

    @property
    def calls(self) -> list[dict[str, Any]]:
        return self.message.get("tool_calls") or []


Remembered = Mapping[str, Sequence[Mapping[str, Any]]]
"""By the id of its last answer, a conversation of the session."""


class Edge(msgspec.Struct, frozen=True):
    """One protocol. `kind`: what its answers' ids begin with. `read` raises `Refused`. `write` gives the body of an answer, and
    `events` the same body as a stream: the name of each event, if events have names, and its data; then comes `end`."""

    kind: str
    read: Callable[[Any, EpisodeConfig, Remembered], Asked]
    write: Callable[[Asked, Answer], dict[str, Any]]
    events: Callable[[Asked, dict[str, Any]], Iterator[tuple[str, dict[str, Any]]]]
    end: bytes = b""


SAMPLED = ("temperature", "top_p", "top_k", "min_p")
"""What a request may ask for only as the episode has it."""
MOST_STOPS = 16


def read_fields(kind: Any, body: Any, settings: EpisodeConfig, neutral: Mapping[str, tuple[Any, ...]]) -> Any:
    """`body` as a `kind`. `neutral`: parameters that cannot be granted, and the values with which they ask for nothing; None is
    one for all. Raises `Refused` for what is ill-formed or cannot be granted."""
    if not isinstance(body, Mapping):
        raise Refused("the body must be a JSON object")
    _check_sampling(body, settings, neutral)
    for name, values in neutral.items():
        asked = body.get(name)
        if name not in SAMPLED and asked is not None and asked not in values:
            raise Refused(
                f"{name} = {asked!r} is not supported: episodes are trained on what the policy itself samples. Leave it out.",
                param=name,
                code="unsupported_parameter",
            )
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise Refused(str(error)) from error


def _check_sampling(body: Mapping[str, Any], settings: EpisodeConfig, neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises `Refused` for a request that asks for other tokens than the episode samples."""
    for name in SAMPLED:
        asked, value = body.get(name), getattr(settings, name)
        if asked is None or asked in neutral.get(name, ()) or _same(asked, value):
            continue
        raise Refused(
            f"{name} = {asked!r}: this episode is sampled at episode.{name} = {value!r}. Leave it out, or change that "
            "setting of the run.",
            param=name,
            code="unsupported_value",
        )


def _same(asked: Any, value: Any) -> bool:
    if isinstance(asked, float) and isinstance(value, (int, float)):
        return math.isclose(asked, value, rel_tol=1e-6)
    return bool(asked == value)


def stop_strings(asked: str | Sequence[str] | None, param: str = "stop") -> tuple[str, ...]:
    """Strings that end an answer. They change where it ends, and no token before that. Raises `Refused` for too many."""
    found = tuple(filter(None, [asked] if isinstance(asked, str) else asked or ()))
    if len(found) > MOST_STOPS:
        raise Refused(f"{param} has {len(found)} strings, more than {MOST_STOPS}", param=param)
    return found


def offered(tools: Sequence[Mapping[str, Any]] | None, choice: Any) -> Sequence[Mapping[str, Any]]:
    """The tools that an answer may call. `choice` is OpenAI's. Raises `Refused` for one that would force a call."""
    if choice not in (None, "auto", "none"):
        raise Refused(
            f"tool_choice = {choice!r} cannot be enforced: leave it out",
            param="tool_choice",
            code="unsupported_parameter",
        )
    return () if choice == "none" else tools or ()


def chat_tool(name: str, description: str | None, parameters: Any) -> dict[str, Any]:
    """A tool in the form of `/v1/chat/completions`."""
    function: dict[str, Any] = {"name": name}
    if description:
        function["description"] = description
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def chat_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call of a tool in that form."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def joined_text(content: Any, kinds: Sequence[str], where: str) -> str:
    """A text, or a list of parts whose `type` is one of `kinds`. Raises `Refused` for what is not text."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [p.get("text") if isinstance(p, Mapping) and p.get("type") in kinds else None for p in parts]
    if not all(isinstance(text, str) for text in texts):
        raise Refused(f"{where}: only text is supported", param=where.partition("[")[0])
    return "".join(texts)  # type: ignore[arg-type]


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
        with contextlib.suppress(Malformed):
            arguments = decode_json(arguments)
    return {**call, "function": {**call["function"], "arguments": arguments}}


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
