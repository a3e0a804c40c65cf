"""The conductor actor: leases, steps, weights, health and the record of the run. It never touches a payload."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from r3async.actors.away import check_sees_run
from r3async.actors.delivery import choose_backend, no_delivery
from r3async.actors.ending import save_model, stop_all
from r3async.actors.fleet import Fleet, Generator, Way
from r3async.actors.installer import DISK_HINT, Installer
from r3async.actors.leasing import Dispatch, LeaseAnswer, LeaseCall
from r3async.actors.members import Members
from r3async.actors.process import RPC_SECONDS, ProcessLost, RunFailed, ask, begin, root_cause, unless, while_well
from r3async.actors.tasks import Evaluator, Tasks
from r3async.actors.watch import Watch
from r3async.checkpoint import Due, RunState, restore_admission
from r3async.checkpoint.state import CONDUCTOR_RECORDS, ConductorState
from r3async.config import Config, config_from_dict
from r3async.data.versions import FIRST, Lineage
from r3async.record.events import EVENTS, open_events
from r3async.record.steps import Devices, StepRows
from r3async.record.timeline import LagMeter, StageSeconds, Timeline
from r3async.schedule.admission import Admission
from r3async.schedule.health import Updates
from r3async.schedule.pace import Pacing
from r3async.untrusted import decode_msgpack
from r3async.world import ActorLost, ActorRef, World
from r3async.world.appending import AppendFile
from r3async.world.disk_waits import RETRY_SECONDS, DiskWait, is_disk_trouble
from r3async.world.stages import begin_task, booked, stage

LOADING_STOP_SECONDS = 5.0


class Conductor:
    """Serves generators (`lease`) and the driver (`run`, `status`, `stop`). One event loop; no blocking work."""

    def __init__(
        self,
        world: World,
        run_id: str,
        config: dict[str, Any],
        run_dir: str,
        learner: ActorRef,
        generators: Mapping[str, ActorRef],
        state: RunState | None = None,
        lineage: Lineage = FIRST,
    ):
        """`state`: of the checkpoint that the run resumes from. `lineage`: of this start."""
        self.world, self._lock = world, begin(world, Path(run_dir), "conductor")
        self.config: Config = config_from_dict(config)
        self.run_id, self.run_dir, self.lineage, self.learner = run_id, Path(run_dir), lineage, learner
        self.events = open_events(self.run_dir, "conductor", world=world)
        self._told = AppendFile(self.run_dir / EVENTS, world=world)
        self.timeline = Timeline(self.run_dir, "weights", enabled=self.config.observe.timeline, world=world)
        self.rows = StepRows(self.run_dir, self.events.error, Devices.of(self.config), world=world)
        self.tasks = Tasks(self.config, self.run_dir, self.events, world=world)
        schedule, clock = self.config.schedule, world.clock.monotonic
        self.admission = Admission(
            schedule,
            # Steps that take as many groups as have enough tokens need nobody knows how many.
            total_groups=None if schedule.takes_more else self.config.steps * schedule.groups_per_step,
            task_seed=self.tasks.task_seed,
            changed=lambda: self.dispatch.ring(),
        )
        self.lag, self._stages = LagMeter(world.processes), StageSeconds("conductor", world.processes)
        self.pacing = Pacing(schedule, self.events.warning, clock)
        self._processes = {"conductor": (world.processes.pid, world.processes.host)}
        self.news = asyncio.Event()
        """There may be something to deliver."""
        self.fleet = Fleet(self.config, self.events, generators, clock, self._wake)
        resting = lambda: self.stopping  # noqa: E731
        self.dispatch = Dispatch(self.admission, self.fleet, resting)
        known = self.config, self.events, self.fleet, self.dispatch
        self.members = Members(*known, self._lose, self._resized, resting, world.actors.kill, clock)
        revive = self.members.revive
        self.evaluator = Evaluator(self.config, self.run_dir, self.events, self.fleet, revive=revive, world=world)
        self._stop_requested = asyncio.Event()
        self._stop_seconds = LOADING_STOP_SECONDS
        """How long the actors may take to end: while they load, nothing has to be finished."""
        self._phase = "starting"
        self._state = state
        self.made = state.steps if state else 0
        """Steps, in all starts of the run."""
        self.version = state.version if state else 0
        """That the last step made, or had a part in."""
        self._updates = Updates(self.config.supervise.max_skipped_steps, self.events.warning, self.events.info)
        self._due = Due(self.config.checkpoint, clock, self.config.evaluation.every, self.made)
        self._tokens_before = state.generated_tokens if state else 0
        self._began = clock() - (state.elapsed if state else 0.0)

    # -- called by generators ------------------------------------------------------------------------------------

    async def lease(self, message: bytes) -> bytes:
        """See `Dispatch.lease`. A `LeaseCall` in MessagePack, and a `LeaseAnswer`: one value each way costs Ray the least."""
        with stage("lease"):
            call = decode_msgpack(message, LeaseCall)
            generator, stats = self.fleet.generators.get(call.generator_id), call.stats
            if generator is None or not generator.is_process(*call.process):
                # It has left; or what it would be leased, the process in its place would have to play, and knows nothing of.
                return msgspec.msgpack.encode(LeaseAnswer([], more=False))
            self.fleet.answered(generator)
            for line in call.told:
                self._told.append(line)
            self.tasks.ended(call.ended, self.admission.groups_leased)
            generator.generated_tokens = int(stats["generated_tokens"])
            self.pacing.report(call.generator_id, stats)
            return msgspec.msgpack.encode(await self.dispatch.lease(call))

    # -- called by the driver ------------------------------------------------------------------------------------

    async def join(self, generator_id: str, handle: ActorRef) -> str:
        """See `Members.join`."""
        return await self.members.join(generator_id, handle)

    async def leave(self, generator_id: str) -> None:
        """See `Members.leave`."""
        await self.members.leave(generator_id)

    def status(self, since: int) -> dict[str, Any]:
        """For the live line; cheap. `rows`: of the steps after step `since`; `evaluations`: the last rows of this start."""
        return {
            "phase": self._phase,
            "steps": self.config.steps,
            "rows": self.rows.since(since),
            "evaluations": list(self.evaluator.recent),
            "slots_taken": self.admission.slots_taken,
            "slots": self.admission.slots,
            "generators": self.fleet.describe(),
            "processes": self._processes | {g.generator_id: g.process for g in self.fleet},
            "generated_tokens": self._generated_tokens,
            "elapsed": self._elapsed,
        }

    @property
    def _generated_tokens(self) -> int:
        return self._tokens_before + self.fleet.generated_tokens

    @property
    def _elapsed(self) -> float:
        return self.world.clock.monotonic() - self._began

    @property
    def stopping(self) -> bool:
        return self._stop_requested.is_set()

    async def stop(self) -> None:
        """Finish the running step, write a checkpoint, end the run. Returns at once."""
        if not self.stopping:
            self._stop_requested.set()
            self.dispatch.ring()
            self.events.warning("stop_requested")
            await self.learner.call("interrupt")

    async def run(self) -> dict[str, Any]:
        """The whole run. Returns what the event `run_finished` says; raises `RunFailed` with the reason.

        `updates`: that made the weights, of all steps and resumes; without any there is no `model`. `without_update`: what
        the steps of this process lacked that made none. A run that was stopped while it loaded has neither."""
        self.events.info("conductor_started", pid=self.world.processes.pid, step=self.made, lineage=self.lineage.number)
        self.lag.start()
        return await booked("steps", self._run())

    async def _run(self) -> dict[str, Any]:
        background: list[asyncio.Task[None]] = []
        try:
            installer = await self._load()
            if installer is None:
                self.events.info("run_finished", steps=self.made, stopped=True, model=None)
                return {"steps": self.made, "model": "", "stopped": True}
            self._phase = "training"
            self.rows.restart_clock()
            delivering = begin_task("deliver", self._deliver_forever(installer))
            watching = begin_task("watch", self._watch(installer).run())
            background += [delivering, watching, begin_task("watch", self.tasks.watch())]
            background.append(begin_task("deliver", self.members.run()))
            self.evaluator.start(self.made, self.version)
            await self._train(installer, list(background))
            self._phase = "writing a checkpoint"
            await while_well(self._checkpoint_at_last(), [delivering])
            watching.cancel()  # what follows has limits of its own
            await self._settle(delivering)
            enter = partial(setattr, self, "_phase")
            updates = await save_model(self.config, self.learner, self.run_dir, enter) if self.made else 0
            self._phase = "evaluating"
            undone = await self.evaluator.finish(self.made, self.version, lambda: self.stopping)
            stopped = self.stopping and (undone or self.made < self.config.steps)  # and not when all was done
            if not updates and not stopped and (failure := self._updates.failure()):
                raise RunFailed(f"{failure}. The last one: {self.tasks.last_failure}")
            ended = {
                "steps": self.made,
                "stopped": stopped,
                "updates": updates,
                "without_update": self._updates.without(),
                "model": str(self.run_dir / "model") if updates else None,
            }
            self.events.info("run_finished", **ended)
            return ended
        except Exception as error:
            cause = root_cause(error, self.run_dir)
            self.events.error("run_failed", error=cause)
            raise (ProcessLost if isinstance(error, ActorLost) else RunFailed)(cause) from error
        finally:
            self._stop_requested.set()
            self._phase = "ending the actors"
            self.lag.stop()
            await self.evaluator.cancel()
            for left in background:
                left.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            await stop_all([*(g.handle for g in self.fleet), self.learner], self._stop_seconds, self.events)
            await self.world.keeper.finish(self.config.supervise.stop_grace_seconds)
            self._phase = "ended"

    # -- start ---------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Of a generator: it may need weights, or be leased something."""
        self.news.set()
        self.dispatch.ring()

    async def _load(self) -> Installer | None:
        """Everything before the first step. None, without waiting for it any longer, if a stop is requested meanwhile."""
        installer = await unless(self._stop_requested, self._start())
        if installer is not None:
            self._stop_seconds = self.config.supervise.stop_grace_seconds
        return installer

    async def _start(self) -> Installer:
        self._phase = "loading learner and engine"
        config, failure = self.config, "the learner did not load"
        learner = asyncio.ensure_future(ask(config, "learner.start_timeout", self.learner, "start", failure=failure))
        learner.add_done_callback(lambda _: setattr(self, "_phase", "loading engine"))
        info, infos = await asyncio.gather(learner, self.fleet.load())
        check_sees_run(info, self.run_dir)
        self._processes["learner"] = info["pid"], info["host"]
        self.fleet.check(infos, self.admission.slots)
        self.tasks.open(infos[0]["tasks"])
        hosts = {i["host"] for i in infos} | {info["host"]}
        backend = choose_backend(config, hosts, info["gpus"], [i["gpus"] for i in infos])
        tokens = await self.fleet.probe_tokens()
        listening = await self.learner.call("listen", infos[0]["routing"], backend, tokens)
        way = Way(listening["endpoint"], backend, listening["keys"])
        await asyncio.gather(*(self._connect(g, way) for g in self.fleet))
        if self._state is not None or listening["newest_group"] >= 0:
            await self._resume(listening["newest_group"])
        self.tasks.resumed(self.admission.groups_leased)
        installer = await self._deliver_first(way, tokens)
        self.members.begin(installer, self.world.actors.current(), infos[0], hosts)
        return installer

    async def _connect(self, generator: Generator, way: Way) -> None:
        """Connect it to the learner. A disk of its host that takes no weights is waited for as long as a start may take."""
        wait = DiskWait(
            self.world, self.events.warning, "weights_stalled", "weights_go_on", generator=generator.generator_id
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.generator.start_timeout):
                return await wait.insist(DISK_HINT, self.fleet.connect_one, generator, way)
        await self.fleet.connect_one(generator, way)  # what it raises says why

    def _resized(self) -> None:
        """The fleet is another one."""
        self.rows.devices = Devices.of(self.config, len(self.fleet.generators))
        self._wake()

    async def _resume(self, newest: int) -> None:
        """Where the checkpoint left off, or without one at the beginning: what the learner has of groups that were not trained is
        not played again."""
        if (state := self._state) is not None:
            restore_admission(self.admission, state)  # of what follows, every engine has its weights first of all
        groups = range(self.admission.oldest_group, max(self.admission.groups_leased, newest + 1))
        missing = await self.learner.call("missing", list(groups))
        self.tasks.restore(state, await self.learner.call("kept_tasks"))
        again = self.admission.adopt(newest, lambda g: missing.get(g, []))
        if state is not None:
            self.rows.restore(state.pending_rows, state.generated_tokens)
        where = {"step": self.made, "version": self.version, "lineage": self.lineage.number}
        self.events.warning("resumed", **where, checkpoint=state is not None, groups_played_again=again)

    async def _deliver_first(self, way: Way, tokens: list[int] | None) -> Installer:
        self._phase = "delivering weights"
        published = await self.learner.call("publish")
        known = self.config, self.events, self.fleet, self.learner, way, tokens, published
        installer = Installer(*known, world=self.world, wake=self._wake)
        await installer.begin()
        self.admission.published(published.version)
        self._delivered(published.version, no_delivery())  # of a resumed run's last step
        return installer

    # -- steps ---------------------------------------------------------------------------------------------------

    async def _train(self, installer: Installer, background: list[asyncio.Task[None]]) -> None:
        """Until all steps are made or a stop is requested. Raises what a background task fails with.

        A version is written, and then delivered, beside the steps that follow it.
        """
        publishing, version = None, self.version + 1
        while self.made < self.config.steps and not self.stopping:
            last = self.made + 1 == self.config.steps
            scored = installer.wants_scores(version)
            result = await while_well(self.learner.call("train_step", last=last, scored=scored), background)
            if result is None:
                break
            self._stepped(result)
            version = self.version + result["new_weights"]
            if result["new_weights"]:
                if publishing is not None:  # the learner has written it before it copied the next
                    await while_well(publishing, background)
                publishing = asyncio.create_task(self._publish(installer, self.version))
                background.append(publishing)
                if self._due(self.made):
                    await while_well(self._checkpoint(), background)
        if publishing is not None:
            await publishing

    def _stepped(self, result: dict[str, Any]) -> None:
        metrics, groups = result["metrics"], result["groups"]
        self.made, self.version = self.made + 1, result["version"]
        self.admission.trained(self.version, groups)
        self.tasks.trained(groups, result["scores"])
        if result["new_weights"]:
            self.admission.published(self.version)
        metrics |= self.pacing.stepped(self.made, len(groups), metrics)
        self.rows.add(self.made, self.version, metrics, result["previews"])
        if reason := self._updates.stepped(self.made, metrics):
            raise RunFailed(reason)
        self.evaluator.after(self.made, self.version)

    async def _checkpoint(self) -> None:
        """Begin a checkpoint of the run as it is between two steps. One that cannot be begun, as for want of descriptors, is due
        again after the next step."""
        state = ConductorState(
            admission=self.admission.snapshot(),
            tasks=self.tasks.snapshot(),
            pending_rows=self.rows.pending,
            elapsed=self._elapsed,
            generated_tokens=self._generated_tokens,
        )
        try:
            state = await state.with_records(self.run_dir, CONDUCTOR_RECORDS, keeper=self.world.keeper)
            with self.timeline.span("checkpoint", step=self.made):
                seconds = await self.learner.call("checkpoint", state)
        except OSError as error:
            if not is_disk_trouble(error):
                raise
            self.events.error("checkpoint_failed", step=self.made, error=f"{type(error).__name__}: {error}")
            return
        self._due.done(self.made)
        self.events.info("checkpoint_begun", step=self.made, training_waited_seconds=round(seconds, 4))

    async def _checkpoint_at_last(self) -> None:
        """Begin the one of the last step, which is tried again for as long as a checkpoint may take. Raises `RunFailed`."""
        clock, limit = self.world.clock.monotonic, self.config.checkpoint.write_timeout
        deadline = clock() + limit
        while self.made != self._due.last:
            await self._checkpoint()
            if self.made != self._due.last:
                if clock() > deadline:
                    raise RunFailed(
                        f"the checkpoint of step {self.made} could not be begun within {limit:g} s (checkpoint.write_timeout): "
                        f"see checkpoint_failed in {EVENTS}, mend the cause and resume"
                    )
                await asyncio.sleep(RETRY_SECONDS)

    async def _publish(self, installer: Installer, version: int) -> None:
        """Have the copied weights written, and make them those that engines are to install.

        The learner may be several versions ahead of an engine: what is read now must stay, however many follow. What is read
        from here on is the newest version, which outlives the next one in any case.
        """
        published = await self.learner.call("write", installer.reading)
        self.rows.amend(version, {"weights/write_seconds": published.seconds})
        installer.published = published
        self.news.set()

    async def _deliver_forever(self, installer: Installer) -> None:
        """Install the newest weights in every generator that answers; write the rows of what was trained."""
        while True:
            await self.news.wait()
            self.news.clear()
            version = installer.published.version
            if not installer.behind and not self.rows.waits_for(version):
                continue
            with self.timeline.span("deliver", version=version):
                figures = await installer.deliver()
            if figures is None:
                continue  # nobody answers: one that is restarted, or recovers, installs the newest version and wakes this
            self._delivered(version, figures)

    async def _settle(self, delivering: asyncio.Task[None]) -> None:
        """Let the last weights be delivered, so that every step has its row. Raises what the delivery failed with."""
        deadline = self.world.clock.monotonic() + RPC_SECONDS
        while not self.rows.empty and self.world.clock.monotonic() < deadline:
            self.news.set()
            await while_well(asyncio.sleep(0.05), [delivering])
        self._delivered(self.version, no_delivery())

    def _delivered(self, version: int, figures: dict[str, float]) -> None:
        """`version` is installed: the rows of what made it, and of what was before, are written."""
        figures = figures | {
            "generator/restarts": self.fleet.restarts,
            "slots/taken": self.admission.slots_taken,
            **{f"lag/conductor_{name}": value for name, value in self.lag.figures().items()},
            **self.dispatch.figures(),
            **self.tasks.figures(self.admission.groups_leased),
        }
        self.dispatch.cpu.add("conductor", self.world.processes.cpu_seconds(), "conductor")
        stages = self.dispatch.stages.totals | self._stages.totals()
        self.rows.delivered(version, self._generated_tokens, figures, self.dispatch.cpu.totals, stages)

    # -- the end -------------------------------------------------------------------------------------------------

    def _watch(self, installer: Installer) -> Watch:
        known: dict[str, Any] = {"fleet": self.fleet, "admission": self.admission, "learner": self.learner}
        return Watch(
            *(self.world, self.config, self.run_dir, self.events),
            **known,
            loads=self.dispatch.loads,
            published=lambda: installer.published.version,
            resting=lambda: self.stopping or self.evaluator.running,
        )

    async def _lose(self, generator: Generator) -> list[int]:
        """Its leases return. Returns the groups that are leased again."""
        self.dispatch.lost(generator.generator_id)
        missing = await self.learner.call("missing", self.admission.leases(generator.generator_id))
        return self.admission.lose(generator.generator_id, lambda g: missing.get(g, []))
