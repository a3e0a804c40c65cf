"""What a peer that says anything it likes can cost: memory before it is let in, and memory of the learner afterwards."""

import asyncio
import contextlib
import heapq
import os
import random
import resource
import socket
import struct
import subprocess
import sys
import time
import types
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3async.config import BufferConfig, TransportConfig
from r3async.data import control_messages, wire
from r3async.data.tokens import format_trajectory_id, is_trajectory_of_group
from r3async.data.wire_frames import PIECE_BYTES, WireError, join_pieces, split_frames
from r3async.transport import TrajectoryReceiver
from r3async.transport.spool import Spool
from r3async.world.zmq_sockets import (
    CONNECT_MS,
    HANDSHAKE_TIMEOUT_MS,
    MAX_NEW_PEERS,
    MOST_DESCRIPTORS,
    RECONNECT_MS,
    RESERVED,
    ConnectionLimiter,
)
from tests.helpers.transport import (
    HELLO,
    LIMIT,
    SERVER_KEYS,
    SLOW,
    Inbox,
    SendersByHand,
    deliver_all,
    delivered,
    encoded,
    make_trajectory,
    memory_size,
    raw_dealer,
    receiving,
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
            await deliver_all(sender, [make_trajectory(1, 20_000)])
    assert inbox.once({"t1"})


@pytest.mark.parametrize(
    "length",
    [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES, 3 * PIECE_BYTES, 3 * PIECE_BYTES + 5],
)
def test_frames_are_cut_into_pieces_that_a_connection_takes_and_joined_again(length):
    rng = np.random.default_rng(length)
    frames = [rng.bytes(length), b"between", rng.bytes(length // 2)]
    pieces = split_frames(frames)
    assert max(map(len, pieces)) <= PIECE_BYTES
    assert [bytes(frame) for frame in join_pieces(pieces)] == frames
    assert all(memoryview(frame).readonly for frame in join_pieces(pieces))


def test_a_frame_without_an_end_is_refused():
    with pytest.raises(WireError, match="the last frame has no end"):
        join_pieces([bytes(PIECE_BYTES)])


async def test_a_stranger_that_says_nothing_is_disconnected(monkeypatch):
    monkeypatch.setattr("r3async.world.zmq_sockets.HANDSHAKE_TIMEOUT_MS", 300)
    async with receiving(Inbox()) as (_, endpoint):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(endpoint.rsplit(":", 1)[1]))
        writer.write(GREETING)
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(LIMIT):
                while await reader.read(4096):
                    pass
        writer.close()


async def test_thousands_of_strangers_do_not_take_the_descriptors_of_the_process(monkeypatch):
    """They connect and say nothing. As many as may be are let in, and who has a key is, when those have had their time."""
    monkeypatch.setattr("r3async.world.zmq_sockets.HANDSHAKE_TIMEOUT_MS", 1500)
    monkeypatch.setattr("r3async.world.zmq_sockets.MAX_NEW_PEERS", 50)
    inbox, process = Inbox(), psutil.Process()
    async with receiving(inbox, TransportConfig(ack_timeout=0.3)) as (_, endpoint):
        address, strangers = ("127.0.0.1", int(endpoint.rsplit(":", 1)[1])), list[socket.socket]()
        before, most = process.num_fds(), 0
        try:
            for _ in range(1500):
                stranger = socket.socket()
                stranger.setblocking(False)
                stranger.connect_ex(address)
                strangers.append(stranger)
                if not len(strangers) % 25:
                    await asyncio.sleep(0)
            for _ in range(20):
                most = max(most, process.num_fds() - before - len(strangers))
                await asyncio.sleep(0.02)
            async with sending(endpoint) as sender, asyncio.timeout(60):  # among as many, 25 s have been seen
                await sender.send(make_trajectory(1, 20_000))
                assert await sender.flush(60) == 0
        finally:
            for stranger in strangers:
                stranger.close()
    assert 50 <= most < 400, most
    assert inbox.once({"t1"})


def crowd_of(count, endpoint):
    command = [sys.executable, "-m", "dev.chaos.crowd", str(count), endpoint.removeprefix("tcp://")]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)


async def test_a_busy_event_loop_lets_no_more_strangers_in(monkeypatch):
    monkeypatch.setattr("r3async.world.zmq_sockets.MAX_NEW_PEERS", 50)
    process, hold_up = psutil.Process(), time.sleep
    async with receiving(Inbox()) as (_, endpoint):
        before = process.num_fds()
        crowd = crowd_of(1500, endpoint)
        try:
            hold_up(3.0)
            seen = process.num_fds() - before
        finally:
            crowd.kill()
            crowd.communicate(timeout=LIMIT)
    assert 50 <= seen < 400, seen


def waited_outside(seed: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """Seconds until a dealer is let in among 1,500 strangers who come back when they are turned out. Whoever meets a closed door
    tries again as the kernel does, after 1, 2, 4, ... s; the dealer begins anew."""
    clock, rng, dealer = [0.0], random.Random(seed), 1500
    monkeypatch.setattr("r3async.world.zmq_sockets.time", types.SimpleNamespace(monotonic=lambda: clock[0]))
    random.seed(seed)
    door = ConnectionLimiter()
    begins = rng.uniform(20, 25)
    tries = [(rng.uniform(0, 1), who, 1.0) for who in range(dealer)] + [(begins, dealer, 1.0)]
    heapq.heapify(tries)
    while True:
        clock[0], who, pause = heapq.heappop(tries)
        door.open_when_due()
        if door.opens_at is not None and who == dealer:
            heapq.heappush(tries, (clock[0] + (CONNECT_MS + RECONNECT_MS) / 1000, who, pause))
        elif door.opens_at is not None:
            heapq.heappush(tries, (clock[0] + pause, who, 2 * pause))
        elif who == dealer:
            return clock[0] - begins
        else:
            door.count_accepted()
            heapq.heappush(tries, (clock[0] + HANDSHAKE_TIMEOUT_MS / 1000 + rng.uniform(0, 0.05), who, 1.0))


def test_who_has_a_key_is_let_in_among_strangers_who_come_back_at_once(monkeypatch):
    assert max(waited_outside(seed, monkeypatch) for seed in range(20)) < 15


def test_those_who_came_longer_ago_than_a_handshake_takes_close_no_door(monkeypatch):
    clock, door = [0.0], ConnectionLimiter()
    monkeypatch.setattr("r3async.world.zmq_sockets.time", types.SimpleNamespace(monotonic=lambda: clock[0]))
    for _ in range(2 * MAX_NEW_PEERS):
        clock[0] += 2 * HANDSHAKE_TIMEOUT_MS / 1000 / MAX_NEW_PEERS
        door.count_accepted()
    assert door.opens_at is None


def test_the_door_is_closed_also_when_no_descriptor_is_left(monkeypatch):
    monkeypatch.setattr("r3async.world.zmq_sockets.HANDSHAKE_TIMEOUT_MS", 300)
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.closing(ConnectionLimiter()) as door:
        door.add_listener(listener.fileno())
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                os.dup(listener.fileno())
            for _ in range(MAX_NEW_PEERS):
                door.count_accepted()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        with pytest.raises(TimeoutError):
            socket.create_connection(listener.getsockname(), timeout=0.2)
        time.sleep(max(0.0, door.opens_at - time.monotonic()))
        door.open_when_due()
        socket.create_connection(listener.getsockname(), timeout=LIMIT).close()


@pytest.mark.parametrize(
    ("more", "hard", "raised", "shut"),
    [
        (RESERVED, 0, None, False),
        (RESERVED - 1, 0, None, True),
        (9, 4000, 4000, False),
        (9, -1, MOST_DESCRIPTORS, False),
    ],
)
def test_the_limit_of_descriptors_is_raised_and_where_it_cannot_be_the_door_is_closed(
    monkeypatch, more, hard, raised, shut
):
    done = []
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.closing(ConnectionLimiter()) as door:
        door.add_listener(listener.fileno())
        lowest = os.dup(0)
        os.close(lowest)
        limits = (lowest + more, hard or lowest + more)
        system = types.SimpleNamespace(
            RLIMIT_NOFILE=7, getrlimit=lambda what: limits, setrlimit=lambda what, pair: done.append(pair)
        )
        monkeypatch.setattr("r3async.world.zmq_sockets.resource", system)
        door.keep_reserve()
    assert (door.opens_at is not None) is shut
    assert done == ([] if raised is None else [(raised, hard)])


WINDOW, SAMPLES, LARGEST, CREDIT = 2, 3, 3000, 6000
SMALL = 2000
"""Bytes, some more than a trajectory of no token takes in memory."""


def name_of(group: int, episode: int, rng: random.Random) -> str:
    """Mostly right; or of another group, or of nothing."""
    return rng.choice(
        [format_trajectory_id(group, episode)] * 6 + [format_trajectory_id(group + 1, episode), f"x{episode}", "g"]
    )


def frames_of(name: str, group: int) -> list[bytes | memoryview]:
    """Return the frames of a trajectory of no token."""
    return encoded(msgspec.structs.replace(make_trajectory(0, 0), trajectory_id=name, group_index=group))


async def claim_anything(rng: random.Random, actions: int) -> None:
    """Deliver to a learner what many senders claim, and train the oldest group from time to time. What it holds must be
    known and bounded all the while."""
    senders = SendersByHand()
    receiver = TrajectoryReceiver(
        "run",
        TransportConfig(credit_bytes=CREDIT),
        keys=SERVER_KEYS,
        group_size=SAMPLES,
        window=WINDOW,
        max_trajectory_bytes=LARGEST,
        world=senders,
    )
    await receiver.start()
    oldest, most = 0, max(CREDIT, LARGEST) + WINDOW * SAMPLES * LARGEST
    held: dict[str, int] = {}
    names = [f"sender-{i}".encode() for i in range(8)]
    senders.greet(*names)

    async def accept_all() -> None:
        async for batch in receiver:
            for received in batch:
                assert receiver.accept(received)
                held[received.trajectory.trajectory_id] = received.nbytes

    accepting = asyncio.create_task(accept_all())
    for _ in range(actions):
        senders.answers.clear()
        if rng.random() < 0.8:
            group, episode = rng.choice([0, oldest, oldest + 1, oldest + 2, -1, 10**9]), rng.randint(0, SAMPLES)
            name, nbytes = name_of(group, episode, rng), rng.choice([1, SMALL, LARGEST, LARGEST + 10, 2**40])
            frames = rng.choice([frames_of(name, max(0, group)), [b"x"], [b"x" * LARGEST]])
            senders.say(rng.choice(names), *delivered(name, group, nbytes, *frames))
            if not any(
                isinstance(answer, control_messages.Ack | control_messages.Reject) for _, answer in senders.answers
            ):
                held.setdefault(name, nbytes)
        else:
            while any(senders.in_hand(name) for name in names):  # noqa: ASYNC110
                await asyncio.sleep(0)
            for _, answer in senders.answers:
                if isinstance(answer, control_messages.Reject) and answer.again == "damaged":
                    del held[answer.trajectory_id]
            receiver.forget_group(oldest)
            for episode in range(SAMPLES):
                held.pop(format_trajectory_id(oldest, episode), None)
            oldest += 1
        assert receiver.unreleased_bytes == sum(held.values()) <= most
    accepting.cancel()
    await receiver.close()


@settings(max_examples=150)
@given(rng=st.integers(0, 2**32).map(random.Random), actions=st.integers(1, 60))
def test_what_senders_make_a_learner_hold_is_bounded_whatever_they_claim(rng, actions):
    """Any deliveries of many senders: wrong groups, sizes and names, one trajectory by several, the window's over and over."""
    asyncio.run(claim_anything(rng, actions))


async def test_a_name_that_is_not_of_the_group_is_refused_with_the_reason():
    async with (
        receiving(Inbox(), group_size=4) as (_, endpoint),
        raw_dealer(endpoint) as peer,
    ):
        await peer.send(HELLO)
        for name in ("g00000007e0001", "g00000000e0004"):
            await peer.send(*delivered(name, 0, 10, b"x"))
            assert await peer.answer() == control_messages.Reject(name, f"group 0 has no trajectory {name!r}")


async def test_what_several_senders_deliver_at_once_is_held_once_and_each_is_answered(tmp_path):
    """A group that was leased again while the first generator still delivers: the others are told to send theirs later."""
    trajectory = make_trajectory(1, group=5)
    nbytes, frames = memory_size(trajectory), wire.encode_trajectory(trajectory)
    go_on = asyncio.Event()
    spool = Spool(tmp_path, BufferConfig(durability="disk"))
    put = spool.put_trajectory

    async def slow(*args: Any, **options: Any) -> Any:
        await go_on.wait()
        return await put(*args, **options)

    spool.put_trajectory = slow  # type: ignore[method-assign]
    inbox = Inbox(hold=True)
    async with (
        receiving(inbox, SLOW, store=spool) as (receiver, endpoint),
        raw_dealer(endpoint, b"first") as first,
        raw_dealer(endpoint, b"second") as second,
        raw_dealer(endpoint, b"third") as third,
    ):
        for peer in (first, second, third):
            await peer.send(HELLO)
            await peer.send(*delivered("t1", 5, nbytes, *frames))
            await until(lambda: receiver.unreleased_bytes)
        await until(lambda: receiver.sender_count == 3)
        assert await second.answer(0.2) is None
        assert receiver.unreleased_bytes == nbytes
        go_on.set()
        assert await first.answer() == control_messages.Ack(["t1"])
        assert [(await other.answer()).again for other in (second, third)] == ["later", "later"]
        await second.send(*delivered("t1", 5, nbytes, *frames))
        assert await second.answer() == control_messages.Ack(["t1"])
        assert (receiver.received, receiver.duplicates, receiver.unreleased_bytes) == (1, 1, nbytes)
    await spool.close()
    assert inbox.once({"t1"})


@pytest.mark.parametrize(
    "name", ["", "g", "e", "e0", "g00000000e", "g00000000e-001", "g00000000e٣", "g0e0", "g00000000e" + "0" * 50]
)
def test_odd_names_are_of_no_group(name):
    assert not is_trajectory_of_group(0, name, 4)
    assert is_trajectory_of_group(0, "g00000000e0003", 4)
    assert not is_trajectory_of_group(0, "g00000000e0004", 4)
    assert is_trajectory_of_group(123456789, format_trajectory_id(123456789, 12345), 20000)
