"""The learner actor: receives trajectories, trains on complete groups in lease order or within a window, publishes weights."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from r3async.actors.away import sees_run
from r3async.actors.delivery import DISK_HINT, Published, Publishing, server
from r3async.actors.process import NotLoaded, begin, whereabouts
from r3async.actors.ranked import RankedLearner, load_learner
from r3async.actors.ranks import LocalLearner
from r3async.actors.reception import Ahead, Reception
from r3async.checkpoint import CheckpointWriter, open_checkpoint
from r3async.checkpoint.state import LEARNER_RECORDS, ConductorState, TrainingState
from r3async.config import config_from_dict, environments
from r3async.data.model_shape import RoutingShape
from r3async.data.records import Trajectory
from r3async.data.versions import FIRST, Lineage
from r3async.data.written import written_bytes
from r3async.learner.batch.planner import Cost, cost_model
from r3async.record.events import open_events
from r3async.record.recording import Recorder
from r3async.record.routes import StepTracer
from r3async.record.steps import TRAINED, environment_metrics, episode_metrics, previews, trained_step
from r3async.record.timeline import LagMeter, StageSeconds, Timeline
from r3async.schedule.difficulty import group_scores
from r3async.schedule.groups import GroupBuffer
from r3async.schedule.validation import age_metrics, check_ages
from r3async.untrusted import decode_python_json
from r3async.weights.manifest import WeightManifest
from r3async.weights.probe import KEPT
from r3async.world import Placement, World
from r3async.world.appending import AppendFile
from r3async.world.files import read_file
from r3async.world.stages import stage

if TYPE_CHECKING:
    from r3async.learner.trainer import Prepared, Trainer

CLOSE_SECONDS = 5.0


@dataclass
class Counts:
    """How far the run is.

    `version`: versions published. A step without an update (nothing to train, a gradient that is not finite) counts too: slots
    are freed by it, and generators see time pass. `since`: steps made, and groups consumed, since the last version was published.
    """

    steps: int = 0
    version: int = 0
    since: tuple[int, int] = (0, 0)


@dataclass
class Model:
    """What `start` loads. `buffer`: of the groups that the run has not trained."""

    backend: LocalLearner | RankedLearner
    cost: Cost
    counts: Counts
    buffer: GroupBuffer


@dataclass
class Work:
    """What `listen` makes: where trajectories arrive, the steps on them, which are prepared ahead, their checkpoints, and the
    versions they make."""

    reception: Reception
    trainer: Trainer
    ahead: Ahead[Prepared]
    checkpoints: CheckpointWriter
    publishing: Publishing


class LearnerActor:
    """Serves the conductor, which calls `start` and `listen`, in that order, before anything else.

    The event loop receives; all torch work runs in one thread of its own. One thread and always the same one: Megatron keeps
    state per process, and torch keeps grad mode and function modes per thread. New weights are only copied there; another
    thread writes the copy while the next step runs, and a third one packs the step after that.
    """

    receives: type[Reception] = Reception

    def __init__(
        self,
        world: World,
        run_id: str,
        config: dict[str, Any],
        model_path: str,
        run_dir: str,
        ranks: Sequence[Placement] = (),
        checkpoint: str = "",
        lineage: Lineage = FIRST,
    ):
        """`ranks`: where those that are actors of their own go. `checkpoint`: what a resumed run begins from."""
        self.world, self._lock = world, begin(world, Path(run_dir), "learner")
        self.config = config_from_dict(config)
        self.run_id, self.model_path, self.run_dir, self.lineage = run_id, Path(model_path), Path(run_dir), lineage
        self._ranks, self._checkpoint = ranks, Path(checkpoint) if checkpoint else None
        self.events = open_events(self.run_dir, "learner", world=world)
        self._timeline = Timeline(self.run_dir, "learner", enabled=self.config.observe.timeline, world=world)
        self._lag, self._stages = LagMeter(world.processes), StageSeconds("learner", world.processes)
        self._torch, self._writer = world.threads.lane("torch"), world.threads.lane("writer")
        self._packer = world.threads.lane("prepare")
        self._recorder = Recorder(self.run_dir, self.config, lineage, self.events.warning, world=world)
        self._trained_file = AppendFile(self.run_dir / TRAINED, world=world)
        self._written = written_bytes(self.config, self.model_path, files=world.files)
        self._labels = [each.label for each in environments(self.config)]
        self._interrupted = asyncio.Event()
        self._doing = "between steps"
        self._mark = self._now()
        """When the last step had ended, and the processor time of this process until then."""
        self._loaded: Model | None = None
        self._work: Work | None = None

    @property
    def model(self) -> Model:
        if self._loaded is None:
            raise NotLoaded(f"the learner, process {self.world.processes.pid}, has not loaded its model")
        return self._loaded

    @property
    def work(self) -> Work:
        if self._work is None:
            raise NotLoaded(f"the learner, process {self.world.processes.pid}, does not listen yet")
        return self._work

    # -- start and stop --------------------------------------------------------------------------------------------

    async def start(self) -> dict[str, Any]:
        """Load the model, and the checkpoint if the run is resumed. Returns whereabouts, and what the conductor has to know;
        `written`: see `written_bytes`."""
        self._lag.start()
        self._loaded = model = await self._torch.run(self._load)
        gpus = await self._torch.run(model.backend.gpus)
        facts = {"backend": self.config.learner.backend, "step": model.counts.steps, "lineage": self.lineage.number}
        ranks = [pid for pid, _ in model.backend.processes]
        self.events.info("learner_started", pid=self.world.processes.pid, ranks=ranks, **facts)
        sees = sees_run(self.run_dir, self.lineage.number, self.world.files)
        return {**whereabouts(self.world), "gpus": gpus, "sees_run": sees, "written": self._written}

    def _load(self) -> Model:
        path, schedule = self.model_path, self.config.schedule
        cost = cost_model(decode_python_json(read_file(path / "config.json", files=self.world.files)))
        backend = load_learner(self.config, path, self.run_dir, self._ranks, self.world, self.events.warning)
        if self._checkpoint is None:
            return Model(backend, cost, Counts(), GroupBuffer(schedule.samples_per_group, schedule.window))
        state = open_checkpoint(self._checkpoint, check_tensors=False, files=self.world.files).state
        backend.restore(self._checkpoint)
        buffer = GroupBuffer(
            schedule.samples_per_group, schedule.window, head=state.consumed, beyond=state.consumed_beyond
        )
        return Model(backend, cost, Counts(state.steps, state.version, state.since_publication), buffer)

    async def listen(
        self, routing: dict[str, int] | None, transport: str, watched: list[int] | None = None
    ) -> dict[str, Any]:
        """Take back what the spool kept, and bind the socket. `routing`: of the routes that engines record, which are checked
        on arrival. `transport`: of the weights, see `delivery.sender`. `watched`: the probe's text.

        Returns the endpoint, the keys of those who may send there, and the newest group that something is here of (-1: none)."""
        model, config, world = self.model, self.config, self.world
        reception = self.receives(
            world,
            self.run_id,
            config,
            self.run_dir,
            self.lineage,
            self.events,
            buffer=model.buffer,
            routing=RoutingShape(**routing) if routing else None,
            vocab_size=model.backend.vocab_size,
            version=lambda: model.counts.version,
        )
        from r3async.learner.trainer import Trainer  # loads torch, which this process has by now

        tracer = StepTracer(self.run_dir, config, self.events.warning, world=world)
        trainer = Trainer(config, model.cost, model.backend, tracer, self.events, reception.stand_in)
        checkpoints = CheckpointWriter(config, self.run_id, self.model_path, self.run_dir, self.events, world=world)
        text = None if watched is None else np.asarray(watched, np.int32)
        given = server(config, transport, reception.keys, world)
        lanes = self._torch, self._writer
        seconds = config.weights.write_seconds(self._written.version)
        known = world, config, self.lineage, self._timeline, model.backend, *lanes, text, seconds, given
        publishing = Publishing(*known, self.events.warning)
        await publishing.disk.insist(DISK_HINT, self._torch.run, model.backend.publish_through, transport)
        self._work = Work(reception, trainer, Ahead(reception, self._packer, trainer.prepared), checkpoints, publishing)
        found = {"endpoint": await reception.start(), "keys": reception.keys_for_generators}
        self._mark, _ = self._now(), self._stages.take()
        return {**found, "newest_group": reception.buffer.newest_group}

    def interrupt(self) -> None:
        """A `train_step` that waits for groups returns None."""
        self._interrupted.set()
        if self._work is not None:
            self._work.reception.wake()

    async def stop(self) -> None:
        self.interrupt()
        self._lag.stop()
        if self._work is not None:
            await self._work.reception.close()
            await self._work.publishing.close()
        # Published files that a running step keeps from being removed now are removed when the next run starts.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                for lane in (self._recorder, self._writer, self._packer):
                    await lane.close()
                if self._loaded is not None:
                    await self._torch.run(self._loaded.backend.close)
                await self._torch.close()
        await self.world.keeper.finish(CLOSE_SECONDS)

    # -- how it is -------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """For the watch; cheap. `writing`: a version that engines are to have is not written yet; `weights_wait`: the disk does
        not take it, see `DiskWait.waits`. `storing`: see `Spool.waits`."""
        work = self.work
        return {
            **whereabouts(self.world),
            "doing": self._doing,
            "steps": self.model.counts.steps,
            "writing": work.publishing.writing,
            "weights_wait": work.publishing.disk.waits,
            **work.reception.status(),
        }

    async def dump_stacks(self, reason: str) -> str:
        """What this process is doing, to `stacks/learner.txt`; its ranks write what they do to their logs."""
        processes = self.world.processes
        for pid, host in self._loaded.backend.processes if self._loaded else ():
            processes.ask_for_stacks(pid, host)
        return str(processes.dump_stacks(self.run_dir / "stacks" / "learner.txt", reason))

    def missing(self, group_indices: list[int]) -> dict[int, list[int]]:
        """Episodes of these groups that have not arrived."""
        return self.work.reception.missing(group_indices)

    def kept_tasks(self) -> dict[int, int]:
        """Task seeds of the groups that something is here of, by group."""
        return self.work.reception.buffer.tasks()

    # -- steps -----------------------------------------------------------------------------------------------------

    async def train_step(self, last: bool = False, scored: bool = False) -> dict[str, Any] | None:
        """Wait for the next groups, train one step on them; copy the new weights when it is time, or if it is the `last`. With
        `scored`, these score the probe's text.

        Returns metrics, whether there are new weights (then `write` has to be called), the groups consumed, and episode
        previews; None if interrupted while waiting, which has no end of its own (`actors/watch.py`). Raises `AgeError`, without
        training, if a token is older than the schedule allows.
        """
        self._doing = "waiting"
        try:
            with stage("steps"):
                return await self._train_step(last, scored)
        finally:
            self._doing = "between steps"

    async def _train_step(self, last: bool, scored: bool) -> dict[str, Any] | None:
        clock, counts, work = self.world.clock.monotonic, self.model.counts, self.work
        waited_from = clock()
        with self._timeline.span("wait", step=counts.steps + 1):
            indices = await work.reception.wait_for_groups(counts.since, self._interrupted)
        if not indices:
            return None
        step_from = clock()
        self._doing, version = "training", counts.version
        steps, consumed = counts.since
        since = steps + 1, consumed + len(indices)
        due = last or since[0] == self.config.schedule.steps_per_publication
        groups, metrics = await self._train(indices, (0, 0) if due else since)
        trained = clock()
        counts.steps, counts.since = counts.steps + 1, since
        if metrics["optimizer/skipped"] and not metrics["optimizer/no_contrast"]:
            self.events.warning("step_skipped", step=counts.steps, grad_norm=metrics["grad_norm"])
        work.reception.trained(indices)
        self._trained_file.append(msgspec.json.encode(trained_step(counts.steps, version, groups, self.lineage.number)))
        if due:
            counts.version, counts.since = version + 1, (0, 0)
            with self._timeline.span("snapshot", step=counts.steps, version=counts.version):
                await work.publishing.copy(counts.version, scored=scored)
        trajectories = [t for group in groups for t in group]
        metrics |= episode_metrics(trajectories) | environment_metrics(trajectories, self._labels)
        metrics |= work.reception.figures() | work.publishing.figures()
        metrics |= {f"lag/learner_{name}": value for name, value in self._lag.figures().items()} | self._stages.take()
        (before, spent), (ended, spent_now) = self._mark, self._now()
        self._mark = ended, spent_now
        metrics |= {
            "cpu/learner_seconds": spent_now - spent,
            "learner/between_seconds": waited_from - before,
            "learner/rank_restarts": self.model.backend.restarts,
            "learner/wait_seconds": step_from - waited_from,
            "learner/step_seconds": trained - step_from,
            "weights/snapshot_seconds": ended - trained,
            "weights/write_seconds": 0.0,
            "batch/groups": len(indices),
            "lineage": self.lineage.number,
        }
        return {
            "metrics": metrics,
            "new_weights": due,
            "version": version + 1,
            "groups": indices,
            "scores": group_scores(groups),
            "previews": previews(trajectories, self._labels),
        }

    def _now(self) -> tuple[float, float]:
        return self.world.clock.monotonic(), self.world.processes.cpu_seconds()

    async def _train(
        self, indices: list[int], then: tuple[int, int]
    ) -> tuple[list[list[Trajectory]], dict[str, float]]:
        """Take these groups and train them, and meanwhile prepare the next step, for which `Counts.since` will be `then`. Returns
        them as they were trained, and metrics."""
        counts, work, reception = self.model.counts, self.work, self.work.reception
        taken, _ = reception.buffer.take(indices)
        check_ages(taken, counts.version, reception.age_bound)
        now, oldest = self.world.clock.time(), self.config.schedule.max_token_age
        ages = age_metrics(taken, counts.version, reception.age_bound, now, oldest)
        number = counts.steps + 1
        with self._timeline.span("train", step=number):
            prepared = await work.ahead.made(indices, taken)
            looking = asyncio.create_task(work.ahead.look(then, self._interrupted))
            try:
                done = await self._torch.run(work.trainer.step, number, counts.version, prepared)
            finally:
                looking.cancel()
        self._recorder.add(number, counts.version, done)
        await reception.set_aside(done.unsound, done.groups)
        return done.groups, done.metrics | ages

    # -- weights and checkpoints -----------------------------------------------------------------------------------

    async def publish(self) -> Published:
        """Copy and write the current weights; see `write`."""
        await self.work.publishing.copy(self.model.counts.version, scored=True)
        return await self.write()

    async def score(self, version: int) -> np.ndarray | None:
        """What `version` scores the probe's text with, see `Published.scores`; None once it is trained on."""
        counts = self.model.counts
        if self._doing == "training" or counts.version != version or counts.since != (0, 0):
            return None
        return await self.work.publishing.score()

    async def write(self, reading: Sequence[int] = ()) -> Published:
        """Write the weights that were copied last where engines find them, beside whatever else the learner does.

        Versions that engines are `reading` stay.
        """
        return await self.work.publishing.write(reading)

    async def keep(self, manifest: WeightManifest) -> None:
        """Keep a published version that a probe failed with, as a model directory of the run; see `Publishing.keep`."""
        await self.work.publishing.keep(manifest, self.model_path, self.run_dir / KEPT)

    async def save(self, directory: str) -> int:
        """Export the current weights as a Hugging Face model directory, if any update made them. Returns how many did."""
        backend = self.model.backend
        updates = await self._torch.run(backend.updates)
        if updates:
            await self._torch.run(backend.save, Path(directory))
        return updates

    async def checkpoint(self, conductor: ConductorState) -> float:
        """Copy the state as it is between two steps, which are recorded, and begin to write the checkpoint of it. Returns how
        long the next step had to wait for that, in seconds. See `CheckpointWriter.save`, also for what it raises."""
        clock, counts, work = self.world.clock.monotonic, self.model.counts, self.work
        began, taken = clock(), work.reception.buffer.taken
        state = TrainingState(
            **msgspec.structs.asdict(conductor),
            steps=counts.steps,
            version=counts.version,
            lineage=self.lineage,
            consumed=taken.head,
            consumed_beyond=sorted(taken.beyond),
            since_publication=counts.since,
        )
        backend, commit = self.model.backend, work.reception.commit()
        await self._recorder.settle()
        state = await state.with_records(self.run_dir, LEARNER_RECORDS, keeper=self.world.keeper)
        await work.checkpoints.save(state, lambda: self._torch.run(backend.hold), backend.write_state, commit)
        return clock() - began

    async def finish_checkpoint(self) -> None:
        """Wait until the checkpoint that is being written is there. Raises `CheckpointError` if the last one failed."""
        await self.work.checkpoints.finish()
