"""A spool on disk, and trajectories to put into it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from r3async.config import BufferConfig
from r3async.data import wire
from r3async.data.tokens import Trajectory
from r3async.transport.spool import Spool
from tests.helpers.transport import make_trajectory
from tests.helpers.wire import runny_table

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
