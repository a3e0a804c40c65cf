"""Delivery within bounds, and what trajectories that end at about the same time share: a look, a message, an answer."""

import asyncio
import itertools
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3async.config import TransportConfig
from r3async.data import control_messages
from r3async.data.control_messages import Welcome
from r3async.data.tokens import Trajectory
from r3async.data.wire_frames import WireError
from r3async.transport import TransportError, encoding_queue, intake
from tests.helpers.transport import (
    HELLO,
    LIMIT,
    SLOW,
    Inbox,
    TappedWorld,
    deliver_all,
    encoded,
    losing_acks,
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
    config = TransportConfig(ack_timeout=SLOW.ack_timeout, credit_bytes=memory_size(make_trajectory(0)))
    inbox, world, other_world = Inbox(hold=True), TappedWorld(), TappedWorld()
    async with (
        receiving(inbox, config, window=2) as (receiver, endpoint),
        sending(endpoint, config, world=world) as sender,
        sending(endpoint, config, "g1", world=other_world) as other,
    ):
        await send_all(sender, [make_trajectory(i, group=i) for i in (5, 6)])
        await until(lambda: sender.acked == world.turned_away == 1)
        # The other is told, too, or it sends once more and is sent it back.
        await until(lambda: any(isinstance(m, Welcome) and m.until <= 2 for m in other_world.received))
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
    inbox, world = Inbox(hold=True), TappedWorld()
    async with (
        receiving(inbox, config, window=0) as (receiver, endpoint),
        sending(endpoint, config, world=world) as sender,
    ):
        await send_all(sender, [small, large])
        await until(lambda: sender.acked == 1 and world.turned_away)
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


async def test_no_more_is_in_flight_than_may_be_at_once_and_what_is_not_acknowledged_is_sent_again():
    config = TransportConfig(ack_timeout=0.5, credit_bytes=6 * memory_size(make_trajectory(0)))
    inbox, silent = Inbox(), [True]
    world = losing_acks(lambda _: silent)
    async with receiving(inbox, config, world=world) as (receiver, endpoint), sending(endpoint, config) as sender:
        feed = asyncio.create_task(send_all(sender, [make_trajectory(i) for i in range(10)]))
        await until(lambda: sender.sent)
        await asyncio.sleep(0.2)
        assert sender.sent == 3  # half of the memory
        silent.clear()
        await asyncio.wait_for(feed, LIMIT)
        assert await sender.flush(LIMIT) == 0
        assert min(sender.resent, receiver.duplicates) >= 3
        assert sender.reconnects >= 1
    assert inbox.once({f"t{i}" for i in range(10)})


async def test_message_over_the_limit_is_an_error_of_the_sender():
    config = TransportConfig(max_message_bytes=2500)
    inbox = Inbox()
    async with receiving(inbox, config) as (_, endpoint), sending(endpoint, config) as sender:
        with pytest.raises(
            TransportError, match=r"'t1' takes \d+ bytes, more than `transport.max_message_bytes` = 2500"
        ):
            await asyncio.wait_for(sender.send(make_trajectory(1, 5000)), LIMIT)
        await deliver_all(sender, [make_trajectory(2, 10)])
        assert inbox.once({"t2"})


async def test_large_payloads_are_handled_off_the_event_loop(monkeypatch):
    here: dict[str, list[bool]] = {"encode": [], "decode": []}

    def spy(module: Any, name: str, key: str) -> None:
        original = getattr(module, name)

        def call(*args: Any, **options: Any) -> Any:
            here[key].append(threading.current_thread() is threading.main_thread())
            return original(*args, **options)

        monkeypatch.setattr(module, name, call)

    spy(encoding_queue, "encode_trajectory", "encode")
    spy(intake, "decode_trajectory", "decode")
    async with receiving(Inbox()) as (_, endpoint), sending(endpoint) as sender:
        for size in (10, 20_000):  # one after the other: what arrives together is opened together
            await deliver_all(sender, [make_trajectory(size, size)])
    assert here == {"encode": [True, False], "decode": [True, False]}


async def test_many_episodes_that_end_at_once_do_not_hold_up_the_event_loop_together(monkeypatch):
    """Each encodes for half a millisecond, on the loop; others have their turn in between."""
    encode = encoding_queue.encode_trajectory
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

    monkeypatch.setattr(encoding_queue, "encode_trajectory", slow)
    async with receiving(Inbox(), SLOW) as (_, endpoint), sending(endpoint, SLOW) as sender:
        watching = asyncio.create_task(watch())
        async with asyncio.timeout(LIMIT):
            await asyncio.gather(*(sender.send(make_trajectory(i)) for i in range(100)))
        watching.cancel()
        assert max(b - a for a, b in itertools.pairwise(turns)) <= 10
        assert await sender.flush(LIMIT) == 0


@settings(max_examples=100)
@given(data=st.data())
def test_the_frames_of_each_come_out_of_a_message_of_several(data):
    """Of any sizes, from nothing on; also in a buffer at an odd address, as ZeroMQ hands it out."""
    sizes = st.lists(st.sampled_from([0, 1, 7, 8, 9, 100, 2000]), min_size=1, max_size=4)
    contents = [[np.random.default_rng(n).bytes(n) for n in each] for each in data.draw(st.lists(sizes, min_size=1))]
    contents = contents[: control_messages.MAX_DELIVERY_ITEMS]
    items = [
        control_messages.DeliveryItem(f"t{i}", i, 10**6, [len(f) for f in frames]) for i, frames in enumerate(contents)
    ]
    control, *payload = control_messages.encode_delivery("s", items, contents)
    message = control_messages.decode_control(control)
    assert isinstance(message, control_messages.Deliver)
    assert message.items == items
    for pieces in (payload, [memoryview(b"x" + bytes(piece))[1:] for piece in payload]):
        if len(items) > 1 and not pieces:  # there is nothing in it at all
            continue
        portions = message.split_by_item(pieces)
        found = [
            control_messages.join_item_frames(item, portion) for item, portion in zip(items, portions, strict=True)
        ]
        assert [[bytes(frame) for frame in frames] for frames in found] == contents


def test_a_message_of_several_that_does_not_add_up_is_refused():
    contents = [[b"a" * 10], [b"b" * 20]]
    items = [control_messages.DeliveryItem(f"t{i}", i, 100, [len(frames[0])]) for i, frames in enumerate(contents)]
    control, payload = control_messages.encode_delivery("s", items, contents)
    message = control_messages.decode_control(control)
    for bad in ([], [payload, b""], [payload[:-1]], [bytes(payload) + b"x"], [bytes(payload) + bytes(8)]):
        with pytest.raises(WireError, match=r"several trajectories|2 trajectories in"):
            message.split_by_item(bad)


async def test_of_a_message_of_several_a_bad_one_is_refused_alone():
    """One that changed on its way, one that is not acceptable, one of a group that there is not, one that is too large."""
    sent = [make_trajectory(i, group=0) for i in range(6)]
    frames = [[bytes(frame) for frame in encoded(t)] for t in sent]
    frames[1][1] = frames[1][1][:-1] + bytes([frames[1][1][-1] ^ 1])
    items = [
        control_messages.DeliveryItem(f"t{i}", 0, memory_size(t), [len(f) for f in frames[i]])
        for i, t in enumerate(sent)
    ]
    items[3] = control_messages.DeliveryItem("t3", -1, items[3].nbytes, items[3].frames)
    limit = SLOW.max_message_bytes
    items[4] = control_messages.DeliveryItem("t4", 0, limit + 1, items[4].frames)

    def validate(trajectories: Sequence[Trajectory]) -> dict[int, str]:
        return {i: "no such expert" for i, t in enumerate(trajectories) if t.trajectory_id == "t2"}

    inbox = Inbox(validate=validate)
    async with receiving(inbox, SLOW) as (receiver, endpoint), raw_dealer(endpoint) as peer:
        await peer.send(HELLO)
        await peer.send(*control_messages.encode_delivery("session", items, frames))
        answers = [await peer.answer() for _ in range(5)]
        assert (receiver.unreleased_bytes, receiver.rejected, receiver.damaged) == (0, 3, 1)
    (ack,) = [answer for answer in answers if isinstance(answer, control_messages.Ack)]
    assert ack.ids == ["t0", "t5"]
    rejects = {answer.trajectory_id: answer for answer in answers if isinstance(answer, control_messages.Reject)}
    again = {name: reject.again for name, reject in rejects.items()}
    assert again == {"t1": "damaged", "t2": "never", "t3": "never", "t4": "never"}
    assert rejects["t2"].reason == "no such expert"
    assert rejects["t4"].reason == f"{limit + 1} bytes, more than {limit}"
    assert inbox.once({"t0", "t5"})


async def test_what_others_of_its_group_follow_waits_for_the_last_and_goes_with_it(monkeypatch, sent_together):
    monkeypatch.setattr("r3async.transport.encoding_queue.LINGER_SECONDS", LIMIT)
    inbox, looks = Inbox(), list[int]()

    def validate(trajectories: Sequence[Trajectory]) -> dict[int, str]:
        looks.append(len(trajectories))
        return {i: "it is odd" for i, t in enumerate(trajectories) if t.trajectory_id == "t2"}

    refused: list[tuple[str, str]] = []
    async with (
        receiving(inbox, SLOW) as (_, endpoint),
        sending(
            endpoint, SLOW, validate=validate, on_reject=lambda t, why: refused.append((t.trajectory_id, why))
        ) as sender,
    ):
        await send_all(sender, [make_trajectory(99)])
        first = [asyncio.create_task(sender.send(make_trajectory(i), more_follow=True)) for i in range(5)]
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in first)
        assert "t3" in sender
        first[3].cancel()
        await asyncio.wait([first[3]])
        assert "t3" not in sender
        await asyncio.wait_for(sender.send(make_trajectory(5)), LIMIT)
        await asyncio.wait_for(asyncio.gather(*first[:3], first[4]), LIMIT)
        assert await sender.flush(LIMIT) == 0
    assert sent_together == [["t99"], ["t0", "t1", "t4", "t5"]]
    assert looks == [1, 5]
    assert refused == [("t2", "it is odd")]
    assert inbox.once({"t99", "t0", "t1", "t4", "t5"})


async def test_what_waits_for_others_that_do_not_come_goes_after_a_while_or_with_a_flush(monkeypatch, sent_together):
    inbox = Inbox()
    async with receiving(inbox, SLOW) as (_, endpoint), sending(endpoint, SLOW) as sender:
        await asyncio.wait_for(sender.send(make_trajectory(0), more_follow=True), LIMIT)
        monkeypatch.setattr("r3async.transport.encoding_queue.LINGER_SECONDS", 1000.0)
        last = asyncio.create_task(sender.send(make_trajectory(1), more_follow=True))
        await until(lambda: "t1" in sender)
        assert await sender.flush(LIMIT) == 0
        await asyncio.wait_for(last, LIMIT)
    assert sent_together == [["t0"], ["t1"]]
    assert inbox.once({"t0", "t1"})
