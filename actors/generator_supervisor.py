"""The generators that play, join and leave during a run, as the conductor sees them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from r3async.actors.lease_dispatcher import LeaseDispatcher
from r3async.actors.weight_transport import check_can_join
from r3async.config import Config
from r3async.rollout.engine import EngineLostError
from r3async.schedule.health import HealthState, RestartsExhausted
from r3async.world import ActorLostError, ActorRef, World
from r3async.world.stages import create_stage_task

from .fleet import Fleet, FleetGenerator, end_generator
from .process import RPC_SECONDS, ProcessLost, RunFailed, end_process
from .version_delivery import VersionDelivery

LEAVE_STOP_SECONDS = 10.0
"""Seconds that a generator which leaves may take to end in order."""


class _StartContext(NamedTuple):
    """The arguments of `GeneratorSupervisor.begin_supervision`."""

    installer: VersionDelivery
    conductor: ActorRef
    reference_report: Mapping[str, Any]
    hosts: set[str]


MAX_START_FAILURES = 2
"""Number of times in a row that a generator may fail in the same way before it has played an
episode: its next process would fail, too."""


class GeneratorRestartsExhausted(RunFailed):
    """A generator was lost more often than it may be restarted, or fails at each start."""


class GeneratorSupervisor:
    """The generators that play, are restarted, join and leave during the run. Lives on the
    conductor's event loop.

    Args:
        events: A structlog logger.
        stop_requested: After it, a generator that is lost is not restarted.
    """

    def __init__(
        self,
        world: World,
        config: Config,
        events: Any,
        fleet: Fleet,
        dispatcher: LeaseDispatcher,
        stop_requested: asyncio.Event,
    ):
        self._world = world
        self._config = config
        self._events = events
        self._clock = world.clock.monotonic
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._stop_requested = stop_requested
        self._start_context: _StartContext | None = None
        self._playing_begun = asyncio.Event()
        self.excluded_ids: list[str] = []
        """Ids of generators that were lost too often, and without which the run goes on."""
        self._play_tasks: dict[str, asyncio.Task[None]] = {}

    def begin_supervision(
        self,
        installer: VersionDelivery,
        conductor: ActorRef,
        reference_report: Mapping[str, Any],
        hosts: set[str],
    ) -> None:
        """Note that the generators of the start have weights, and what a generator that joins later
        is checked against.

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
        """Keep all generators playing, until cancelled. Raises what one of them fails with, if
        that ends the run."""
        # Start the generators that have their first weights; one that was lost meanwhile is
        # restarted first.
        for generator in self._fleet:
            self._start_playing(generator)
        self._playing_begun.set()  # from now on generators may join and leave
        try:
            while True:
                # Clear before looking, so that a task that ends meanwhile leads to another look.
                self._fleet.restarts_due.clear()
                for generator in list(self._fleet):
                    playing = self._play_tasks.get(generator.generator_id)
                    # A cancelled task is a generator that leaves, which `remove_generator` handles.
                    if playing is not None and playing.done() and not playing.cancelled():
                        self._handle_ended(generator, playing)
                    # A generator that still plays is restarted when it is lost, without a request.
                    generator.is_restart_requested = False
                await self._fleet.restarts_due.wait()
        finally:
            # Without this loop nobody would handle their losses.
            for task in self._play_tasks.values():
                task.cancel()
            await asyncio.gather(*self._play_tasks.values(), return_exceptions=True)

    def _handle_ended(self, generator: FleetGenerator, ended: asyncio.Task[None]) -> None:
        """Exclude a generator that was lost too often, if another one still plays, and
        restart one that is needed again (`Fleet.request_restart`). Raises what it failed
        with, if that ends the run."""
        name = generator.generator_id
        try:
            ended.result()
        except GeneratorRestartsExhausted as error:
            if not any(
                g is not generator and not g.is_finished and not g.is_leaving for g in self._fleet
            ):
                raise
            self._events.error(
                "generator_excluded", generator=name, pid=generator.pid, error=str(error)
            )
            self.excluded_ids.append(name)
            self._world.actors.kill_actor(generator.handle)
            self._drop_generator(generator)
        else:
            if generator.is_restart_requested:
                self._fleet.mark_lost(generator)
                generator.is_finished = False
                self._start_playing(generator)

    def _start_playing(self, generator: FleetGenerator) -> None:
        playing = create_stage_task("deliver", self._supervise_generator(generator))
        playing.add_done_callback(lambda _: self._fleet.restarts_due.set())
        self._play_tasks[generator.generator_id] = playing

    async def add_generator(self, generator_id: str, handle: ActorRef) -> str:
        """Admit a process that was just started: have it load, install the current weights and be
        probed, then lease.

        Returns "" if it is a member now. Otherwise returns the reason, and it is no member. Waits
        until the run plays.
        """
        await self._playing_begun.wait()
        before = self._clock()
        start = self._context
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
            self._events.error(
                "generator_refused", generator=generator_id, host=generator.process[1], error=reason
            )
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
        self._fleet.announce_change()
        return ""

    def _check_compatible(self, report: Mapping[str, Any]) -> None:
        """Check that a generator that joins has the tasks and routing of the others, and that
        weights reach it. Raises `RunFailed` if it is not like the others, and `ValueError` if
        weights cannot reach its host."""
        start = self._context
        for what in ("tasks", "routing"):
            if report[what] != start.reference_report[what]:
                raise RunFailed(
                    f"it has other {what} than the rest of the fleet: {report[what]}, not "
                    f"{start.reference_report[what]}"
                )
        check_can_join(
            self._config,
            start.installer.learner_address.weight_backend,
            start.hosts,
            report["host"],
        )

    async def remove_generator(self, generator_id: str) -> None:
        """Remove a generator: lease it nothing more, let it finish what it plays, for
        `TimeLimits.leave` at most, and end its engine. What it has not delivered by then is
        leased again. Waits until the run plays."""
        await self._playing_begun.wait()
        generator = self._fleet.generators.get(generator_id)
        if generator is None:
            return
        before = self._clock()
        playing = self._play_tasks.get(generator_id)
        self._dispatcher.stop_leasing(generator_id)
        if playing is not None:
            await asyncio.wait([playing], timeout=self._config.supervise.limits.leave)
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)
        finished = generator.is_finished
        # It gets no more weights, which a stopped engine would not install.
        self._fleet.mark_lost(generator)
        with contextlib.suppress(Exception):
            await generator.handle.call("stop", timeout=LEAVE_STOP_SECONDS)
        self._world.actors.kill_actor(generator.handle)  # before others play what it was leased
        again = await self._dispatcher.requeue_lost(generator)
        self._drop_generator(generator)
        seconds_taken = round(self._clock() - before, 2)
        self._events.info(
            "generator_left",
            generator=generator_id,
            pid=generator.pid,
            finished=finished,
            leased_again=again,
            seconds=seconds_taken,
        )

    def _drop_generator(self, generator: FleetGenerator) -> None:
        self._play_tasks.pop(generator.generator_id, None)
        if generator.state is not HealthState.LOST:
            self._fleet.mark_lost(generator)
        self._dispatcher.forget_generator(generator.generator_id)
        self._fleet.remove(generator.generator_id)
        self._fleet.announce_change()

    # -- restarts ----------------------------------------------------------------------------------

    async def _supervise_generator(self, generator: FleetGenerator) -> None:
        """Keep one generator playing until it has nothing more to play, or is lost while it leaves.

        After a loss its leases are taken back; the restarted process installs current weights
        before it plays. Raises `GeneratorRestartsExhausted` after `generator.max_restarts`, or
        after `MAX_START_FAILURES`, and what the generator itself raised.
        """
        while True:
            try:
                if generator.state is HealthState.LOST:
                    await self._restart_generator(generator)
                await self._play_leases(generator)
                generator.is_finished = True
                return
            except ProcessLost:
                raise
            except ActorLostError as error:
                if self._stop_requested.is_set():
                    return
                # Before anything is awaited, so that it gets no more leases.
                self._fleet.mark_lost(generator)
                self._fleet.report_lost(
                    generator, error, await self._dispatcher.requeue_lost(generator)
                )
                if generator.is_leaving:
                    return

    async def _play_leases(self, generator: FleetGenerator) -> None:
        """Have a generator play until nothing is left to play. If its engine is lost, its process
        is ended, and that is a loss like any other: raises `ActorLostError`."""
        try:
            await generator.handle.call("run", self._context.conductor)
        except EngineLostError as error:
            await end_generator(self._world, generator, f"its engine is lost: {error}")
            raise ActorLostError(f"{generator.generator_id}: {generator.end_reason}") from error

    async def _restart_generator(self, generator: FleetGenerator) -> None:
        """Wait for the process to be restarted, load the engine, install the current weights.

        The process itself is restarted at once. The back-off comes here, before the engine is
        loaded: what it loads may be what kills it. If only the connection was lost, the process
        lives: it has its engine, and ends what it plays, because others play that now.
        """
        health = generator.health
        began = self._clock()
        wait = generator.health.seconds_to_restart
        process = generator.process
        if generator.equal_start_failures >= MAX_START_FAILURES:
            raise GeneratorRestartsExhausted(
                f"{generator.generator_id} failed {generator.equal_start_failures} times in the "
                f"same way before it had played an episode: {generator.last_loss_reason}; see "
                f"logs/{generator.generator_id}.log"
            )
        try:
            health.begin_restart()
        except RestartsExhausted as error:
            raise GeneratorRestartsExhausted(
                f"{generator.generator_id} was lost {generator.restarts + 1} times "
                f"(generator.max_restarts = {self._config.generator.max_restarts}), the last time "
                f"by: {generator.last_loss_reason or 'its end'}; see "
                f"logs/{generator.generator_id}.log"
            ) from error
        await asyncio.sleep(wait)
        await self._reload_engine(generator)
        if generator.process == process:
            self._fleet.undo_loss(generator)
        await self._context.installer.install_until_current(generator)
        self._fleet.announce_change()  # it may lack weights that were published meanwhile
        if generator.process == process:
            seconds = round(self._clock() - began, 1)
            self._events.warning(
                "generator_recovered",
                generator=generator.generator_id,
                pid=generator.pid,
                seconds=seconds,
            )
            return
        self._events.warning(
            "generator_restarted",
            generator=generator.generator_id,
            pid=generator.pid,
            restarts=generator.restarts,
            version=generator.version,
            waited=round(wait, 2),
            seconds=round(self._clock() - began, 2),
        )

    async def _reload_engine(self, generator: FleetGenerator) -> None:
        """Have a restarted process load its engine and connect. A failure of this counts
        as another loss."""
        try:
            await self._wait_until_alive(
                generator, self._clock() + self._config.supervise.limits.start
            )
            await self._fleet.load_engine(generator)
            await self._context.installer.connect_generator(generator)
        except ActorLostError:
            raise
        except Exception as error:
            await end_process(self._world, generator.handle, *generator.process)
            raise ActorLostError(
                f"{generator.generator_id} was restarted and did not load: {error}"
            ) from error

    async def _wait_until_alive(self, generator: FleetGenerator, deadline: float) -> None:
        """Wait until an actor that is being restarted answers a call; until then its calls fail at
        once. Raises `RunFailed` or `ActorLostError` after `deadline`."""
        while True:
            try:
                await generator.handle.call("describe_process", timeout=RPC_SECONDS)
                return
            except Exception as error:
                if self._clock() > deadline:
                    if isinstance(error, ActorLostError):
                        raise
                    raise RunFailed(
                        f"{generator.generator_id} was restarted and did not answer in time "
                        "(supervise.patience)"
                    ) from error
                await asyncio.sleep(0.5)
