"""The simulated network: sockets of ZeroMQ's kind between simulated processes, in virtual time, with faults from one seed.

What holds for DEALER and ROUTER over TCP holds here (`tests/sim/test_sockets.py` asks the same of both):

1. A connection carries whole messages, in order; messages of different connections overtake each other.
2. A dealer connects by itself, and again after a connection was lost. Meanwhile it keeps what it is given, up to
`HIGH_WATER_MARK`.
3. A router knows a dealer once its connection stands, and then until the connection is lost; a new one takes the name over.
4. When a connection is lost, a prefix of what was on its way has arrived. Of the rest of a dealer's messages a prefix is lost,
   and what the kernel had not taken yet goes over the next connection: there may be a gap, but nothing comes out of order.
5. Nothing is delivered twice. Duplicates come from above: from senders that connect again, and send again what was not answered.

6. A process without descriptors (`VirtualProcess.out_of_descriptors`) makes no socket, and lets nobody in; what connects
waits outside.

Faults last for the seconds that they are given, and concern connections between `a` and `b`, each the name of a process or host,
or `ANY_NAME`. While one lasts, no new connection stands up between them.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections import Counter
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass, fields
from random import Random
from typing import Any

from r3async.world import MessageHandler
from r3async.world.simulated.loop import VirtualLoop, VirtualProcess, VirtualTimer
from r3async.world.simulated.sockets import (
    ANY_NAME,
    MessageObserver,
    MessagePath,
    SimulatedConnection,
    SimulatedDealer,
    SimulatedFrames,
    SimulatedRouter,
    SimulatedSocket,
    parse_endpoint,
)

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
    """See the module. `draw_delay(rng)`: seconds of one message; `damage_rate`: how likely one bit of a message changes;
    `bandwidth`: bytes a second out of each host, and into it (None: no limit). They may be set at any time, for what is sent
    from then on."""

    def __init__(self, loop: VirtualLoop, rng: Random, on_message: MessageObserver = lambda event, way, frames: None):
        self.loop, self.rng, self.on_message = loop, rng, on_message
        self.draw_delay: Callable[[Random], float] = lambda rng: draw_seconds(Delays.message, rng)
        self.damage_rate = 0.0
        self.is_damaged: Callable[[MessagePath, SimulatedFrames], bool] = self._draw_damage
        """Whether one bit of a message that arrives has changed."""
        self.bandwidth: float | None = None
        self.link_busy_until: dict[tuple[str, str], float] = {}
        """Until when each link sends what it has."""
        self.context = Context()
        """Of what belongs to no process."""
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

    # -- faults ------------------------------------------------------------------------------------------------------

    def cut_connections(self, a: str, b: str = ANY_NAME, seconds: float = 0.0) -> None:
        """Connections are lost, and both ends notice."""
        self._add_fault("cut", a, b, seconds)
        for connection in self._connections_between(a, b):
            connection.drop_connection()

    def stall_connections(self, a: str, b: str = ANY_NAME, seconds: float = 0.0) -> None:
        """Nothing arrives for so long; then everything does."""
        self._add_fault("stall", a, b, seconds)
        for connection in self._connections_between(a, b):
            connection.to_router.delay_until(self.now + seconds)
            connection.to_dealer.delay_until(self.now + seconds)

    def half_open_connections(self, source: str, target: str = ANY_NAME, seconds: float = 0.0) -> None:
        """Nothing that is under way from `source` to `target`, or is sent over a connection of now, arrives; nobody notices."""
        self._add_fault("half-open", source, target, seconds)
        for connection in self._connections_between(source, target):
            for way in (connection.to_router, connection.to_dealer):
                if way.source.matches_name(source) and way.target.matches_name(target):
                    for frames in way.lose_messages(way.count_arrived()):
                        self.on_message("lost", way.path, frames)
                    way.is_silent = True
            connection.drop_after_keepalive()

    def silence_connections(self, name: str) -> None:
        """A process, or all of a host, loses its power: connections stand, in silence. End the processes then."""
        for connection in self._connections_between(name, ANY_NAME):
            connection.silence_both_ends()

    def active_faults(self, x: SimulatedSocket, y: SimulatedSocket) -> list[NetworkFault]:
        """Those that last between the two."""
        if self._faults:
            self._faults = [fault for fault in self._faults if fault.until > self.now]
        return [fault for fault in self._faults if fault.affects_pair(x, y)]

    def _add_fault(self, kind: str, a: str, b: str, seconds: float) -> None:
        self._faults.append(NetworkFault(kind, a, b, self.now + seconds))

    def _connections_between(self, a: str, b: str) -> list[SimulatedConnection]:
        fault = NetworkFault("", a, b, 0.0)
        found = [c for s in self._routers.values() for c in s.connections.values()]
        return [c for c in found if c.is_open and fault.affects_pair(c.dealer, c.router)]

    # -- what sockets use --------------------------------------------------------------------------------------------

    def call_in_process(
        self, socket: SimulatedSocket, callback: Callable[..., object], *args: Any, delay: float = 0.0
    ) -> VirtualTimer:
        """Call it in the process of `socket`."""
        return self.loop.call_later(delay, callback, *args, context=socket.process.context)

    def register_router(self, router: SimulatedRouter, address: str) -> None:
        """Raises `OSError`."""
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
        """Whom somebody on `host` reaches there."""
        if name in (*LOOPBACK_NAMES, *WILDCARD_NAMES, host):
            return self._routers.get((host, port))
        router = self._routers.get((name, port))
        return None if router is None or router.is_local else router


class SimulatedSockets:
    """See `world.Sockets`. They end with their process."""

    def __init__(self, network: SimulatedNetwork, host: str, process: VirtualProcess):
        self._network, self._host, self._process = network, host, process
        self._sockets: list[SimulatedSocket] = []
        process.add_end_callback(self._close_all)

    def bind_router(
        self, address: str, on_message: MessageHandler, *, keys: Any, refused_peers: Counter[str]
    ) -> SimulatedRouter:
        self._check_can_open()
        router = SimulatedRouter(self._network, self._host, self._process, address, on_message, keys, refused_peers)
        self._sockets.append(router)
        return router

    def connect_dealer(
        self, endpoint: str, identity: bytes, on_message: MessageHandler, *, keys: Any
    ) -> SimulatedDealer:
        self._check_can_open()
        dealer = SimulatedDealer(self._network, self._host, self._process, endpoint, identity, on_message, keys)
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
"""Least and most seconds."""


def draw_seconds(between: SecondsRange, rng: Random) -> float:
    """Mostly near the least: half of all draws in the lowest eighth, one in eleven in the upper quarter."""
    least, most = between
    share = rng.random()
    return least + (most - least) * (share * share * share)  # without libm, whose last digit differs between machines


@dataclass(frozen=True)
class Delays:
    """How long things take, in seconds. `call`: one way. `start`: until a process has imported what it needs. `restart`: from a
    process's end until the next one is begun. `notice`: until a caller notices that no answer will come. `thread`: until a
    function that is handed to a thread runs. `message`: on its way over the network."""

    call: SecondsRange = (0.0002, 0.01)
    start: SecondsRange = (0.5, 5.0)
    restart: SecondsRange = (0.1, 2.0)
    notice: SecondsRange = (0.01, 2.0)
    thread: SecondsRange = (0.0001, 0.005)
    message: SecondsRange = (0.0002, 0.01)

    def scale_by(self, factor: float) -> Delays:
        """Everything takes so many times as long."""
        stretched = {
            each.name: tuple(seconds * factor for seconds in getattr(self, each.name)) for each in fields(self)
        }
        return Delays(**stretched)


__all__ = ["Delays", "draw_seconds"]
