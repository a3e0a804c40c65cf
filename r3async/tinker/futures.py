"""The results of requests, which clients ask for by long polls.

An SDK asks again at once after an answer without a result: so a poll is held until there is one, or
for `POLL_SECONDS`. A result is forgotten some time after it was read, because an answer that was
lost on its way is asked for again; one that nobody reads, later.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from r3async.tinker.protocol import Answer, ApiError, SampleResult
from r3async.world import Clock

POLL_SECONDS = 30.0
"""The SDK waits 45 s for an answer."""
READ_SECONDS = 120.0
UNREAD_SECONDS = 3600.0
MAX_FUTURES = 100_000

Outcome = Answer | SampleResult


@dataclass
class _Slot:
    result: asyncio.Future[Outcome]
    owner: str
    task: asyncio.Task[None] | None = None
    expires_at: float | None = None


class ResultFutures:
    """The futures of all clients. Methods belong to the event loop's thread."""

    def __init__(self, clock: Clock, *, poll_seconds: float = POLL_SECONDS):
        self._clock = clock
        self._poll_seconds = poll_seconds
        self._slots: dict[str, _Slot] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._slots

    def create(self, request_id: str, owner: str) -> None:
        """Create the future of a request of session `owner`. Raises `ApiError` if there are too
        many."""
        if len(self._slots) >= MAX_FUTURES:
            raise ApiError(f"{MAX_FUTURES} results wait to be read", status=429)
        self._slots[request_id] = _Slot(asyncio.get_running_loop().create_future(), owner)

    def let_cancel(self, request_id: str, task: asyncio.Task[None]) -> None:
        """Let the client, or the end of its session, cancel the task that makes the result."""
        self._slots[request_id].task = task

    def resolve(self, request_id: str, result: Outcome) -> None:
        slot = self._slots.get(request_id)
        if slot is not None and not slot.result.done():
            slot.result.set_result(result)
            slot.expires_at = self._clock.monotonic() + UNREAD_SECONDS

    async def poll(self, request_id: str) -> Outcome | None:
        """Return the result; None if there is none yet. Raises `ApiError` with status 410 for a
        request that is not known, after which an SDK sends a sample anew."""
        slot = self._slots.get(request_id)
        if slot is not None and not slot.result.done():
            await asyncio.wait([slot.result], timeout=self._poll_seconds)
        if slot is None or slot.result.cancelled():
            raise ApiError(f"there is no result of {request_id}, or no more", status=410)
        if not slot.result.done():
            return None
        slot.expires_at = self._clock.monotonic() + READ_SECONDS
        return slot.result.result()

    def cancel(self, request_id: str) -> None:
        """Stop the work for a result that its client does not wait for any more, if that may be
        cancelled."""
        slot = self._slots.get(request_id)
        if slot is not None and slot.task is not None:
            self._forget(request_id)

    def forget_owner(self, owner: str) -> None:
        """Stop and forget everything of a session."""
        for request_id in [name for name, slot in self._slots.items() if slot.owner == owner]:
            self._forget(request_id)

    def forget_expired(self) -> None:
        now = self._clock.monotonic()
        for request_id, slot in list(self._slots.items()):
            if slot.expires_at is not None and slot.expires_at < now:
                self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        slot = self._slots.pop(request_id)
        if slot.task is not None:
            slot.task.cancel()
        slot.result.cancel()  # whoever polls is told that there is no result
