"""Tool calls in what a policy really writes: the same bracket a thousand times, and calls that it only thinks about."""

import json
import time

import msgspec
import pytest

from r3async.envs.tool_calls import parse_tool_calls, run_tool_calls, split_reasoning
from r3async.rollout.endpoint.protocol import parse_messages
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
