"""Forms in which chat templates take tool calls, and checks that a template has written the calls.

Templates disagree about the calls in a history: one walks through the arguments, another joins them
to a text, and a third writes calls only where the message's `content` is null. A template that gets
another form fails, or leaves the call out without a word. So a short conversation is rendered in
each form, and the first that the template writes is used from then on.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from r3async.envs import Message
from r3async.untrusted import MalformedError, decode_json

MARKER_CHARACTERS = range(0xF0000, 0xFFFFE)
"""Private-use characters, each of which marks one place of a conversation to show where a
template writes it."""
_PROBE_NAME = "quokka"
_PROBE_ARGUMENTS = {"wombat": "numbat", "bilby": 7}
_PROBE_CALL = {
    "id": "abcde1234",
    "type": "function",
    "function": {"name": _PROBE_NAME, "arguments": _PROBE_ARGUMENTS},
}
_PROBE_RESULT = Message("tool", "done", tool_call_id="abcde1234")
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "echidna",
        "description": "an animal",
        "parameters": {"type": "object", "properties": {}},
    },
}
"""Tool that is offered while a template is asked for its form, if tools are offered at all."""


class CallForm(msgspec.Struct, frozen=True):
    """A form of messages with tool calls.

    Attributes:
        has_text_arguments: True for arguments as a JSON text, False for an object.
        has_null_content: True if an empty `content` is null, False if it is "".
    """

    has_text_arguments: bool = False
    has_null_content: bool = False

    def build_message(self, message: Message) -> dict[str, Any]:
        """Return the message as the template takes it. Arguments that are no JSON object
        stay as they are."""
        shown = message.to_template_dict()
        if not message.tool_calls:
            return shown
        if self.has_null_content and not message.content:
            shown["content"] = None
        return shown | {"tool_calls": [self._build_call(call) for call in message.tool_calls]}

    def _build_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        normal = normalize_call(call)
        function = normal["function"]
        if self.has_text_arguments and isinstance(function["arguments"], dict):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        return normal


CALL_FORMS = tuple(
    CallForm(text, null) for null, text in itertools.product((False, True), repeat=2)
)
"""All forms, in the order in which a template is asked for them."""
RenderForm = Callable[[Sequence[Message], CallForm], str]
"""Function that renders messages in a form. Raises `ValueError` if the template refuses them."""


def normalize_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call in OpenAI's form with its arguments as an object.

    No arguments, an empty text and null are an empty object. Arguments that are no JSON object
    stay as they are.
    """
    function = call.get("function")
    if not isinstance(function, Mapping):
        function = {name: value for name, value in call.items() if name not in ("id", "type")}
        call = {name: value for name, value in call.items() if name in ("id", "type")}
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    if isinstance(arguments, str):
        with contextlib.suppress(MalformedError):
            decoded = decode_json(arguments)
            arguments = decoded if isinstance(decoded, dict) else arguments
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def detect_call_form(render: RenderForm) -> CallForm | None:
    """Return the form in which the template writes most of a call, and the first of equals; None
    if it writes none.

    Arguments as Python prints an object, which no model writes, count less than arguments in JSON
    or in tags, and the name alone counts least.
    """
    written: dict[int, CallForm] = {}
    for form, behind in itertools.product(CALL_FORMS, ([_PROBE_RESULT], [])):
        messages = [
            Message("user", "hello"),
            Message("assistant", "", tool_calls=[_PROBE_CALL]),
            *behind,
        ]
        try:
            text = render(messages, form)
        except ValueError:
            continue
        if _PROBE_NAME in text:
            is_complete = not find_missing_part(_PROBE_CALL, remove_whitespace(text))
            written.setdefault(
                is_complete + (is_complete and str(_PROBE_ARGUMENTS) not in text), form
            )
    return written[max(written)] if written else None


def describe_unwritten_call(
    messages: Sequence[Message], text: str, form: CallForm | None, render: RenderForm
) -> str:
    """Return what the template has left out of the calls of `messages` in `text`, and how to give
    it; "" for nothing.

    `render` renders in `form`; it is called once more, with a mark behind each call's name, because
    a name may occur elsewhere.
    """
    packed = remove_whitespace(text)
    for i, j, call in [
        (i, j, call) for i, m in enumerate(messages) for j, call in enumerate(m.tool_calls)
    ]:
        part = find_missing_part(call, packed)
        if part:
            return (
                f"{_describe_missing_call(messages[i], i, j, form)} ({part!r:.80} is "
                "not in its text)"
            )
    marks = _mark_names(messages, text)
    try:
        marked = render(_replace_names(messages, marks), form or CALL_FORMS[0])
    except ValueError:
        return ""
    if "".join(character for character in marked if character not in marks.values()) != text:
        return ""  # it decides by names, so that another name shows nothing
    missing = next((place for place, mark in marks.items() if mark not in marked), None)
    return "" if missing is None else _describe_missing_call(messages[missing[0]], *missing, form)


def _mark_names(messages: Sequence[Message], text: str) -> dict[tuple[int, int], str]:
    """Return an unused character for each call, by the indices of its message and
    of the call in it."""
    used = set(text)
    free = (character for character in map(chr, MARKER_CHARACTERS) if character not in used)
    places = [(i, j) for i, message in enumerate(messages) for j in range(len(message.tool_calls))]
    return dict(zip(places, free, strict=False))


def _replace_names(
    messages: Sequence[Message], marks: Mapping[tuple[int, int], str]
) -> list[Message]:
    marked = []
    for i, message in enumerate(messages):
        calls = list(map(normalize_call, message.tool_calls))
        for j, call in enumerate(calls):
            call["function"]["name"] = f"{call['function'].get('name', '')}{marks.get((i, j), '')}"
        marked.append(msgspec.structs.replace(message, tool_calls=calls) if calls else message)
    return marked


def _describe_missing_call(message: Message, index: int, number: int, form: CallForm | None) -> str:
    name = normalize_call(message.tool_calls[number])["function"].get("name")
    if form is None:
        fix = (
            "it writes no calls in any form: give the model directory a chat_template.jinja that "
            "does, or write the call into `content`, as the model is to say it"
        )
    elif form.has_null_content and message.content:
        fix = (
            "it writes calls only beside a `content` that is null: write the text as a "
            "message of its own"
        )
    elif number:
        fix = "write each call as a message of its own"
    else:
        fix = "write it into `content`, as the model is to say it"
    return (
        f"the chat template leaves the call of {name!r:.80} out of message {index} (`tool_calls`), "
        f"or changes it: {fix}"
    )


def describe_odd_arguments(messages: Sequence[Message]) -> str:
    """Return the end of an error of the template that names arguments that are no JSON
    object; "" if all are."""
    for i, message in enumerate(messages):
        for call in map(normalize_call, message.tool_calls):
            arguments = call["function"]["arguments"]
            if not isinstance(arguments, dict):
                return (
                    f"; the arguments of a call in message {i} are no JSON object, write them as "
                    f"one: {arguments!r:.80}"
                )
    return ""


def find_missing_part(call: Mapping[str, Any], packed: str) -> str:
    """Return the name or the first part of the arguments of `call` that `packed` does not have;
    "" if it has all.

    `packed` is a text without white space, which is left to the template, as is how
    it escapes texts.
    """
    function = normalize_call(call)["function"]
    for part in _iter_texts([function.get("name"), function["arguments"]]):
        plain = json.dumps(part, ensure_ascii=False)[1:-1]
        ascii_text = json.dumps(part)[1:-1]
        if not any(
            remove_whitespace(form) in packed
            for form in (part, plain, ascii_text, repr(part)[1:-1])
        ):
            return part
    return ""


def remove_whitespace(text: str) -> str:
    """Return `text` without its white space."""
    return "".join(text.split())


def _iter_texts(value: Any) -> Iterator[str]:
    """Yield the texts and numbers in a value of JSON."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from (name, *_iter_texts(each))
    elif isinstance(value, list):
        for each in value:
            yield from _iter_texts(each)
    elif isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool)):
        yield str(value)
