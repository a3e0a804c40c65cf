"""Stand-ins for everything outside of a process."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

from r3async.world import ActorRef
from r3async.world.real import REAL_WORLD, RealWorld


class Reports(list):
    """All that was reported to it: events and their facts, in pairs."""

    def __call__(self, event: str, **facts: Any) -> None:
        self.append((event, facts))


class Clock:
    """A clock in seconds that stands still until `now` is set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Outside(RealWorld):
    """A world without processes and actors: it remembers which ones it was asked to end, or to write stacks."""

    def __init__(self, clock: Clock):
        self.asked: list[tuple[int, str]] = []
        self.killed: list[tuple[Any, ...]] = []
        self.lingers = 0
        """Number of times that a process is still seen after a request to end."""
        self.disconnected = 0
        self.released: list[Any] = []
        self.clock = SimpleNamespace(monotonic=clock, time=time.time)  # type: ignore[assignment]
        self.processes = SimpleNamespace(  # type: ignore[assignment]
            dump_stacks=REAL_WORLD.processes.dump_stacks,
            is_alive=self.is_alive,
            request_stack_dump=lambda *where: self.asked.append(where),
            kill_process=lambda *where: self.killed.append(where),
        )
        self.actors = SimpleNamespace(  # type: ignore[assignment]
            kill_actor=self.kill_actor,
            put=lambda value: value,
            release_bundles=self.released.append,
            leave_cluster=self.leave_cluster,
        )

    def kill_actor(self, actor: ActorRef, *, restart: bool = False) -> None:
        self.killed.append((actor, restart))

    def is_alive(self, pid: int, host: str) -> bool:
        self.lingers -= 1
        self.killed += [("ended", pid)] if self.lingers == 0 else []
        return self.lingers > 0

    def leave_cluster(self) -> None:
        self.disconnected += 1


class StandIn:
    """An actor of this process. Its methods are passed in or defined by a subclass, or one `answer` serves all."""

    name = ""

    def __init__(self, **methods: Any):
        self.__dict__ |= methods

    async def call(self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        async with asyncio.timeout(timeout):
            return await self.answer(method, *args, **kwargs)

    async def answer(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self, method)(*args, **kwargs)
