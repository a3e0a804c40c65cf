"""What an environment returns: OpenAI's messages are read, and other forms are refused with what to write instead."""

import pytest
from openai.types.chat import ChatCompletionMessage

from r3async.config import ConfigError, EnvConfig
from r3async.envs import Action, EnvironmentProtocolError, Message, StepResult
from r3async.envs.factory import build_environment_factory
from r3async.envs.returned import coerce_messages, require_step_result

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


@pytest.mark.parametrize(
    ("returned", "messages"),
    [
        ("go", [Message("user", "go")]),
        (Message("system", "go"), [Message("system", "go")]),
        ((Message("user", "go"),), [Message("user", "go")]),
        ({"role": "user", "content": "go"}, [Message("user", "go")]),
        (
            [{"role": "system", "content": "be brief"}, Message("user", "go")],
            [Message("system", "be brief"), Message("user", "go")],
        ),
        ([{"role": "user", "content": [{"type": "text", "text": "go"}]}], [Message("user", "go")]),
        (ChatCompletionMessage(role="assistant", content="go"), [Message("assistant", "go")]),
        (
            [
                ChatCompletionMessage.model_validate(
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [CALL | {"function": {"name": "add", "arguments": '{"a": 1}'}}],
                    }
                ),
                {"role": "tool", "tool_call_id": "c1", "content": "2"},
            ],
            [Message("assistant", "", tool_calls=[CALL]), Message("tool", "2", tool_call_id="c1")],
        ),
    ],
)
def test_texts_and_messages_of_openais_clients_are_read(returned, messages):
    assert coerce_messages(returned, "reset()") == messages


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (("go", {"seed": 1}), r"^reset\(\) must be a str or a list of messages; yours is \(str, dict\): Gymnasium's"),
        (([Message("user", "go")], {}), r"yours is \(a list of Message, dict\): Gymnasium's"),
        (None, r"yours is None: return the text"),
        (3, "yours is int: return the text"),
        (["go"], "yours is a list of str: a list has messages"),
        ({"question": "go"}, "yours is dict: return the text"),
        ([{"role": "user"}], r"^reset\(\): .*content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], r"^reset\(\): .*text"),
        ([Message("user", 3)], r"^reset\(\): the content of a Message must be a str, and one is int"),
    ],
)
def test_other_forms_are_refused_with_the_method_what_it_returned_and_what_to_write(returned, reason):
    with pytest.raises(EnvironmentProtocolError, match=reason):
        coerce_messages(returned, "reset()")


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (
            ("go", 1.0, True, False, {}),
            r"yours returned \(str, float, bool, bool, dict\): write StepResult\(reward, .*terminated or",
        ),
        (("go", 1.0, True, {}), r"\(str, float, bool, dict\): write StepResult"),
        (("go", 1.0, True), r"\(str, float, bool\): write StepResult\(reward, messages, done\)"),
        (1.0, r"float: write StepResult\(reward, done=True\)"),
        ({"reward": 1.0}, r"dict: write StepResult\(reward, messages, done\)"),
        (None, "None: write StepResult"),
    ],
)
def test_a_step_of_another_form_is_refused_with_what_to_write(returned, reason):
    with pytest.raises(EnvironmentProtocolError, match=rf"^step\(\) must return a StepResult; .*{reason}"):
        require_step_result(returned)


class NeedsPackage:
    def __init__(self, size: int = 1):
        import no_such_package_of_ours  # noqa: F401

    def reset(self, task_seed): ...

    def step(self, action): ...


class Broken(NeedsPackage):
    def __init__(self, size: int = 1):
        raise KeyError("size")


class Picky(NeedsPackage):
    def __init__(self, size: int):
        raise ValueError("size must be even")


class Gymlike(NeedsPackage):
    def __init__(self): ...

    def reset(self, *, seed=None, options=None): ...


@pytest.mark.parametrize(
    ("kind", "args", "reason"),
    [
        (
            "NeedsPackage",
            {},
            r"cannot be made: ModuleNotFoundError: .*'no_such_package_of_ours' \(test_env_results\.py:\d+ in __init__\)$",
        ),
        (
            "Broken",
            {"size": 2},
            r"cannot be made with `env\.args` = {'size': 2}: KeyError: 'size' \(test_env_results\.py:\d+ in __init__\)$",
        ),
        ("Picky", {"size": 3}, r"cannot be made .*: ValueError: size must be even .*; it takes \(size: int\)$"),
        ("Picky", {}, r"`env\.args` do not fit .*missing a required argument: 'size'; it takes \(size: int\)"),
        ("Gymlike", {}, r"`reset\(\*, seed=None, options=None\)` cannot be called as `reset\(task_seed\)`"),
    ],
)
def test_an_environment_that_cannot_be_made_is_refused_with_its_own_cause(kind, args, reason):
    with pytest.raises(ConfigError, match=reason):
        build_environment_factory(EnvConfig(name=f"{__name__}:{kind}", args=args))


class SaysDicts:
    def reset(self, task_seed):
        return {"role": "user", "content": str(task_seed)}

    def step(self, action):
        return StepResult(0.0, [{"role": "user", "content": action.text}])


async def test_messages_of_openais_clients_come_from_the_processes_of_the_pool_too():
    factory = build_environment_factory(EnvConfig(name=f"{__name__}:SaysDicts", workers=1))
    env = factory()
    assert await env.reset(7) == [Message("user", "7")]
    assert (await env.step(Action("on"))).messages == [Message("user", "on")]
    env.pool.close()
