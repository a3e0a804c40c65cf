"""The files of a spool: whole records, whatever is torn, damaged or refused by the disk."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

from r3async.config import BufferConfig
from r3async.data import wire
from r3async.data.tokens import SCHEMA
from r3async.transport import encode_trajectory
from r3async.transport.spool import SPOOL_FORMAT, Spool
from r3async.world import disk
from tests.helpers.spool import DISK, put_all, recovered, sampled, tell
from tests.helpers.transport import LIMIT


@pytest.mark.parametrize("fsync", [False, True])
async def test_what_was_put_is_there_after_a_restart(tmp_path, fsync):
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
    more = [sampled(8, group=1), sampled(9, group=2), sampled(3)]  # t3 again: its acknowledgement was lost.
    await put_all(second, more)
    third, found = await recovered(spool.directory)
    assert found == [*sent, *more[:2]]
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


async def test_a_spool_says_while_it_waits_for_its_disk_and_why(tmp_path, monkeypatch):
    spool, full = Spool(tmp_path, DISK, retry_seconds=0.01), [True]
    write = spool._append_record

    def refuse(*args: Any) -> Any:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*args)

    monkeypatch.setattr(spool, "_append_record", refuse)
    assert spool.wait_state is None
    putting = asyncio.create_task(put_all(spool, [sampled(1)]))
    while spool.wait_state is None:
        assert not putting.done()
        await asyncio.sleep(0.01)
    assert "No space left on device" in spool.wait_state["why"]
    assert not spool.wait_state["full"]
    full.clear()
    await asyncio.wait_for(putting, 30)
    assert spool.wait_state is None
    spool.set_waiting(True)
    assert spool.wait_state["full"]
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
