"""What a request may ask for: sampling as the episode has it, where an answer ends, and variables of the chat template."""

import openai
import pytest

from r3async.config import EpisodeConfig
from r3async.rollout.chat import ChatRenderer, TemplateError, find_template_variables
from r3async.rollout.endpoint.protocol import ApiError
from r3async.rollout.endpoint.server import DIALECT_BY_PATH
from tests.helpers.serving import (
    HERMES,
    answer_ids,
    anthropic_client,
    ask,
    finished,
    renderer,
    talking,
    trained_tokens,
    user,
)

EFFORT = "{% if reasoning_effort is defined %}<|system|>{{ reasoning_effort }}<|end|>{% endif %}" + HERMES
THINKING = "{% generation %}{% endgeneration %}<|system|>{{ enable_thinking | default(true) }}<|end|>" + HERMES
SETTINGS = EpisodeConfig(
    max_turns=8, max_new_tokens=96, max_prompt_tokens=900, max_total_tokens=1000, timeout=20, stop=["own"]
)


@pytest.mark.parametrize("path", DIALECT_BY_PATH)
def test_sampling_values_that_request_nothing_or_are_the_episodes_are_accepted_in_each_protocol(path):
    asked = {"max_tokens": 9, "input": "a", "messages": [user("a")], "top_p": 1, "min_p": 0}
    settings = EpisodeConfig(top_p=0.9, top_k=5, min_p=0.1)
    for values in ({"top_k": 0}, {"top_k": -1}, {"top_k": 5}, {"top_p": 0.9}):
        assert DIALECT_BY_PATH[path].parse_request(asked | values, settings, {})
    for values, message in (({"top_k": 7}, "top_k = 7"), ({"top_p": 0.8}, r"episode\.top_p = 0\.9")):
        with pytest.raises(ApiError, match=message):
            DIALECT_BY_PATH[path].parse_request(asked | values, settings, {})


def stopping(*texts):
    """A script of `texts`, each of which ends with the byte that completes a stop string of the request."""

    def script(request, index):
        text = texts[index % len(texts)]
        ends = [text.find(stop) + len(stop) for stop in request.stop_strings if stop in text]
        return renderer().encode(text[: min(ends)]) if ends else answer_ids(renderer(), text)[0]

    return script


def one_row(session):
    (sample,) = finished(session).samples
    decode = session.renderer.decode
    return decode(sample.table["token_ids"].tolist()), decode(trained_tokens(sample.table))


async def test_a_stop_string_is_not_handed_out_was_sampled_and_what_closes_the_turn_is_not_trained():
    script = stopping("Act: add.Observation: no", "12.", "So 3.;")
    async with (
        talking(script, HERMES, SETTINGS) as (server, session, client),
        anthropic_client(server, session.key) as other,
    ):
        talk = [user("1+2")]
        first = await ask(client, talk, stop=["Observation:", "xyz"])
        assert (first.choices[0].message.content, first.choices[0].finish_reason) == ("Act: add.", "stop")
        talk += [{"role": "assistant", "content": "Act: add."}, user("3")]
        second = await other.messages.create(model="m", max_tokens=50, messages=talk, stop_sequences=["Observation:"])
        assert (second.content[0].text, second.stop_reason, second.stop_sequence) == ("12.", "end_turn", None)
        talk += [{"role": "assistant", "content": second.content[0].text}, user("so?")]
        asking = other.messages.stream(model="m", max_tokens=50, messages=talk, stop_sequences=["3.", ".;"])
        async with asking as stream:
            third = await stream.get_final_message()
        assert (third.content[0].text, third.stop_reason, third.stop_sequence) == ("So ", "stop_sequence", "3.")
        assert [call.stop_strings for call in server._engine.requests] == [
            ("own", "Observation:", "xyz"),
            ("own", "Observation:"),
            ("own", "3.", ".;"),
        ]
        whole, trained = one_row(session)
    assert trained == "Act: add.Observation:12.<|end|>So 3."
    assert "<|assistant|>Act: add.Observation:<|end|><|user|>3<|end|><|assistant|>12.<|end|>" in whole, whole


async def test_a_stop_string_ends_a_completion_and_the_episodes_own_is_handed_out():
    async with talking(stopping("a;b", "its own"), settings=SETTINGS) as (_, session, client):
        first = await client.completions.create(model="m", prompt="x", max_tokens=50, stop=";")
        assert (first.choices[0].text, first.choices[0].finish_reason) == ("a", "stop")
        second = await ask(client, [user("x")], stop="")
        assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("its own", "stop")
        for wrong in ([3], {"a": 1}):
            with pytest.raises(openai.BadRequestError, match="stop"):
                await ask(client, [user("x")], stop=wrong)
        assert session.turn_count == 2


async def test_a_tool_call_before_a_stop_string_is_a_call():
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    async with talking(stopping(f"{call}STOP"), HERMES) as (_, session, client):
        answer = await ask(client, [user("x")], tools=[tool], stop="STOP")
        assert answer.choices[0].finish_reason == "tool_calls"
        assert one_row(session)[1] == f"{call}STOP"


async def test_each_protocols_effort_is_shown_to_the_model_where_its_template_knows_it():
    async with (
        talking(["a", "b", "c", "d"], EFFORT) as (server, session, client),
        anthropic_client(server, session.key) as other,
    ):
        talk = [user("x")]
        await ask(client, talk, reasoning_effort="low")
        answer = await client.responses.create(model="m", input="x", reasoning={"effort": "high", "summary": "auto"})
        assert answer.reasoning.effort == "high"
        await other.messages.create(model="m", max_tokens=9, messages=talk, output_config={"effort": "max"})
        await ask(client, talk, extra_body={"chat_template_kwargs": {"reasoning_effort": "some"}})
        counted = [
            (await other.messages.count_tokens(model="m", messages=talk, **asked)).input_tokens
            for asked in ({}, {"output_config": {"effort": "high"}})
        ]
        shown = [session.renderer.decode(call.prompt_ids.tolist()) for call in server._engine.requests]
    rest = "<|user|>x<|end|><|assistant|>"
    assert shown == [f"<|system|>{effort}<|end|>{rest}" for effort in ("low", "high", "max", "some")]
    assert counted == [len(renderer(HERMES).encode(text)) for text in (rest, shown[1])]


async def test_a_conversation_goes_on_with_the_effort_it_began_with_and_branches_with_another():
    async with talking(["one", "two", "three"], EFFORT) as (_, session, client):
        talk = [user("a")]
        for effort in ("low", "low", "high"):
            asked = ask(client, talk, reasoning_effort=effort)
            talk += [{"role": "assistant", "content": (await asked).choices[0].message.content}, user("b")]
        rows = finished(session).samples
    trained = [session.renderer.decode(trained_tokens(row.table)) for row in rows]
    assert trained == ["one<|end|>two<|end|>", "three<|end|>"]


async def test_no_effort_is_no_thinking_and_an_effort_that_cannot_be_shown_is_refused():
    async with talking(["a"], THINKING) as (server, session, client):
        await ask(client, [user("x")], reasoning_effort="none")
        (call,) = server._engine.requests
        assert session.renderer.decode(call.prompt_ids.tolist()).startswith("<|system|>False<|end|>")
        for values in ({"reasoning_effort": "low"}, {"extra_body": {"chat_template_kwargs": {"messages": []}}}):
            with pytest.raises(openai.BadRequestError, match="only enable_thinking"):
                await ask(client, [user("x")], **values)
        with pytest.raises(openai.BadRequestError, match="summary"):
            await client.responses.create(model="m", input="x", reasoning={"summary": "detailed"})


async def test_an_effort_is_the_episodes_own_where_the_run_says_so():
    chat = renderer(HERMES)
    chat.template_args["reasoning_effort"] = "high"
    assert chat.with_template_args({"reasoning_effort": "high"}) is chat
    with pytest.raises(TemplateError):
        chat.with_template_args({"reasoning_effort": "low"})


def test_what_a_template_may_be_asked_for():
    assert find_template_variables(THINKING) == {"tools", "add_generation_prompt", "enable_thinking"}
    assert find_template_variables("{% for") == frozenset()
    local = "{% set own = 1 %}{{ own }}{% for m in messages %}{% if loop.first %}{% break %}{% endif %}{{ given }}{% endfor %}"
    assert find_template_variables(local + "{{ strftime_now('%d') }}{{ range(3) }}") == {"given"}
    chat = ChatRenderer(renderer(EFFORT).tokenizer)
    assert chat.template_variables == {"reasoning_effort"}
    low = chat.with_template_args({"reasoning_effort": "low"})
    assert chat.with_template_args({"reasoning_effort": "low"}) is low
    assert low.with_template_args({"reasoning_effort": "low"}) is low
    assert low.with_template_args({"reasoning_effort": "high"}) is not chat.with_template_args(
        {"reasoning_effort": "high"}
    )
    for i in range(40):
        chat.with_template_args({"reasoning_effort": str(i)})
    assert len(chat._renderers_by_args) == 32
