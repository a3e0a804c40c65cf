"""Stand-ins for what is outside of a process."""

from __future__ import annotations

import asyncio
from typing import Any


class StandIn:
    """An actor of this process. Its methods are given, or a subclass has them, or one `answer` for all."""

    name = ""

    def __init__(self, **methods: Any):
        self.__dict__ |= methods

    async def call(self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        async with asyncio.timeout(timeout):
            return await self.answer(method, *args, **kwargs)

    async def answer(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self, method)(*args, **kwargs)
