"""What a request says is granted or refused by name, and a client's mistake is never the endpoint's failure."""

import copy
import gzip
import inspect
import json
import zlib

import aiohttp
import anthropic
import msgspec
import openai
import pytest
from anthropic.resources.messages import AsyncMessages
from openai.resources.chat.completions import AsyncCompletions as AsyncChat
from openai.resources.completions import AsyncCompletions
from openai.resources.responses import AsyncResponses

from r3async.envs import Message
from r3async.rollout.endpoint.protocol import ApiError, parse_messages
from tests.helpers.serving import (
    ADD,
    HERMES,
    SETTINGS,
    anthropic_client,
    ask,
    client_of,
    finished,
    talking,
    trained_tokens,
    user,
)

FUNCTION = {"type": "function", "name": "add", "description": "sum", "parameters": {"type": "object"}}
TOOL = {"name": "add", "description": "sum", "input_schema": {"type": "object"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
BODIES = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "be"}]},
            user("hi"),
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "2"},
        ],
        "tools": [ADD],
        "tool_choice": "auto",
        "max_tokens": 5,
        "stop": ["x"],
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": 1,
        "temperature": 1,
    },
    "/v1/completions": {"prompt": "hi", "max_tokens": 5, "logprobs": 1, "stop": "x", "stream_options": {}},
    "/v1/responses": {
        "input": [
            user("hi"),
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "2"},
        ],
        "instructions": "be",
        "tools": [FUNCTION],
        "reasoning": {"effort": None},
        "metadata": {"a": "b"},
        "max_output_tokens": 5,
    },
    "/v1/messages": {
        "max_tokens": 5,
        "system": [{"type": "text", "text": "be"}],
        "messages": [
            user("hi"),
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "2"}]},
        ],
        "tools": [TOOL],
        "tool_choice": {"type": "auto"},
        "stop_sequences": ["x"],
        "output_config": {"effort": None},
    },
}
BODIES["/v1/messages/count_tokens"] = {
    name: value for name, value in BODIES["/v1/messages"].items() if name not in ("max_tokens", "stop_sequences")
}
CHANGES_ANSWERS = {
    "stop_token_ids": [65],
    "min_tokens": 5,
    "ignore_eos": True,
    "bad_words": ["a"],
    "allowed_token_ids": [65],
    "structured_outputs": {"choice": ["a"]},
    "guided_json": {"type": "object"},
    "typical_p": 0.5,
    "truncate_prompt_tokens": 4,
    "chat_template": "{{ 'x' }}",
    "use_beam_search": True,
    "continue_final_message": True,
    "documents": [{"text": "x"}],
    "return_token_ids": True,
    "temperature_": 0.5,
    "n": 2,
}
CHANGES_NOTHING = {
    "user": "me",
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "store": True,
    "seed": 7,
    "prompt_cache_key": "k",
    "never_heard_of": None,
    "min_tokens": 0,
    "ignore_eos": False,
    "n": 1,
}
ROOMY = msgspec.structs.replace(SETTINGS, max_turns=100_000)


class Endpoint:
    """An endpoint to which any body can be posted. `events` are those of the run."""

    def __init__(self, server, session, http):
        self.server, self.session, self._http = server, session, http
        self.events = server.context.report_event

    async def post(self, path, data, **headers):
        url = self.server.base_url.removesuffix("/v1") + path
        data = data if isinstance(data, bytes) else json.dumps(data).encode()
        headers |= {"Authorization": f"Bearer {self.session.key}"}
        async with self._http.post(url, data=data, headers=headers) as answer:
            return answer.status, await answer.text()


async def ask_endpoint(check, template=HERMES, **options):
    async with talking(["a"], template, ROOMY, **options) as (server, session, _), aiohttp.ClientSession() as http:
        return await check(Endpoint(server, session, http))


@pytest.mark.parametrize("path", BODIES)
async def test_what_would_change_an_answer_or_its_prompt_is_refused_by_name_and_the_rest_is_taken(path):
    async def check(endpoint):
        for name, value in CHANGES_ANSWERS.items():
            status, text = await endpoint.post(path, {**BODIES[path], name: value})
            assert (status, name in text) == (400, True), (name, text)
        assert endpoint.session.turn_count == 0
        for name, value in CHANGES_NOTHING.items():
            assert (await endpoint.post(path, {"model": "m", **BODIES[path], name: value}))[0] == 200, name
        assert endpoint.events == []

    await ask_endpoint(check)


CLIENTS = {
    "/v1/chat/completions": AsyncChat.create,
    "/v1/completions": AsyncCompletions.create,
    "/v1/responses": AsyncResponses.create,
    "/v1/messages": AsyncMessages.create,
    "/v1/messages/count_tokens": AsyncMessages.count_tokens,
}


@pytest.mark.parametrize("path", CLIENTS)
async def test_each_parameter_of_the_official_client_is_granted_without_effect_or_refused_by_name(path):
    """With a value that none of them has: whatever is accepted must be one that is read, or one that changes nothing."""
    names = set(inspect.signature(CLIENTS[path]).parameters) - {"self", "timeout"}
    names = {name for name in names if not name.startswith("extra_")}
    ignored = {"model", "user", "metadata", "store", "seed", "service_tier", "safety_identifier", "prediction", "speed"}
    ignored |= {"prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "inference_geo", "cache_control"}
    ignored |= {"diagnostics", "user_profile_id", "workspace_id"}

    async def check(endpoint):
        for name in sorted(names):
            status, text = await endpoint.post(path, {**BODIES[path], name: [{"odd": 10**30}]})
            expected = 200 if name in ignored and not (name in ("metadata", "store") and "responses" in path) else 400
            assert status == expected, (name, text)
            # Types are refused by msgspec's words, which name the place and not always the parameter.
            assert status == 200 or name in text or "xpected" in text or "role" in text, text
        assert endpoint.events == []

    await ask_endpoint(check)


ODD_VALUES = [None, True, 10**400, "", "\x00\u2028", [[]], [3], {}, {"type": 3, "a": [1]}]


def iter_places(value, at=()):
    yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in inner:
        yield from iter_places(each, (*at, name))


def replaced(body, place, value):
    """Return a copy of `body` with `value` at `place`."""
    if not place:
        return value
    body = copy.deepcopy(body)
    inner = body
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    return body


@pytest.mark.parametrize("path", BODIES)
async def test_no_value_anywhere_in_a_body_is_an_internal_error_or_an_event(path):
    async def check(endpoint):
        statuses = set()
        for place in iter_places(BODIES[path]):
            for value in ODD_VALUES:
                status, text = await endpoint.post(path, replaced(BODIES[path], place, value))
                assert status in (200, 400), (place, value, text)
                statuses.add(status)
        assert statuses == {200, 400}
        assert endpoint.events == []
        assert endpoint.session.engine_failure is None

    await ask_endpoint(check)


ODD_BODIES = {
    "no gzip": (b"\x1f\x8bnothing", "gzip"),
    "cut gzip": (gzip.compress(b"{}" * 500)[:20], "gzip"),
    "no deflate": (b"\x00\x01\x02garbage", "deflate"),
    "plain": (b"{}", "gzip"),
    "unknown": (b"{}", "quux"),
    "brotli": (b"{}", "br"),
    "zstd": (b"{}", "zstd"),
    "no text": (b"\xff\xfe", "identity"),
    "nothing": (b"", "identity"),
    "list": (b"[1]", "identity"),
}


@pytest.mark.parametrize("name", ODD_BODIES)
async def test_a_body_that_cannot_be_unpacked_is_the_clients_mistake(name):
    data, encoding = ODD_BODIES[name]

    async def check(endpoint):
        for path in [*BODIES, "/v1/r3async/reward"]:
            status, text = await endpoint.post(path, data, **{"Content-Encoding": encoding})
            assert status == 400, text
            assert "error" in text or encoding == "zstd", "which aiohttp refuses with the headers"
        for packed, encoding_ in ((gzip.compress, "gzip"), (zlib.compress, "deflate")):
            body = packed(json.dumps(BODIES["/v1/completions"]).encode())
            assert (await endpoint.post("/v1/completions", body, **{"Content-Encoding": encoding_}))[0] == 200
        assert endpoint.events == []

    await ask_endpoint(check)


async def test_ids_and_names_that_are_no_text_are_refused_where_the_run_has_its_own_calls_too():
    async def check(endpoint):
        for path, body in (
            ("reward", {"id": 3}),
            ("reward", {"id": [1]}),
            ("reward", {"turns": 0}),
            ("reward", {"done": 0}),
        ):
            status, text = await endpoint.post(f"/v1/r3async/{path}", {"reward": 1, **body})
            assert status == (200 if "done" in body else 400), text
        for body in ({"task_seed": [1]}, {"seed": 3}, [1]):
            status, text = await endpoint.post("/v1/r3async/sessions", body, **{"x-api-key": endpoint.server.token})
            assert status == 400, text
        assert endpoint.events == []

    await ask_endpoint(check, enabled=True)


# -- what a history may hold -------------------------------------------------------------------------------------------

READS_THOUGHTS = HERMES.replace(
    "{{ m['content'] }}", "{{ '(' + m.reasoning_content + ')' if m.reasoning_content }}{{ m.content }}"
)
REFUSED_MESSAGES = {
    "function_call": (
        {"role": "assistant", "content": "", "function_call": {"name": "f"}},
        "write it as one of `tool_calls`",
    ),
    "role": ({"role": "function", "name": "f", "content": "2"}, "write it as a message of the role `tool`"),
    "refusal": ({"role": "assistant", "content": None, "refusal": "no"}, r"messages\[1\]\.refusal"),
    "audio": ({"role": "assistant", "content": "a", "audio": {"id": "x"}}, r"messages\[1\]\.audio"),
    "unknown": ({"role": "assistant", "content": "a", "prefix": True}, r"messages\[1\]\.prefix"),
    "two thoughts": ({"role": "assistant", "content": "a", "thinking": "x", "reasoning": "y"}, "a thought"),
    "a user's thought": ({"role": "user", "content": "a", "reasoning_content": "x"}, "a thought"),
    "no text": ({"role": "tool", "content": "a", "tool_call_id": 3}, r"tool_call_id must be text"),
    "a number's name": ({"role": "tool", "content": "a", "name": 3}, r"name must be text"),
    "a list's id": ({"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": [1]}]}, r"\$\[0\]\.id"),
    "custom": ({"role": "assistant", "content": "", "tool_calls": [{**CALL, "type": "custom"}]}, r"\$\[0\]\.type"),
}


@pytest.mark.parametrize("case", REFUSED_MESSAGES)
def test_what_the_model_would_not_be_shown_of_a_message_is_refused_with_the_fix(case):
    message, fix = REFUSED_MESSAGES[case]
    with pytest.raises(ApiError, match=fix):
        parse_messages([user("q"), message])


def test_a_message_of_the_official_client_may_come_back_with_all_its_fields():
    said = openai.types.chat.ChatCompletionMessage(role="assistant", content="a", annotations=[]).model_dump()
    extra = {"provider_specific_fields": {"a": 1}, "cache_control": {"type": "ephemeral"}, "id": "x", "tool_calls": []}
    (message,) = parse_messages([{**said, **extra}])
    assert message == Message("assistant", "a")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
async def test_a_thought_in_a_history_is_shown_where_the_template_has_it_and_refused_elsewhere(name):
    talk = [user("q"), {"role": "assistant", "content": "b", name: "why"}, user("r")]
    async with (
        talking(["a"], READS_THOUGHTS) as (server, session, client),
        anthropic_client(server, session.key) as other,
    ):
        await ask(client, talk)
        thought = {"type": "thinking", "thinking": "why", "signature": "s"}
        blocks = [thought, {"type": "text", "text": "b"}]
        talk[1] = {"role": "assistant", "content": blocks}
        await other.messages.create(model="m", max_tokens=9, messages=talk)
        shown = [session.renderer.decode(call.prompt_ids.tolist()) for call in server.context.engine.requests]
    assert len(shown) == 2
    assert all("<|assistant|>(why)b<|end|>" in text for text in shown)
    async with talking(["a"], HERMES) as (_, session, client):
        with pytest.raises(openai.BadRequestError, match="reads no `reasoning_content`"):
            await ask(client, [user("q"), {"role": "assistant", "content": "b", name: "why"}, user("r")])
        assert session.turn_count == 0


@pytest.mark.parametrize("answer", ["<think>\nwhy\n</think>\n\nIt is 4.", "why\n</think>\n\nIt is 4."])
async def test_an_answer_whose_thought_a_client_split_off_keeps_its_tokens(answer):
    """As client libraries do that read `<think>` in answers; the template need not have thoughts of its own."""
    async with talking([answer, "yes"], HERMES) as (_, session, client):
        await ask(client, [user("q")])
        again = {"role": "assistant", "content": "It is 4.", "reasoning_content": "why"}
        await ask(client, [user("q"), again, user("sure?")])
        (sample,) = finished(session).samples
    assert session.renderer.decode(trained_tokens(sample.table)) == f"{answer}<|end|>yes<|end|>"


async def test_a_tool_that_is_no_function_is_refused_before_the_engine_sees_it():
    async with talking(["a"], HERMES) as (server, session, _), client_of(server, session.key) as client:
        for wrong in ({"type": "custom", "custom": {"name": "x"}}, {"type": "function"}, {"function": {"name": 3}}):
            with pytest.raises(openai.BadRequestError, match="tools must be functions"):
                await ask(client, [user("q")], tools=[wrong])
        for wrong in ({**TOOL, "input_examples": [{}]}, {**TOOL, "defer_loading": True}):
            async with anthropic_client(server, session.key) as other:
                with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\]\.(input_examples|defer_loading)"):
                    await other.messages.create(model="m", max_tokens=9, messages=[user("q")], tools=[wrong])
        assert session.turn_count == 0
