"""The conductor's end of leasing: it answers the calls of generators, the longest waiting first."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from r3async.actors.leasing import LeaseAnswer, LeaseCall
from r3async.record.process_time import CounterGrowth, LagMeter
from r3async.schedule.run_ahead import AdmissionController, GroupLease
from r3async.world import ActorRef

from .fleet import Fleet, FleetGenerator


@dataclass(frozen=True)
class _WaitingCall:
    """A call that waits for leases. `timer` answers it when it has waited as long as it may."""

    free_episodes: int
    answer: asyncio.Future[list[GroupLease]]
    timer: asyncio.TimerHandle


class LeaseDispatcher:
    """The conductor's end of leasing. Lives on its event loop. After `stop_requested`
    nothing is leased."""

    def __init__(
        self,
        admission: AdmissionController,
        fleet: Fleet,
        learner: ActorRef,
        stop_requested: asyncio.Event,
    ):
        self.admission = admission
        self._fleet = fleet
        self._learner = learner
        self._stop_requested = stop_requested
        self.load_reports: dict[str, dict[str, float]] = {}
        """Statistics that each generator reported last. `playing` includes what it
        was leased since."""
        self.cpu_seconds = CounterGrowth()
        """Processor time that generators and their engines report."""
        self.stage_seconds = CounterGrowth()
        """Processor time of generators by stage, and the wall time of their event
        loops, by metric."""
        self._waiting_calls: dict[str, _WaitingCall] = {}
        """Waiting calls, at most one of each generator, in the order in which they came."""

    async def run(self) -> None:
        """Serve the calls that wait whenever `Fleet.leases_due` is set, until cancelled."""
        while True:
            await self._fleet.leases_due.wait()
            self._fleet.leases_due.clear()
            self._serve_waiting()

    async def answer_call(self, call: LeaseCall) -> LeaseAnswer:
        """Lease up to `call.free` episodes, or wait until there is one. A later call of
        the same generator ends an earlier one, which is leased nothing because its answer
        may reach nobody."""
        generator = self._fleet[call.generator_id]
        self._answer_waiting(call.generator_id)
        self._record_call(call)
        leases = self._lease_groups(generator, call.free) if self.admission.can_lease() else []
        if (
            not leases
            and call.free
            and call.wait > 0
            and self._has_more
            and not generator.is_leaving
        ):
            leases = await self._wait_for_leases(call)
        return LeaseAnswer(
            leases, self._has_more and not generator.is_leaving, len(self._fleet.generators)
        )

    def stop_leasing(self, generator_id: str) -> None:
        """Lease nothing more to a generator. If a call of it waits, it is answered at once."""
        self._fleet.stop_leasing(generator_id)
        self._answer_waiting(generator_id)

    async def find_missing(self, generator: FleetGenerator) -> dict[int, list[int]]:
        """Return the episodes that the learner lacks, by group, of the groups that a
        generator was leased."""
        groups = self.admission.list_leased_groups(generator.generator_id)
        missing: dict[int, list[int]] = await self._learner.call("missing_episodes", groups)
        return missing

    def requeue_leases(
        self, generator: FleetGenerator, missing: Mapping[int, Sequence[int]]
    ) -> list[int]:
        """Take back the leases of a generator, less the episodes that the learner has (all but the
        `missing` ones). Returns the groups that are leased again."""
        again = self.admission.requeue_leases(
            generator.generator_id, lambda group: missing.get(group, [])
        )
        self._fleet.leases_due.set()
        return again

    async def requeue_lost(self, generator: FleetGenerator) -> list[int]:
        """Forget a generator whose process has ended, and take back its leases. Returns the groups
        that are leased again."""
        self.forget_generator(generator.generator_id)
        missing = await self.find_missing(generator)
        generator.has_played |= any(
            len(episodes) < self.admission.group_size for episodes in missing.values()
        )
        return self.requeue_leases(generator, missing)

    def forget_generator(self, generator_id: str) -> None:
        """Forget the call and the reports of a generator whose process has ended. They do not apply
        to its next process."""
        self._answer_waiting(generator_id)
        self.load_reports.pop(generator_id, None)
        self._fleet.set_idle(generator_id, False)

    def collect_metrics(self) -> dict[str, float]:
        """Return metrics of what the generators reported last."""
        loads = self.load_reports.values()
        return {
            "generator/concurrency": sum(load["limit"] for load in loads),
            **{
                f"lag/generator_{n}": max((x[f"lag_{n}"] for x in loads), default=0.0)
                for n in LagMeter.METRIC_NAMES
            },
        }

    @property
    def _has_more(self) -> bool:
        """True if something is left to play, now or later."""
        return not self._stop_requested.is_set() and not self.admission.is_exhausted

    def _record_call(self, call: LeaseCall) -> None:
        name = call.generator_id
        self.load_reports[call.generator_id] = call.stats
        for counter, of in (("cpu_seconds", "generator"), ("engine_cpu_seconds", "engine")):
            self.cpu_seconds.add(f"{name} {of}", call.stats.get(counter, 0.0), of)
        for metric in (counter for counter in call.stats if "/" in counter):
            self.stage_seconds.add(f"{name} {metric}", call.stats[metric], metric)
        self._fleet.set_idle(name, not call.stats["playing"])

    async def _wait_for_leases(self, call: LeaseCall) -> list[GroupLease]:
        loop = asyncio.get_running_loop()
        name = call.generator_id
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
        """Answer waiting calls in order, as far as there is something to lease, and all of them if
        nothing is left."""
        for name, waiting in list(self._waiting_calls.items()):
            if not self._has_more:
                self._answer_waiting(name)
            elif not self.admission.can_lease():
                return
            elif leases := self._lease_groups(self._fleet[name], waiting.free_episodes):
                self._answer_waiting(name, leases)

    def _lease_groups(self, generator: FleetGenerator, free_episodes: int) -> list[GroupLease]:
        """Lease a generator as much as there is for it, but only one share of a group that is
        divided among idle generators."""
        name = generator.generator_id
        leases = list[GroupLease]()
        others = len(self._fleet.ready_ids) - (name in self._fleet.ready_ids)
        load = self.load_reports[name]
        while not self._stop_requested.is_set() and generator.can_lease:
            lease = self.admission.lease_group(
                name,
                free_episodes=free_episodes,
                max_episodes=int(load["limit"]),
                idle_owners=1 + others,
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
