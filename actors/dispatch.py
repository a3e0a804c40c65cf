"""Leases at the conductor: what each generator said of itself last, who waits, and who is leased what becomes free.

A generator makes one kind of call, which is its heartbeat, its statistics, its episodes that are over and its wish for leases in
one. A call that finds nothing waits here, and whoever waits longest is served first. What a call costs does not grow with the
fleet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from r3async.actors.fleet import Fleet, Generator
from r3async.schedule.admission import Admission, GroupLease
from r3async.schedule.failures import EpisodeEnd


class LeaseCall(msgspec.Struct, frozen=True, array_like=True):
    """A generator's. `room`: episodes that it could begin now. `stats`: the engine's, and how many episodes the generator is
    `playing`, of at most `limit`. `ended`: episodes that are over since the last call. `wait`: seconds that the call may wait for
    leases."""

    generator_id: str
    room: int
    stats: dict[str, float]
    ended: list[EpisodeEnd] = []
    wait: float = 0.0


class LeaseAnswer(msgspec.Struct, frozen=True, array_like=True):
    """`more` is False when nothing will ever be left to lease."""

    leases: list[GroupLease]
    more: bool


@dataclass(frozen=True)
class _Waiting:
    """A call. `timer` answers it when it has waited for as long as it may."""

    room: int
    answer: asyncio.Future[list[GroupLease]]
    timer: asyncio.TimerHandle


class Dispatch:
    """Lives on the conductor's event loop. While `stopping()`, nothing is leased."""

    def __init__(self, admission: Admission, fleet: Fleet, stopping: Callable[[], bool]):
        self._admission, self._fleet, self._stopping = admission, fleet, stopping
        self.loads: dict[str, dict[str, float]] = {}
        """What each generator said of itself last. `playing` includes what it was leased since."""
        self._idle: dict[str, None] = {}
        """Those that play nothing."""
        self._waiting: dict[str, _Waiting] = {}
        """One call of each generator, in the order in which they came."""
        self._rung = False

    async def lease(self, call: LeaseCall) -> LeaseAnswer:
        """Lease up to `call.room` episodes, or wait until there is one. A later call of the same generator ends an earlier one,
        whose answer nobody may hear any more: it is leased nothing."""
        generator = self._fleet[call.generator_id]
        self._answer(call.generator_id)
        self._hear(call)
        leases = self._lease(generator, call.room, self._able_to_begin()) if self._admission.can_lease() else []
        if not leases and call.room and call.wait > 0 and self._more:
            leases = await self._wait(call)
        return LeaseAnswer(leases, self._more)

    def ring(self) -> None:
        """There may be something to lease, for somebody, or nothing any more."""
        if self._waiting and not self._rung:
            self._rung = True
            asyncio.get_running_loop().call_soon(self._serve)

    def lost(self, generator_id: str) -> None:
        """Its process has ended: it waits for nothing, and nothing is known of the next one."""
        self._answer(generator_id)
        self.loads.pop(generator_id, None)
        self._idle.pop(generator_id, None)

    @property
    def _more(self) -> bool:
        """Something is left to play, now or later."""
        return not self._stopping() and not self._admission.exhausted

    def _hear(self, call: LeaseCall) -> None:
        name, self.loads[call.generator_id] = call.generator_id, call.stats
        if call.stats["playing"]:
            self._idle.pop(name, None)
        else:
            self._idle[name] = None

    async def _wait(self, call: LeaseCall) -> list[GroupLease]:
        loop, name = asyncio.get_running_loop(), call.generator_id
        timer = loop.call_later(call.wait, self._answer, name)
        self._waiting[name] = waiting = _Waiting(call.room, loop.create_future(), timer)
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
        self._rung, idle = False, self._able_to_begin()
        for name, waiting in list(self._waiting.items()):
            if not self._more:
                self._answer(name)
            elif not self._admission.can_lease():
                return
            elif leases := self._lease(self._fleet[name], waiting.room, idle):
                self._answer(name, leases)

    def _able_to_begin(self) -> dict[str, None]:
        """Idle generators that may be leased something."""
        version = self._admission.version
        able = (g for g in map(self._fleet.__getitem__, self._idle) if g.health.may_lease and g.version >= version)
        return {g.generator_id: None for g in able}

    def _lease(self, generator: Generator, room: int, idle: dict[str, None]) -> list[GroupLease]:
        """As much as there is for it; but one share of a group that is divided among idle ones."""
        name, leases = generator.generator_id, list[GroupLease]()
        others = len(idle) - (name in idle)
        load = self.loads[name]
        while not self._stopping() and generator.health.may_lease:
            lease = self._admission.lease(
                name, version=generator.version, free=room, at_once=int(load["limit"]), among=1 + others
            )
            if lease is None:
                break
            leases.append(lease)
            room -= len(lease.episode_indices)
            load["playing"] += len(lease.episode_indices)
            if others and len(lease.episode_indices) < self._admission.samples_per_group:
                self.ring()  # the other shares are for those who wait
                break
        if leases:
            idle.pop(name, None)
            self._idle.pop(name, None)
        return leases
