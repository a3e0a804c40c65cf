"""The real world: Ray, ZeroMQ, the disk, the system's clocks, threads and processes."""

from __future__ import annotations

import atexit
import time
import uuid
from functools import cached_property
from typing import TYPE_CHECKING

from r3async.world import Sockets
from r3async.world.disk import Disk
from r3async.world.processes import SystemProcesses
from r3async.world.ray import RayActors
from r3async.world.threads import SystemThreads

if TYPE_CHECKING:
    from r3async.world.appending import Keeper


EXIT_SECONDS = 1.0
"""For records that wait when the process exits."""


class RealWorld:
    """See `World`. One for each process; sent to another process, it becomes that one's."""

    clock = time
    """The module is one."""
    threads = SystemThreads()
    files = Disk()

    @cached_property
    def actors(self) -> RayActors:
        return RayActors()

    @cached_property
    def processes(self) -> SystemProcesses:
        return SystemProcesses()

    @cached_property
    def keeper(self) -> Keeper:
        from r3async.world.appending import Keeper

        keeper = Keeper(world=self)
        atexit.register(_finish, keeper)
        return keeper

    def sockets(self) -> Sockets:
        from r3async.world.zeromq import ZeroMqSockets

        return ZeroMqSockets()

    def unique(self) -> str:
        return uuid.uuid4().hex

    def __reduce__(self) -> tuple[type[_Real], tuple[()]]:
        return _Real, ()


def _finish(keeper: Keeper) -> None:
    deadline = time.monotonic() + EXIT_SECONDS
    while not keeper.retry():
        if time.monotonic() >= deadline:
            keeper.count_lost()
            return
        time.sleep(0.1)


class _Real:
    """Unpickles to this process's world."""

    def __new__(cls) -> RealWorld:  # type: ignore[misc]
        return REAL


REAL = RealWorld()
