"""Evaluation: tasks that training never poses, and figures that are right."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3async.config import ConfigError, EnvConfig, EpisodeConfig, ServingConfig
from r3async.envs.factory import environment_factory
from r3async.rollout.evaluation import Outcome, evaluate, evaluate_without_model, evaluation_tasks, summarize_outcomes
from r3async.schedule.tasks import evaluation_seed, training_seed
from r3async.tools.eval import describe
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
        Outcome(1.0, 2, "env_done", 10, 3, 4),
        Outcome(0.0, 4, "length", 30, 4, 5),
        Outcome(0.5, 3, "env_done", 20, 4, 4),
    ]
    result = summarize_outcomes(outcomes, 2.0)
    assert (result.episodes, result.reward_mean, result.turns_mean, result.tokens_mean) == (3, 0.5, 3, 20)
    assert result.reward_error == pytest.approx(0.5 / math.sqrt(3))
    assert (result.version_min, result.version_max) == (3, 5)
    assert result.stop_reasons == {"env_done": (2, 0.75), "length": (1, 0.0)}
    assert summarize_outcomes(outcomes[:1], 1).reward_error is None
    assert "mean reward 0.5000 ± 0.2887" in describe(result, "m", REVERSE)[0]


async def test_the_oracle_earns_all_the_policy_what_its_answers_are_worth_and_all_play_the_same_tasks():
    factory = environment_factory(REVERSE)
    oracle = await evaluate_without_model(REVERSE, factory, "oracle", episodes=5, seed=1, max_turns=9)
    assert (oracle.reward_mean, oracle.turns_mean, oracle.stop_reasons) == (
        pytest.approx(1.0),
        3,
        {"env_done": (5, pytest.approx(1.0))},
    )
    cut = await evaluate_without_model(REVERSE, factory, "oracle", episodes=2, seed=1, max_turns=2)
    assert (cut.turns_mean, list(cut.stop_reasons)) == (2, ["turns"])

    chat, seeds, said_so_far = renderer(), [], []

    class Watched:
        def __init__(self):
            self.env = factory()

        async def reset(self, task_seed):
            seeds.append(task_seed)
            return await self.env.reset(task_seed)

        async def step(self, action):
            return await self.env.step(action)

    engine = await ready(answer_ids(chat, "zzzz"))
    values = {"episodes": 5, "seed": 1, "trained": REVERSE, "concurrency": 2, "progress": said_so_far.append}
    result = await evaluate(REVERSE, Watched, engine, chat, EPISODE, ServingConfig(), **values)
    assert sorted(seeds) == sorted(evaluation_seed(1, i) for i in range(5))
    assert len(said_so_far) == result.episodes == 5
    assert 0.2 <= result.reward_mean < 0.5  # the end of each answer is right
    assert (result.version_min, result.version_max, result.tokens_mean) == (5, 5, 15)


async def test_an_environment_without_such_a_policy_is_named():
    class Mute:
        async def reset(self, task_seed):
            return []

    with pytest.raises(ConfigError, match=r"--policy oracle.*'mine' has no oracle\(\)"):
        await evaluate_without_model(EnvConfig(name="mine"), Mute, "oracle", episodes=1, seed=0, max_turns=1)


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(0, 3), st.integers(1, 120))
def test_evaluation_poses_each_of_a_number_of_tasks_once_before_any_again(size, seed, episodes):
    seeds = [task.task_seed for task in evaluation_tasks(REVERSE, size, seed, episodes)]
    assert set(seeds) <= set(range(size))
    for epoch in range(0, episodes, size):
        posed = seeds[epoch : epoch + size]
        assert len(set(posed)) == len(posed)
    longer = evaluation_tasks(REVERSE, size, seed, episodes + 7)
    assert [task.task_seed for task in longer[:episodes]] == seeds
