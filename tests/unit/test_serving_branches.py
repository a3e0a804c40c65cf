"""Whatever an agent sends, in whatever order: each answer is trained once, in a row that is exactly what the engine saw."""

import asyncio
from collections import Counter

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from r3async.config import EpisodeConfig
from r3async.envs import Message
from r3async.record.route_verification import find_engine_routes
from r3async.record.routes import EngineCall, TrainedRoutes, parse_episode_id
from r3async.rollout.conversation import Conversation
from r3async.rollout.endpoint.protocol import AgentRequest, ApiError
from r3async.rollout.endpoint.session import AgentSession
from r3async.rollout.play_context import PlayContext
from r3async.rollout.scripted import SCRIPTED_ROUTING
from tests.helpers.scripted import scripted_logprob, scripted_routes
from tests.helpers.serving import HERMES, TASK, finished, handed_out, merging_renderer, ready

RENDERERS = {name: merging_renderer(template) for name, template in (("plain", None), ("hermes", HERMES))}
ADD = {"type": "function", "function": {"name": "add"}}
ANSWERS = ["ab", "abab", "ba", "aa", "b", "", '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>', "ab aa\n"]

request_strategy = st.fixed_dictionaries(
    {
        "after": st.integers(-1, 8),  # which earlier answer it continues; -1 begins anew
        "drop": st.integers(0, 3),  # so many messages of that history are forgotten
        "edit": st.booleans(),  # the oldest message is rewritten
        "say": st.sampled_from(["x", "ab", "aba"]),
        "answer": st.sampled_from(ANSWERS),
        "spelled": st.booleans(),  # sampled byte by byte, not as the tokenizer would write it
        "ended": st.booleans(),
        "beside": st.booleans(),  # does not wait for the request before it
        "lost": st.sampled_from([False, False, True]),  # whoever asked has gone when the answer comes
    }
)
any_requests = given(
    requests=st.lists(request_strategy, min_size=1, max_size=7),
    rows=st.sampled_from(["auto", "stepwise"]),
    template=st.sampled_from(list(RENDERERS)),
)


@any_requests
@settings(max_examples=50)
def test_rows_are_what_the_engine_saw_and_each_sampled_token_is_trained_once(requests, rows, template):
    asyncio.run(_play(requests, rows, RENDERERS[template]))


class Afresh(AgentSession):
    """Begins a conversation for every request."""

    def _find_continued(self, messages, tools, renderer):
        return None


@any_requests
@settings(max_examples=50)
@pytest.mark.long
def test_a_conversation_that_is_continued_gives_what_one_begun_afresh_gives(requests, rows, template):
    # Each says something of its own: of two conversations with equal texts and other tokens, either may be continued.
    requests = [
        {**r, "say": f"{r['say']}{i}", "beside": False, "lost": False, "after": 8 if r["after"] > 2 else r["after"]}
        for i, r in enumerate(requests)
    ]
    continued, afresh = (
        asyncio.run(_play(requests, rows, RENDERERS[template], kind)) for kind in (AgentSession, Afresh)
    )
    assert continued.turns == afresh.turns
    assert all(a.table == b.table for a, b in zip(continued.samples, afresh.samples, strict=True))


@any_requests
@settings(max_examples=50)
@pytest.mark.long
def test_an_answer_that_nobody_got_leaves_the_episode_as_if_it_had_not_been_asked_for(requests, rows, template):
    requests = [{**r, "say": f"{r['say']}{i}", "beside": False} for i, r in enumerate(requests)]
    with_them = asyncio.run(_play(requests, rows, RENDERERS[template]))
    without = asyncio.run(_play([r for r in requests if not r["lost"]], rows, RENDERERS[template]))
    assert (with_them is None) == (without is None)
    if with_them is not None:
        assert with_them.turns == without.turns
        assert [s.table for s in with_them.samples] == [s.table for s in without.samples]


async def _play(requests, rows, chat, kind=AgentSession):
    limits = EpisodeConfig(max_turns=99, max_new_tokens=120, max_prompt_tokens=3000, max_total_tokens=4000, rows=rows)
    answers = []
    for r in requests:
        ids = [chat.encode(c)[0] for c in r["answer"]] if r["spelled"] else chat.encode(r["answer"])
        # An answer has at least one token; one that does not end runs to the limit, of which there is none in reach.
        answers.append([*ids, chat.eos_token_id] if r["ended"] or not ids else ids)
    engine = await ready(lambda request, index: answers[int(request.request_id.rpartition("t")[2])])
    session = kind(TASK, limits, PlayContext(engine, chat))
    histories: list[list[Message]] = []

    async def one(request):
        history = list(histories[request["after"] % len(histories)]) if histories and request["after"] >= 0 else []
        history = history[: len(history) - request["drop"]] if request["drop"] else history
        if request["edit"] and history:
            history = [Message(history[0].role, history[0].content + "!"), *history[1:]]
        history.append(Message("user", request["say"]))
        async with session.answer_chat(history, AgentRequest((), [ADD])) as (sampled, message):
            if request["lost"]:
                raise ConnectionResetError
        calls = [{**c, "function": {**c["function"], "arguments": {"a": 1}}} for c in message.get("tool_calls", [])]
        histories.append([*history, Message("assistant", message["content"] or "", tool_calls=calls)])
        return sampled

    running = []
    for request in requests:
        if not request["beside"]:
            await asyncio.gather(*running, return_exceptions=True)
        running.append(asyncio.ensure_future(one(request)))
    ended = await asyncio.gather(*running, return_exceptions=True)
    assert [isinstance(one, ConnectionResetError) for one in ended] == [request["lost"] for request in requests]
    got = [one for one in ended if not isinstance(one, ConnectionResetError)]
    if not got:
        return None
    trajectory = finished(session)

    by_turn = {session.find_turn(s.answer_name): s for s in got}
    assert sorted(by_turn) == list(range(len(got)))
    asked = {int(c.request_id.rpartition("t")[2]): c.prompt_ids.tolist() for c in engine.requests}
    prompts = [(p, answers[i]) for i, p in asked.items()]
    seen = []
    for turn in trajectory.turns:
        ids = trajectory.samples[turn.sample].table["token_ids"].tolist()
        assert ids[turn.start : turn.stop] == by_turn[turn.index].token_ids
        seen.append((ids[: turn.start], ids[turn.start : turn.stop]))
    assert len(seen) == len(got)
    assert not Counter(map(str, seen)) - Counter(map(str, prompts))
    trained = sum(int(s.table["loss_mask"].sum()) for s in trajectory.samples)
    assert trained == sum(len(sampled.token_ids) for sampled in got)
    if rows == "stepwise":
        assert len(trajectory.samples) == len(got)
    for sample in trajectory.samples:
        table = sample.table
        assert table["loss_mask"][-1]
        assert table["routing_recorded"].tolist() == [True] * (len(table) - 1) + [False]
        for at, token in enumerate(table["token_ids"].tolist()):
            if at < len(table) - 1:
                assert (table["routed_experts"][at] == scripted_routes(at, 5, token, SCRIPTED_ROUTING)).all()
            if table["loss_mask"][at]:
                assert table["rollout_logprobs"][at] == pytest.approx(scripted_logprob(at, 5, token))
    return trajectory


async def test_a_request_that_goes_on_renders_and_encodes_only_what_is_new(monkeypatch):
    chat = RENDERERS["plain"]
    engine = await ready([[*chat.encode("ab"), chat.eos_token_id]])
    limits = EpisodeConfig(max_turns=99, max_prompt_tokens=9000, max_total_tokens=10000)
    session, history, encoded = AgentSession(TASK, limits, PlayContext(engine, chat)), [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat, "encode", lambda text: encoded.append(len(text)) or type(chat).encode(chat, text))
        for turn in range(60):
            history.append({"role": "user", "content": f"and {turn:03}?"})
            _, message = await handed_out(session.answer_chat(session.parse_messages(history)))
            history.append(message)
    assert encoded == [len("<|user|>and 000?<|assistant|>")] * 60
    # A new one is compared with those that are kept, which is one.
    known = []
    monkeypatch.setattr(Conversation, "adopt_closest", lambda self, others: known.append(len(others)))
    await handed_out(session.answer_chat(session.parse_messages([{"role": "user", "content": "anew"}])))
    assert known == [1]
    assert len(finished(session).samples) == 2


@pytest.mark.parametrize("template", list(RENDERERS))
async def test_an_answer_keeps_its_own_tokens_on_every_branch_that_repeats_it(template):
    chat = RENDERERS[template]
    spelled = [[chat.encode(c)[0] for c in text] + [chat.eos_token_id] for text in ("abab", "ba", "aa", "b")]
    engine = await ready(spelled)
    session = AgentSession(
        TASK, EpisodeConfig(max_turns=9, max_prompt_tokens=900, max_total_tokens=1000), PlayContext(engine, chat)
    )
    root = [Message("user", "ab")]
    first, _ = await handed_out(session.answer_chat(root))
    left = [*root, Message("assistant", "abab"), Message("user", "left")]
    await handed_out(session.answer_chat(left))
    await handed_out(session.answer_chat([*root, Message("assistant", "abab"), Message("user", "right")]))
    # The older branch goes on after the newer one.
    await handed_out(session.answer_chat([*left, Message("assistant", "ba"), Message("user", "more")]))
    prompts = [call.prompt_ids.tolist() for call in engine.requests]
    head = [*prompts[0], *first.token_ids]
    for prompt in prompts[1:]:
        assert prompt[: len(head)] == head
    assert prompts[3][: len(prompts[1]) + 3] == [*prompts[1], *spelled[1]]
    assert len(finished(session).samples) == 2


async def test_history_that_was_edited_keeps_the_answers_that_it_repeats():
    chat = RENDERERS["hermes"]
    spelled = [[chat.encode(c)[0] for c in text] + [chat.eos_token_id] for text in ("abab", "ba", "b")]
    engine = await ready(spelled)
    session = AgentSession(
        TASK, EpisodeConfig(max_turns=9, max_prompt_tokens=900, max_total_tokens=1000), PlayContext(engine, chat)
    )
    history = [Message("user", "one"), Message("assistant", "abab"), Message("user", "two"), Message("assistant", "ba")]
    await handed_out(session.answer_chat(history[:1]))
    await handed_out(session.answer_chat(history[:3]))
    summary = [Message("user", "so far"), *history[1:], Message("user", "go on")]
    await handed_out(session.answer_chat(summary))
    tokens = engine.requests[2].prompt_ids.tolist()
    text = chat.decode(tokens)
    assert text == chat.render(summary)
    for answer in spelled[:2]:
        assert any(tokens[i : i + len(answer)] == answer for i in range(len(tokens)))
    rows = finished(session).samples
    assert [int(r.table["loss_mask"].sum()) for r in rows] == [len(spelled[0]) + len(spelled[1]), len(spelled[2])]


async def test_an_agent_that_gives_up_may_ask_for_something_else_where_an_episode_is_one_row():
    chat, reports = RENDERERS["plain"], []
    engine = await ready([[*chat.encode(text), chat.eos_token_id] for text in ("p", "ab", "q", "ba")])
    limits = EpisodeConfig(max_turns=2, max_prompt_tokens=900, max_total_tokens=1000, rows="merged")
    report = lambda event, **fields: reports.append((event, fields["tokens"]))  # noqa: E731
    session, asked = AgentSession(TASK, limits, PlayContext(engine, chat, report_event=report)), []
    for said in ("one", "another"):
        with pytest.raises(ConnectionResetError):
            async with session.answer_chat([*asked, Message("user", "a long " + said)]):
                raise ConnectionResetError
        asked.append(Message("user", said))
        sampled, _ = await handed_out(session.answer_chat(asked))
        asked.append(Message("assistant", sampled.text))
    assert reports == [("answer_undelivered", 2)] * 2
    (row,) = finished(session).samples
    text = chat.decode(row.table["token_ids"].tolist())
    assert text == "<|user|>one<|assistant|>ab<|end|><|user|>another<|assistant|>ba<|end|>"


async def test_merged_rows_refuse_a_branch_and_name_the_setting():
    chat = RENDERERS["plain"]
    limits = EpisodeConfig(max_turns=9, max_prompt_tokens=900, max_total_tokens=1000, rows="merged")
    session = AgentSession(TASK, limits, PlayContext(await ready([[chat.eos_token_id]]), chat))
    await handed_out(session.answer_chat([Message("user", "one")]))
    with pytest.raises(ApiError, match=r"episode\.rows"):
        await handed_out(session.answer_chat([Message("user", "two")]))
    assert np.isfinite(session.total_reward)


async def test_answers_that_come_in_another_order_than_they_were_asked_for_are_still_proved():
    """Two requests at once, the second answered first, and a third that continues it."""
    chat = RENDERERS["plain"]
    gates = {f"g00000003e0000t{i}": asyncio.Event() for i in range(4)}
    calls = []

    class Recorded:
        """What `record.routes.record_engine_routes` writes down, in its order."""

        def __init__(self, engine):
            self.engine, self.routing = engine, engine.routing

        async def generate(self, request):
            await gates[request.request_id].wait()
            got = await self.engine.generate(request)
            which = parse_episode_id(request.request_id)
            versions = np.zeros(len(got.token_ids), np.int32)
            facts = (request.prompt_ids, got.token_ids, got.logprobs, got.routed_experts, versions)
            calls.append(EngineCall(which.trajectory_id, which.sample_or_turn, 0.0, got.routes_from, *facts))
            return got

    engine = await ready([[*chat.encode(c), chat.eos_token_id] for c in "pqrs"])
    session = AgentSession(
        TASK, EpisodeConfig(max_prompt_tokens=900, max_total_tokens=1000), PlayContext(Recorded(engine), chat)
    )
    gates["g00000003e0000t0"].set()
    root = [Message("user", "x")]
    sampled, _ = await handed_out(session.answer_chat(root))
    root += [Message("assistant", sampled.text), Message("user", "y")]
    asked = [asyncio.create_task(handed_out(session.answer_chat(root))) for _ in range(2)]
    await asyncio.sleep(0)
    for i in (2, 1):
        gates[f"g00000003e0000t{i}"].set()
        await asyncio.wait([asked[i - 1]])
    gates["g00000003e0000t3"].set()
    second, _ = asked[1].result()
    await handed_out(session.answer_chat([*root, Message("assistant", second.text), Message("user", "z")]))
    assert [call.turn for call in calls] == [0, 2, 1, 3]
    for sample in finished(session).samples:
        table = sample.table
        names = ("token_ids", "loss_mask", "rollout_logprobs", "policy_version", "turn", "rewards")
        columns = {n: table[n] for n in names}
        used = table["routed_experts"]
        found = find_engine_routes(
            TrainedRoutes(1, sample.sample_id, "g00000003e0000", **columns, own=used, used=used), calls
        )
        assert found is not None, f"{sample.sample_id}: no attempt sampled it"
        rows, recorded = found
        assert recorded.tolist() == table["routing_recorded"].tolist()
        assert np.array_equal(rows[recorded], used[recorded])
