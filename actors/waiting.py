"""Waiting for whatever comes first: news, or the time for a look. And generators for which there was nothing to lease."""

from __future__ import annotations

import asyncio

LOOK_SECONDS = 0.5
"""Between two looks, at most: what may be leased follows from more than what rings."""


async def wait_until(event: asyncio.Event, seconds: float) -> None:
    """Until it is set, which it is after `seconds` in any case: cheaper than a time-out, which cancels and raises."""
    timer = asyncio.get_running_loop().call_later(seconds, event.set)
    try:
        await event.wait()
    finally:
        timer.cancel()


class Waiting:
    """One call of each generator waits. An older one, whose answer nobody may hear any more, leases nothing."""

    def __init__(self) -> None:
        self._bells: dict[str, asyncio.Event] = {}

    def begin(self, generator_id: str) -> asyncio.Event:
        """A new call, of which the bell is returned."""
        self.end(generator_id)
        bell = self._bells[generator_id] = asyncio.Event()
        return bell

    def end(self, generator_id: str) -> None:
        """Its call is over: it has called again, or has died."""
        bell = self._bells.pop(generator_id, None)
        if bell is not None:
            bell.set()

    def ring(self) -> None:
        """There may be something to lease."""
        for bell in self._bells.values():
            bell.set()

    async def wait(self, generator_id: str, bell: asyncio.Event, seconds: float) -> bool:
        """Until there may be something to lease, `seconds` at most. False if this call is over."""
        bell.clear()
        if self._bells.get(generator_id) is bell:
            await wait_until(bell, min(seconds, LOOK_SECONDS))
        return self._bells.get(generator_id) is bell
