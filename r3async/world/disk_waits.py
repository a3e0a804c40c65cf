"""Work on a disk that is full, or fails: it is tried again until the disk does it, and nothing is lost in between."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec, TypeVar

from r3async.world import World

P = ParamSpec("P")
R = TypeVar("R")

RETRY_SECONDS = 1.0


def is_disk_error(error: BaseException) -> bool:
    """Whether the disk, or the operating system, did not do something that it may do later: no space, no descriptor, a device
    that fails. An answer that did not come in time, and a connection that broke, are something else."""
    return isinstance(error, OSError) and not isinstance(error, TimeoutError | ConnectionError)


class DiskRetrier:
    """Has work done by a disk that may not take it yet. One for each disk and kind of work; on one event loop.

    `report(event, **facts)` is called with the event `stalled_event` when work is refused first, and with `resumed_event`
    when it is done after all. `facts`: what both say."""

    def __init__(
        self,
        world: World,
        report: Callable[..., object],
        stalled_event: str,
        resumed_event: str,
        *,
        retry_seconds: float = RETRY_SECONDS,
        **facts: object,
    ):
        self._clock, self._report, self._retry_seconds = world.clock.monotonic, report, retry_seconds
        self._stalled_event, self._resumed_event, self._facts = stalled_event, resumed_event, facts
        self._waiting_since: tuple[float, str] | None = None
        self.waited_seconds = 0.0
        """How long work has waited in all."""

    @property
    def current_wait(self) -> dict[str, Any] | None:
        """Why work waits (`why`), and for how many `waited_seconds`; None while none does."""
        if self._waiting_since is None:
            return None
        since, error = self._waiting_since
        return {"why": error, "seconds": self._clock() - since}

    async def run_with_retries(
        self, hint: str, work: Callable[P, Awaitable[R]], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """What `work` returns, once the disk does it. Raises what else it raises. `hint`: what a person can do."""
        began, failed = self._clock(), False
        try:
            while True:
                try:
                    done = await work(*args, **kwargs)
                    break
                except OSError as error:
                    if not is_disk_error(error):
                        raise
                    if not failed:
                        self._report(self._stalled_event, error=str(error), hint=hint, **self._facts)
                    failed, self._waiting_since = True, (began, str(error))
                    await asyncio.sleep(self._retry_seconds)
        finally:
            self._waiting_since = None
            if failed:
                self.waited_seconds += self._clock() - began
        if failed:
            self._report(self._resumed_event, seconds=self._clock() - began, **self._facts)
        return done
