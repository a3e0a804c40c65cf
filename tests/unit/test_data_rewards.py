"""Rewards for rows of one's own: plain functions, several together, and those that are built in.

Functions in the forms of TRL and of verl: `test_documented_forms`.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from r3async.config import ConfigError, EnvConfig, EpisodeConfig, EvaluationConfig
from r3async.data.metrics import find_metric
from r3async.data.wire import decode_trajectory, encode_trajectory
from r3async.envs import EnvironmentFailed, StepResult, sum_episode_metrics
from r3async.envs.builtin_rewards import find_last_number
from r3async.record.trained_trajectories import compute_episode_metrics
from r3async.rollout.episode import EpisodePlayer, EpisodeTask
from r3async.rollout.evaluation import evaluate_without_model
from r3async.rollout.play_context import PlayContext
from r3async.tools.eval import describe_result
from tests.helpers.judge import PORT, judge_answers
from tests.helpers.rewards import play_answer, rewarded_rows
from tests.helpers.serving import answer_ids, ready, renderer

OWN = r"""
import time

def lengths(prompts, completions, completion_ids):
    assert len(prompts) == len(completions) == len(completion_ids) == 1
    return [float(len(ids)) for ids in completion_ids]

def math_only(prompts, completions, task, **kwargs):
    return [1.0 if each == "math" else None for each in task]

def plain(completion, answer):
    return completion == answer

def only(completion):
    return len(completion)

async def counts(completion, row):
    row["meta"]["seen"] = row["meta"].get("seen", 0) + 1
    return row["meta"]["seen"]

async def counts_as_trl(completions, meta, **columns):
    meta[0]["seen"] = meta[0].get("seen", 0) + 1
    return [meta[0]["seen"]]

async def pops(completion, row):
    return row.pop("answer", None) == completion

def pops_elsewhere(completion, row):
    return row.pop("answer", None) == completion

def two(completions, **kwargs):
    return [1.0, 0.0]

def listed(completion, answer):
    return [1.0]

def nan(completion, answer):
    return float("nan")

def huge(completion, answer):
    return 10**5000

def beyond(completion, answer):
    return 10**300

def nothing(completion, answer):
    return None

def slow(completion, answer):
    time.sleep(600)

def hungry(completions, hunger, **kwargs):
    return [0.0]

constant = 3
"""


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "broken.py").write_text("1/0")
    with rewarded_rows(tmp_path, monkeypatch) as make:
        yield make


async def test_several_rewards_are_weighed_and_told_by_name(dataset):
    own = [{"fn": "own.py:plain", "name": "right", "weight": 2.0}, {"fn": "own.py:only", "weight": -0.1}]
    env = dataset({"prompt": "1+1?", "answer": "2", "task": "math"}, [*own, "contains", "own.py:math_only"])
    assert await play_answer(env, "2") == (
        pytest.approx(2.0 - 0.1 + 1 + 1),
        {f"rewards/{name}": 1.0 for name in ("right", "only", "contains", "math_only")},
    )


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        ("two", r"reward 'two' must return a list with one reward for each completion, here one, not \[1.0, 0.0\]"),
        ("listed", r"reward 'listed' must return a finite number or None, not \[1.0\]"),
        ("nan", r"reward 'nan' must return a finite number or None, not nan"),
        ("huge", r"reward 'huge' must return a finite number or None, not a int that cannot be printed"),
        ("beyond", r"a reward must be at most 1e\+15 by size, not 1e\+300"),
        ("nothing", r"rows.jsonl, line 1: no reward applies: all returned None"),
        ("slow", r"took longer than env.step_timeout = 2 s"),
    ],
)
async def test_what_is_no_reward_fails_the_episode_by_name(dataset, fn, message):
    env = dataset({"prompt": "1+1?", "answer": "2"}, f"own.py:{fn}", step_timeout=2.0)
    with pytest.raises(EnvironmentFailed, match=message):
        await play_answer(env, "2")


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("own.py:hungry", r"rows.jsonl, line 1: no field 'hunger', which reward 'hungry' asks for"),
        ("own.py:plaim", r"own.py has no 'plaim'; did you mean 'plain'"),
        ("own.py:constant", r"is a int, not a function"),
        ("none.py:plain", r"there is no file .*/none.py"),
        ("nomodule:plain", r"`reward` = 'nomodule:plain' cannot be loaded"),
        ("broken.py:reward", r"'broken.py:reward' cannot be loaded: ZeroDivisionError: division by zero$"),
        ("plain", r"no such reward; .* Your own is `module:function`"),
        ([], "`reward` is empty"),
        (["exact", "exact"], "two are called 'exact'"),
        ([{"function": "exact"}], r"`reward\[0\]` = .*: it takes fn, weight and name|`reward\[0\]`.*fn"),
        ([{"fn": "exact", "weight": "much"}], r"`reward\[0\]`"),
        ([{"fn": "exact", "wieght": 2}], r"`reward\[0\]`.*wieght"),
        (3, r"`data.reward` = 3"),
    ],
)
def test_a_reward_that_cannot_be_is_refused_before_the_run(dataset, reward, message):
    with pytest.raises(ConfigError, match=message):
        dataset({"prompt": "1+1?", "answer": "2"}, reward)


@pytest.mark.parametrize(
    "rewards",
    [["counts"], ["counts_as_trl"], ["pops"], ["counts", "pops"], ["pops", "plain"], ["pops", "pops_elsewhere"]],
)
async def test_what_a_reward_changes_in_its_row_nobody_sees(dataset, rewards):
    named = [{"fn": f"own.py:{name}", "name": f"{i}"} for i, name in enumerate([*rewards, *rewards])]
    env = dataset({"prompt": "1+1?", "answer": "a", "meta": {}}, named)
    for _ in range(3):
        assert (await play_answer(env, "a"))[0] == len(named)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("3 and 4 make 7.", 7.0),
        (r"7, so \boxed{1,234.5} of 9", 1234.5),
        ("we get\n#### 72\nor 73", 72.0),
        ("-2", -2.0),
        ("1,000,000 or 2,5", 5.0),
        ("none", None),
        (r"\boxed{x} 5", 5.0),
    ],
)
def test_the_number_that_a_text_says(text, said):
    assert find_last_number(text) == said


@given(
    st.integers(-(10**9), 10**9),
    st.sampled_from(["{}", r"\boxed{{{}}}", "so\n#### {}", "it is {:,}."]),
    st.text("ab ", max_size=9),
)
def test_a_number_is_read_back_however_it_is_written(value, form, before):
    assert find_last_number(before + form.format(value)) == value


async def test_mathematics_is_verified_by_math_verify(dataset):
    pytest.importorskip("math_verify")
    env = dataset({"prompt": "half?", "answer": r"\frac{1}{2}"}, "math")
    assert (await play_answer(env, r"so $\frac{2}{4}$"))[0] == 1.0
    assert (await play_answer(env, r"so $\frac{2}{3}$"))[0] == 0.0


def test_without_math_verify_the_package_is_named(dataset, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs math-verify, which is not installed: pip install 'r3async\[data\]'"):
        dataset({"prompt": "1+1?", "answer": "2"}, "math")


async def test_rewards_by_name_come_with_the_trajectory_into_the_row_of_the_step(dataset):
    several = ["own.py:plain", {"fn": "own.py:lengths", "weight": 0.5}]
    env = dataset({"prompt": "1+1?", "answer": "ab"}, several, args={"system": "be brief"})
    chat = renderer()
    engine = await ready(answer_ids(chat, "wrong", "ab"))
    limits = EpisodeConfig(max_turns=1, max_new_tokens=16, max_prompt_tokens=64, max_total_tokens=128)
    played = [
        await EpisodePlayer(EpisodeTask(0, i, 0), env, limits, PlayContext(engine, chat)).play_episode()
        for i in range(2)
    ]
    sent = [decode_trajectory(encode_trajectory(each)) for each in played]
    wrong, right = {"rewards/plain": 0.0, "rewards/lengths": 6.0}, {"rewards/plain": 1.0, "rewards/lengths": 3.0}
    assert [each.metrics for each in sent] == [wrong, right]
    assert [each.reward for each in sent] == [3.0, 2.5]
    row = compute_episode_metrics(sent)
    assert row["rewards/plain/mean"] == row["rewards/plain/std"] == 0.5
    assert (row["rewards/lengths/mean"], row["rewards/lengths/std"], row["reward/mean"]) == (4.5, 1.5, 2.75)


async def test_an_evaluation_has_means_by_name(dataset):
    env = dataset({"prompt": "1+1?", "answer": "2"}, ["own.py:plain", {"fn": "own.py:only", "weight": 0.5}])
    config = EnvConfig(name="played")
    made = await evaluate_without_model(config, lambda: env, "oracle", EvaluationConfig(tasks=2), max_turns=1)
    assert made.reward_mean == 1.5
    assert made.metrics == {"rewards/only": 1.0, "rewards/plain": 1.0}
    means = [f"  mean rewards/{name} 1.0000" for name in ("only", "plain")]
    assert describe_result(made, "oracle", {"": config})[-2:] == means


def test_a_metric_that_is_no_number_fails_by_its_name():
    assert StepResult(1.0, metrics={"moves": np.int64(3)}).metrics == {"moves": 3.0}
    for value in (float("nan"), "many", None):
        with pytest.raises(EnvironmentFailed, match="metric 'moves' must be a finite number"):
            StepResult(1.0, metrics={"moves": value})


def test_metrics_of_turns_are_summed_and_shown_with_their_kind():
    assert sum_episode_metrics([{"moves": 2}, {}, {"moves": 3, "lost": 1}]) == {"moves": 5.0, "lost": 1.0}
    assert (
        find_metric("env/moves/mean").description
        == "Mean of 'moves', which the environment reported, over the episodes that have it."
    )
    assert find_metric("rewards/plain/std").description.startswith(
        "Standard deviation of reward 'plain', before its weight"
    )


async def test_a_reward_in_a_process_of_its_own_has_one_event_loop(dataset):
    with judge_answers() as answers:
        env = dataset({"prompt": "1+1?", "answer": "2"}, "tests.helpers.judge:asked_elsewhere", variables=[PORT])
        for _ in range(3):
            assert (await play_answer(env, "2"))[0] == 1.0
        assert len(answers) == 3
