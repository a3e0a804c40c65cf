"""Starts every actor of a run on a Ray cluster, local if none is named, and gives the driver a handle on it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from actors.conductor import Conductor
from actors.deaths import ProcessDied, RunFailed
from actors.generator import GeneratorActor
from actors.learner import LearnerActor
from actors.saving import checkpoint_directory
from r3async.checkpoint import Opened
from r3async.checkpoint.books import encode_state
from r3async.checkpoint.lineages import origin_of, take_lineage
from r3async.checkpoint.resume import fingerprint_model
from r3async.config import Config, to_dict
from r3async.lineage import Lineage
from r3async.observe.events import open_events
from r3async.scheduling.watchdog import Watchdog
from r3async.world import ActorLost, ActorRef, Placement, World

STATUS_SECONDS = 2.0
"""So long the conductor is waited for each time that it is asked."""
RESULT_SECONDS = 10.0
"""And so long when the run has ended, and it is asked for the last time."""
STACKS_SECONDS = 2.0
"""So long a process that does not answer has to write its stacks before it is ended."""
LATE_SECONDS = 30.0
"""Between two questions: who asked so late was stopped, and judges nobody by that."""
ANSWERING = "answering/conductor"


class Pipeline:
    """One run. `start` returns when the actors exist; the conductor does the rest by itself.

    The driver polls `status` and `finished`, asks for an orderly end with `stop`, and always calls `shutdown`.
    """

    learner: type[LearnerActor] = LearnerActor
    generator: type[GeneratorActor] = GeneratorActor

    def __init__(self, world: World, config: Config, model_path: Path, run_dir: Path, resume: Opened | None = None):
        """`resume`: the checkpoint that the run goes on from."""
        self.world, self._resume = world, resume
        self.config, self.model_path, self.run_dir = config, model_path, run_dir
        self.run_id = f"{run_dir.name}-{world.unique()[:8]}"
        self._conductor: Any = None
        self._actors: list[ActorRef] = []
        self._result: Any = None
        self._asked: Any = None
        """The question for its status that the conductor has not answered."""
        self._answers = 0
        self._looked = 0.0
        self._processes: dict[str, tuple[int, str]] = {}
        """By role: process id and host."""
        # It is created, and imports what it needs, before it can answer.
        first = max(config.supervise.stall_seconds, config.learner.start_timeout)
        self._dog = Watchdog(world.clock.monotonic, config.supervise.stall_seconds, {f"{ANSWERING} at first": first})

    def _take_lineage(self) -> Lineage:
        """On the disk before any actor is there: whoever starts after a crash of this start has another one."""
        resume, run_dir = self._resume, self.run_dir
        origin = origin_of(resume, checkpoint_directory(self.config, run_dir)) if resume else ""
        lineage = take_lineage(run_dir, resume, fingerprint_model(self.model_path), origin)
        facts = {"parent": lineage.parent, "version": lineage.version, "step": resume.state.steps if resume else 0}
        open_events(run_dir, "driver").info("lineage_began", lineage=lineage.number, **facts, origin=origin)
        return lineage

    def start(self) -> None:
        """Take a lineage, connect to Ray, or start it here, and create the actors."""
        actors, config, lineage = self.world.actors, self.config, self._take_lineage()
        ranks, count = config.learner.parallel.world, config.generator.count
        actors.connect(config.cluster.address or os.environ.get("RAY_ADDRESS"), count + 2 + (ranks if ranks > 1 else 0))
        gpus = actors.gpus()
        share = min(1.0, gpus / (count + ranks)) if gpus else 0.0
        plain, resume = to_dict(config), self._resume
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
        generators = {
            name: actors.spawn(
                self.generator,
                name,
                self.run_id,
                with_secrets,
                model,
                directory,
                lineage.number,
                name=name,
                placement=playing,
            )
            for name in (f"generator-{index}" for index in range(count))
        }
        state = encode_state(resume.state) if resume else b""
        self._conductor = actors.spawn(
            Conductor,
            self.run_id,
            plain,
            directory,
            state,
            lineage,
            name="conductor",
            placement=Placement(concurrency=1000),
        )
        self._actors = [self._conductor, learner, *generators.values()]
        self._result = actors.begin(self._conductor, "run", learner, generators)

    def status(self, since: int = 0, timeout: float = STATUS_SECONDS) -> dict[str, Any] | None:
        """The conductor's status, with the rows of steps after `since`, or after that of a question which it had not answered
        before; None if it did not answer within `timeout` seconds."""
        actors = self.world.actors
        if self._asked is None:
            self._asked = actors.begin(self._conductor, "status", since)
        ready, _ = actors.wait([self._asked], timeout=timeout)
        self._look(bool(ready))
        if not ready:
            return None
        asked, self._asked = self._asked, None
        try:
            status = actors.get(asked)
        except ActorLost:
            return None
        self._processes |= status["processes"]
        return status

    def _look(self, answered: bool) -> None:
        now, before = self.world.clock.monotonic(), self._looked
        self._looked, self._answers = now, self._answers + answered
        stage = ANSWERING if self._answers else f"{ANSWERING} at first"
        if now - before > LATE_SECONDS:  # this very process was stopped
            self._dog.forget(stage)
        self._dog.see(stage, self._answers, 1)

    def check(self, say: Callable[[str], object]) -> None:
        """To be called after each `status`. If the conductor has not answered for `supervise.stall_seconds` it is named, its
        stacks are written, and `supervise.on_stall` is done: its process is ended, and `ProcessDied` raised, or `RunFailed`."""
        for stall in self._dog.news():
            action = self.config.supervise.on_stall
            said = f"the conductor has not answered for {stall.seconds:.0f} s (limit {stall.limit:g} s, supervise.stall_seconds)"
            say(f"{said}; what it was doing is in {self.run_dir}/logs/conductor.log, unless it was stopped")
            pid, host = self._processes.get("conductor", (0, ""))
            local = self.world.processes.ask_for_stacks(pid, host)
            open_events(self.run_dir, "driver").error(
                "stalled",
                stage=ANSWERING,
                seconds=round(stall.seconds, 1),
                limit=stall.limit,
                action=action,
                asked=local,
            )
            if action == "warn":
                continue
            if local:
                time.sleep(STACKS_SECONDS)
            raise (RunFailed if action == "abort" else ProcessDied)(f"{said}; its process is ended")

    def finished(self, timeout: float) -> bool:
        """Whether the run has ended, waiting at most `timeout` seconds."""
        ready, _ = self.world.actors.wait([self._result], timeout=timeout)
        return bool(ready)

    def result(self) -> dict[str, Any]:
        """What the conductor returned. Raises `RunFailed` with the reason, and `ProcessDied` if the run may go on from its
        newest checkpoint."""
        try:
            return self.world.actors.get(self._result, timeout=RESULT_SECONDS)
        except RunFailed as error:
            raise error from None
        except ActorLost as error:
            raise ProcessDied(f"the conductor process died: {error}") from None

    def stop(self) -> None:
        """Ask for an orderly end: the running step is finished, a checkpoint written and the model saved."""
        self.world.actors.begin(self._conductor, "stop")

    def shutdown(self) -> None:
        """End the actors' processes and leave Ray, ending the local cluster if this started it."""
        for actor in self._actors:
            self.world.actors.kill(actor)
        for pid, host in self._processes.values():
            self.world.processes.kill(pid, host)  # a process that was stopped hears nothing
        self._actors = []
        self.world.actors.disconnect()
