"""What both ends share: socket options, sending without waiting, and work that is kept off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import zmq
import zmq.asyncio

from r3async.config import TransportConfig
from r3async.transport.wire import MAX_CONTROL, MAX_HEADER, Frame

OFFLOAD_BYTES = 256 * 2**10
"""Larger payloads are encoded, checksummed and decoded in a thread. Smaller ones take less than the hop there."""

P = ParamSpec("P")
R = TypeVar("R")


class TransportError(RuntimeError):
    """Sending or binding can not go on; the message says what to change."""


class TransportRefused(TransportError):
    """The receiver belongs to another run, or has another schema. Trying again can not help."""


def open_socket(context: zmq.asyncio.Context, kind: int, settings: TransportConfig) -> zmq.asyncio.Socket:
    socket = context.socket(kind)
    # What a closed socket still holds is resent by the protocol; nothing may wait for it at exit.
    socket.linger = 0
    # Silence is noticed by the protocol (WELCOME and OFFER are its heartbeats). ZeroMQ's own are left off: in libzmq
    # 4.3.5, a peer that fills the receive queue and disconnects makes the heartbeat's timer abort the whole process
    # ("Assertion failed: !_io_error", libzmq issue 4364). TCP's clear away connections whose peer vanished.
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    # Per frame. Beyond it ZeroMQ drops the connection before the frame takes memory.
    socket.setsockopt(zmq.MAXMSGSIZE, max(settings.max_message_bytes, MAX_HEADER, MAX_CONTROL))
    return socket


def send_now(socket: zmq.asyncio.Socket, frames: Sequence[Frame]) -> int:
    """Hand a message to ZeroMQ without waiting and without copying. Returns 0, or the errno of what prevented it."""
    # With DONTWAIT the future is done when it is returned, so this may be called from anywhere on the loop's thread.
    future = cast("asyncio.Future[Any]", socket.send_multipart(list(frames), flags=zmq.DONTWAIT, copy=False))
    error = future.exception()
    if error is None:
        return 0
    if isinstance(error, zmq.ZMQError) and error.errno is not None:
        return error.errno
    raise error


def milliseconds(seconds: float) -> int:
    return max(1, int(seconds * 1000))


async def off_loop(nbytes: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run work on `nbytes` of payload: in a thread if that would hold up the event loop."""
    if nbytes <= OFFLOAD_BYTES:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


async def close_context(context: zmq.asyncio.Context) -> None:
    """Wait until ZeroMQ has let go of the addresses. All sockets must be closed."""
    await asyncio.wait_for(asyncio.to_thread(context.term), timeout=5)
