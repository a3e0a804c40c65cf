"""The endpoint as the `openai` package sees it: what is served is recorded, and what cannot be granted is refused."""

import asyncio
import json
import socket

import openai
import pytest

from r3async.config import ConfigError, EpisodeConfig, Secret, ServingConfig, config_from_dict
from r3async.rollout.endpoint.session import AgentSession
from r3async.rollout.endpoint.tool_parser_choice import parse_builtin
from r3async.rollout.episode import EpisodeError
from r3async.rollout.scripted import SCRIPTED_ROUTING
from r3async.schedule.validation import check_trajectory
from tests.helpers.scripted import scripted_logprob, scripted_routes
from tests.helpers.serving import (
    ADD,
    HERMES,
    TASK,
    Connections,
    answer_ids,
    ask,
    client_of,
    finished,
    ready,
    renderer,
    serving,
    talking,
    trained_tokens,
    user,
)
from tests.helpers.transport import until

CALL = '<tool_call>{"arguments":  {"b": 4, "a": 3}, "name": "add"}</tool_call>'


async def test_a_conversation_is_one_row_whose_tokens_logprobs_versions_and_routes_are_the_engines():
    async with talking(["one", "two"]) as (_, session, client):
        first = await ask(client, [user("a")])
        assert (first.choices[0].message.content, first.choices[0].finish_reason) == ("one", "stop")
        assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (3, 4)
        history = [user("a"), first.choices[0].message, user("b")]
        assert (await ask(client, history)).choices[0].message.content == "two"
        trajectory = finished(session)
    (sample,) = trajectory.samples
    table, chat = sample.table, session.renderer
    assert trained_tokens(table) == [t for answer in answer_ids(chat, "one", "two") for t in answer]
    text = "<|user|>a<|assistant|>one<|end|><|user|>b<|assistant|>two<|end|>"
    assert chat.decode(table["token_ids"].tolist()) == text
    assert table["routing_recorded"].tolist() == [True] * (len(table) - 1) + [False]
    for at, token in enumerate(table["token_ids"].tolist()):
        if table["loss_mask"][at]:
            assert table["rollout_logprobs"][at] == pytest.approx(scripted_logprob(at, 5, token))
            assert table["policy_version"][at] == 5
        if table["routing_recorded"][at]:
            assert (table["routed_experts"][at] == scripted_routes(at, 5, token, SCRIPTED_ROUTING)).all()
    assert [turn.reward for turn in trajectory.turns] == [0, 1]
    assert table["rewards"][-1] == 1
    assert (trajectory.reward, trajectory.stop_reason, trajectory.trajectory_id) == (1, "stop", "g00000003e0000")


@pytest.mark.parametrize("template", [None, HERMES])
async def test_a_tool_call_that_comes_back_parsed_keeps_the_tokens_that_were_trained_tokens(template):
    async with talking([f"Let me see. {CALL}", "It is 7."], template) as (_, session, client):
        answer = (await ask(client, [user("3+4")], tools=[ADD])).choices[0]
        assert answer.finish_reason == "tool_calls"
        assert answer.message.content == "Let me see."
        (call,) = answer.message.tool_calls
        assert call.function.name == "add"
        assert json.loads(call.function.arguments) == {"a": 3, "b": 4}
        result = {"role": "tool", "tool_call_id": call.id, "content": "7"}
        # As frameworks do: a message of their own, without what the package adds, arguments written anew.
        rewritten = {"name": "add", "arguments": json.dumps({"a": 3, "b": 4}, indent=1)}
        again = {
            "role": "assistant",
            "content": answer.message.content,
            "tool_calls": [{"id": call.id, "type": "function", "function": rewritten}],
        }
        final = (await ask(client, [user("3+4"), again, result], tools=[ADD])).choices[0]
        assert (final.message.content, final.finish_reason) == ("It is 7.", "stop")
        (sample,) = finished(session).samples
    assert trained_tokens(sample.table) == [
        t for a in answer_ids(session.renderer, f"Let me see. {CALL}", "It is 7.") for t in a
    ]
    assert f"{CALL}<|end|><|tool|>7" in session.renderer.decode(sample.table["token_ids"].tolist())


async def test_a_template_that_insists_on_the_call_gets_it_and_the_row_branches():
    strict = HERMES.replace(
        "{% for m in messages %}",
        "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
        "{{ raise_exception('a result without its call') }}{% endif %}",
    )
    async with talking([CALL, "7"], strict) as (_, session, client):
        message = (await ask(client, [user("3+4")], tools=[ADD])).choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "7"}
        await ask(client, [user("3+4"), message, result], tools=[ADD])
        samples = finished(session).samples
    assert [trained_tokens(s.table) for s in samples] == answer_ids(session.renderer, CALL, "7")


async def test_streams_are_the_same_answers_in_pieces():
    async with talking(["hello", CALL], template=HERMES) as (_, session, client):
        chunks = [c async for c in await ask(client, [user("a")], stream=True, stream_options={"include_usage": True})]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello"
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
        assert chunks[-1].usage.completion_tokens == 6
        chunks = [c async for c in await ask(client, [user("b")], tools=[ADD], stream=True)]
        (call,) = next(c.choices[0].delta.tool_calls for c in chunks if c.choices[0].delta.tool_calls)
        assert (call.index, call.function.name) == (0, "add")
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        assert session.turn_count == 2


async def test_the_logprob_of_each_sampled_token_is_returned():
    async with talking(["hi"]) as (_, _, client):
        content = (await ask(client, [user("a")], logprobs=True, top_logprobs=3)).choices[0].logprobs.content
    chat = renderer()
    tokens = [*chat.encode("hi"), chat.eos_token_id]
    assert [c.token for c in content] == ["h", "i", "<|end|>"]
    assert [c.logprob for c in content] == pytest.approx([scripted_logprob(3 + i, 5, t) for i, t in enumerate(tokens)])
    assert [[t.token for t in c.top_logprobs] for c in content] == [["h"], ["i"], ["<|end|>"]]


async def test_completions_keep_the_tokens_of_a_text_that_is_continued():
    async with talking(["bcd ", "ghi", "x"]) as (_, session, client):
        first = await client.completions.create(model="m", prompt="a", max_tokens=50, logprobs=1)
        assert (first.choices[0].text, first.choices[0].finish_reason) == ("bcd ", "stop")
        assert first.choices[0].logprobs.tokens == ["b", "c", "d", " ", "<|end|>"]
        second = await client.completions.create(model="m", prompt="abcd ef", max_tokens=2)
        assert (second.choices[0].text, second.choices[0].finish_reason) == ("gh", "length")
        ids = session.renderer.encode("abcd efgh")
        chunks = [c async for c in await client.completions.create(model="m", prompt=[ids], stream=True)]
        assert "".join(c.choices[0].text for c in chunks) == "x"
        rows = finished(session).samples
    # The first answer's stop token is not part of the text that goes on: a branch. The third extends the second exactly.
    assert [trained_tokens(r.table) for r in rows] == [
        answer_ids(session.renderer, "bcd ")[0],
        [*session.renderer.encode("gh"), *answer_ids(session.renderer, "x")[0]],
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": 0.2}, "episode.temperature = 1.0"),
        ({"top_p": 0.9}, "top_p = 0.9"),
        ({"reasoning_effort": "high"}, "no variable 'reasoning_effort'"),
        ({"extra_body": {"chat_template_kwargs": {"thinking": True}}}, "no variable 'thinking'"),
        ({"n": 2}, "n = 2"),
        ({"stop": ["a"] * 17}, "stop has 17 strings, more than 16"),
        ({"frequency_penalty": 1.0}, "frequency_penalty = 1"),
        ({"tool_choice": "required", "tools": [ADD]}, "tool_choice = 'required'"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"max_tokens": 0}, "max_tokens = 0"),
        ({"extra_body": {"top_k": 5}}, "top_k = 5"),
    ],
)
async def test_what_would_change_the_sampling_and_cannot_be_granted_is_refused(values, message):
    async with talking(["a"]) as (_, session, client):
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(client, [user("a")], **values)
        assert message in caught.value.body["message"]
        assert caught.value.body["type"] == "invalid_request_error"
        await ask(client, [user("a")], temperature=1, top_p=1.0, n=1, stop=None, seed=7, user="me")
        assert session.turn_count == 1


async def test_max_tokens_is_honoured_and_bounded_by_the_episode():
    settings = EpisodeConfig(max_turns=9, max_new_tokens=8, max_prompt_tokens=40, max_total_tokens=44)
    async with talking(["x" * 50], settings=settings) as (server, _, client):
        for values in ({"max_tokens": 3}, {"max_completion_tokens": 3, "max_tokens": 7}, {"max_tokens": 99}, {}):
            assert (await ask(client, [user("a")], **values)).choices[0].finish_reason == "length"
        await ask(client, [user("a" * 36)])
        assert [c.max_tokens for c in server.context.engine.requests] == [3, 3, 8, 8, 44 - 38]


async def test_a_context_that_is_too_long_and_too_many_turns_are_errors_that_agents_know():
    settings = EpisodeConfig(max_turns=2, max_new_tokens=8, max_prompt_tokens=40, max_total_tokens=60)
    async with talking(["a"], settings=settings) as (_, session, client):
        with pytest.raises(openai.BadRequestError, match=r"maximum context length is 40 .* 62 tokens") as caught:
            await ask(client, [user("a" * 60)])
        assert caught.value.code == "context_length_exceeded"
        assert session.exceeded_limit == "length"
        await ask(client, [user("a")])
        await ask(client, [user("a")])
        with pytest.raises(openai.BadRequestError, match=r"episode\.max_turns = 2"):
            await ask(client, [user("a")])
        assert session.exceeded_limit == "turns"


async def test_only_a_key_that_is_still_open_is_answered():
    async with talking(["a"]) as (server, session, client):
        assert [m.id async for m in await client.models.list()] == ["policy"]
        other = server.open_session(session.task)
        assert other.key != session.key
        assert len(session.key) > 40
        server.close_session(session)
        with pytest.raises(openai.AuthenticationError, match="it has ended"):
            await ask(client, [user("a")])
        async with client_of(server, other.key) as neighbour:
            await ask(neighbour, [user("a")])
        assert (session.turn_count, other.turn_count) == (0, 1)


async def test_closing_a_session_aborts_what_runs_in_it():
    async with talking(["abc"], options={"before_token": asyncio.Event().wait}) as (server, session, client):
        asking = asyncio.create_task(ask(client, [user("a")]))
        await until(lambda: server.context.engine.requests)
        server.close_session(session)
        with pytest.raises(openai.AuthenticationError):
            await asking
        assert server.context.engine.collect_stats()["running"] == 0
        session.set_reward(1)
        with pytest.raises(EpisodeError, match="got no answer"):
            session.build_trajectory("stop")


async def test_a_client_that_hangs_up_aborts_its_request_and_may_ask_again():
    never = asyncio.Event()
    async with talking(["abc"], options={"before_token": never.wait}) as (server, session, client):
        with pytest.raises(openai.APITimeoutError):
            await ask(client, [user("a")], timeout=0.3)
        await until(lambda: not server.context.engine.collect_stats()["running"])
        never.set()
        await ask(client, [user("a")])
        (sample,) = finished(session).samples
    assert sample.table["routing_recorded"][:-1].all()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_answer_that_came_after_its_client_had_gone_is_no_turn_and_is_counted(monkeypatch, stream):
    parsing, gone = asyncio.Event(), asyncio.Event()

    async def slow(text, *known):
        parsing.set()
        try:
            await asyncio.sleep(0 if text == "second" else 60)
        except asyncio.CancelledError:
            gone.set()
            raise
        return await parse_builtin(text, *known)

    async def select(*args):
        return slow

    monkeypatch.setattr("r3async.rollout.endpoint.server.select_tool_parser", select)
    async with talking(["first", "second"]) as (server, _, _):
        reports = server.context.report_event
        session = server.open_session(TASK)
        async with client_of(server, session.key) as client:
            asking = asyncio.create_task(ask(client, [user("a")], stream=stream))
            async with asyncio.timeout(120):
                await parsing.wait()
                assert len(server.context.engine.requests) == 1
                asking.cancel()
                await gone.wait()
            assert session.turn_count == 0
            answer = await ask(client, [user("a")])
            assert answer.choices[0].message.content == "second"
            await client.post("/r3async/reward", body={"reward": 1, "id": answer.id}, cast_to=object)
        session.close()
        trajectory = session.build_trajectory("stop")
    assert reports == [("answer_undelivered", {"episode": "g00000003e0000", "tokens": 6})]
    assert [turn.reward for turn in trajectory.turns] == [1]
    (row,) = trajectory.samples
    assert session.renderer.decode(row.table["token_ids"].tolist()) == "<|user|>a<|assistant|>second<|end|>"
    assert [said["content"] for said in trajectory.preview] == ["a", "second"]


async def test_an_answer_of_which_only_the_beginning_was_received_is_no_turn(monkeypatch):
    """More than its sockets hold: the rest waits in the endpoint for a reader that does not come."""
    small = (socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    limits = EpisodeConfig(max_new_tokens=3000, max_prompt_tokens=900, max_total_tokens=5000)
    connections = Connections(monkeypatch)
    async with talking(["x" * 2000], settings=limits) as (server, _, _):
        reports = server.context.report_event
        session = server.open_session(TASK)
        body = json.dumps({"messages": [user("a")], "logprobs": True, "top_logprobs": 1}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.key}\r\n"
        port = int(server.base_url.split(":")[2].split("/")[0])
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=4096)
        await until(lambda: connections.open)
        (connection,) = connections.open
        connection.transport.get_extra_info("socket").setsockopt(*small)
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        async with asyncio.timeout(120):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        assert connection.transport.get_write_buffer_size()
        writer.transport.abort()
        await until(lambda: reports)
        assert session.turn_count == 0
    assert [(event, facts["tokens"]) for event, facts in reports] == [("answer_undelivered", 2001)]


async def test_an_episode_that_nobody_could_be_given_waits_for_the_next_who_asks(monkeypatch):
    chat, connections = renderer(), Connections(monkeypatch)
    async with serving(await ready(answer_ids(chat, "a")), chat, enabled=True) as server:
        session = server.open_session(TASK)
        server.offer_session(session)

        def lose_connection(of):
            (connection,) = connections.open
            connection.transport.abort()
            return False

        async with client_of(server, server.token) as owner:
            with monkeypatch.context() as patch:
                patch.setattr(AgentSession, "is_rewarded", property(lose_connection))  # the answer says it
                with pytest.raises(openai.APIConnectionError):
                    await owner.post("/r3async/sessions", body={}, cast_to=object)
            assert (await owner.post("/r3async/sessions", body={}, cast_to=object))["key"] == session.key


async def test_an_engine_failure_is_reported_once_and_remembered():
    async with talking(["a"]) as (server, session, _):
        async with client_of(server, session.key, max_retries=2) as client:
            await server.context.engine.stop()
            with pytest.raises(openai.InternalServerError, match="the engine failed"):
                await ask(client, [user("a")])
    assert "not running" in str(session.engine_failure)


async def test_rewards_add_up_are_credited_where_they_belong_and_can_be_replaced():
    async with talking(["a", "b", "c"]) as (_, session, client):
        path = "/r3async/reward"
        first = await ask(client, [user("1")])
        await client.post(path, body={"reward": 9, "turn": 0}, cast_to=object)
        await client.post(path, body={"reward": 0.5, "id": first.id}, cast_to=object)
        await ask(client, [user("2")])
        await ask(client, [user("3")])
        for wrong in ({"reward": "x"}, {"reward": float(3), "turn": 7}, {}, {"reward": True}, {"reward": 1, "id": "x"}):
            with pytest.raises(openai.BadRequestError):
                await client.post(path, body=wrong, cast_to=object)
        answer = await client.post(path, body={"reward": 1, "done": True}, cast_to=object)
        assert answer == {"episode": "g00000003e0000", "task_seed": 11, "turns": 3, "reward": 1.5}
        assert session.closed.is_set()
        with pytest.raises(openai.AuthenticationError):
            await ask(client, [user("4")])
        trajectory = session.build_trajectory("stop")
    assert [t.reward for t in trajectory.turns] == [0.5, 0, 1]
    assert sum(s.table["rewards"].sum() for s in trajectory.samples) == pytest.approx(1.5)
    assert [p["role"] for p in trajectory.preview] == ["user", "assistant"] * 3


async def test_an_episode_without_a_reward_is_an_error_that_names_the_call_unless_it_has_a_worth():
    async with talking(["a"]) as (_, session, client):
        await ask(client, [user("1")])
        session.close()
        with pytest.raises(EpisodeError, match=r"gave no reward.*POST /v1/r3async/reward.*serving\.unrewarded"):
            session.build_trajectory("stop")
    async with talking(["a"], unrewarded=-1.0) as (_, session, client):
        await ask(client, [user("1")])
        session.close()
        assert session.build_trajectory("stop").reward == -1


async def test_answers_after_the_last_reward_are_left_out_when_time_ran_out():
    async with talking(["a", "b"]) as (_, session, client):
        await ask(client, [user("1")])
        session.set_reward(1, turn=0)
        await ask(client, [user("2")])
        session.close()
        trajectory = session.build_trajectory("timeout")
    assert [t.reward for t in trajectory.turns] == [1]
    assert len(trajectory.samples) == 1


async def test_ill_formed_requests_and_unknown_paths_are_errors_in_the_same_shape():
    async with talking(["a"]) as (_, session, client):
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="m", input="x")
        bad = (
            [],
            [{"role": "alien", "content": "x"}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            [{"role": "user", "content": 3}],
            [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}],
        )
        for messages in bad:
            with pytest.raises(openai.BadRequestError):
                await ask(client, messages)
        with pytest.raises(openai.BadRequestError, match="ids of 0"):
            await client.completions.create(model="m", prompt=[1, 10**6])
        with pytest.raises(openai.BadRequestError):
            await client.post("/chat/completions", body=[1], cast_to=object)
        assert session.turn_count == 0
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        await ask(client, [{"role": "developer", "content": "be"}, {"role": "user", "content": parts}])


async def test_numbers_that_no_float_or_tokenizer_holds_are_refused_by_name():
    async with talking(["a", "b"]) as (_, session, client):
        await ask(client, [user("x")])

        async def refused(path: str, body: dict, message: str) -> None:
            with pytest.raises(openai.BadRequestError, match=message):
                await client.post(path, body=body, cast_to=object)

        for reward in (10**400, 1e308, -1e16, True, "1.0", [1.0]):
            await refused("/r3async/reward", {"reward": reward}, "a reward must be")
        await refused("/r3async/reward", {"reward": 1.0, "turn": 2**70}, "there is no turn")
        await refused("/r3async/reward", {"reward": 1.0, "turn": True}, "there is no turn")
        name = f"chatcmpl-{TASK.trajectory_id}-{'9' * 5000}"
        await refused("/r3async/reward", {"reward": 1.0, "id": name}, "is not the id of an answer")
        for ids in ([1, 2**70], [-(2**70)], [1, 10**400]):
            await refused("/completions", {"prompt": ids}, "ids of 0")
        assert (session.turn_count, session.is_rewarded) == (1, False)
        await client.post("/r3async/reward", body={"reward": 9e14, "turn": 0}, cast_to=object)
        await refused("/r3async/reward", {"reward": -2e14}, r"makes 1\.1e\+15 together")
        await client.post("/r3async/reward", body={"reward": 3e14, "turn": 0}, cast_to=object)
        await client.post("/r3async/reward", body={"reward": -2e14}, cast_to=object)
        session.close()
        check_trajectory(session.build_trajectory("stop"))


async def test_a_task_seed_that_no_environment_has_is_refused():
    async with talking(["a"], enabled=True) as (server, _, _), client_of(server, server.token) as owner:
        for seed in (2**63, -1, 10**400, True, 1.5, "1"):
            with pytest.raises(openai.BadRequestError, match="task_seed must be a whole number from 0"):
                await owner.post("/r3async/sessions", body={"task_seed": seed}, cast_to=object)


async def test_beginning_a_session_takes_the_token_and_the_endpoint_is_on_loopback():
    chat = renderer()
    async with serving(await ready(answer_ids(chat, "a")), chat, enabled=True, max_sessions=1) as server:
        assert server.base_url.startswith("http://127.0.0.1:")
        async with client_of(server, "guess") as stranger:
            with pytest.raises(openai.AuthenticationError, match=r"serving\.token"):
                await stranger.post("/r3async/sessions", body={"task_seed": 4}, cast_to=object)
        async with client_of(server, server.token) as owner:
            begun = await owner.post("/r3async/sessions", body={"task_seed": 4}, cast_to=object)
            assert begun["task_seed"] == 4
            with pytest.raises(openai.RateLimitError, match=r"serving\.max_sessions = 1"):
                await owner.post("/r3async/sessions", body={"task_seed": 5}, cast_to=object)
            with pytest.raises(openai.InternalServerError, match="no episode waits"):
                await owner.post("/r3async/sessions", body={}, cast_to=object)
            with pytest.raises(openai.AuthenticationError):
                await ask(owner, [user("a")])
        async with client_of(server, begun["key"]) as agent:
            await ask(agent, [user("a")])
            done = await agent.post("/r3async/reward", body={"reward": 1, "done": True}, cast_to=object)
            assert (done["turns"], done["reward"]) == (1, 1)
        async with client_of(server, server.token) as owner:
            await owner.post("/r3async/sessions", body={"task_seed": 5}, cast_to=object)
    async with serving(await ready(answer_ids(chat, "a")), chat) as server, client_of(server, server.token) as owner:
        with pytest.raises(openai.AuthenticationError, match=r"serving\.enabled is false"):
            await owner.post("/r3async/sessions", body={"task_seed": 4}, cast_to=object)


def test_a_host_that_others_can_reach_needs_a_token(monkeypatch):
    for host in ("0.0.0.0", "192.168.0.1", "example.org", "::"):
        with pytest.raises(ConfigError, match=r"\[serving\] `host` = .* is open to other machines: set `token`"):
            config_from_dict({"serving": {"host": host}})
        assert config_from_dict({"serving": {"host": host, "token": "secret"}}).serving.token == Secret("secret")
    for host in ("127.0.0.1", "127.0.0.9", "::1", "localhost"):
        config_from_dict({"serving": {"host": host}})


async def test_a_token_may_be_kept_in_the_environment_and_a_taken_port_is_named(monkeypatch):
    chat, engine = renderer(), await ready([[1]])
    monkeypatch.setenv("MY_TOKEN", "secret")
    async with serving(engine, chat, enabled=True, token="$MY_TOKEN") as server:
        assert server.token == "secret"
        port = int(server.base_url.split(":")[2].split("/")[0])
        with pytest.raises(ConfigError, match=rf"`serving.port` = {port} cannot be listened on"):
            async with serving(engine, chat, port=port):
                pass
    with pytest.raises(ValueError, match="port"):
        ServingConfig(port=70000)
