"""A parameter of a reward gets what it is named for, whatever its place, or the reward is refused by name. Names that say
nothing are taken in order."""

import asyncio
import functools

import pytest

from r3async.config import ConfigError, RewardConfig
from r3async.envs import Message
from r3async.envs.passed_objects import extract_objects, register_objects
from r3async.envs.rewards import RewardInputs, check_reward_row, compute_rewards, load_reward
from r3async.envs.row_tasks import MISSING, DatasetTask

ASKED = RewardInputs("WRONG", "2+2=", {"prompt": "2+2=", "answer": "4", "level": 3}, "4")


def load(function):
    settings, objects = extract_objects({"reward": function})
    register_objects(objects)
    return load_reward(RewardConfig(fn=settings["reward"], name="r"))


def make(parameters, body):
    made = {}
    exec(f"def f({parameters}):\n    return float({body})", made)
    return made["f"]


def reward_of(function, asked=ASKED):
    return asyncio.run(compute_rewards([load(function)], asked))["rewards/r"]


@pytest.mark.parametrize(
    ("parameters", "body"),
    [
        ("prompt, completion", "prompt == '2+2=' and completion == 'WRONG'"),
        ("prompt, response", "response == 'WRONG'"),
        ("question, solution", "question == '2+2=' and solution == 'WRONG'"),
        ("query, output", "output == 'WRONG'"),
        ("answer, completion", "completion == 'WRONG' and answer == '4'"),
        ("ground_truth, solution", "solution == 'WRONG' and ground_truth == '4'"),
        ("reference, prediction", "prediction == 'WRONG' and reference == '4'"),
        ("predict, ground_truth", "predict == 'WRONG' and ground_truth == '4'"),
        ("completion, solution", "completion == 'WRONG' and solution == '4'"),
        ("text, solution", "text == 'WRONG' and solution == '4'"),
        ("row, completion", "completion == 'WRONG' and row['level'] == 3"),
        ("completion, answer, prompt", "answer == '4' and prompt == '2+2='"),
        ("*, answer, completion", "completion == 'WRONG' and answer == '4'"),
        ("answer, completion, /", "completion == 'WRONG' and answer == '4'"),
    ],
)
def test_a_parameter_gets_what_it_names_whatever_its_place(parameters, body):
    assert reward_of(make(parameters, body)) == 1.0


@pytest.mark.parametrize(
    "parameters", ["completion, answer", "a, b", "response, label", "text, expected", "text, b, /"]
)
def test_names_that_say_nothing_are_taken_in_order(parameters):
    first, second = parameters.split(", ")[:2]
    assert reward_of(make(parameters, f"{first} == 'WRONG' and {second} == '4'")) == 1.0


@pytest.mark.parametrize(
    ("parameters", "body"),
    [
        ("completion, tolerance=0.5", "tolerance == 0.5"),
        ("completion, answer='none'", "answer == '4'"),
        ("completion, *rest", "rest == ()"),
        ("completion, **columns", "columns == {'prompt': '2+2=', 'answer': '4', 'level': 3, 'row': columns['row']}"),
        ("completion, answer, level", "answer == '4' and level == 3"),
        ("a, b, level", "a == 'WRONG' and b == '4' and level == 3"),
        ("completion, answer, level=0", "level == 3"),
    ],
)
def test_other_parameters_are_columns_or_keep_their_defaults(parameters, body):
    assert reward_of(make(parameters, body)) == 1.0


def test_a_default_stays_where_the_row_has_no_answer():
    bare = RewardInputs("WRONG", "2+2=", {"prompt": "2+2="})
    assert reward_of(make("completion, answer='none'", "answer == 'none'"), bare) == 1.0


class Scorer:
    def __call__(self, answer, completion):
        return float(completion == "WRONG" and answer == "4")

    def method(self, answer, completion):
        return self(answer, completion)


async def waits(answer, completion):
    return float(completion == "WRONG" and answer == "4")


@pytest.mark.parametrize(
    "function",
    [Scorer(), Scorer().method, waits, functools.partial(make("answer, completion, scale", "scale == 2"), scale=2)],
    ids=["object", "method", "async", "partial"],
)
def test_whatever_is_called_is_called_by_name(function):
    assert reward_of(function) == 1.0


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("args, sample", r"no parameter is the completion: that is slime's form: .* `completion` is sample.response"),
        ("args, sample, **kwargs", r"that is slime's form"),
        ("responses, answers", r"a reward gets one answer: write f\(completion, answer\)"),
        ("queries, labels", r"a reward gets one answer"),
        ("reward_input", r"that is EasyR1's form"),
        ("data_sources, solution_strs, ground_truths", r"a reward gets one answer"),
        ("prompt, answer", r"no parameter is the completion: it must take \(completion, answer\)"),
        ("question, answer, ground_truth", r"no parameter is the completion"),
        ("response, completion", r"response and completion are both the completion"),
        ("*rest", r"no parameter is the completion"),
        ("", r"no parameter is the completion"),
        ("prompt, completions, answer", r"asks for `prompt` beside lists: with lists, as in TRL, it is `prompts`"),
        ("completions, completion=None", r"asks for `completion` beside lists"),
    ],
)
def test_a_function_that_would_get_something_else_is_refused(parameters, message):
    with pytest.raises(ConfigError, match=message):
        load(make(parameters, "1"))


def test_a_class_and_what_has_no_signature_are_refused():
    with pytest.raises(ConfigError, match=r"is a class: name an object of it, such as scorer = Scorer\(…\)"):
        load_reward(RewardConfig(fn=f"{__name__}:Scorer", name="r"))
    with pytest.raises(ConfigError, match="does not say which arguments it takes"):
        load_reward(RewardConfig(fn="builtins:max", name="r"))


def task(row, answer=MISSING):
    return DatasetTask([Message("user", row["prompt"])], False, answer, row, "rows.jsonl, line 1")


@pytest.mark.parametrize(
    ("parameters", "row", "message"),
    [
        ("completion, state", {}, r"no field 'state', which reward 'r' asks for; that is of the form of verifiers"),
        ("completion, answer, level", {}, r"no field 'level', which reward 'r' asks for"),
        ("completion, solution", {"solution": "5"}, r"would get the answer: .* or set `data.answer` = 'solution'"),
        (
            "level, completion",
            {"level": 3},
            r"asks for 'level', which the row has as a column, and would get the answer",
        ),
        ("response, answer", {"response": "5"}, r"would get the completion: call the parameter `completion`"),
        ("question, completion", {"question": "what?"}, r"would get the prompt: call the parameter `prompt`"),
    ],
)
def test_a_name_that_is_a_column_is_never_something_else(parameters, row, message):
    reward = load(make(parameters, "1"))
    with pytest.raises(ConfigError, match=f"rows.jsonl, line 1: .*{message}"):
        check_reward_row(reward, task({"prompt": "2+2=", "answer": "4"} | row, "4"))


@pytest.mark.parametrize(
    ("parameters", "row"),
    [
        ("completion, solution", {"solution": "4"}),
        ("question, completion", {"question": "2+2="}),
        ("completion, target, label", {"label": "yes"}),
        ("completion, state", {"state": "Texas"}),
        ("completion, extra_info", {"extra_info": {}}),
    ],
)
def test_a_name_that_is_a_column_with_the_same_value_is_taken(parameters, row):
    check_reward_row(load(make(parameters, "1")), task({"prompt": "2+2=", "answer": "4"} | row, "4"))
