"""Both ends of leasing: how a generator requests leases, and how the conductor answers.

A generator makes one kind of call, which is its heartbeat, its statistics, the ends of its episodes and its request for
leases in one. A call that finds nothing to lease waits at the conductor, and the generator that waits longest is served
first. The cost of a call does not grow with the fleet.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from r3async.config import Config
from r3async.record.process_time import CounterGrowth, LagMeter
from r3async.record.routes import parse_episode_id
from r3async.rollout.engine import Engine, EngineLostError, Generation, GenerationRequest
from r3async.schedule.admission import AdmissionController, GroupLease
from r3async.schedule.concurrency import ConcurrencyLimiter, useful_concurrency
from r3async.schedule.pace import IdleTimeCounter
from r3async.schedule.task_failures import EpisodeEnd
from r3async.untrusted import decode_msgpack
from r3async.world import ActorRef
from r3async.world.stages import stage

from .fleet import Fleet, FleetGenerator
from .process import wait_for_event

ENGINE_POLL_SECONDS = 1.0
"""Maximum seconds between two looks at the engine. Its limit changes every two seconds at most
(`ConcurrencyLimiter`)."""
HEARTBEAT_SECONDS = 5.0
"""Maximum seconds between two calls of one generator in a small fleet: a generator that is silent is taken for lost."""
FLEET_HEARTBEATS_PER_SECOND = 64
"""Heartbeats per second of all generators of a large fleet together."""
MAX_EVENTS_PER_CALL = 256
"""Maximum number of events that one call reports."""
FLEET_CALLS_PER_SECOND = 400
"""Maximum calls per second of all generators together. Each takes the conductor about a millisecond, most of it in
Ray."""

T = TypeVar("T")


class LeaseCall(msgspec.Struct, frozen=True, array_like=True):
    """A generator's call to the conductor.

    Attributes:
        process: Pid and host of the generator.
        free: Number of episodes that it could start now.
        stats: Statistics of the engine, and how many episodes the generator is `playing`, of at most `limit`.
        ended: Ends of episodes since the last call.
        wait: Seconds that the call may wait for leases.
        told: Lines of its event log, if its host does not see the run's directory.
    """

    generator_id: str
    process: tuple[int, str]
    free: int
    stats: dict[str, float]
    ended: list[EpisodeEnd] = []
    wait: float = 0.0
    told: list[bytes] = []


class LeaseAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The conductor's answer to a `LeaseCall`.

    Attributes:
        leases: Groups, or parts of groups, to play.
        more: False if nothing will be left to lease, ever, or to this process: another process has taken its place, or
            it has to leave.
        fleet: Number of generators; 0 if the answer does not say it.
    """

    leases: list[GroupLease]
    more: bool
    fleet: int = 0


# -- at a generator ----------------------------------------------------------------------------------------------------


class VersionGate:
    """A wrapper of `engine` whose requests for a group wait until the engine has the weights that the group's lease
    names (`GroupLease.version`). All attributes but `generate` are those of the engine. `woken` is set when the engine
    is lost."""

    def __init__(self, engine: Engine, woken: asyncio.Event):
        self._engine, self._woken = engine, woken
        self._loss: EngineLostError | None = None
        self._required_versions: dict[int, int] = {}
        """Required version by group, for groups that were leased before the engine had that version."""
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
        """Release the requests whose version the engine has by now. Call this when the engine may have new weights."""
        version = self._engine.version
        if any(needed <= version for needed in self._required_versions.values()):
            self._required_versions = {
                group: needed for group, needed in self._required_versions.items() if needed > version
            }
            self._released.set()
            self._released = asyncio.Event()

    def raise_if_lost(self) -> None:
        """Raise `EngineLostError` if a request has found that the engine is lost."""
        if self._loss is not None:
            raise self._loss

    async def generate(self, request: GenerationRequest) -> Generation:
        """Call `Engine.generate` once the engine has the version that the request's group requires."""
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
    """A generator's end of leasing: its calls to the conductor (`LeaseCall`). `GeneratorActor.run` is the loop that makes
    them.

    A call is due when a group fits and no other call waits for one, and as a heartbeat. A lease for weights that the
    engine does not have yet is played up to its first call of the `engine`.

    Args:
        process: Pid and host of this process.
        woken: Event that wakes the generator's loop: an answer has come, an episode is over, the engine has new weights.
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
        settings, schedule = config.generator, config.schedule
        self._clock, self._engine, self._woken = clock, engine, woken
        self._generator_id, self._process, self._conductor = generator_id, process, conductor
        self._schedule, self._silence_seconds = schedule, config.supervise.silence_seconds
        self._set_fleet_size(settings.count)
        self._lease_size = schedule.group_size if schedule.split == "idle" else 1
        self._concurrency = ConcurrencyLimiter(settings.concurrency_min, settings.concurrency, clock)
        self._idle_counter = IdleTimeCounter(clock)
        self.open_calls: dict[asyncio.Task[LeaseAnswer], int] = {}
        """Calls that are not answered yet, with the number of episodes that each requests. When a later call overtakes
        one, it is answered at once."""
        self.playing_count = 0
        """Number of episodes that the generator plays, from their lease on. One that waits to be sent has ended."""
        self.has_more = True
        """False if the conductor has answered that nothing will be left to lease."""
        self._last_call_at = -math.inf

    def _set_fleet_size(self, fleet: int) -> None:
        """Set the intervals and the useful concurrency that follow from the number of generators."""
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
        """The number of free places that makes a call worthwhile: a group is leased whole if it can ever fit."""
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

    def begin_call(self, load: Mapping[str, float], ended: list[EpisodeEnd], events: Sequence[bytes]) -> None:
        """Call the conductor for as many episodes as could start now. The call is in `open_calls` until it is answered.

        Args:
            load: Statistics of the generator, to which those of the engine are added.
            ended: Ends of episodes since the last call.
            events: Lines of the event log that the conductor has to write.
        """
        free, self._last_call_at = self._free_episodes, self._clock()
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
        """Read the engine's statistics and adapt the limit of concurrent episodes to them. Returns the statistics."""
        stats = self._engine.collect_stats()
        self._concurrency.update_limit(stats, self.playing_count)
        return stats

    async def wait_for_change(self) -> None:
        """Wait until something has happened, or the next look at the engine or the next call is due. Counts idle
        time."""
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


# -- at the conductor --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _WaitingCall:
    """A call that waits for leases. `timer` answers it when it has waited as long as it may."""

    free_episodes: int
    answer: asyncio.Future[list[GroupLease]]
    timer: asyncio.TimerHandle


class LeaseDispatcher:
    """The conductor's end of leasing. Lives on its event loop. After `stop_requested` nothing is leased."""

    def __init__(self, admission: AdmissionController, fleet: Fleet, learner: ActorRef, stop_requested: asyncio.Event):
        self.admission, self._fleet, self._learner, self._stop_requested = admission, fleet, learner, stop_requested
        self.load_reports: dict[str, dict[str, float]] = {}
        """Statistics that each generator reported last. `playing` includes what it was leased since."""
        self.cpu_seconds = CounterGrowth()
        """Processor time that generators and their engines report."""
        self.stage_seconds = CounterGrowth()
        """Processor time of generators by stage, and the wall time of their event loops, by metric."""
        self._waiting_calls: dict[str, _WaitingCall] = {}
        """Waiting calls, at most one of each generator, in the order in which they came."""

    async def run(self) -> None:
        """Serve the calls that wait whenever `Fleet.leases_due` is set, until cancelled."""
        while True:
            await self._fleet.leases_due.wait()
            self._fleet.leases_due.clear()
            self._serve_waiting()

    async def answer_call(self, call: LeaseCall) -> LeaseAnswer:
        """Lease up to `call.free` episodes, or wait until there is one. A later call of the same generator ends an
        earlier one, which is leased nothing because its answer may reach nobody."""
        generator = self._fleet[call.generator_id]
        self._answer_waiting(call.generator_id)
        self._record_call(call)
        leases = self._lease_groups(generator, call.free) if self.admission.can_lease() else []
        if not leases and call.free and call.wait > 0 and self._has_more and not generator.is_leaving:
            leases = await self._wait_for_leases(call)
        return LeaseAnswer(leases, self._has_more and not generator.is_leaving, len(self._fleet.generators))

    def stop_leasing(self, generator_id: str) -> None:
        """Lease nothing more to a generator. If a call of it waits, it is answered at once."""
        self._fleet.stop_leasing(generator_id)
        self._answer_waiting(generator_id)

    async def find_missing(self, generator: FleetGenerator) -> dict[int, list[int]]:
        """Return the episodes that the learner lacks, by group, of the groups that a generator was leased."""
        groups = self.admission.list_leased_groups(generator.generator_id)
        missing: dict[int, list[int]] = await self._learner.call("missing_episodes", groups)
        return missing

    def requeue_leases(self, generator: FleetGenerator, missing: Mapping[int, Sequence[int]]) -> list[int]:
        """Take back the leases of a generator, less the episodes that the learner has (all but the `missing` ones).
        Returns the groups that are leased again."""
        again = self.admission.requeue_leases(generator.generator_id, lambda group: missing.get(group, []))
        self._fleet.leases_due.set()
        return again

    async def requeue_lost(self, generator: FleetGenerator) -> list[int]:
        """Forget a generator whose process has ended, and take back its leases. Returns the groups that are leased
        again."""
        self.forget_generator(generator.generator_id)
        missing = await self.find_missing(generator)
        generator.has_played |= any(len(episodes) < self.admission.group_size for episodes in missing.values())
        return self.requeue_leases(generator, missing)

    def forget_generator(self, generator_id: str) -> None:
        """Forget the call and the reports of a generator whose process has ended. They do not apply to its next
        process."""
        self._answer_waiting(generator_id)
        self.load_reports.pop(generator_id, None)
        self._fleet.set_idle(generator_id, False)

    def collect_metrics(self) -> dict[str, float]:
        """Return metrics of what the generators reported last."""
        loads = self.load_reports.values()
        return {
            "generator/concurrency": sum(load["limit"] for load in loads),
            **{f"lag/generator_{n}": max((x[f"lag_{n}"] for x in loads), default=0.0) for n in LagMeter.METRIC_NAMES},
        }

    @property
    def _has_more(self) -> bool:
        """True if something is left to play, now or later."""
        return not self._stop_requested.is_set() and not self.admission.is_exhausted

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
        """Answer the call of a generator with `leases`, if one waits."""
        waiting = self._waiting_calls.pop(name, None)
        if waiting is not None:
            waiting.timer.cancel()
            if not waiting.answer.done():
                waiting.answer.set_result(list(leases))

    def _serve_waiting(self) -> None:
        """Answer waiting calls in order, as far as there is something to lease, and all of them if nothing is left."""
        for name, waiting in list(self._waiting_calls.items()):
            if not self._has_more:
                self._answer_waiting(name)
            elif not self.admission.can_lease():
                return
            elif leases := self._lease_groups(self._fleet[name], waiting.free_episodes):
                self._answer_waiting(name, leases)

    def _lease_groups(self, generator: FleetGenerator, free_episodes: int) -> list[GroupLease]:
        """Lease a generator as much as there is for it, but only one share of a group that is divided among idle
        generators."""
        name, leases = generator.generator_id, list[GroupLease]()
        others = len(self._fleet.ready_ids) - (name in self._fleet.ready_ids)
        load = self.load_reports[name]
        while not self._stop_requested.is_set() and generator.can_lease:
            lease = self.admission.lease_group(
                name, free_episodes=free_episodes, max_episodes=int(load["limit"]), idle_owners=1 + others
            )
            if lease is None:
                break
            leases.append(lease)
            free_episodes -= len(lease.episode_indices)
            load["playing"] += len(lease.episode_indices)
            if others and len(lease.episode_indices) < self.admission.group_size:
                self._fleet.leases_due.set()  # the other shares are for generators that wait
                break
        if leases:
            self._fleet.set_idle(name, False)
        return leases
