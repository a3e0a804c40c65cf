"""What both ends share: sockets served by the event loop, and work that is kept off it."""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import zmq

from r3async.transport.wire import PIECE, Frame

OFFLOAD_BYTES = 256 * 2**10
"""Larger payloads are encoded, checksummed and decoded in a thread. Smaller ones take less than the hop there."""
TURN_SECONDS = 0.0005
"""How long one socket may keep the event loop before others have their turn."""
COPIED = 2**16
"""Smaller frames are copied when they are sent: that is faster than to keep track of them."""
ENCRYPTED = 64
"""More than what CURVE adds to a frame."""
HANDSHAKE_MS = 5000
"""A peer that has not proved its key by then is disconnected."""
# Plain numbers: a flag of pyzmq costs as much to put together as a small frame to send.
ONE = int(zmq.DONTWAIT)
MORE = int(zmq.DONTWAIT | zmq.SNDMORE)

P = ParamSpec("P")
R = TypeVar("R")


class TransportError(RuntimeError):
    """Sending or binding can not go on; the message says what to change."""


class TransportRefused(TransportError):
    """The receiver belongs to another run, has another schema, or does not know this key. Trying again can not help."""


def open_socket(context: zmq.Context[Any], kind: int) -> zmq.Socket[bytes]:
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
    # Per frame, also of a handshake. Beyond it ZeroMQ drops the connection before the frame takes memory.
    socket.setsockopt(zmq.MAXMSGSIZE, PIECE + ENCRYPTED)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    return socket


class LoopSocket:
    """A ZeroMQ socket on the running event loop: `on_message(frames)` is called for each message, on the loop's thread.

    No future, task or copy is made per message (`zmq.asyncio` makes several: a third of its throughput at 200 KB). The
    file descriptor of a ZeroMQ socket only tells that something *changed*, so after it was readable, and after every
    send, all that is there has to be read, or it would lie there until the next change; `drain` makes sure.
    """

    def __init__(self, socket: zmq.Socket[bytes], on_message: Callable[[list[zmq.Frame]], None]):
        self.socket = socket
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._scheduled = False
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._readable)
        self._schedule()

    def send(self, frames: Sequence[Frame]) -> int:
        """Hand a message to ZeroMQ: without waiting, and large frames without copying. Returns 0, or the errno of what
        prevented it."""
        if self.socket.closed:
            return zmq.ENOTSOCK
        error, last = 0, len(frames) - 1
        try:
            for i, frame in enumerate(frames):
                self.socket.send(frame, MORE if i < last else ONE, copy=len(frame) < COPIED)
        except zmq.ZMQError as failure:
            if failure.errno is None:
                raise
            error = failure.errno
        self._schedule()
        return error

    def drain(self, limit: float = TURN_SECONDS) -> None:
        """Handle what is there, for `limit` seconds or a little more; the rest in the loop's next round."""
        until = time.perf_counter() + limit
        while not self.socket.closed:
            try:
                frames = [self.socket.recv(ONE, copy=False)]
                while frames[-1].more:
                    frames.append(self.socket.recv(ONE, copy=False))
            except zmq.Again:
                return
            self._on_message(frames)
            if time.perf_counter() > until:
                self._schedule()
                return

    def close(self) -> None:
        """Idempotent."""
        if not self.socket.closed:
            self._loop.remove_reader(self._fd)
            self.socket.close()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._scheduled_turn)

    def _scheduled_turn(self) -> None:
        self._scheduled = False
        self.drain()

    def _readable(self) -> None:
        if not self._scheduled:  # or it has its turn in this round anyway
            self.drain()


class Turns:
    """Short work of many tasks, in order: as much in each round of the event loop as `TURN_SECONDS` allow, so that they do
    not hold it up together, and no round is spent on one of them alone."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[asyncio.Future[Any], Callable[[], Any]]] = deque()

    async def do(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """What it returns or raises. Cancelled before its turn, it is not called."""
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._turn)
        self._waiting.append((done, functools.partial(function, *args, **kwargs)))
        return await done

    def _turn(self) -> None:
        until = time.perf_counter() + TURN_SECONDS
        while self._waiting and time.perf_counter() < until:
            done, work = self._waiting.popleft()
            if done.done():
                continue
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._turn)


async def off_loop(nbytes: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run work on `nbytes` of payload: in a thread if that would hold up the event loop."""
    if nbytes <= OFFLOAD_BYTES:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


async def close_context(context: zmq.Context[Any]) -> None:
    """Wait until ZeroMQ has let go of the addresses. All sockets must be closed."""
    await asyncio.wait_for(asyncio.to_thread(context.term), timeout=5)
