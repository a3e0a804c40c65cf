"""The real world: Ray, ZeroMQ, the disk, the system's clocks, threads and processes."""

from __future__ import annotations

import atexit
import time
import uuid
from functools import cached_property

from r3async.world import Sockets
from r3async.world.appending import RecordFlusher
from r3async.world.disk import SYSTEM_FILES
from r3async.world.processes import SystemProcesses
from r3async.world.ray_cluster import RayActors
from r3async.world.threads import SystemThreads

EXIT_FLUSH_SECONDS = 1.0
"""Seconds to write records that wait when the process exits."""


class RealWorld:
    """The `World` of a process of the real system. There is one for each process; sent to another
    process, it becomes that process's world."""

    clock = time
    """The module `time` satisfies `Clock`."""
    threads = SystemThreads()
    files = SYSTEM_FILES

    @cached_property
    def actors(self) -> RayActors:
        return RayActors(self)

    @cached_property
    def processes(self) -> SystemProcesses:
        return SystemProcesses()

    @cached_property
    def record_flusher(self) -> RecordFlusher:
        keeper = RecordFlusher(world=self)
        atexit.register(_flush_at_exit, keeper)
        return keeper

    def open_sockets(self) -> Sockets:
        from r3async.world.zmq_sockets import ZeroMqSockets

        return ZeroMqSockets()

    def unique_id(self) -> str:
        return uuid.uuid4().hex

    def __reduce__(self) -> tuple[type[_RealWorldReference], tuple[()]]:
        return _RealWorldReference, ()


def _flush_at_exit(keeper: RecordFlusher) -> None:
    deadline = time.monotonic() + EXIT_FLUSH_SECONDS
    while not keeper.retry_writes():
        if time.monotonic() >= deadline:
            keeper.count_unwritten()
            return
        time.sleep(0.1)


class _RealWorldReference:
    """A stand-in that unpickles to this process's world."""

    def __new__(cls) -> RealWorld:  # type: ignore[misc]
        return REAL_WORLD


REAL_WORLD = RealWorld()
