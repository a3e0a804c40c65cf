"""Starts every actor of a run, and gives the driver a handle on them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from r3async.actors.conductor import Conductor
from r3async.actors.generator import GeneratorActor
from r3async.actors.learner import LearnerActor
from r3async.actors.process import ProcessLost, RunFailed
from r3async.checkpoint import Checkpoints, Opened
from r3async.checkpoint.resume import fingerprint_model, origin_of, take_lineage
from r3async.config import Config, to_dict
from r3async.data.versions import Lineage
from r3async.record.events import open_events
from r3async.schedule.watchdog import Watchdog
from r3async.world import ActorLost, ActorRef, Placement, World

STATUS_SECONDS = 2.0
"""So long the conductor is waited for each time that it is asked."""
STACKS_SECONDS = 2.0
"""So long a process that does not answer has to write its stacks before it is ended."""
LATE_SECONDS = 30.0
"""Between two questions: who asked so late was stopped, and judges nobody by that."""
ANSWERING = "answering/conductor"
AT_FIRST = f"{ANSWERING} at first"


class Pipeline:
    """One start of a run."""

    learner: type[LearnerActor] = LearnerActor
    generator: type[GeneratorActor] = GeneratorActor
    conductor: type[Conductor] = Conductor

    def __init__(self, world: World, config: Config, model_path: Path, run_dir: Path, resume: Opened | None = None):
        """`resume`: the checkpoint that the run goes on from."""
        self.world, self.config, self.model_path, self.run_dir, self.resume = world, config, model_path, run_dir, resume
        self.run_id = f"{run_dir.name}-{world.unique()[:8]}"
        self.events = open_events(run_dir, "driver", world=world)

    def start(self) -> Running:
        """Take a lineage, connect to a cluster, or start one here, and create the actors. They do the rest by themselves.
        Blocking; of the running event loop."""
        actors, config, lineage = self.world.actors, self.config, self._take_lineage()
        ranks, count = config.learner.parallel.world, config.generator.count
        actors.connect(config.cluster.address or None, count + 2 + (ranks if ranks > 1 else 0))
        gpus = actors.gpus()
        share = min(1.0, gpus / (count + ranks)) if gpus else 0.0
        plain, resume = to_dict(config), self.resume
        with_secrets = to_dict(config, reveal=True)  # only who serves and plays needs them
        directory, model = str(self.run_dir.absolute()), str(self.model_path)
        # With several ranks the learner actor only receives and packs; its ranks compute, in processes of their own.
        learner = actors.spawn(
            self.learner,
            self.run_id,
            plain,
            model,
            directory,
            share,
            str(resume.path.absolute()) if resume else "",
            lineage,
            name="learner",
            placement=Placement(config.learner.threads, share if ranks == 1 else 0.0),
        )
        playing = Placement(config.generator.threads, share, restarts=config.generator.max_restarts)
        generators = {}
        for name in (f"generator-{index}" for index in range(count)):
            plays = (name, self.run_id, with_secrets, model, directory, lineage.number)
            generators[name] = actors.spawn(self.generator, *plays, name=name, placement=playing)
        leads = (self.run_id, plain, directory, learner, generators, resume.state if resume else None, lineage)
        conductor = actors.spawn(
            self.conductor, *leads, name="conductor", placement=Placement(concurrency=max(1000, 4 * count))
        )
        return Running(self, conductor, learner, generators)

    def _take_lineage(self) -> Lineage:
        """On the disk before any actor is there: whoever starts after a crash of this start has another one."""
        resume, run_dir, files = self.resume, self.run_dir, self.world.files
        origin = origin_of(resume, Checkpoints.of(self.config, run_dir, files=files).directory) if resume else ""
        lineage = take_lineage(run_dir, resume, fingerprint_model(self.model_path, files=files), origin, files=files)
        facts = {"parent": lineage.parent, "version": lineage.version, "step": resume.state.steps if resume else 0}
        self.events.info("lineage_began", lineage=lineage.number, **facts, origin=origin)
        return lineage


class Running:
    """The actors of a start, whose conductor runs. The driver polls `status`, `check` and `finished`, asks for an
    orderly end with `stop`, and always calls `end`."""

    def __init__(self, pipeline: Pipeline, conductor: ActorRef, learner: ActorRef, generators: Mapping[str, ActorRef]):
        self.config, self.run_dir = pipeline.config, pipeline.run_dir
        self._world, self._events, self._conductor = pipeline.world, pipeline.events, conductor
        self._actors = [conductor, learner, *generators.values()]
        self._result = asyncio.ensure_future(conductor.call("run"))
        self._asked: asyncio.Task[dict[str, Any]] | None = None
        """The question for its status that the conductor has not answered."""
        self._calls: list[asyncio.Future[Any]] = [self._result]
        self._answers = 0
        self._looked = 0.0
        self._processes: dict[str, tuple[int, str]] = {}
        """By role: process id and host."""
        supervise = self.config.supervise
        # It is created, and imports what it needs, before it answers for the first time.
        first = max(supervise.stall_seconds, self.config.learner.start_timeout)
        clock = self._world.clock.monotonic
        self._dog = Watchdog(clock, supervise.stall_seconds, {AT_FIRST: first})

    async def status(self, since: int = 0, timeout: float = STATUS_SECONDS) -> dict[str, Any] | None:
        """The conductor's status, with the rows of steps after `since`, or after that of a question which it had not answered
        before; None if it did not answer within `timeout` seconds."""
        if self._asked is None:
            self._asked = asyncio.create_task(self._conductor.call("status", since))
        await asyncio.wait([self._asked], timeout=timeout)
        self._look(self._asked.done())
        if not self._asked.done():
            return None
        asked, self._asked = self._asked, None
        if asked.exception() is not None:
            return None
        self._processes |= asked.result()["processes"]
        return asked.result()

    def _look(self, answered: bool) -> None:
        now, before = self._world.clock.monotonic(), self._looked
        self._looked, self._answers = now, self._answers + answered
        if self._answers:
            self._dog.forget(AT_FIRST)
        stage = ANSWERING if self._answers else AT_FIRST
        if now - before > LATE_SECONDS:  # this very process was stopped
            self._dog.forget(stage)
        self._dog.see(stage, self._answers, 1)

    async def check(self, say: Callable[[str], object]) -> None:
        """To be called after each `status`. If the conductor has not answered for `supervise.stall_seconds` it is named, its
        stacks are written, and `supervise.on_stall` is done: its process is ended, and `ProcessLost` raised, or `RunFailed`."""
        for stall in self._dog.news():
            action = self.config.supervise.on_stall
            said = f"the conductor has not answered for {stall.seconds:.0f} s (limit {stall.limit:g} s, supervise.stall_seconds)"
            say(f"{said}; what it was doing is in {self.run_dir}/logs/conductor.log, unless it was stopped")
            asked = self._world.processes.ask_for_stacks(*self._processes.get("conductor", (0, "")))
            self._events.error(
                "stalled",
                stage=ANSWERING,
                seconds=round(stall.seconds, 1),
                limit=stall.limit,
                action=action,
                asked=asked,
            )
            if action == "warn":
                continue
            if asked:
                await asyncio.sleep(STACKS_SECONDS)
            raise (RunFailed if action == "abort" else ProcessLost)(f"{said}; its process is ended")

    async def finished(self, timeout: float) -> bool:
        """Whether the run has ended, waiting at most `timeout` seconds."""
        await asyncio.wait([self._result], timeout=timeout)
        return self._result.done()

    def result(self) -> dict[str, Any]:
        """What the conductor returned, when the run has ended. Raises `RunFailed` with the reason, and `ProcessLost` if the run
        may go on from its newest checkpoint."""
        try:
            return self._result.result()
        except RunFailed as error:
            raise error from None
        except ActorLost as error:
            raise ProcessLost(f"the conductor process died: {error}") from None

    def stop(self) -> None:
        """Ask for an orderly end: the running step is finished, a checkpoint written and the model saved."""
        self._calls.append(asyncio.ensure_future(self._conductor.call("stop")))

    async def end(self) -> None:
        """End the actors' processes."""
        for actor in self._actors:
            self._world.actors.kill(actor)
        for pid, host in self._processes.values():
            self._world.processes.kill(pid, host)  # a process that was stopped hears nothing
        calls = [*self._calls, *([self._asked] if self._asked is not None else [])]
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
