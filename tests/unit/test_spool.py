"""The files of a spool, whole whatever is torn, damaged or refused by the disk, and delivery into it."""

import asyncio
import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from r3async.config import BufferConfig, TransportConfig
from r3async.data import wire
from r3async.data.consumed_groups import ConsumedGroups
from r3async.data.container import RecordFormat
from r3async.data.tokens import SCHEMA, Trajectory
from r3async.transport import TrajectoryLedger, encode_trajectory
from r3async.transport.spool import SPOOL_FORMAT, Spool
from r3async.world import disk
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
from tests.helpers.wire import runny_table
from tests.unit.test_transport import process

DISK = BufferConfig(durability="disk")


def sampled(index: int, length: int = 300, group: int | None = None) -> Trajectory:
    made = make_trajectory(index, length, group=group)
    made.samples[0].table = runny_table(length)
    return made


def tell(told: list[str]) -> Any:
    return lambda event, **facts: told.append(event)


async def put_all(spool: Spool, trajectories: list[Trajectory], spill: bool = False) -> list[Any]:
    return [await spool.put_trajectory(t, wire.encode_trajectory(t), spill=spill) for t in trajectories]


async def recovered(directory: Path, **options: Any) -> tuple[Spool, list[Trajectory]]:
    spool = Spool(directory, DISK, **options)
    return spool, [kept.trajectory for kept in await spool.recover_trajectories()]


async def test_what_follows_a_rewritten_file_after_a_restart_is_beside_it(tmp_path):
    """Its number is no longer that of the files that there are."""
    spool = Spool(tmp_path / "spool", DISK)
    await put_all(spool, [sampled(0, group=1), sampled(1, group=1)])
    await spool.remove_trajectories({(1, "t0"): "no"})
    second, found = await recovered(spool.directory)
    assert [t.trajectory_id for t in found] == ["t1"]
    await put_all(second, [sampled(2, group=1)])
    third, found = await recovered(spool.directory)
    assert [t.trajectory_id for t in found] == ["t1", "t2"]
    assert third.damages == []
    assert len(list(spool.directory.iterdir())) == 2


async def test_of_a_group_in_two_files_nothing_stays_of_what_is_removed_or_trained(tmp_path):
    spool = Spool(tmp_path / "spool", DISK)
    await put_all(spool, [sampled(0, group=1), sampled(1, group=1)])
    second, _ = await recovered(spool.directory)
    await put_all(second, [sampled(2, group=1), sampled(1, group=1)])
    await second.remove_trajectories({(1, "t1"): "no"})
    third, found = await recovered(spool.directory)
    assert [t.trajectory_id for t in found] == ["t0", "t2"]
    await put_all(third, [sampled(3, group=1)])
    await third.delete_trained([1])
    assert not list(spool.directory.iterdir())
    assert third.nbytes == 0


@pytest.mark.parametrize("fsync", [False, True])
async def test_what_was_put_is_there_after_a_restart_and_the_last_of_what_was_put_twice(tmp_path, fsync):
    spool = Spool(tmp_path / "spool", BufferConfig(durability="disk", fsync=fsync))
    assert await spool.recover_trajectories() == []
    sent = [sampled(i, length) for i, length in enumerate([0, 1, 50, 300, 3000, 77, 78, 79])]
    assert await put_all(spool, sent) == [None] * 8
    assert len(list(spool.directory.iterdir())) == 2
    assert spool.nbytes == sum(p.stat().st_size for p in spool.directory.iterdir())
    second, found = await recovered(spool.directory)
    assert found == sent
    assert second.damages == []
    assert second.nbytes == spool.nbytes
    more = [sampled(8, group=1), sampled(9, group=2), sampled(3, 200)]  # t3 again: its acknowledgement was lost.
    await put_all(second, more)
    third, found = await recovered(spool.directory)
    assert found == [*sent[:3], more[2], *sent[4:], *more[:2]]
    assert await third.delete_trained([0, 2, 17]) > 0
    assert third.nbytes == sum(p.stat().st_size for p in spool.directory.iterdir())
    _, found = await recovered(spool.directory)
    assert found == [*sent[4:], more[0]]
    for each in (spool, second, third):
        await each.close()


async def test_what_is_spilled_is_mapped_and_survives_its_file(tmp_path):
    spool = Spool(tmp_path, DISK)
    sent = sampled(1, 5000)
    (kept,) = await put_all(spool, [sent], spill=True)
    assert kept.trajectory == sent
    table = kept.trajectory.samples[0].table
    assert all(a.flags.aligned and not a.flags.writeable for _, a in table.without_columns("support").items())
    unpacked = sum(a.nbytes for n, a in table.items() if SCHEMA.columns[n].compressible)
    header = encode_trajectory(sent)[0]
    assert kept.nbytes == len(header) + wire.read_trajectory_header(header).nbytes + unpacked
    await spool.delete_trained([sent.group_index])
    assert list(tmp_path.iterdir()) == []
    assert spool.nbytes == 0
    assert kept.trajectory == sent
    await spool.close()


async def test_every_way_to_tear_the_last_record_leaves_the_others(tmp_path):
    sent = [sampled(i, 40, group=3) for i in range(3)]
    spool = Spool(tmp_path / "whole", DISK)
    await put_all(spool, sent)
    await spool.close()
    (path,) = spool.directory.iterdir()
    whole = path.read_bytes()
    last = len(whole) // 3 * 2
    torn = tmp_path / "torn"
    torn.mkdir()
    for end in [*range(last + 1, len(whole), 29), len(whole) - 1]:
        (torn / path.name).write_bytes(whole[:end])
        told: list[str] = []
        again, found = await recovered(torn, report_event=tell(told))
        assert found == sent[:2]
        assert [d.offset for d in again.damages] == [last]
        assert told == ["spool_damaged"]
        # The sender was never told that it is safe, and sends it again: into a file of its own.
        await put_all(again, sent[2:])
        await again.close()
        after, found = await recovered(torn)
        assert found == sent
        assert await after.delete_trained([3]) > 0
        await after.close()
        assert list(torn.iterdir()) == []


async def test_damage_is_reported_and_costs_only_what_it_hit(tmp_path):
    sent = [sampled(i, 40, group=3) for i in range(3)]
    spool = Spool(tmp_path, DISK)
    await put_all(spool, sent)
    (path,) = tmp_path.iterdir()
    whole = bytearray(path.read_bytes())
    one = len(whole) // 3
    whole[one + one // 2] ^= 1
    path.write_bytes(whole)
    shutil.copy(path, tmp_path / f"{4:09d}-0000.spool")
    (tmp_path / "surprise.spool").write_bytes(b"")
    (tmp_path / "000000009-0000.spool").write_bytes(b"")
    (tmp_path / "000000010-0000.spool").write_bytes(b"not a record, but long enough for one")
    spool, found = await recovered(tmp_path)
    assert found == [sent[0], sent[2]]
    reasons = {d.path.name: d.reason for d in reversed(spool.damages)}
    assert "checksum" in reasons["000000003-0000.spool"]
    assert reasons["000000004-0000.spool"] == "a trajectory of group 3, not 4"
    assert "not the beginning of a record" in reasons["000000010-0000.spool"]
    assert "not a file of the spool" in reasons["surprise.spool"]
    assert len(spool.damages) == 1 + 3 + 1 + 1
    await spool.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
async def test_a_disk_that_fails_is_waited_for_and_leaves_no_half_record(tmp_path, monkeypatch, code):
    """It takes half a record and fails; one that is broken does not shrink the file either. What comes next is found."""
    told: list[str] = []
    spool = Spool(tmp_path, DISK, report_event=tell(told), retry_seconds=0.05)
    await put_all(spool, [sampled(0)])
    real, failures = (os.writev, os.ftruncate), [3]

    def writev(descriptor: int, buffers: Any) -> int:
        if failures[0]:
            failures[0] -= code == errno.ENOSPC
            real[0](descriptor, buffers[:2])
            raise OSError(code, "it failed")
        return real[0](descriptor, buffers)

    def ftruncate(descriptor: int, size: int) -> None:
        if failures[0] and code == errno.EIO:
            failures[0] -= 1
            raise OSError(code, "it failed")
        real[1](descriptor, size)

    monkeypatch.setattr(disk.os, "writev", writev)
    monkeypatch.setattr(disk.os, "ftruncate", ftruncate)
    await put_all(spool, [sampled(1)])
    assert failures == [0]
    assert told == ["spool_stalled", "spool_goes_on"]
    assert spool.stalled_seconds > 0.1
    assert spool.nbytes == sum(p.stat().st_size for p in tmp_path.iterdir())
    await spool.close()
    spool, found = await recovered(tmp_path)
    assert found == [sampled(0), sampled(1)]
    assert spool.damages == []


async def test_writes_that_come_up_short_are_completed(tmp_path, monkeypatch):
    real = os.writev
    monkeypatch.setattr(disk.os, "writev", lambda fd, buffers: real(fd, [bytes(buffers[0])[:5]]))
    monkeypatch.setattr(disk, "WRITEV_BUFFERS", 3)
    spool = Spool(tmp_path, DISK)
    await put_all(spool, [sampled(0)])
    await spool.close()
    _, found = await recovered(tmp_path)
    assert found == [sampled(0)]


def test_the_format_is_what_the_docstring_says(tmp_path):
    """Read by a program that shares no code with the spool."""
    frames = [b"header", b"", bytes(range(17))]
    assert SPOOL_FORMAT.append_record(tmp_path / "f", frames, fsync=False) == (0, 16 + 24 + 8 + 0 + 24)
    script = """
import struct, sys, zlib
data = open(sys.argv[1], "rb").read()
magic, count, crc = struct.unpack("<8sII", data[:16])
lengths = struct.unpack(f"<{count}Q", data[16:16 + 8 * count])
assert magic == b"r3spool1" and zlib.crc32(data[16:16 + 8 * count]) == crc
at = 16 + 8 * count
for n in lengths:
    print(data[at:at + n].hex())
    at += -(-n // 8) * 8
assert at == len(data)
"""
    out = subprocess.run([sys.executable, "-c", script, tmp_path / "f"], capture_output=True, check=True, timeout=LIMIT)
    assert out.stdout.decode().split("\n")[:-1] == [f.hex() for f in frames]


ON_DISK_ONLY = BufferConfig(durability="disk", memory_bytes=1)


async def test_acknowledged_means_written(tmp_path, monkeypatch):
    """While the disk takes nothing, nothing is acknowledged, nobody gives up, and what waits is neither lost nor doubled.
    The spool says that it waits, and why."""
    broken = [True]
    real = RecordFormat.append_record

    def append(*args: Any, **options: Any) -> Any:
        if broken[0]:
            raise OSError(errno.EIO, "broken")
        return real(*args, **options)

    monkeypatch.setattr(RecordFormat, "append_record", append)
    spool = Spool(tmp_path, DISK, retry_seconds=0.05)
    assert spool.wait_state is None
    inbox = Inbox()
    config = TransportConfig(ack_timeout=1.5)
    async with receiving(inbox, config, store=spool) as (receiver, endpoint), sending(endpoint, config) as sender:
        await send_all(sender, [sampled(i) for i in range(3)])
        assert await sender.flush(3 * config.ack_timeout) == 3
        assert (sender.acked, sender.reconnects, receiver.received) == (0, 0, 0)
        assert ("broken" in spool.wait_state["why"], spool.wait_state["full"]) == (True, False)
        broken[0] = False
        assert await sender.flush(LIMIT) == 0
        assert spool.wait_state is None
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
        # Trained from groups 0 and 1, and died before `commit` was called.
        ledger = TrajectoryLedger(ConsumedGroups(head=2))
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
    for sample in (t.samples[0] for t in sent):
        routes = np.repeat(sample.table["routed_experts"], 24, axis=1)
        sample.table = sample.table.with_columns(routed_experts=routes)
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
        await until(lambda: sender.acked == 3)
    await spool.close()


async def test_a_spool_that_is_full_slows_down_says_so_and_lets_the_next_step_through(tmp_path):
    """What a step does not wait for fills `disk_bytes` at most; what it waits for is taken beyond them, until a checkpoint."""
    sent = [sampled(i, 2000, group=i) for i in range(8)]
    told, limit = list[str](), 3 * memory_size(sent[0])
    spool = Spool(tmp_path, BufferConfig(durability="disk", disk_bytes=limit), report_event=tell(told))
    inbox = Inbox()
    async with receiving(inbox, SLOW, store=spool, window=1) as (receiver, endpoint), sending(endpoint, SLOW) as sender:
        early = 7
        while "spool_full" not in told:  # one by one, so that as many as there can be are taken before their time
            await sender.send(sent[early])
            await until(lambda: f"t{early}" in inbox.seen or "spool_full" in told)  # noqa: B023
            early -= 1
        assert spool.nbytes <= limit
        assert spool.wait_state["full"]
        feed = asyncio.gather(*(sender.send(t) for t in reversed(sent[: early + 1])))
        for group in range(8):
            await until(lambda: f"t{group}" in inbox.seen)  # noqa: B023
            record = spool.nbytes / len(spool.groups)
            waited_for = [kept for kept in spool.groups if kept <= group]
            assert spool.nbytes <= limit + len(waited_for) * record
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
    receiver = TrajectoryReceiver("run", settings, keys=SERVER_KEYS, port=int(port), store=spool)
    await inbox.start(receiver)
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
            await asyncio.wait_for(feed, 120)
            assert await sender.flush(30) == 0
    spool, found = await recovered(spool_dir)
    assert sorted(t.trajectory_id for t in found) == sorted(f"t{i}" for i in range(count))
    await spool.close()
