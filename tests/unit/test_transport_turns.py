"""Many tasks that each have a little to do share the event loop's rounds."""

from __future__ import annotations

import asyncio
import time

import pytest

from r3async.transport import Receiver, wire
from r3async.transport.sockets import Turns
from r3async.world import TURN_SECONDS
from tests.helpers.transport import LIMIT, SLOW, Inbox, make_trajectory, receiving, send_all, sending


async def test_short_work_of_many_tasks_is_done_together_in_order():
    turns, done = Turns("encode"), []
    rounds = 0

    async def count_rounds() -> None:
        nonlocal rounds
        while True:
            await asyncio.sleep(0)
            rounds += 1

    counting = asyncio.create_task(count_rounds())
    assert await asyncio.gather(*(turns.do(lambda i: done.append(i) or i, i) for i in range(100))) == list(range(100))
    counting.cancel()
    assert done == list(range(100))
    assert rounds < 50


async def test_long_work_of_many_tasks_lets_others_have_their_turn():
    turns = Turns("encode")
    tasks = [asyncio.create_task(turns.do(time.sleep, 2 * TURN_SECONDS)) for _ in range(20)]
    rounds = 0
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        rounds += 1
    assert rounds >= 20


async def test_what_fails_or_is_cancelled_is_its_own_callers_matter():
    turns, called = Turns("encode"), []
    failing = asyncio.create_task(turns.do(lambda: 1 / 0))
    cancelled = asyncio.create_task(turns.do(called.append, "cancelled"))
    last = asyncio.create_task(turns.do(called.append, "last"))
    await asyncio.sleep(0)  # each is in the queue, and none had its turn
    cancelled.cancel()
    await asyncio.wait_for(last, 5)
    with pytest.raises(ZeroDivisionError):
        await failing
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert called == ["last"]


async def test_what_is_accepted_at_about_the_same_time_is_acknowledged_together():
    acks: list[int] = []

    class Counting(Receiver):
        def _send(self, identity: bytes, message: wire.Message) -> None:
            if isinstance(message, wire.Ack):
                acks.append(len(message.ids))
            super()._send(identity, message)

    async with receiving(Inbox(), SLOW, Counting) as (_, endpoint), sending(endpoint, SLOW) as sender:
        await send_all(sender, [make_trajectory(i) for i in range(60)])
        assert await sender.flush(LIMIT) == 0
    assert sum(acks) == 60
    assert len(acks) <= 20
