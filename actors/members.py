"""Generators that join and leave while the run goes on, as the conductor sees it. Who asks for them: `crew.py`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from r3async.actors.delivery import joins
from r3async.actors.fleet import Fleet, Generator
from r3async.actors.installer import Exhausted, Installer
from r3async.actors.leasing import Dispatch
from r3async.actors.process import ProcessLost, RunFailed
from r3async.config import Config
from r3async.schedule.health import HealthState
from r3async.world import ActorRef
from r3async.world.stages import begin_task

STOP_SECONDS = 10.0
"""In which a generator that leaves ends in order."""


class _Started(NamedTuple):
    """See `Members.begin`."""

    installer: Installer
    me: ActorRef
    known: Mapping[str, Any]
    hosts: set[str]


class Members:
    """Lives on the conductor's event loop. `lost(generator)`: returns its leases, and says which groups are leased again.
    `changed()` is called when the fleet is another one. `events`: a structlog logger. `clock`: in seconds."""

    def __init__(
        self,
        config: Config,
        events: Any,
        fleet: Fleet,
        dispatch: Dispatch,
        lost: Callable[[Generator], Awaitable[list[int]]],
        changed: Callable[[], object],
        stopping: Callable[[], bool],
        kill: Callable[[ActorRef], object],
        clock: Callable[[], float],
    ):
        self._config, self._events, self._kill, self._clock = config, events, kill, clock
        self._fleet, self._dispatch = fleet, dispatch
        self._stopping, self._lost, self._changed = stopping, lost, changed
        self._started: _Started | None = None
        self._begun = asyncio.Event()
        self.excluded: list[str] = []
        """Those without which the run goes on, for they were lost too often."""
        self._playing: dict[str, asyncio.Task[None]] = {}
        self._ended = asyncio.Event()
        """One of these may have."""

    def begin(self, installer: Installer, me: ActorRef, known: Mapping[str, Any], hosts: set[str]) -> None:
        """The generators of the start have weights. `me`: the conductor. `known`: what one of them reported of itself.
        `hosts`: of the learner and the fleet."""
        self._started = _Started(installer, me, known, hosts)

    @property
    def _start(self) -> _Started:
        if self._started is None:
            raise RunFailed("the run has no weights yet")
        return self._started

    async def run(self) -> None:
        """Keep all playing, until cancelled. Raises what one of them fails with, if that ends the run."""
        for generator in self._fleet:
            self._play(generator)
        self._begun.set()  # the fleet is another one from now on
        try:
            while True:
                self._ended.clear()
                for name, task in list(self._playing.items()):
                    if task.done() and not task.cancelled():
                        self._look_at(name, task)
                await self._ended.wait()
        finally:
            for task in self._playing.values():
                task.cancel()
            await asyncio.gather(*self._playing.values(), return_exceptions=True)

    def _look_at(self, name: str, ended: asyncio.Task[None]) -> None:
        """Go on without one that was lost too often, if another one plays. Raises what it failed with, if that ends the run."""
        try:
            ended.result()
        except Exhausted as error:
            if not any(g.generator_id != name and not g.finished and not g.leaving for g in self._fleet):
                raise
            generator = self._fleet[name]
            self._events.error("generator_excluded", generator=name, pid=generator.pid, error=str(error))
            self.excluded.append(name)
            self._kill(generator.handle)
            self._forget(generator)

    def _play(self, generator: Generator) -> None:
        start = self._start
        playing = start.installer.supervise(generator, start.me, stopping=self._stopping, lost=self._lost)
        task = self._playing[generator.generator_id] = begin_task("deliver", playing)
        task.add_done_callback(lambda _: self._ended.set())

    def revive(self, generator: Generator) -> None:
        """It was lost, and somebody needs it: if it had nothing more to play, nobody else restarts it."""
        playing = self._playing.get(generator.generator_id)
        if playing is not None and playing.done():
            self._fleet.lose(generator)
            generator.finished = False
            self._play(generator)

    async def join(self, generator_id: str, handle: ActorRef) -> str:
        """A process that was just begun: have it load, take the current weights and be probed, then lease. Returns why it cannot,
        and then it is no member; "" if it is one. Waits until the run plays."""
        await self._begun.wait()
        before, start = self._clock(), self._start
        generator = self._fleet.add(generator_id, handle)
        try:
            info = await self._fleet.load_one(generator)
            self._fits(info)
            await start.installer.connect(generator)
            await start.installer.settle(generator)
        except ProcessLost:
            raise
        except Exception as error:
            reason = str(error) or repr(error)
            self._events.error("generator_refused", generator=generator_id, host=generator.process[1], error=reason)
            self._forget(generator)
            return reason
        start.hosts.add(info["host"])
        self._events.info(
            "generator_joined",
            generator=generator_id,
            pid=generator.pid,
            host=info["host"],
            version=generator.version,
            seconds=round(self._clock() - before, 2),
        )
        self._play(generator)
        self._changed()
        return ""

    def _fits(self, info: Mapping[str, Any]) -> None:
        """Raises `RunFailed` if it is not as the others are."""
        start = self._start
        for what in ("tasks", "routing"):
            if info[what] != start.known[what]:
                raise RunFailed(
                    f"it has other {what} than the rest of the fleet: {info[what]}, not {start.known[what]}"
                )
        joins(self._config, start.installer.way.backend, start.hosts, info["host"])

    async def leave(self, generator_id: str) -> None:
        """Lease it nothing more, let it finish what it plays, for `supervise.leave_seconds` at most, and end its engine. What it
        has not delivered then is leased again. Waits until the run plays."""
        await self._begun.wait()
        generator = self._fleet.generators.get(generator_id)
        if generator is None:
            return
        before, playing = self._clock(), self._playing.get(generator_id)
        self._dispatch.retire(generator_id)
        if playing is not None:
            await asyncio.wait([playing], timeout=self._config.supervise.leave_seconds)
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)
        finished = generator.finished
        self._fleet.lose(generator)  # it is given no more weights, which a stopped engine would not install
        with contextlib.suppress(Exception):
            await generator.handle.call("stop", timeout=STOP_SECONDS)
        self._kill(generator.handle)  # before others play what it had
        again = await self._lost(generator)
        self._forget(generator)
        seconds_taken = round(self._clock() - before, 2)
        facts = {"pid": generator.pid, "finished": finished, "leased_again": again, "seconds": seconds_taken}
        self._events.info("generator_left", generator=generator_id, **facts)

    def _forget(self, generator: Generator) -> None:
        self._playing.pop(generator.generator_id, None)
        if generator.state is not HealthState.LOST:
            self._fleet.lose(generator)
        self._dispatch.lost(generator.generator_id)
        self._fleet.remove(generator.generator_id)
        self._changed()
