"""The Responses API and Anthropic's Messages API as their own packages see them, and what any request may ask for."""

import json

import anthropic
import msgspec
import openai
import pytest

from r3async.config import ConfigError, EpisodeConfig
from r3async.rollout.endpoint.protocol import ApiError
from r3async.rollout.endpoint.server import DIALECT_BY_PATH
from r3async.rollout.endpoint.session import AgentSession
from r3async.rollout.endpoint.tool_parser_choice import detect_parser
from r3async.rollout.engine import EngineError
from r3async.rollout.renderer import ChatRenderer, TemplateError, find_template_variables
from tests.helpers.serving import (
    HERMES,
    TASK,
    answer_ids,
    anthropic_client,
    ask,
    finished,
    ready,
    renderer,
    serving,
    trained_tokens,
    user,
)
from tests.helpers.serving import talking as talking_to

PARAMETERS = {"type": "object", "properties": {"a": {}, "b": {}}}
FUNCTION = {"type": "function", "name": "add", "description": "sum", "parameters": PARAMETERS, "strict": False}
TOOL = {"name": "add", "description": "sum", "input_schema": PARAMETERS}
CHAT_TOOL = {"type": "function", "function": {"name": "add", "description": "sum", "parameters": PARAMETERS}}
CALL = '<tool_call>{"arguments":  {"b": 4, "a": 3}, "name": "add"}</tool_call>'
TWO = f"Both.{CALL}\n{CALL.replace('3', '5')}"


SETTINGS = EpisodeConfig(max_turns=8, max_new_tokens=240, max_prompt_tokens=1100, max_total_tokens=1500, timeout=20)


def talking(script, template=None, settings=SETTINGS):
    return talking_to(script, template, settings)


def one_row(session: AgentSession, *answers: str):
    """The only sample, which has these answers as they were sampled."""
    (sample,) = finished(session).samples
    table = sample.table
    assert trained_tokens(table) == [token for ids in answer_ids(session.renderer, *answers) for token in ids]
    assert table["routing_recorded"][:-1].all()
    return session.renderer.decode(table["token_ids"].tolist())


@pytest.mark.parametrize(
    ("answer", "called"),
    [(f"No {CALL}? No.", False), (f"No {CALL}?</think>Never.", False), (f"Yes?</think>So.{CALL}", True)],
    ids=["cut", "within", "behind"],
)
async def test_a_call_within_a_thought_that_the_prompt_opened_is_not_handed_out(answer, called):
    template = HERMES.replace("<|assistant|>{% endif %}", "<|assistant|><think>{% endif %}")
    assert template != HERMES
    async with talking([answer], template) as (_, _, client):
        made = await ask(client, [user("3+4")], tools=[CHAT_TOOL])
    message = made.choices[0].message
    assert [call.function.name for call in message.tool_calls or []] == ["add"] * called
    assert message.content == ("Yes?</think>So." if called else answer)


async def play_responses(client, stored: bool):
    """Two calls at once, their results, the answer; then one more question."""
    first = await client.responses.create(model="m", instructions="be", input="3+4", tools=[FUNCTION], store=stored)
    assert (first.status, first.output[0].type, first.output_text) == ("completed", "message", "Both.")
    calls = [item for item in first.output if item.type == "function_call"]
    assert [json.loads(c.arguments) for c in calls] == [{"b": 4, "a": 3}, {"b": 4, "a": 5}]
    results = [{"type": "function_call_output", "call_id": c.call_id, "output": c.name} for c in calls]
    if stored:
        going_on = {"input": results, "previous_response_id": first.id}
    else:
        going_on = {"input": [user("3+4"), *first.output, *results]}
    second = await client.responses.create(model="m", instructions="be", tools=[FUNCTION], store=stored, **going_on)
    assert second.output_text == "It is 7."
    if stored:
        going_on = {"input": "sure?", "previous_response_id": second.id}
    else:
        going_on["input"] += [*second.output, user("sure?")]
    third = await client.responses.create(model="m", instructions="be", tools=[FUNCTION], store=stored, **going_on)
    assert (third.output_text, third.usage.output_tokens) == ("yes", 4)
    return third


@pytest.mark.parametrize("stored", [True, False], ids=["by id", "by repeating it"])
async def test_a_conversation_of_responses_with_parallel_calls_is_one_row(stored):
    async with talking([TWO, "It is 7.", "yes"], HERMES) as (_, session, client):
        await play_responses(client, stored)
        text = one_row(session, TWO, "It is 7.", "yes")
    assert text.endswith(
        "<|tool|>add<|end|><|tool|>add<|end|><|assistant|>It is 7.<|end|><|user|>sure?<|end|><|assistant|>yes<|end|>"
    )
    assert "<|system|>be<|end|><|user|>3+4<|end|>" in text


async def test_a_stream_of_responses_builds_the_response_in_the_official_client():
    async with talking([TWO, "so " * 20], HERMES) as (_, session, client):
        async with client.responses.stream(model="m", input="3+4", tools=[FUNCTION]) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        first = ["created", "in_progress", "output_item.added", "content_part.added"]
        assert [e.type for e in events][:4] == [f"response.{name}" for name in first]
        assert [e.sequence_number for e in events] == sorted({e.sequence_number for e in events})
        assert final.output_text == "Both."
        assert [json.loads(item.arguments)["a"] for item in final.output[1:]] == [3, 5]
        raw = [e async for e in await client.responses.create(model="m", input="x", max_output_tokens=3, stream=True)]
        assert (raw[-1].type, raw[-1].response.output_text) == ("response.incomplete", "so ")
        assert raw[-1].response.incomplete_details.reason == "max_output_tokens"
        assert session.turn_count == 2


async def play_messages(client, system):
    talk = [user("3+4")]
    first = await client.messages.create(model="m", max_tokens=200, system=system, messages=talk, tools=[TOOL])
    assert (first.stop_reason, [block.type for block in first.content]) == (
        "tool_use",
        ["text", "tool_use", "tool_use"],
    )
    assert [block.input for block in first.content[1:]] == [{"b": 4, "a": 3}, {"b": 4, "a": 5}]
    results = [{"type": "tool_result", "tool_use_id": b.id, "content": b.name} for b in first.content[1:]]
    talk += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    second = await client.messages.create(model="m", max_tokens=200, system=system, messages=talk, tools=[TOOL])
    assert (second.content[0].text, second.stop_reason, second.usage.output_tokens) == ("It is 7.", "end_turn", 9)


async def test_a_conversation_of_anthropics_client_with_parallel_calls_is_one_row():
    async with (
        talking([TWO, "It is 7."], HERMES) as (server, session, _),
        anthropic_client(server, session.key) as client,
    ):
        await play_messages(client, [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}])
        text = one_row(session, TWO, "It is 7.")
    assert "<|system|>be<|end|><|user|>3+4<|end|>" in text
    assert "<|tool|>add<|end|><|tool|>add<|end|>" in text


async def test_a_stream_of_messages_builds_the_message_in_the_official_client():
    async with talking([TWO, "so so"], HERMES) as (server, session, _), anthropic_client(server, session.key) as client:
        async with client.messages.stream(model="m", max_tokens=200, messages=[user("3+4")], tools=[TOOL]) as stream:
            said = "".join([text async for text in stream.text_stream])
            final = await stream.get_final_message()
        assert (said, final.stop_reason) == ("Both.", "tool_use")
        assert [block.input["a"] for block in final.content[1:]] == [3, 5]
        assert final.usage.output_tokens > 10
        cut = await client.messages.create(model="m", max_tokens=2, messages=[user("x")])
        assert (cut.stop_reason, cut.content[0].text) == ("max_tokens", "so")


async def test_what_the_three_protocols_ask_is_one_conversation():
    """Begun by one, gone on with by the others: the tokens stay, because inside there is one form."""
    async with (
        talking(["one", "two", "three"]) as (server, session, client),
        anthropic_client(server, session.key) as other,
    ):
        talk = [user("a")]
        first = await ask(client, talk)
        talk += [{"role": "assistant", "content": first.choices[0].message.content}, user("b")]
        second = await other.messages.create(model="m", max_tokens=50, messages=talk)
        talk += [{"role": "assistant", "content": second.content[0].text}, user("c")]
        await client.responses.create(model="m", input=talk)
        one_row(session, "one", "two", "three")


async def test_a_client_that_takes_one_call_a_time_gets_the_first_and_the_answer_keeps_its_tokens():
    async with talking([TWO, "7"], HERMES) as (server, session, client), anthropic_client(server, session.key) as other:
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        ask = {"model": "m", "max_tokens": 200, "tools": [TOOL], "tool_choice": choice}
        first = await other.messages.create(messages=[user("3+4")], **ask)
        assert [block.type for block in first.content] == ["text", "tool_use"]
        result = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": "7"}
        talk = [user("3+4"), {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        await other.messages.create(messages=talk, **ask)
        one_row(session, TWO, "7")
    async with talking([TWO], HERMES) as (_, _, client):
        ask = {"model": "m", "parallel_tool_calls": False}
        answer = await client.responses.create(input="3+4", tools=[FUNCTION], **ask)
        assert [item.type for item in answer.output] == ["message", "function_call"]
        chat = await client.chat.completions.create(messages=[user("b")], tools=[CHAT_TOOL], **ask)
        assert len(chat.choices[0].message.tool_calls) == 1


async def test_a_streamed_chat_names_each_call_and_then_its_arguments():
    async with talking([TWO], HERMES) as (_, _, client):
        strict = {**CHAT_TOOL, "function": {**CHAT_TOOL["function"], "strict": True}}
        async with client.chat.completions.stream(model="m", messages=[user("a")], tools=[strict]) as stream:
            final = await stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert [json.loads(call.function.arguments)["a"] for call in calls] == [3, 5]
    assert len({call.id for call in calls}) == 2


class Reads:
    """An engine whose parser reads `CALL name arguments`."""

    def __init__(self, engine):
        self._engine, self.asked = engine, []

    def __getattr__(self, name):
        return getattr(self._engine, name)

    async def parse_tool_calls(self, parser, text, tools):
        self.asked.append((parser, text))
        if parser != "mistral":
            raise EngineError(f"no tool parser {parser!r}")
        words = text.split(" ")
        return ("so ", [("id-1", words[1], words[2])]) if words[0] == "CALL" else (text, [])


@pytest.mark.parametrize("name", ["auto", "mistral"])
async def test_calls_are_read_by_the_engines_parser_where_it_is_named_or_the_template_has_its_form(name):
    template = "{# [TOOL_CALLS] #}" + HERMES if name == "auto" else HERMES
    chat = renderer(template)
    engine = Reads(await ready(answer_ids(chat, 'CALL add {"a":3}', "CALL add {")))
    async with serving(engine, chat, SETTINGS, tool_parser=name) as server:
        session = server.open_session(TASK)
        async with anthropic_client(server, session.key) as client:
            ask = {"model": "m", "max_tokens": 50, "tools": [TOOL]}
            first = await client.messages.create(messages=[user("a")], **ask)
            assert [block.type for block in first.content] == ["text", "tool_use"]
            assert (first.content[1].id, first.content[1].input) == ("id-1", {"a": 3})
            result = {"type": "tool_result", "tool_use_id": "id-1", "content": "3"}
            talk = [user("a"), {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
            second = await client.messages.create(messages=talk, **ask)
            assert second.content[0].text == "CALL add {", "what is no JSON object is no call"
        one_row(session, 'CALL add {"a":3}', "CALL add {")
    assert engine.asked[0] == ("mistral", "")


async def test_a_parser_that_the_engine_does_not_have_is_named():
    chat = renderer()
    engine = await ready(answer_ids(chat, "a"))
    with pytest.raises(ConfigError, match=r"`serving\.tool_parser` = 'hermes': this engine has no tool parsers"):
        async with serving(engine, chat, SETTINGS, tool_parser="hermes"):
            pass


def test_the_form_of_calls_is_that_of_the_chat_template():
    assert detect_parser("<tool_call>\n{{ call | tojson }}\n</tool_call>") == "builtin"
    assert detect_parser("plain") == "builtin"
    assert detect_parser("<tool_call>\n<function={{ f }}>\n<parameter={{ p }}>") == "qwen3_coder"
    assert detect_parser("<tool_call>{{ name }}<arg_key>") == "glm45"
    assert detect_parser("<｜tool▁calls▁begin｜>```json") == "deepseek_v3"
    assert detect_parser("<｜tool▁calls▁begin｜>") == "deepseek_v31"


REFUSED_RESPONSES = [
    ({"temperature": 0.3}, "temperature"),
    ({"top_p": 0.9}, "top_p"),
    ({"reasoning": {"effort": "high"}}, "reasoning_effort"),
    ({"reasoning": {"effort": "high", "summary": "detailed"}}, None),
    ({"text": {"format": {"type": "json_object"}}}, "text"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [FUNCTION], "tool_choice": "required"}, "tool_choice"),
    ({"previous_response_id": "resp-x-0"}, "previous_response_id"),
    ({"input": [{"type": "computer_call_output"}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
    ({"input": [{"type": "function_call", "call_id": 3, "name": "add", "arguments": "{}"}]}, "input"),
    ({"input": []}, "messages"),
    ({"background": True}, "background"),
]


@pytest.mark.parametrize(("values", "param"), REFUSED_RESPONSES)
async def test_what_responses_cannot_be_granted_is_openais_error(values, param):
    async with talking(["a"]) as (_, session, client):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(**{"model": "m", "input": "a", **values})
        assert caught.value.param == param
        assert caught.value.type == "invalid_request_error"
        assert session.turn_count == 0


REFUSED_MESSAGES = [
    ({"temperature": 0.3}, "episode.temperature = 1.0"),
    ({"top_k": 5}, "top_k = 5"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences has 17 strings"),
    ({"output_config": {"effort": "low"}}, "no variable 'reasoning_effort'"),
    ({"output_config": {"format": {}}}, "format"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
    ({"tools": [TOOL], "tool_choice": {"type": "any"}}, "tool_choice"),
    ({"messages": [user("a"), {"role": "assistant", "content": "b"}]}, "cannot be continued"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "type 'image'"),
    ({"messages": []}, "messages is empty"),
    ({"messages": [user("x" * 1200)]}, "context_length_exceeded"),
    ({"max_tokens": 0}, "max_tokens = 0"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED_MESSAGES)
async def test_what_messages_cannot_be_granted_is_anthropics_error(values, message):
    async with talking(["a"]) as (server, session, _), anthropic_client(server, session.key) as client:
        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.messages.create(model="m", max_tokens=9, messages=[user("a")], extra_body=values)
        body = caught.value.body
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        assert message in body["error"]["message"]
        assert session.turn_count == 0


async def test_each_protocol_has_its_own_statuses_and_error_objects():
    async with talking(["a"]) as (server, session, client):
        async with anthropic_client(server, "r3-guess") as stranger:
            with pytest.raises(anthropic.AuthenticationError) as caught:
                await stranger.messages.create(model="m", max_tokens=9, messages=[user("a")])
            assert caught.value.body["error"]["type"] == "authentication_error"
            with pytest.raises(anthropic.AuthenticationError):
                await stranger.models.list()
        async with anthropic_client(server, session.key) as other:
            with pytest.raises(anthropic.NotFoundError) as missing:
                await other.messages.batches.list()
            assert missing.value.body["error"]["type"] == "not_found_error"
            assert [model.id async for model in await other.models.list()] == ["policy"]
            counted = await other.messages.count_tokens(model="m", messages=[user("a")], tools=[TOOL])
            asked = await other.messages.create(model="m", max_tokens=9, messages=[user("a")], tools=[TOOL])
            assert counted.input_tokens == asked.usage.input_tokens
            await server.context.engine.stop()
            with pytest.raises(anthropic.InternalServerError) as failed:
                await other.messages.create(model="m", max_tokens=9, messages=[user("a")])
            assert failed.value.body["error"]["type"] == "api_error"
        with pytest.raises(openai.InternalServerError, match="the engine failed") as said:
            await client.responses.create(model="m", input="a")
        assert said.value.type == "server_error"


EFFORT = "{% if reasoning_effort is defined %}<|system|>{{ reasoning_effort }}<|end|>{% endif %}" + HERMES
THINKING = "{% generation %}{% endgeneration %}<|system|>{{ enable_thinking | default(true) }}<|end|>" + HERMES
WITH_STOP = msgspec.structs.replace(SETTINGS, stop=["own"])


@pytest.mark.parametrize("path", DIALECT_BY_PATH)
def test_sampling_values_that_request_nothing_or_are_the_episodes_are_accepted_in_each_protocol(path):
    talk = {"input": "a"} if "responses" in path else {"messages": [user("a")], "max_tokens": 9}
    asked = {**talk, "top_p": 1, "min_p": 0}
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


def row_texts(session):
    (sample,) = finished(session).samples
    decode = session.renderer.decode
    return decode(sample.table["token_ids"].tolist()), decode(trained_tokens(sample.table))


async def test_a_stop_string_is_not_handed_out_was_sampled_and_what_closes_the_turn_is_not_trained():
    script = stopping("Act: add.Observation: no", "12.", "So 3.;")
    async with (
        talking(script, HERMES, WITH_STOP) as (server, session, client),
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
        assert [call.stop_strings for call in server.context.engine.requests] == [
            ("own", "Observation:", "xyz"),
            ("own", "Observation:"),
            ("own", "3.", ".;"),
        ]
        whole, trained = row_texts(session)
    assert trained == "Act: add.Observation:12.<|end|>So 3."
    assert "<|assistant|>Act: add.Observation:<|end|><|user|>3<|end|><|assistant|>12.<|end|>" in whole, whole


async def test_a_stop_string_ends_a_completion_and_the_episodes_own_is_handed_out():
    async with talking(stopping("a;b", "its own"), settings=WITH_STOP) as (_, session, client):
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
        assert row_texts(session)[1] == f"{call}STOP"


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
        shown = [session.renderer.decode(call.prompt_ids.tolist()) for call in server.context.engine.requests]
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
        (call,) = server.context.engine.requests
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
    made = [chat.with_template_args({"reasoning_effort": str(i)}) for i in range(40)]
    again = [chat.with_template_args({"reasoning_effort": str(i)}) for i in range(8, 40)]
    assert all(one is other for one, other in zip(made[8:], again, strict=True)), "the last 32 are kept"
    assert chat.with_template_args({"reasoning_effort": "7"}) is not made[7]
