"""Generators for which there was nothing to lease: the conductor's part."""

from __future__ import annotations

import asyncio
import contextlib

LOOK_SECONDS = 0.5
"""Between two looks, at most: what may be leased follows from more than what rings."""


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
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(bell.wait(), min(seconds, LOOK_SECONDS))
        return self._bells.get(generator_id) is bell
