"""Objects in the place of names: what is made of them, and what is said of those that cannot travel."""

import pickle
import threading

import datasets
import numpy as np
import pytest

from r3async.config import ConfigError, EnvConfig, RewardConfig, load_config
from r3async.envs import Action, Message, StepResult
from r3async.envs.factory import build_environment_factory, build_factory_with_objects
from r3async.envs.passed_objects import extract_objects, register_objects
from r3async.envs.rewards import load_reward
from r3async.envs.task_splits import load_task_splits, resolve_data_config

lock, array = threading.Lock(), np.zeros(3)


class Echo:
    """An environment that does not block."""

    def __init__(self, reward=1.0):
        self.reward = reward

    async def reset(self, task_seed):
        return "say it"

    async def step(self, action):
        return StepResult(self.reward, done=True)


class Blocking:
    size = 3

    def reset(self, task_seed):
        return f"task {task_seed}"

    def step(self, action):
        return StepResult(float(len(action.text)), done=True)

    def oracle(self):
        return "answer"


class Half:
    async def reset(self, task_seed):
        return ""


def length(completion):
    return len(completion)


async def played(name, args=None):
    environment = build_environment_factory(EnvConfig(name=name, args=args or {}))()
    await environment.reset(1)
    return (await environment.step(Action("four"))).reward, environment


def test_every_object_gets_a_name_wherever_it_stands_and_travels_pickled():
    settings = {"env": {"name": Echo}, "reward": ["exact", length, {"fn": lambda text: 2.0, "weight": 0.5}], "steps": 3}
    given, objects = extract_objects(settings)
    assert given == {
        "env": {"name": "object:Echo"},
        "reward": ["exact", "object:length", {"fn": "object:function", "weight": 0.5}],
        "steps": 3,
    }
    assert list(objects) == ["Echo", "length", "function"]
    assert pickle.loads(objects["function"])("") == 2.0
    two, objects = extract_objects({"reward": [lambda text: 1.0, lambda text: 2.0]})
    assert two == {"reward": ["object:function", "object:function2"]}
    assert extract_objects(settings) == extract_objects(settings), "a resumed run finds the names that it began with"


async def test_a_class_and_a_function_that_makes_environments_are_played_here_or_in_the_pool():
    _, objects = extract_objects({"a": Echo, "b": Blocking, "c": lambda: Echo(3.0), "d": lambda size=1: Blocking()})
    register_objects(objects)
    assert (await played("object:Echo", {"reward": 0.5}))[0] == 0.5
    assert (await played("object:function"))[0] == 3.0
    for name in ("object:Blocking", "object:function2"):
        reward, environment = await played(name)
        assert (reward, environment.size, await environment.reset(1)) == (4.0, 3, [Message("user", "task 1")])
        assert environment.oracle() == "answer"
    with pytest.raises(ConfigError, match="'object:Echo' takes no such argument; did you mean 'reward'"):
        build_environment_factory(EnvConfig(name="object:Echo", args={"rewards": 1}))


async def test_a_reward_is_called_as_one_of_a_module(tmp_path):
    register_objects(extract_objects({"reward": length})[1])
    reward = load_reward(RewardConfig(fn="object:length", name="length"))
    assert (reward.form, reward.is_nonblocking) == ("plain", False)
    assert reward.function("four") == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"environment": Echo()}, r"`environment` is one Echo, and every episode needs .* lambda: Echo\(…\)"),
        (
            {"reward": [length, lambda text: (lock.locked(), array)]},
            r"`reward\[1\]` = function cannot be sent .* because of lock: TypeError",
        ),
    ],
)
def test_what_cannot_travel_is_named_with_its_setting_and_the_reason(settings, message):
    with pytest.raises(ConfigError, match=message):
        extract_objects(settings)


def test_a_class_whose_functions_use_what_cannot_travel_is_named():
    made = type("Holding", (Echo,), {"answer": lambda self: lock.locked(), "__module__": "__main__"})
    with pytest.raises(ConfigError, match="`environment` = Holding cannot be sent to the generators, because of lock"):
        extract_objects({"environment": made})


def test_what_is_no_environment_or_was_not_given_is_named():
    register_objects(extract_objects({"a": Half, "b": lambda: 3})[1])
    for name in ("object:Half", "object:function"):
        with pytest.raises(ConfigError, match=f"`env.name` = '{name}' is no environment"):
            build_environment_factory(EnvConfig(name=name))
    with pytest.raises(
        ConfigError, match=r"`env.name` = 'object:Absent' is an object that a program gave r3async\.train"
    ):
        build_environment_factory(EnvConfig(name="object:Absent"))
    register_objects({"Broken": b"cos\nnothing_there\n."})
    with pytest.raises(ConfigError, match=r"`env.name`: Broken cannot be loaded in this process: \w+Error"):
        build_environment_factory(EnvConfig(name="object:Broken"))


async def test_a_generator_holds_what_it_is_given_when_it_makes_environments():
    factory = build_factory_with_objects({"Given": pickle.dumps(Echo)}, EnvConfig(name="object:Given"))
    assert await factory().reset(1) == "say it"


def test_rows_in_place_of_a_path_are_trained_and_evaluated():
    trained = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(4)]
    for rows in (trained, datasets.Dataset.from_list(trained)):
        settings, objects = extract_objects({"data": {"path": rows, "eval": [{"prompt": "2+1=", "answer": "3"}]}})
        assert settings == {"data": {"path": "object:rows", "eval": "object:rows2"}}
        register_objects(objects)
        config = load_config("math", settings)
        tasks = load_task_splits(resolve_data_config(config.env))
        assert [task.row for task in tasks.train] == [trained[0], trained[1], trained[3]]
        assert [task.row["prompt"] for task in tasks.eval] == ["2+1="]
        assert tasks.train[0].location == "data, row 1"


def test_other_rows_under_the_same_name_are_read_again():
    for answer in ("2", "3"):
        settings, objects = extract_objects({"data": [{"prompt": "q", "answer": answer}]})
        register_objects(objects)
        config = load_config("math", {**settings, "data.eval": 0})
        assert load_task_splits(resolve_data_config(config.env)).train[0].answer == answer


def test_rows_that_a_process_was_not_given_are_asked_for():
    config = load_config("math", {"data": "object:rows_of_another_program"})
    with pytest.raises(ConfigError, match=r"is an object that a program gave r3async.train, and no file keeps it"):
        load_task_splits(resolve_data_config(config.env))
