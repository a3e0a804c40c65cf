"""The Responses API and Anthropic's Messages API as their own packages see them: one episode whatever they speak."""

import json

import anthropic
import openai
import pytest

from r3async.config import ConfigError, EpisodeConfig
from r3async.rollout.endpoint.session import AgentSession, detect_parser
from r3async.rollout.engine import EngineError
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


def talking(script, template=None):
    return talking_to(script, template, SETTINGS)


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
        assert [e.type for e in events][:4] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
        ]
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
        asking = client.chat.completions.stream(model="m", messages=[user("a")], tools=[strict])
        async with asking as stream:
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


# -- errors -------------------------------------------------------------------------------------------------------

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
            await server._engine.stop()
            with pytest.raises(anthropic.InternalServerError) as failed:
                await other.messages.create(model="m", max_tokens=9, messages=[user("a")])
            assert failed.value.body["error"]["type"] == "api_error"
        with pytest.raises(openai.InternalServerError, match="the engine failed") as said:
            await client.responses.create(model="m", input="a")
        assert said.value.type == "server_error"
