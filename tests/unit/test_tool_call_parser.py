"""Tool calls in what a policy really writes: the same bracket a thousand times, and calls that it only thinks about."""

import json
import re
import time

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from r3async.envs.tool_call_parser import parse_tool_calls, run_tool_calls, split_reasoning
from r3async.rollout.endpoint.protocol import parse_messages
from r3async.untrusted import MalformedError, decode_json
from tests.helpers.serving import ADD, SETTINGS, ask, talking, user

PAY = {"type": "function", "function": {"name": "pay", "parameters": {}}}
DEEP = 1200
DEEP_ANSWERS = {
    "list": "[" * DEEP,
    "object": '{"a":' * DEEP,
    "closed list": "[" * DEEP + "]" * DEEP,
    "tagged list": "<tool_call>" + "[" * DEEP + "</tool_call>",
    "tagged object": '<tool_call>{"name":"pay","arguments":' + '{"a":' * DEEP + "</tool_call>",
    "as deep as Python reads": '<tool_call>{"name":"pay","arguments":'
    + '{"a":' * 900
    + "1"
    + "}" * 900
    + "}</tool_call>",
    "digits": '<tool_call>{"name":"pay","arguments":{"a":' + "1" * 5000 + "}}</tool_call>",
}


def tagged(name: str = "pay", arguments: str = "{}") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def names(text: str, **options: bool) -> list[str]:
    return [call["function"]["name"] for call in parse_tool_calls(text, [PAY], **options)[1]]


async def made(text: str, tools: list = [PAY], **options: bool) -> list[tuple[str, dict]]:  # noqa: B006
    calls = []

    async def call(name: str, arguments: dict) -> str:
        calls.append((name, arguments))
        return "done"

    await run_tool_calls(text, tools, call, seconds=1, **options)
    return calls


@pytest.mark.parametrize("text", DEEP_ANSWERS.values(), ids=list(DEEP_ANSWERS))
async def test_an_answer_that_no_decoder_reads_is_a_text(text):
    assert parse_tool_calls(text, [PAY]) == (text, [])
    assert await made(text) == []


UNREADABLE = {"list": "[" * DEEP, "digits": "1" * 5000, "object": '{"a":' * DEEP, "surrogate": "\ud800"}


@pytest.mark.parametrize("arguments", UNREADABLE.values(), ids=list(UNREADABLE))
def test_arguments_that_cannot_be_read_come_back_as_the_text_that_they_are(arguments):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    _, message = parse_messages([user("x"), {"role": "assistant", "content": "", "tool_calls": [call]}])
    assert message.tool_calls[0]["function"]["arguments"] == arguments


@pytest.mark.parametrize("text", [DEEP_ANSWERS["list"], DEEP_ANSWERS["tagged object"]], ids=["list", "tagged object"])
async def test_the_endpoint_answers_with_an_answer_that_no_decoder_reads(text):
    roomy = msgspec.structs.replace(SETTINGS, max_new_tokens=9000, max_total_tokens=9900)
    async with talking([text], settings=roomy) as (_, session, client):
        assert (await ask(client, [user("hi")], tools=[ADD])).choices[0].message.content == text
        assert session.turn_count == 1


@pytest.mark.parametrize(
    "text", ["<tool_call>" * 8000, "```json" + " \n" * 8000 + "x", "</think>" * 8000, "<tool_call>{" * 8000]
)
def test_an_answer_that_repeats_one_token_is_read_at_once(text):
    """The collapse of a policy. An expression that backtracks took 11 s for it, on the event loop."""
    began = time.process_time()
    assert parse_tool_calls(text, [PAY]) == (text, [])
    assert time.process_time() - began < 2


REPEATED = {
    "calls that end far away": ("<tool_call>{</think>", "</tool_call>"),
    "calls that never end": ("<tool_call></think>", ""),
    "texts that end far away": ('<tool_call>{"a": "</think>', "</tool_call>"),
    "texts in texts": ('<tool_call>{"a": "</think>"', '"}</tool_call>'),
    "escaped quotes": ('<tool_call>{"\\\\"\\"</think>', "</tool_call>"),
    "calls between thoughts": ("<think>a</think>b<tool_call>c ", ""),
    "tags within one call": ('<tool_call>{"name": "pay", "arguments": {"a": "', "</think>", '"}}</tool_call>'),
    "thoughts": ("<think>a</think>b", ""),
}
"""Texts as `repeated, end` or `begin, repeated, end`."""


def seconds_to_read(parts, count, read):
    begin, repeated, end = parts if len(parts) == 3 else ("", *parts)
    text, times = begin + repeated * count + end, []
    for _ in range(3):
        began = time.process_time()
        read(text)
        times.append(time.process_time() - began)
    return min(times)


@pytest.mark.parametrize("parts", REPEATED.values(), ids=list(REPEATED))
def test_an_answer_that_is_four_times_as_long_takes_some_four_times_as_long_to_read(parts):
    """Where each tag reads the answer again, the ratio is 16."""
    for read in (split_reasoning, lambda text: parse_tool_calls(text, [PAY])):
        assert seconds_to_read(parts, 12_000, read) < 8 * seconds_to_read(parts, 3000, read) + 0.001


def split_by_reading_each_tag_anew(text, thinking):
    """`split_reasoning` as it is defined, in time that is quadratic in the text's length."""
    thoughts, spoken, begin, at = "", "", 0, 0
    while tag := re.compile("</?think>").search(text, at):
        at = tag.end()
        start = text.rfind("<tool_call>", begin, tag.start())
        end = text.find("</tool_call>", tag.start()) if start >= 0 else -1
        if not thinking and end >= 0 and is_call(text[start + len("<tool_call>") : end]):
            at = end + len("</tool_call>")
        elif tag[0] == "</think>":
            thoughts += ("" if thinking else spoken) + text[begin:at]
            spoken, begin, thinking = spoken if thinking else "", at, False
        elif not thinking:
            spoken, begin, thinking = spoken + text[begin : tag.start()], tag.start(), True
    return (thoughts + text[begin:], spoken) if thinking else (thoughts, spoken + text[begin:])


def is_call(text):
    try:
        value = decode_json(text.strip())
    except MalformedError:
        return False
    return (
        isinstance(value, dict)
        and isinstance(value.get("name"), str)
        and isinstance(value.get("arguments", value.get("parameters", {})), dict)
    )


PIECES = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    '{"name": "a", "arguments": {',
    '"b": "',
    '"',
    "}",
    "}}",
]
PIECES += [
    '{"name": "a"}',
    "{",
    "[",
    "]",
    ",",
    "\\",
    " ",
    "\n",
    "\u2003",
    "1",
    "NaN",
    "é",
    '{"name": "a", "x": NaN}',
    "\ud800",
]


@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join), st.booleans())
@example('<tool_call>{"name": "a", "x": "</tool_call><think>"}</tool_call>', False)
@example('<tool_call> \u2003{"name": "a", "x": "<think>"}\x1f</tool_call></think>', False)
@example('<tool_call>{"name": "a", "x": NaN, "y": "<think>"}</tool_call>', False)
@settings(max_examples=300)
def test_reasoning_ends_where_reading_each_tag_anew_says(text, thinking):
    assert split_reasoning(text, thinking=thinking) == split_by_reading_each_tag_anew(text, thinking)


ALL = '{"all": true}'
THOUGHT = f"<think>Should I {tagged(arguments=ALL)}? No.</think>"


def test_a_thought_about_a_call_is_no_call_and_is_handed_out_as_it_is():
    text = THOUGHT + "I do not pay."
    assert parse_tool_calls(text, [PAY]) == (text, [])


async def test_only_the_call_behind_the_thought_is_made():
    text = THOUGHT + tagged(arguments='{"all": false}')
    assert await made(text) == [("pay", {"all": False})]
    content, (call,) = parse_tool_calls(text, [PAY])
    assert (content, call["function"]["arguments"]) == (THOUGHT, '{"all":false}')


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (f"Should I {tagged()}? No.\n</think>\n\nI do not pay.", 0),
        (f"Should I {tagged()}? Yes.\n</think>\n\n{tagged()}", 1),
        (f"<think>Should I {tagged()}", 0),
        (f"{tagged()}<think>Should I {tagged()}</think>{tagged()}", 2),
        (f"<think>a</think>{tagged()}<think>{tagged()}", 1),
        (f"one {tagged()} </think> two {tagged()} </think> {tagged()}", 1),
        ('<think>hm</think>\n{"name": "pay", "arguments": {}}', 1),
        ('{"name": "pay", "arguments": {}}</think>', 0),
        (f"I could write <tool_call> here.</think>{tagged()}", 1),
    ],
)
async def test_what_stands_within_a_thought_is_no_call(text, calls):
    assert len(names(text)) == len(await made(text)) == calls


@pytest.mark.parametrize("inside", ["a <think> tag", "</think>", "<think>x</think>"])
async def test_a_tag_in_the_arguments_of_a_call_opens_no_thought(inside):
    arguments = json.dumps({"text": inside})
    assert await made(f"Now. {tagged(arguments=arguments)} {tagged()}") == [("pay", {"text": inside}), ("pay", {})]


async def test_an_answer_that_was_cut_within_the_thought_of_its_prompt_makes_no_call():
    text = f"Should I {tagged()} or"
    assert names(text) == ["pay"], "nothing in the text says so"
    assert (names(text, thinking=True), await made(text, thinking=True)) == ([], [])
    assert names(f"{text}</think>{tagged()}", thinking=True) == ["pay"]


@pytest.mark.parametrize("thinking", [False, True])
def test_no_character_of_an_answer_is_lost(thinking):
    for text in ("", "a", THOUGHT, f"a{THOUGHT}b", "a</think>b<think>c", f"{tagged()}</think>{tagged()}<think>"):
        thoughts, spoken = split_reasoning(text, thinking=thinking)
        assert sorted(thoughts + spoken) == sorted(text)


async def test_a_call_of_a_tool_that_was_not_offered_is_a_text_in_either_form():
    bare = '{"name": "steal", "arguments": {}}'
    for text in (bare, tagged("steal"), tagged() + tagged("steal")):
        assert parse_tool_calls(text, [PAY]) == (text, [])


async def test_an_environment_tells_the_policy_that_it_has_no_such_tool():
    assert await made(tagged("steal")) == [("steal", {})]


ODD_TOOLS = [[{"type": "function"}], [{"function": 3}], [{"function": {"name": ["pay"]}}], [{"name": "pay"}]]


@pytest.mark.parametrize("tools", ODD_TOOLS)
def test_tools_of_any_shape_can_be_offered(tools):
    assert len(parse_tool_calls(tagged(), tools)[1]) == ("name" in tools[0])
