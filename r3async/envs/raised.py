"""What code of the user's own raised, in a line: the error first, and the last place in that code."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

import msgspec

from r3async.envs import EnvironmentFailed, WrongEnvironment

OURS = f"{Path(__file__).parents[1]}/"
PYTHON, PACKAGES = (
    tuple(f"{sysconfig.get_paths()[name]}/" for name in names)
    for names in (("stdlib", "platstdlib"), ("purelib", "platlib"))
)
TEXT_CHARACTERS = 500
TRACE_CHARACTERS = 3000
"""Of a traceback, from its end."""


class Raised(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error of an episode. `error`: as `ValueError: what it says`. `place`: the innermost frame of the user's code, as
    `rewards.py:12 in score`; "" if none of that raised it. `trace`: the end of the traceback.

    `passing`: a connection or a time-out is behind it, so the next try may well succeed.
    """

    error: str
    place: str = ""
    trace: str = ""
    passing: bool = False

    @property
    def line(self) -> str:
        return f"{self.error} ({self.place})" if self.place else self.error


class EnvironmentRaised(EnvironmentFailed):
    """An environment raised in a process of its own. `raised`: what, as it was found there."""

    def __init__(self, message: str, raised: Raised):
        super().__init__(message, raised)
        self.raised = raised

    def __str__(self) -> str:
        return str(self.args[0])


def describe_raised(error: BaseException) -> Raised:
    """What an episode failed with."""
    chain = _causes(error)
    for each in chain:
        if isinstance(each, EnvironmentRaised):
            return each.raised
    place = next(filter(None, (_place(each.__traceback__) for each in chain)), "")
    trace = _printed("".join(traceback.format_exception(error)))[-TRACE_CHARACTERS:]
    passing = any(isinstance(each, OSError) for each in chain)
    return Raised(_text(chain[0]), place, trace, passing)


def repeats(error: BaseException, raised: Raised, before: Raised | None) -> bool:
    """Whether the user's code raised at the same place as the try `before` did, so that one more would raise it again."""
    if before is None or raised.passing:
        return False
    if isinstance(error, WrongEnvironment):
        return raised.error == before.error
    return bool(raised.place) and (raised.place, _kind(raised)) == (before.place, _kind(before))


def _kind(raised: Raised) -> str:
    return raised.error.partition(":")[0]


def _causes(error: BaseException | None) -> list[BaseException]:
    """It, and what it was raised from; of a group, the first."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
            continue
        chain.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return chain


def _text(error: BaseException) -> str:
    """In one line. Of several, ours is the first, and where others have a traceback in their text, the last says what it was."""
    try:
        whole = _printed(str(error))
    except Exception:  # `__str__` is the user's, too
        whole = ""
    lines = [line.strip() for line in whole.splitlines() if line.strip()]
    name, ours = type(error).__name__, type(error).__module__.startswith("r3async.")
    said = "" if not lines else lines[0] if ours or len(lines) == 1 else f"{lines[0]} … {lines[-1]}"
    text = said if ours and said else f"{name}: {said}" if said else name
    return text if len(text) <= TEXT_CHARACTERS else f"{text[: TEXT_CHARACTERS - 1]}…"


def _printed(text: str) -> str:
    """What every file and message takes."""
    return text.encode("utf-8", "backslashreplace").decode()


def _place(trace: TracebackType | None) -> str:
    """Of the innermost frame that is the user's own; without one, of the package that was called."""
    frames = [f for f in traceback.extract_tb(trace) if not f.filename.startswith((OURS, "<frozen "))]
    packaged = [f for f in frames if f.filename.startswith(PACKAGES)]
    found = [f for f in frames if not f.filename.startswith((*PYTHON, *PACKAGES))]
    found = found or [f for f in packaged if _package(f.filename) == _package(packaged[0].filename)]
    return f"{Path(found[-1].filename).name}:{found[-1].lineno} in {found[-1].name}" if found else ""


def _package(filename: str) -> str:
    return next(filename.removeprefix(root).partition("/")[0] for root in PACKAGES if filename.startswith(root))
