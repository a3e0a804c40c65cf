"""The form that requests, answers and refusals of every protocol of the endpoint share, and how conversations are rendered."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from r3async.config import EpisodeConfig
from r3async.envs import Message
from r3async.rollout.chat import ChatRenderer, TemplateError
from r3async.untrusted import MalformedError, decode_json

# What the protocols of the endpoint share: one form of a request, of an answer and of a refusal.
#
# Inside, a conversation is that of `/v1/chat/completions`: `Asked.messages` and the message of an `AgentResponse`. Each
# protocol is an `ApiDialect`, which reads its own requests into that form, and writes answers and errors in its own.
#
# What would change how tokens are sampled, and cannot be granted, is refused and never ignored: an episode is trained with the
# log-probs of the distribution that `episode.temperature` gives.


class ApiError(Exception):
    """A request that is answered with an error. `code`, `param` and `error_type` (their `type`) are OpenAI's; `can_retry`:
    whether asking again may help."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        error_type: str = "invalid_request_error",
        can_retry: bool = False,
    ):
        super().__init__(message)
        self.status, self.can_retry = status, can_retry
        self.code, self.param, self.error_type = code, param, error_type


def build_openai_error(refused: ApiError) -> dict[str, Any]:
    """The body of an error in OpenAI's form."""
    error = {"message": str(refused), "type": refused.error_type, "param": refused.param, "code": refused.code}
    return {"error": error}


class SampledAnswer(msgspec.Struct, frozen=True):
    """One answer. `sampled_text`: what the policy sampled, without its stop token. `stop_string`: the stop string of the
    request that ended it, if one did. `finish_reason` is `stop` or `length`. `answer_name`: by it the session knows
    which turn it became."""

    answer_name: str
    prompt_tokens: int
    token_ids: list[int]
    logprobs: np.ndarray
    sampled_text: str
    finish_reason: str
    stop_string: str = ""

    @property
    def text(self) -> str:
        """What is handed out: up to the stop string."""
        return self.sampled_text.partition(self.stop_string)[0] if self.stop_string else self.sampled_text

    @property
    def usage(self) -> dict[str, int]:
        n = len(self.token_ids)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": n,
            "total_tokens": self.prompt_tokens + n,
        }


class AgentRequest(msgspec.Struct):
    """A request, whatever protocol it came by. `messages` and `tools` are in the form of `/v1/chat/completions`;
    `max_tokens`: of new tokens; `stop_strings`: strings that end the answer and are not handed out; `template_args`:
    variables of the chat template, beside the episode's; `single_tool_call`: hand out the first tool call of an answer only;
    `dialect_request`: what else its protocol has to know to answer. `stored_conversation`: the conversation that a later
    request may go on from by the answer's id, if there is to be one."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    max_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()
    template_args: Mapping[str, Any] = {}
    stream: bool = False
    single_tool_call: bool = False
    dialect_request: Any = None
    stored_conversation: Sequence[Mapping[str, Any]] | None = None


class AgentResponse(msgspec.Struct, frozen=True):
    """What a request is answered with. `message`: in the form of `/v1/chat/completions`; `decode_tokens()`: of each sampled
    token."""

    id: str
    model: str
    answer: SampledAnswer
    message: dict[str, Any]
    decode_tokens: Callable[[], list[str]]

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        return self.message.get("tool_calls") or []


StoredConversations = Mapping[str, Sequence[Mapping[str, Any]]]
"""By the id of its last answer, a conversation of the session."""


class ApiDialect(msgspec.Struct, frozen=True):
    """One protocol. `id_prefix`: what its answers' ids begin with. `parse_request` raises `ApiError`. `build_body` gives the
    body of an answer, and `iter_events` the same body as a stream: the name of each event, if events have names, and its
    data; then comes `stream_end`."""

    id_prefix: str
    parse_request: Callable[[Any, EpisodeConfig, StoredConversations], AgentRequest]
    build_body: Callable[[AgentRequest, AgentResponse], dict[str, Any]]
    iter_events: Callable[[AgentRequest, dict[str, Any]], Iterator[tuple[str, dict[str, Any]]]]
    stream_end: bytes = b""


SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p")
"""What a request may ask for only as the episode has it."""
MAX_STOP_STRINGS = 16


def parse_request_body(
    request_type: Any, body: Any, settings: EpisodeConfig, neutral_values: Mapping[str, tuple[Any, ...]]
) -> Any:
    """`body` as a `request_type`. `neutral_values`: parameters that cannot be granted, and the values with which they ask for
    nothing; None is one for all. Raises `ApiError` for what is ill-formed or cannot be granted."""
    if not isinstance(body, Mapping):
        raise ApiError("the body must be a JSON object")
    _check_sampling(body, settings, neutral_values)
    for name, values in neutral_values.items():
        asked = body.get(name)
        if name not in SAMPLING_FIELDS and asked is not None and asked not in values:
            raise ApiError(
                f"{name} = {asked!r} is not supported: episodes are trained on what the policy itself samples. Leave it out.",
                param=name,
                code="unsupported_parameter",
            )
    try:
        return msgspec.convert(body, request_type)
    except msgspec.ValidationError as error:
        raise ApiError(str(error)) from error


def _check_sampling(
    body: Mapping[str, Any], settings: EpisodeConfig, neutral_values: Mapping[str, tuple[Any, ...]]
) -> None:
    """Raises `ApiError` for a request that asks for other tokens than the episode samples."""
    for name in SAMPLING_FIELDS:
        asked, value = body.get(name), getattr(settings, name)
        if asked is None or asked in neutral_values.get(name, ()) or _is_same_value(asked, value):
            continue
        raise ApiError(
            f"{name} = {asked!r}: this episode is sampled at episode.{name} = {value!r}. Leave it out, or change that "
            "setting of the run.",
            param=name,
            code="unsupported_value",
        )


def _is_same_value(asked: Any, value: Any) -> bool:
    if isinstance(asked, float) and isinstance(value, (int, float)):
        return math.isclose(asked, value, rel_tol=1e-6)
    return bool(asked == value)


def parse_stop_strings(stop: str | Sequence[str] | None, param: str = "stop") -> tuple[str, ...]:
    """Strings that end an answer. They change where it ends, and no token before that. Raises `ApiError` for too many."""
    found = tuple(filter(None, [stop] if isinstance(stop, str) else stop or ()))
    if len(found) > MAX_STOP_STRINGS:
        raise ApiError(f"{param} has {len(found)} strings, more than {MAX_STOP_STRINGS}", param=param)
    return found


def select_tools(tools: Sequence[Mapping[str, Any]] | None, choice: Any) -> Sequence[Mapping[str, Any]]:
    """The tools that an answer may call. `choice` is OpenAI's. Raises `ApiError` for one that would force a call."""
    if choice not in (None, "auto", "none"):
        raise ApiError(
            f"tool_choice = {choice!r} cannot be enforced: leave it out",
            param="tool_choice",
            code="unsupported_parameter",
        )
    return () if choice == "none" else tools or ()


def build_chat_tool(name: str, description: str | None, parameters: Any) -> dict[str, Any]:
    """A tool in the form of `/v1/chat/completions`."""
    function: dict[str, Any] = {"name": name}
    if description:
        function["description"] = description
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def build_tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call of a tool in that form."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def join_text_parts(content: Any, kinds: Sequence[str], where: str) -> str:
    """A text, or a list of parts whose `type` is one of `kinds`. Raises `ApiError` for what is not text."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [p.get("text") if isinstance(p, Mapping) and p.get("type") in kinds else None for p in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ApiError(f"{where}: only text is supported", param=where.partition("[")[0])
    return "".join(texts)  # type: ignore[arg-type]


def parse_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages of the API as templates take them: text parts are joined, arguments of tool calls are objects.

    Raises `ApiError` for what is not text.
    """
    return MessageParser().parse_messages(messages)


class MessageParser:
    """`parse_messages`, of requests that repeat the conversation: what the request before began with is not read again."""

    def __init__(self) -> None:
        self._raw_messages: list[Mapping[str, Any]] = []
        self._parsed_messages: list[Message] = []

    def parse_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        known = len(self._raw_messages)
        if self._raw_messages != messages[:known]:
            pairs = enumerate(zip(self._raw_messages, messages, strict=False))
            known = next((i for i, (old, new) in pairs if old != new), min(known, len(messages)))
        if not messages:
            raise ApiError("messages is empty", param="messages")
        self._parsed_messages = [
            *self._parsed_messages[:known],
            *(_parse_message(i, messages[i]) for i in range(known, len(messages))),
        ]
        self._raw_messages = list(messages)
        return list(self._parsed_messages)


def _parse_message(index: int, message: Mapping[str, Any]) -> Message:
    role = message.get("role")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise ApiError(f"messages[{index}] has role {role!r}", param="messages")
    content = message.get("content")
    if isinstance(content, list):
        parts = [p.get("text") if isinstance(p, Mapping) and p.get("type") == "text" else None for p in content]
        if not all(isinstance(part, str) for part in parts):
            raise ApiError(f"messages[{index}]: only text is supported", param="messages")
        content = "".join(part for part in parts if part)
    if content is not None and not isinstance(content, str):
        raise ApiError(f"messages[{index}].content must be text", param="messages")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(
        isinstance(c, Mapping) and isinstance(c.get("function"), Mapping) for c in calls
    ):
        raise ApiError(f"messages[{index}].tool_calls must be a list of function calls", param="messages")
    return Message(
        role="system" if role == "developer" else role,
        content=content or "",
        tool_calls=[_parse_call_arguments(call) for call in calls],
        tool_call_id=str(message.get("tool_call_id") or ""),
        name=str(message.get("name") or ""),
    )


def _parse_call_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """With arguments as an object, which is what templates write best; where they are none, as they are."""
    arguments = call["function"].get("arguments", {})
    if isinstance(arguments, str):
        with contextlib.suppress(MalformedError):
            arguments = decode_json(arguments)
    return {**call, "function": {**call["function"], "arguments": arguments}}


class SampledTexts:
    """Remembers for every answer how it was handed out, so that the message that comes back is given its own words again."""

    def __init__(self) -> None:
        self._text_by_message: dict[Any, str] = {}

    def add(self, text: str, message: Message) -> None:
        """The policy sampled `text`; the agent was given `message`."""
        self._text_by_message[_build_message_key(message, with_ids=True)] = text
        self._text_by_message[_build_message_key(message, with_ids=False)] = text

    def restore_sampled_text(self, message: Message) -> Message:
        """`message` in the policy's own words, if it is an answer of ours unchanged; else as it is.

        Of several answers that read the same, the one whose calls have these ids counts, then the newest.
        """
        if message.role != "assistant":
            return message
        for ids in (True, False):
            text = self._text_by_message.get(_build_message_key(message, ids))
            if text is not None:
                return Message("assistant", text)
        return message


def _build_message_key(message: Message, with_ids: bool) -> Any:
    calls = tuple(
        (
            call.get("id") if with_ids else None,
            call["function"].get("name"),
            msgspec.json.encode(call["function"].get("arguments"), order="sorted"),
        )
        for call in message.tool_calls
    )
    # White space around the words beside a call was not handed out; frameworks drop such content altogether, or send "".
    return (message.content.strip() if calls else message.content, calls)


# What a request may ask of the chat template: variables that it has, which change the prompt and nothing of the sampling.


EFFORT_VARIABLE, THINKING_VARIABLE = "reasoning_effort", "enable_thinking"
"""Variables by which templates know how long, or whether, the model is to think."""


def add_reasoning_effort(template_args: Mapping[str, Any], effort: str | None) -> dict[str, Any]:
    """Variables that a request names, with its `effort` of reasoning; those that are None it leaves to the episode."""
    named = {**template_args, EFFORT_VARIABLE: effort if effort is not None else template_args.get(EFFORT_VARIABLE)}
    return {name: value for name, value in named.items() if value is not None}


def apply_template_args(renderer: ChatRenderer, template_args: Mapping[str, Any]) -> ChatRenderer:
    """`renderer` with these variables beside the episode's. Without an effort in the template, `none` is no thinking. Raises
    `ApiError` for what the template does not know."""
    wanted, known = dict(template_args), renderer.template_variables
    if wanted.get(EFFORT_VARIABLE) == "none" and EFFORT_VARIABLE not in known and THINKING_VARIABLE in known:
        del wanted[EFFORT_VARIABLE]
        wanted = {THINKING_VARIABLE: False, **wanted}
    try:
        return renderer.with_template_args(wanted)
    except TemplateError as error:
        raise ApiError(
            f"{', '.join(f'{name} = {value!r}' for name, value in template_args.items())}: {error}. Leave it out.",
            param=min(wanted),
            code="unsupported_value",
        ) from error
