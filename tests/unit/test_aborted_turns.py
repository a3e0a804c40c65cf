"""An engine that gives up an answer loses that answer, and nothing else of the episode."""

import asyncio

import numpy as np
import pytest

from r3async.config import EpisodeConfig
from r3async.envs import Message, StepResult
from r3async.rollout.endpoint.protocol import ApiError
from r3async.rollout.endpoint.session import AgentSession
from r3async.rollout.engine import EngineError, Generation, GenerationRequest
from r3async.rollout.episode import EpisodePlayer, EpisodeTask
from r3async.rollout.play_context import PlayContext
from r3async.rollout.renderer import ChatRenderer
from r3async.rollout.scripted import SCRIPTED_ROUTING
from r3async.tools.init_model import build_byte_tokenizer
from tests.helpers.playing import make_player, play_lease
from tests.helpers.scripted import scripted_logprob, scripted_routes
from tests.helpers.serving import handed_out, ready
from tests.helpers.templates import QWEN3, renderer

TASK = EpisodeTask(0, 0, 0)


def limits(**settings) -> EpisodeConfig:
    return EpisodeConfig(max_new_tokens=40, max_prompt_tokens=400, max_total_tokens=500, **settings)


class Counts:
    """Three turns; how often it was begun, and what it heard."""

    def __init__(self):
        self.begun, self.answers = 0, []

    async def reset(self, task_seed):
        self.begun += 1
        return [Message("user", "go")]

    async def step(self, action):
        self.answers.append(action.text)
        return StepResult(1.0, [Message("user", "more")], done=len(self.answers) >= 3)


class GivesUp:
    """Fails at the calls of these numbers: with an error, in the middle of an answer, or before its first token."""

    version, routing = 5, SCRIPTED_ROUTING

    def __init__(self, engine, how, *numbers):
        self.engine, self.how, self.numbers, self.asked = engine, how, numbers, 0
        self.requests: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        number, self.asked = self.asked, self.asked + 1
        if number not in self.numbers:
            return await self.engine.generate(request)
        if self.how == "error":
            raise EngineError("the engine is away")
        if self.how == "partial":
            whole = await self.engine.generate(request)
            rows = whole.routed_experts[:-1]
            return Generation(whole.token_ids[:1], whole.logprobs[:1], whole.version_spans, rows, 0, "abort")
        return Generation(np.zeros(0, np.int32), np.zeros(0, np.float32), [], None, request.routes_from, "abort")


async def engine_that(how, *numbers, script=None):
    chat = ChatRenderer(build_byte_tokenizer())
    said = script or [[*chat.encode(c), chat.eos_token_id] for c in ("one", "two", "three", "four", "five")]
    return chat, GivesUp(await ready(said), how, *numbers)


def check(trajectory, requests) -> None:
    """Whatever failed on the way, the rows are those of an engine that never did."""
    for sample in trajectory.samples:
        table = sample.table
        assert table["routing_recorded"].tolist() == [True] * (len(table) - 1) + [False]
        for at, token in enumerate(table["token_ids"].tolist()):
            if at < len(table) - 1:
                assert (table["routed_experts"][at] == scripted_routes(at, 5, token, SCRIPTED_ROUTING)).all()
            if table["loss_mask"][at]:
                assert table["rollout_logprobs"][at] == pytest.approx(scripted_logprob(at, 5, token))
    assert len({request.request_id for request in requests}) == len(requests)


@pytest.mark.parametrize("rows", ["auto", "stepwise"])
@pytest.mark.parametrize("how", ["error", "partial", "nothing"])
async def test_the_episode_goes_on_from_its_answered_turns_and_only_that_call_is_made_again(how, rows):
    chat, engine = await engine_that(how, 2, 3)
    env, reports = Counts(), []
    report = lambda event, **fields: reports.append((event, fields["attempt"]))  # noqa: E731
    trajectory = await EpisodePlayer(
        TASK, env, limits(rows=rows), PlayContext(engine, chat, report_event=report)
    ).play_episode()
    assert (env.begun, len(env.answers), len(engine.requests)) == (1, 3, 5)
    asked = [request.prompt_ids.tolist() for request in engine.requests]
    assert asked[2] == asked[3] == asked[4]
    assert len(trajectory.turns) == 3
    assert reports == [("call_failed", 1), ("call_failed", 2)]
    check(trajectory, engine.requests)


async def test_a_row_that_branches_is_asked_again_too():
    chat = renderer(QWEN3)
    answer = [*chat.encode("<think>\nhm\n</think>\n\nfive"), chat.eos_token_id]
    engine = GivesUp(await ready([answer]), "partial", 1, 2)
    trajectory = await EpisodePlayer(TASK, Counts(), limits(), PlayContext(engine, chat)).play_episode()
    assert len(trajectory.samples) == 3
    check(trajectory, engine.requests)


async def test_after_too_many_the_episode_has_failed_by_the_engine_and_is_not_begun_again():
    chat, engine = await engine_that("error", *range(1, 99))
    env, reports = Counts(), []
    player = make_player(lambda: env, engine, chat, limits(retries=2), reports)
    with pytest.raises(ExceptionGroup) as raised:
        await play_lease(player, 0, 9, (0,))
    assert "; 3 tries" in str(raised.value.exceptions[0])
    assert (env.begun, len(engine.requests)) == (1, 4)
    assert [event for event, _ in reports] == ["call_failed"] * 3 + ["episode_failed"]


@pytest.mark.parametrize("how", ["error", "partial", "nothing"])
async def test_an_agent_is_answered_late_and_does_not_notice(how):
    chat, engine = await engine_that(how, 1, 3)
    session = AgentSession(TASK, limits(), PlayContext(engine, chat))
    talk = [Message("user", "go")]
    for _ in range(3):
        _, message = await handed_out(session.answer_chat(talk))
        talk += [Message("assistant", message["content"]), Message("user", "more")]
    session.set_reward(1.0)
    session.close()
    trajectory = session.build_trajectory("stop")
    assert session.engine_failure is None
    assert len(trajectory.turns) == 3
    assert len(trajectory.samples) == 1
    check(trajectory, engine.requests)


async def test_an_agent_whose_engine_fails_too_often_is_refused_and_the_engine_named():
    chat, engine = await engine_that("nothing", *range(1, 99))
    session = AgentSession(TASK, limits(), PlayContext(engine, chat))
    await handed_out(session.answer_chat([Message("user", "go")]))
    with pytest.raises(ApiError, match="the engine failed") as refused:
        await handed_out(session.answer_chat([Message("user", "again")]))
    assert not refused.value.can_retry
    assert len(engine.requests) == 4
    assert "aborted" in str(session.engine_failure)


async def test_closing_a_session_ends_a_call_that_is_made_again():
    chat, engine = await engine_that("nothing", 0)
    asked_again = asyncio.Event()

    async def hold(request):
        if engine.requests:
            asked_again.set()
            await asyncio.Event().wait()
        return await GivesUp.generate(engine, request)

    engine.generate = hold
    session = AgentSession(TASK, limits(), PlayContext(engine, chat))
    asking = asyncio.create_task(handed_out(session.answer_chat([Message("user", "go")])))
    async with asyncio.timeout(120):
        await asked_again.wait()
        session.close()
        with pytest.raises(ApiError, match="has ended"):
            await asking
    assert session.turn_count == 0
