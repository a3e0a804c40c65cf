"""The requests, answers and errors that all protocols of the endpoint share.

Internally a conversation has the form of `/v1/chat/completions`: `AgentRequest.messages` and the
message of an `AgentResponse`. Each protocol is an `ApiDialect`, which translates its requests into
that form, and answers and errors into its own.

Parameters that would change how tokens are sampled, and cannot be granted, are refused and never
ignored: an episode is trained with the log-probs of the distribution that `episode.temperature`
gives.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from r3async.config import EpisodeConfig
from r3async.envs import REASONING_KEYS, Message
from r3async.envs.row_tasks import NOT_SHOWN_OF_A_MESSAGE
from r3async.envs.tool_call_parser import split_reasoning
from r3async.rollout.call_forms import normalize_call
from r3async.untrusted import format_value


class ApiError(Exception):
    """A request that is answered with an error.

    `code`, `param` and `error_type` (`type` in the body) are those of OpenAI's errors. `can_retry`
    is True if sending the request again may help.
    """

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
        self.status = status
        self.can_retry = can_retry
        self.code = code
        self.param = param
        self.error_type = error_type


def build_openai_error(refused: ApiError) -> dict[str, Any]:
    """Return the body of an error in OpenAI's form."""
    error = {
        "message": str(refused),
        "type": refused.error_type,
        "param": refused.param,
        "code": refused.code,
    }
    return {"error": error}


class SampledAnswer(msgspec.Struct, frozen=True):
    """One sampled answer.

    Attributes:
        answer_name: The name by which the session finds the turn that the answer became.
        sampled_text: The text that the policy sampled, without its stop token.
        finish_reason: `stop` or `length`.
        stop_string: The stop string of the request that ended the answer, if one did.
    """

    answer_name: str
    prompt_tokens: int
    token_ids: list[int]
    logprobs: np.ndarray
    sampled_text: str
    finish_reason: str
    stop_string: str = ""

    @property
    def text(self) -> str:
        """The text that the agent gets: up to the stop string."""
        return (
            self.sampled_text.partition(self.stop_string)[0]
            if self.stop_string
            else self.sampled_text
        )

    @property
    def usage(self) -> dict[str, int]:
        n = len(self.token_ids)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": n,
            "total_tokens": self.prompt_tokens + n,
        }


class AgentRequest(msgspec.Struct):
    """A request for an answer, independent of its protocol.

    Attributes:
        messages: The conversation, in the form of `/v1/chat/completions`.
        tools: The tools that the answer may call, in the same form.
        max_tokens: Limit of new tokens.
        stop_strings: Strings that end the answer and are not returned.
        template_args: Variables of the chat template, in addition to the episode's.
        single_tool_call: True to return only the first tool call of an answer.
        dialect_request: The request in its own protocol, for whatever else that needs in
            order to answer.
        stored_conversation: The conversation that a later request may continue by the answer's id;
            None if it is not stored.
    """

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
    """A response to a request, independent of its protocol.

    `message` is in the form of `/v1/chat/completions`. `decode_tokens()` returns the text of
    each sampled token.
    """

    id: str
    model: str
    answer: SampledAnswer
    message: dict[str, Any]
    decode_tokens: Callable[[], list[str]]

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        return self.message.get("tool_calls") or []


StoredConversations = Mapping[str, Sequence[Mapping[str, Any]]]
"""Conversations of the session, by the id of their last answer."""


class ApiDialect(msgspec.Struct, frozen=True):
    """One protocol of the endpoint.

    Attributes:
        id_prefix: Prefix of its answers' ids.
        parse_request: Translates a request; raises `ApiError`.
        build_body: Returns the body of an answer.
        iter_events: Yields the same body as a stream: the name of each event, if events have
            names, and its data.
        stream_end: Bytes that end the stream.
    """

    id_prefix: str
    parse_request: Callable[[Any, EpisodeConfig, StoredConversations], AgentRequest]
    build_body: Callable[[AgentRequest, AgentResponse], dict[str, Any]]
    iter_events: Callable[[AgentRequest, dict[str, Any]], Iterator[tuple[str, dict[str, Any]]]]
    stream_end: bytes = b""


NEUTRAL_SAMPLING_VALUES: dict[str, tuple[Any, ...]] = {
    "temperature": (),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
}
"""Sampling parameters that a request may set only to the episode's own values, and the values with
which they request nothing."""
MAX_STOP_STRINGS = 16


NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "use_beam_search": (False,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (False,),
    "echo": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
}
"""Parameters of all protocols that cannot be granted, and the values with which they
request nothing."""
IGNORED_PARAMETERS = frozenset(
    {
        "model",
        "user",
        "metadata",
        "store",
        "seed",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "prediction",
        "cache_control",
        "inference_geo",
        "speed",
        "diagnostics",
        "user_profile_id",
        "workspace_id",
        "client_metadata",
        "priority",
        "request_id",
        "session_id",
        "cache_salt",
        "spaces_between_special_tokens",
        "stream_interval",
    }
)
"""Parameters that change neither a prompt nor an answer, and are accepted with any value."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """The supported fields of `stream_options`. The padding and the counts
    between are never sent."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


def parse_request_body(
    request_type: Any,
    body: Any,
    settings: EpisodeConfig,
    neutral_values: Mapping[str, tuple[Any, ...]],
) -> Any:
    """Convert `body` to a `request_type`. Raises `ApiError` for a body that is malformed or
    cannot be granted.

    `neutral_values` maps each further parameter of the protocol that cannot be granted to the
    values that request nothing; None always is one. Any parameter that is neither known nor in
    `IGNORED_PARAMETERS` is refused by name.
    """
    if not isinstance(body, Mapping):
        raise ApiError("the body must be a JSON object")
    _check_sampling(body, settings)
    neutral = {**NEUTRAL_VALUES, **neutral_values}
    known = {*request_type.__struct_fields__, *NEUTRAL_SAMPLING_VALUES, *IGNORED_PARAMETERS}
    for name, asked in body.items():
        if asked is not None and name not in known and asked not in neutral.get(name, ()):
            raise ApiError(
                f"{name:.100} = {format_value(asked)} is not supported: episodes are "
                "trained on what the policy itself samples from the prompt of its chat "
                "template. Leave it out.",
                param=name,
                code="unsupported_parameter",
            )
    try:
        return msgspec.convert(body, request_type)
    except msgspec.ValidationError as error:
        raise ApiError(str(error)) from error


def refuse_unknown_fields(
    value: Mapping[str, Any], known: Collection[str], where: str = ""
) -> None:
    """Raise `ApiError` that names the first field of `value` which is not `known` and
    says something. `where` is the place of `value` in the body; empty for the body of a
    call of our own."""
    for name, given in value.items():
        if name not in known and given is not False and given not in (None, "", [], {}):
            if not where:
                raise ApiError(f"{name:.100} is not a field of this call: leave it out", param=name)
            fix = NOT_SHOWN_OF_A_MESSAGE.get(name, "leave it out")
            raise ApiError(
                f"{where}.{name:.100} is not shown to the model: {fix}",
                param=where.partition("[")[0],
            )


def _check_sampling(body: Mapping[str, Any], settings: EpisodeConfig) -> None:
    """Raise `ApiError` for a request with sampling parameters other than the episode's."""
    for name, neutral_values in NEUTRAL_SAMPLING_VALUES.items():
        asked = body.get(name)
        value = getattr(settings, name)
        if asked is None or asked in neutral_values or _is_same_value(asked, value):
            continue
        raise ApiError(
            f"{name} = {format_value(asked)}: this episode is sampled at episode.{name} = "
            f"{value!r}. Leave it out, or change that setting of the run.",
            param=name,
            code="unsupported_value",
        )


def _is_same_value(asked: Any, value: Any) -> bool:
    if isinstance(asked, float) and isinstance(value, (int, float)):
        return math.isclose(asked, value, rel_tol=1e-6)
    return bool(asked == value)


def parse_stop_strings(stop: str | Sequence[str] | None, param: str = "stop") -> tuple[str, ...]:
    """Return the strings that end an answer; raises `ApiError` for too many.

    They change where an answer ends, and no token before that.
    """
    found = tuple(filter(None, [stop] if isinstance(stop, str) else stop or ()))
    if len(found) > MAX_STOP_STRINGS:
        raise ApiError(
            f"{param} has {len(found)} strings, more than {MAX_STOP_STRINGS}", param=param
        )
    return found


class _ToolFunction(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(msgspec.Struct):
    function: _ToolFunction
    type: Literal["function"] = "function"


def select_tools(
    tools: Sequence[Mapping[str, Any]] | None, choice: Any
) -> Sequence[Mapping[str, Any]]:
    """Return the tools that an answer may call, given OpenAI's `tool_choice`.

    Raises `ApiError` for a choice that would force a call, and for tools that are no functions.
    """
    if choice not in (None, "auto", "none"):
        raise ApiError(
            f"tool_choice = {format_value(choice)} cannot be enforced: leave it out",
            param="tool_choice",
            code="unsupported_parameter",
        )
    try:
        msgspec.convert(tools or [], list[_Tool])
    except msgspec.ValidationError as error:
        raise ApiError(f"tools must be functions: {error}", param="tools") from error
    return () if choice == "none" else tools or ()


_TOOL_FIELDS = ("type", "name", "description", "strict", "cache_control", "eager_input_streaming")
"""Fields of a tool of another protocol that are shown, or change nothing."""


def translate_tools(
    tools: Sequence[Mapping[str, Any]] | None, kinds: Sequence[str | None], parameters_field: str
) -> list[dict[str, Any]]:
    """Return tools of another protocol in the form of `/v1/chat/completions`.

    Raises `ApiError` for a tool whose `type` is none of `kinds`: somebody other than the
    agent would run it.
    """
    translated = []
    for i, tool in enumerate(tools or ()):
        if tool.get("type") not in kinds or not isinstance(tool.get("name"), str):
            raise ApiError(
                f"tools[{i}] has type {format_value(tool.get('type'))}: only named functions that "
                "the agent runs itself are supported",
                param="tools",
            )
        refuse_unknown_fields(tool, (*_TOOL_FIELDS, parameters_field), f"tools[{i}]")
        function: dict[str, Any] = {"name": tool["name"]}
        if tool.get("description"):
            function["description"] = tool["description"]
        function["parameters"] = tool.get(parameters_field) or {"type": "object", "properties": {}}
        translated.append({"type": "function", "function": function})
    return translated


def build_tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a tool call in the form of `/v1/chat/completions`."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def join_text_parts(content: Any, kinds: Sequence[str], where: str) -> str:
    """Return a text, or the joined texts of parts whose `type` is one of `kinds`. Raises
    `ApiError` for others."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [
        p.get("text") if isinstance(p, Mapping) and p.get("type") in kinds else None for p in parts
    ]
    if not all(isinstance(text, str) for text in texts):
        raise ApiError(f"{where}: only text is supported", param=where.partition("[")[0])
    return "".join(texts)  # type: ignore[arg-type]


def parse_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Convert messages of the API to those of templates: text parts are joined, arguments of tool
    calls are objects.

    Raises `ApiError` for content that is not text, and for fields that the model
    would not be shown.
    """
    return MessageParser().parse_messages(messages)


class MessageParser:
    """An incremental `parse_messages` for requests that repeat the conversation.

    The prefix that a request shares with the one before is not parsed again.
    """

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


_MESSAGE_FIELDS = ("role", "content", "tool_calls", "tool_call_id", "name", *REASONING_KEYS)
_IGNORED_MESSAGE_FIELDS = ("id", "annotations", "cache_control", "provider_specific_fields")
"""Fields that clients send with a message and that say nothing which the model would be shown."""
_ROLES = ("system", "developer", "user", "assistant", "tool")


def _parse_message(index: int, message: Mapping[str, Any]) -> Message:
    role = message.get("role")
    where = f"messages[{index}]"
    if role not in _ROLES:
        fix = (
            "write it as a message of the role `tool`"
            if role == "function"
            else f"it must be one of {', '.join(_ROLES)}"
        )
        raise ApiError(f"{where} has role {format_value(role)}: {fix}", param="messages")
    refuse_unknown_fields(message, (*_MESSAGE_FIELDS, *_IGNORED_MESSAGE_FIELDS), where)
    content = message.get("content")
    if isinstance(content, list):
        content = join_text_parts(content, ("text",), where)
    texts = {
        "content": content,
        **{name: message.get(name) for name in ("tool_call_id", "name", *REASONING_KEYS)},
    }
    for name, text in texts.items():
        if text is not None and not isinstance(text, str):
            raise ApiError(f"{where}.{name} must be text", param="messages")
    thoughts = {text for name in REASONING_KEYS if (text := texts[name])}
    if len(thoughts) > 1 or (thoughts and role != "assistant"):
        raise ApiError(
            f"{where} has a thought that the assistant did not have, or several: give one in "
            f"`{REASONING_KEYS[0]}` of a message of the assistant",
            param="messages",
        )
    return Message(
        role="system" if role == "developer" else role,
        content=content or "",
        tool_calls=_parse_calls(message.get("tool_calls"), f"{where}.tool_calls"),
        tool_call_id=texts["tool_call_id"] or "",
        name=texts["name"] or "",
        reasoning_content=next(iter(thoughts), ""),
    )


class _CalledFunction(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class _ToolCall(msgspec.Struct):
    function: _CalledFunction
    id: str | None = None
    type: Literal["function"] | None = None


def _parse_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Return tool calls with their arguments as objects. Raises `ApiError` for anything else."""
    try:
        msgspec.convert(calls or [], list[_ToolCall])
    except msgspec.ValidationError as error:
        raise ApiError(
            f"{where} must be a list of function calls: {error}", param="messages"
        ) from error
    return list(map(normalize_call, calls or ()))


class SampledTexts:
    """A record of the sampled text behind every message that the agent got.

    When such a message comes back in a later request, it gets its sampled text again, also where
    the client has put the thought into a field of its own.
    """

    def __init__(self) -> None:
        self._text_by_message: dict[Any, str] = {}

    def add(self, text: str, message: Message) -> None:
        """Record that the policy sampled `text`, of which the agent got `message`."""
        thoughts, spoken = split_reasoning(message.content)
        apart = msgspec.structs.replace(
            message, content=spoken, reasoning_content=_THOUGHT_TAG.sub("", thoughts)
        )
        for shown in (message, apart):
            self._text_by_message[_build_message_key(shown, with_ids=True)] = text
            self._text_by_message[_build_message_key(shown, with_ids=False)] = text

    def restore_sampled_text(self, message: Message) -> Message:
        """Return `message` with its sampled text if it repeats an answer unchanged, otherwise
        `message` itself.

        Among several answers that read the same, the one whose calls have the same ids is taken,
        then the newest.
        """
        if message.role != "assistant":
            return message
        for ids in (True, False):
            text = self._text_by_message.get(_build_message_key(message, ids))
            if text is not None:
                return Message("assistant", text)
        return message


_THOUGHT_TAG = re.compile("</?think>")


def _build_message_key(message: Message, with_ids: bool) -> Any:
    calls = tuple(
        (
            call.get("id") if with_ids else None,
            call["function"]["name"],
            msgspec.json.encode(call["function"]["arguments"], order="sorted"),
        )
        for call in message.tool_calls
    )
    # White space around the text beside a call, or behind a thought, was not returned; frameworks
    # drop such content altogether, or send "".
    thought = message.reasoning_content.strip()
    return message.content.strip() if calls or thought else message.content, calls, thought
