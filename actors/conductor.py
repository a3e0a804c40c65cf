"""The conductor actor: leases, versions, weights, health and the record of the run. It never touches a payload."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import msgspec

from actors.delivery import choose_backend
from actors.fleet import RPC_SECONDS, Fleet, Generator, RunFailed, no_delivery
from actors.process import begin
from r3async.buffer.groups import largest_buffer
from r3async.config import Config, config_from_dict
from r3async.engines.base import RoutingShape
from r3async.observe.events import open_events
from r3async.observe.steps import StepBook
from r3async.scheduling.admission import Admission, GroupLease


class Conductor:
    """Serves generators (`lease`) and the driver (`run`, `status`, `stop`). One event loop; no blocking work."""

    def __init__(self, run_id: str, config: dict[str, Any], run_dir: str):
        begin(Path(run_dir) / "logs" / "conductor.log")
        self.config: Config = config_from_dict(config)
        self.run_id, self.run_dir = run_id, Path(run_dir)
        self.events = open_events(self.run_dir, "conductor")
        self.book = StepBook(self.run_dir, self.events.error)
        schedule = self.config.schedule
        self.admission = Admission(
            max_staleness=schedule.max_staleness,
            groups_per_step=schedule.groups_per_step,
            samples_per_group=schedule.samples_per_group,
            steps_per_publication=schedule.steps_per_publication,
            # Steps that take as many groups as have enough tokens need nobody knows how many.
            total_groups=None if schedule.tokens_per_step else self.config.steps * schedule.groups_per_step,
            task_seed=self._task_seed,
        )
        self.fleet = Fleet(self.config, self.events, {})
        self.learner: Any = None
        self._routing: dict[str, int] | None = None
        self._consumed: dict[int, int] = {0: 0}
        """By published version: the groups that it and all earlier ones were trained from."""
        self._made = 0
        """Version that the last step made, or had a part in."""
        self._published = asyncio.Event()
        self._failure: BaseException | None = None
        self._stopping = False
        self._phase = "starting"
        self._started = time.time()

    def _task_seed(self, group_index: int) -> int:
        return random.Random(f"{self.config.seed}/{group_index}").getrandbits(63)

    # -- called by generators ------------------------------------------------------------------------------------

    async def lease(self, generator_id: str, room: int, stats: dict[str, float]) -> dict[str, Any]:
        """Take up to `room` new leases. `more` is False when nothing will ever be left."""
        generator = self.fleet[generator_id]
        generator.generated_tokens = int(stats["generated_tokens"])
        generator.pause_seconds = float(stats.get("pause_seconds", 0.0))
        leases: list[GroupLease] = []
        while len(leases) < room and not self._stopping and self.admission.can_lease():
            leases.append(self.admission.lease(generator_id))
        more = not self._stopping and not self.admission.exhausted
        return {"leases": msgspec.msgpack.encode(leases), "more": more}

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
            "generated_tokens": self.fleet.generated_tokens,
            "elapsed": time.time() - self._started,
        }

    async def stop(self) -> None:
        """Finish the running step, then end the run. Returns at once."""
        if not self._stopping:
            self._stopping = True
            self.events.warning("stop_requested")
            if self.learner is not None:
                await self.learner.interrupt.remote()

    async def run(self, learner: Any, generators: dict[str, Any]) -> dict[str, Any]:
        """The whole run. Returns `{"steps", "model", "stopped"}`; raises `RunFailed` with the reason."""
        self.learner = learner
        self.fleet = Fleet(self.config, self.events, generators)
        background: list[asyncio.Task[None]] = []
        try:
            await self._start()
            await self._probe()
            self._phase = "training"
            self.book.restart_clock()
            delivering = asyncio.create_task(self._deliver_forever())
            background = [delivering, *(asyncio.create_task(self._supervise(g)) for g in self.fleet)]
            steps = await self._train_steps(list(background))
            await self._settle(delivering)
            self._phase = "saving the model"
            model = str(self.run_dir / "model")
            if steps:
                await asyncio.wait_for(learner.save.remote(model), self.config.learner.start_timeout)
            self.events.info("run_finished", steps=steps, stopped=self._stopping, model=model if steps else None)
            return {"steps": steps, "model": model if steps else "", "stopped": self._stopping}
        except Exception as error:
            cause = self._root_cause(error)
            self.events.error("run_failed", error=cause)
            raise RunFailed(cause) from error
        finally:
            self._stopping = True
            self._phase = "ending the actors"
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            await self._stop_actors()
            self._phase = "ended"

    # -- inside --------------------------------------------------------------------------------------------------

    def _root_cause(self, error: BaseException) -> str:
        """The innermost message a person can use: Ray wraps an actor's exception, a task group wraps its members'."""
        from ray.exceptions import RayActorError

        while True:
            inner = getattr(error, "cause", None) or (
                error.exceptions[0] if isinstance(error, BaseExceptionGroup) else None
            )
            if isinstance(error, RayActorError):
                return (
                    f"an actor process died ({str(error).splitlines()[0]}); its last words are in {self.run_dir}/logs"
                )
            if not isinstance(inner, BaseException):
                return f"{type(error).__name__}: {error}" if not isinstance(error, RunFailed) else str(error)
            error = inner

    async def _start(self) -> None:
        self._phase = "loading learner and engine"
        learner = asyncio.ensure_future(
            asyncio.wait_for(self.learner.start.remote(), self.config.learner.start_timeout)
        )
        loading = asyncio.ensure_future(self.fleet.load())
        learner.add_done_callback(lambda _: setattr(self, "_phase", "loading engine"))
        info, infos = await asyncio.gather(learner, loading)
        self.fleet.backend = choose_backend(self.config, {i["host"] for i in infos} | {info["host"]})
        await self.fleet.connect(info["endpoint"])
        self._routing = infos[0]["routing"]
        await self.learner.expect_routes.remote(self._routing)
        need = largest_buffer(self.config, RoutingShape(**self._routing) if self._routing else None)
        if need > self.config.transport.credit_bytes:
            raise RunFailed(
                f"transport.credit_bytes = {self.config.transport.credit_bytes} can not hold the {self.admission.slots} "
                f"groups that schedule.max_staleness and schedule.groups_per_step allow: set it to at least {need}"
            )
        if self._routing is None and self.config.routing.replay == "rollout":
            raise RunFailed('the model has no MoE layer to replay routes in: set routing.replay="off"')

    async def _probe(self) -> None:
        self._phase = "delivering weights"
        await self.learner.publish_through.remote(self.fleet.backend, await self.fleet.probe_tokens())
        await self.fleet.begin(await self.learner.publish.remote())
        self.admission.installed(0, 0)

    async def _train_steps(self, background: list[asyncio.Task[None]]) -> int:
        """One optimizer step after the other, until all are done or a stop is requested. Returns how many were made.

        A version is written, and then delivered, beside the steps that follow it.
        """
        steps = 0
        publishing: asyncio.Task[None] | None = None
        while steps < self.config.steps and not self._stopping:
            last = steps + 1 == self.config.steps
            result = await self._while_well(self.learner.train_step.remote(last=last), background)
            if result is None:
                break
            steps += 1
            self.book.add(steps, result["version"], result["metrics"], result["previews"])
            self._made = result["version"]
            if result["new_weights"]:
                if publishing is not None:  # the learner has written it before it copied the next
                    await self._while_well(publishing, background)
                self._consumed[self._made] = result["consumed"]
                publishing = asyncio.create_task(self._publish(self._made))
                background.append(publishing)
        if publishing is not None:
            await publishing
        return steps

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
        published = await self.learner.write.remote(self.fleet.reading)
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
        """Install the newest published weights in every live generator; free slots; write the rows of what was trained."""
        while True:
            await self._published.wait()
            self._published.clear()
            assert self.fleet.published is not None
            version = self.fleet.published.version
            if not self.book.waits_for(version):
                continue
            figures = await self.fleet.deliver()
            if figures is None:
                continue  # nobody is alive: a restarted generator installs the newest version and wakes this again
            self.admission.installed(version, self._consumed[version])
            self._delivered(version, figures)

    def _delivered(self, version: int, figures: dict[str, float]) -> None:
        figures = figures | {
            "generator/restarts": self.fleet.restarts,
            "slots/taken": self.admission.slots_taken,
        }
        self.book.delivered(version, self.fleet.generated_tokens, figures)

    async def _supervise(self, generator: Generator) -> None:
        """Keep one generator playing. A death returns its leases; the restarted process installs current weights first."""
        await self.fleet.supervise(
            generator,
            self._self(),
            stopping=lambda: self._stopping,
            died=self._bury,
            revived=self._published.set,
        )

    def _self(self) -> Any:
        import ray

        return ray.get_runtime_context().current_actor

    async def _bury(self, generator: Generator, error: BaseException) -> list[int]:
        missing = await self.learner.missing.remote(self.admission.leases(generator.generator_id))
        return self.admission.lose(generator.generator_id, lambda g: missing.get(g, []))

    async def _stop_actors(self) -> None:
        calls = [g.handle.stop.remote() for g in self.fleet]
        if self.learner is not None:
            calls.append(self.learner.stop.remote())
        ended = asyncio.gather(*calls, return_exceptions=True)
        try:
            await asyncio.wait_for(ended, self.config.supervise.stop_grace_seconds)
        except TimeoutError:
            self.events.warning("actors_did_not_stop", seconds=self.config.supervise.stop_grace_seconds)
