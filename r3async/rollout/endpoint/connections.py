"""HTTP servers that strangers may reach: limits of connections and headers, and a log that
they cannot fill."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from aiohttp import web

MAX_HEADERS = 64
MAX_HEADER_BYTES = 8190
"""Limit of one header, and of the request line, in bytes."""
AIOHTTP_LOG = logging.getLogger(f"{__name__}.aiohttp")
AIOHTTP_LOG.setLevel(logging.CRITICAL)
"""aiohttp's logger, silenced: errors of handlers are reported elsewhere, and the rest is a
traceback for each request from strangers that is no HTTP."""


def make_runner(
    app: web.Application, *, read_timeout: float, shutdown_timeout: float, **options: Any
) -> web.AppRunner:
    """Return a runner of `app`. A connection has `read_timeout` seconds for the head
    of each request."""
    return web.AppRunner(
        app,
        access_log=None,
        logger=AIOHTTP_LOG,
        shutdown_timeout=shutdown_timeout,
        keepalive_timeout=read_timeout,
        max_line_size=MAX_HEADER_BYTES,
        max_field_size=MAX_HEADER_BYTES,
        max_headers=MAX_HEADERS,
        lingering_time=shutdown_timeout,
        **options,
    )


def limit_connections(runner: web.AppRunner, max_connections: int) -> set[web.RequestHandler]:
    """Limit the server of `runner`, which is set up, to `max_connections` connections and return
    the set of admitted ones, which the caller fills.

    Beyond the limit, each new connection replaces the oldest that is not admitted, and is closed at
    once if all are admitted.
    """
    server = runner.server
    assert server is not None
    admitted: set[web.RequestHandler] = set()
    accept = server.connection_made
    forget = server.connection_lost

    def connection_made(handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        transports = {other: other.transport for other in server.connections}
        open_ones = {
            other: at for other, at in transports.items() if at is not None and not at.is_closing()
        }
        if len(open_ones) >= max_connections:
            next(
                (at for other, at in open_ones.items() if other not in admitted), transport
            ).abort()
        accept(handler, transport)

    def connection_lost(handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        admitted.discard(handler)
        forget(handler, exc)

    server.connection_made = connection_made  # type: ignore[method-assign]
    server.connection_lost = connection_lost  # type: ignore[method-assign]
    return admitted
