"""Evaluation: tasks that training never poses, and figures that are right."""

import itertools
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from r3async.config import Config, ConfigError, EnvConfig, EpisodeConfig, EvaluationConfig
from r3async.envs.builtin import ReverseText
from r3async.envs.factory import build_environment_factory
from r3async.rollout.evaluation import EvaluationPlayer, build_evaluation_tasks, evaluate_without_model
from r3async.rollout.evaluation_results import (
    EpisodeOutcome,
    flatten_evaluation,
    join_sets,
    pass_at_k,
    summarize_outcomes,
)
from r3async.rollout.play_context import PlayContext
from r3async.schedule.tasks import evaluation_seed, training_seed
from r3async.tools.eval import describe_result
from tests.helpers.serving import answer_ids, ready, renderer

EPISODE = EpisodeConfig(max_turns=3, max_new_tokens=8, max_prompt_tokens=64, max_total_tokens=128, retries=0)
REVERSE = EnvConfig(name="reverse-text", args={"letters": 4, "turns": 3})


def test_training_and_evaluation_never_pose_one_task_also_where_a_seed_is_used_modulo_a_power_of_two():
    training = {training_seed(run, group) for run in range(20) for group in range(500)}
    evaluated = {evaluation_seed(seed, index) for seed in range(20) for index in range(500)}
    assert len(training) == len(evaluated) == 10_000
    assert all(0 <= s < 2**63 for s in training | evaluated)
    for bits in (63, 31, 16, 1):
        assert not {s % 2**bits for s in training} & {s % 2**bits for s in evaluated}
    assert training_seed(1, 2) == training_seed(1, 2) != training_seed(2, 1)


def test_the_figures_of_an_evaluation():
    outcomes = [
        EpisodeOutcome(1.0, 2, "env_done", 10, 3, 4),
        EpisodeOutcome(0.0, 4, "length", 30, 4, 5),
        EpisodeOutcome(0.5, 3, "env_done", 20, 4, 4),
    ]
    result = summarize_outcomes(outcomes, 2.0)
    assert (result.episodes, result.reward_mean, result.turns_mean, result.tokens_mean) == (3, 0.5, 3, 20)
    assert result.reward_error == pytest.approx(0.5 / math.sqrt(3))
    assert (result.version_min, result.version_max) == (3, 5)
    assert result.stop_reasons == {"env_done": (2, 0.75), "length": (1, 0.0)}
    assert summarize_outcomes(outcomes[:1], 1).reward_error is None
    assert "mean reward 0.5000 ± 0.2887" in describe_result(result, "m", {"": REVERSE})[0]


async def test_the_oracle_earns_all_the_policy_what_its_answers_are_worth_and_all_play_the_same_tasks():
    factory = build_environment_factory(REVERSE)
    oracle = await evaluate_without_model(REVERSE, factory, "oracle", EvaluationConfig(tasks=5, seed=1), max_turns=9)
    assert (oracle.reward_mean, oracle.turns_mean) == (pytest.approx(1.0), 3)
    assert oracle.stop_reasons == {"env_done": (5, pytest.approx(1.0))}
    cut = await evaluate_without_model(REVERSE, factory, "oracle", EvaluationConfig(tasks=2, seed=1), max_turns=2)
    assert (cut.turns_mean, list(cut.stop_reasons)) == (2, ["turns"])

    chat, seeds, said_so_far = renderer(), [], []

    class Watched(ReverseText):
        async def reset(self, task_seed):
            seeds.append(task_seed)
            return await super().reset(task_seed)

    engine = await ready(answer_ids(chat, "zzzz"))

    async def make_factory(env):
        return Watched

    player = EvaluationPlayer(Config(), PlayContext(engine, chat), make_factory, REVERSE, progress=said_so_far.append)
    result = await player.play_set(REVERSE, EvaluationConfig(tasks=5, seed=1), EPISODE)
    assert sorted(seeds) == sorted(evaluation_seed(1, i) for i in range(5))
    assert len(said_so_far) == result.episodes == 5
    assert 0.2 <= result.reward_mean < 0.5  # the end of each answer is right
    assert (result.version_min, result.version_max, result.tokens_mean) == (5, 5, 15)


async def test_an_environment_without_such_a_policy_is_named():
    class Mute:
        async def reset(self, task_seed):
            return []

    with pytest.raises(ConfigError, match=r"--policy oracle.*'mine' has no oracle\(\)"):
        await evaluate_without_model(EnvConfig(name="mine"), Mute, "oracle", EvaluationConfig(tasks=1), max_turns=1)


@given(st.integers(1, 40), st.integers(0, 3), st.integers(1, 120))
def test_evaluation_poses_each_of_a_number_of_tasks_once_at_most(size, seed, episodes):
    tasks = build_evaluation_tasks(REVERSE, size, EvaluationConfig(tasks=episodes, seed=seed))
    seeds = [task.task_seed for task in tasks]
    assert set(seeds) <= set(range(size))
    assert len(set(seeds)) == len(seeds) == min(episodes, size)
    longer = build_evaluation_tasks(REVERSE, size, EvaluationConfig(tasks=episodes + 7, seed=seed))
    assert [task.task_seed for task in longer[: len(seeds)]] == seeds


@given(st.integers(1, 9), st.data())
def test_pass_at_k_is_the_share_of_all_choices_of_k_answers_with_one_that_passes(n, data):
    passed, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    choices = list(itertools.combinations([True] * passed + [False] * (n - passed), k))
    assert pass_at_k(n, passed, k) == pytest.approx(sum(any(choice) for choice in choices) / len(choices))


def test_pass_at_more_answers_than_there_are_is_refused():
    with pytest.raises(ValueError, match="pass@4 cannot be estimated from 3 answers"):
        pass_at_k(3, 1, 4)


def test_intervals_are_over_tasks_whose_episodes_depend_on_each_other():
    outcomes = [EpisodeOutcome(float(task < 5), 1, "env_done", task_seed=task) for task in range(10) for _ in range(4)]
    result = summarize_outcomes(outcomes, 1.0)
    error = math.sqrt(10 / 9 * 0.25 / 10)  # of ten tasks, and not of forty episodes
    assert (result.episodes, result.tasks, result.reward_mean) == (40, 10, 0.5)
    assert result.reward_error == pytest.approx(error)
    assert (result.reward_low, result.reward_high) == pytest.approx((0.5 - 1.96 * error, 0.5 + 1.96 * error))
    assert {k: p[0] for k, p in result.passes.items()} == {"1": 0.5, "2": 0.5, "4": 0.5}
    assert result.rewards["3"] == [1.0] * 4
    text = "\n".join(describe_result(result, "m", {"": REVERSE}))
    assert "avg@4 0.5000  (95 %: 0.1733 to 0.8267), over 10 tasks" in text


def test_what_passes_is_a_setting_and_k_goes_as_far_as_every_task_has_episodes():
    rewards = {0: [0.1 + 0.2, 0.0, 0.0], 1: [0.0, 0.0, 0.3]}
    outcomes = [EpisodeOutcome(r, 1, "env_done", task_seed=task) for task, of in rewards.items() for r in of]
    passes = summarize_outcomes(outcomes, 1.0, pass_reward=0.3).passes
    assert {k: round(p[0], 6) for k, p in passes.items()} == {"1": 0.333333, "2": 0.666667, "3": 1.0}
    assert summarize_outcomes(outcomes[:4], 1.0, pass_reward=0.3).passes.keys() == {"1"}


async def test_samples_and_temperature_of_a_set_reach_the_engine_and_its_tasks():
    chat = renderer()
    engine = await ready(answer_ids(chat, "zzzz"))
    tasks = EvaluationConfig(tasks=3, samples_per_task=4, temperature=0.5)

    async def make_factory(env):
        return build_environment_factory(env)

    player = EvaluationPlayer(Config(), PlayContext(engine, chat), make_factory, REVERSE)
    made = await player.play_set(REVERSE, tasks, EPISODE)
    assert (made.episodes, made.tasks, list(made.passes)) == (12, 3, ["1", "2", "4"])
    assert {call.temperature for call in engine.requests} == {0.5}
    assert len({call.request_id for call in engine.requests}) == len(engine.requests), "no name is shared"
    await player.play_set(REVERSE, EvaluationConfig(tasks=3, temperature=0), EPISODE)
    assert engine.requests[-1].temperature == 0


def test_the_figures_of_several_sets_are_told_by_name_and_those_of_the_first_without():
    def played(reward, newest, seconds):
        outcome = EpisodeOutcome(reward, 1, "env_done", version_min=3, version_max=newest)
        return summarize_outcomes([msgspec.structs.replace(outcome, task_seed=t) for t in (1, 2)], seconds)

    one, two = played(1.0, 3, 1.0), played(0.0, 5, 2.0)
    assert join_sets({"": one}) is one
    figures = flatten_evaluation(msgspec.to_builtins(join_sets({"greedy": one, "sampled": two})))
    assert (figures["reward_mean"], figures["greedy/reward_mean"], figures["sampled/reward_mean"]) == (1.0, 1.0, 0.0)
    assert (figures["pass@1"], figures["sampled/pass@1"], figures["version_max"], figures["seconds"]) == (1, 0, 5, 3)
    assert not [name for name in figures if "rewards" in name]
