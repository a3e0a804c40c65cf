"""Mutated spool files into recovery."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

from r3async.config import BufferConfig
from r3async.schedule.spool import SPOOL, Spool
from r3async.tools.fuzz.common import WARM, Report, mutate_bytes, resident, specimen
from r3async.transport import wire


async def fuzz_spool(count: int, seed: int, directory: Path) -> Report:
    """Raises `AssertionError` for a file that gave what was not written, or lost something without a word."""
    chance = random.Random(seed)
    written = [specimen(5, (9, 40)), specimen(10, (130,)), specimen(15, (3, 4, 64))]
    path = directory / f"{0:09d}-0000.spool"
    ends = {0}
    for trajectory in written:
        offset, length = SPOOL.append(path, wire.encode_trajectory(trajectory), fsync=False)
        ends.add(offset + length)
    whole = path.read_bytes()
    outcomes: Counter[str] = Counter()
    spool = Spool(directory, BufferConfig(durability="disk"))
    began, slowest, warm = time.perf_counter(), 0.0, 0
    for n in range(count):
        data = whole
        for _ in range(chance.randint(1, 2)):
            data = mutate_bytes(chance, data)
        path.write_bytes(data)
        start = time.perf_counter()
        found, _, damage = spool._scan()
        slowest = max(slowest, time.perf_counter() - start)
        assert all(kept.trajectory in written for kept in found), "read what was not written"
        assert all(d.reason for d in damage), "damage without a reason"
        # Cut where a record ends is a file to which nothing more was written.
        assert damage or len(found) == len(written) or len(data) in ends, "lost without a word"
        outcomes["refused with a reason" if damage else "read, equal"] += 1
        outcomes["trajectories that were saved from damaged files"] += len(found) if damage else 0
        if n == int(count * WARM):
            warm = resident()
    await spool.close()
    seconds = time.perf_counter() - began
    return Report(count, seconds, slowest, (resident() - warm) / 2**20, dict(outcomes))
