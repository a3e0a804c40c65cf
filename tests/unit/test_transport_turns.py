"""Trajectories that end at about the same time share what is done of them: a look, a message, an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3async.data import wire
from r3async.data.tokens import Trajectory
from r3async.data.wire import WireError
from r3async.transport import TrajectoryReceiver
from tests.helpers.transport import (
    HELLO,
    LIMIT,
    SLOW,
    Inbox,
    deliver_all,
    encoded,
    make_trajectory,
    memory_size,
    raw_dealer,
    receiving,
    send_all,
    sending,
    until,
)


@settings(max_examples=100)
@given(data=st.data())
def test_the_frames_of_each_come_out_of_a_message_of_several(data):
    """Of any sizes, from nothing on; also in a buffer at an odd address, as ZeroMQ hands it out."""
    sizes = st.lists(st.sampled_from([0, 1, 7, 8, 9, 100, 2000]), min_size=1, max_size=4)
    contents = [[np.random.default_rng(n).bytes(n) for n in each] for each in data.draw(st.lists(sizes, min_size=1))]
    contents = contents[: wire.MAX_DELIVERY_ITEMS]
    items = [wire.DeliveryItem(f"t{i}", i, 10**6, [len(f) for f in frames]) for i, frames in enumerate(contents)]
    control, *payload = wire.encode_delivery("s", items, contents)
    message = wire.decode_control(control)
    assert isinstance(message, wire.Deliver)
    assert message.items == items
    shifted = [memoryview(b"x" + bytes(piece))[1:] for piece in payload]
    for pieces in (payload, shifted):
        if len(items) > 1 and not pieces:  # there is nothing in it at all
            continue
        portions = message.split_by_item(pieces)
        found = [wire.join_item_frames(item, portion) for item, portion in zip(items, portions, strict=True)]
        assert [[bytes(frame) for frame in frames] for frames in found] == contents


def test_a_message_of_several_that_does_not_add_up_is_refused():
    contents = [[b"a" * 10], [b"b" * 20]]
    items = [wire.DeliveryItem(f"t{i}", i, 100, [len(frames[0])]) for i, frames in enumerate(contents)]
    control, payload = wire.encode_delivery("s", items, contents)
    message = wire.decode_control(control)
    for bad in ([], [payload, b""], [payload[:-1]], [bytes(payload) + b"x"]):
        with pytest.raises(WireError, match=r"several trajectories|2 trajectories in"):
            message.split_by_item(bad)


async def test_of_a_message_of_several_a_bad_one_is_refused_alone():
    """One that changed on its way, one that is not acceptable, one of a group that there is not, one that is too large."""
    sent = [make_trajectory(i, group=0) for i in range(6)]
    frames = [[bytes(frame) for frame in encoded(t)] for t in sent]
    frames[1][1] = frames[1][1][:-1] + bytes([frames[1][1][-1] ^ 1])
    items = [wire.DeliveryItem(f"t{i}", 0, memory_size(t), [len(f) for f in frames[i]]) for i, t in enumerate(sent)]
    items[3] = wire.DeliveryItem("t3", 7, items[3].nbytes, items[3].frames)
    items[4] = wire.DeliveryItem("t4", 0, 10**9, items[4].frames)

    def validate(trajectories: Sequence[Trajectory]) -> dict[int, str]:
        return {i: "no such expert" for i, t in enumerate(trajectories) if t.trajectory_id == "t2"}

    inbox = Inbox(validate=validate, claims=lambda group, name: group == 0)
    async with (
        receiving(inbox, SLOW) as (receiver, endpoint),
        raw_dealer(endpoint) as peer,
    ):
        await peer.send(HELLO)
        await peer.send(*wire.encode_delivery("session", items, frames))
        answers = [await peer.answer() for _ in range(5)]
        assert receiver.unreleased_bytes == 0
    (ack,) = [answer for answer in answers if isinstance(answer, wire.Ack)]
    assert ack.ids == ["t0", "t5"]
    rejects = {answer.trajectory_id: answer for answer in answers if isinstance(answer, wire.Reject)}
    assert {name: reject.again for name, reject in rejects.items()} == {
        "t1": "damaged",
        "t2": "never",
        "t3": "never",
        "t4": "never",
    }
    assert rejects["t2"].reason == "no such expert"
    assert inbox.once({"t0", "t5"})


@pytest.fixture
def delivered(monkeypatch) -> list[list[str]]:
    """Names in each message, as they are sent."""
    messages: list[list[str]] = []
    delivery = wire.encode_delivery

    def note(session: str, items: list[wire.DeliveryItem], frames: Any) -> Any:
        messages.append([item.trajectory_id for item in items])
        return delivery(session, items, frames)

    monkeypatch.setattr("r3async.transport.sender.encode_delivery", note)
    return messages


async def test_what_others_of_its_group_follow_waits_for_the_last_and_goes_with_it(monkeypatch, delivered):
    monkeypatch.setattr("r3async.transport.sender.LINGER_SECONDS", LIMIT)
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
    assert delivered == [["t99"], ["t0", "t1", "t4", "t5"]]
    assert looks == [1, 5]
    assert refused == [("t2", "it is odd")]
    assert inbox.once({"t99", "t0", "t1", "t4", "t5"})


async def test_what_waits_for_others_that_do_not_come_goes_after_a_while_or_with_a_flush(monkeypatch, delivered):
    inbox = Inbox()
    async with receiving(inbox, SLOW) as (_, endpoint), sending(endpoint, SLOW) as sender:
        await asyncio.wait_for(sender.send(make_trajectory(0), more_follow=True), LIMIT)
        monkeypatch.setattr("r3async.transport.sender.LINGER_SECONDS", 1000.0)
        last = asyncio.create_task(sender.send(make_trajectory(1), more_follow=True))
        await until(lambda: "t1" in sender)
        assert await sender.flush(LIMIT) == 0
        await asyncio.wait_for(last, LIMIT)
    assert delivered == [["t0"], ["t1"]]
    assert inbox.once({"t0", "t1"})


async def test_what_is_accepted_at_about_the_same_time_is_acknowledged_together():
    acks: list[int] = []

    class Counting(TrajectoryReceiver):
        def _send_message(self, identity: bytes, message: wire.ControlMessage) -> None:
            if isinstance(message, wire.Ack):
                acks.append(len(message.ids))
            super()._send_message(identity, message)

    async with receiving(Inbox(), SLOW, Counting) as (_, endpoint), sending(endpoint, SLOW) as sender:
        await deliver_all(sender, [make_trajectory(i) for i in range(60)])
    assert sum(acks) == 60
    assert len(acks) <= 40, "by themselves they would be 60; how many come together depends on the machine"
