"""The built-in environments: their rewards, their scale, and that a seed decides everything."""

import copy
import json
import random
from fractions import Fraction

import pytest

from r3async.config import ConfigError, EnvConfig
from r3async.envs import Action, HasRandomAnswer, Message, StepResult
from r3async.envs.builtin import evaluate_expression
from r3async.envs.factory import BUILTIN_ENVIRONMENTS, build_environment_factory
from tests.helpers.rewards import mean_reward

ORACLE = {"guess": 0.9}  # 1 - noise / 2: its reward is noisy on purpose


async def play(env, seed, answers):
    """Messages and results, for the oracle's answers where `answers` run out."""
    replies, answers = [await env.reset(seed)], list(answers)
    while True:
        result = await env.step(Action(answers.pop(0) if answers else env.oracle()))
        replies.append(result)
        if result.done:
            return replies


@pytest.mark.parametrize("name", BUILTIN_ENVIRONMENTS)
async def test_the_oracle_earns_everything_and_a_blind_policy_much_less(name):
    factory = build_environment_factory(EnvConfig(name=name))
    best = await mean_reward(factory, "oracle", 300)
    blind = await mean_reward(factory, "random", 300)
    assert best == pytest.approx(ORACLE.get(name, 1.0), abs=0.02 if name in ORACLE else 1e-9)
    assert 0 <= blind < best - 0.4


@pytest.mark.parametrize("name", BUILTIN_ENVIRONMENTS)
async def test_equal_seeds_pose_equal_tasks_and_pay_equal_answers_equally(name):
    factory = build_environment_factory(EnvConfig(name=name))
    assert await play(factory(), 11, []) == await play(factory(), 11, [])
    assert await play(factory(), 11, ["7", "8"]) == await play(factory(), 11, ["7", "8"])
    # A game whose first prompt is the same for every task differs in what follows.
    assert len({repr(await play(factory(), seed, ["1"])) for seed in range(8)}) > 1


@pytest.mark.parametrize("name", BUILTIN_ENVIRONMENTS)
async def test_an_episode_earns_between_nothing_and_one_whatever_is_answered(name):
    factory, rng = build_environment_factory(EnvConfig(name=name)), random.Random(3)
    for seed in range(60):
        env, total, done = factory(), 0.0, False
        await env.reset(seed)
        while not done:
            noise = "".join(rng.choices('0123456789+-*/(){}":abc \n', k=rng.randrange(12)))
            assert isinstance(env, HasRandomAnswer)
            result = await env.step(Action(rng.choice([noise, env.oracle(), env.random_answer(rng)])))
            total, done = total + result.reward, result.done
        assert -1e-9 <= total <= 1 + 1e-9


@pytest.mark.parametrize("name", BUILTIN_ENVIRONMENTS)
async def test_a_copy_in_the_middle_of_an_episode_goes_its_own_way(name):
    env = build_environment_factory(EnvConfig(name=name))()
    await env.reset(5)
    other, best = copy.deepcopy(env), env.oracle()
    await other.step(Action("nonsense"))
    assert env.oracle() == best


async def test_sorting_asks_for_the_letters_of_earlier_turns_too():
    env = build_environment_factory(EnvConfig(name="alphabet-sort", args={"letters": 3, "more": 2, "turns": 3}))()
    given = (await env.reset(1))[0].content
    for _ in range(2):
        assert env.oracle() == "".join(sorted(given))
        given += (await env.step(Action(env.oracle()))).messages[0].content
    assert len(given) == 7
    assert env.oracle() == "".join(sorted(given))
    assert (await env.step(Action("zzz"))).reward < 1 / 3


async def find_secret(factory, seed):
    """Return the number that is to be guessed."""
    for number in range(1, 9):
        env = factory()
        await env.reset(seed)
        if (await env.step(Action(str(number)))).reward == 1:
            return number
    raise AssertionError("no number is right")


async def test_guessing_is_answered_by_where_to_look_and_an_answer_that_is_no_number_costs_a_turn():
    factory = build_environment_factory(EnvConfig(name="guess", args={"highest": 8, "turns": 3, "noise": 0.0}))
    secret, env = await find_secret(factory, 2), factory()
    await env.reset(2)
    replies = [(await env.step(Action(text))).messages[0].content for text in ("one", str(secret - 1))]
    assert replies == ["a number", "higher"]
    assert await env.step(Action(str(secret))) == StepResult(1.0, done=True)
    lost = build_environment_factory(EnvConfig(name="guess", args={"turns": 1, "noise": 0.0}))()
    await lost.reset(2)
    assert (await lost.step(Action("9" * 10_000))).reward == 0


async def test_the_noise_of_a_guess_is_drawn_from_task_and_answers():
    factory = build_environment_factory(EnvConfig(name="guess", args={"turns": 1, "highest": 4, "noise": 0.5}))
    paid = {}
    for seed in range(20):
        for answer in "1234":
            env = factory()
            await env.reset(seed)
            paid[seed, answer] = (await env.step(Action(answer))).reward
            assert 0 <= paid[seed, answer] <= 1
    assert len(set(paid.values())) == len(paid)


@pytest.mark.parametrize(
    ("expression", "reward"),
    [
        ("(3+5)/2", 1.0),
        ("((5+3)/2)", 1.0),
        (" 5 - 1 ", 0.0),
        ("5*3", 0.1),
        ("2+5-3", 1.0),
        ("2+2+3-3", 0.0),
        ("2**2", 0.0),
        ("", 0.0),
    ],
)
async def test_countdown_wants_the_target_from_the_given_numbers(expression, reward):
    env = build_environment_factory(EnvConfig(name="countdown"))()
    assert await env.reset(1) == [Message("user", "3 2 5=4")]
    assert (await env.step(Action(expression))).reward == reward


@pytest.mark.parametrize(
    ("expression", "value", "numbers"),
    [("1/3+2", Fraction(7, 3), [1, 3, 2]), ("-(2-5)*4", 12, [2, 5, 4]), ("7", 7, [7])],
)
def test_arithmetic_is_exact_and_returns_what_it_used(expression, value, numbers):
    assert evaluate_expression(expression) == (value, numbers)


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("2**9", "only whole numbers"),
        ("9" * 13, "more than 12 digits"),
        ("1+" * 150 + "1", "longer than 200"),
        ("1/0", "division by zero"),
        ("1/(2-2)", "division by zero"),
        ("__import__('os')", "only whole numbers"),
        ("True+1", "only whole numbers"),
        ("1.5", "only whole numbers"),
        ("a", "only whole numbers"),
        ("1 +", "not an expression"),
        ("(" * 150 + "1", "not an expression"),
        ("\x00", "not an expression"),
        ("-" * 190 + "(1", "not an expression"),
    ],
)
def test_arithmetic_refuses_what_is_not_arithmetic_or_too_large(expression, why):
    with pytest.raises(ValueError, match=why):
        evaluate_expression(expression)


CALL = '{"tool": "calculate", "args": {"expression": "2*3"}}'


@pytest.mark.parametrize(
    ("answer", "replies"),
    [
        (CALL, "6"),
        ('{"tool": "calculate", "args": {"expression": "7/2"}}', "7/2"),
        ('{"tool": "calculate", "args": {"expression": "1/0"}}', "error: division by zero"),
        ('{"tool": "calculate", "args": {"expression": 3}}', "error: not a call"),
        ('{"tool": "search", "args": {}}', "error: no such tool, there is calculate"),
        ('{"answer": "6"}', "error: not a call"),
        ('{"answer": true}', "error: not a call"),
        ("[" * 5000, "error: not JSON"),
        ("six", "error: not JSON"),
    ],
)
async def test_the_calculator_answers_a_call_and_names_what_is_wrong_with_another(answer, replies):
    env = build_environment_factory(EnvConfig(name="tool-calculator"))()
    await env.reset(1)
    result = await env.step(Action(answer))
    assert (result.reward, result.done) == (0.0, False)
    (message,) = result.messages
    assert (message.role, message.name, message.content) == ("tool", "calculate", replies)


@pytest.mark.parametrize(("before", "reward"), [([], 1.0), ([CALL], 1.0), (["six"], 0.9), (["six", CALL, "?"], 0.8)])
async def test_a_malformed_call_costs_and_the_right_answer_pays(before, reward):
    env = build_environment_factory(EnvConfig(name="tool-calculator"))()
    (question,) = await env.reset(1)
    for answer in before:
        await env.step(Action(answer))
    right = int(evaluate_expression(question.content)[0])
    result = await env.step(Action(json.dumps({"answer": right})))
    assert (result.reward, result.done) == (pytest.approx(reward), True)


async def test_the_calculator_ends_after_its_turns_without_a_reward():
    env = build_environment_factory(EnvConfig(name="tool-calculator", args={"turns": 2}))()
    await env.reset(1)
    await env.step(Action(CALL))
    result = await env.step(Action(CALL))
    assert (result.reward, result.messages, result.done) == (0.0, [], True)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("alphabet-sort", {"letters": 26}, "at most 26"),
        ("guess", {"noise": 2}, "noise must be in 0..1"),
        ("countdown", {"count": 1}, "count and highest must be at least 2"),
        ("tool-calculator", {"cost": -1}, "cost must be in 0..1"),
        ("count-down", {}, "did you mean 'countdown'"),
    ],
)
def test_wrong_arguments_are_refused_with_the_fix(name, args, message):
    with pytest.raises(ConfigError, match=message):
        build_environment_factory(EnvConfig(name=name, args=args))
