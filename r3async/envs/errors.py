"""One-line summaries of errors that user code raised: the error first, then the last
place in that code."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

import msgspec

from r3async.envs import EnvironmentFailed, EnvironmentProtocolError

PACKAGE_ROOT = f"{Path(__file__).parents[1]}/"
STDLIB_ROOTS, SITE_PACKAGES_ROOTS = (
    tuple(f"{sysconfig.get_paths()[name]}/" for name in names)
    for names in (("stdlib", "platstdlib"), ("purelib", "platlib"))
)
MAX_TEXT_CHARACTERS = 500
MAX_TRACE_CHARACTERS = 3000
"""Characters kept of a traceback, counted from its end."""


class ErrorSummary(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error of an episode.

    Attributes:
        error: The error as `ValueError: what it says`.
        place: The innermost frame of the user's code, as `rewards.py:12 in score`; "" if none of
            that code raised it.
        trace: The end of the traceback.
        passing: True if a connection or a time-out is behind the error, so the next try
            may well succeed.
    """

    error: str
    place: str = ""
    trace: str = ""
    passing: bool = False

    @property
    def line(self) -> str:
        return f"{self.error} ({self.place})" if self.place else self.error


class RemoteEnvironmentError(EnvironmentFailed):
    """Failure of an environment that raised in a separate process; `summary` is the
    error as found there."""

    def __init__(self, message: str, summary: ErrorSummary):
        super().__init__(message, summary)
        self.summary = summary

    def __str__(self) -> str:
        return str(self.args[0])


def summarize_error(error: BaseException) -> ErrorSummary:
    """Return the summary of the error with which an episode failed."""
    chain = _collect_causes(error)
    for each in chain:
        if isinstance(each, RemoteEnvironmentError):
            return each.summary
    place = next(filter(None, (_find_user_frame(each.__traceback__) for each in chain)), "")
    trace = _escape_unprintable("".join(traceback.format_exception(error)))[-MAX_TRACE_CHARACTERS:]
    passing = any(isinstance(each, OSError) for each in chain)
    return ErrorSummary(_format_error(chain[0]), place, trace, passing)


def is_repeated_error(
    error: BaseException, summary: ErrorSummary, previous: ErrorSummary | None
) -> bool:
    """Return True if the user's code raised at the same place as in the `previous` try, so that
    another try would fail again."""
    if previous is None or summary.passing:
        return False
    if isinstance(error, EnvironmentProtocolError):
        return summary.error == previous.error
    return bool(summary.place) and (summary.place, _error_type(summary)) == (
        previous.place,
        _error_type(previous),
    )


def _error_type(raised: ErrorSummary) -> str:
    return raised.error.partition(":")[0]


def _collect_causes(error: BaseException | None) -> list[BaseException]:
    """Return an error and the chain of errors that it was raised from; a group is replaced by
    its first error."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
            continue
        chain.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return chain


def _format_error(error: BaseException) -> str:
    """Return an error as one line. Of several lines, r3async's own errors keep the first. Others
    keep the last one too, which names the error where the text contains a traceback."""
    try:
        whole = _escape_unprintable(str(error))
    except Exception:  # `__str__` is user code, too
        whole = ""
    lines = [line.strip() for line in whole.splitlines() if line.strip()]
    name = type(error).__name__
    ours = type(error).__module__.startswith("r3async.")
    said = "" if not lines else lines[0] if ours or len(lines) == 1 else f"{lines[0]} … {lines[-1]}"
    text = said if ours and said else f"{name}: {said}" if said else name
    return text if len(text) <= MAX_TEXT_CHARACTERS else f"{text[: MAX_TEXT_CHARACTERS - 1]}…"


def _escape_unprintable(text: str) -> str:
    """Escape what cannot be encoded as UTF-8, so that every file and message takes the text."""
    return text.encode("utf-8", "backslashreplace").decode()


def _find_user_frame(trace: TracebackType | None) -> str:
    """Return the place of the innermost frame of user code; without one, that of the package
    that was called."""
    frames = [
        f
        for f in traceback.extract_tb(trace)
        if not f.filename.startswith((PACKAGE_ROOT, "<frozen "))
    ]
    packaged = [f for f in frames if f.filename.startswith(SITE_PACKAGES_ROOTS)]
    found = [f for f in frames if not f.filename.startswith((*STDLIB_ROOTS, *SITE_PACKAGES_ROOTS))]
    found = found or [
        f for f in packaged if _package_name(f.filename) == _package_name(packaged[0].filename)
    ]
    return (
        f"{Path(found[-1].filename).name}:{found[-1].lineno} in {found[-1].name}" if found else ""
    )


def _package_name(filename: str) -> str:
    return next(
        filename.removeprefix(root).partition("/")[0]
        for root in SITE_PACKAGES_ROOTS
        if filename.startswith(root)
    )
