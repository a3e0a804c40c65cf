"""The driver of a run: starts its actors, follows them, and starts them again from the newest checkpoint if one is lost."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from r3async.actors.pipeline import STATUS_SECONDS, Pipeline, Running
from r3async.actors.process import NotTrained, ProcessLost, RunFailed
from r3async.actors.run_dir import RunDir, begin_again
from r3async.config import Config
from r3async.world import World
from r3async.world.appending import Report

POLL_SECONDS = 1.0
RESULT_SECONDS = 10.0
"""So long the conductor is waited for when the run has ended, and it is asked for the last time."""


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
        """Hears what is found among the checkpoints."""
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
        """The run begins again after that step."""
        ...


async def supervise(
    world: World,
    config: Config,
    model_path: Path,
    run: RunDir,
    person: Person,
    kind: type[Pipeline] = Pipeline,
) -> None:
    """The run, and again from its newest checkpoint if a process that it cannot do without dies. `kind`: with other actors than
    usual.

    Raises `RunFailed` with what to do about it, or `NotTrained`, which is one, if no step made an update; and what `begin_again`
    raises.
    """
    allowed = config.supervise.max_run_restarts
    restarts = 0
    while True:
        try:
            return await _run(kind(world, config, model_path, run.path, run.resume), person)
        except ProcessLost as error:
            if person.stop_requested or restarts == allowed:
                raise
            restarts += 1
            person.say(f"{error}; the run begins again ({restarts} of {allowed}, supervise.max_run_restarts)")
            person.loading()
            run = await begin_again(config, run, person.say, person.report, world=world)
            step = run.resume.state.steps if run.resume else 0
            person.say(f"going on from step {step}")
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
    limit, told = 4 * running.config.supervise.stop_grace_seconds, 0.0
    while not await running.finished(POLL_SECONDS):
        await _show(running, person, STATUS_SECONDS)
        await running.check(person.say)
        now = world.clock.monotonic()
        if person.stop_requested and not told:
            told = now
            person.say("stopping: the running step is finished and a checkpoint written (again to stop at once)")
            running.stop()
        if told and now - told > limit:
            raise RunFailed(
                f"the actors did not end within {limit:g} s (4 x supervise.stop_grace_seconds) and are ended now; "
                f"the same command with name={running.run_dir.name} resumes from the newest checkpoint"
            )
    await _show(running, person, RESULT_SECONDS)
    _tell(running.result(), running, person)


async def _show(running: Running, person: Person, timeout: float) -> None:
    status = await running.status(person.step, timeout)
    if status is not None:
        person.show(status)


def _tell(result: Mapping[str, Any], running: Running, person: Person) -> None:
    """How the run ended. Raises `NotTrained`."""
    steps, name = result["steps"], running.run_dir.name
    if result["model"]:
        person.say(f"trained model: {running.run_dir / 'model'}")
    if result["stopped"] and steps:
        done = f"{steps} of {running.config.steps} steps" + (" without an update" if result.get("updates") == 0 else "")
        person.say(f"stopped after {done}; to go on: the same command with name={name}")
    elif result["stopped"]:
        person.say(f"stopped before a step was made; to resume: the same command with name={name}")
    elif steps and not result["updates"]:
        raise NotTrained(
            f"none of {steps} steps made an update ({result['without_update']}); the weights are those that the run began "
            "with, so no model is saved"
        )
