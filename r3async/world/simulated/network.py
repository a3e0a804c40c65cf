"""The simulated network: sockets of ZeroMQ's kind between simulated processes, in virtual time, with faults from one seed.

What holds for DEALER and ROUTER over TCP holds here (`tests/sim/test_sockets.py` asks the same of both):

1. A connection carries whole messages, in order; messages of different connections overtake each other.
2. A dealer connects by itself, and again after a connection was lost. Meanwhile it keeps what it is given, up to `HIGH_WATER`.
3. A router knows a dealer once its connection stands, and then until the connection is lost; a new one takes the name over.
4. When a connection is lost, a prefix of what was on its way has arrived. Of the rest of a dealer's messages a prefix is lost,
   and what the kernel had not taken yet goes over the next connection: there may be a gap, but nothing comes out of order.
5. Nothing is delivered twice. Duplicates come from above: from senders that connect again, and send again what was not answered.

6. A process without descriptors (`Process.full`) makes no socket, and lets nobody in; what connects waits outside.

Faults last for the seconds that they are given, and concern connections between `a` and `b`, each the name of a process or host,
or `ANY`. While one lasts, no new connection stands up between them.
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

from r3async.world import OnMessage
from r3async.world.simulated.loop import Process, Timer, VirtualLoop
from r3async.world.simulated.sockets import (
    ANY,
    Connection,
    Dealer,
    Frames,
    Observe,
    Route,
    Router,
    SimulatedSocket,
    parse,
)

FIRST_PORT = 49152
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
WILDCARD = ("*", "0.0.0.0", "[::]")


@dataclass(frozen=True)
class Fault:
    kind: str
    a: str
    b: str
    until: float

    def concerns(self, x: SimulatedSocket, y: SimulatedSocket) -> bool:
        return (x.is_named(self.a) and y.is_named(self.b)) or (x.is_named(self.b) and y.is_named(self.a))


class SimulatedNetwork:
    """See the module. `delay(rng)`: seconds of one message; `damage`: how likely one bit of a message changes; `bandwidth`:
    bytes a second out of each host, and into it (None: no limit). They may be set at any time, for what is sent from then on."""

    def __init__(self, loop: VirtualLoop, rng: Random, observe: Observe = lambda event, way, frames: None):
        self.loop, self.rng, self.observe = loop, rng, observe
        self.delay: Callable[[Random], float] = lambda rng: draw(Delays.message, rng)
        self.damage = 0.0
        self.spoils: Callable[[Route, Frames], bool] = self._spoils
        """Whether one bit of a message that arrives has changed."""
        self.bandwidth: float | None = None
        self.busy: dict[tuple[str, str], float] = {}
        """Until when each link sends what it has."""
        self.context = Context()
        """Of what belongs to no process."""
        self.numbers = itertools.count(1)
        self._ports = itertools.count(FIRST_PORT)
        self._bound: dict[tuple[str, int], Router] = {}
        self._faults: list[Fault] = []

    def _spoils(self, route: Route, frames: Frames) -> bool:
        return bool(self.damage) and self.rng.random() < self.damage

    @property
    def now(self) -> float:
        return self.loop.now

    def sockets(self, host: str, process: Process) -> SimulatedSockets:
        return SimulatedSockets(self, host, process)

    # -- faults ------------------------------------------------------------------------------------------------------

    def cut(self, a: str, b: str = ANY, seconds: float = 0.0) -> None:
        """Connections are lost, and both ends notice."""
        self._begin("cut", a, b, seconds)
        for connection in self._connections(a, b):
            connection.drop()

    def stall(self, a: str, b: str = ANY, seconds: float = 0.0) -> None:
        """Nothing arrives for so long; then everything does."""
        self._begin("stall", a, b, seconds)
        for connection in self._connections(a, b):
            connection.up.hold(self.now + seconds)
            connection.down.hold(self.now + seconds)

    def half_open(self, source: str, target: str = ANY, seconds: float = 0.0) -> None:
        """Nothing that is under way from `source` to `target`, or is sent over a connection of now, arrives; nobody notices."""
        self._begin("half-open", source, target, seconds)
        for connection in self._connections(source, target):
            for way in (connection.up, connection.down):
                if way.source.is_named(source) and way.target.is_named(target):
                    for frames in way.lose(way.arrived()):
                        self.observe("lost", way.route, frames)
                    way.silent = True
            connection.expire()

    def vanish(self, name: str) -> None:
        """A process, or all of a host, loses its power: connections stand, in silence. End the processes then."""
        for connection in self._connections(name, ANY):
            connection.silence()

    def faults(self, x: SimulatedSocket, y: SimulatedSocket) -> list[Fault]:
        """Those that last between the two."""
        if self._faults:
            self._faults = [fault for fault in self._faults if fault.until > self.now]
        return [fault for fault in self._faults if fault.concerns(x, y)]

    def _begin(self, kind: str, a: str, b: str, seconds: float) -> None:
        self._faults.append(Fault(kind, a, b, self.now + seconds))

    def _connections(self, a: str, b: str) -> list[Connection]:
        fault = Fault("", a, b, 0.0)
        found = [c for s in self._bound.values() for c in s.peers.values()]
        return [c for c in found if c.open and fault.concerns(c.dealer, c.router)]

    # -- what sockets use --------------------------------------------------------------------------------------------

    def soon(self, socket: SimulatedSocket, callback: Callable[..., object], *args: Any, delay: float = 0.0) -> Timer:
        """Call it in the process of `socket`."""
        return self.loop.call_later(delay, callback, *args, context=socket.process.context)

    def bind(self, router: Router, address: str) -> None:
        """Raises `OSError`."""
        name, port = parse(address)
        if name not in (*LOOPBACK, *WILDCARD, router.host):
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
        if port and (router.host, port) in self._bound:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        router.port = port or next(p for p in self._ports if (router.host, p) not in self._bound)
        router.local = name in LOOPBACK
        self._bound[router.host, router.port] = router
        router.endpoint = f"tcp://{'0.0.0.0' if name == '*' else name}:{router.port}"

    def unbind(self, router: Router) -> None:
        self._bound.pop((router.host, router.port), None)

    def find(self, host: str, name: str, port: int) -> Router | None:
        """Whom somebody on `host` reaches there."""
        if name in (*LOOPBACK, *WILDCARD, host):
            return self._bound.get((host, port))
        router = self._bound.get((name, port))
        return None if router is None or router.local else router


class SimulatedSockets:
    """See `world.Sockets`. They end with their process."""

    def __init__(self, network: SimulatedNetwork, host: str, process: Process):
        self._network, self._host, self._process = network, host, process
        self._sockets: list[SimulatedSocket] = []
        process.at_end(self._close)

    def router(self, address: str, on_message: OnMessage, *, keys: Any, refused: Counter[str]) -> Router:
        self._check()
        router = Router(self._network, self._host, self._process, address, on_message, keys, refused)
        self._sockets.append(router)
        return router

    def dealer(self, endpoint: str, identity: bytes, on_message: OnMessage, *, keys: Any) -> Dealer:
        self._check()
        dealer = Dealer(self._network, self._host, self._process, endpoint, identity, on_message, keys)
        self._sockets = [*(socket for socket in self._sockets if not socket.closed), dealer]
        return dealer

    def _check(self) -> None:
        self._process.check()
        if self._process.full:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def close(self) -> None:
        self._close()

    def _close(self) -> None:
        for socket in self._sockets:
            socket.close()
        self._sockets = []


Range = tuple[float, float]
"""Least and most seconds."""


def draw(between: Range, rng: Random) -> float:
    """Mostly near the least: half of all draws in the lowest eighth, one in eleven in the upper quarter."""
    least, most = between
    share = rng.random()
    return least + (most - least) * (share * share * share)  # without libm, whose last digit differs between machines


@dataclass(frozen=True)
class Delays:
    """How long things take, in seconds. `call`: one way. `start`: until a process has imported what it needs. `restart`: from a
    process's end until the next one is begun. `notice`: until a caller notices that no answer will come. `thread`: until a
    function that is handed to a thread runs. `message`: on its way over the network."""

    call: Range = (0.0002, 0.01)
    start: Range = (0.5, 5.0)
    restart: Range = (0.1, 2.0)
    notice: Range = (0.01, 2.0)
    thread: Range = (0.0001, 0.005)
    message: Range = (0.0002, 0.01)

    def times(self, factor: float) -> Delays:
        """Everything takes so many times as long."""
        stretched = {
            each.name: tuple(seconds * factor for seconds in getattr(self, each.name)) for each in fields(self)
        }
        return Delays(**stretched)


__all__ = ["Delays", "draw"]
