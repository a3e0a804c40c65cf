"""Episodes and tasks that fail for good: a few are done without, many stop the run."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from r3async.config import EpisodeConfig
from r3async.data.model_shape import RoutingShape
from r3async.data.wire import decode_trajectory, encode_trajectory
from r3async.envs import Message, StepResult
from r3async.learner.micro_batches import pack_samples
from r3async.learner.prepare import prepare_minibatches
from r3async.learner.torch.backend import TorchLearner
from r3async.rollout.engine import EngineError, EngineLostError
from r3async.rollout.episode import EngineAbortError, EpisodeError, EpisodeTask, build_failed_trajectory
from r3async.rollout.lease_player import is_engine_failure
from r3async.rollout.scripted import SCRIPTED_ROUTING, ScriptedEngine
from r3async.schedule.groups import GroupBuffer
from r3async.schedule.staleness_check import check_staleness, compute_staleness_metrics
from r3async.schedule.task_failures import MIN_COUNTED_TASKS, RECENT_TASKS, EpisodeEnd, FailedTask, TaskFailures
from r3async.schedule.tasks import TaskCursor
from r3async.schedule.validation import validate_trajectories
from tests.helpers import torch as ht
from tests.helpers.playing import make_player, play_lease
from tests.helpers.serving import ready, renderer
from tests.helpers.steps import train_minibatch

RETRIES = 1


class Away:
    """Its first episode fails, however often it is tried."""

    tries = 0

    async def reset(self, task_seed):
        return [Message("user", "go")]

    async def step(self, action):
        Away.tries += 1
        if Away.tries <= RETRIES + 1:
            raise ConnectionError("the tool server is away")
        return StepResult(1.0, done=True)


SAMPLES = 8


def end_of(group, episode=0, by=None, task=None):
    return EpisodeEnd(group, episode, 100 + group if task is None else task, by, "why" if by else "")


def play_group(failures, group, by=None, episodes=SAMPLES):
    """What is quarantined, and whether there were too many failures at any time, when `episodes` of a group have ended so."""
    ends = [failures.record_end(end_of(group, e, by if e < episodes else None)) for e in range(SAMPLES)]
    return [task.task_seed for task in ends if task], by is not None and failures.exceeds_limit(by)


def test_an_environment_that_always_fails_stops_the_run_with_its_third_task():
    failures = TaskFailures(0.1, SAMPLES)
    assert [play_group(failures, g, "environment") for g in range(3)] == [([100], False), ([101], False), ([102], True)]
    told = failures.describe_failures("environment")
    assert told.startswith("24 episodes of 3 tasks, of the last 3 tasks, failed by the env")
    assert "supervise.max_failed_fraction = 0.1 allows 16 of 8 a task" in told
    first = TaskFailures(0.0, SAMPLES)
    first.record_end(end_of(0, by="engine"))
    assert first.exceeds_limit("engine")
    assert not first.exceeds_limit("environment")
    with pytest.raises(ValueError, match="in 0"):
        TaskFailures(1.5, 1)


def test_a_task_that_fails_in_part_or_by_the_engine_is_not_quarantined():
    failures = TaskFailures(0.5, SAMPLES)
    assert play_group(failures, 0, "environment", episodes=SAMPLES - 1) == ([], False)
    assert play_group(failures, 1, "engine") == ([], False)
    assert play_group(failures, 2, "learner") == ([102], False)


def test_a_task_that_fails_is_known_however_many_others_end_while_it_is_played():
    """In a large fleet a group was forgotten before its last episode ended, and its task was posed again."""
    others = 4 * RECENT_TASKS
    failures = TaskFailures(0.1, SAMPLES, in_flight=others)
    ends = [failures.record_end(end_of(0, e, "environment")) for e in range(SAMPLES - 1)]
    ends += [failures.record_end(end_of(group)) for group in range(1, others + 1)]
    assert not any(ends)
    assert failures.record_end(end_of(0, SAMPLES - 1, "environment")) == FailedTask(100, 0, "environment", "why")


def test_parts_of_a_group_on_several_generators_count_once_and_the_last_word_on_an_episode_counts():
    failures = TaskFailures(0.1, 2)
    assert failures.record_end(end_of(0, 0, "environment")) is None
    assert failures.record_end(end_of(0, 0, "environment")) is None  # played again: its generator was lost
    assert failures.record_end(end_of(0, 1, "environment")) is not None
    assert failures.record_end(end_of(0, 1, "environment")) is None
    assert failures.describe_failures("environment").startswith("2 episodes of 1 tasks, of the last 1 tasks")
    failures.record_end(end_of(0, 0))  # another generator could play it
    assert failures.describe_failures("environment").startswith("1 episodes of 1 tasks")


ends_of_runs = st.lists(
    st.tuples(st.integers(0, 150), st.integers(0, 2), st.sampled_from([None, "environment", "engine", "learner"])),
    max_size=400,
)


@given(ends_of_runs, st.sampled_from([0.0, 0.05, 0.2, 1.0]))
def test_it_stops_exactly_when_the_share_of_recent_tasks_is_over_the_limit(ends, limit):
    failures = TaskFailures(limit, 3)
    groups: dict[int, dict[int, str | None]] = {}
    for group, episode, by in ends:
        failures.record_end(end_of(group, episode, by))
        groups.setdefault(group, {})[episode] = by
        groups = dict(list(groups.items())[-RECENT_TASKS:])
        for who in ("environment", "engine", "learner"):
            share = sum(sum(b == who for b in g.values()) for g in groups.values()) / 3
            allowed = limit * max(len(groups), MIN_COUNTED_TASKS)
            assert failures.exceeds_limit(who) == (share > allowed + 1e-9), (share, allowed)


@pytest.mark.long
@given(st.integers(1, 30), st.dictionaries(st.integers(0, 29), st.integers(0, 100), max_size=12), st.integers(0, 9))
def test_no_group_poses_a_quarantined_task_and_what_was_leased_before_stays(size, quarantined, seed):
    quarantined = {task: group for task, group in quarantined.items() if task < size}
    plain, cursor = TaskCursor(seed, size), TaskCursor(seed, size, quarantined)
    for group in range(100):
        left = [t for t in range(size) if quarantined.get(t, 1000) > group]
        if not left:
            with pytest.raises(ValueError, match=f"all {size} tasks of the environment are quarantined"):
                cursor.pick_task(group)
            continue
        task = cursor.pick_task(group)
        assert task in left
        assert task == TaskCursor(seed, size, dict(quarantined)).pick_task(group)
        if plain.pick_task(group) in left:
            assert task == plain.pick_task(group)
    # One that is quarantined later changes nothing before that.
    later = TaskCursor(seed, size, {**quarantined, **{t: 50 for t in range(size) if t not in quarantined}})
    for group in range(50):
        if any(quarantined.get(t, 1000) > group for t in range(size)):
            assert later.pick_task(group) == cursor.pick_task(group)


def test_without_a_size_a_quarantined_task_is_not_posed_either():
    plain = TaskCursor(3)
    cursor = TaskCursor(3, quarantined={plain.pick_task(7): 5})
    assert [g for g in range(20) if cursor.pick_task(g) != plain.pick_task(g)] == [7]


@pytest.fixture
async def engine():
    return await ready([[65, 257]])


def player_of(engine, factory, reports, *, raise_failures=False, **settings):
    """Return a player of one turn an episode, which appends to `reports` each event with its facts."""
    settings = EpisodeConfig(max_turns=1, max_new_tokens=8, **settings)
    return make_player(factory, engine, renderer(), settings, reports, raise_failures=raise_failures)


async def test_a_group_with_a_failed_episode_is_complete_and_arrives_whole(engine):
    reports = []
    Away.tries = 0
    player = player_of(engine, Away, reports, retries=RETRIES)
    played = [*await play_lease(player, 0, 9, (0,)), *await play_lease(player, 0, 9, (1, 2))]
    delivered = [decode_trajectory(encode_trajectory(one.trajectory)) for one in played]
    ends = [one.end for one in played]
    assert [event for event, _ in reports] == ["episode_failed", "episode_abandoned"]
    assert [t.stop_reason for t in delivered] == ["error", "env_done", "env_done"]
    assert [(e.group_index, e.episode_index, e.task_seed) for e in ends] == [(0, i, 9) for i in range(3)]
    assert [e.failed_by for e in ends] == ["environment", None, None]
    buffer = GroupBuffer(3)
    for trajectory in delivered:
        validate_trajectories([trajectory], vocab_size=300, learner_version=5, max_tokens=100, routing=SCRIPTED_ROUTING)
        assert buffer.add(trajectory, 1)
    assert buffer.missing_in_group(0) == []


def test_failed_episodes_are_not_trained_and_compared_with_nobody(tmp_path):
    """Also where all of a step have failed."""
    path = ht.make_model(tmp_path / "model", "qwen3", vocab_size=272)
    shape = RoutingShape(layers=2, top_k=ht.TOP_K, num_experts=ht.EXPERTS)
    config = ht.settings()
    group = [build_failed_trajectory(EpisodeTask(0, i, 1), shape, 5) for i in range(2)]
    check_staleness([group], 3, 1)
    assert compute_staleness_metrics([group], 3, 1, 0.0)["staleness/max"] == 0
    minibatches, figures = prepare_minibatches([group], config)
    assert figures["advantage/zero_variance_groups"] == 1
    learner = TorchLearner.from_pretrained(config, path)
    before = {n: t.clone() for n, t in learner.export_weights().items()}
    assert train_minibatch(learner, pack_samples(minibatches[0], 400)).metrics["batch/trained_tokens"] == 0
    assert all(np.array_equal(before[n].numpy(), t.numpy()) for n, t in learner.export_weights().items())


class Unwell:
    """An environment, or an engine, that fails as often as it is told to."""

    def __init__(self, engine, environment_fails=0, engine_fails=0):
        self.engine, self.environment_fails, self.engine_fails = engine, environment_fails, engine_fails
        self.ends = []

    async def play(self, tolerant=True, **settings):
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
        reports = []
        player = player_of(self.engine, lambda: environment, reports, raise_failures=not tolerant, **settings)
        (played,) = await play_lease(player, 0, 9, (0,))
        self.ends.append(played.end)
        reports = [(event, facts.get("by")) for event, facts in reports]
        assert player.attempt_count == [event for event, _ in reports].count("episode_failed") + 1
        return played.trajectory.stop_reason, reports


async def test_what_the_engine_fails_at_is_not_charged_to_the_environment(engine):
    """Nor the other way round: an episode lives through as many failures of each as are allowed of it."""
    ending, reports = await Unwell(engine, environment_fails=2, engine_fails=1).play(retries=2)
    assert ending == "env_done"
    assert sorted(reports, key=str) == [("call_failed", None), *[("episode_failed", "environment")] * 2]


@pytest.mark.parametrize(
    ("fails", "by", "message"),
    [
        (
            {"environment_fails": 1},
            "environment",
            r"ConnectionError: the tool server is away \(test_failures\.py:\d+ in step\); 1 try \(episode\.retries = 0\)\n"
            r"Traceback(?s:.)*in step(?s:.)*is away",
        ),
        ({"engine_fails": 3}, "engine", r"the engine is away .*; 3 tries\nTraceback"),
    ],
)
async def test_a_failure_is_told_or_raised_with_the_traceback_of_what_failed(engine, fails, by, message):
    unwell = Unwell(engine, **fails)
    ending, reports = await unwell.play(retries=0)
    assert (ending, reports[-1]) == ("error", ("episode_abandoned", by))
    assert [e.failed_by for e in unwell.ends] == [by]
    assert re.search(message, unwell.ends[0].error)
    with pytest.raises(ExceptionGroup) as raised:
        await Unwell(engine, **fails).play(tolerant=False, retries=0)
    assert re.search(message, str(raised.value.exceptions[0]))


@pytest.mark.parametrize("by_an_agent", [False, True])
async def test_no_episode_fails_by_an_engine_that_is_lost(engine, by_an_agent):
    """Another one plays it. Calls are not tried again: every one would fail."""

    async def play_with_agent(task):
        raise RuntimeError("the endpoint answered 500") from EngineLostError("the engine is not running")

    engine.lose_process()
    reports, settings = [], EpisodeConfig(max_turns=1, max_new_tokens=8, retries=2)
    by = {"play_episode": play_with_agent} if by_an_agent else {}
    player = make_player(Away, engine, renderer(), settings, reports, raise_failures=False, **by)
    with pytest.raises(ExceptionGroup) as raised:
        await play_lease(player, 0, 9, (0,))
    assert isinstance(raised.value.exceptions[0], EngineLostError)
    assert reports == []


class Broken(Away):
    """Raises in every step; what, is drawn from `errors`."""

    def __init__(self, *errors):
        self.errors, self.steps = list(errors), 0

    async def step(self, action):
        self.steps += 1
        raise self.errors[min(self.steps, len(self.errors)) - 1]


async def play_broken(engine, retries, *errors):
    """Return how often an environment that raises these was stepped in an episode, what was reported, and its end."""
    environment, reports = Broken(*errors), []
    (played,) = await play_lease(player_of(engine, lambda: environment, reports, retries=retries), 35, 7, (0,))
    assert played.trajectory.stop_reason == "error"
    return environment.steps, reports, played.end


async def test_what_the_users_code_raises_twice_at_one_place_is_not_tried_again(engine):
    # The answers differ, the fault does not.
    errors = [ValueError(f"no number in '{answer}'") for answer in ("ab", "cd")]
    steps, reports, end = await play_broken(engine, 5, *errors)
    assert steps == 2
    assert [event for event, _ in reports] == ["episode_failed", "episode_abandoned"]
    assert end.error.startswith("ValueError: no number in 'cd' (test_failures.py:")
    assert " in step); 2 tries (episode.retries = 5)\nTraceback" in end.error


BEHIND = RuntimeError("no answer of the judge")
BEHIND.__cause__ = TimeoutError()


@pytest.mark.parametrize(
    "errors",
    [
        [TimeoutError("slow")],
        [ConnectionError("away")],
        [BEHIND],
        [ValueError("a"), KeyError("b"), ValueError("c"), KeyError("d")],
    ],
    ids=["a time-out", "a connection", "a time-out behind what a client raises", "something else each time"],
)
async def test_what_may_pass_is_tried_as_often_as_the_setting_allows(engine, errors):
    assert (await play_broken(engine, 3, *errors))[0] == 4


async def test_a_failed_try_names_task_group_error_and_the_users_last_frame_and_its_traceback_once(engine):
    _, reports, _ = await play_broken(engine, 1, ValueError("my parser broke on row 7"))
    (_, first), (_, last) = reports
    assert {"task_seed": 7, "group": 35, "by": "environment"}.items() <= first.items()
    assert first["error"] == last["error"] == "ValueError: my parser broke on row 7"
    assert re.fullmatch(r"test_failures\.py:\d+ in step", first["place"])
    assert first["exception"].rstrip().endswith("ValueError: my parser broke on row 7")
    assert "exception" not in last


async def test_tracebacks_of_ever_new_errors_end_at_a_limit(engine, monkeypatch):
    monkeypatch.setattr("r3async.rollout.lease_player.MAX_REPORTED_TRACEBACKS", 2)
    errors = [ValueError("a"), KeyError("b"), TypeError("c"), IndexError("d")]
    _, reports, _ = await play_broken(engine, 3, *errors)
    assert ["exception" in facts for _, facts in reports] == [True, True, False, False]


async def test_an_environment_that_exits_fails_its_episode_and_not_the_process(engine):
    _, reports, _ = await play_broken(engine, 0, SystemExit(3))
    assert reports[0][1]["error"] == "the environment called sys.exit(3)"
    assert reports[0][1]["place"].endswith("in step")


async def test_an_aborted_answer_is_the_engines_failure(engine):
    error = EpisodeError("given up")
    error.__cause__ = EngineAbortError("aborted")
    assert is_engine_failure(error)
    assert not is_engine_failure(EpisodeError("ended without an answer"))
