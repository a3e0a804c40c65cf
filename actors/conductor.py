"""The conductor actor: leases, versions, weights, health and the record of the run. It never touches a payload."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from r3async.actors.delivery import choose_backend, no_delivery
from r3async.actors.dispatch import Dispatch, LeaseCall
from r3async.actors.evaluation import Evaluator
from r3async.actors.fleet import RPC_SECONDS, Fleet, Generator, Way
from r3async.actors.installer import Installer
from r3async.actors.process import ProcessLost, RunFailed, ask, begin, root_cause
from r3async.actors.steps import Steps
from r3async.actors.tasks import Tasks
from r3async.actors.watch import Watch
from r3async.checkpoint import RunState, restore_admission
from r3async.checkpoint.state import CONDUCTOR_RECORDS, ConductorState
from r3async.config import Config, config_from_dict
from r3async.data.model_shape import RoutingShape
from r3async.data.versions import FIRST, Lineage
from r3async.record.events import open_events
from r3async.record.steps import StepRows
from r3async.record.timeline import LagMeter, Timeline
from r3async.schedule.admission import Admission
from r3async.schedule.groups import largest_buffer
from r3async.schedule.pace import Pacing
from r3async.world import ActorLost, ActorRef, World

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
        self.timeline = Timeline(self.run_dir, "weights", enabled=self.config.observe.timeline, world=world)
        self.rows = StepRows(self.run_dir, self.events.error, world=world)
        self.tasks = Tasks(self.config, self.run_dir, self.events, world=world)
        schedule, clock = self.config.schedule, world.clock.monotonic
        self.admission = Admission(
            schedule,
            # Steps that take as many groups as have enough tokens need nobody knows how many.
            total_groups=None if schedule.tokens_per_step else self.config.steps * schedule.groups_per_step,
            task_seed=self.tasks.task_seed,
            changed=lambda: self.dispatch.ring(),
        )
        self.lag = LagMeter(world.processes)
        self.pacing = Pacing(schedule, self.events.warning, clock)
        self._processes = {"conductor": (world.processes.pid, world.processes.host)}
        self.news = asyncio.Event()
        """There may be something to deliver."""
        self.fleet = Fleet(self.config, self.events, generators, clock, self._wake)
        self.dispatch = Dispatch(self.admission, self.fleet, lambda: self.stopping)
        self.evaluator = Evaluator(self.config, self.run_dir, self.events, self.fleet, world=world)
        self.stopping = False
        self._stop_requested = asyncio.Event()
        self._stop_seconds = LOADING_STOP_SECONDS
        """How long the actors may take to end: while they load, nothing has to be finished."""
        self._phase = "starting"
        self._state = state
        self._tokens_before = self._state.generated_tokens if self._state else 0
        self._began = clock() - (self._state.elapsed if self._state else 0.0)

    # -- called by generators ------------------------------------------------------------------------------------

    async def lease(self, message: bytes) -> bytes:
        """See `Dispatch.lease`. A `LeaseCall` in MessagePack, and a `LeaseAnswer`: one value each way costs Ray the least."""
        call = msgspec.msgpack.decode(message, type=LeaseCall)
        generator, stats = self.fleet[call.generator_id], call.stats
        self.fleet.answered(generator)
        self.tasks.ended(call.ended, self.admission.groups_leased)
        generator.generated_tokens = int(stats["generated_tokens"])
        self.pacing.report(call.generator_id, stats)
        return msgspec.msgpack.encode(await self.dispatch.lease(call))

    # -- called by the driver ------------------------------------------------------------------------------------

    def status(self, since: int) -> dict[str, Any]:
        """For the live line; cheap. `rows` are the metrics of the steps after step `since`."""
        return {
            "phase": self._phase,
            "steps": self.config.steps,
            "rows": self.rows.since(since),
            "slots_taken": self.admission.slots_taken,
            "slots": self.admission.slots,
            "generators": self.fleet.describe(),
            "processes": self._processes | {g.generator_id: (g.pid, g.host) for g in self.fleet},
            "generated_tokens": self._generated_tokens,
            "elapsed": self._elapsed,
        }

    @property
    def _generated_tokens(self) -> int:
        return self._tokens_before + self.fleet.generated_tokens

    @property
    def _elapsed(self) -> float:
        return self.world.clock.monotonic() - self._began

    async def stop(self) -> None:
        """Finish the running step, write a checkpoint, end the run. Returns at once."""
        if not self.stopping:
            self.stopping = True
            self._stop_requested.set()
            self.dispatch.ring()
            self.events.warning("stop_requested")
            await self.learner.call("interrupt")

    async def run(self) -> dict[str, Any]:
        """The whole run. Returns what the event `run_finished` says; raises `RunFailed` with the reason.

        `updates`: that made the weights, of all steps and resumes; without any there is no `model`. `without_update`: what
        the steps of this process lacked that made none. A run that was stopped while it loaded has neither."""
        step = self._state.steps if self._state else 0
        self.events.info("conductor_started", pid=self.world.processes.pid, step=step, lineage=self.lineage.number)
        self.lag.start()
        background: list[asyncio.Task[None]] = []
        try:
            installer = await self._load()
            if installer is None:
                self.events.info("run_finished", steps=step, stopped=True, model=None)
                return {"steps": step, "model": "", "stopped": True}
            self._phase = "training"
            self.rows.restart_clock()
            steps = Steps(self, installer, self._state)
            delivering = asyncio.create_task(steps.deliver_forever())
            watching = asyncio.create_task(self._watch(installer).run())
            me = self.world.actors.current()
            supervising = [asyncio.create_task(self._supervise(installer, g, me)) for g in self.fleet]
            background += [delivering, watching, asyncio.create_task(self.tasks.watch()), *supervising]
            self.evaluator.after(steps.made)
            await steps.train(list(background))
            self._phase = "writing a checkpoint"
            await steps.save_last([delivering])
            watching.cancel()  # what follows has limits of its own
            await steps.settle(delivering)
            updates = await self._save_model() if steps.made else 0
            self._phase = "evaluating"
            await self.evaluator.finish(steps.made, lambda: self.stopping)
            ended = {
                "steps": steps.made,
                "stopped": self.stopping,
                "updates": updates,
                "without_update": steps.updates.without(),
                "model": str(self.run_dir / "model") if updates else None,
            }
            self.events.info("run_finished", **ended)
            return ended
        except Exception as error:
            cause = root_cause(error, self.run_dir)
            self.events.error("run_failed", error=cause)
            raise (ProcessLost if isinstance(error, ActorLost) else RunFailed)(cause) from error
        finally:
            self.stopping = True
            self._phase = "ending the actors"
            self.lag.stop()
            await self.evaluator.cancel()
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            await self._stop_actors()
            await self.world.keeper.finish(self.config.supervise.stop_grace_seconds)
            self._phase = "ended"

    # -- inside --------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Of a generator: it may need weights, or be leased something."""
        self.news.set()
        self.dispatch.ring()

    async def _load(self) -> Installer | None:
        """Everything before the first step. None, without waiting for it any longer, if a stop is requested meanwhile."""
        loading = asyncio.ensure_future(self._start())
        stopped = asyncio.ensure_future(self._stop_requested.wait())
        try:
            await asyncio.wait([loading, stopped], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            done = loading.done()
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
        if not done:
            return None
        installer = loading.result()
        self._stop_seconds = self.config.supervise.stop_grace_seconds
        return installer

    async def _start(self) -> Installer:
        self._phase = "loading learner and engine"
        limit = self.config.learner.start_timeout
        setting = "learner.start_timeout"
        started = ask(self.learner, "start", seconds=limit, failure="the learner did not load", setting=setting)
        learner = asyncio.ensure_future(started)
        learner.add_done_callback(lambda _: setattr(self, "_phase", "loading engine"))
        info, infos = await asyncio.gather(learner, self.fleet.load())
        self._processes["learner"] = info["pid"], info["host"]
        hosts = {i["host"] for i in infos} | {info["host"]}
        backend = choose_backend(self.config, hosts, info["gpus"], [i["gpus"] for i in infos])
        routing = infos[0]["routing"]
        tokens = await self.fleet.probe_tokens()
        learner_info = await self.learner.call("listen", routing, backend, tokens)
        way = Way(learner_info["endpoint"], backend, learner_info["keys"])
        await self.fleet.connect(way)
        sizes = [i["tasks"] for i in infos]
        if len(set(sizes)) > 1:
            raise RunFailed(
                f"generators disagree on how many tasks the environment has (its `size`): {sizes}; every host needs the "
                "same data"
            )
        self.tasks.open(sizes[0])
        self._check_routing(routing)
        if self._state is not None or learner_info["newest_group"] >= 0:
            await self._go_on(self._state, learner_info["newest_group"])
        self.tasks.resumed(self.admission.groups_leased)
        return await self._deliver_first(way, tokens)

    def _check_routing(self, routing: dict[str, int] | None) -> None:
        """`routing`: what engines record. Raises `RunFailed` if they cannot record what is asked for."""
        need = largest_buffer(self.config, RoutingShape(**routing) if routing else None)
        if need > self.config.transport.credit_bytes:  # the groups of the next step pass in any case: `Capacity`
            self.events.warning(
                "credit_is_small",
                credit_bytes=self.config.transport.credit_bytes,
                slots=self.admission.slots,
                hint=f"trajectories may wait at their generators; {need} would hold all that may be in flight",
            )
        if routing is None and self.config.routing.replay == "rollout":
            raise RunFailed('the model has no MoE layer to replay routes in: set routing.replay="off"')

    async def _go_on(self, state: RunState | None, newest: int) -> None:
        """Where the checkpoint left off, or without one at the beginning: what the learner has of groups that were not trained is
        not played again."""
        if state is not None:
            restore_admission(self.admission, state)  # of what follows, every engine has its weights first of all
        groups = range(self.admission.oldest_group, max(self.admission.groups_leased, newest + 1))
        missing = await self.learner.call("missing", list(groups))
        again = self.admission.adopt(newest, lambda g: missing.get(g, []))
        if state is not None:
            self.rows.restore(state.pending_rows, state.generated_tokens)
        self.events.warning(
            "resumed",
            step=state.steps if state else 0,
            version=state.version if state else 0,
            lineage=self.lineage.number,
            checkpoint=state is not None,
            groups_played_again=again,
        )

    async def _deliver_first(self, way: Way, tokens: list[int] | None) -> Installer:
        self._phase = "delivering weights"
        published = await self.learner.call("publish")
        clock = self.world.clock.monotonic
        put = self.world.actors.put
        installer = Installer(self.config, self.events, self.fleet, way, tokens, published, clock, self._wake, put)
        await installer.begin()
        self.admission.installed(published.version)
        self.delivered(published.version, no_delivery())  # of a resumed run's last step
        return installer

    async def state(self) -> ConductorState:
        """For a checkpoint of the run as it is between two steps."""
        state = ConductorState(
            admission=self.admission.snapshot(),
            pending_rows=self.rows.pending,
            elapsed=self._elapsed,
            generated_tokens=self._generated_tokens,
        )
        return await state.with_records(self.run_dir, CONDUCTOR_RECORDS, keeper=self.world.keeper)

    def delivered(self, version: int, figures: dict[str, float]) -> None:
        """`version` is installed: the rows of what made it, and of what was before, are written."""
        figures = figures | {
            "generator/restarts": self.fleet.restarts,
            "slots/taken": self.admission.slots_taken,
            "generator/concurrency": sum(load["limit"] for load in self.dispatch.loads.values()),
            **{f"lag/conductor_{name}": value for name, value in self.lag.figures().items()},
            **{f"lag/generator_{name}": self._worst(f"lag_{name}") for name in self.lag.NAMES},
            **self.tasks.figures(self.admission.groups_leased),
        }
        self.rows.delivered(version, self._generated_tokens, figures)

    def _worst(self, stat: str) -> float:
        return max((load[stat] for load in self.dispatch.loads.values()), default=0.0)

    async def _save_model(self) -> int:
        """And wait for the last checkpoint. Returns how many updates made the weights."""
        self._phase = "saving the model"
        limit, failure = self.config.learner.start_timeout, "the model was not saved"
        model, setting = str(self.run_dir / "model"), "learner.start_timeout"
        updates = await ask(self.learner, "save", model, seconds=limit, failure=failure, setting=setting)
        self._phase = "writing a checkpoint"
        limit, failure = self.config.checkpoint.write_timeout + RPC_SECONDS, "the last checkpoint was not written"
        setting = "checkpoint.write_timeout"
        await ask(self.learner, "finish_checkpoint", seconds=limit, failure=failure, setting=setting)
        return updates

    async def _supervise(self, installer: Installer, generator: Generator, me: ActorRef) -> None:
        """Keep one generator playing. A death returns its leases; the restarted process installs current weights first."""
        await installer.supervise(generator, me, stopping=lambda: self.stopping, died=self._bury, revived=self._wake)

    def _watch(self, installer: Installer) -> Watch:
        return Watch(
            self.world,
            self.config,
            self.run_dir,
            self.events,
            fleet=self.fleet,
            admission=self.admission,
            learner=self.learner,
            loads=self.dispatch.loads,
            published=lambda: installer.published.version,
            resting=lambda: self.stopping or self.evaluator.running,
        )

    async def _bury(self, generator: Generator, error: BaseException) -> list[int]:
        self.dispatch.lost(generator.generator_id)
        missing = await self.learner.call("missing", self.admission.leases(generator.generator_id))
        return self.admission.lose(generator.generator_id, lambda g: missing.get(g, []))

    async def _stop_actors(self) -> None:
        actors = [*(g.handle for g in self.fleet), self.learner]
        ended = asyncio.gather(*(actor.call("stop") for actor in actors), return_exceptions=True)
        try:
            await asyncio.wait_for(ended, self._stop_seconds)
        except TimeoutError:
            self.events.warning("actors_did_not_stop", seconds=self._stop_seconds)
