"""A socket that keeps what it received."""

from collections import Counter
from typing import Any

LOOPBACK = "tcp://127.0.0.1:*"


class Ear:
    """A router or dealer, and what it received."""

    def __init__(self) -> None:
        self.heard: list[list[bytes]] = []
        self.refused: Counter[str] = Counter()
        self.socket: Any = None

    def __call__(self, frames: list[Any]) -> None:
        assert all(bytes(frame.buffer) == frame.bytes and len(frame) == len(frame.bytes) for frame in frames)
        self.heard.append([frame.bytes for frame in frames])

    def send(self, *frames: bytes) -> int:
        return self.socket.send(list(frames))
