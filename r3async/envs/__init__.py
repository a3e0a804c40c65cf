"""What an environment is: something that talks in messages, and rewards answers."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from r3async.untrusted import to_finite_float

MAX_EPISODE_REWARD = 1e15
"""Of an episode, all rewards added up by size. Squares of advantages, and their sum over a batch, are then finite in float32."""
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""What rows and chat templates call the thought of a message; the first is its name here."""
THINK_OPEN_TAG = "<think>"
"""What opens a thought in an answer, or at the end of its prompt."""


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One chat message, as chat templates take it. What is empty is left out of what the template sees. `reasoning_content`: a
    thought that stands beside the content, for templates that know such."""

    role: str
    content: str
    tool_calls: list[dict[str, Any]] = []
    tool_call_id: str = ""
    name: str = ""
    reasoning_content: str = ""

    def to_template_dict(self) -> dict[str, Any]:
        return {"role": self.role, "content": self.content, **msgspec.to_builtins(self)}


class Action(msgspec.Struct, frozen=True):
    """The policy's answer. `stop_reason`: `stop` if the policy ended it itself, `length` if it was cut. `token_ids`: as sampled,
    for an environment with a true attribute `takes_tokens`; empty for others. `thinking`: the text begins within a thought, as
    the chat template opened one before it."""

    text: str
    stop_reason: str = "stop"
    token_ids: list[int] = []
    thinking: bool = False


class EnvironmentFailed(RuntimeError):
    """An environment that raised, hung or was lost. The episode may be tried again, with a new environment."""


class EnvironmentProtocolError(EnvironmentFailed):
    """An environment that does not keep to the protocol; the message says what it has to do."""


class StepResult(msgspec.Struct, frozen=True):
    """Reward of the answer just given, the messages that follow it (none when `done`), and whether the episode ends.

    The rewards of an episode's turns add up to its reward. With `rewrites`, `messages` are the whole conversation from here
    on (a compacted or summarised history) and not what is new in it; answers that it repeats word for word keep their tokens.
    `metrics`: numbers to look at, by name; those of a step's episodes are in `metrics.jsonl` as `env/NAME_mean` and
    `env/NAME_std`, where a name with a `/` in it is taken as it is.
    Raises `EnvironmentProtocolError` for a reward or a metric that is not a finite number, or a list of them, and for a
    reward beyond `MAX_EPISODE_REWARD`; numpy's are taken too.
    """

    reward: float
    messages: list[Message] = []
    done: bool = False
    rewrites: bool = False
    metrics: dict[str, float] = {}

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "reward", _require_finite("a reward", self.reward, MAX_EPISODE_REWARD))
        if self.metrics:
            told = {name: _require_finite(f"metric {name!r}", value) for name, value in self.metrics.items()}
            msgspec.structs.force_setattr(self, "metrics", told)


def _require_finite(what: str, value: Any, limit: float = sys.float_info.max) -> float:
    try:
        return to_finite_float(value, limit)
    except (TypeError, ValueError) as error:
        raise EnvironmentProtocolError(f"{what} {error}") from error


def sum_episode_metrics(turn_metrics: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """What the turns of an episode told (`StepResult.metrics`), together."""
    sums: dict[str, float] = {}
    for metrics in turn_metrics:
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def require_step_result(result: object) -> StepResult:
    """What `step` returned. Raises `EnvironmentProtocolError` for what is no `StepResult`."""
    if isinstance(result, StepResult):
        return result
    gym = ": that is Gymnasium's form, whose environments are `gymnasium:ID`" if isinstance(result, tuple) else ""
    raise EnvironmentProtocolError(
        f"step must return a StepResult(reward, messages, done), not a {type(result).__name__}{gym}"
    )


def coerce_messages(value: object) -> list[Message]:
    """What an environment said. A string is one user message. Raises `EnvironmentProtocolError` for what are no messages."""
    if isinstance(value, str):
        return [Message("user", value)]
    messages: list[Any] = list(value) if isinstance(value, Iterable) else [value]
    for message in messages:
        if not isinstance(message, Message):
            raise EnvironmentProtocolError(
                f"an environment speaks in strings or Messages, not {type(message).__name__}"
            )
    return messages


def refuse_repeated_messages(previous_messages: Sequence[Message], messages: Sequence[Message]) -> None:
    """Raise `EnvironmentProtocolError` for a step whose `messages` begin with all that were `previous_messages` before
    them: one list that grows."""
    if (
        previous_messages
        and len(messages) > len(previous_messages)
        and list(messages[: len(previous_messages)]) == list(previous_messages)
    ):
        raise EnvironmentProtocolError(
            f"step returned the {len(previous_messages)} messages of the call before again, and "
            f"{len(messages) - len(previous_messages)} more: return only "
            "what is new, or StepResult(reward, messages, rewrites=True) with the whole conversation"
        )


class Environment(Protocol):
    """One episode at a time. The G episodes of a group are reset with the same `task_seed` and must pose the same task.

    One with an attribute `size` has so many tasks: its task seeds are `0 .. size - 1`, and each is posed once an epoch. Without
    it, or where it is None, a task seed is any number of 63 bits, and there are no epochs.
    """

    async def reset(self, task_seed: int) -> list[Message]:
        """Begin an episode; the messages of its first prompt. Equal seeds pose equal tasks."""
        ...

    async def step(self, action: Action) -> StepResult: ...


class BlockingEnvironment(Protocol):
    """The same with plain functions, for a class that computes or waits: it is played in a process of a pool (`pool.py`).

    `reset` may return a string, for one user message. A `close()`, if there is one, is called when the episode is over.
    """

    def reset(self, task_seed: int) -> list[Message] | str: ...

    def step(self, action: Action) -> StepResult: ...


@runtime_checkable
class HasOracle(Protocol):
    """An environment that knows the best answer to what it asked last; used to warm up a model and for scale."""

    def oracle(self) -> str: ...


@runtime_checkable
class HasRandomAnswer(Protocol):
    """An environment that can answer what it asked last as a policy would that knows the format and nothing else; for scale."""

    def random_answer(self, rng: random.Random) -> str: ...


EnvironmentFactory = Callable[[], Environment]
