"""A stand-in for a sending process."""

from __future__ import annotations


class Process:
    def __init__(self) -> None:
        self.code: int | None = None
        self.killed = False

    def poll(self):
        return self.code

    def kill(self) -> None:
        self.killed = True
