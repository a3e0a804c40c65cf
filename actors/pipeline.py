"""Starts every actor of a run on a Ray cluster, local if none is named, and gives the driver a handle on it."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from actors.conductor import Conductor
from actors.deaths import ProcessDied, RunFailed
from actors.generator import GeneratorActor
from actors.learner import LearnerActor
from actors.process import ask_for_stacks, end, environment, here
from actors.saving import checkpoint_directory
from r3async.checkpoint import Opened
from r3async.checkpoint.books import encode_state
from r3async.checkpoint.lineages import origin_of, take_lineage
from r3async.checkpoint.resume import fingerprint_model
from r3async.config import Config, to_dict
from r3async.lineage import Lineage
from r3async.observe.events import open_events
from r3async.scheduling.watchdog import Watchdog

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

    def __init__(self, config: Config, model_path: Path, run_dir: Path, resume: Opened | None = None):
        """`resume`: the checkpoint that the run goes on from."""
        self._resume = resume
        self.config, self.model_path, self.run_dir = config, model_path, run_dir
        self.run_id = f"{run_dir.name}-{uuid.uuid4().hex[:8]}"
        self._conductor: Any = None
        self._actors: list[Any] = []
        self._result: Any = None
        self._owns_ray = self._imported = False
        self._asked: Any = None
        """The question for its status that the conductor has not answered."""
        self._answers = 0
        self._looked = 0.0
        self._processes: dict[str, tuple[int, str]] = {}
        """By role: process id and host."""
        # It is created, and imports what it needs, before it can answer.
        first = max(config.supervise.stall_seconds, config.learner.start_timeout)
        self._dog = Watchdog(time.monotonic, config.supervise.stall_seconds, {f"{ANSWERING} at first": first})

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
        import ray

        self._imported = True
        lineage = self._take_lineage()
        address = self.config.cluster.address or os.environ.get("RAY_ADDRESS")
        world = self.config.learner.parallel.world
        actors = self.config.generator.count + 2 + (world if world > 1 else 0)
        if not ray.is_initialized():
            if address:
                ray.init(address=address, log_to_driver=True, logging_level="error")
            else:
                # Local actors share few cores on purpose: logical CPUs only count actors.
                ray.init(num_cpus=max(actors, os.cpu_count() or 1), include_dashboard=False, logging_level="error")
            self._owns_ray = True
        gpus = ray.cluster_resources().get("GPU", 0)
        share = min(1.0, gpus / (self.config.generator.count + world)) if gpus else 0.0
        plain, resume = to_dict(self.config), self._resume
        with_secrets = to_dict(self.config, reveal=True)  # only who serves and plays needs them
        directory = str(self.run_dir.absolute())

        def remote(kind: type, threads: int, share: float, **options: Any) -> Any:
            return ray.remote(kind).options(
                num_cpus=1 if threads else 0,
                num_gpus=share,
                runtime_env={"env_vars": environment(threads)},
                **options,
            )

        # With several ranks the learner actor only receives and packs; its ranks compute, in processes of their own.
        learner = remote(self.learner, self.config.learner.threads, share if world == 1 else 0.0).remote(
            self.run_id,
            plain,
            str(self.model_path),
            directory,
            share,
            str(resume.path.absolute()) if resume else "",
            lineage,
        )
        generators = {}
        for index in range(self.config.generator.count):
            name = f"generator-{index}"
            kind = remote(
                self.generator,
                self.config.generator.threads,
                share,
                max_restarts=self.config.generator.max_restarts,
                max_task_retries=0,
            )
            generators[name] = kind.remote(
                name, self.run_id, with_secrets, str(self.model_path), directory, lineage.number
            )
        self._conductor = remote(Conductor, 1, 0.0, max_concurrency=1000).remote(
            self.run_id, plain, directory, encode_state(resume.state) if resume else b"", lineage
        )
        self._actors = [self._conductor, learner, *generators.values()]
        self._result = self._conductor.run.remote(learner, generators)

    def status(self, since: int = 0, timeout: float = STATUS_SECONDS) -> dict[str, Any] | None:
        """The conductor's status, with the rows of steps after `since`, or after that of a question which it had not answered
        before; None if it did not answer within `timeout` seconds."""
        import ray

        if self._asked is None:
            self._asked = self._conductor.status.remote(since)
        ready, _ = ray.wait([self._asked], timeout=timeout)
        self._look(bool(ready))
        if not ready:
            return None
        asked, self._asked = self._asked, None
        try:
            status = ray.get(asked)
        except ray.exceptions.RayError:
            return None
        self._processes |= status["processes"]
        return status

    def _look(self, answered: bool) -> None:
        now, before = time.monotonic(), self._looked
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
            local = here(host) and ask_for_stacks(pid)
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
        import ray

        ready, _ = ray.wait([self._result], timeout=timeout)
        return bool(ready)

    def result(self) -> dict[str, Any]:
        """What the conductor returned. Raises `RunFailed` with the reason, and `ProcessDied` if the run may go on from its
        newest checkpoint."""
        import ray

        try:
            return ray.get(self._result, timeout=RESULT_SECONDS)
        except ray.exceptions.RayTaskError as error:
            cause = getattr(error, "cause", error)
            raise (ProcessDied if isinstance(cause, ProcessDied) else RunFailed)(str(cause)) from None
        except ray.exceptions.RayActorError as error:
            raise ProcessDied(f"the conductor process died: {error}") from None

    def stop(self) -> None:
        """Ask for an orderly end: the running step is finished, a checkpoint written and the model saved."""
        self._conductor.stop.remote()

    def shutdown(self) -> None:
        """End the actors' processes and leave Ray, ending the local cluster if this started it."""
        if not self._imported:  # a stop came while Ray was imported, which cannot be done twice
            return
        import ray

        if ray.is_initialized():
            for actor in self._actors:
                ray.kill(actor)
            for pid, host in self._processes.values():
                if here(host):
                    end(pid)  # a process that was stopped does not hear Ray
        self._actors = []
        if self._owns_ray and ray.is_initialized():
            ray.shutdown()
            time.sleep(0.1)
