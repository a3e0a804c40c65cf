"""Generators that join and leave while the run goes on, as the conductor sees it. Who asks for them: `crew.py`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from r3async.actors.delivery import check_can_join
from r3async.actors.fleet import Fleet, FleetGenerator
from r3async.actors.installer import GeneratorRestartsExhausted, VersionInstaller
from r3async.actors.leasing import LeaseDispatcher
from r3async.actors.process import ProcessLost, RunFailed
from r3async.config import Config
from r3async.schedule.health import HealthState
from r3async.world import ActorRef
from r3async.world.stages import create_stage_task

LEAVE_STOP_SECONDS = 10.0
"""In which a generator that leaves ends in order."""


class _StartContext(NamedTuple):
    """See `FleetMembership.begin_membership`."""

    installer: VersionInstaller
    conductor: ActorRef
    reference_report: Mapping[str, Any]
    hosts: set[str]


class FleetMembership:
    """Lives on the conductor's event loop. `requeue_leases(generator)`: returns its leases, and says which groups are leased
    again. `on_resize()` is called when the fleet is another one. `events`: a structlog logger. `clock`: in seconds."""

    def __init__(
        self,
        config: Config,
        events: Any,
        fleet: Fleet,
        dispatch: LeaseDispatcher,
        requeue_leases: Callable[[FleetGenerator], Awaitable[list[int]]],
        on_resize: Callable[[], object],
        is_stopping: Callable[[], bool],
        kill: Callable[[ActorRef], object],
        clock: Callable[[], float],
    ):
        self._config, self._events, self._kill, self._clock = config, events, kill, clock
        self._fleet, self._dispatch = fleet, dispatch
        self._is_stopping, self._requeue_leases, self._on_resize = is_stopping, requeue_leases, on_resize
        self._start_context: _StartContext | None = None
        self._playing_begun = asyncio.Event()
        self.excluded_ids: list[str] = []
        """Those without which the run goes on, for they were lost too often."""
        self._play_tasks: dict[str, asyncio.Task[None]] = {}
        self._task_ended = asyncio.Event()
        """One of these may have."""

    def begin_membership(
        self, installer: VersionInstaller, conductor: ActorRef, reference_report: Mapping[str, Any], hosts: set[str]
    ) -> None:
        """The generators of the start have weights. `conductor`: the conductor. `reference_report`: what one of them reported
        of itself. `hosts`: of the learner and the fleet."""
        self._start_context = _StartContext(installer, conductor, reference_report, hosts)

    @property
    def _context(self) -> _StartContext:
        if self._start_context is None:
            raise RunFailed("the run has no weights yet")
        return self._start_context

    async def run(self) -> None:
        """Keep all playing, until cancelled. Raises what one of them fails with, if that ends the run."""
        for generator in self._fleet:
            self._start_playing(generator)
        self._playing_begun.set()  # the fleet is another one from now on
        try:
            while True:
                self._task_ended.clear()
                for name, task in list(self._play_tasks.items()):
                    if task.done() and not task.cancelled():
                        self._handle_ended(name, task)
                await self._task_ended.wait()
        finally:
            for task in self._play_tasks.values():
                task.cancel()
            await asyncio.gather(*self._play_tasks.values(), return_exceptions=True)

    def _handle_ended(self, name: str, ended: asyncio.Task[None]) -> None:
        """Go on without one that was lost too often, if another one plays. Raises what it failed with, if that ends the run."""
        try:
            ended.result()
        except GeneratorRestartsExhausted as error:
            if not any(g.generator_id != name and not g.is_finished and not g.is_leaving for g in self._fleet):
                raise
            generator = self._fleet[name]
            self._events.error("generator_excluded", generator=name, pid=generator.pid, error=str(error))
            self.excluded_ids.append(name)
            self._kill(generator.handle)
            self._drop_generator(generator)

    def _start_playing(self, generator: FleetGenerator) -> None:
        start = self._context
        playing = start.installer.supervise_generator(
            generator, start.conductor, is_stopping=self._is_stopping, requeue_leases=self._requeue_leases
        )
        task = self._play_tasks[generator.generator_id] = create_stage_task("deliver", playing)
        task.add_done_callback(lambda _: self._task_ended.set())

    def revive_generator(self, generator: FleetGenerator) -> None:
        """It was lost, and somebody needs it: if it had nothing more to play, nobody else restarts it."""
        playing = self._play_tasks.get(generator.generator_id)
        if playing is not None and playing.done():
            self._fleet.mark_lost(generator)
            generator.is_finished = False
            self._start_playing(generator)

    async def add_generator(self, generator_id: str, handle: ActorRef) -> str:
        """A process that was just begun: have it load, take the current weights and be probed, then lease. Returns why it cannot,
        and then it is no member; "" if it is one. Waits until the run plays."""
        await self._playing_begun.wait()
        before, start = self._clock(), self._context
        generator = self._fleet.add(generator_id, handle)
        try:
            info = await self._fleet.load_engine(generator)
            self._check_compatible(info)
            await start.installer.connect_generator(generator)
            await start.installer.install_until_current(generator)
        except ProcessLost:
            raise
        except Exception as error:
            reason = str(error) or repr(error)
            self._events.error("generator_refused", generator=generator_id, host=generator.process[1], error=reason)
            self._drop_generator(generator)
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
        self._start_playing(generator)
        self._on_resize()
        return ""

    def _check_compatible(self, report: Mapping[str, Any]) -> None:
        """Raises `RunFailed` if it is not as the others are."""
        start = self._context
        for what in ("tasks", "routing"):
            if report[what] != start.reference_report[what]:
                raise RunFailed(
                    f"it has other {what} than the rest of the fleet: {report[what]}, not {start.reference_report[what]}"
                )
        check_can_join(self._config, start.installer.learner_address.weight_backend, start.hosts, report["host"])

    async def remove_generator(self, generator_id: str) -> None:
        """Lease it nothing more, let it finish what it plays, for `supervise.leave_seconds` at most, and end its engine. What it
        has not delivered then is leased again. Waits until the run plays."""
        await self._playing_begun.wait()
        generator = self._fleet.generators.get(generator_id)
        if generator is None:
            return
        before, playing = self._clock(), self._play_tasks.get(generator_id)
        self._dispatch.stop_leasing(generator_id)
        if playing is not None:
            await asyncio.wait([playing], timeout=self._config.supervise.leave_seconds)
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)
        finished = generator.is_finished
        self._fleet.mark_lost(generator)  # it is given no more weights, which a stopped engine would not install
        with contextlib.suppress(Exception):
            await generator.handle.call("stop", timeout=LEAVE_STOP_SECONDS)
        self._kill(generator.handle)  # before others play what it had
        again = await self._requeue_leases(generator)
        self._drop_generator(generator)
        seconds_taken = round(self._clock() - before, 2)
        facts = {"pid": generator.pid, "finished": finished, "leased_again": again, "seconds": seconds_taken}
        self._events.info("generator_left", generator=generator_id, **facts)

    def _drop_generator(self, generator: FleetGenerator) -> None:
        self._play_tasks.pop(generator.generator_id, None)
        if generator.state is not HealthState.LOST:
            self._fleet.mark_lost(generator)
        self._dispatch.forget_generator(generator.generator_id)
        self._fleet.remove(generator.generator_id)
        self._on_resize()
