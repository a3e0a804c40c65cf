"""The conductor's watch over a run in which no process fails, but nothing progresses.

What each stage has done, and what waits for it, comes from the generators' last reports, the
learner's status and the fleet. `Watchdog` judges it. A stage that does not progress is named, the
stacks of every process are written, and the action of `supervise.on_stall` follows.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from r3async.actors.evaluator import Evaluator
from r3async.actors.lease_dispatcher import LeaseDispatcher
from r3async.schedule.health import HealthState
from r3async.schedule.watchdog import Stall, Watchdog
from r3async.world import World

from .fleet import FleetGenerator, end_generator
from .learner import LearnerStatus
from .process import RPC_SECONDS, PolledCall, ProcessLost, RunFailed
from .version_delivery import VersionDelivery

STALL_CHECK_SECONDS = 2.0
"""Maximum seconds between two looks at all stages."""
DUMP_TIMEOUT_SECONDS = 5.0
"""Seconds after which an actor that has not written its stacks is asked for them by a signal."""

STORING_STAGE = "storing"
GENERATOR_STAGES = ("playing", "sending", "installing", STORING_STAGE)
"""Stages of one generator."""
RUN_STAGE = "run"
LEARNER_ANSWERING = "answering/learner"
STORING_WEIGHTS = f"{STORING_STAGE}/weights"
LEARNER_STAGES = (STORING_STAGE, STORING_WEIGHTS, "training", "publishing")
"""Stages that the learner's status tells of."""


class StallMonitor:
    """A monitor of stages that make no progress. Lives on the conductor's event loop.

    Stages: `playing/G`, `sending/G` and `installing/G` of each generator, `training`, `publishing`,
    `storing` (the spool's disk takes nothing), `storing/weights` and `storing/G` (the same for the
    disk of weights at the learner, and at a generator), `answering/learner` (the learner answers at
    all), and `run` (everybody waits for somebody).

    Args:
        write_seconds: Seconds that writing one version may take.
        stop_requested: After it, as during an evaluation, work that nobody has
            begun is not a stall.
    """

    def __init__(
        self,
        world: World,
        run_dir: Path,
        *,
        dispatcher: LeaseDispatcher,
        installer: VersionDelivery,
        evaluator: Evaluator,
        write_seconds: float,
        stop_requested: asyncio.Event,
    ):
        self.world = world
        self.run_dir = run_dir
        self._fleet = installer.fleet
        self.config = self._fleet.config
        self.events = self._fleet.events
        self._dispatcher = dispatcher
        self._installer = installer
        self._evaluator = evaluator
        self._learner = installer.learner
        self._stop_requested = stop_requested
        self._clock = world.clock.monotonic
        self._learner_status = LearnerStatus()
        """Status that the learner reported last."""
        self._status_call = PolledCall(partial(self._learner.call, "get_status"))
        self._requeue_task: asyncio.Task[None] | None = None
        supervise = self.config.supervise
        # A call with a limit of its own should fail by that first, because its message is better.
        limits = {"training": supervise.limits.step, "publishing": write_seconds + RPC_SECONDS}
        self.watchdog = Watchdog(self._clock, supervise.stall_seconds, limits)
        self._observed_ids: dict[str, None] = {}
        """Ids of the generators that were looked at last."""
        self._period_seconds = min(
            STALL_CHECK_SECONDS, supervise.stall_seconds / 4, supervise.silence_seconds / 4
        )

    async def run(self) -> None:
        """Monitor all stages until cancelled. Raises `RunFailed` for a stall that ends the run."""
        try:
            while True:
                began = self._clock()
                await asyncio.sleep(self._period_seconds)
                if self._clock() - began > 3 * self._period_seconds + 1:
                    # This process itself was paused, and has not read yet what was
                    # reported meanwhile.
                    continue
                self._fleet.check_silence()
                self._requeue_overdue()
                self._learner_status = (
                    await self._status_call.poll_answer(self._period_seconds)
                    or self._learner_status
                )
                self.observe_stages()
                await self._handle_stalls(self.watchdog.take_new_stalls())
        finally:
            if self._requeue_task is not None:
                self._requeue_task.cancel()
            await self._status_call.cancel()

    def _requeue_overdue(self) -> None:
        """Begin to take back the leases of a generator that is silent for too long, so that it
        does not hold up its groups. One generator at a time, because the learner has to be
        asked what it lacks."""
        for generator in self._fleet.find_overdue():
            if self._dispatcher.admission.list_leased_groups(generator.generator_id) and (
                self._requeue_task is None or self._requeue_task.done()
            ):
                self._requeue_task = asyncio.create_task(self._requeue_silent(generator))

    async def _requeue_silent(self, generator: FleetGenerator) -> None:
        """Take back the leases of a silent generator, less the episodes that the learner has. It
        may still play: of two episodes, the one that arrives first counts."""
        with contextlib.suppress(Exception):  # a loss of the learner is noticed elsewhere
            missing = await self._dispatcher.find_missing(generator)
            if generator.state is HealthState.SUSPECT:
                again = self._dispatcher.requeue_leases(generator, missing)
                self.events.warning(
                    "leases_returned",
                    generator=generator.generator_id,
                    pid=generator.pid,
                    seconds=round(generator.health.silent_seconds, 1),
                    leased_again=again,
                )

    @property
    def _is_resting(self) -> bool:
        """True while work that nobody has begun is not a stall: the run is ending, or
        generators evaluate."""
        return self._stop_requested.is_set() or self._evaluator.is_running

    # -- observations ------------------------------------------------------------------------------

    def observe_stages(self) -> None:
        """Report to the watchdog what each stage has done, and what waits for it."""
        status = self._learner_status
        for left in self._observed_ids.keys() - self._fleet.generators.keys():
            self._forget_generator(left)
        self._observed_ids = dict.fromkeys(self._fleet.generators)
        for generator in self._fleet:
            self._observe_generator(
                generator, may_send=status.storing is None and not self._status_call.is_pending
            )
        self.watchdog.observe_stage(
            LEARNER_ANSWERING, self._status_call.answer_count, int(self._status_call.is_pending)
        )
        # Its status is an old one, which says nothing about its progress.
        if self._status_call.is_pending:
            for stage in LEARNER_STAGES:
                self.watchdog.pause_stage(stage)
        else:
            self._observe_learner(status)
        # An answer to the watch is not a run's progress, and there is one at every look.
        done, with_work = self.watchdog.total_others(RUN_STAGE, LEARNER_ANSWERING)
        # Nobody has work although the learner waits for groups: an episode was lost, or somebody
        # does not continue.
        loading = any(not g.is_live for g in self._fleet)
        stuck = not with_work and status.doing == "waiting" and not loading and not self._is_resting
        self.watchdog.observe_stage(RUN_STAGE, done, int(stuck))

    def _observe_learner(self, status: LearnerStatus) -> None:
        # A spool that is full waits for a checkpoint, which training brings.
        waits = status.storing is not None and not status.storing["full"]
        self.watchdog.observe_stage(STORING_STAGE, status.received, int(waits))
        # Then nothing is published, and a step waits for it.
        weights_wait = bool(status.weights_wait)
        newest_version = self._installer.newest_published.version
        self.watchdog.observe_stage(STORING_WEIGHTS, newest_version, int(weights_wait))
        self.watchdog.observe_stage(
            "training", status.steps, int(status.doing == "training" and not weights_wait)
        )
        self.watchdog.observe_stage(
            "publishing", newest_version, int(status.writing and not weights_wait)
        )

    def _forget_generator(self, name: str) -> None:
        for stage in GENERATOR_STAGES:
            self.watchdog.forget_stage(f"{stage}/{name}")

    def _observe_generator(self, generator: FleetGenerator, *, may_send: bool) -> None:
        name = generator.generator_id
        playing, sending, installing, storing = (f"{stage}/{name}" for stage in GENERATOR_STAGES)
        if generator.state in (HealthState.LOST, HealthState.STARTING) or generator.is_finished:
            self._forget_generator(name)
            return
        # An installation is judged before its own limit.
        self.watchdog.observe_stage(
            installing,
            generator.answered_calls,
            generator.open_calls,
            generator.answer_seconds + RPC_SECONDS / 2,
        )
        self.watchdog.observe_stage(storing, generator.version, int(generator.is_waiting_for_disk))
        load = self._dispatcher.load_reports.get(name)
        if load is None or not generator.is_live:  # it has not begun to play
            self.watchdog.forget_stage(playing)
            self.watchdog.forget_stage(sending)
            return
        # A generator that is full, or installs new weights, need not lease what it could.
        free = (
            self._dispatcher.admission.can_lease()
            and not load["playing"]
            and not generator.is_leaving
        )
        plays = int(load["playing"] - load.get("held", 0))  # the others wait for weights
        done = int(load["generated_tokens"] + load.get("ended", 0))
        self.watchdog.observe_stage(playing, done, plays or int(free and not self._is_resting))
        self.watchdog.observe_stage(
            sending, int(load.get("acknowledged", 0)), int(load.get("unacknowledged", 0)) * may_send
        )

    # -- actions -----------------------------------------------------------------------------------

    async def _handle_stalls(self, stalls: Sequence[Stall]) -> None:
        """Handle each stalled generator once: a generator that stalls does so in several stages,
        and its next process has not stalled."""
        seen = set()
        for stall in stalls:
            generator = self._find_generator(stall)
            who = generator.generator_id if generator is not None else stall.stage
            if who not in seen:
                seen.add(who)
                await self._handle_stall(stall)

    async def _handle_stall(self, stall: Stall) -> None:
        generator = self._find_generator(stall)
        action: str = self.config.supervise.on_stall
        if action == "restart" and stall.stage.partition("/")[0] == STORING_STAGE:
            action = "warn"  # a disk cannot be restarted: work waits for it, and nothing is lost
        elif action == "restart" and generator is None and stall.stage != LEARNER_ANSWERING:
            action = "abort"
        silent = await self._dump_all_stacks(f"{stall.stage} did nothing for {stall.seconds:.0f} s")
        self.events.error(
            "stalled",
            stage=stall.stage,
            seconds=round(stall.seconds, 1),
            limit=stall.limit,
            waiting=stall.waiting,
            action=action,
            queues=self.watchdog.describe_stages(),
            learner=self._learner_status,
            generators=self._fleet.describe_generators(),
            stacks=str(self.run_dir / "stacks"),
            did_not_answer=silent,
        )
        if action == "abort":
            raise RunFailed(
                f"the run stalled: {describe_stall(stall)} (supervise.on_stall = "
                f"{self.config.supervise.on_stall!r}). Missing by group: "
                f"{self._learner_status.lacking}. What every process was doing is in "
                f"{self.run_dir}/stacks"
                + (
                    f", and in {self.run_dir}/logs for {', '.join(silent)}, which did not answer"
                    if silent
                    else ""
                )
            )
        if action == "restart":
            if generator is None:
                await self._end_learner(stall)
            else:
                await end_generator(self.world, generator, describe_stall(stall))

    def _find_generator(self, stall: Stall) -> FleetGenerator | None:
        name = stall.stage.partition("/")[2]
        return next((g for g in self._fleet if g.generator_id == name), None)

    async def _dump_all_stacks(self, reason: str) -> list[str]:
        """Have every process write its stacks. Returns the names of those that did not answer;
        those of them that are on this host write to their logs instead."""
        with contextlib.suppress(OSError):
            self.world.processes.dump_stacks(self.run_dir / "stacks" / "conductor.txt", reason)
        status = self._learner_status
        asked = {"learner": (self._learner, status.pid, status.host)}
        asked |= {
            g.generator_id: (g.handle, *g.process)
            for g in self._fleet
            if g.state is not HealthState.LOST
        }
        answers = await asyncio.gather(
            *(
                actor.call("dump_stacks", reason, timeout=DUMP_TIMEOUT_SECONDS)
                for actor, _, _ in asked.values()
            ),
            return_exceptions=True,
        )
        silent = [
            name
            for name, answer in zip(asked, answers, strict=True)
            if isinstance(answer, BaseException)
        ]
        for name in silent:
            _, pid, host = asked[name]
            if pid:
                self.world.processes.request_stack_dump(pid, host)
        return silent

    async def _end_learner(self, stall: Stall) -> None:
        """End the learner's process: the run restarts from its newest checkpoint, as
        for any loss of it."""
        self.world.actors.kill_actor(self._learner)
        if self._learner_status.pid:
            self.world.processes.kill_process(self._learner_status.pid, self._learner_status.host)
        raise ProcessLost(f"{describe_stall(stall)}; its process was ended")


def describe_stall(stall: Stall) -> str:
    """Describe a stall in words, for the user."""
    stage, _, name = stall.stage.partition("/")
    waited = f"for {stall.seconds:.0f} s (limit {stall.limit:g} s)"
    if stall.stage == RUN_STAGE:
        return (
            f"the learner waits for trajectories, nobody has work, and nothing has moved {waited}"
        )
    if stage == STORING_STAGE:
        disk = {"": "the spool's disk", "weights": "the disk of weights"}.get(
            name, f"the disk of weights at {name}"
        )
        return f"{disk} has taken nothing {waited}, and generators wait"
    if stall.stage == LEARNER_ANSWERING:
        return f"the learner has not answered {waited}"
    who = f"{name}, in `{stage}`," if name else f"the learner, in `{stage}`,"
    return (
        f"{who} did nothing {waited}, though {stall.waiting} "
        f"unit{'s' if stall.waiting != 1 else ''} of work waited for it"
    )
