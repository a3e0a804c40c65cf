"""What an environment returned, as this library's types, or an error that says what
to write instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from r3async.config import ConfigError
from r3async.envs import EnvironmentProtocolError, Message, StepResult
from r3async.envs.row_tasks import parse_messages


def require_step_result(result: object) -> StepResult:
    """Return the result of `step` unchanged. Raises `EnvironmentProtocolError`, which says what to
    write instead, unless it is a `StepResult`."""
    if isinstance(result, StepResult):
        return result
    written = "StepResult(reward, messages, done)"
    if isinstance(result, tuple) and len(result) == 5:
        written = (
            'StepResult(reward, [Message("user", observation)], terminated or truncated), or use '
            "`gymnasium:ID`, which takes Gymnasium's environments"
        )
    elif isinstance(result, tuple) and len(result) == 4:
        written = 'StepResult(reward, [Message("user", observation)], done)'
    elif isinstance(result, int | float):
        written = "StepResult(reward, done=True)"
    raise EnvironmentProtocolError(
        f"step() must return a StepResult; yours returned {_describe_type(result)}: write {written}"
    )


def coerce_messages(value: object, source: str) -> list[Message]:
    """Return what an environment said as messages. A string is one user message. A mapping with
    `role` and `content`, and an object of a client's library with these attributes, are read as
    OpenAI's clients write them.

    Args:
        source: Where the value is from, for errors: `reset()` or `StepResult.messages`.

    Raises `EnvironmentProtocolError`, which says what to write instead, for anything else.
    """
    if isinstance(value, str):
        return [Message("user", value)]
    if isinstance(value, list | tuple) or (
        isinstance(value, Iterable) and not _is_foreign_message(value)
    ):
        listed: list[object] = list(value)
    else:
        listed = [value]
    return [_coerce_message(each, value, source) for each in listed]


def _coerce_message(message: object, returned: object, source: str) -> Message:
    if isinstance(message, Message):
        if isinstance(message.content, str):
            return message
        kind = _describe_type(message.content)
        raise EnvironmentProtocolError(
            f"{source}: the content of a Message must be a str, and one is {kind}"
        )
    if _is_foreign_message(message):
        dumped = message if isinstance(message, Mapping) else message.model_dump(exclude_none=True)  # type: ignore[attr-defined]
        try:
            return parse_messages([dumped], source)[0]
        except ConfigError as error:
            raise EnvironmentProtocolError(str(error)) from error
    match returned:
        case (_, Mapping()):
            instead = "Gymnasium's (observation, info): return the observation alone"
        case [str(), *_]:
            instead = 'a list has messages, such as Message("user", text)'
        case _:
            instead = 'return the text, or [Message("user", text)]'
    raise EnvironmentProtocolError(
        f"{source} must be a str or a list of messages; yours is "
        f"{_describe_type(returned)}: {instead}"
    )


def _is_foreign_message(value: object) -> bool:
    if isinstance(value, Mapping):
        return "role" in value
    return hasattr(value, "role") and hasattr(value, "content") and hasattr(value, "model_dump")


def _describe_type(value: object) -> str:
    """Return the name of a type, with those of its elements for a list or a tuple."""
    if isinstance(value, tuple):
        return f"({', '.join(_describe_type(each) for each in value)})"
    if isinstance(value, list) and value:
        return f"a list of {_describe_type(value[0])}"
    return "None" if value is None else type(value).__name__
