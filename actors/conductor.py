"""The conductor actor: leases, versions, weights, health and the record of the run. It never touches a payload."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import msgspec

from actors.deaths import ProcessDied, RunFailed, root_cause, within
from actors.delivery import choose_backend, no_delivery
from actors.evaluation import Evaluator
from actors.fleet import RPC_SECONDS, Fleet, Generator
from actors.process import begin
from actors.saving import CONDUCTOR_RECORDS, Books
from actors.tasks import Tasks
from actors.watch import Watch
from r3async.appending import KEEPER
from r3async.buffer.groups import largest_buffer
from r3async.checkpoint import Due, RunState, restore_admission
from r3async.checkpoint.books import decode_state
from r3async.config import Config, config_from_dict
from r3async.engines.base import RoutingShape
from r3async.lineage import FIRST, Lineage
from r3async.observe.events import open_events
from r3async.observe.lag import LagMeter
from r3async.observe.steps import StepBook
from r3async.observe.timeline import Timeline
from r3async.scheduling.admission import Admission, GroupLease
from r3async.scheduling.failures import EpisodeEnd
from r3async.scheduling.pace import Pacing
from r3async.scheduling.updates import Updates
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
        state: bytes = b"",
        lineage: Lineage = FIRST,
    ):
        """`state`: of the checkpoint that the run resumes from (`encode_state`); empty if it begins. `lineage`: of this start."""
        self.world, self._lock = world, begin(world, Path(run_dir), "conductor")
        self.config: Config = config_from_dict(config)
        self.run_id, self.run_dir, self.lineage = run_id, Path(run_dir), lineage
        self.events = open_events(self.run_dir, "conductor")
        self.timeline = Timeline(self.run_dir, "weights", enabled=self.config.observe.timeline)
        self.book = StepBook(self.run_dir, self.events.error)
        schedule = self.config.schedule
        self.admission = Admission(
            max_staleness=schedule.max_staleness,
            groups_per_step=schedule.groups_per_step,
            samples_per_group=schedule.samples_per_group,
            steps_per_publication=schedule.steps_per_publication,
            window=schedule.window,
            split=schedule.split,
            # Steps that take as many groups as have enough tokens need nobody knows how many.
            total_groups=None if schedule.tokens_per_step else self.config.steps * schedule.groups_per_step,
            task_seed=lambda group: self.tasks.task_seed(group),
        )
        self.tasks = Tasks(self.config, self.run_dir, self.events)
        self.lag = LagMeter()
        self.pacing = Pacing(schedule, self.events.warning)
        self.updates = Updates(self.config.supervise.max_skipped_steps, self.events.warning, self.events.info)
        self._loads: dict[str, dict[str, float]] = {}
        """What each generator said of itself last."""
        self._processes = {"conductor": (world.processes.pid, world.processes.host)}
        self.fleet = Fleet(self.config, self.events, {})
        self.evaluator = Evaluator(self.config, self.run_dir, self.events, lambda: self.fleet)
        self.learner: Any = None
        self._routing: dict[str, int] | None = None
        self._made = 0
        """Version that the last step made, or had a part in."""
        self._published = asyncio.Event()
        self._failure: BaseException | None = None
        self._stopping = False
        self._stop_requested = asyncio.Event()
        self._stop_seconds = LOADING_STOP_SECONDS
        """How long the actors may take to end: while they load, nothing has to be finished."""
        self._phase = "starting"
        self._state = decode_state(state) if state else None
        self._steps = self._state.steps if self._state else 0
        """Steps made."""
        self._due = Due(self.config.checkpoint, world.clock.monotonic)
        self._due.done(self._steps)
        self._saved = self._steps if self._state else -1
        """Steps made when the last checkpoint was begun."""
        self._tokens_before = self._state.generated_tokens if self._state else 0
        self._started = time.time() - (self._state.elapsed if self._state else 0.0)

    # -- called by generators ------------------------------------------------------------------------------------

    async def lease(
        self, generator_id: str, room: int, stats: dict[str, float], ended: bytes = b"\x90"
    ) -> dict[str, Any]:
        """Lease up to `room` episodes. `more` is False when nothing will ever be left, `blocked` tells that every slot is
        taken. `stats`: the engine's, and how many episodes the generator is `playing`, of at most `limit`. `ended`: episodes
        that are over since the last call, a list of `EpisodeEnd` in MessagePack."""
        generator = self.fleet[generator_id]
        self.fleet.heard(generator)
        self.tasks.ended(msgspec.msgpack.decode(ended, type=list[EpisodeEnd]), self.admission.groups_leased)
        generator.generated_tokens = int(stats["generated_tokens"])
        generator.pause_seconds = float(stats.get("pause_seconds", 0.0))
        self.pacing.heard(generator_id, stats)
        self._loads[generator_id] = stats
        leases: list[GroupLease] = []
        while not self._stopping and generator.health.may_lease:
            lease = self.admission.lease(
                generator_id,
                version=generator.version,
                room=room,
                at_once=int(stats["limit"]),
                among=1 + sum(self._is_idle(g) for g in self.fleet if g is not generator),
            )
            if lease is None:
                break
            leases.append(lease)
            room -= len(lease.episode_indices)
            stats["playing"] += len(lease.episode_indices)
        return {
            "leases": msgspec.msgpack.encode(leases),
            "more": not self._stopping and not self.admission.exhausted,
            "blocked": self.admission.full,
        }

    def _is_idle(self, generator: Generator) -> bool:
        load, current = self._loads.get(generator.generator_id), generator.version >= self.admission.version
        return generator.health.may_lease and current and load is not None and not load["playing"]

    # -- called by the driver ------------------------------------------------------------------------------------

    def status(self, since: int) -> dict[str, Any]:
        """For the live line; cheap. `rows` are the metrics of the steps after step `since`."""
        return {
            "phase": self._phase,
            "steps": self.config.steps,
            "rows": self.book.since(since),
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
        return time.time() - self._started

    async def stop(self) -> None:
        """Finish the running step, write a checkpoint, end the run. Returns at once."""
        if not self._stopping:
            self._stopping = True
            self._stop_requested.set()
            self.events.warning("stop_requested")
            if self.learner is not None:
                await self.learner.call("interrupt")

    async def run(self, learner: ActorRef, generators: dict[str, ActorRef]) -> dict[str, Any]:
        """The whole run. Returns what the event `run_finished` says; raises `RunFailed` with the reason.

        `updates`: that made the weights, of all steps and resumes; without any there is no `model`. `without_update`: what
        the steps of this process lacked that made none."""
        self.learner = learner
        self.events.info(
            "conductor_started", pid=self.world.processes.pid, step=self._steps, lineage=self.lineage.number
        )
        self.lag.start()
        self.fleet = Fleet(self.config, self.events, generators, wake=self._published.set)
        background: list[asyncio.Task[None]] = []
        try:
            if not await self._load():
                self.events.info("run_finished", steps=self._steps, stopped=True, model=None)
                return {"steps": self._steps, "model": "", "stopped": True}
            self._phase = "training"
            self.book.restart_clock()
            delivering = asyncio.create_task(self._deliver_forever())
            watching = asyncio.create_task(self._watch().run())
            supervising = [asyncio.create_task(self._supervise(g)) for g in self.fleet]
            background = [delivering, watching, asyncio.create_task(self.tasks.watch()), *supervising]
            self.evaluator.after(self._steps)
            steps = await self._train_steps(list(background))
            if steps and self._saved != steps:
                self._phase = "writing a checkpoint"
                await self._while_well(self._save(), [delivering])
            watching.cancel()  # what follows has limits of its own
            await self._settle(delivering)
            self._phase = "saving the model"
            model, updates = str(self.run_dir / "model"), 0
            if steps:
                limit = self.config.learner.start_timeout
                saved = learner.call("save", model, timeout=limit)
                updates = await within(saved, limit, "the model was not saved", "learner.start_timeout")
                self._phase = "writing a checkpoint"
                limit = self.config.checkpoint.write_timeout + RPC_SECONDS
                written = learner.call("finish_checkpoint", timeout=limit)
                await within(written, limit, "the last checkpoint was not written", "checkpoint.write_timeout")
            self._phase = "evaluating"
            await self.evaluator.finish(steps, lambda: self._stopping)
            ended = {
                "steps": steps,
                "stopped": self._stopping,
                "updates": updates,
                "without_update": self.updates.without(),
                "model": model if updates else None,
            }
            self.events.info("run_finished", **ended)
            return ended
        except Exception as error:
            cause = root_cause(error, self.run_dir)
            self.events.error("run_failed", error=cause)
            raise (ProcessDied if isinstance(error, ActorLost) else RunFailed)(cause) from error
        finally:
            self._stopping = True
            self._phase = "ending the actors"
            self.lag.stop()
            await self.evaluator.cancel()
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            await self._stop_actors()
            await asyncio.to_thread(KEEPER.drain, self.config.supervise.stop_grace_seconds)
            self._phase = "ended"

    # -- inside --------------------------------------------------------------------------------------------------

    async def _load(self) -> bool:
        """Everything before the first step. False, without waiting for it any longer, if a stop is requested meanwhile."""
        loading = asyncio.ensure_future(self._start_and_probe())
        stopped = asyncio.ensure_future(self._stop_requested.wait())
        try:
            await asyncio.wait({loading, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            done = loading.done()
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
        if done:
            loading.result()
            self._stop_seconds = self.config.supervise.stop_grace_seconds
        return done

    async def _start_and_probe(self) -> None:
        await self._start()
        await self._probe()

    async def _start(self) -> None:
        self._phase = "loading learner and engine"
        limit = self.config.learner.start_timeout
        loaded = self.learner.call("start", timeout=limit)
        started = within(loaded, limit, "the learner did not load", "learner.start_timeout")
        learner = asyncio.ensure_future(started)
        loading = asyncio.ensure_future(self.fleet.load())
        learner.add_done_callback(lambda _: setattr(self, "_phase", "loading engine"))
        info, infos = await asyncio.gather(learner, loading)
        self._processes["learner"] = info["pid"], info["host"]
        hosts = {i["host"] for i in infos} | {info["host"]}
        self.fleet.backend = choose_backend(self.config, hosts, info["gpus"], [i["gpus"] for i in infos])
        self._routing = infos[0]["routing"]
        heard = await self.learner.call("listen", self._routing)
        await self.fleet.connect(heard["endpoint"], heard["keys"])
        sizes = {i["tasks"] for i in infos}
        if len(sizes) > 1:
            raise RunFailed(
                f"generators disagree on how many tasks the environment has (its `size`): {sizes}; every host needs the "
                "same data"
            )
        self.tasks.open(*sizes)
        need = largest_buffer(self.config, RoutingShape(**self._routing) if self._routing else None)
        if need > self.config.transport.credit_bytes:  # the groups of the next step pass in any case: `CreditPool`
            self.events.warning(
                "credit_is_small",
                credit_bytes=self.config.transport.credit_bytes,
                slots=self.admission.slots,
                hint=f"trajectories may wait for credit; transport.credit_bytes of {need} would hold all that may be in flight",
            )
        if self._routing is None and self.config.routing.replay == "rollout":
            raise RunFailed('the model has no MoE layer to replay routes in: set routing.replay="off"')
        if self._state is not None or heard["newest_group"] >= 0:
            await self._go_on(self._state, heard["newest_group"])
        self.tasks.resumed(self.admission.groups_leased)

    async def _go_on(self, state: RunState | None, newest: int) -> None:
        """Where the checkpoint left off, or without one at the beginning: what the learner has of groups that were not trained is
        not played again."""
        if state is not None:
            restore_admission(self.admission, state)  # of what follows, every engine has its weights first of all
        groups = range(self.admission.oldest_group, max(self.admission.groups_leased, newest + 1))
        missing = await self.learner.call("missing", list(groups))
        again = self.admission.adopt(newest, lambda g: missing.get(g, []))
        if state is not None:
            self.book.restore(state.pending_rows, state.generated_tokens)
            self._made = state.version
        self.events.warning(
            "resumed",
            step=self._steps,
            version=self._made,
            lineage=self.lineage.number,
            checkpoint=state is not None,
            groups_played_again=again,
        )

    async def _probe(self) -> None:
        self._phase = "delivering weights"
        await self.learner.call("publish_through", self.fleet.backend, await self.fleet.probe_tokens())
        published = await self.learner.call("publish")
        await self.fleet.begin(published)
        self.admission.installed(published.version)
        self._delivered(published.version, no_delivery())  # of a resumed run's last step

    async def _train_steps(self, background: list[asyncio.Task[None]]) -> int:
        """One optimizer step after the other, until all are done or a stop is requested. Returns how many the run has made.

        A version is written, and then delivered, beside the steps that follow it.
        """
        publishing: asyncio.Task[None] | None = None
        while (steps := self._steps) < self.config.steps and not self._stopping:
            last = steps + 1 == self.config.steps
            result = await self._while_well(self.learner.call("train_step", last=last), background)
            if result is None:
                break
            self._steps = steps = steps + 1
            self.admission.trained(result["version"], result["groups"])
            result["metrics"] |= self.pacing.stepped(steps, len(result["groups"]), result["metrics"])
            self.book.add(steps, result["version"], result["metrics"], result["previews"])
            if reason := self.updates.stepped(steps, result["metrics"]):
                raise RunFailed(reason)
            self.evaluator.after(steps)
            self._made = result["version"]
            if result["new_weights"]:
                if publishing is not None:  # the learner has written it before it copied the next
                    await self._while_well(publishing, background)
                publishing = asyncio.create_task(self._publish(self._made))
                background.append(publishing)
                if self._due(steps):
                    await self._while_well(self._save(), background)
        if publishing is not None:
            await publishing
        return self._steps

    async def _save(self) -> None:
        """Begin a checkpoint of the run as it is between two steps."""
        self._due.done(self._steps)
        self._saved = self._steps
        books = Books(self.admission.snapshot(), {}, self.book.pending, self._elapsed, self._generated_tokens)
        books = books.with_records(self.run_dir, CONDUCTOR_RECORDS, keeper=self.world.keeper)
        with self.timeline.span("checkpoint", step=self._steps):
            seconds = await self.learner.call("checkpoint", books)
        self.events.info("checkpoint_begun", step=self._steps, training_waited_seconds=round(seconds, 4))

    async def _while_well(self, call: Awaitable[Any], background: list[asyncio.Task[None]]) -> Any:
        """What `call` returns. Raises what a background task failed with as soon as it has; those that end well are let go."""
        waiting = asyncio.ensure_future(call)
        while True:
            for task in background:
                if task.done() and task.exception() is not None:
                    waiting.cancel()
                    raise task.exception()  # type: ignore[misc]
            background[:] = [t for t in background if not t.done()]
            if waiting.done():
                return waiting.result()
            await asyncio.wait([waiting, *background], timeout=RPC_SECONDS, return_when=asyncio.FIRST_COMPLETED)

    async def _publish(self, version: int) -> None:
        """Have the copied weights written, and make them those that engines are to install.

        The learner may be several versions ahead of an engine: what is read now must stay, however many follow. What is read
        from here on is the newest version, which outlives the next one in any case.
        """
        published = await self.learner.call("write", self.fleet.reading)
        self.book.amend(version, {"weights/write_seconds": published.seconds})
        self.fleet.published = published
        self._published.set()

    async def _settle(self, delivering: asyncio.Task[None]) -> None:
        """Let the last weights be delivered, so that every step has its row. Raises what the delivery failed with."""
        deadline = time.monotonic() + RPC_SECONDS
        while not self.book.empty and time.monotonic() < deadline:
            self._published.set()
            await self._while_well(asyncio.sleep(0.05), [delivering])
        self._delivered(self._made, no_delivery())

    async def _deliver_forever(self) -> None:
        """Install the newest weights in every generator that answers; free slots; write the rows of what was trained."""
        while True:
            await self._published.wait()
            self._published.clear()
            assert self.fleet.published is not None
            version = self.fleet.published.version
            if not self.fleet.behind and not self.book.waits_for(version):
                continue
            with self.timeline.span("deliver", version=version):
                figures = await self.fleet.deliver()
            if figures is None:
                continue  # nobody answers: one that is restarted, or recovers, installs the newest version and wakes this
            self.admission.installed(version)
            self._delivered(version, figures)

    def _delivered(self, version: int, figures: dict[str, float]) -> None:
        figures = figures | {
            "generator/restarts": self.fleet.restarts,
            "slots/taken": self.admission.slots_taken,
            "generator/concurrency": sum(load["limit"] for load in self._loads.values()),
            **{f"lag/conductor_{name}": value for name, value in self.lag.figures().items()},
            **{f"lag/generator_{name}": self._worst(f"lag_{name}") for name in self.lag.NAMES},
            **self.tasks.figures(self.admission.groups_leased),
        }
        self.book.delivered(version, self._generated_tokens, figures)

    def _worst(self, stat: str) -> float:
        return max((load[stat] for load in self._loads.values()), default=0.0)

    async def _supervise(self, generator: Generator) -> None:
        """Keep one generator playing. A death returns its leases; the restarted process installs current weights first."""
        await self.fleet.supervise(
            generator,
            self.world.actors.current(),
            stopping=lambda: self._stopping,
            died=self._bury,
            revived=self._published.set,
        )

    def _watch(self) -> Watch:
        return Watch(
            self.world,
            self.config,
            self.run_dir,
            self.events,
            fleet=self.fleet,
            admission=self.admission,
            learner=self.learner,
            loads=self._loads,
            resting=lambda: self._stopping or self.evaluator.running,
        )

    async def _bury(self, generator: Generator, error: BaseException) -> list[int]:
        missing = await self.learner.call("missing", self.admission.leases(generator.generator_id))
        self._loads.pop(generator.generator_id, None)
        return self.admission.lose(generator.generator_id, lambda g: missing.get(g, []))

    async def _stop_actors(self) -> None:
        calls = [g.handle.call("stop") for g in self.fleet]
        if self.learner is not None:
            calls.append(self.learner.call("stop"))
        ended = asyncio.gather(*calls, return_exceptions=True)
        try:
            await asyncio.wait_for(ended, self._stop_seconds)
        except TimeoutError:
            self.events.warning("actors_did_not_stop", seconds=self._stop_seconds)
