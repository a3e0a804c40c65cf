"""A generator's end of leasing: it asks for leases, and waits for the versions they need."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from r3async.actors.leasing import (
    FLEET_CALLS_PER_SECOND,
    FLEET_HEARTBEATS_PER_SECOND,
    HEARTBEAT_SECONDS,
    MAX_EVENTS_PER_CALL,
    LeaseAnswer,
    LeaseCall,
)
from r3async.config import Config
from r3async.record.routes import parse_episode_id
from r3async.rollout.engine import Engine, EngineLostError, Generation, GenerationRequest
from r3async.schedule.concurrency import ConcurrencyLimiter, useful_concurrency
from r3async.schedule.pace import IdleTimeCounter
from r3async.schedule.run_ahead import GroupLease
from r3async.schedule.task_failures import EpisodeEnd
from r3async.untrusted import decode_msgpack
from r3async.world import ActorRef
from r3async.world.stages import stage

from .process import wait_for_event

ENGINE_POLL_SECONDS = 1.0
"""Maximum seconds between two looks at the engine. Its limit changes every two seconds at most
(`ConcurrencyLimiter`)."""


class VersionGate:
    """A wrapper of `engine` whose requests for a group wait until the engine has the weights that
    the group's lease names (`GroupLease.version`). All attributes but `generate` are those of the
    engine. `woken` is set when the engine is lost."""

    def __init__(self, engine: Engine, woken: asyncio.Event):
        self._engine = engine
        self._woken = woken
        self._loss: EngineLostError | None = None
        self._required_versions: dict[int, int] = {}
        """Required version by group, for groups that were leased before the engine
        had that version."""
        self._released = asyncio.Event()
        self.waiting = 0
        """Number of requests that wait."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def require_version(self, lease: GroupLease) -> None:
        """Make requests of a lease wait for its version. Call this before the lease is played."""
        if lease.version > self._engine.version:
            self._required_versions[lease.group_index] = max(
                lease.version, self._required_versions.get(lease.group_index, 0)
            )

    def release_ready(self) -> None:
        """Release the requests whose version the engine has by now. Call this when the engine may
        have new weights."""
        version = self._engine.version
        if any(needed <= version for needed in self._required_versions.values()):
            self._required_versions = {
                group: needed
                for group, needed in self._required_versions.items()
                if needed > version
            }
            self._released.set()
            self._released = asyncio.Event()

    def raise_if_lost(self) -> None:
        """Raise `EngineLostError` if a request has found that the engine is lost."""
        if self._loss is not None:
            raise self._loss

    async def generate(self, request: GenerationRequest) -> Generation:
        """Call `Engine.generate` once the engine has the version that the
        request's group requires."""
        which = parse_episode_id(request.request_id) if self._required_versions else None
        self.waiting += 1
        try:
            while which is not None and which.group_index in self._required_versions:
                await self._released.wait()
        finally:
            self.waiting -= 1
        try:
            return await self._engine.generate(request)
        except EngineLostError as error:
            self._loss = error
            self._woken.set()
            raise


class LeaseClient:
    """A generator's end of leasing: its calls to the conductor (`LeaseCall`). `GeneratorActor.run`
    is the loop that makes them.

    A call is due when a group fits and no other call waits for one, and as a heartbeat. A lease for
    weights that the engine does not have yet is played up to its first call of the `engine`.

    Args:
        process: Pid and host of this process.
        woken: Event that wakes the generator's loop: an answer has come, an episode is over, the
            engine has new weights.
    """

    def __init__(
        self,
        config: Config,
        clock: Callable[[], float],
        engine: VersionGate,
        *,
        generator_id: str,
        process: tuple[int, str],
        conductor: ActorRef,
        woken: asyncio.Event,
    ):
        settings = config.generator
        schedule = config.schedule
        self._clock = clock
        self._engine = engine
        self._woken = woken
        self._generator_id = generator_id
        self._process = process
        self._conductor = conductor
        self._schedule = schedule
        self._silence_seconds = config.supervise.silence_seconds
        self._set_fleet_size(settings.count)
        self._lease_size = schedule.group_size if schedule.split == "idle" else 1
        self._concurrency = ConcurrencyLimiter(1, settings.concurrency, clock)
        self._idle_counter = IdleTimeCounter(clock)
        self.open_calls: dict[asyncio.Task[LeaseAnswer], int] = {}
        """Calls that are not answered yet, with the number of episodes that each requests. When a
        later call overtakes one, it is answered at once."""
        self.playing_count = 0
        """Number of episodes that the generator plays, from their lease on. One that waits to
        be sent has ended."""
        self.has_more = True
        """False if the conductor has answered that nothing will be left to lease."""
        self._last_call_at = -math.inf

    def _set_fleet_size(self, fleet: int) -> None:
        """Set the intervals and the useful concurrency that follow from the
        number of generators."""
        self._fleet_size = fleet
        heartbeat = max(HEARTBEAT_SECONDS, fleet / FLEET_HEARTBEATS_PER_SECOND)
        self._heartbeat_seconds = min(heartbeat, self._silence_seconds / 4)
        self._call_gap_seconds = min(fleet / FLEET_CALLS_PER_SECOND, self._heartbeat_seconds)
        self._useful_concurrency = useful_concurrency(self._schedule, fleet)

    @property
    def _free_episodes(self) -> int:
        """The number of episodes that could start now."""
        return max(0, self._concurrency.limit - self.playing_count) if self.has_more else 0

    @property
    def _min_free_episodes(self) -> int:
        """The number of free places that makes a call worthwhile: a group is leased whole if
        it can ever fit."""
        return self._lease_size if self._lease_size <= self._concurrency.limit else 1

    @property
    def _is_waiting(self) -> bool:
        """True if a call waits for a group."""
        return any(free >= self._min_free_episodes for free in self.open_calls.values())

    @property
    def _next_call_at(self) -> float:
        """The time of the next call, in seconds of the clock."""
        wanted = self._free_episodes >= self._min_free_episodes and not self._is_waiting
        return self._last_call_at + (self._call_gap_seconds if wanted else self._heartbeat_seconds)

    @property
    def is_call_due(self) -> bool:
        """True if the conductor should be called now: a group fits, or a heartbeat is due."""
        return self._clock() >= self._next_call_at

    def begin_call(
        self, load: Mapping[str, float], ended: list[EpisodeEnd], events: Sequence[bytes]
    ) -> None:
        """Call the conductor for as many episodes as could start now. The call is in `open_calls`
        until it is answered.

        Args:
            load: Statistics of the generator, to which those of the engine are added.
            ended: Ends of episodes since the last call.
            events: Lines of the event log that the conductor has to write.
        """
        free = self._free_episodes
        self._last_call_at = self._clock()
        calling = asyncio.create_task(self._call_conductor(free, load, ended, events))
        calling.add_done_callback(lambda _: self._woken.set())
        self.open_calls[calling] = free

    async def send_last_report(
        self, load: Mapping[str, float], ended: list[EpisodeEnd], events: Sequence[bytes]
    ) -> None:
        """Report the last episodes and events to the conductor, and request no more leases."""
        await self._call_conductor(0, load, ended, events)

    async def _call_conductor(
        self, free: int, load: Mapping[str, float], ended: list[EpisodeEnd], events: Sequence[bytes]
    ) -> LeaseAnswer:
        with stage("metrics"):
            stats = self._observe_engine() | {
                "limit": self._concurrency.limit,
                "playing": self.playing_count,
                **load,
                "held": self._engine.waiting,
            }
            stats |= self._idle_counter.read_counters(stats.get("pause_seconds", 0.0))
        wait = self._heartbeat_seconds if free else 0.0
        told = list(events[-MAX_EVENTS_PER_CALL:])
        call = LeaseCall(self._generator_id, self._process, free, stats, ended, wait, told)
        answer = await self._conductor.call("lease_groups", msgspec.msgpack.encode(call))
        return decode_msgpack(answer, LeaseAnswer)

    def _observe_engine(self) -> dict[str, float]:
        """Read the engine's statistics and adapt the limit of concurrent episodes to them.
        Returns the statistics."""
        stats = self._engine.collect_stats()
        self._concurrency.update_limit(stats, self.playing_count)
        return stats

    async def wait_for_change(self) -> None:
        """Wait until something has happened, or the next look at the engine or the next call is
        due. Counts idle time."""
        places = min(self._concurrency.limit, self._useful_concurrency)
        held = self._engine.waiting
        empty = max(0, places - self.playing_count + held) if self._is_waiting or held else 0
        requests = self._observe_engine()["running"]
        # An idle generator stays idle until it is woken.
        look = ENGINE_POLL_SECONDS if self.playing_count or requests else self._heartbeat_seconds
        await wait_for_event(self._woken, min(look, max(0.0, self._next_call_at - self._clock())))
        self._woken.clear()
        self._idle_counter.add_interval(places, empty, requests)

    def take_leases(self) -> list[GroupLease]:
        """Return what was leased since the last time. Raises what a call has failed with."""
        leases: list[GroupLease] = []
        for call in [call for call in self.open_calls if call.done()]:
            del self.open_calls[call]
            answer = call.result()
            self.has_more = answer.more
            if answer.fleet not in (0, self._fleet_size):
                self._set_fleet_size(answer.fleet)
            leases += answer.leases
        return leases
