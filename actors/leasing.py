"""Leases, at both ends: how a generator asks for them, and how the conductor answers.

A generator makes one kind of call, which is its heartbeat, its statistics, its episodes that are over and its request for leases
in one. A call that finds nothing waits at the conductor, and whoever waits longest is served first. What a call costs does not
grow with the fleet.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from r3async.config import Config
from r3async.record.routes import parse_episode_id
from r3async.record.timeline import CounterGrowth, LagMeter
from r3async.rollout.engine import Engine, Generation, GenerationRequest
from r3async.rollout.episode import GroupPlayer
from r3async.schedule.admission import (
    AdmissionController,
    ConcurrencyLimiter,
    GroupLease,
    IdleTimeCounter,
    useful_concurrency,
)
from r3async.schedule.tasks import EpisodeEnd
from r3async.untrusted import decode_msgpack
from r3async.world import ActorRef
from r3async.world.stages import stage

from .fleet import Fleet, FleetGenerator
from .process import wait_for_event

ENGINE_POLL_SECONDS = 1.0
"""Between two looks, at most, at what the engine does. Its limit changes every two seconds at most (`ConcurrencyLimiter`)."""
HEARTBEAT_SECONDS = 5.0
"""Between two calls of one generator, at most, in a small fleet: whoever is silent is taken for lost."""
FLEET_HEARTBEATS_PER_SECOND = 64
"""Of a large one."""
MAX_EVENTS_PER_CALL = 256
"""Events that one call reports, at most."""
FLEET_CALLS_PER_SECOND = 400
"""Of all generators together, at most. Each takes the conductor about a millisecond, most of it in Ray."""

T = TypeVar("T")


class LeaseCall(msgspec.Struct, frozen=True, array_like=True):
    """A generator's. `process`: its pid and host. `free`: episodes that it could start now. `stats`: the engine's, and how many
    episodes the generator is `playing`, of at most `limit`. `ended`: episodes that are over since the last call. `wait`: seconds
    that the call may wait for leases. `told`: lines of its events, where its host does not see the run's directory."""

    generator_id: str
    process: tuple[int, str]
    free: int
    stats: dict[str, float]
    ended: list[EpisodeEnd] = []
    wait: float = 0.0
    told: list[bytes] = []


class LeaseAnswer(msgspec.Struct, frozen=True, array_like=True):
    """`more` is False when nothing will ever be left to lease, or not to this process: another is in its place, or it is to
    leave. `fleet`: how many generators there are; 0: that is not said."""

    leases: list[GroupLease]
    more: bool
    fleet: int = 0


# -- at a generator ----------------------------------------------------------------------------------------------------


class VersionGate:
    """`engine`, whose requests for a group wait until it has the weights that the group's lease names: `GroupLease.version`.
    Everything but `generate` is the engine's own."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._required_versions: dict[int, int] = {}
        """By group that was leased before the engine had its version: that version."""
        self._released = asyncio.Event()
        self.waiting = 0
        """Requests that wait."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def require_version(self, lease: GroupLease) -> None:
        """Before it is played."""
        if lease.version > self._engine.version:
            self._required_versions[lease.group_index] = max(
                lease.version, self._required_versions.get(lease.group_index, 0)
            )

    def release_ready(self) -> None:
        """The engine may have new weights."""
        version = self._engine.version
        if any(needed <= version for needed in self._required_versions.values()):
            self._required_versions = {
                group: needed for group, needed in self._required_versions.items() if needed > version
            }
            self._released.set()
            self._released = asyncio.Event()

    async def generate(self, request: GenerationRequest) -> Generation:
        """As `Engine.generate`."""
        which = parse_episode_id(request.request_id) if self._required_versions else None
        self.waiting += 1
        try:
            while which is not None and which.group_index in self._required_versions:
                await self._released.wait()
        finally:
            self.waiting -= 1
        return await self._engine.generate(request)


class LeaseClient:
    """Calls the conductor (`LeaseCall`) when a group fits and no other call waits for one, and as a heartbeat.
    Episodes that are over in between are reported together. What is leased for weights that the engine does not have yet is
    played up to its first call of the `engine`.

    `play_lease(lease)` plays one. `ended_episodes`: episodes that are over, to which whoever plays adds before `wake_loop` is
    called. `collect_load()`: further statistics. `raise_failure()` raises what ends it.
    """

    def __init__(
        self,
        config: Config,
        clock: Callable[[], float],
        engine: VersionGate,
        player: GroupPlayer,
        *,
        generator_id: str,
        process: tuple[int, str],
        conductor: ActorRef,
        play_lease: Callable[[GroupLease], Coroutine[Any, Any, None]],
        ended_episodes: list[EpisodeEnd],
        events: list[bytes],
        collect_load: Callable[[], Mapping[str, float]],
        raise_failure: Callable[[], None],
    ):
        settings, schedule = config.generator, config.schedule
        self._clock, self._engine, self._player = clock, engine, player
        self._generator_id, self._process, self._conductor = generator_id, process, conductor
        self._play_lease, self._ended_episodes, self._events, self._collect_load, self._raise_failure = (
            play_lease,
            ended_episodes,
            events,
            collect_load,
            raise_failure,
        )
        self._schedule, self._silence_seconds = schedule, config.supervise.silence_seconds
        self._set_fleet_size(settings.count)
        self._lease_size = schedule.samples_per_group if schedule.split == "idle" else 1
        self._concurrency = ConcurrencyLimiter(settings.concurrency_min, settings.concurrency, clock)
        self._idle_counter = IdleTimeCounter(clock)
        self._open_calls: dict[asyncio.Task[LeaseAnswer], int] = {}
        """Not answered yet, and for how many episodes each asks. One that a later call has overtaken is answered at once."""
        self._playing: list[asyncio.Task[None]] = []
        self._has_more, self._last_call_at = True, -math.inf
        self._woken = asyncio.Event()

    def _set_fleet_size(self, fleet: int) -> None:
        """What follows from how many generators there are."""
        self._fleet_size = fleet
        heartbeat = max(HEARTBEAT_SECONDS, fleet / FLEET_HEARTBEATS_PER_SECOND)
        self._heartbeat_seconds = min(heartbeat, self._silence_seconds / 4)
        self._call_gap_seconds = min(fleet / FLEET_CALLS_PER_SECOND, self._heartbeat_seconds)
        self._useful_concurrency = useful_concurrency(self._schedule, fleet)

    def wake_loop(self) -> None:
        """An episode is over, the engine has new weights, or `raise_failure` or `is_stopping` has something."""
        self._woken.set()

    async def run(self, is_stopping: Callable[[], bool]) -> None:
        """Until nothing is left to play, or it is `is_stopping` (`wake_loop` it then)."""
        try:
            while (self._has_more or self._playing or self._open_calls) and not is_stopping():
                if self._clock() >= self._next_call_at:
                    self._begin_call()
                await self._wait_for_change()
                self._engine.release_ready()
                self._handle_answers()
                finished = [task for task in self._playing if task.done()]
                self._playing = [task for task in self._playing if not task.done()]
                for task in finished:
                    task.result()
                self._raise_failure()
        finally:
            left = [*self._playing, *self._open_calls]
            for given_up in left:
                given_up.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def send_last_report(self) -> None:
        """Report the last episodes and events to the conductor, and ask for nothing more."""
        if self._ended_episodes or self._events:
            await self._call_conductor(0)

    # -- calls -----------------------------------------------------------------------------------------------------

    @property
    def _free_episodes(self) -> int:
        """Episodes that could start now."""
        return max(0, self._concurrency.limit - self._player.playing_count) if self._has_more else 0

    @property
    def _min_free_episodes(self) -> int:
        """Free places with which a call is worth it: a group comes whole, if it ever can."""
        return self._lease_size if self._lease_size <= self._concurrency.limit else 1

    @property
    def _is_waiting(self) -> bool:
        """A call waits for a group."""
        return any(free >= self._min_free_episodes for free in self._open_calls.values())

    @property
    def _next_call_at(self) -> float:
        """When the next call is to be made."""
        wanted = self._free_episodes >= self._min_free_episodes and not self._is_waiting
        return self._last_call_at + (self._call_gap_seconds if wanted else self._heartbeat_seconds)

    def _begin_call(self) -> None:
        free, self._last_call_at = self._free_episodes, self._clock()
        self._open_calls[self._start_task(self._call_conductor(free))] = free

    async def _call_conductor(self, free: int) -> LeaseAnswer:
        with stage("metrics"):
            stats = {
                **self._observe_engine(),
                "limit": self._concurrency.limit,
                **self._collect_load(),
                "held": self._engine.waiting,
            }
            stats |= self._idle_counter.read_counters(stats.get("pause_seconds", 0.0))
        ended, self._ended_episodes[:] = list(self._ended_episodes), []
        told, self._events[:] = self._events[-MAX_EVENTS_PER_CALL:], []
        call = LeaseCall(
            self._generator_id, self._process, free, stats, ended, self._heartbeat_seconds if free else 0.0, told
        )
        answer = await self._conductor.call("lease_groups", msgspec.msgpack.encode(call))
        return decode_msgpack(answer, LeaseAnswer)

    def _start_task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._woken.set())
        return task

    def _observe_engine(self) -> dict[str, float]:
        """At the engine, whose figures show how many episodes it carries."""
        stats = self._engine.collect_stats()
        self._concurrency.update_limit(stats, self._player.playing_count)
        return stats

    async def _wait_for_change(self) -> None:
        """Until something has happened, or it is time for a look."""
        places = min(self._concurrency.limit, self._useful_concurrency)
        held = self._engine.waiting
        empty = max(0, places - self._player.playing_count + held) if self._is_waiting or held else 0
        requests = self._observe_engine()["running"]
        # What is idle stays so until it is woken.
        look = ENGINE_POLL_SECONDS if self._player.playing_count or requests else self._heartbeat_seconds
        await wait_for_event(self._woken, min(look, max(0.0, self._next_call_at - self._clock())))
        self._woken.clear()
        self._idle_counter.add_interval(places, empty, requests)

    def _handle_answers(self) -> None:
        answered = [task for task in self._open_calls if task.done()]
        for task in answered:
            del self._open_calls[task]
            answer = task.result()
            self._has_more = answer.more
            if answer.fleet not in (0, self._fleet_size):
                self._set_fleet_size(answer.fleet)
            for lease in answer.leases:
                self._engine.require_version(lease)
                self._playing.append(self._start_task(self._play_lease(lease)))


# -- at the conductor --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _WaitingCall:
    """A call. `timer` answers it when it has waited for as long as it may."""

    free_episodes: int
    answer: asyncio.Future[list[GroupLease]]
    timer: asyncio.TimerHandle


class LeaseDispatcher:
    """Lives on the conductor's event loop. While `is_stopping()`, nothing is leased."""

    def __init__(self, admission: AdmissionController, fleet: Fleet, is_stopping: Callable[[], bool]):
        self._admission, self._fleet, self._stopping = admission, fleet, is_stopping
        self.load_reports: dict[str, dict[str, float]] = {}
        """What each generator reported last. `playing` includes what it was leased since."""
        self.cpu_seconds = CounterGrowth()
        """Processor time that generators and their engines report."""
        self.stage_seconds = CounterGrowth()
        """The same by stage, and the wall time of generators' loops, by metric."""
        self._waiting_calls: dict[str, _WaitingCall] = {}
        """One call of each generator, in the order in which they came."""
        self._serve_scheduled = False

    async def answer_call(self, call: LeaseCall) -> LeaseAnswer:
        """Lease up to `call.free` episodes, or wait until there is one. A later call of the same generator ends an earlier one,
        whose answer may reach nobody: it is leased nothing."""
        generator = self._fleet[call.generator_id]
        self._answer_waiting(call.generator_id)
        self._record_call(call)
        leases = self._lease_groups(generator, call.free) if self._admission.can_lease() else []
        if not leases and call.free and call.wait > 0 and self._has_more and not generator.is_leaving:
            leases = await self._wait_for_leases(call)
        return LeaseAnswer(leases, self._has_more and not generator.is_leaving, len(self._fleet.generators))

    def stop_leasing(self, generator_id: str) -> None:
        """It is leased nothing more, and told so at once if it waits."""
        self._fleet.stop_leasing(generator_id)
        self._answer_waiting(generator_id)

    def serve_soon(self) -> None:
        """There may be something to lease, for somebody, or nothing any more."""
        if self._waiting_calls and not self._serve_scheduled:
            self._serve_scheduled = True
            asyncio.get_running_loop().call_soon(self._serve_waiting)

    def forget_generator(self, generator_id: str) -> None:
        """Its process has ended: it waits for nothing, and nothing is known of the next one."""
        self._answer_waiting(generator_id)
        self.load_reports.pop(generator_id, None)
        self._fleet.set_idle(generator_id, False)

    def collect_metrics(self) -> dict[str, float]:
        """Metrics of what generators reported last."""
        loads = self.load_reports.values()
        return {
            "generator/concurrency": sum(load["limit"] for load in loads),
            **{f"lag/generator_{n}": max((x[f"lag_{n}"] for x in loads), default=0.0) for n in LagMeter.METRIC_NAMES},
        }

    @property
    def _has_more(self) -> bool:
        """Something is left to play, now or later."""
        return not self._stopping() and not self._admission.is_exhausted

    def _record_call(self, call: LeaseCall) -> None:
        name, self.load_reports[call.generator_id] = call.generator_id, call.stats
        for counter, of in (("cpu_seconds", "generator"), ("engine_cpu_seconds", "engine")):
            self.cpu_seconds.add(f"{name} {of}", call.stats.get(counter, 0.0), of)
        for metric in (counter for counter in call.stats if "/" in counter):
            self.stage_seconds.add(f"{name} {metric}", call.stats[metric], metric)
        self._fleet.set_idle(name, not call.stats["playing"])

    async def _wait_for_leases(self, call: LeaseCall) -> list[GroupLease]:
        loop, name = asyncio.get_running_loop(), call.generator_id
        timer = loop.call_later(call.wait, self._answer_waiting, name)
        self._waiting_calls[name] = waiting = _WaitingCall(call.free, loop.create_future(), timer)
        return await waiting.answer

    def _answer_waiting(self, name: str, leases: Sequence[GroupLease] = ()) -> None:
        """Its call, if one waits."""
        waiting = self._waiting_calls.pop(name, None)
        if waiting is not None:
            waiting.timer.cancel()
            if not waiting.answer.done():
                waiting.answer.set_result(list(leases))

    def _serve_waiting(self) -> None:
        """Those that wait, as far as there is something for them."""
        self._serve_scheduled = False
        for name, waiting in list(self._waiting_calls.items()):
            if not self._has_more:
                self._answer_waiting(name)
            elif not self._admission.can_lease():
                return
            elif leases := self._lease_groups(self._fleet[name], waiting.free_episodes):
                self._answer_waiting(name, leases)

    def _lease_groups(self, generator: FleetGenerator, free_episodes: int) -> list[GroupLease]:
        """As much as there is for it; but one share of a group that is divided among idle ones."""
        name, leases = generator.generator_id, list[GroupLease]()
        others = len(self._fleet.ready_ids) - (name in self._fleet.ready_ids)
        load = self.load_reports[name]
        while not self._stopping() and generator.can_lease:
            lease = self._admission.lease_group(
                name, free_episodes=free_episodes, max_episodes=int(load["limit"]), idle_owners=1 + others
            )
            if lease is None:
                break
            leases.append(lease)
            free_episodes -= len(lease.episode_indices)
            load["playing"] += len(lease.episode_indices)
            if others and len(lease.episode_indices) < self._admission.samples_per_group:
                self.serve_soon()  # the other shares are for those who wait
                break
        if leases:
            self._fleet.set_idle(name, False)
        return leases
