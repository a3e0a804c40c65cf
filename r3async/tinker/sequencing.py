"""The order of a client's training requests: each number once, one after the other.

A training client numbers its requests 1, 2, 3, ..., but they come on connections of their own: the
parts of a large `forward_backward` as 2, 3 and then 1. A request that is sent again has the number
of the first. A refused request has used up its number. Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, NamedTuple, TypeVar

from r3async.tinker.protocol import ApiError

REMEMBERED_ANSWERS = 4096
MAX_WAITING = 4096
GAP_SECONDS = 360.0
"""Longest wait for a missing number. A client does not send it if it was stopped, or checked the
request itself; otherwise its SDK tries again for five minutes."""

T = TypeVar("T")


class Arrival(NamedTuple, Generic[T]):
    """`answer` is what the first request of this number was answered, if it is not the first."""

    is_new: bool
    answer: T | ApiError | None


class RequestSequence(Generic[T]):
    """The requests of one training client, in the order of their numbers.

    `T` is what a request is answered at once: the id of its future.
    """

    def __init__(self, first_number: int = 1):
        self.next_number = first_number
        """Every lower number is done, or about to be."""
        self._answers: OrderedDict[int, T | ApiError] = OrderedDict()
        self._waiting: dict[int, T] = {}
        self._refused: set[int] = set()
        self._gap_since: float | None = None

    def find_answer(self, number: int | None) -> T | ApiError | None:
        """Return what a request of this number was answered; None if it is the first of it.

        Raises `ApiError` for a number that is done and forgotten.
        """
        if number is None:
            return None
        found = self._answers.get(number)
        if found is None and number < self.next_number:
            raise ApiError(f"request {number} is done, and its result is forgotten")
        return found

    def admit(self, number: int | None, answer: T) -> None:
        """Take a new request, after `find_answer`. Without a number it comes after all so far."""
        if number is None:
            number = max([self.next_number - 1, *self._waiting, *self._refused]) + 1
        if len(self._waiting) >= MAX_WAITING:
            raise ApiError(f"{MAX_WAITING} requests of this client wait already", status=429)
        self._remember(number, answer)
        self._waiting[number] = answer

    def refuse(self, number: int | None, error: ApiError) -> None:
        """Take a new request that is refused: its number is used up."""
        if number is not None and number >= self.next_number:
            self._remember(number, error)
            self._refused.add(number)

    def pop_ready(self, now: float) -> list[T]:
        """Return the requests whose turn has come, in order. A number that has been missing for
        `GAP_SECONDS` is given up."""
        ready = []
        while self._waiting or self._refused:
            if self.next_number in self._refused:
                self._refused.remove(self.next_number)
            elif self.next_number in self._waiting:
                ready.append(self._waiting.pop(self.next_number))
            elif self._waiting and self._gap_since is None:
                self._gap_since = now
                return ready
            elif self._waiting and self._gap_since is not None:
                if now - self._gap_since < GAP_SECONDS:
                    return ready
                missing = ApiError(f"request {self.next_number} came after later ones were done")
                self._remember(self.next_number, missing)
            else:
                return ready
            self.next_number += 1
            self._gap_since = None
        return ready

    def _remember(self, number: int, answer: T | ApiError) -> None:
        self._answers[number] = answer
        while len(self._answers) > REMEMBERED_ANSWERS:
            self._answers.popitem(last=False)
