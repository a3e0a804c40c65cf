"""The results of requests, which clients ask for by long polls.

An SDK asks again at once after an answer without a result: so a poll is held until there is one, or
for `POLL_SECONDS`. A result is forgotten some time after it was read, because an answer that was
lost on its way is asked for again; one that nobody reads, later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from r3async.tinker.protocol import ApiError, Result
from r3async.world import Clock

POLL_SECONDS = 30.0
"""The SDK waits 45 s for an answer."""
READ_SECONDS = 120.0
UNREAD_SECONDS = 3600.0
MAX_FUTURES = 100_000


@dataclass
class _Slot:
    result: asyncio.Future[Result | ApiError]
    owner: str
    cancellable: bool
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

    def create(self, request_id: str, owner: str, *, cancellable: bool = False) -> None:
        """Create the future of a request of session `owner`. Raises `ApiError` if there are too
        many."""
        self.forget_expired()
        if len(self._slots) >= MAX_FUTURES:
            raise ApiError(f"{MAX_FUTURES} results wait to be read", status=429)
        result = asyncio.get_running_loop().create_future()
        self._slots[request_id] = _Slot(result, owner, cancellable)

    def start(self, request_id: str, work: Coroutine[Any, Any, Result]) -> asyncio.Task[None]:
        """Run the work of a request, whose result or error becomes its future's."""

        async def run() -> None:
            try:
                result: Result | ApiError = await work
            except ApiError as error:
                result = error
            except Exception as error:
                result = ApiError(f"{type(error).__name__}: {error}", category="server")
            self.resolve(request_id, result)

        task = asyncio.get_running_loop().create_task(run(), name=f"tinker {request_id}")
        # A task that is cancelled before it began leaves its work as it is.
        task.add_done_callback(lambda _: work.close())
        if request_id in self._slots:
            self._slots[request_id].task = task
        return task

    def resolve(self, request_id: str, result: Result | ApiError) -> None:
        slot = self._slots.get(request_id)
        if slot is not None and not slot.result.done():
            slot.result.set_result(result)
            slot.expires_at = self._clock.monotonic() + UNREAD_SECONDS

    async def poll(self, request_id: str) -> Result | ApiError | None:
        """Return the result; None if there is none yet. Raises `ApiError` with status 410 for a
        request that is not known, after which an SDK sends a sample anew."""
        slot = self._slots.get(request_id)
        if slot is None:
            raise ApiError(f"there is no result of {request_id}, or no more", status=410)
        if not slot.result.done():
            await asyncio.wait([slot.result], timeout=self._poll_seconds)
        if not slot.result.done():
            return None
        slot.expires_at = self._clock.monotonic() + READ_SECONDS
        return slot.result.result()

    def cancel(self, request_id: str) -> None:
        """Stop the work of a request that its client does not wait for any more, if that may be
        cancelled."""
        slot = self._slots.get(request_id)
        if slot is not None and slot.cancellable and slot.task is not None:
            slot.task.cancel()
            self.resolve(request_id, ApiError("cancelled"))  # a task may end before it began

    def forget_owner(self, owner: str) -> None:
        """Stop and forget everything of a session."""
        for request_id in [name for name, slot in self._slots.items() if slot.owner == owner]:
            task = self._slots[request_id].task
            if task is not None:
                task.cancel()
            self.resolve(request_id, ApiError("the session has ended", status=410))
            del self._slots[request_id]

    def forget_expired(self) -> None:
        now = self._clock.monotonic()
        for request_id, slot in list(self._slots.items()):
            if slot.expires_at is not None and slot.expires_at < now:
                del self._slots[request_id]
