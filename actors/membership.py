"""The generators that play, join and leave during a run, as the conductor sees them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from r3async.config import Config
from r3async.schedule.health import HealthState
from r3async.world import ActorRef
from r3async.world.stages import create_stage_task

from .delivery import check_can_join
from .fleet import Fleet, FleetGenerator
from .installer import GeneratorRestartsExhausted, VersionInstaller
from .leasing import LeaseDispatcher
from .process import ProcessLost, RunFailed

LEAVE_STOP_SECONDS = 10.0
"""Seconds that a generator which leaves may take to end in order."""


class _StartContext(NamedTuple):
    """The arguments of `FleetMembership.begin_membership`."""

    installer: VersionInstaller
    conductor: ActorRef
    reference_report: Mapping[str, Any]
    hosts: set[str]


class FleetMembership:
    """The generators that play, join and leave during the run. Lives on the conductor's event loop.

    Args:
        events: A structlog logger.
        requeue_leases: `requeue_leases(generator)` takes back its leases and returns the groups that are leased again.
        on_resize: Called when a generator has joined or left.
        is_stopping: `is_stopping()` is True when the run is ending.
        clock: Clock in seconds.
    """

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
        """Ids of generators that were lost too often, and without which the run goes on."""
        self._play_tasks: dict[str, asyncio.Task[None]] = {}
        self._task_ended = asyncio.Event()
        """Event that is set when one of `_play_tasks` may have ended."""

    def begin_membership(
        self, installer: VersionInstaller, conductor: ActorRef, reference_report: Mapping[str, Any], hosts: set[str]
    ) -> None:
        """Note that the generators of the start have weights, and what a generator that joins later is checked against.

        Args:
            conductor: The conductor's own actor handle.
            reference_report: What one generator of the start reported about itself.
            hosts: Hosts of the learner and the fleet.
        """
        self._start_context = _StartContext(installer, conductor, reference_report, hosts)

    @property
    def _context(self) -> _StartContext:
        if self._start_context is None:
            raise RunFailed("the run has no weights yet")
        return self._start_context

    async def run(self) -> None:
        """Keep all generators playing, until cancelled. Raises what one of them fails with, if that ends the run."""
        # Start the generators that have their first weights; one that was lost meanwhile is restarted first.
        for generator in self._fleet:
            self._start_playing(generator)
        self._playing_begun.set()  # from now on generators may join and leave
        try:
            while True:
                # Clear before looking, so that a task that ends meanwhile leads to another look.
                self._task_ended.clear()
                for name, task in list(self._play_tasks.items()):
                    # A cancelled task is a generator that leaves, which `remove_generator` handles.
                    if task.done() and not task.cancelled():
                        self._handle_ended(name, task)
                await self._task_ended.wait()
        finally:
            # Without this loop nobody would handle their losses.
            for task in self._play_tasks.values():
                task.cancel()
            await asyncio.gather(*self._play_tasks.values(), return_exceptions=True)

    def _handle_ended(self, name: str, ended: asyncio.Task[None]) -> None:
        """Exclude a generator that was lost too often, if another one still plays. Raises what it failed with, if that
        ends the run."""
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
        """Restart a lost generator that is needed again, if it had nothing more to play: then nobody else restarts
        it."""
        playing = self._play_tasks.get(generator.generator_id)
        if playing is not None and playing.done():
            self._fleet.mark_lost(generator)
            generator.is_finished = False
            self._start_playing(generator)

    async def add_generator(self, generator_id: str, handle: ActorRef) -> str:
        """Admit a process that was just started: have it load, install the current weights and be probed, then lease.

        Returns "" if it is a member now. Otherwise returns the reason, and it is no member. Waits until the run plays.
        """
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
        """Check that a generator that joins has the tasks and routing of the others, and that weights reach it. Raises
        `RunFailed` if it is not like the others, and `ValueError` if weights cannot reach its host."""
        start = self._context
        for what in ("tasks", "routing"):
            if report[what] != start.reference_report[what]:
                raise RunFailed(
                    f"it has other {what} than the rest of the fleet: {report[what]}, not {start.reference_report[what]}"
                )
        check_can_join(self._config, start.installer.learner_address.weight_backend, start.hosts, report["host"])

    async def remove_generator(self, generator_id: str) -> None:
        """Remove a generator: lease it nothing more, let it finish what it plays, for `supervise.leave_seconds` at
        most, and end its engine. What it has not delivered by then is leased again. Waits until the run plays."""
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
        self._fleet.mark_lost(generator)  # it gets no more weights, which a stopped engine would not install
        with contextlib.suppress(Exception):
            await generator.handle.call("stop", timeout=LEAVE_STOP_SECONDS)
        self._kill(generator.handle)  # before others play what it was leased
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
