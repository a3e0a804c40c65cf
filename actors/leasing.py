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

from r3async.actors.fleet import Fleet, Generator
from r3async.actors.process import wait_until
from r3async.config import Config
from r3async.record.routes import parse_id
from r3async.record.timeline import Growth, LagMeter
from r3async.rollout.engines import Engine, Generation, GenerationRequest
from r3async.rollout.group import GroupPlayer
from r3async.schedule.admission import Admission, GroupLease
from r3async.schedule.pace import Concurrency, IdleCounter, useful_places
from r3async.schedule.tasks import EpisodeEnd
from r3async.untrusted import decode_msgpack
from r3async.world import ActorRef
from r3async.world.stages import stage

LOOK_SECONDS = 1.0
"""Between two looks, at most, at what the engine does. Its limit changes every two seconds at most (`Concurrency`)."""
HEARTBEAT_SECONDS = 5.0
"""Between two calls of one generator, at most, in a small fleet: whoever is silent is taken for lost."""
HEARTBEATS_PER_SECOND = 64
"""Of a large one."""
TOLD = 256
"""Events that one call reports, at most."""
CALLS_PER_SECOND = 400
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


class Gate:
    """`engine`, whose requests for a group wait until it has the weights that the group's lease names: `GroupLease.version`.
    Everything but `generate` is the engine's own."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._needed: dict[int, int] = {}
        """By group that was leased before the engine had its version: that version."""
        self._open = asyncio.Event()
        self.held = 0
        """Requests that wait."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def leased(self, lease: GroupLease) -> None:
        """Before it is played."""
        if lease.version > self._engine.version:
            self._needed[lease.group_index] = max(lease.version, self._needed.get(lease.group_index, 0))

    def look(self) -> None:
        """The engine may have new weights."""
        version = self._engine.version
        if any(needed <= version for needed in self._needed.values()):
            self._needed = {group: needed for group, needed in self._needed.items() if needed > version}
            self._open.set()
            self._open = asyncio.Event()

    async def generate(self, request: GenerationRequest) -> Generation:
        """As `Engine.generate`."""
        which = parse_id(request.request_id) if self._needed else None
        self.held += 1
        try:
            while which is not None and which.group_index in self._needed:
                await self._open.wait()
        finally:
            self.held -= 1
        return await self._engine.generate(request)


class Leasing:
    """Calls the conductor (`LeaseCall`) when a group fits and no other call waits for one, and as a heartbeat.
    Episodes that are over in between are reported together. What is leased for weights that the engine does not have yet is
    played up to its first call of the `engine`.

    `play(lease)` plays one. `ended`: episodes that are over, to which whoever plays adds before `wake` is called. `load()`:
    further statistics. `check()` raises what ends it.
    """

    def __init__(
        self,
        config: Config,
        clock: Callable[[], float],
        engine: Gate,
        player: GroupPlayer,
        *,
        generator_id: str,
        process: tuple[int, str],
        conductor: ActorRef,
        play: Callable[[GroupLease], Coroutine[Any, Any, None]],
        ended: list[EpisodeEnd],
        told: list[bytes],
        load: Callable[[], Mapping[str, float]],
        check: Callable[[], None],
    ):
        settings, schedule = config.generator, config.schedule
        self._clock, self._engine, self._player = clock, engine, player
        self._generator_id, self._process, self._conductor = generator_id, process, conductor
        self._play, self._ended, self._told, self._load, self._check = play, ended, told, load, check
        self._schedule, self._silence = schedule, config.supervise.silence_seconds
        self._measure(settings.count)
        self._group = schedule.samples_per_group if schedule.split == "idle" else 1
        self._concurrency = Concurrency(settings.concurrency_min, settings.concurrency, clock)
        self._idle = IdleCounter(clock)
        self._calls: dict[asyncio.Task[LeaseAnswer], int] = {}
        """Not answered yet, and for how many episodes each asks. One that a later call has overtaken is answered at once."""
        self._playing: list[asyncio.Task[None]] = []
        self._more, self._called_at = True, -math.inf
        self._woken = asyncio.Event()

    def _measure(self, fleet: int) -> None:
        """What follows from how many generators there are."""
        self._fleet = fleet
        heartbeat = max(HEARTBEAT_SECONDS, fleet / HEARTBEATS_PER_SECOND)
        self._heartbeat = min(heartbeat, self._silence / 4)
        self._gap = min(fleet / CALLS_PER_SECOND, self._heartbeat)
        self._useful = useful_places(self._schedule, fleet)

    def wake(self) -> None:
        """An episode is over, the engine has new weights, or `check` or `stopping` has something."""
        self._woken.set()

    async def run(self, stopping: Callable[[], bool]) -> None:
        """Until nothing is left to play, or it is `stopping` (`wake` it then)."""
        try:
            while (self._more or self._playing or self._calls) and not stopping():
                if self._clock() >= self._due:
                    self._begin_call()
                await self._wait()
                self._engine.look()
                self._take_answers()
                finished = [task for task in self._playing if task.done()]
                self._playing = [task for task in self._playing if not task.done()]
                for task in finished:
                    task.result()
                self._check()
        finally:
            left = [*self._playing, *self._calls]
            for given_up in left:
                given_up.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def report(self) -> None:
        """Report the last episodes and events to the conductor, and ask for nothing more."""
        if self._ended or self._told:
            await self._call(0)

    # -- calls -----------------------------------------------------------------------------------------------------

    @property
    def _free(self) -> int:
        """Episodes that could start now."""
        return max(0, self._concurrency.limit - self._player.playing) if self._more else 0

    @property
    def _enough(self) -> int:
        """Free places with which a call is worth it: a group comes whole, if it ever can."""
        return self._group if self._group <= self._concurrency.limit else 1

    @property
    def _waits(self) -> bool:
        """A call waits for a group."""
        return any(free >= self._enough for free in self._calls.values())

    @property
    def _due(self) -> float:
        """When the next call is to be made."""
        wanted = self._free >= self._enough and not self._waits
        return self._called_at + (self._gap if wanted else self._heartbeat)

    def _begin_call(self) -> None:
        free, self._called_at = self._free, self._clock()
        self._calls[self._begin(self._call(free))] = free

    async def _call(self, free: int) -> LeaseAnswer:
        with stage("metrics"):
            stats = {**self._look(), "limit": self._concurrency.limit, **self._load(), "held": self._engine.held}
            stats |= self._idle.counters(stats.get("pause_seconds", 0.0))
        ended, self._ended[:] = list(self._ended), []
        told, self._told[:] = self._told[-TOLD:], []
        call = LeaseCall(self._generator_id, self._process, free, stats, ended, self._heartbeat if free else 0.0, told)
        answer = await self._conductor.call("lease", msgspec.msgpack.encode(call))
        return decode_msgpack(answer, LeaseAnswer)

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._woken.set())
        return task

    def _look(self) -> dict[str, float]:
        """At the engine, whose figures show how many episodes it carries."""
        stats = self._engine.stats()
        self._concurrency.observe(stats, self._player.playing)
        return stats

    async def _wait(self) -> None:
        """Until something has happened, or it is time for a look."""
        places = min(self._concurrency.limit, self._useful)
        held = self._engine.held
        empty = max(0, places - self._player.playing + held) if self._waits or held else 0
        requests = self._look()["running"]
        # What is idle stays so until it is woken.
        look = LOOK_SECONDS if self._player.playing or requests else self._heartbeat
        await wait_until(self._woken, min(look, max(0.0, self._due - self._clock())))
        self._woken.clear()
        self._idle.passed(places, empty, requests)

    def _take_answers(self) -> None:
        answered = [task for task in self._calls if task.done()]
        for task in answered:
            del self._calls[task]
            answer = task.result()
            self._more = answer.more
            if answer.fleet not in (0, self._fleet):
                self._measure(answer.fleet)
            for lease in answer.leases:
                self._engine.leased(lease)
                self._playing.append(self._begin(self._play(lease)))


# -- at the conductor --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Waiting:
    """A call. `timer` answers it when it has waited for as long as it may."""

    free: int
    answer: asyncio.Future[list[GroupLease]]
    timer: asyncio.TimerHandle


class Dispatch:
    """Lives on the conductor's event loop. While `stopping()`, nothing is leased."""

    def __init__(self, admission: Admission, fleet: Fleet, stopping: Callable[[], bool]):
        self._admission, self._fleet, self._stopping = admission, fleet, stopping
        self.loads: dict[str, dict[str, float]] = {}
        """What each generator reported last. `playing` includes what it was leased since."""
        self.cpu = Growth()
        """Processor time that generators and their engines report."""
        self.stages = Growth()
        """The same by stage, and the wall time of generators' loops, by metric."""
        self._waiting: dict[str, _Waiting] = {}
        """One call of each generator, in the order in which they came."""
        self._rung = False

    async def lease(self, call: LeaseCall) -> LeaseAnswer:
        """Lease up to `call.free` episodes, or wait until there is one. A later call of the same generator ends an earlier one,
        whose answer may reach nobody: it is leased nothing."""
        generator = self._fleet[call.generator_id]
        self._answer(call.generator_id)
        self._note(call)
        leases = self._lease(generator, call.free) if self._admission.can_lease() else []
        if not leases and call.free and call.wait > 0 and self._more and not generator.leaving:
            leases = await self._wait(call)
        return LeaseAnswer(leases, self._more and not generator.leaving, len(self._fleet.generators))

    def retire(self, generator_id: str) -> None:
        """It is leased nothing more, and told so at once if it waits."""
        self._fleet.retire(generator_id)
        self._answer(generator_id)

    def ring(self) -> None:
        """There may be something to lease, for somebody, or nothing any more."""
        if self._waiting and not self._rung:
            self._rung = True
            asyncio.get_running_loop().call_soon(self._serve)

    def lost(self, generator_id: str) -> None:
        """Its process has ended: it waits for nothing, and nothing is known of the next one."""
        self._answer(generator_id)
        self.loads.pop(generator_id, None)
        self._fleet.note_idle(generator_id, False)

    def figures(self) -> dict[str, float]:
        """Metrics of what generators reported last."""
        loads = self.loads.values()
        return {
            "generator/concurrency": sum(load["limit"] for load in loads),
            **{f"lag/generator_{n}": max((x[f"lag_{n}"] for x in loads), default=0.0) for n in LagMeter.NAMES},
        }

    @property
    def _more(self) -> bool:
        """Something is left to play, now or later."""
        return not self._stopping() and not self._admission.exhausted

    def _note(self, call: LeaseCall) -> None:
        name, self.loads[call.generator_id] = call.generator_id, call.stats
        for counter, of in (("cpu_seconds", "generator"), ("engine_cpu_seconds", "engine")):
            self.cpu.add(f"{name} {of}", call.stats.get(counter, 0.0), of)
        for metric in (counter for counter in call.stats if "/" in counter):
            self.stages.add(f"{name} {metric}", call.stats[metric], metric)
        self._fleet.note_idle(name, not call.stats["playing"])

    async def _wait(self, call: LeaseCall) -> list[GroupLease]:
        loop, name = asyncio.get_running_loop(), call.generator_id
        timer = loop.call_later(call.wait, self._answer, name)
        self._waiting[name] = waiting = _Waiting(call.free, loop.create_future(), timer)
        return await waiting.answer

    def _answer(self, name: str, leases: Sequence[GroupLease] = ()) -> None:
        """Its call, if one waits."""
        waiting = self._waiting.pop(name, None)
        if waiting is not None:
            waiting.timer.cancel()
            if not waiting.answer.done():
                waiting.answer.set_result(list(leases))

    def _serve(self) -> None:
        """Those that wait, as far as there is something for them."""
        self._rung = False
        for name, waiting in list(self._waiting.items()):
            if not self._more:
                self._answer(name)
            elif not self._admission.can_lease():
                return
            elif leases := self._lease(self._fleet[name], waiting.free):
                self._answer(name, leases)

    def _lease(self, generator: Generator, free: int) -> list[GroupLease]:
        """As much as there is for it; but one share of a group that is divided among idle ones."""
        name, leases = generator.generator_id, list[GroupLease]()
        others = len(self._fleet.able) - (name in self._fleet.able)
        load = self.loads[name]
        while not self._stopping() and generator.may_lease:
            lease = self._admission.lease(name, free=free, at_once=int(load["limit"]), among=1 + others)
            if lease is None:
                break
            leases.append(lease)
            free -= len(lease.episode_indices)
            load["playing"] += len(lease.episode_indices)
            if others and len(lease.episode_indices) < self._admission.samples_per_group:
                self.ring()  # the other shares are for those who wait
                break
        if leases:
            self._fleet.note_idle(name, False)
        return leases
