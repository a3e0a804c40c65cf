"""A process that holds many TCP connections without a key, and reconnects each one that is closed.

`python -m dev.chaos.crowd COUNT HOST:PORT…` runs until its standard input ends, and then prints
what it saw (`ConnectionCounts`).
"""

from __future__ import annotations

import resource
import select
import socket
import sys
import time

import msgspec

SPARE_DESCRIPTORS = 64
POLL_SECONDS = 0.1


class ConnectionCounts(msgspec.Struct):
    """Counts of connections.

    Attributes:
        tried: Connections that were begun.
        let_in: Connections that were greeted.
        turned_out: Greeted connections that were closed again by the server.
        most: Maximum number of greeted connections at one time.
    """

    tried: int = 0
    let_in: int = 0
    turned_out: int = 0
    most: int = 0


class StrangerCrowd:
    """A crowd of `count` simultaneous connections, divided evenly among `targets`."""

    def __init__(self, count: int, targets: list[tuple[str, int]]):
        self.counts = ConnectionCounts()
        self._targets = targets
        self._outside: dict[int, tuple[socket.socket, int]] = {}
        """Connections that have not been greeted, by descriptor, each with the
        index of its target."""
        self._inside: dict[int, tuple[socket.socket, int]] = {}
        self._poll = select.epoll()
        for number in range(count):
            self._connect_stranger(number % len(targets))

    def handle_events(self, seconds: float) -> None:
        """Handle what happens to the connections within `seconds`."""
        for descriptor, _ in self._poll.poll(seconds):
            connections = self._inside if descriptor in self._inside else self._outside
            stranger, target = connections[descriptor]
            try:
                words = stranger.recv(4096)
            except BlockingIOError:
                continue
            except OSError:
                words = b""
            if words and connections is self._outside:
                self._inside[descriptor] = self._outside.pop(descriptor)
                self.counts.let_in += 1
                self.counts.most = max(self.counts.most, len(self._inside))
            elif not words:
                self.counts.turned_out += connections is self._inside
                del connections[descriptor]
                stranger.close()
                self._connect_stranger(target)

    def _connect_stranger(self, target: int) -> None:
        stranger = socket.socket()
        stranger.setblocking(False)
        stranger.connect_ex(self._targets[target])
        self._outside[stranger.fileno()] = stranger, target
        self._poll.register(stranger.fileno(), select.EPOLLIN | select.EPOLLRDHUP)
        self.counts.tried += 1


def main(count: int, *addresses: str) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < count + SPARE_DESCRIPTORS:
        sys.exit(
            f"{count} connections need as many file descriptors, and {hard} are allowed "
            "here (ulimit -Hn)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (count + SPARE_DESCRIPTORS, hard))
    targets = [
        (host, int(port)) for host, _, port in (address.rpartition(":") for address in addresses)
    ]
    crowd = StrangerCrowd(count, targets)
    while not select.select([sys.stdin], [], [], 0)[0]:
        crowd.handle_events(POLL_SECONDS)
        time.sleep(0.01)
    print(msgspec.json.encode(crowd.counts).decode())


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
