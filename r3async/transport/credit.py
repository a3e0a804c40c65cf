"""Who may send how much: one pool of bytes, shared by all senders. Pure."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from r3async.transport.wire import MAX_PARCELS


@dataclass(frozen=True, slots=True)
class Offered:
    """What one message would take: `nbytes` in memory once it is decoded. Groups are consumed in ascending order."""

    group_index: int
    nbytes: int


class CreditPool:
    """Bytes that are on their way to the receiver or held by it.

    A message is offered, granted (its bytes are reserved), arrives (they are held) and is released. `oldest` is the first
    group that is not consumed, and the `window` groups from there on are what the next step may wait for.

    Rule: a message of the window is granted at once, to one sender: while that one has the grant, or it is held, another that
    claims the same message waits like any other, and in nobody's way. Any other message is granted if it fits into `total`,
    or if nothing else is used, in the order of the groups, and nothing overtakes one that does not fit. What is claimed for
    a group that is consumed is forgotten.

    * It can not deadlock: whatever else is held, all messages of the window are granted, so the step gets its groups,
      consumes them, and the window moves. A message waits at most until its group is in the window.
    * It is bounded: beyond `total` there are only messages that were granted in the window, and they leave it only by being
      consumed: `used <= max(total, largest message) + bytes of the groups oldest .. oldest + window - 1`. Whatever senders
      claim, these are at most `window` times the messages that a group may have times the largest (see `Receiver`).
    """

    def __init__(self, total: int, window: int = 1):
        self.total = total
        self.window = window
        self.oldest = 0
        self.reserved = 0
        self.held = 0
        self.short_of_room = False
        """The last `grant` kept a message waiting that only `room` is too small for."""
        self._offers: dict[bytes, dict[str, Offered]] = {}
        self._waiting: dict[tuple[bytes, str], int] = {}
        # Entries of messages that no longer wait, or wait under a later number, stay until they are on top.
        self._queue: list[tuple[int, int, bytes, str]] = []
        self._order = itertools.count()
        self._held: dict[str, int] = {}
        self._granted: Counter[str] = Counter()
        """Grants of each message that are outstanding, over all senders."""

    @property
    def used(self) -> int:
        return self.reserved + self.held

    @property
    def waiting(self) -> int:
        """Messages that are offered and not granted."""
        return len(self._waiting)

    def urgent(self, group_index: int) -> bool:
        """The next step may wait for this group."""
        return self.oldest <= group_index < self.oldest + self.window

    def advance(self, oldest: int) -> None:
        """Groups before `oldest` are consumed. Offers and grants of them end: a sender that keeps one would keep its bytes."""
        if oldest <= self.oldest:
            return
        self.oldest = oldest
        for sender, offers in self._offers.items():
            for message in [m for m, offered in offers.items() if offered.group_index < oldest]:
                self.cancel(sender, message)

    def offer(self, sender: bytes, messages: Mapping[str, Offered], *, more: bool = False) -> None:
        """All that `sender` wants to send, replacing its earlier offers. What it offered before keeps its place and its
        grant; what it no longer offers, and has not arrived, loses both. If `more`, what it wants to send besides; beyond
        `MAX_PARCELS` in all that is ignored, until it is among those of an offer of all."""
        offers = self._offers.setdefault(sender, {})
        if not more:
            for message in [m for m in offers if m not in messages]:
                self.cancel(sender, message)
        for message, offered in messages.items():
            if offered.group_index < self.oldest:
                continue
            if message not in offers and not (more and len(offers) >= MAX_PARCELS):
                offers[message] = offered
                order = self._waiting[sender, message] = next(self._order)
                heapq.heappush(self._queue, (offered.group_index, order, sender, message))
        if len(self._queue) > 2 * len(self._waiting) + 64:
            self._queue = [entry for entry in self._queue if self._waiting.get(entry[2:]) == entry[1]]
            heapq.heapify(self._queue)

    def grant(self, room: float = math.inf) -> dict[bytes, list[str]]:
        """Reserve what the rule allows. Returns what is granted now, by sender.

        `room`: bytes that may be reserved for messages outside of the window, because what arrives also has to go
        somewhere else (a disk).
        """
        granted: dict[bytes, list[str]] = {}
        claimed_twice = []
        self.short_of_room = False
        while self._queue:
            entry = group_index, order, sender, message = self._queue[0]
            if self._waiting.get((sender, message)) == order:
                nbytes = self._offers[sender][message].nbytes
                fits = not self.used or self.used + nbytes <= self.total
                has_room = self.reserved + nbytes <= room
                twice = message in self._held or message in self._granted
                if (self.urgent(group_index) and not twice) or (fits and has_room):
                    del self._waiting[sender, message]
                    self.reserved += nbytes
                    self._granted[message] += 1
                    granted.setdefault(sender, []).append(message)
                elif self.urgent(group_index):
                    claimed_twice.append(entry)
                else:
                    self.short_of_room = fits and not has_room
                    break
            heapq.heappop(self._queue)
        for entry in claimed_twice:
            heapq.heappush(self._queue, entry)
        return granted

    def granted(self, sender: bytes) -> list[str]:
        """Messages of `sender` that are granted and have not arrived."""
        return [m for m in self._offers.get(sender, {}) if (sender, m) not in self._waiting]

    def arrive(self, sender: bytes, message: str) -> int | None:
        """A granted message is here: the bytes it was granted are held until `release`, and returned. None, and nothing
        is held, if it had no grant."""
        offered = self._offers.get(sender, {}).get(message)
        allowed = offered is not None and (sender, message) not in self._waiting
        self.cancel(sender, message)
        if offered is None or not allowed:
            return None
        self.hold(message, offered.nbytes)
        return offered.nbytes

    def hold(self, message: str, nbytes: int) -> None:
        """A message holds `nbytes`, and no longer what it held before."""
        self.release(message)
        self._held[message] = nbytes
        self.held += nbytes

    def release(self, message: str) -> None:
        """Free what a message holds. Harmless if it holds nothing."""
        self.held -= self._held.pop(message, 0)

    def cancel(self, sender: bytes, message: str) -> None:
        """Forget an offer or a grant. Harmless if there is none."""
        offered = self._offers.get(sender, {}).pop(message, None)
        if offered is None:
            return
        if self._waiting.pop((sender, message), None) is None:
            self.reserved -= offered.nbytes
            self._granted[message] -= 1
            if not self._granted[message]:
                del self._granted[message]

    def drop(self, sender: bytes) -> None:
        """Forget all offers and grants of a sender that is gone. What arrived from it stays held."""
        for message in list(self._offers.get(sender, ())):
            self.cancel(sender, message)
        self._offers.pop(sender, None)
