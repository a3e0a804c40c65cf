"""What a peer of the endpoint may take of it before it has shown a key: connections, time, bytes."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from aiohttp import web

MAX_HEADERS = 64
MAX_HEADER_BYTES = 8190
"""Of one header, and of the request line."""


class Connections:
    """Counts the connections of one endpoint, and ends those that keep it waiting.

    A connection has `wait_seconds` for the head of its next request; a further one than `most` is closed at once. Belongs to one
    event loop.
    """

    def __init__(self, most: int, wait_seconds: float):
        self.most, self.wait_seconds = most, wait_seconds
        self.refused = 0
        """Connections beyond `most`."""
        self._timers: dict[asyncio.BaseTransport, asyncio.TimerHandle] = {}
        self._open: set[asyncio.BaseTransport] = set()

    def __len__(self) -> int:
        """How many are open."""
        return len(self._open)

    def take(self, transport: asyncio.BaseTransport) -> bool:
        """It is open now. False if it is one too many, and is closed."""
        if len(self._open) >= self.most:
            self.refused += 1
            cast(asyncio.WriteTransport, transport).abort()
            return False
        self._open.add(transport)
        self.waits(transport)
        return True

    def waits(self, transport: asyncio.BaseTransport | None) -> None:
        """For the head of its next request."""
        if transport is not None and transport in self._open:
            self.served(transport)
            loop = asyncio.get_running_loop()
            self._timers[transport] = loop.call_later(self.wait_seconds, cast(asyncio.WriteTransport, transport).abort)

    def served(self, transport: asyncio.BaseTransport | None) -> None:
        """The head is there."""
        if transport is not None and (timer := self._timers.pop(transport, None)) is not None:
            timer.cancel()

    def gone(self, transport: asyncio.BaseTransport) -> None:
        self.served(transport)
        self._open.discard(transport)


class _Counted(asyncio.Protocol):
    """aiohttp's protocol, of a connection that is counted."""

    def __init__(self, inner: Any, connections: Connections):
        self._inner, self._connections = inner, connections
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._connections.take(transport):
            self._transport = transport
            self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._connections.gone(self._transport)
            self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._transport is not None:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._transport is not None else None

    def pause_writing(self) -> None:
        if self._transport is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._transport is not None:
            self._inner.resume_writing()


class LimitedSite(web.BaseSite):
    """`web.TCPSite` whose connections are counted. `start` raises `OSError` if `host` and `port` cannot be had."""

    def __init__(self, runner: web.AppRunner, host: str, port: int, connections: Connections):
        super().__init__(runner)
        self._host, self._port, self._connections = host, port, connections

    @property
    def name(self) -> str:
        return f"http://{self._host}:{self._port}"

    async def start(self) -> None:
        await super().start()
        server = self._runner.server
        assert server is not None
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Counted(server(), self._connections), self._host, self._port, backlog=self._connections.most
        )
