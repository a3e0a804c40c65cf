"""What ends a run, and what only ends a process of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

from actors.process import NotLoaded

T = TypeVar("T")


class RunFailed(RuntimeError):
    """The run can not go on; the message is for the person who started it."""


class NotTrained(RunFailed):
    """The run made all its steps, and none of them an update: its weights are those that it began with."""


class ProcessDied(RunFailed):
    """A process that the run can not do without died. From the newest checkpoint, it can begin again."""


class Gone(RuntimeError):
    """A process died, and its death was seen elsewhere first."""


async def within(answer: Awaitable[T], seconds: float, failure: str, setting: str) -> T:
    """An actor's answer. Raises `RunFailed` with what did not happen and the setting that says how long it may take."""
    try:
        return await asyncio.wait_for(answer, seconds)
    except TimeoutError as error:
        if str(error):  # the actor's own, which says more
            raise
        raise RunFailed(f"{failure} within {seconds:g} s ({setting})") from error


def is_death(error: BaseException) -> bool:
    """Whether a call failed because the actor's process did."""
    from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError

    known = (Gone, ProcessDied, NotLoaded, ActorDiedError, ActorUnavailableError, RayActorError)
    return isinstance(error, known) or isinstance(getattr(error, "cause", None), NotLoaded)


def root_cause(error: BaseException, run_dir: Path) -> str:
    """The innermost message a person can use: Ray wraps an actor's exception, a task group wraps its members'."""
    from ray.exceptions import RayActorError

    while True:
        inner = getattr(error, "cause", None) or (
            error.exceptions[0] if isinstance(error, BaseExceptionGroup) else None
        )
        if isinstance(error, RayActorError):
            return f"an actor process died ({str(error).splitlines()[0]}); its last words are in {run_dir}/logs"
        if not isinstance(inner, BaseException):
            return f"{type(error).__name__}: {error}" if not isinstance(error, RunFailed) else str(error)
        error = inner
