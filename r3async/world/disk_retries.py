"""Retries of work on a disk that is full, or fails; nothing is lost in between."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec, TypeVar

from r3async.world import EventReporter, World

P = ParamSpec("P")
R = TypeVar("R")

RETRY_SECONDS = 1.0


def is_disk_error(error: BaseException) -> bool:
    """Return whether the disk, or the operating system, refused something that may succeed later:
    no space, no descriptor, a failing device. A missing answer (`TimeoutError`) and a broken
    connection do not count."""
    return isinstance(error, OSError) and not isinstance(error, TimeoutError | ConnectionError)


class DiskRetrier:
    """A retrier of work that the disk refuses. Use one for each disk and kind of work,
    on one event loop.

    Args:
        world: The world whose clock is used.
        report_event: Gets each event.
        stalled_event: Event when work is first refused.
        resumed_event: Event when the work is done after all.
        retry_seconds: Seconds between two attempts.
        facts: Facts that both events carry.
    """

    def __init__(
        self,
        world: World,
        report_event: EventReporter,
        stalled_event: str,
        resumed_event: str,
        *,
        retry_seconds: float = RETRY_SECONDS,
        **facts: object,
    ):
        self._clock = world.clock.monotonic
        self._report_event = report_event
        self._retry_seconds = retry_seconds
        self._stalled_event = stalled_event
        self._resumed_event = resumed_event
        self._facts = facts
        self._waiting_since: tuple[float, str] | None = None
        self.waited_seconds = 0.0
        """Total seconds that work has waited."""

    @property
    def current_wait(self) -> dict[str, Any] | None:
        """The reason why work waits (`why`), and for how many `seconds`; None
        while no work waits."""
        if self._waiting_since is None:
            return None
        since, error = self._waiting_since
        return {"why": error, "seconds": self._clock() - since}

    async def run_with_retries(
        self, hint: str, work: Callable[P, Awaitable[R]], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Return what `work` returns, once the disk does it. Raises any other error of `work`.
        `hint` tells a person what to do."""
        began = self._clock()
        failed = False
        try:
            while True:
                try:
                    done = await work(*args, **kwargs)
                    break
                except OSError as error:
                    if not is_disk_error(error):
                        raise
                    if not failed:
                        self._report_event(
                            self._stalled_event, error=str(error), hint=hint, **self._facts
                        )
                    failed = True
                    self._waiting_since = (began, str(error))
                    await asyncio.sleep(self._retry_seconds)
        finally:
            self._waiting_since = None
            if failed:
                self.waited_seconds += self._clock() - began
        if failed:
            self._report_event(self._resumed_event, seconds=self._clock() - began, **self._facts)
        return done
