"""ZeroMQ sockets with CURVE keys, access control for the learner, and limits on strangers."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import resource
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from socket import SOL_SOCKET
from socket import socket as OsSocket
from typing import Any

import zmq

from r3async.world import MAX_FRAME, TURN_SECONDS, Buffer, MessageHandler
from r3async.world.curve_keys import ClientKeys, ServerKeys
from r3async.world.stages import stage

# Reasons for which a router refuses a peer.
REFUSED_NO_KEY = "no key shown"
REFUSED_OTHER_LEARNER = "the key of another learner"
REFUSED_UNKNOWN_KEY = "a key that is not known here"
REFUSED_BROKEN_HANDSHAKE = "a broken handshake"
UNKNOWN_KEY_HINT = (
    "this key: with `transport.keys`, its `.public` file has to be in the learner's directory"
)
"""Reason that a dealer gives as its `denial_reason` when the router does not know its key."""

COPY_BELOW_BYTES = 2**16
"""Size in bytes below which frames are copied when they are sent: that is faster than
keeping track of them."""
CURVE_OVERHEAD_BYTES = 64
"""Bytes that CURVE adds to a frame, at most."""
HANDSHAKE_TIMEOUT_MS = 5000
"""Milliseconds after which a peer that has not proved its key is disconnected."""
MAX_NEW_PEERS = 256
"""Connections that one socket lets in within about `HANDSHAKE_TIMEOUT_MS`; those that come at the
same moment are seen together."""
RESERVED = 256
"""Descriptors that are reserved for files and for peers that are let in already."""
MOST_DESCRIPTORS = 2**20
"""Limit of descriptors that is used where the system has none."""
APART_SECONDS = (0.1, 3.0)
"""Range, in seconds, of the random delay before a `ConnectionLimiter` opens again."""
CONNECT_MS = 500
RECONNECT_MS = 250
"""Milliseconds after which a dealer without an answer gives up an attempt to connect, and the
longest pause before the next one. The kernel retries after 1, 3, 7, 15 and 31 s: strangers who
connect anew would be let in before a dealer that has waited."""
CLOSE_SECONDS = 5.0
# Plain integers: combining flags of pyzmq costs as much as sending a small frame.
DONTWAIT = int(zmq.DONTWAIT)
DONTWAIT_SNDMORE = int(zmq.DONTWAIT | zmq.SNDMORE)

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
HANDSHAKE_FAILED_EVENTS = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
MONITOR_EVENT_STRUCT = struct.Struct("=HI")
# Values of zmq.h: ZMQ_PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC and _MECHANISM_MISMATCH.
CRYPTOGRAPHIC_ERROR = 0x11000001
MECHANISM_MISMATCH_ERROR = 0x11000002

# Constants of Linux that Python has no names for.
SO_ATTACH_FILTER = 26
SO_DETACH_FILTER = 27
_DROP_INSTRUCTION = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0), 8)
DROP_ALL_FILTER = struct.pack("HP", 1, ctypes.addressof(_DROP_INSTRUCTION))
"""A program of one instruction for the kernel's packet filter."""


class ZeroMqSockets:
    """The ZeroMQ sockets of a sender or receiver, as `world.Sockets`. At most one router."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._sockets: list[LoopSocket] = []

    def bind_router(
        self,
        address: str,
        on_message: MessageHandler,
        *,
        keys: ServerKeys,
        refused_peers: Counter[str],
    ) -> LoopSocket:
        return self._track_socket(
            RouterSocket(self._context, address, on_message, keys, refused_peers)
        )

    def connect_dealer(
        self, endpoint: str, identity: bytes, on_message: MessageHandler, *, keys: ClientKeys
    ) -> LoopSocket:
        return self._track_socket(DealerSocket(self._context, endpoint, identity, on_message, keys))

    async def close(self) -> None:
        for socket in self._sockets:
            socket.close()
        if not self._context.closed:
            await asyncio.wait_for(asyncio.to_thread(self._context.term), CLOSE_SECONDS)

    def _track_socket(self, socket: LoopSocket) -> LoopSocket:
        self._sockets = [*(s for s in self._sockets if not s.closed), socket]
        return socket


def apply_server_keys(socket: zmq.Socket[Any], keys: ServerKeys) -> None:
    socket.curve_secretkey = keys.secret_key
    socket.curve_publickey = zmq.curve_public(keys.secret_key)
    socket.curve_server = True


def apply_client_keys(socket: zmq.Socket[Any], keys: ClientKeys) -> None:
    socket.curve_secretkey = keys.secret_key
    socket.curve_publickey = zmq.curve_public(keys.secret_key)
    socket.curve_serverkey = keys.server_public_key


@contextlib.contextmanager
def undo_on_error() -> Iterator[contextlib.ExitStack]:
    """Undo the creation of several sockets if one of them fails: the callbacks of the yielded stack
    are called, and an error of ZeroMQ, such as a lack of descriptors, is raised as an `OSError`."""
    with contextlib.ExitStack() as undo:
        try:
            yield undo
        except zmq.ZMQError as error:
            raise OSError(error.errno, error.strerror) from error
        undo.pop_all()


def open_socket(context: zmq.Context[Any], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    # What a closed socket still holds is resent by the protocol; nothing may wait for it at exit.
    socket.linger = 0
    # Silence is noticed by the protocol (HELLO and WELCOME are its heartbeats). ZeroMQ's own are
    # left off: in libzmq 4.3.5, a peer that fills the receive queue and disconnects makes the
    # heartbeat's timer abort the whole process ("Assertion failed: !_io_error", libzmq issue 4364).
    # TCP's clear away connections whose peer vanished.
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS)
    # Per frame, also of a handshake. Beyond it ZeroMQ drops the connection before the
    # frame takes memory.
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME + CURVE_OVERHEAD_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS)
    return socket


class LoopSocket:
    """A ZeroMQ socket on the running event loop: `on_message(frames)` is called for each message,
    on the loop's thread.

    No future, task or copy is made per message (`zmq.asyncio` makes several: a third of its
    throughput at 200 KB). The file descriptor of a ZeroMQ socket only shows that something
    *changed*, so after it was readable, and after every send, everything that has arrived has to be
    read, or it would stay unread until the next change; `receive_pending` makes sure of that.
    """

    def __init__(self, socket: zmq.Socket[bytes], on_message: Callable[[list[zmq.Frame]], None]):
        self.endpoint = self.denial_reason = ""
        self._socket = socket
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._is_scheduled = False
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._on_readable)
        self._schedule_receive()

    @property
    def closed(self) -> bool:
        return self._socket.closed

    def send(self, frames: Sequence[Buffer]) -> int:
        """Implement `world.MessageSocket.send`. Large frames are not copied: they must not change
        until they are sent."""
        if self._socket.closed:
            return zmq.ENOTSOCK
        error = 0
        last = len(frames) - 1
        try:
            for i, frame in enumerate(frames):
                self._socket.send(
                    frame,
                    DONTWAIT_SNDMORE if i < last else DONTWAIT,
                    copy=len(frame) < COPY_BELOW_BYTES,
                )
        except zmq.ZMQError as failure:
            if failure.errno is None:
                raise
            error = failure.errno
        self._schedule_receive()
        return error

    def receive_pending(self, seconds: float = TURN_SECONDS) -> None:
        """Handle messages that have arrived, for `seconds` seconds or a little more; the rest
        follow in the loop's next round."""
        with stage("messages"):
            self._receive_until(time.perf_counter() + seconds)

    def _receive_until(self, until: float) -> None:
        while not self._socket.closed:
            try:
                frames = [self._socket.recv(DONTWAIT, copy=False)]
                while frames[-1].more:
                    frames.append(self._socket.recv(DONTWAIT, copy=False))
            except zmq.Again:
                return
            try:
                self._on_message(frames)
            except BaseException:
                # Later messages would wait for the next change, and their senders for an answer.
                self._schedule_receive()
                raise
            if time.perf_counter() > until:
                self._schedule_receive()
                return

    def close(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close()

    def _schedule_receive(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._receive_scheduled)

    def _receive_scheduled(self) -> None:
        self._is_scheduled = False
        self.receive_pending()

    def _on_readable(self) -> None:
        if not self._is_scheduled:  # or it has its turn in this round anyway
            self.receive_pending()


class RouterSocket(LoopSocket):
    """A router bound at `address`. Raises `OSError`."""

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        on_message: MessageHandler,
        keys: ServerKeys,
        refused_peers: Counter[str],
    ):
        with undo_on_error() as undo:
            socket = open_socket(context, zmq.ROUTER)
            undo.callback(socket.close)
            # Without MANDATORY an answer to a peer that is lost, or does not read, would vanish
            # without a trace.
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            # A peer that reconnects takes its name over from the connection that it gave up.
            socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
            socket.setsockopt(zmq.IPV6, "[" in address)
            self._authenticator = Authenticator(context, socket, keys, refused_peers)
            undo.callback(self._authenticator.close)
            socket.bind(address)
        super().__init__(socket, on_message)
        self.endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def close(self) -> None:
        self._authenticator.close()
        super().close()


class DealerSocket(LoopSocket):
    """A dealer that connects to `endpoint`. Raises `OSError`."""

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        identity: bytes,
        on_message: MessageHandler,
        keys: ClientKeys,
    ):
        with undo_on_error() as undo:
            socket = open_socket(context, zmq.DEALER)
            undo.callback(socket.close)
            socket.setsockopt(zmq.IPV6, "[" in endpoint)
            socket.setsockopt(zmq.ROUTING_ID, identity)
            socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
            apply_client_keys(socket, keys)
            self._monitor = LoopSocket(
                socket.get_monitor_socket(HANDSHAKE_FAILED_EVENTS), self._on_handshake_failed
            )
            undo.callback(self._monitor.close)
            undo.callback(socket.disable_monitor)
            socket.connect(endpoint)
        super().__init__(socket, on_message)
        self.endpoint = endpoint

    def close(self) -> None:
        if not self.closed:
            self._socket.disable_monitor()
        self._monitor.close()
        super().close()

    def _on_handshake_failed(self, frames: list[zmq.Frame]) -> None:
        event, value = MONITOR_EVENT_STRUCT.unpack(frames[0].bytes)
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.denial_reason = UNKNOWN_KEY_HINT
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == MECHANISM_MISMATCH_ERROR:
            self.denial_reason = (
                "this connection: what listens there has no keys, so it is no "
                "learner of this version"
            )


class ConnectionLimiter:
    """A limit on the new connections of a listening socket.

    A connection is let in only if fewer than `MAX_NEW_PEERS` were within the time of a handshake.
    So at most that many peers that have not proved their key are connected, and other peers have
    descriptors. Peers that wait outside are let in when the kernel, or a dealer, tries again.

    The limiter opens when all of those have had their time, plus a random delay from
    `APART_SECONDS`: a peer that was turned away retries at once, and after one second and three.
    If the limiter opened at once, or in step with them, it would let in the same peers forever,
    and nobody else.

    A filter on the listening socket drops packets that would open a connection; open
    connections do not see it.
    """

    def __init__(self) -> None:
        self._accepted_at: deque[float] = deque()
        self._listener: OsSocket | None = None
        self.opens_at: float | None = None
        """Time at which it opens, on `time.monotonic`; None while it is open."""

    def add_listener(self, descriptor: int) -> None:
        """Watch the listening socket of ZeroMQ with this descriptor. The descriptor is duplicated
        at once: when the limiter has to close, there may be none left for a duplicate."""
        with contextlib.suppress(OSError):  # without a copy all are let in, and counted
            self._listener = OsSocket(fileno=os.dup(descriptor))

    def count_accepted(self) -> None:
        """Count one more connection that was let in."""
        now = time.monotonic()
        self._accepted_at.append(now)
        while self._accepted_at[0] <= now - HANDSHAKE_TIMEOUT_MS / 1000:
            self._accepted_at.popleft()
        if (
            len(self._accepted_at) >= MAX_NEW_PEERS or self.opens_at is not None
        ):  # it is closed, and that one had connected before
            self._shut_out()

    def keep_reserve(self) -> None:
        """Close it if few descriptors are left, whoever uses them. Where other threads compute, a
        connection takes 10 ms to be counted, and thousands can come in that time."""
        if (
            self.opens_at is None
            and self._listener is not None
            and not _has_descriptors(self._listener)
        ):
            self._shut_out()

    def open_when_due(self) -> None:
        """Open it if it is time."""
        if self.opens_at is not None and time.monotonic() >= self.opens_at:
            self.opens_at = None
            self._accepted_at.clear()
            self._set_packet_filter(SO_DETACH_FILTER, bytes(4))

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()

    def _shut_out(self) -> None:
        if self.opens_at is None:
            self._set_packet_filter(SO_ATTACH_FILTER, DROP_ALL_FILTER)
        self.opens_at = (
            time.monotonic() + HANDSHAKE_TIMEOUT_MS / 1000 + random.uniform(*APART_SECONDS)
        )

    def _set_packet_filter(self, option: int, value: bytes) -> None:
        if self._listener is not None:
            with contextlib.suppress(OSError):
                # A kernel that knows no filters lets all in.
                self._listener.setsockopt(SOL_SOCKET, option, value)


def _has_descriptors(one: OsSocket) -> bool:
    """Raise the process's limit of descriptors as far as it may, if needed, and return whether
    `RESERVED` are left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        lowest = os.dup(one.fileno())  # the kernel gives the lowest number that is free
        os.close(lowest)
    except OSError:
        lowest = soft
    if soft - lowest < RESERVED:
        most = MOST_DESCRIPTORS if hard < 0 else hard
        if soft < most:
            with contextlib.suppress(OSError, ValueError):  # some systems allow less than they say
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
                soft = most
    return soft - lowest >= RESERVED


class Authenticator:
    """The guard of one server socket of `context`, from before it binds until `close`.
    `refused_peers` counts refused peers by reason.

    Connections are counted in a thread: an event loop that is busy for a second would let thousands
    in before it looks.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        server: zmq.Socket[bytes],
        keys: ServerKeys,
        refused_peers: Counter[str],
    ):
        self._keys = keys
        self._refused_peers = refused_peers
        with undo_on_error() as undo:
            handler = context.socket(zmq.REP)
            undo.callback(handler.close)
            handler.linger = 0
            handler.bind(ZAP_ENDPOINT)
            server.zap_domain = b"r3async"
            apply_server_keys(server, keys)
            watched = (
                HANDSHAKE_FAILED_EVENTS
                | zmq.EVENT_ACCEPTED
                | zmq.EVENT_LISTENING
                | zmq.EVENT_MONITOR_STOPPED
            )
            monitor = server.get_monitor_socket(watched)
        self._zap_socket = LoopSocket(handler, self._answer_zap_request)
        self._server = server
        self._watching = threading.Thread(
            target=self._watch_monitor, args=(monitor,), name="door", daemon=True
        )
        self._watching.start()

    def close(self) -> None:
        """Stop guarding the server's socket, before that is closed. Idempotent."""
        if not self._server.closed:
            self._server.disable_monitor()
        self._watching.join(CLOSE_SECONDS)
        self._zap_socket.close()

    def _answer_zap_request(self, frames: list[zmq.Frame]) -> None:
        version, request, *rest = (f.bytes for f in frames)
        # domain, address, identity, mechanism, credentials
        known = len(rest) >= 5 and rest[3] == b"CURVE" and rest[4] in self._keys.allowed_public_keys
        if not known:
            self._refused_peers[REFUSED_UNKNOWN_KEY] += 1
        status = (b"200", b"OK", b"generator") if known else (b"400", b"unknown key", b"")
        self._zap_socket.send([version, request, *status, b""])

    def _watch_monitor(self, monitor: zmq.Socket[bytes]) -> None:
        with contextlib.closing(monitor), contextlib.closing(ConnectionLimiter()) as door:
            while True:
                wait = (
                    None
                    if door.opens_at is None
                    else max(0, int(1000 * (door.opens_at - time.monotonic()))) + 1
                )
                if monitor.poll(wait):
                    door.keep_reserve()
                    event, value = MONITOR_EVENT_STRUCT.unpack(monitor.recv_multipart()[0])
                    if event == zmq.EVENT_MONITOR_STOPPED:
                        return
                    self._on_monitor_event(door, event, value)
                door.open_when_due()

    def _on_monitor_event(self, door: ConnectionLimiter, event: int, value: int) -> None:
        if event == zmq.EVENT_LISTENING:
            door.add_listener(value)
        elif event == zmq.EVENT_ACCEPTED:
            door.count_accepted()
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._refused_peers[
                {
                    MECHANISM_MISMATCH_ERROR: REFUSED_NO_KEY,
                    CRYPTOGRAPHIC_ERROR: REFUSED_OTHER_LEARNER,
                }.get(value, REFUSED_BROKEN_HANDSHAKE)
            ] += 1
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._refused_peers[REFUSED_NO_KEY] += (
                1  # It left first: a client without keys notices the mismatch as soon as this end.
            )
