"""The environment protocol: an environment talks in messages and rewards answers."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from r3async.untrusted import to_finite_float

MAX_EPISODE_REWARD = 1e15
"""Upper limit of the sum of an episode's absolute rewards. It keeps squared advantages, and their
sum over a batch, finite in float32."""
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Names under which rows and chat templates hold the reasoning of a message; the first is
the name used here."""
THINK_OPEN_TAG = "<think>"
"""Tag that opens the reasoning in an answer, or at the end of its prompt."""


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One chat message, as chat templates take it. Empty optional fields are left out of what
    the template sees.

    Attributes:
        reasoning_content: Reasoning that stands beside the content, for templates that support it.
    """

    role: str
    content: str
    tool_calls: list[dict[str, Any]] = []
    tool_call_id: str = ""
    name: str = ""
    reasoning_content: str = ""

    def to_template_dict(self) -> dict[str, Any]:
        return {"role": self.role, "content": self.content, **msgspec.to_builtins(self)}


class Action(msgspec.Struct, frozen=True):
    """The policy's answer in one turn.

    Attributes:
        stop_reason: `stop` if the policy ended the answer itself, `length` if it was cut.
        token_ids: The sampled token ids, for an environment whose attribute `takes_tokens` is true;
            empty for others.
        thinking: True if the text begins inside reasoning, because the chat template opened it
            before the answer.
    """

    text: str
    stop_reason: str = "stop"
    token_ids: list[int] = []
    thinking: bool = False


class EnvironmentFailed(RuntimeError):
    """Failure of an environment that raised, hung or was lost. The episode may be tried again with
    a new environment."""


class EnvironmentProtocolError(EnvironmentFailed):
    """Failure of an environment that breaks the protocol; the message says what it has to do."""


class StepResult(msgspec.Struct, frozen=True):
    """The outcome of a step: the reward of the answer just given, the messages that follow, and
    whether the episode ends.

    The rewards of an episode's turns add up to its reward. NumPy numbers are accepted. Raises
    `EnvironmentProtocolError` for a reward or a metric that is a list or not a finite number, and
    for a reward beyond `MAX_EPISODE_REWARD`.

    Attributes:
        messages: The messages that follow the answer; none when `done`.
        rewrites: True if `messages` are the whole conversation from here on (a compacted or
            summarised history) and not only what is new in it. Answers that it repeats word for
            word keep their tokens.
        metrics: Numbers to log, by name. Those of a step's episodes are in `metrics.jsonl` as
            `env/NAME/mean` and `env/NAME/std`; a name that contains a `/` is used as it is.
    """

    reward: float
    messages: list[Message] = []
    done: bool = False
    rewrites: bool = False
    metrics: dict[str, float] = {}

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(
            self, "reward", _require_finite("a reward", self.reward, MAX_EPISODE_REWARD)
        )
        if self.metrics:
            told = {
                name: _require_finite(f"metric {name!r}", value)
                for name, value in self.metrics.items()
            }
            msgspec.structs.force_setattr(self, "metrics", told)


def _require_finite(what: str, value: Any, limit: float = sys.float_info.max) -> float:
    try:
        return to_finite_float(value, limit)
    except (TypeError, ValueError) as error:
        raise EnvironmentProtocolError(f"{what} {error}") from error


def sum_episode_metrics(turn_metrics: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of an episode: the sums of its turns' metrics
    (`StepResult.metrics`), by name."""
    sums: dict[str, float] = {}
    for metrics in turn_metrics:
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def refuse_repeated_messages(
    previous_messages: Sequence[Message], messages: Sequence[Message]
) -> None:
    """Raise `EnvironmentProtocolError` if a step's `messages` begin with all of
    `previous_messages`, as one growing list does."""
    if (
        previous_messages
        and len(messages) > len(previous_messages)
        and list(messages[: len(previous_messages)]) == list(previous_messages)
    ):
        raise EnvironmentProtocolError(
            f"step returned the {len(previous_messages)} messages of the call before "
            f"again, and {len(messages) - len(previous_messages)} more: return only "
            "what is new, or StepResult(reward, messages, rewrites=True) with the "
            "whole conversation"
        )


class Environment(Protocol):
    """An environment that plays one episode at a time.

    The G episodes of a group are reset with the same `task_seed` and must pose the same task.

    An environment with an attribute `size` has that many tasks: its task seeds are `0 .. size - 1`,
    and each is posed once per epoch. Without that attribute, or if it is None, a task seed is any
    number of 63 bits, and there are no epochs.
    """

    async def reset(self, task_seed: int) -> list[Message]:
        """Begin an episode and return the messages of its first prompt. Equal seeds
        pose equal tasks."""
        ...

    async def step(self, action: Action) -> StepResult: ...


class BlockingEnvironment(Protocol):
    """An environment with plain functions instead of `async` ones, for a class that computes or
    waits. It is played in a process of a pool (`pool.py`).

    `reset` may return a string, for one user message. If there is a `close()`, it is called when
    the episode is over; its failure is reported, and costs nothing of the episode.
    """

    def reset(self, task_seed: int) -> list[Message] | str: ...

    def step(self, action: Action) -> StepResult: ...


@runtime_checkable
class HasOracle(Protocol):
    """An environment that knows the best answer to what it asked last; used to warm up a model and
    as a reference score."""

    def oracle(self) -> str: ...


@runtime_checkable
class HasRandomAnswer(Protocol):
    """An environment that can answer what it asked last like a policy that knows the format and
    nothing else; used as a reference score."""

    def random_answer(self, rng: random.Random) -> str: ...


EnvironmentFactory = Callable[[], Environment]
