"""Episodes that fail for good: a few are done without, many stop the run."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from r3async.batching.packing import pack
from r3async.buffer.groups import GroupBuffer
from r3async.buffer.validation import validate_trajectory
from r3async.config import EpisodeConfig
from r3async.engines.base import EngineError, RoutingShape
from r3async.engines.scripted import SCRIPTED_ROUTING, ScriptedEngine
from r3async.envs.base import Message, StepResult
from r3async.episodes.chat import ChatRenderer
from r3async.episodes.group import GroupPlayer, engine_failed
from r3async.episodes.loop import EngineAborted, EpisodeError, EpisodeTask, failed_trajectory
from r3async.learners.prepare import prepare
from r3async.learners.torch.backend import TorchLearner
from r3async.scheduling.admission import GroupLease
from r3async.scheduling.age import age_metrics, check_ages
from r3async.scheduling.failures import FEWEST, FailureBudget
from r3async.transport.wire import decode_trajectory, encode_trajectory
from r3async.weights.manifest import WeightManifest
from tests import helpers_torch as ht
from tools.init_model import byte_tokenizer

LIMITS = EpisodeConfig(max_turns=1, max_new_tokens=8, retries=1)


class Away:
    """Its first episode fails, however often it is tried."""

    tries = 0

    async def reset(self, task_seed):
        return [Message("user", "go")]

    async def step(self, action):
        Away.tries += 1
        if Away.tries <= LIMITS.retries + 1:
            raise ConnectionError("the tool server is away")
        return StepResult(1.0, done=True)


def test_one_failure_among_many_is_allowed_and_an_environment_that_always_fails_stops_soon():
    budget = FailureBudget(0.1)
    assert not budget.ended(failed=True)
    assert not any(budget.ended(failed=False) for _ in range(9))
    fresh = FailureBudget(0.1)
    assert [fresh.ended(failed=True) for _ in range(3)] == [False, False, True]
    assert FailureBudget(0.0).ended(failed=True)
    assert fresh.describe() == "3 of the last 3 episodes failed"
    with pytest.raises(ValueError, match="in 0"):
        FailureBudget(1.5)


@given(st.lists(st.booleans()), st.sampled_from([0.0, 0.05, 0.2, 1.0]))
def test_it_stops_exactly_when_the_fraction_of_recent_episodes_is_over_the_limit(outcomes, limit):
    budget, seen = FailureBudget(limit), []
    for failed in outcomes:
        seen.append(failed)
        recent = seen[-100:]
        over = sum(recent) > limit * max(len(recent), FEWEST)
        assert budget.ended(failed=failed) == (failed and over)
    assert budget.failed == sum(seen)


async def test_a_group_with_a_failed_episode_is_complete_and_arrives_whole():
    delivered, reports = [], []
    engine = ScriptedEngine([[65, 257]])
    await engine.start()
    await engine.install(WeightManifest(version=0, path="", tensors={}, nbytes=0), timeout=1)
    Away.tries = 0

    async def deliver(trajectory):
        delivered.append(decode_trajectory(encode_trajectory(trajectory)))

    player = GroupPlayer(
        factory=Away,
        engine=engine,
        renderer=ChatRenderer(byte_tokenizer()),
        settings=LIMITS,
        generator_id="g",
        deliver=deliver,
        report=lambda event, **fields: reports.append(event),
        failures=FailureBudget(0.5),
    )
    await player.play(GroupLease(0, 9, (0,)))
    await player.play(GroupLease(0, 9, (1, 2)))
    assert reports == ["episode_failed", "episode_failed", "episode_given_up"]
    assert [t.stop_reason for t in delivered] == ["error", "env_done", "env_done"]
    buffer = GroupBuffer(3)
    for trajectory in delivered:
        validate_trajectory(trajectory, vocab_size=300, learner_version=0, max_tokens=100, routing=SCRIPTED_ROUTING)
        assert buffer.add(trajectory, 1)
    assert buffer.missing(0) == []


def test_failed_episodes_are_not_trained_and_compared_with_nobody(tmp_path):
    """Also where all of a step have failed."""
    path = ht.make_model(tmp_path / "model", "qwen3", vocab_size=272)
    shape = RoutingShape(layers=2, top_k=ht.TOP_K, num_experts=ht.EXPERTS)
    config = ht.settings()
    group = [failed_trajectory(EpisodeTask(0, i, 1), shape, 5) for i in range(2)]
    check_ages([group], 3, 1)
    assert age_metrics([group], 3, 1, 0.0)["staleness/max"] == 0
    minibatches, figures = prepare([group], config)
    assert figures["advantage/zero_variance_groups"] == 1
    learner = TorchLearner(config, path)
    before = {n: t.clone() for n, t in learner.export().items()}
    result = learner.train_step(pack(minibatches[0], 400))
    assert result.metrics["batch/trained_tokens"] == 0
    assert all(np.array_equal(before[n].numpy(), t.numpy()) for n, t in learner.export().items())


class Unwell:
    """An environment, or an engine, that fails as often as it is told to."""

    def __init__(self, engine, environment_fails=0, engine_fails=0):
        self.engine, self.environment_fails, self.engine_fails = engine, environment_fails, engine_fails
        self.budgets = {"failures": FailureBudget(1.0), "engine_failures": FailureBudget(1.0)}

    async def play(self, **settings):
        async def generate(request):
            self.engine_fails -= 1
            if self.engine_fails >= 0:
                raise EngineError("the engine is away")
            return await ScriptedEngine.generate(self.engine, request)

        async def step(action):
            self.environment_fails -= 1
            if self.environment_fails >= 0:
                raise ConnectionError("the tool server is away")
            return StepResult(1.0, done=True)

        self.engine.generate = generate
        environment = Away()
        environment.step = step
        delivered, reports = [], []

        async def deliver(trajectory):
            delivered.append(trajectory)

        player = GroupPlayer(
            factory=lambda: environment,
            engine=self.engine,
            renderer=ChatRenderer(byte_tokenizer()),
            settings=EpisodeConfig(max_turns=1, max_new_tokens=8, **settings),
            generator_id="g",
            deliver=deliver,
            report=lambda event, **fields: reports.append((event, fields.get("by"))),
            **self.budgets,
        )
        await player.play(GroupLease(0, 9, (0,)))
        ending, failed = delivered[0].stop_reason, [event for event, _ in reports].count("episode_failed")
        assert player.ended == failed + (ending != "error")
        return ending, reports


@pytest.fixture
async def engine():
    engine = ScriptedEngine([[65, 257]])
    await engine.start()
    await engine.install(WeightManifest(version=0, path="", tensors={}, nbytes=0), timeout=1)
    return engine


async def test_what_the_engine_fails_at_is_not_charged_to_the_environment(engine):
    """Nor the other way round: an episode lives through as many failures of each as are allowed of it."""
    ending, reports = await Unwell(engine, environment_fails=2, engine_fails=1).play(retries=2, engine_retries=1)
    assert ending == "env_done"
    assert sorted(by for _, by in reports) == ["engine", "environment", "environment"]


async def test_an_episode_is_given_up_by_the_budget_that_is_spent(engine):
    unwell = Unwell(engine, engine_fails=2)
    ending, reports = await unwell.play(retries=9, engine_retries=1)
    assert ending == "error"
    assert reports[-1] == ("episode_given_up", "engine")
    assert (unwell.budgets["engine_failures"].failed, unwell.budgets["failures"].failed) == (1, 0)


@pytest.mark.parametrize(
    ("fails", "budget", "message"),
    [
        (
            {"environment_fails": 1},
            "failures",
            r"by the environment \(episode\.retries = 0\).*ConnectionError(?s:.)*in step(?s:.)*is away",
        ),
        ({"engine_fails": 1}, "engine_failures", r"by the engine \(episode\.engine_retries = 0\).*EngineError"),
    ],
)
async def test_too_many_failures_stop_with_the_traceback_of_what_failed(engine, fails, budget, message):
    unwell = Unwell(engine, **fails)
    unwell.budgets[budget] = FailureBudget(0.0)
    with pytest.raises(ExceptionGroup) as raised:
        await unwell.play(retries=0, engine_retries=0)
    assert re.search(message, str(raised.value.exceptions[0]))


async def test_an_aborted_answer_is_the_engines_failure(engine):
    error = EpisodeError("given up")
    error.__cause__ = EngineAborted("aborted")
    assert engine_failed(error)
    assert not engine_failed(EpisodeError("ended without an answer"))
