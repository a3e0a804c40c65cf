"""The order of a client's training requests: each number once, one after the other.

A training client numbers its requests 1, 2, 3, ... after 0, which creates its model, but they come
on connections of their own: the parts of a large `forward_backward` as 2, 3 and then 1. A request
that is sent again has the number of the first. Pure.
"""

from __future__ import annotations

from r3async.tinker.protocol import ApiError

MAX_WAITING = 4096
MAX_WAITING_BYTES = 4 * 2**30
GAP_SECONDS = 360.0
"""Longest wait for a missing number. A client does not send it if it was stopped; otherwise its SDK
tries again for five minutes."""


class RequestSequence:
    """The numbers of one training client, in their order."""

    def __init__(self) -> None:
        self.next_number = 0
        """Every lower number is done, or about to be."""
        self._waiting: dict[int, int] = {}
        self._gap_since: float | None = None

    def is_known(self, number: int) -> bool:
        """Return whether a request has come that is the same one, or whose turn was over."""
        return number < self.next_number or number in self._waiting

    def check_room(self, number: int, nbytes: int) -> None:
        """Raise `ApiError` for a request that is to come again, as too much waits. The one whose
        turn it is never has to."""
        full = len(self._waiting) >= MAX_WAITING
        full = full or sum(self._waiting.values()) + nbytes > MAX_WAITING_BYTES
        if full and number != self.next_number:
            raise ApiError("too many requests of this client wait for an earlier one", status=429)

    def admit(self, number: int, nbytes: int) -> None:
        """Take a new request."""
        self._waiting[number] = nbytes

    def pop_ready(self, now: float) -> list[int]:
        """Return the requests whose turn has come, in order. Numbers that have been missing for
        `GAP_SECONDS` are given up."""
        ready = []
        while self._waiting:
            if self.next_number in self._waiting:
                del self._waiting[self.next_number]
                ready.append(self.next_number)
                self.next_number += 1
                self._gap_since = None
            elif self._gap_since is None:
                self._gap_since = now
                break
            elif now - self._gap_since < GAP_SECONDS:
                break
            else:
                self.next_number = min(self._waiting)
        return ready
