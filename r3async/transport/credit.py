"""Who may send how much: one pool of bytes, shared by all senders. Pure."""

from __future__ import annotations

from collections.abc import Mapping


class CreditPool:
    """Bytes that may be on their way to the receiver or held by it, never more than `total` together.

    A message is offered, granted (its bytes are reserved), arrives (they are held) and is released. Grants are first
    come, first served over all senders, and nothing overtakes a message that does not fit yet, so a large one is never
    starved by small ones. A message larger than `total` is granted when nothing else is reserved or held: it passes
    alone, and is the one case in which `used` exceeds `total`.
    """

    def __init__(self, total: int):
        self.total = total
        self.reserved = 0
        self.held = 0
        self._offers: dict[bytes, dict[str, int]] = {}
        # Offered and not granted, oldest first (a dict, because an offer may be withdrawn from the middle).
        self._queue: dict[tuple[bytes, str], int] = {}
        self._held: dict[str, int] = {}

    @property
    def used(self) -> int:
        return self.reserved + self.held

    def offer(self, sender: bytes, messages: Mapping[str, int]) -> None:
        """All that `sender` wants to send (id to bytes), replacing its earlier offers. What it offered before keeps its
        place and its grant; what it no longer offers, and has not arrived, loses both."""
        offers = self._offers.setdefault(sender, {})
        for message in offers.keys() - messages.keys():
            self.cancel(sender, message)
        for message, nbytes in messages.items():
            if message not in offers:
                offers[message] = self._queue[sender, message] = nbytes

    def grant(self) -> list[bytes]:
        """Reserve what fits. Returns the senders that have a new grant."""
        granted = []
        while self._queue:
            (sender, message), nbytes = next(iter(self._queue.items()))
            if self.used and self.used + nbytes > self.total:
                break
            del self._queue[sender, message]
            self.reserved += nbytes
            granted.append(sender)
        return list(dict.fromkeys(granted))

    def granted(self, sender: bytes) -> list[str]:
        """Messages of `sender` that are granted and have not arrived."""
        return [m for m in self._offers.get(sender, {}) if (sender, m) not in self._queue]

    def arrive(self, sender: bytes, message: str, nbytes: int) -> bool:
        """A granted message is here: its bytes are held until `release`. False, and nothing is held, if it had no grant,
        or one for fewer bytes."""
        offered = self._offers.get(sender, {}).get(message)
        allowed = offered is not None and nbytes <= offered and (sender, message) not in self._queue
        self.cancel(sender, message)
        if allowed:
            self._held[message] = nbytes
            self.held += nbytes
        return allowed

    def release(self, message: str) -> None:
        """Free what a message holds. Harmless if it holds nothing."""
        self.held -= self._held.pop(message, 0)

    def cancel(self, sender: bytes, message: str) -> None:
        """Forget an offer or a grant. Harmless if there is none."""
        nbytes = self._offers.get(sender, {}).pop(message, 0)
        if self._queue.pop((sender, message), None) is None:
            self.reserved -= nbytes

    def drop(self, sender: bytes) -> None:
        """Forget all offers and grants of a sender that is gone. What arrived from it stays held."""
        for message in list(self._offers.get(sender, ())):
            self.cancel(sender, message)
        self._offers.pop(sender, None)
