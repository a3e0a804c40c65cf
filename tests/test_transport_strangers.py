"""What a peer that says anything it likes can cost: memory before it is let in, and credit afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import struct

import numpy as np
import psutil
import pytest

from r3async.config import TransportConfig
from r3async.transport.wire import PIECE, WireError, cut, joined
from tests.helpers_transport import (
    LIMIT,
    Inbox,
    make_trajectory,
    receiving,
    send_all,
    sending,
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
    monkeypatch.setattr("r3async.transport.sockets.HANDSHAKE_MS", 300)
    async with receiving(Inbox()) as (_, endpoint):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(endpoint.rsplit(":", 1)[1]))
        writer.write(GREETING)
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(LIMIT):
                while await reader.read(4096):
                    pass
        writer.close()
