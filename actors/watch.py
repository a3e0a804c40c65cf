"""The conductor's watch over a run in which nothing fails and nothing moves.

What each stage has done, and what waits for it, is gathered from where it is known: the generators' last reports, the
learner's status, the fleet. `Watchdog` judges. What does not move is named, every process's stacks are written, and
`supervise.on_stall` is done.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from r3async.actors.fleet import Fleet, Generator
from r3async.actors.process import RPC_SECONDS, ProcessLost, Question, RunFailed, end_process
from r3async.config import Config
from r3async.schedule.admission import Admission
from r3async.schedule.health import HealthState, Stall, Watchdog
from r3async.world import ActorRef, World

LOOK_SECONDS = 2.0
"""Between two looks, at most."""
DUMP_SECONDS = 5.0
"""An actor that has not written its stacks by then is asked by signal."""

STORING = "storing"
STAGES = ("playing", "sending", "installing", STORING)
"""Of a generator."""
RUN = "run"
ANSWERING = "answering/learner"


class Watch:
    """Lives on the conductor's event loop. `loads`: what each generator reported last. `learner`: its actor.
    `published()`: the newest version that engines are to have. `write_seconds`: that one may take to be written. While
    `resting()`, work that nobody has begun waits for nobody: the run is ending, or generators evaluate.

    Stages: `playing/G`, `sending/G` and `installing/G` of each generator, `training`, `publishing`, `storing` (the spool's disk
    takes nothing), `storing/weights` and `storing/G` (that of weights at the learner, and at a generator), whether the learner
    answers at all, and `run`: everybody waits for somebody.
    """

    def __init__(
        self,
        world: World,
        config: Config,
        run_dir: Path,
        events: Any,
        *,
        fleet: Fleet,
        admission: Admission,
        learner: ActorRef,
        loads: Mapping[str, Mapping[str, float]],
        published: Callable[[], int],
        write_seconds: float,
        resting: Callable[[], bool] = lambda: False,
    ):
        self.world, self.config, self.run_dir, self.events = world, config, run_dir, events
        self._fleet, self._admission, self._learner, self._loads = fleet, admission, learner, loads
        self._published, self._resting, self._clock = published, resting, world.clock.monotonic
        self._status: dict[str, Any] = {}
        """The learner's, as reported last."""
        self._question = Question(partial(learner.call, "status"))
        self._releasing: asyncio.Task[None] | None = None
        supervise = config.supervise
        # What has a limit of its own fails by that, and its message is better.
        limits = {"training": supervise.step_seconds, "publishing": write_seconds + RPC_SECONDS}
        self.dog = Watchdog(self._clock, supervise.stall_seconds, limits)
        self._looked: dict[str, None] = {}
        """Generators that were looked at last."""
        self._period = min(LOOK_SECONDS, supervise.stall_seconds / 4, supervise.silence_seconds / 4)

    async def run(self) -> None:
        """Until cancelled. Raises `RunFailed` for a stall that ends the run."""
        try:
            while True:
                began = self._clock()
                await asyncio.sleep(self._period)
                if self._clock() - began > 3 * self._period + 1:
                    continue  # this very process was paused, and has not read yet what was reported meanwhile
                self._fleet.tick()
                self._release_overdue()
                self._status = await self._question.answer(self._period) or self._status
                self.look()
                await self._act_on(self.dog.news())
        finally:
            if self._releasing is not None:
                self._releasing.cancel()
            await self._question.cancel()

    def _release_overdue(self) -> None:
        """A generator that is silent holds its groups up no longer. One at a time: the learner is asked what it lacks."""
        for generator in self._fleet.overdue():
            if self._admission.leases(generator.generator_id) and (self._releasing is None or self._releasing.done()):
                self._releasing = asyncio.create_task(self._release(generator))

    async def _release(self, generator: Generator) -> None:
        """Its leases return, less what the learner has. It may still play: whose episode arrives first counts."""
        name = generator.generator_id
        with contextlib.suppress(Exception):  # that the learner is lost is noticed elsewhere
            missing = await self._learner.call("missing", self._admission.leases(name))
            if generator.state is HealthState.SUSPECT:
                again = self._admission.lose(name, lambda group: missing.get(group, []))
                silent = round(generator.health.silent_for, 1)
                self.events.warning(
                    "leases_returned", generator=name, pid=generator.pid, seconds=silent, leased_again=again
                )

    # -- what there is to see ------------------------------------------------------------------------------------

    def look(self) -> None:
        """Report to the watchdog what each stage has done, and what waits for it."""
        status = self._status
        storing = status.get("storing")
        for left in self._looked.keys() - self._fleet.generators.keys():
            self._forget(left)
        self._looked = dict.fromkeys(self._fleet.generators)
        for generator in self._fleet:
            self._look_at(generator, may_send=storing is None and not self._question.waiting)
        # A spool that is full waits for a checkpoint, which training brings.
        waits = storing is not None and not storing["full"]
        self.dog.see(STORING, status.get("received", 0), int(waits))
        doing = status.get("doing")
        self.dog.see(ANSWERING, self._question.answers, int(self._question.waiting))
        weights_wait = bool(status.get("weights_wait"))  # then nothing is published, and a step waits for that
        self.dog.see(f"{STORING}/weights", self._published(), int(weights_wait))
        self.dog.see("training", status.get("steps", 0), int(doing == "training" and not weights_wait))
        self.dog.see("publishing", self._published(), int(bool(status.get("writing")) and not weights_wait))
        done, with_work = self.dog.totals(besides=RUN)
        # Nobody has work though the learner waits for some: an episode is lost, or somebody does not continue.
        loading = any(not g.live for g in self._fleet)
        stuck = not with_work and doing == "waiting" and not loading and not self._resting()
        self.dog.see(RUN, done, int(stuck))

    def _forget(self, name: str) -> None:
        for stage in STAGES:
            self.dog.forget(f"{stage}/{name}")

    def _look_at(self, generator: Generator, *, may_send: bool) -> None:
        name = generator.generator_id
        playing, sending, installing, storing = (f"{stage}/{name}" for stage in STAGES)
        if generator.state in (HealthState.LOST, HealthState.STARTING) or generator.finished:
            self._forget(name)
            return
        # An installation is judged before its own limit.
        self.dog.see(installing, generator.answered, generator.asked, generator.answers_in + RPC_SECONDS / 2)
        self.dog.see(storing, generator.version, int(generator.waits_for_disk))
        load = self._loads.get(name)
        if load is None or not generator.live:  # it has not begun to play
            self.dog.forget(playing)
            self.dog.forget(sending)
            return
        # One that is full, or is given new weights, may leave alone what it could lease.
        free = self._admission.can_lease() and not load["playing"] and not generator.leaving
        plays = int(load["playing"] - load.get("held", 0))  # the others wait for weights
        done = int(load["generated_tokens"] + load.get("ended", 0))
        self.dog.see(playing, done, plays or int(free and not self._resting()))
        self.dog.see(sending, int(load.get("acknowledged", 0)), int(load.get("unacknowledged", 0)) * may_send)

    # -- what is done about it -----------------------------------------------------------------------------------

    async def _act_on(self, stalls: Sequence[Stall]) -> None:
        """Once for each generator: one that does not move does so in several stages, and its next process has not."""
        seen = set()
        for stall in stalls:
            generator = self._generator(stall)
            who = generator.generator_id if generator is not None else stall.stage
            if who not in seen:
                seen.add(who)
                await self._act(stall)

    async def _act(self, stall: Stall) -> None:
        generator = self._generator(stall)
        action: str = self.config.supervise.on_stall
        if action == "restart" and stall.stage.partition("/")[0] == STORING:
            action = "warn"  # a disk cannot be restarted: who needs it waits, and nothing is lost
        elif action == "restart" and generator is None and stall.stage != ANSWERING:
            action = "abort"
        silent = await self._dump(f"{stall.stage} did nothing for {stall.seconds:.0f} s")
        self.events.error(
            "stalled",
            stage=stall.stage,
            seconds=round(stall.seconds, 1),
            limit=stall.limit,
            waiting=stall.waiting,
            action=action,
            queues=self.dog.describe(),
            learner=self._status,
            generators=self._fleet.describe(),
            stacks=str(self.run_dir / "stacks"),
            did_not_answer=silent,
        )
        if action == "abort":
            raise RunFailed(
                f"the run stalled: {describe(stall)} (supervise.on_stall = {self.config.supervise.on_stall!r}). Missing by "
                f"group: {self._status.get('lacking', {})}. What every process was doing is in {self.run_dir}/stacks"
                + (f", and in {self.run_dir}/logs for {', '.join(silent)}, which did not answer" if silent else "")
            )
        if action == "restart":
            if generator is None:
                await self._lose_learner(stall)
            else:
                generator.ended_for = describe(stall)
                await self._restart(generator)

    def _generator(self, stall: Stall) -> Generator | None:
        name = stall.stage.partition("/")[2]
        return next((g for g in self._fleet if g.generator_id == name), None)

    async def _dump(self, reason: str) -> list[str]:
        """Every process writes its stacks. Returns who did not answer: those of this host write to their logs instead."""
        with contextlib.suppress(OSError):
            self.world.processes.dump_stacks(self.run_dir / "stacks" / "conductor.txt", reason)
        status = self._status
        asked = {"learner": (self._learner, status.get("pid", 0), status.get("host", ""))}
        asked |= {g.generator_id: (g.handle, *g.process) for g in self._fleet if g.state is not HealthState.LOST}
        answers = await asyncio.gather(
            *(actor.call("dump_stacks", reason, timeout=DUMP_SECONDS) for actor, _, _ in asked.values()),
            return_exceptions=True,
        )
        silent = [name for name, answer in zip(asked, answers, strict=True) if isinstance(answer, BaseException)]
        for name in silent:
            _, pid, host = asked[name]
            if pid:
                self.world.processes.ask_for_stacks(pid, host)
        return silent

    async def _lose_learner(self, stall: Stall) -> None:
        """End the learner's process: the run restarts from its newest checkpoint, as for any loss of it."""
        self.world.actors.kill(self._learner)
        if pid := self._status.get("pid"):
            self.world.processes.kill(pid, self._status["host"])
        raise ProcessLost(f"{describe(stall)}; its process was ended")

    async def _restart(self, generator: Generator) -> None:
        """End its process; its supervisor does the rest, as for any loss."""
        await end_process(self.world, generator.handle, *generator.process)


def describe(stall: Stall) -> str:
    """In words."""
    stage, _, name = stall.stage.partition("/")
    waited = f"for {stall.seconds:.0f} s (limit {stall.limit:g} s)"
    if stall.stage == RUN:
        return f"the learner waits for trajectories, nobody has work, and nothing has moved {waited}"
    if stage == STORING:
        disk = {"": "the spool's disk", "weights": "the disk of weights"}.get(name, f"the disk of weights at {name}")
        return f"{disk} has taken nothing {waited}, and generators wait"
    if stall.stage == ANSWERING:
        return f"the learner has not answered {waited}"
    who = f"{name}, in `{stage}`," if name else f"the learner, in `{stage}`,"
    return f"{who} did nothing {waited}, though {stall.waiting} unit{'s' * (stall.waiting != 1)} of work waited for it"
