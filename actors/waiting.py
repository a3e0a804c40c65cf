"""Waiting for whatever comes first: news, or the time for a look."""

from __future__ import annotations

import asyncio


async def wait_until(event: asyncio.Event, seconds: float) -> None:
    """Until it is set, which it is after `seconds` in any case: cheaper than a time-out, which cancels and raises."""
    timer = asyncio.get_running_loop().call_later(seconds, event.set)
    try:
        await event.wait()
    finally:
        timer.cancel()
