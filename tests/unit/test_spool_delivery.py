"""Delivery into a spool: acknowledged only when it is durable, bounded in memory and on disk."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from r3async.config import BufferConfig, TransportConfig
from r3async.data import wire
from r3async.data.container import RecordFormat
from r3async.data.tokens import Trajectory
from r3async.data.versions import ConsumedGroups
from r3async.transport import TrajectoryLedger
from r3async.transport.spool import Spool
from tests.helpers.spool import DISK, recovered, sampled, tell
from tests.helpers.transport import (
    LIMIT,
    SLOW,
    Inbox,
    deliver_all,
    free_port,
    make_trajectory,
    memory_size,
    receiving,
    send_all,
    sending,
    until,
)
from tests.unit.test_transport_crash import process

ON_DISK_ONLY = BufferConfig(durability="disk", memory_bytes=1)


async def test_acknowledged_means_written(tmp_path, monkeypatch):
    """While the disk takes nothing, nothing is acknowledged, nobody gives up, and what waits is neither lost nor doubled."""
    broken = [True]
    real = RecordFormat.append_record

    def append(*args: Any, **options: Any) -> Any:
        if broken[0]:
            raise OSError(errno.EIO, "broken")
        return real(*args, **options)

    monkeypatch.setattr(RecordFormat, "append_record", append)
    spool = Spool(tmp_path, DISK, retry_seconds=0.05)
    inbox = Inbox()
    config = TransportConfig(ack_timeout=1.5)
    async with receiving(inbox, config, store=spool) as (receiver, endpoint), sending(endpoint, config) as sender:
        await send_all(sender, [sampled(i) for i in range(3)])
        assert await sender.flush(3 * config.ack_timeout) == 3
        assert (sender.acked, sender.reconnects, receiver.received) == (0, 0, 0)
        broken[0] = False
        assert await sender.flush(LIMIT) == 0
        assert inbox.once({"t0", "t1", "t2"})
        assert sender.resent == 0
    await spool.close()
    _, found = await recovered(tmp_path)
    assert [t.trajectory_id for t in found] == ["t0", "t1", "t2"]


async def test_a_learner_that_died_has_everything_again_but_what_was_committed(tmp_path):
    inbox = Inbox(hold=True)
    spool = Spool(tmp_path, DISK)
    sent = [sampled(i) for i in range(12)]
    async with receiving(inbox, store=spool) as (receiver, endpoint), sending(endpoint) as sender:
        await deliver_all(sender, sent)
        for group in (0, 1):
            receiver.forget_group(group)
        ledger = TrajectoryLedger(
            ConsumedGroups(head=2)
        )  # Trained from groups 0 and 1, and died before `commit` was called.
        receiver.forget_group(2)  # Trained too, but of no checkpoint: has to be trained again.
    await spool.close()
    again, spool = Inbox(hold=True), Spool(tmp_path, DISK)
    ledger.add(2, "never-kept")
    async with receiving(again, store=spool, ledger=ledger) as (receiver, endpoint):
        assert again.trajectories == sent[8:]
        assert receiver.recovered == 4
        assert [int(p.name[:9]) for p in tmp_path.iterdir()] == [2]
        assert receiver.unreleased_bytes > 0
        async with sending(endpoint) as sender:
            await deliver_all(sender, [*sent[6:9], make_trajectory("never-kept", group=2)])
        assert receiver.duplicates == 3
        assert [t.trajectory_id for t in again.trajectories[4:]] == ["tnever-kept"]
        receiver.forget_group(2)
        assert receiver.unreleased_bytes == 0
    await spool.close()


async def test_what_is_not_valid_is_neither_kept_nor_taken_again(tmp_path, caplog):
    def validate(trajectories: Sequence[Trajectory]) -> dict[int, str]:
        return {at: "not today" for at, t in enumerate(trajectories) if t.trajectory_id in bad}

    bad = {"t1"}
    inbox, spool = Inbox(validate=validate), Spool(tmp_path, DISK)
    heard: list[tuple[str, str]] = []
    async with receiving(inbox, store=spool) as (receiver, endpoint):
        async with sending(endpoint, on_reject=lambda t, why: heard.append((t.trajectory_id, why))) as sender:
            await deliver_all(sender, [sampled(i) for i in range(3)])
    await spool.close()
    assert heard == [("t1", "not today")]
    bad.add("t2")
    again, spool = Inbox(validate=validate), Spool(tmp_path, DISK)
    async with receiving(again, store=spool) as (receiver, _):
        assert [t.trajectory_id for t in again.trajectories] == ["t0"]
        assert (receiver.recovered, receiver.rejected, receiver.unreleased_bytes) == (2, 1, 0)
        assert (0, "t2") not in receiver.ledger
    assert "'t2' was kept, but is not taken again: not today" in caplog.text
    await spool.close()


async def test_beyond_its_memory_a_buffer_is_on_disk_and_the_memory_is_free_again(tmp_path):
    """Thirty trajectories that nobody releases pass through memory for ten, and are all there."""
    sent = [sampled(i, 4000, group=50 + i) for i in range(30)]
    mapped = Spool(tmp_path, ON_DISK_ONLY)
    for table in (t.samples[0].table for t in sent):
        table._columns["routed_experts"] = np.repeat(table["routed_experts"], 24, axis=1)
    size = memory_size(sent[0])
    config = TransportConfig(ack_timeout=SLOW.ack_timeout, credit_bytes=10 * size)
    inbox = Inbox(hold=True)
    async with (
        receiving(inbox, config, store=mapped, window=0) as (receiver, endpoint),
        sending(endpoint, config) as sender,
    ):
        await deliver_all(sender, sent)
        assert sorted(inbox.trajectories, key=lambda t: t.group_index) == sent
        assert receiver.unreleased_bytes < config.credit_bytes < 30 * size
    await mapped.close()


@pytest.mark.long
async def test_what_is_being_written_takes_room_already(tmp_path):
    """Or a disk that is slower than the senders would be filled again and again before the first file counts."""
    sent = [sampled(i, 500, group=10 + i) for i in range(8)]
    nbytes = wire.decoded_bytes(wire.encode_trajectory(sent[0]), sent[0])
    spool = Spool(tmp_path, BufferConfig(durability="disk", disk_bytes=3 * nbytes + 100))
    go_on, write = asyncio.Event(), spool.put_trajectory
    begun: list[str] = []

    async def put(trajectory: Trajectory, frames: Any, *, spill: bool) -> Any:
        begun.append(trajectory.trajectory_id)
        await go_on.wait()
        return await write(trajectory, frames, spill=spill)

    spool.put_trajectory = put  # type: ignore[method-assign]
    inbox = Inbox()
    async with receiving(inbox, SLOW, store=spool, window=1) as (receiver, endpoint), sending(endpoint, SLOW) as sender:
        feeds = [asyncio.create_task(sender.send(trajectory)) for trajectory in sent]
        await until(lambda: begun)
        await asyncio.sleep(0.2)
        assert len(receiver._intake) == 3
        receiver.forget_group(10)  # wakes whatever waits for room
        await asyncio.sleep(0.1)
        assert len(receiver._intake) == 3
        for feed in feeds:
            feed.cancel()
        go_on.set()
        await sender.flush(LIMIT)
    await spool.close()


async def test_a_spool_that_is_full_slows_down_says_so_and_lets_the_next_step_through(tmp_path):
    """What a step does not wait for fills `disk_bytes` at most; what it waits for is taken beyond them, until a checkpoint."""
    sent = [sampled(i, 2000, group=i) for i in range(8)]
    told: list[str] = []
    spool = Spool(
        tmp_path, BufferConfig(durability="disk", disk_bytes=3 * memory_size(sent[0])), report_event=tell(told)
    )
    inbox = Inbox()
    async with receiving(inbox, SLOW, store=spool, window=1) as (receiver, endpoint), sending(endpoint, SLOW) as sender:
        early = 7
        while "spool_full" not in told:  # one by one, so that as many as there can be are taken before their time
            await sender.send(sent[early])
            await until(lambda: f"t{early}" in inbox.seen or "spool_full" in told)  # noqa: B023
            early -= 1
        assert spool.nbytes <= 3 * memory_size(sent[0])
        feed = asyncio.gather(*(sender.send(t) for t in reversed(sent[: early + 1])))
        for group in range(8):
            await until(lambda: f"t{group}" in inbox.seen)  # noqa: B023
            record = spool.nbytes / len(spool.groups)
            waited_for = [kept for kept in spool.groups if kept <= group]
            assert spool.nbytes <= 3 * memory_size(sent[0]) + len(waited_for) * record
            receiver.forget_group(group)
            if group >= 3:
                await spool.delete_trained([group - 3])
                receiver.forget_group(group)  # The next step would; here it wakes those that wait for room.
        await feed
        assert await sender.flush(LIMIT) == 0
        assert inbox.once({f"t{i}" for i in range(8)})
        assert told[0] == "spool_full"
        await spool.delete_trained(range(8))
        assert spool.nbytes == 0
    await spool.close()


LEARNER = """
import asyncio, sys
from pathlib import Path
from r3async.transport.spool import Spool
from r3async.config import BufferConfig, TransportConfig
from r3async.transport import TrajectoryReceiver
from tests.helpers.transport import SERVER_KEYS, Inbox

async def main(directory, port):
    inbox, spool = Inbox(), Spool(Path(directory), BufferConfig(durability="disk"))
    settings = TransportConfig(ack_timeout=0.3)
    receiver = inbox.receiver = TrajectoryReceiver(
        "run", settings, inbox, keys=SERVER_KEYS, port=int(port), store=spool
    )
    await receiver.start()
    await asyncio.sleep(60)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_learner_that_is_killed_loses_nothing_that_it_acknowledged(tmp_path):
    """Three times, at any moment: what its senders were told to forget is in the spool, once, and nothing is missing."""
    port, count = free_port(), 300
    spool_dir = tmp_path / "spool"

    def written() -> int:
        return sum(p.stat().st_size for p in spool_dir.glob("*.spool")) if spool_dir.exists() else 0

    async with sending(f"tcp://127.0.0.1:{port}") as sender:
        feed = asyncio.gather(*(sender.send(sampled(i)) for i in range(count)))
        for goal in (40_000, 150_000, 400_000):
            with process(LEARNER, spool_dir, port) as child:
                await until(lambda: written() >= goal, 30)  # noqa: B023
                os.kill(child.pid, signal.SIGKILL)
        with process(LEARNER, spool_dir, port):
            await asyncio.wait_for(feed, 30)
            assert await sender.flush(30) == 0
    spool, found = await recovered(spool_dir)
    assert sorted(t.trajectory_id for t in found) == sorted(f"t{i}" for i in range(count))
    await spool.close()
