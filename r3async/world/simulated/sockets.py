"""Sockets of the simulated network, and the connections between them; see `network`."""

from __future__ import annotations

import errno
import os
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils import z85

from r3async.world import MAX_FRAME, Buffer, OnMessage
from r3async.world.simulated.loop import Process, Timer
from r3async.world.zeromq import DENIED, NO_KEY, OTHER_LEARNER, UNKNOWN_KEY

if TYPE_CHECKING:
    from r3async.world.keys import ClientKeys, ServerKeys
    from r3async.world.simulated.network import SimulatedNetwork

ANY = "*"
HIGH_WATER = 1000
"""Messages that a connection, or a dealer without one, holds; what is more is not taken."""
RETRY_SECONDS, MAX_RETRY_SECONDS = 0.05, 1.0
"""Between a dealer's attempts to connect: the first pause is the shorter one, and each is twice the one before."""
HANDSHAKE_SECONDS = 5.0
"""An attempt that is not answered is given up then."""
KEEPALIVE_SECONDS = 60.0
"""Then an end notices that the other has vanished."""


class Received(bytes):
    """See `world.Frame`."""

    @property
    def buffer(self) -> memoryview:
        return memoryview(self)

    @property
    def bytes(self) -> Received:
        return self


@dataclass(frozen=True, slots=True)
class Route:
    """Whose messages these are: names of processes, and the router's name for the dealer. `target` is an endpoint while a dealer
    has no connection."""

    source: str
    target: str
    identity: bytes
    to_router: bool


Frames = list[Received]
Observe = Callable[[str, Route, Frames], object]
"""Called for each message: "sent", and later "arrived" (as it does, damaged perhaps) or "lost". The frames do not contain the
identity."""


@dataclass(slots=True)
class Message:
    due: float
    timer: Timer
    frames: Frames


class Way:
    """One direction of a connection."""

    def __init__(self, connection: Connection, source: SimulatedSocket, target: SimulatedSocket):
        self.connection, self.source, self.target = connection, source, target
        to_router = target is connection.router
        self.route = Route(source.process.name, target.process.name, connection.dealer.identity, to_router)
        self.silent = False
        """What is sent from now on is lost, and nobody notices."""
        self.under_way: deque[Message] = deque()
        self._network = source.network
        self._last = 0.0

    def carry(self, frames: Frames) -> None:
        if self.silent or not self.connection.open:
            self._network.observe("lost", self.route, frames)
            return
        due = self.due(sum(map(len, frames)))
        self.under_way.append(Message(due, self._later(due, self._arrive), frames))
        if max(map(len, frames), default=0) > MAX_FRAME:  # the other end hangs up when it sees the length
            self.under_way.pop().timer.cancel()
            self._network.observe("lost", self.route, frames)
            self._later(due, self.connection.drop)

    def tell(self, callback: Callable[[Connection], object], after: float = 0.0) -> None:
        """Call the target's `callback` when all that is under way has arrived."""
        self._later(self.due(0) + after, callback, self.connection)

    def due(self, nbytes: int) -> float:
        """When a message that is sent now arrives: never before one that was sent earlier."""
        network, source, target = self._network, self.source.host, self.target.host
        at = network.now
        if network.bandwidth is not None and source != target:
            seconds = nbytes / network.bandwidth
            for link in ((source, "out"), (target, "in")):
                at = network.busy[link] = max(at, network.busy.get(link, 0.0)) + seconds
        at += network.delay(network.rng)
        for fault in network.faults(self.source, self.target):
            if fault.kind == "stall":
                at = max(at, fault.until)
        self._last = max(self._last, at)
        return self._last

    def hold(self, until: float) -> None:
        """Nothing arrives before `until`."""
        for message in self.under_way:
            if self._network.now < message.due <= until:
                message.timer.cancel()
                message.due, message.timer = until, self._later(until, self._arrive)
        self._last = max(self._last, until)

    def lose(self, keep: int) -> list[Frames]:
        """All that is under way but the first `keep` messages never arrives. Returns it."""
        lost = []
        while len(self.under_way) > keep:
            message = self.under_way.pop()
            message.timer.cancel()
            lost.append(message.frames)
        return lost[::-1]

    def arrived(self) -> int:
        """Of what is under way: messages that are there, but that the target, which is frozen perhaps, has not read."""
        return sum(message.due <= self._network.now for message in self.under_way)

    def _later(self, at: float, callback: Callable[..., object], *args: Any) -> Timer:
        return self._network.loop.call_at(at, callback, *args, context=self.target.process.context)

    def _arrive(self) -> None:
        network, frames = self._network, self.under_way.popleft().frames
        if self.target.closed:
            network.observe("lost", self.route, frames)
            return
        if network.spoils(self.route, frames):
            frames = flip_bit(network.rng, frames)
        network.observe("arrived", self.route, frames)
        self.target.on_message([Received(self.route.identity), *frames] if self.route.to_router else list(frames))


class Connection:
    """Between a dealer and a router, from when the router lets the dealer in."""

    def __init__(self, dealer: Dealer, router: Router):
        self.dealer, self.router = dealer, router
        self.open = True
        self.ready = False
        """The dealer knows that it stands."""
        self.up, self.down = Way(self, dealer, router), Way(self, router, dealer)

    def silence(self) -> None:
        """An end vanishes. The other notices by keepalive."""
        for way in (self.up, self.down):
            self._lost(way, way.lose(way.arrived()))
            way.silent = True
        self.expire()

    def expire(self) -> None:
        network = self.dealer.network
        network.loop.call_later(KEEPALIVE_SECONDS, self.drop, context=network.context)

    def drop(self, by: SimulatedSocket | None = None) -> None:
        """It ends: closed `by` one of its ends, or cut. Idempotent."""
        if not self.open:
            return
        self.open = False
        rng = self.dealer.network.rng
        for way in (self.up, self.down):
            keep, count = way.arrived(), len(way.under_way)
            if by is way.source:  # what the kernel had taken is still sent
                keep = rng.randint(keep, count)
            rest = way.lose(keep)
            if way is self.up and by is not self.dealer and not way.silent:
                taken = rng.randint(0, len(rest))
                self.dealer.queue.extendleft(rest[taken:][::-1])
                rest = rest[:taken]
            self._lost(way, rest)
            if by is not way.target:
                unnoticed = way.silent and by is not None
                way.tell(way.target.disconnected, after=KEEPALIVE_SECONDS if unnoticed else 0.0)

    def _lost(self, way: Way, messages: list[Frames]) -> None:
        for frames in messages:
            self.dealer.network.observe("lost", way.route, frames)


class SimulatedSocket:
    """See `world.MessageSocket`."""

    def __init__(self, network: SimulatedNetwork, host: str, process: Process, on_message: OnMessage, keys: Any):
        self.network, self.host, self.process, self.on_message, self.keys = network, host, process, on_message, keys
        self.closed = False
        self.endpoint = self.denied = ""

    def send(self, frames: Sequence[Buffer]) -> int:
        raise NotImplementedError

    def drain(self, limit: float = 0.0) -> None:
        """Messages are handled as they come."""

    def close(self) -> None:
        raise NotImplementedError

    def disconnected(self, connection: Connection) -> None:
        raise NotImplementedError

    def is_named(self, name: str) -> bool:
        return name in (ANY, self.host, self.process.name)


class Router(SimulatedSocket):
    def __init__(
        self,
        network: SimulatedNetwork,
        host: str,
        process: Process,
        address: str,
        on_message: OnMessage,
        keys: Any,
        refused: Counter[str],
    ):
        super().__init__(network, host, process, on_message, keys)
        self.refused = refused
        self.port, self.local = 0, False
        """`local`: it is reached only from its own host."""
        self.peers: dict[bytes, Connection] = {}
        network.bind(self, address)

    def send(self, frames: Sequence[Buffer]) -> int:
        self.process.check()
        if self.closed:
            return errno.ENOTSOCK
        connection = self.peers.get(bytes(frames[0]))
        if connection is None:
            return errno.EHOSTUNREACH
        if len(connection.down.under_way) >= HIGH_WATER:
            return errno.EAGAIN
        copied = [Received(frame) for frame in frames[1:]]
        self.network.observe("sent", connection.down.route, copied)
        connection.down.carry(copied)
        return 0

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.network.unbind(self)
            peers, self.peers = self.peers, {}
            for connection in peers.values():
                connection.drop(by=self)

    def disconnected(self, connection: Connection) -> None:
        if self.peers.get(connection.dealer.identity) is connection:
            del self.peers[connection.dealer.identity]

    def accept(self, dealer: Dealer, attempt: int) -> None:
        """A dealer knocks. One that has given up meanwhile is ignored."""
        network = self.network
        if dealer.attempt != attempt or network.faults(self, dealer) or self.process.full:
            return
        if self.closed:
            network.soon(dealer, dealer.retry)
        elif reason := refusal(self.keys, dealer.keys):
            self.refused[reason] += 1
            network.soon(dealer, dealer.refuse, reason)
        else:
            if (earlier := self.peers.pop(dealer.identity, None)) is not None:
                earlier.drop(by=self)
            connection = dealer.connection = self.peers[dealer.identity] = Connection(dealer, self)
            connection.down.tell(dealer.connected)


class Dealer(SimulatedSocket):
    def __init__(
        self,
        network: SimulatedNetwork,
        host: str,
        process: Process,
        endpoint: str,
        identity: bytes,
        on_message: OnMessage,
        keys: Any,
    ):
        super().__init__(network, host, process, on_message, keys)
        self.endpoint, self.identity = endpoint, identity
        self._address = parse(endpoint)
        self.connection: Connection | None = None
        self.queue: deque[Frames] = deque()
        self.attempt = 0
        """Number of the one that is made; of none when it has a connection, or is closed."""
        self._failed = 0
        self._timer = network.soon(self, self._try)
        self._route = Route(process.name, endpoint, identity, True)

    def send(self, frames: Sequence[Buffer]) -> int:
        self.process.check()
        if self.closed:
            return errno.ENOTSOCK
        connection = self.connection
        way = connection.up if connection is not None and connection.ready else None
        if len(self.queue if way is None else way.under_way) >= HIGH_WATER:
            return errno.EAGAIN
        copied = [Received(frame) for frame in frames]
        self.network.observe("sent", self._route if way is None else way.route, copied)
        if way is None:
            self.queue.append(copied)
        else:
            way.carry(copied)
        return 0

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.attempt = -1
            self._timer.cancel()
            if self.connection is not None:
                self.connection.drop(by=self)
            for frames in self.queue:
                self.network.observe("lost", self._route, frames)
            self.queue.clear()

    def connected(self, connection: Connection) -> None:
        if self.connection is connection and connection.open:
            self._timer.cancel()
            self.attempt, self._failed, connection.ready = -1, 0, True
            queue, self.queue = self.queue, deque()
            for frames in queue:
                connection.up.carry(frames)

    def disconnected(self, connection: Connection) -> None:
        if self.connection is connection and not self.closed:
            self.connection = None
            self.retry()

    def refuse(self, reason: str) -> None:
        if reason == UNKNOWN_KEY:
            self.denied = DENIED
        self.retry()

    def retry(self, after: float = 0.0) -> None:
        if self.closed:
            return
        self._timer.cancel()
        pause = min(RETRY_SECONDS * 2**self._failed, MAX_RETRY_SECONDS) + self.network.rng.random() * RETRY_SECONDS
        self._failed = min(self._failed + 1, 10)
        self._timer = self.network.soon(self, self._try, delay=after + pause)

    def _try(self) -> None:
        if self.connection is not None:  # which is about to stand, or to be lost
            return
        network = self.network
        router = network.find(self.host, *self._address)
        self.attempt = -1
        if router is None or self.process.full or network.faults(self, router):
            self.retry()
        else:
            self.attempt = next(network.numbers)
            self.retry(after=HANDSHAKE_SECONDS)
            network.soon(router, router.accept, self, self.attempt, delay=2 * network.delay(network.rng))


def parse(endpoint: str) -> tuple[str, int]:
    """Name and port (0 for `*`) of `tcp://name:port`. Raises `OSError`."""
    scheme, _, rest = endpoint.partition("://")
    name, _, port = rest.rpartition(":")
    if scheme != "tcp" or not name or not (port == "*" or port.isdigit()):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return name, 0 if port == "*" else int(port)


public_key = lru_cache(maxsize=4096)(zmq.curve_public)


def refusal(server: ServerKeys, client: ClientKeys | None) -> str:
    """Why whoever has the `server` keys does not let this peer in; "" if it does."""
    if client is None:
        return NO_KEY
    if client.server_public != public_key(server.secret):
        return OTHER_LEARNER
    return "" if z85.decode(public_key(client.secret)) in server.allowed else UNKNOWN_KEY


def flip_bit(rng: Random, frames: Frames) -> Frames:
    """One bit of one frame that is not empty."""
    at = rng.choice([i for i, frame in enumerate(frames) if frame] or [-1])
    if at < 0:
        return frames
    changed = bytearray(frames[at])
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return [*frames[:at], Received(changed), *frames[at + 1 :]]
