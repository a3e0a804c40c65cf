"""The driver of a run: starts its actors, follows them, and starts them again from the newest checkpoint if one is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from r3async.actors.away import ModelAt, offer_model
from r3async.actors.conductor import Conductor
from r3async.actors.crew import WISH, Crew, as_wished
from r3async.actors.delivery import check_reach
from r3async.actors.generator import GeneratorActor, GeneratorParts
from r3async.actors.learner import LearnerActor
from r3async.actors.places import Places, take_places
from r3async.actors.process import NotTrained, ProcessLost, Question, RunFailed, StoppedBeforeStep
from r3async.actors.run_dir import RunDir, restart_run
from r3async.checkpoint import Checkpoints, Opened
from r3async.checkpoint.resume import fingerprint_model, origin_of, take_lineage
from r3async.config import Config, ConfigError, EnvConfig, to_dict
from r3async.data.versions import Lineage
from r3async.envs import EnvironmentFactory
from r3async.record.events import open_events
from r3async.schedule.health import Watchdog
from r3async.world import ActorLost, ActorRef, Placement, Reservation, World
from r3async.world.appending import Report

STATUS_SECONDS = 2.0
"""So long the conductor is waited for each time that it is asked."""
STACKS_SECONDS = 2.0
"""So long a process that does not answer has to write its stacks before it is ended."""
LATE_SECONDS = 30.0
"""Between two questions: who asked so late was paused, and judges nobody by that."""
ANSWERING = "answering/conductor"
AT_FIRST = f"{ANSWERING} at first"
POLL_SECONDS = 1.0
RESULT_SECONDS = 10.0
"""So long the conductor is waited for when the run has ended, and it is asked for the last time."""
EXIT_SECONDS = 2.0
"""What actors may take to end before they are killed."""
EXIT_POLL_SECONDS = 0.02


def connect(world: World, config: Config) -> None:
    """To the cluster, or to one that is started here. Blocking. Nothing if it is done already. Raises `ConfigError` for a cluster
    that cannot be reached, and `RunFailed` where none can be started."""
    count, ranks = config.generator.count, config.learner.parallel.world
    try:
        world.actors.connect(config.cluster.address or None, count + 2 + (ranks if ranks > 1 else 0))
    except ConnectionError as error:
        raise (ConfigError if config.cluster.address else RunFailed)(str(error)) from error


class Pipeline:
    """One start of a run."""

    learner: type[LearnerActor] = LearnerActor
    generator: type[GeneratorActor] = GeneratorActor
    conductor: type[Conductor] = Conductor
    environments: Callable[[EnvConfig], EnvironmentFactory] | None = None
    """Makes those of the generators, where they are not the configuration's alone (`envs/objects.py`)."""

    def __init__(self, world: World, config: Config, model_path: Path, run_dir: Path, resume: Opened | None = None):
        """`resume`: the checkpoint that the run resumes from."""
        self.world, self.config, self.model_path, self.run_dir, self.resume = world, config, model_path, run_dir, resume
        self._model: ModelAt | None = None
        self.run_id = f"{run_dir.name}-{world.unique()[:8]}"
        self.events = open_events(run_dir, "driver", world=world)

    def start(self) -> Running:
        """Take a lineage, connect to a cluster, or start one here, and create the actors. They do the rest by themselves.
        Blocking; of the running event loop."""
        actors, config, lineage = self.world.actors, self.config, self._take_lineage()
        count = config.generator.count
        connect(self.world, config)
        places = self._take_places()
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
            places.ranks,
            str(resume.path.absolute()) if resume else "",
            lineage,
            name="learner",
            placement=places.learner,
        )
        parts = [GeneratorParts(environment=self.environments)] if self.environments else []

        def spawn(name: str, place: Placement) -> ActorRef:
            given = self._offered() if len(actors.nodes()) > 1 else model
            plays = (name, self.run_id, with_secrets, given, directory, lineage.number, *parts)
            return actors.spawn(self.generator, *plays, name=name, placement=place)

        home = places.layout.training()
        crew = Crew(self.world, config, self.run_dir, self.events, spawn, places.engines, home)
        leads = (self.run_id, plain, directory, learner, crew.members, resume.state if resume else None, lineage)
        # It writes the run's records, and so does the driver.
        placement = Placement(0, concurrency=max(1000, 4 * count), beside=True)
        conductor = actors.spawn(self.conductor, *leads, name="conductor", placement=placement)
        return Running(self, conductor, learner, crew, places.reservation)

    def _offered(self) -> ModelAt:
        """The model, for hosts that may not have it."""
        if self._model is None:
            self._model = offer_model(self.world, self.model_path)
        return self._model

    def _take_places(self) -> Places:
        places = take_places(self.world, self.config)
        hosts = places.layout.training(), [places.layout.host(seat) for seat in places.layout.engines]
        self.events.info("placed", ranks=hosts[0], engines=hosts[1], gpus=places.layout.gpus)
        check_reach(self.config, hosts[0][0], hosts[1])
        return places

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

    def __init__(
        self,
        pipeline: Pipeline,
        conductor: ActorRef,
        learner: ActorRef,
        crew: Crew,
        reservation: Reservation,
    ):
        self._reservation, self._crew = reservation, crew
        self.config, self.run_dir = pipeline.config, pipeline.run_dir
        self._world, self._events, self._conductor = pipeline.world, pipeline.events, conductor
        self._actors = [conductor, learner]
        self._scaling = asyncio.ensure_future(crew.run(conductor))
        self._result = asyncio.ensure_future(conductor.call("run"))
        self._question = Question(partial(conductor.call, "status"))
        self._calls: list[asyncio.Future[Any]] = [self._result]
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
        status = await self._question.answer(timeout, since)
        self._look()
        if status is not None:
            self._processes |= status["processes"]
        return status

    def _look(self) -> None:
        now, before, answers = self._world.clock.monotonic(), self._looked, self._question.answers
        self._looked = now
        if answers:
            self._dog.forget(AT_FIRST)
        stage = ANSWERING if answers else AT_FIRST
        if now - before > LATE_SECONDS:  # this very process was paused
            self._dog.forget(stage)
        self._dog.see(stage, answers, 1)

    async def check(self, say: Callable[[str], object]) -> None:
        """To be called after each `status`. If the conductor has not answered for `supervise.stall_seconds` it is named, its
        stacks are written, and `supervise.on_stall` is done: its process is ended, and `ProcessLost` raised, or `RunFailed`."""
        for stall in self._dog.news():
            action = self.config.supervise.on_stall
            limit = f"limit {stall.limit:g} s, supervise.stall_seconds"
            failure = f"the conductor has not answered for {stall.seconds:.0f} s ({limit})"
            say(f"{failure}; what it was doing is in {self.run_dir}/logs/conductor.log, unless it was paused")
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
            raise (RunFailed if action == "abort" else ProcessLost)(f"{failure}; its process is ended")

    async def finished(self, timeout: float) -> bool:
        """Whether the run has ended, waiting at most `timeout` seconds."""
        await asyncio.wait([self._result], timeout=timeout)
        return self._result.done()

    def result(self) -> dict[str, Any]:
        """What the conductor returned, when the run has ended. Raises `RunFailed` with the reason, and `ProcessLost` if the run
        may resume from its newest checkpoint."""
        try:
            return self._result.result()
        except RunFailed as error:
            raise error from None
        except ActorLost as error:
            raise ProcessLost(f"the conductor process was lost: {error}") from None

    def stop(self) -> None:
        """Ask for an orderly end: the running step is finished, a checkpoint written and the model saved."""
        self._calls.append(asyncio.ensure_future(self._conductor.call("stop")))

    async def end(self) -> None:
        """End the actors' processes."""
        self._scaling.cancel()
        for actor in (*self._actors, *self._crew.members.values()):
            self._world.actors.kill(actor)
        await self._left()
        for pid, host in self._processes.values():
            self._world.processes.kill(pid, host)  # a process that was paused gets no request
        self._crew.release()
        self._world.actors.release(self._reservation)
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, self._scaling, self._question.cancel(), return_exceptions=True)

    async def _left(self) -> None:
        """Wait, at most `EXIT_SECONDS`, until the processes here have ended. Of one that is killed before Ray has ended it, Ray
        says on the console that it died."""
        for _ in range(int(EXIT_SECONDS / EXIT_POLL_SECONDS)):
            if not any(self._world.processes.alive(*process) for process in self._processes.values()):
                return
            await asyncio.sleep(EXIT_POLL_SECONDS)


class Person(Protocol):
    """Whoever started the run, as its driver knows them."""

    @property
    def stop_requested(self) -> bool:
        """The run is to end in order."""
        ...

    @property
    def step(self) -> int:
        """Of the newest row that was shown."""
        ...

    def say(self, line: str) -> None: ...

    def phase(self, text: str) -> None:
        """What is done now."""
        ...

    @property
    def report(self) -> Report:
        """For what is found among the checkpoints."""
        ...

    def loading(self) -> None:
        """From now on `stop_requested` is not looked at."""
        ...

    def started(self) -> None:
        """The actors exist: from now on `stop_requested` is looked at often. May raise."""
        ...

    def show(self, status: dict[str, Any]) -> None:
        """See `Conductor.status`."""
        ...

    def rewind(self, step: int) -> None:
        """The run restarts after that step."""
        ...


async def supervise(
    world: World,
    config: Config,
    model_path: Path,
    run: RunDir,
    person: Person,
    kind: type[Pipeline] = Pipeline,
) -> None:
    """The run, and again from its newest checkpoint if a process that it cannot do without is lost. `kind`: with other actors
    than usual.

    Raises `RunFailed` with what to do about it, which `NotTrained` (no step made an update) and `StoppedBeforeStep` are; and
    what `restart_run` raises.
    """
    allowed = config.supervise.max_run_restarts
    restarts = 0
    world.files.remove(run.path / WISH)  # a command that is given again says itself how many
    while True:
        wanted = as_wished(config, run.path, files=world.files)
        try:
            return await _run(kind(world, wanted, model_path, run.path, run.resume), person)
        except ProcessLost as error:
            if person.stop_requested or restarts == allowed:
                raise
            restarts += 1
            person.say(f"{error}; the run restarts ({restarts} of {allowed}, supervise.max_run_restarts)")
            person.loading()
            run = await restart_run(config, run, person.say, person.report, world=world)
            step = run.resume.state.steps if run.resume else 0
            person.say(f"resumes from step {step}")
            person.rewind(step)


async def _run(pipeline: Pipeline, person: Person) -> None:
    person.phase("starting Ray and the actors")
    try:
        running = pipeline.start()
        try:
            person.started()
            await _follow(pipeline.world, running, person)
        finally:
            await running.end()
    finally:
        pipeline.world.actors.disconnect()


async def _follow(world: World, running: Running, person: Person) -> None:
    limit, asked_at = 4 * running.config.supervise.stop_grace_seconds, 0.0
    while not await running.finished(POLL_SECONDS):
        await _show(running, person, STATUS_SECONDS)
        await running.check(person.say)
        now = world.clock.monotonic()
        if person.stop_requested and not asked_at:
            asked_at = now
            person.say("stopping: the running step is finished and a checkpoint written (again to stop at once)")
            running.stop()
        if asked_at and now - asked_at > limit:
            raise RunFailed(
                f"the actors did not end within {limit:g} s (4 x supervise.stop_grace_seconds) and are ended now; "
                f"the same command with name={running.run_dir.name} resumes from the newest checkpoint"
            )
    await _show(running, person, RESULT_SECONDS)
    _report(running.result(), running, person)


async def _show(running: Running, person: Person, timeout: float) -> None:
    status = await running.status(person.step, timeout)
    if status is not None:
        person.show(status)


def _report(result: Mapping[str, Any], running: Running, person: Person) -> None:
    """How the run ended. Raises `NotTrained` and `StoppedBeforeStep`."""
    steps, name = result["steps"], running.run_dir.name
    if result["model"]:
        person.say(f"trained model: {running.run_dir / 'model'}")
    if result["stopped"] and steps:
        done = f"{steps} of {running.config.steps} steps" + (" without an update" if result.get("updates") == 0 else "")
        person.say(f"stopped after {done}; to resume: the same command with name={name}")
    elif result["stopped"]:
        raise StoppedBeforeStep(f"stopped before a step was made; to resume: the same command with name={name}")
    elif steps and not result["updates"]:
        raise NotTrained(
            f"none of {steps} steps made an update ({result['without_update']}); the weights are those that the run began "
            "with, so no model is saved"
        )
