"""What a peer that says anything it likes can cost: memory before it is let in, and credit afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import struct

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3async.config import TransportConfig
from r3async.records import SCHEMA, is_name_in, trajectory_name
from r3async.transport import Receiver, wire
from r3async.transport.credit import CreditPool, Offered
from r3async.transport.wire import PIECE, WireError, cut, joined
from tests.helpers_transport import (
    HELLO,
    LIMIT,
    SERVER_KEYS,
    Inbox,
    make_trajectory,
    raw_dealer,
    receiving,
    send_all,
    sending,
    until,
)

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(15 + 32)
"""Of ZMTP 3.1, by a client: what anyone may say who has no key."""
COMMAND, MESSAGE = 0x06, 0x02
"""Flags of a frame whose length takes eight bytes."""


async def pour(port: int, flags: int, nbytes: int) -> int:
    """Greet, announce a frame of `nbytes`, and send all of it but the last byte. Returns what the other end took."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sent = 0
    with contextlib.suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(3):
            writer.write(GREETING + struct.pack(">BQ", flags, nbytes))
            chunk = bytes(2**18)
            while sent < nbytes - 1:
                writer.write(chunk[: nbytes - 1 - sent])
                await writer.drain()
                sent += min(len(chunk), nbytes - 1 - sent)
            await asyncio.sleep(0.3)
            await reader.read(2**16)
            await asyncio.sleep(30)  # as long as it is let
    writer.transport.abort()
    return sent


@pytest.mark.parametrize("flags", [COMMAND, MESSAGE])
async def test_strangers_cost_bounded_memory_before_they_are_let_in(flags):
    """Sixteen of them, each with a frame as large as a trajectory may be: 512 MiB in all."""
    inbox, process = Inbox(), psutil.Process()
    async with receiving(inbox, TransportConfig(ack_timeout=0.3)) as (_, endpoint):
        port = int(endpoint.rsplit(":", 1)[1])
        before, highest = process.memory_info().rss, 0
        pouring = [asyncio.create_task(pour(port, flags, 32 * 2**20)) for _ in range(16)]
        while not all(task.done() for task in pouring):
            await asyncio.sleep(0.05)
            highest = max(highest, process.memory_info().rss - before)
        assert highest < 64 * 2**20, f"{highest / 2**20:.0f} MiB"
        async with sending(endpoint) as sender:
            await send_all(sender, [make_trajectory(1, 20_000)])
            assert await sender.flush(LIMIT) == 0
    assert inbox.once({"t1"})


@pytest.mark.parametrize("length", [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, 3 * PIECE + 5])
def test_frames_are_cut_into_pieces_that_a_connection_takes_and_joined_again(length):
    rng = np.random.default_rng(length)
    frames = [rng.bytes(length), b"between", rng.bytes(length // 2)]
    pieces = cut(frames)
    assert max(map(len, pieces)) <= PIECE
    assert [bytes(frame) for frame in joined(pieces)] == frames
    assert all(memoryview(frame).readonly for frame in joined(pieces))


def test_a_frame_without_an_end_is_refused():
    with pytest.raises(WireError, match="the last frame has no end"):
        joined([bytes(PIECE)])


async def test_a_stranger_that_says_nothing_is_disconnected(monkeypatch):
    monkeypatch.setattr("r3async.world.zeromq.HANDSHAKE_MS", 300)
    async with receiving(Inbox()) as (_, endpoint):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(endpoint.rsplit(":", 1)[1]))
        writer.write(GREETING)
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(LIMIT):
                while await reader.read(4096):
                    pass
        writer.close()


WINDOW, SAMPLES, LARGEST, CREDIT = 2, 3, 50, 100


def name_of(group: int, episode: int, chance: random.Random) -> str:
    """Mostly right; or of another group, or of nothing."""
    return chance.choice(
        [trajectory_name(group, episode)] * 6 + [trajectory_name(group + 1, episode), f"x{episode}", "g"]
    )


@settings(max_examples=150, deadline=None)
@given(chance=st.integers(0, 2**32).map(random.Random), actions=st.integers(1, 60))
def test_what_senders_are_granted_is_bounded_whatever_they_claim(chance, actions):
    """Any claims of many senders: wrong groups, sizes and names, one trajectory by several, the window's groups over and over."""
    receiver = Receiver(
        "run",
        TransportConfig(credit_bytes=CREDIT),
        lambda trajectory, nbytes: None,
        keys=SERVER_KEYS,
        window=WINDOW,
        claims=lambda group, name: is_name_in(group, name, SAMPLES),
        largest=LARGEST,
    )
    pool, oldest, most = receiver._pool, 0, max(CREDIT, LARGEST) + WINDOW * SAMPLES * LARGEST
    senders = [f"sender-{i}".encode() for i in range(8)]
    for sender in senders:
        receiver._handle(sender, [wire.encode_control(wire.Hello("s", "x", "run", SCHEMA.fingerprint))])
    for _ in range(actions):
        sender = chance.choice(senders)
        receiver._granting = True  # as if an event loop would: it is done below
        action = chance.choice(["claim", "claim", "claim", "deliver", "consume", "leave"])
        if action == "claim":
            parcels = []
            for _ in range(chance.randint(1, 40)):
                group, episode = (
                    chance.choice([0, oldest, oldest + 1, oldest + 2, -1, 10**9]),
                    chance.randint(0, SAMPLES),
                )
                parcels.append(
                    wire.Parcel(name_of(group, episode, chance), group, chance.choice([1, 20, LARGEST, 60, 2**40]))
                )
            receiver._handle(sender, [wire.encode_control(wire.Offer("s", parcels))])
        elif action == "deliver":
            for message in pool.granted(sender):
                group = int(message[1:9])
                receiver._handle(sender, [wire.encode_control(wire.Deliver("s", message, group)), b"x" * 20])
        elif action == "consume":
            receiver.ledger.forget(oldest)
            for episode in range(SAMPLES):
                pool.release(trajectory_name(oldest, episode))
            oldest += 1
            pool.advance(oldest)
        else:
            pool.drop(sender)
        receiver._grant_now()
        assert pool.used <= most
        assert pool.reserved == sum(
            o.nbytes for s in senders for m, o in pool._offers.get(s, {}).items() if m in pool.granted(s)
        )


async def test_a_sender_that_says_group_0_over_and_over_gets_no_more_than_its_episodes_take():
    """As it was seen: 12.5 GiB were granted of a credit of 0.25."""
    settings = TransportConfig(ack_timeout=60.0, credit_bytes=2**20, max_message_bytes=2**20)
    claims = functools.partial(is_name_in, samples_per_group=4)
    inbox = Inbox()
    async with (
        receiving(inbox, settings, window=1, claims=lambda group, name: claims(group, name)) as (receiver, endpoint),
        raw_dealer(endpoint) as greedy,
    ):
        await greedy.send(HELLO)
        for start in range(0, 12_500, 250):
            parcels = [wire.Parcel(trajectory_name(0, i), 0, 2**20) for i in range(start, start + 250)]
            await greedy.send(wire.Offer("session", parcels, more=True))
        await until(lambda: receiver.rejected == 12_500 - 4)
        assert receiver._pool.used <= 2**20 + 4 * 2**20


async def test_a_name_that_is_not_of_the_group_is_refused_with_the_reason():
    claims = functools.partial(is_name_in, samples_per_group=4)
    async with (
        receiving(Inbox(), claims=lambda group, name: claims(group, name)) as (_, endpoint),
        raw_dealer(endpoint) as peer,
    ):
        await peer.send(HELLO)
        await peer.send(wire.Offer("session", [wire.Parcel("g00000007e0001", 0, 10)]))
        assert await peer.answer() == wire.Reject("g00000007e0001", "group 0 has no trajectory 'g00000007e0001'")
        await peer.send(wire.Deliver("session", "g00000000e0004", 0), b"x")
        assert await peer.answer() == wire.Reject("g00000000e0004", "group 0 has no trajectory 'g00000000e0004'")


def test_a_trajectory_that_two_senders_claim_takes_credit_once_and_holds_up_nobody():
    pool = CreditPool(100, 1)
    pool.offer(b"frozen", {"g0e0": Offered(0, 90)})
    assert pool.grant() == {b"frozen": ["g0e0"]}
    pool.offer(b"other", {"g0e0": Offered(0, 90), "g0e1": Offered(0, 90), "g9": Offered(9, 1)})
    assert pool.grant() == {b"other": ["g0e1"]}
    assert pool.used == 180
    pool.drop(b"frozen")
    assert pool.grant() == {b"other": ["g0e0"]}


@pytest.mark.parametrize(
    "name", ["", "g", "e", "e0", "g00000000e", "g00000000e-001", "g00000000e٣", "g0e0", "g00000000e" + "0" * 50]
)
def test_odd_names_are_of_no_group(name):
    assert not is_name_in(0, name, 4)
    assert is_name_in(0, "g00000000e0003", 4)
    assert not is_name_in(0, "g00000000e0004", 4)
    assert is_name_in(123456789, trajectory_name(123456789, 12345), 20000)
