"""Faulty connections.

A `MessageRelay` between a sender and its receiver records all frames, delays some, and flips
bits in some. A `TcpProxy` between a host and the source of its weights lets nothing pass
while it is blocked.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import zmq

from r3async.world.curve_keys import ClientKeys, generate_keys
from r3async.world.zmq_sockets import (
    CONNECT_MS,
    HANDSHAKE_TIMEOUT_MS,
    RECONNECT_MS,
    apply_client_keys,
    apply_server_keys,
)

Direction = Literal["to_learner", "to_generator"]
FrameObserver = Callable[[Direction, Sequence[bytes]], object]

POLL_MS = 20


class NoiseRates(msgspec.Struct, frozen=True):
    """Probabilities of faults for each message.

    Attributes:
        delay: Probability that the message, and with it all behind it, is held for up to
            `max_delay` seconds.
        damage: Probability that one bit of one of its frames is flipped.
    """

    seed: int = 0
    delay: float = 0.05
    max_delay: float = 0.3
    damage: float = 0.05


class MessageRelay(threading.Thread):
    """A relay between one sender, which connects to `endpoint`, and the receiver at `target`.

    Messages of one direction stay in order, as over TCP. The sender needs the relay's own
    keys, `sender_keys`.

    Args:
        note: Called on this thread as `note(direction, frames)` with each message, before any
            fault is applied.
        note_damage: Called as `note_damage(direction)` after `note` if one bit of the
            message is flipped.
        keys: Keys with which the relay connects to the target.
    """

    def __init__(
        self,
        target: str,
        noise: NoiseRates,
        rng: random.Random,
        note: FrameObserver = lambda direction, frames: None,
        note_damage: Callable[[Direction], object] = lambda direction: None,
        *,
        keys: ClientKeys,
    ):
        super().__init__(name="chaos-relay", daemon=True)
        self.damaged = self.delayed = 0
        """Number of messages."""
        self._noise = noise
        self._rng = rng
        self._note = note
        self._note_damage = note_damage
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._front.linger = 0
        server_keys, self.sender_keys = generate_keys()
        apply_server_keys(self._front, server_keys)
        self._keys = keys
        self._front.bind("tcp://127.0.0.1:*")
        self.endpoint = self._front.getsockopt_string(zmq.LAST_ENDPOINT)
        self._target = target
        self._back: zmq.Socket[bytes] | None = None
        self._identity = b""
        self._held_frames: dict[Direction, deque[tuple[float, list[bytes]]]] = {
            "to_learner": deque(),
            "to_generator": deque(),
        }
        self._closing = threading.Event()

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        while not self._closing.is_set():
            ready = dict(poller.poll(POLL_MS))
            if self._front in ready:
                self._identity, *frames = self._front.recv_multipart()
                if self._back is None:
                    self._back = self._context.socket(zmq.DEALER)
                    self._back.linger = 0
                    self._back.setsockopt(zmq.ROUTING_ID, self._identity)
                    # Connect again as often as a sender does: the kernel waits twice as long
                    # after each attempt.
                    self._back.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
                    self._back.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS)
                    self._back.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS)
                    apply_client_keys(self._back, self._keys)
                    self._back.connect(self._target)
                    poller.register(self._back, zmq.POLLIN)
                self._hold_frames("to_learner", frames)
            if self._back is not None and self._back in ready:
                self._hold_frames("to_generator", self._back.recv_multipart())
            self._release_due()
        for end in (self._front, self._back):
            if end is not None:
                end.close()
        self._context.term()

    def close(self) -> None:
        self._closing.set()
        self.join(5.0)

    def _hold_frames(self, direction: Direction, frames: list[bytes]) -> None:
        self._note(direction, frames)
        due = time.monotonic()
        if self._rng.random() < self._noise.delay:
            self.delayed += 1
            due += self._rng.uniform(0, self._noise.max_delay)
        if self._rng.random() < self._noise.damage:
            self.damaged += 1
            self._note_damage(direction)
            frames = flip_bit(self._rng, frames)
        self._held_frames[direction].append((due, frames))

    def _release_due(self) -> None:
        now = time.monotonic()
        for direction, waiting in self._held_frames.items():
            while waiting and waiting[0][0] <= now:
                _, frames = waiting.popleft()
                if direction == "to_generator":
                    self._front.send_multipart([self._identity, *frames])
                elif self._back is not None:
                    self._back.send_multipart(frames)


def flip_bit(rng: random.Random, frames: Sequence[bytes]) -> list[bytes]:
    """Return the frames with one bit flipped in one frame that is not empty."""
    frames = list(frames)
    full = [i for i, frame in enumerate(frames) if frame]
    if full:
        i = rng.choice(full)
        changed = bytearray(frames[i])
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        frames[i] = bytes(changed)
    return frames


class TcpProxy(threading.Thread):
    """A TCP proxy from `endpoint` to the port at `target`. It passes nothing on while `blocked()`
    is true; what waits then is passed on later, as over TCP."""

    def __init__(self, target: str, blocked: Callable[[], bool]):
        super().__init__(name="chaos-line", daemon=True)
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._blocked = blocked
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def run(self) -> None:
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._connect_ends, args=(near,), daemon=True).start()

    def close(self) -> None:
        """Stop listening: no further connection is accepted."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _connect_ends(self, near: socket.socket) -> None:
        """Connect one connection to the target, with the attempts of a dealer: one each
        `CONNECT_MS`, as long as a dealer waits for the end of its handshake. It sees this proxy
        accept it at once, and cannot try by itself."""
        deadline = time.monotonic() + HANDSHAKE_TIMEOUT_MS / 1000
        while time.monotonic() < deadline:
            try:
                far = socket.create_connection(self._target, CONNECT_MS / 1000)
            except TimeoutError:
                continue
            except OSError:
                break
            far.settimeout(None)
            threading.Thread(target=self._pass_on, args=(far, near), daemon=True).start()
            return self._pass_on(near, far)
        near.close()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with source:
            with contextlib.suppress(OSError):
                while data := source.recv(2**16):
                    while self._blocked():
                        time.sleep(POLL_MS / 1000)
                    sink.sendall(data)
            for end in (source, sink):  # the other direction ends with this one
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
