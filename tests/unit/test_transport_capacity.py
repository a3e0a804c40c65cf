"""Delivery within bounds: memory, messages in flight, the size of one, and turns of the event loop."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from typing import Any

import pytest

from r3async.config import TransportConfig
from r3async.data import wire
from r3async.transport import TrajectoryReceiver, TransportError
from r3async.transport import receiver as intake_module
from r3async.transport import sender as encoding_module
from tests.helpers.transport import (
    HELLO,
    LIMIT,
    SLOW,
    Inbox,
    deliver_all,
    delivered,
    make_trajectory,
    memory_size,
    raw_dealer,
    receiving,
    send_all,
    sending,
    until,
)


async def test_back_pressure():
    """What does not fit is sent back, and nothing more is sent until it would."""
    size = memory_size(make_trajectory(10))
    config = TransportConfig(ack_timeout=SLOW.ack_timeout, credit_bytes=3 * size + size // 2)
    inbox = Inbox(hold=True)
    async with receiving(inbox, config, window=0) as (receiver, endpoint), sending(endpoint, config) as sender:
        for i in range(4):
            await asyncio.wait_for(sender.send(make_trajectory(10 + i)), LIMIT)
        await until(lambda: len(inbox.seen) == 3 and sender.unacknowledged == 1)
        fifth = asyncio.create_task(sender.send(make_trajectory(14)))
        await asyncio.sleep(0.5)
        assert not fifth.done()
        assert receiver.unreleased_bytes == 3 * size
        assert (sender.sent, sender.unacknowledged, sender.reconnects) == (4, 2, 0)

        receiver.release_trajectory("t10")
        receiver.release_trajectory("t10")  # Twice is once.
        await until(fifth.done)
        await until(lambda: len(inbox.seen) == 4)
        await asyncio.sleep(0.2)
        assert sender.unacknowledged == 1
        receiver.forget_group(11 // 4)  # t11 is the last one of group 2 that is held.
        await until(lambda: len(inbox.seen) == 5)
        assert await sender.flush(LIMIT) == 0
        assert inbox.once({f"t{10 + i}" for i in range(5)})
        assert receiver.unreleased_bytes == 3 * size
        assert sender.sent == 4 + 3


async def test_the_groups_of_the_next_step_are_sent_while_nothing_else_is():
    size = memory_size(make_trajectory(0))
    config = TransportConfig(ack_timeout=SLOW.ack_timeout, credit_bytes=size)
    inbox = Inbox(hold=True)
    async with (
        receiving(inbox, config, window=2) as (receiver, endpoint),
        sending(endpoint, config) as sender,
        sending(endpoint, config, "g1") as other,
    ):
        await send_all(sender, [make_trajectory(i, group=i) for i in (5, 6)])
        await until(lambda: sender.unacknowledged == 1 and not sender._outbox.in_flight)
        await until(lambda: other._group_limit <= 2)  # told too, or it sends once more and is sent it back
        waiting = [asyncio.create_task(s.send(make_trajectory(i, group=i))) for s, i in ((sender, 3), (other, 2))]
        await send_all(sender, [make_trajectory(0, group=0)])
        await send_all(other, [make_trajectory(1, group=1)])
        await until(lambda: len(inbox.seen) == 3)
        await asyncio.sleep(0.2)
        assert not any(task.done() for task in waiting)
        receiver.forget_group(0)  # the next step may wait for groups 1 and 2
        await asyncio.wait_for(waiting[1], LIMIT)
        await until(lambda: "t2" in inbox.seen)
        assert not waiting[0].done()
        receiver.forget_group(1)
        await asyncio.wait_for(waiting[0], LIMIT)
        await until(lambda: "t3" in inbox.seen)
        assert "t6" not in inbox.seen


async def test_a_message_larger_than_the_memory_passes_alone():
    small, large = make_trajectory(0), make_trajectory(1, 5000)
    config = TransportConfig(ack_timeout=0.3, credit_bytes=2 * memory_size(small))
    assert memory_size(large) > config.credit_bytes
    inbox = Inbox(hold=True)
    async with receiving(inbox, config, window=0) as (receiver, endpoint), sending(endpoint, config) as sender:
        await send_all(sender, [small, large])
        await until(lambda: sender.sent == 2 and not sender._outbox.in_flight)
        after = asyncio.create_task(sender.send(make_trajectory(2)))
        await asyncio.sleep(0.5)
        # The last one would fit, but must not starve the large one.
        assert not after.done()
        receiver.release_trajectory("t0")
        await until(lambda: "t1" in inbox.seen)
        await asyncio.sleep(0.3)
        assert "t2" not in inbox.seen
        receiver.release_trajectory("t1")
        await until(lambda: "t2" in inbox.seen)
        await asyncio.wait_for(after, LIMIT)


async def test_no_more_is_in_flight_than_may_be_at_once():
    class Slow(TrajectoryReceiver):
        """Does not answer, until it is told to."""

        silent = True

        def _send_message(self, identity: bytes, message: wire.ControlMessage) -> None:
            if not (self.silent and isinstance(message, wire.Ack)):
                super()._send_message(identity, message)

    size = memory_size(make_trajectory(0))
    config = TransportConfig(ack_timeout=0.5, credit_bytes=6 * size)
    inbox = Inbox()
    async with receiving(inbox, config, Slow) as (receiver, endpoint), sending(endpoint, config) as sender:
        feed = asyncio.create_task(send_all(sender, [make_trajectory(i) for i in range(10)]))
        await until(lambda: sender.sent)
        await asyncio.sleep(0.2)
        assert sender.sent == 3  # half of the memory
        receiver.silent = False
        await asyncio.wait_for(feed, LIMIT)
        assert await sender.flush(LIMIT) == 0
    assert inbox.once({f"t{i}" for i in range(10)})


async def test_message_over_the_limit_is_an_error_of_the_sender():
    config = TransportConfig(max_message_bytes=2000)
    inbox = Inbox()
    async with receiving(inbox, config) as (receiver, endpoint), sending(endpoint, config) as sender:
        with pytest.raises(
            TransportError, match=r"'t1' takes \d+ bytes, more than `transport.max_message_bytes` = 2000"
        ):
            await asyncio.wait_for(sender.send(make_trajectory(1, 5000)), LIMIT)
        await deliver_all(sender, [make_trajectory(2, 10)])
        assert inbox.once({"t2"})
        # A peer with other settings is refused.
        async with raw_dealer(endpoint) as peer:
            await peer.send(HELLO)
            await peer.send(*delivered("big", 0, 2001, b"x"))
            assert await peer.answer() == wire.Reject("big", "2001 bytes, more than 2000")
        assert receiver.rejected == 1


async def test_large_payloads_are_handled_off_the_event_loop(monkeypatch):
    here: dict[str, list[bool]] = {"encode": [], "decode": []}

    def spy(module: Any, name: str, key: str) -> None:
        original = getattr(module, name)

        def call(*args: Any, **options: Any) -> Any:
            here[key].append(threading.current_thread() is threading.main_thread())
            return original(*args, **options)

        monkeypatch.setattr(module, name, call)

    spy(encoding_module, "encode_trajectory", "encode")
    spy(intake_module, "decode_trajectory", "decode")
    inbox = Inbox()
    async with receiving(inbox) as (_, endpoint), sending(endpoint) as sender:
        for size in (10, 20_000):  # one after the other: what arrives together is opened together
            await deliver_all(sender, [make_trajectory(size, size)])
    assert here == {"encode": [True, False], "decode": [True, False]}


async def test_many_episodes_that_end_at_once_do_not_hold_up_the_event_loop_together(monkeypatch):
    """Each encodes for half a millisecond, on the loop; others have their turn in between."""
    encode = encoding_module.encode_trajectory
    turns: list[int] = []
    encoded = 0

    def slow(*args: Any, **options: Any) -> Any:
        nonlocal encoded
        encoded += 1
        end = time.perf_counter() + 0.0005
        while time.perf_counter() < end:
            pass
        return encode(*args, **options)

    async def watch() -> None:
        while True:
            turns.append(encoded)
            await asyncio.sleep(0)

    monkeypatch.setattr(encoding_module, "encode_trajectory", slow)
    inbox = Inbox()
    async with receiving(inbox, SLOW) as (_, endpoint), sending(endpoint, SLOW) as sender:
        watching = asyncio.create_task(watch())
        async with asyncio.timeout(LIMIT):
            await asyncio.gather(*(sender.send(make_trajectory(i)) for i in range(100)))
        watching.cancel()
        assert max(b - a for a, b in itertools.pairwise(turns)) <= 10
        assert await sender.flush(LIMIT) == 0
