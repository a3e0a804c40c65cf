"""What ends a run, and what only ends a process of it."""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

from r3async.world import ActorLost

T = TypeVar("T")


class RunFailed(RuntimeError):
    """The run can not go on; the message is for the person who started it."""


class NotTrained(RunFailed):
    """The run made all its steps, and none of them an update: its weights are those that it began with."""


class ProcessDied(RunFailed, ActorLost):
    """A process that the run can not do without died. From the newest checkpoint, it can begin again."""


async def within(answer: Awaitable[T], seconds: float, failure: str, setting: str) -> T:
    """An actor's answer, for which it is given `seconds`. Raises `RunFailed` with what did not happen and the setting that says
    how long it may take."""
    try:
        return await answer
    except TimeoutError as error:
        if str(error):  # the actor's own, which says more
            raise
        raise RunFailed(f"{failure} within {seconds:g} s ({setting})") from error


def root_cause(error: BaseException, run_dir: Path) -> str:
    """The innermost message a person can use: a task group wraps the exceptions of its members."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, RunFailed):
        return str(error)
    if isinstance(error, ActorLost):
        said = str(error).partition("\n")[0]
        return f"an actor process died ({said}); its last words are in {run_dir}/logs"
    return f"{type(error).__name__}: {error}"
