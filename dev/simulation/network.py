"""The simulated network: ZeroMQ-like sockets between processes, in virtual time, with
faults from one seed.

It has the properties of DEALER and ROUTER over TCP (`tests/sim/test_sockets.py` runs the
same tests on both):

1. A connection carries whole messages, in order. Messages of different connections may overtake
   each other.
2. A dealer connects automatically, and reconnects after a connection was lost. Meanwhile it queues
   messages, up to `HIGH_WATER_MARK`.
3. A router knows a dealer from when its connection is established until it is lost. A new
   connection takes over the name.
4. When a connection is lost, a prefix of what was in transit has arrived. Of the rest of a dealer's
   messages a prefix is lost, and what the kernel had not taken yet is sent over the next
   connection: there may be a gap, but messages stay in order.
5. Nothing is delivered twice. Duplicates come from the layer above: from senders that reconnect and
   resend what was not answered.

6. A process without descriptors (`VirtualProcess.out_of_descriptors`) can make no socket, and
   accepts no connection; peers that connect wait outside.

A fault lasts for a given number of seconds, and concerns connections between `a` and `b`,
each the name of a process or host, or `ANY_NAME`. While it lasts, no new connection is
established between them.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils import z85

from dev.simulation.loop import VirtualLoop, VirtualProcess, VirtualTimer
from r3async.world import MAX_FRAME, Buffer, MessageHandler
from r3async.world.zmq_sockets import (
    REFUSED_NO_KEY,
    REFUSED_OTHER_LEARNER,
    REFUSED_UNKNOWN_KEY,
    UNKNOWN_KEY_HINT,
)

if TYPE_CHECKING:
    from r3async.world.curve_keys import ClientKeys, ServerKeys

__all__ = ["DelayRanges", "draw_seconds"]

ANY_NAME = "*"
HIGH_WATER_MARK = 1000
"""Maximum number of messages that a connection, or a dealer without one, holds. Further ones
are not accepted."""
MIN_RETRY_SECONDS = 0.05
MAX_RETRY_SECONDS = 1.0
"""First and maximum pause between a dealer's attempts to connect, in seconds. Each pause is
twice the one before."""
HANDSHAKE_SECONDS = 5.0
"""Seconds after which an attempt to connect that is not answered is given up."""
KEEPALIVE_SECONDS = 60.0
"""Seconds after which an end of a connection notices that the other has vanished."""


class SimulatedFrame(bytes):
    """An implementation of `world.ReceivedFrame`."""

    @property
    def buffer(self) -> memoryview:
        return memoryview(self)

    @property
    def bytes(self) -> SimulatedFrame:
        return self


@dataclass(frozen=True, slots=True)
class MessagePath:
    """The path of a message: its source and target process, and the router's name for the dealer.
    `target` is an endpoint while a dealer has no connection."""

    source: str
    target: str
    identity: bytes
    to_router: bool


SimulatedFrames = list[SimulatedFrame]
MessageObserver = Callable[[str, MessagePath, SimulatedFrames], object]
"""A callback for each message: with "sent", and later with "arrived" (and the frames as they
arrive, perhaps damaged) or "lost". The frames do not contain the identity."""


@dataclass(slots=True)
class MessageInTransit:
    due_at: float
    timer: VirtualTimer
    frames: SimulatedFrames


class ConnectionDirection:
    """One direction of a connection."""

    def __init__(
        self, connection: SimulatedConnection, source: SimulatedSocket, target: SimulatedSocket
    ):
        self.connection = connection
        self.source = source
        self.target = target
        to_router = target is connection.router
        self.path = MessagePath(
            source.process.name, target.process.name, connection.dealer.identity, to_router
        )
        self.is_silent = False
        """True if everything that is sent from now on is lost, and nobody notices."""
        self.in_transit: deque[MessageInTransit] = deque()
        self._network = source.network
        self._last_due_at = 0.0

    def carry_message(self, frames: SimulatedFrames) -> None:
        if self.is_silent or not self.connection.is_open:
            self._network.on_message("lost", self.path, frames)
            return
        due = self.arrival_time(sum(map(len, frames)))
        self.in_transit.append(
            MessageInTransit(due, self._call_at(due, self._deliver_next), frames)
        )
        # The other end disconnects when it sees the length.
        if max(map(len, frames), default=0) > MAX_FRAME:
            self.in_transit.pop().timer.cancel()
            self._network.on_message("lost", self.path, frames)
            self._call_at(due, self.connection.drop_connection)

    def call_after_arrivals(
        self, callback: Callable[[SimulatedConnection], object], after: float = 0.0
    ) -> None:
        """Call `callback` in the target's process, `after` seconds after everything in
        transit has arrived."""
        self._call_at(self.arrival_time(0) + after, callback, self.connection)

    def arrival_time(self, nbytes: int) -> float:
        """Return when a message that is sent now arrives: never before one that
        was sent earlier."""
        network = self._network
        source = self.source.host
        target = self.target.host
        at = network.now
        if network.bandwidth is not None and source != target:
            seconds = nbytes / network.bandwidth
            for link in ((source, "out"), (target, "in")):
                at = network.link_busy_until[link] = (
                    max(at, network.link_busy_until.get(link, 0.0)) + seconds
                )
        at += network.draw_delay(network.rng)
        for fault in network.active_faults(self.source, self.target):
            if fault.kind == "stall":
                at = max(at, fault.until)
        self._last_due_at = max(self._last_due_at, at)
        return self._last_due_at

    def delay_until(self, until: float) -> None:
        """Delay everything that is in transit or sent from now on, so that nothing
        arrives before `until`."""
        for message in self.in_transit:
            if self._network.now < message.due_at <= until:
                message.timer.cancel()
                message.timer = self._call_at(until, self._deliver_next)
                message.due_at = until
        self._last_due_at = max(self._last_due_at, until)

    def lose_messages(self, keep_count: int) -> list[SimulatedFrames]:
        """Lose all messages in transit but the first `keep_count`, and return the
        lost ones, in order."""
        lost = []
        while len(self.in_transit) > keep_count:
            message = self.in_transit.pop()
            message.timer.cancel()
            lost.append(message.frames)
        return lost[::-1]

    def count_arrived(self) -> int:
        """Return how many messages in transit have arrived but are not read, perhaps because the
        target is frozen."""
        return sum(message.due_at <= self._network.now for message in self.in_transit)

    def _call_at(self, at: float, callback: Callable[..., object], *args: Any) -> VirtualTimer:
        return self._network.loop.call_at(at, callback, *args, context=self.target.process.context)

    def _deliver_next(self) -> None:
        network = self._network
        frames = self.in_transit.popleft().frames
        if self.target.closed:
            network.on_message("lost", self.path, frames)
            return
        if network.is_damaged(self.path, frames):
            frames = flip_bit(network.rng, frames)
        network.on_message("arrived", self.path, frames)
        self.target.on_message(
            [SimulatedFrame(self.path.identity), *frames] if self.path.to_router else list(frames)
        )


class SimulatedConnection:
    """A connection between a dealer and a router. It exists from the time at which the router
    accepts the dealer."""

    def __init__(self, dealer: SimulatedDealer, router: SimulatedRouter):
        self.dealer = dealer
        self.router = router
        self.is_open = True
        self.is_ready = False
        """True if the dealer knows that the connection is established."""
        self.to_router, self.to_dealer = (
            ConnectionDirection(self, dealer, router),
            ConnectionDirection(self, router, dealer),
        )

    def silence_both_ends(self) -> None:
        """Let both ends vanish for each other. They notice by keepalive."""
        for direction in (self.to_router, self.to_dealer):
            self._observe_lost(direction, direction.lose_messages(direction.count_arrived()))
            direction.is_silent = True
        self.drop_after_keepalive()

    def drop_after_keepalive(self) -> None:
        network = self.dealer.network
        network.loop.call_later(KEEPALIVE_SECONDS, self.drop_connection, context=network.context)

    def drop_connection(self, by: SimulatedSocket | None = None) -> None:
        """End the connection: closed `by` one of its ends, or cut. Idempotent."""
        if not self.is_open:
            return
        self.is_open = False
        rng = self.dealer.network.rng
        for direction in (self.to_router, self.to_dealer):
            keep = direction.count_arrived()
            count = len(direction.in_transit)
            if by is direction.source:  # what the kernel has taken is still sent
                keep = rng.randint(keep, count)
            rest = direction.lose_messages(keep)
            if direction is self.to_router and by is not self.dealer and not direction.is_silent:
                accepted = rng.randint(0, len(rest))
                self.dealer.queued_messages.extendleft(rest[accepted:][::-1])
                rest = rest[:accepted]
            self._observe_lost(direction, rest)
            if by is not direction.target:
                unnoticed = direction.is_silent and by is not None
                direction.call_after_arrivals(
                    direction.target.on_disconnected, after=KEEPALIVE_SECONDS if unnoticed else 0.0
                )

    def _observe_lost(
        self, direction: ConnectionDirection, messages: list[SimulatedFrames]
    ) -> None:
        for frames in messages:
            self.dealer.network.on_message("lost", direction.path, frames)


class SimulatedSocket:
    """An implementation of `world.MessageSocket`."""

    def __init__(
        self,
        network: SimulatedNetwork,
        host: str,
        process: VirtualProcess,
        on_message: MessageHandler,
        keys: Any,
    ):
        self.network = network
        self.host = host
        self.process = process
        self.on_message = on_message
        self.keys = keys
        self.closed = False
        self.endpoint = self.denial_reason = ""

    def send(self, frames: Sequence[Buffer]) -> int:
        raise NotImplementedError

    def receive_pending(self, seconds: float = 0.0) -> None:
        """Return at once: messages are handled as they arrive."""

    def close(self) -> None:
        raise NotImplementedError

    def on_disconnected(self, connection: SimulatedConnection) -> None:
        raise NotImplementedError

    def matches_name(self, name: str) -> bool:
        return name in (ANY_NAME, self.host, self.process.name)


class SimulatedRouter(SimulatedSocket):
    def __init__(
        self,
        network: SimulatedNetwork,
        host: str,
        process: VirtualProcess,
        address: str,
        on_message: MessageHandler,
        keys: Any,
        refused_peers: Counter[str],
    ):
        super().__init__(network, host, process, on_message, keys)
        self.refused_peers = refused_peers
        self.port = 0
        self.is_local = False
        """The port, and whether the router can be reached only from its own host."""
        self.connections: dict[bytes, SimulatedConnection] = {}
        network.register_router(self, address)

    def send(self, frames: Sequence[Buffer]) -> int:
        self.process.raise_if_ended()
        if self.closed:
            return errno.ENOTSOCK
        connection = self.connections.get(bytes(frames[0]))
        if connection is None:
            return errno.EHOSTUNREACH
        if len(connection.to_dealer.in_transit) >= HIGH_WATER_MARK:
            return errno.EAGAIN
        copied = [SimulatedFrame(frame) for frame in frames[1:]]
        self.network.on_message("sent", connection.to_dealer.path, copied)
        connection.to_dealer.carry_message(copied)
        return 0

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.network.unregister_router(self)
            peers = self.connections
            self.connections = {}
            for connection in peers.values():
                connection.drop_connection(by=self)

    def on_disconnected(self, connection: SimulatedConnection) -> None:
        if self.connections.get(connection.dealer.identity) is connection:
            del self.connections[connection.dealer.identity]

    def accept_dealer(self, dealer: SimulatedDealer, attempt: int) -> None:
        """Accept or refuse a dealer that tries to connect. One that has given up
        meanwhile is ignored."""
        network = self.network
        if (
            dealer.attempt_number != attempt
            or network.active_faults(self, dealer)
            or self.process.out_of_descriptors
        ):
            return
        if self.closed:
            network.call_in_process(dealer, dealer.schedule_retry)
        elif reason := refusal_reason(self.keys, dealer.keys):
            self.refused_peers[reason] += 1
            network.call_in_process(dealer, dealer.on_refused, reason)
        else:
            earlier = self.connections.pop(dealer.identity, None)
            if earlier is not None:
                # As in libzmq: what is left of a connection whose name was taken over comes under
                # a name of nobody.
                earlier.to_router.path = replace(earlier.to_router.path, identity=b"\0%d" % attempt)
                earlier.drop_connection(by=self)
            connection = dealer.connection = self.connections[dealer.identity] = (
                SimulatedConnection(dealer, self)
            )
            connection.to_dealer.call_after_arrivals(dealer.on_connected)


class SimulatedDealer(SimulatedSocket):
    def __init__(
        self,
        network: SimulatedNetwork,
        host: str,
        process: VirtualProcess,
        endpoint: str,
        identity: bytes,
        on_message: MessageHandler,
        keys: Any,
    ):
        super().__init__(network, host, process, on_message, keys)
        self.endpoint = endpoint
        self.identity = identity
        self._address = parse_endpoint(endpoint)
        self.connection: SimulatedConnection | None = None
        self.queued_messages: deque[SimulatedFrames] = deque()
        self.attempt_number = 0
        """Number of the current attempt to connect; 0 or -1 if there is none."""
        self._failed_attempts = 0
        self._retry_timer = network.call_in_process(self, self._try_connect)
        self._route = MessagePath(process.name, endpoint, identity, True)

    def send(self, frames: Sequence[Buffer]) -> int:
        self.process.raise_if_ended()
        if self.closed:
            return errno.ENOTSOCK
        connection = self.connection
        way = connection.to_router if connection is not None and connection.is_ready else None
        if len(self.queued_messages if way is None else way.in_transit) >= HIGH_WATER_MARK:
            return errno.EAGAIN
        copied = [SimulatedFrame(frame) for frame in frames]
        self.network.on_message("sent", self._route if way is None else way.path, copied)
        if way is None:
            self.queued_messages.append(copied)
        else:
            way.carry_message(copied)
        return 0

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.attempt_number = -1
            self._retry_timer.cancel()
            if self.connection is not None:
                self.connection.drop_connection(by=self)
            for frames in self.queued_messages:
                self.network.on_message("lost", self._route, frames)
            self.queued_messages.clear()

    def on_connected(self, connection: SimulatedConnection) -> None:
        if self.connection is connection and connection.is_open:
            self._retry_timer.cancel()
            self.attempt_number = -1
            self._failed_attempts = 0
            connection.is_ready = True
            queue = self.queued_messages
            self.queued_messages = deque()
            for frames in queue:
                connection.to_router.carry_message(frames)

    def on_disconnected(self, connection: SimulatedConnection) -> None:
        if self.connection is connection and not self.closed:
            self.connection = None
            self.schedule_retry()

    def on_refused(self, reason: str) -> None:
        if reason == REFUSED_UNKNOWN_KEY:
            self.denial_reason = UNKNOWN_KEY_HINT
        self.schedule_retry()

    def schedule_retry(self, after: float = 0.0) -> None:
        if self.closed:
            return
        self._retry_timer.cancel()
        pause = (
            min(MIN_RETRY_SECONDS * 2**self._failed_attempts, MAX_RETRY_SECONDS)
            + self.network.rng.random() * MIN_RETRY_SECONDS
        )
        self._failed_attempts = min(self._failed_attempts + 1, 10)
        self._retry_timer = self.network.call_in_process(
            self, self._try_connect, delay=after + pause
        )

    def _try_connect(self) -> None:
        if self.connection is not None:  # it is about to be established, or to be lost
            return
        network = self.network
        router = network.find_router(self.host, *self._address)
        self.attempt_number = -1
        if router is None or self.process.out_of_descriptors or network.active_faults(self, router):
            self.schedule_retry()
        else:
            self.attempt_number = next(network.attempt_numbers)
            self.schedule_retry(after=HANDSHAKE_SECONDS)
            network.call_in_process(
                router,
                router.accept_dealer,
                self,
                self.attempt_number,
                delay=2 * network.draw_delay(network.rng),
            )


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Return name and port (0 for `*`) of `tcp://name:port`. Raises `OSError` for anything else."""
    scheme, _, rest = endpoint.partition("://")
    name, _, port = rest.rpartition(":")
    if scheme != "tcp" or not name or not (port == "*" or port.isdigit()):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return name, 0 if port == "*" else int(port)


cached_public_key = lru_cache(maxsize=4096)(zmq.curve_public)


def refusal_reason(server: ServerKeys, client: ClientKeys | None) -> str:
    """Return why a server with these keys refuses a peer; "" if it accepts the peer."""
    if client is None:
        return REFUSED_NO_KEY
    if client.server_public_key != cached_public_key(server.secret_key):
        return REFUSED_OTHER_LEARNER
    return (
        ""
        if z85.decode(cached_public_key(client.secret_key)) in server.allowed_public_keys
        else REFUSED_UNKNOWN_KEY
    )


def flip_bit(rng: Random, frames: SimulatedFrames) -> SimulatedFrames:
    """Return the frames with one bit flipped in one frame that is not empty."""
    at = rng.choice([i for i, frame in enumerate(frames) if frame] or [-1])
    if at < 0:
        return frames
    changed = bytearray(frames[at])
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return [*frames[:at], SimulatedFrame(changed), *frames[at + 1 :]]


FIRST_PORT = 49152
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
WILDCARD_NAMES = ("*", "0.0.0.0", "[::]")


@dataclass(frozen=True)
class NetworkFault:
    kind: str
    a: str
    b: str
    until: float

    def affects_pair(self, x: SimulatedSocket, y: SimulatedSocket) -> bool:
        return (x.matches_name(self.a) and y.matches_name(self.b)) or (
            x.matches_name(self.b) and y.matches_name(self.a)
        )


class SimulatedNetwork:
    """The network between all simulated hosts.

    The attributes below may be set at any time, and apply to what is sent from then on.

    Attributes:
        draw_delay: Function of a random number generator that returns the delay of one
            message in seconds.
        damage_rate: Probability that one bit of a message is flipped.
        bandwidth: Bytes per second out of each host, and into it; None for no limit.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        rng: Random,
        on_message: MessageObserver = lambda event, way, frames: None,
    ):
        self.loop = loop
        self.rng = rng
        self.on_message = on_message
        self.draw_delay: Callable[[Random], float] = lambda rng: draw_seconds(
            DelayRanges.message, rng
        )
        self.damage_rate = 0.0
        self.is_damaged: Callable[[MessagePath, SimulatedFrames], bool] = self._draw_damage
        """Function that decides whether one bit of an arriving message is flipped."""
        self.bandwidth: float | None = None
        self.link_busy_until: dict[tuple[str, str], float] = {}
        """Time until which each link is busy, by host and direction."""
        self.context = Context()
        """Context of callbacks that belong to no process."""
        self.attempt_numbers = itertools.count(1)
        self._ports = itertools.count(FIRST_PORT)
        self._routers: dict[tuple[str, int], SimulatedRouter] = {}
        self._faults: list[NetworkFault] = []

    def _draw_damage(self, route: MessagePath, frames: SimulatedFrames) -> bool:
        return bool(self.damage_rate) and self.rng.random() < self.damage_rate

    @property
    def now(self) -> float:
        return self.loop.now

    def sockets_for(self, host: str, process: VirtualProcess) -> SimulatedSockets:
        return SimulatedSockets(self, host, process)

    # -- faults ------------------------------------------------------------------------------------

    def cut_connections(self, a: str, b: str = ANY_NAME, seconds: float = 0.0) -> None:
        """Cut the connections between `a` and `b`; both ends notice."""
        self._add_fault("cut", a, b, seconds)
        for connection in self._connections_between(a, b):
            connection.drop_connection()

    def stall_connections(self, a: str, b: str = ANY_NAME, seconds: float = 0.0) -> None:
        """Delay everything between `a` and `b` for `seconds`; then everything arrives."""
        self._add_fault("stall", a, b, seconds)
        for connection in self._connections_between(a, b):
            connection.to_router.delay_until(self.now + seconds)
            connection.to_dealer.delay_until(self.now + seconds)

    def half_open_connections(
        self, source: str, target: str = ANY_NAME, seconds: float = 0.0
    ) -> None:
        """Lose, unnoticed, what is in transit from `source` to `target`, and what is sent over
        current connections."""
        self._add_fault("half-open", source, target, seconds)
        for connection in self._connections_between(source, target):
            for direction in (connection.to_router, connection.to_dealer):
                if direction.source.matches_name(source) and direction.target.matches_name(target):
                    for frames in direction.lose_messages(direction.count_arrived()):
                        self.on_message("lost", direction.path, frames)
                    direction.is_silent = True
            connection.drop_after_keepalive()

    def silence_connections(self, name: str) -> None:
        """Silence the connections of a process or host that loses power: they stay open, but carry
        nothing. The caller must then end the processes."""
        for connection in self._connections_between(name, ANY_NAME):
            connection.silence_both_ends()

    def active_faults(self, x: SimulatedSocket, y: SimulatedSocket) -> list[NetworkFault]:
        """Return the current faults between two sockets."""
        if self._faults:
            self._faults = [fault for fault in self._faults if fault.until > self.now]
        return [fault for fault in self._faults if fault.affects_pair(x, y)]

    def _add_fault(self, kind: str, a: str, b: str, seconds: float) -> None:
        self._faults.append(NetworkFault(kind, a, b, self.now + seconds))

    def _connections_between(self, a: str, b: str) -> list[SimulatedConnection]:
        fault = NetworkFault("", a, b, 0.0)
        connections = [c for s in self._routers.values() for c in s.connections.values()]
        return [c for c in connections if c.is_open and fault.affects_pair(c.dealer, c.router)]

    # -- what sockets use --------------------------------------------------------------------------

    def call_in_process(
        self,
        socket: SimulatedSocket,
        callback: Callable[..., object],
        *args: Any,
        delay: float = 0.0,
    ) -> VirtualTimer:
        """Call `callback` in the process of `socket` after `delay` seconds."""
        return self.loop.call_later(delay, callback, *args, context=socket.process.context)

    def register_router(self, router: SimulatedRouter, address: str) -> None:
        """Bind a router to an address. Raises `OSError` if the address is invalid, of another
        host, or in use."""
        name, port = parse_endpoint(address)
        if name not in (*LOOPBACK_NAMES, *WILDCARD_NAMES, router.host):
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
        if port and (router.host, port) in self._routers:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        router.port = port or next(p for p in self._ports if (router.host, p) not in self._routers)
        router.is_local = name in LOOPBACK_NAMES
        self._routers[router.host, router.port] = router
        router.endpoint = f"tcp://{'0.0.0.0' if name == '*' else name}:{router.port}"

    def unregister_router(self, router: SimulatedRouter) -> None:
        self._routers.pop((router.host, router.port), None)

    def find_router(self, host: str, name: str, port: int) -> SimulatedRouter | None:
        """Return the router that a process on `host` reaches under this name and port; None
        if there is none."""
        if name in (*LOOPBACK_NAMES, *WILDCARD_NAMES, host):
            return self._routers.get((host, port))
        router = self._routers.get((name, port))
        return None if router is None or router.is_local else router


class SimulatedSockets:
    """An implementation of `world.Sockets` for one process. The sockets are closed when it ends."""

    def __init__(self, network: SimulatedNetwork, host: str, process: VirtualProcess):
        self._network = network
        self._host = host
        self._process = process
        self._sockets: list[SimulatedSocket] = []
        process.add_end_callback(self._close_all)

    def bind_router(
        self, address: str, on_message: MessageHandler, *, keys: Any, refused_peers: Counter[str]
    ) -> SimulatedRouter:
        self._check_can_open()
        router = SimulatedRouter(
            self._network, self._host, self._process, address, on_message, keys, refused_peers
        )
        self._sockets.append(router)
        return router

    def connect_dealer(
        self, endpoint: str, identity: bytes, on_message: MessageHandler, *, keys: Any
    ) -> SimulatedDealer:
        self._check_can_open()
        dealer = SimulatedDealer(
            self._network, self._host, self._process, endpoint, identity, on_message, keys
        )
        self._sockets = [*(socket for socket in self._sockets if not socket.closed), dealer]
        return dealer

    def _check_can_open(self) -> None:
        self._process.raise_if_ended()
        if self._process.out_of_descriptors:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def close(self) -> None:
        self._close_all()

    def _close_all(self) -> None:
        for socket in self._sockets:
            socket.close()
        self._sockets = []


SecondsRange = tuple[float, float]
"""Minimum and maximum seconds."""


def draw_seconds(between: SecondsRange, rng: Random) -> float:
    """Draw a duration, mostly near the minimum: half of all draws are in the lowest eighth of the
    range, one in eleven in the upper quarter."""
    least, most = between
    share = rng.random()
    # Not with libm, whose last digit differs between machines.
    return least + (most - least) * (share * share * share)


@dataclass(frozen=True)
class DelayRanges:
    """Ranges of delays, in seconds.

    Attributes:
        call: Transit of a call, or of its answer.
        start: Time until a process has imported what it needs.
        restart: Time from the end of a process until the next one is begun.
        notice: Time until a caller notices that no answer will come.
        thread: Time until a function that is passed to a thread runs.
        message: Transit of a message over the network.
    """

    call: SecondsRange = (0.0002, 0.01)
    start: SecondsRange = (0.5, 5.0)
    restart: SecondsRange = (0.1, 2.0)
    notice: SecondsRange = (0.01, 2.0)
    thread: SecondsRange = (0.0001, 0.005)
    message: SecondsRange = (0.0002, 0.01)

    def scale_by(self, factor: float) -> DelayRanges:
        """Return the delays multiplied by `factor`."""
        stretched = {
            each.name: tuple(seconds * factor for seconds in getattr(self, each.name))
            for each in fields(self)
        }
        return DelayRanges(**stretched)
