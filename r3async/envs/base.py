"""What an environment is: something that talks in messages, and rewards answers."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import msgspec

from r3async.config import ConfigError, EnvConfig


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One chat message, as chat templates take it. What is empty is left out of what the template sees."""

    role: str
    content: str
    tool_calls: list[dict[str, Any]] = []
    tool_call_id: str = ""
    name: str = ""

    def for_template(self) -> dict[str, Any]:
        return {"role": self.role, "content": self.content, **msgspec.to_builtins(self)}


class Action(msgspec.Struct, frozen=True):
    """The policy's answer. `stop_reason`: `stop` if the policy ended it itself, `length` if it was cut."""

    text: str
    stop_reason: str = "stop"


class StepResult(msgspec.Struct, frozen=True):
    """Reward of the answer just given, the messages that follow it (none when `done`), and whether the episode ends.

    The rewards of an episode's turns add up to its reward. With `rewrites`, `messages` are the whole conversation from here
    on (a compacted or summarised history) and not what is new in it; answers that it repeats word for word keep their tokens.
    """

    reward: float
    messages: list[Message] = []
    done: bool = False
    rewrites: bool = False


class Environment(Protocol):
    """One episode at a time. The G episodes of a group are reset with the same `task_seed` and must pose the same task."""

    async def reset(self, task_seed: int) -> list[Message]:
        """Begin an episode; the messages of its first prompt. Equal seeds pose equal tasks."""
        ...

    async def step(self, action: Action) -> StepResult: ...


@runtime_checkable
class HasOracle(Protocol):
    """An environment that knows the best answer to what it asked last; used to warm up a model and for scale."""

    def oracle(self) -> str: ...


EnvironmentFactory = Callable[[], Environment]

BUILT_IN = {"reverse-text": "r3async.envs.reverse_text:ReverseText"}


def environment_factory(config: EnvConfig) -> EnvironmentFactory:
    """A callable that makes environments. Raises `ConfigError` for an unknown name or wrong `env.args`."""
    target = BUILT_IN.get(config.name, config.name)
    module_name, colon, class_name = target.partition(":")
    if not colon:
        near = difflib.get_close_matches(config.name, BUILT_IN, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"built in: {', '.join(BUILT_IN)}"
        raise ConfigError(f"`env.name` = {config.name!r}: no such environment; {hint} Your own is `module:Class`.")
    try:
        kind = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"`env.name` = {config.name!r} can not be loaded: {error}") from error
    try:
        inspect.signature(kind).bind(**config.args)
        kind(**config.args)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"`env.args` do not fit {config.name!r}: {error}; it takes {inspect.signature(kind)}"
        ) from error
    return lambda: kind(**config.args)
