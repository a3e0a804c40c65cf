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

from r3async.actors.away import shares_run_directory
from r3async.actors.delivery import WRITE_DISK_HINT, Published, VersionWriter, build_weight_server
from r3async.actors.process import ActorNotLoaded, describe_process, prepare_process
from r3async.actors.ranked import RemoteRanks, load_learner
from r3async.actors.ranks import LocalRank
from r3async.actors.reception import NextStep, TrajectoryInbox
from r3async.checkpoint import CheckpointWriter, open_checkpoint
from r3async.checkpoint.state import LEARNER_RECORD_FILES, ConductorState, TrainingState
from r3async.config import config_from_dict, resolve_envs
from r3async.data.model_shape import RoutingShape
from r3async.data.records import Trajectory
from r3async.data.versions import FIRST_LINEAGE, Lineage
from r3async.data.written import read_write_sizes
from r3async.learner.batch.planner import CostModel, build_cost_model
from r3async.record.events import open_event_log
from r3async.record.recording import StepRecorder
from r3async.record.routes import RouteFileTracer
from r3async.record.steps import (
    TRAINED_FILE,
    compute_environment_metrics,
    compute_episode_metrics,
    make_trained_step,
    select_previews,
)
from r3async.record.timeline import LagMeter, StageTimer, Timeline
from r3async.schedule.difficulty import score_groups
from r3async.schedule.groups import GroupBuffer
from r3async.schedule.validation import check_staleness, compute_staleness_metrics
from r3async.untrusted import decode_python_json
from r3async.weights.manifest import WeightManifest
from r3async.weights.probe import FAILED_MODEL_DIRECTORY
from r3async.world import ActorOptions, World
from r3async.world.appending import AppendFile
from r3async.world.files import read_file
from r3async.world.stages import stage

if TYPE_CHECKING:
    from r3async.learner.trainer import PreparedStep, Trainer

LEARNER_CLOSE_SECONDS = 5.0


@dataclass
class StepCounts:
    """How far the run is.

    `version`: versions published. A step without an update (nothing to train, a gradient that is not finite) counts too: slots
    are freed by it, and generators see time pass. `since_publication`: steps made, and groups consumed, since the last
    version was published.
    """

    steps: int = 0
    version: int = 0
    since_publication: tuple[int, int] = (0, 0)


@dataclass
class LearnerModel:
    """What `start` loads. `buffer`: of the groups that the run has not trained."""

    ranks: LocalRank | RemoteRanks
    cost: CostModel
    counts: StepCounts
    buffer: GroupBuffer


@dataclass
class LearnerComponents:
    """What `start_listening` makes: where trajectories arrive, the steps on them, which are prepared ahead, their
    checkpoints, and the versions they make."""

    inbox: TrajectoryInbox
    trainer: Trainer
    next_step: NextStep[PreparedStep]
    checkpoints: CheckpointWriter
    version_writer: VersionWriter


class LearnerActor:
    """Serves the conductor, which calls `start` and `start_listening`, in that order, before anything else.

    The event loop receives; all torch work runs in one thread of its own. One thread and always the same one: Megatron keeps
    state per process, and torch keeps grad mode and function modes per thread. New weights are only copied there; another
    thread writes the copy while the next step runs, and a third one packs the step after that.
    """

    inbox_class: type[TrajectoryInbox] = TrajectoryInbox

    def __init__(
        self,
        world: World,
        run_id: str,
        config: dict[str, Any],
        model_path: str,
        run_dir: str,
        rank_placements: Sequence[ActorOptions] = (),
        resume_path: str = "",
        lineage: Lineage = FIRST_LINEAGE,
    ):
        """`rank_placements`: where those that are actors of their own go. `resume_path`: what a resumed run begins from."""
        self.world, self._lock = world, prepare_process(world, Path(run_dir), "learner")
        self.config = config_from_dict(config)
        self.run_id, self.model_path, self.run_dir, self.lineage = run_id, Path(model_path), Path(run_dir), lineage
        self._rank_placements, self._resume_path = rank_placements, Path(resume_path) if resume_path else None
        self.events = open_event_log(self.run_dir, "learner", world=world)
        self._timeline = Timeline(self.run_dir, "learner", enabled=self.config.observe.timeline, world=world)
        self._lag_meter, self._stage_seconds = LagMeter(world.processes), StageTimer("learner", world.processes)
        self._torch_lane, self._writer_lane = world.threads.new_worker("torch"), world.threads.new_worker("writer")
        self._packer_lane = world.threads.new_worker("prepare")
        self._recorder = StepRecorder(self.run_dir, self.config, lineage, self.events.warning, world=world)
        self._trained_file = AppendFile(self.run_dir / TRAINED_FILE, world=world)
        self._write_sizes = read_write_sizes(self.config, self.model_path, files=world.files)
        self._env_labels = [each.label for each in resolve_envs(self.config)]
        self._wait_interrupted = asyncio.Event()
        self._activity = "between steps"
        self._last_step_end = self._read_clocks()
        """When the last step had ended, and the processor time of this process until then."""
        self._loaded: LearnerModel | None = None
        self._components: LearnerComponents | None = None

    @property
    def model(self) -> LearnerModel:
        if self._loaded is None:
            raise ActorNotLoaded(f"the learner, process {self.world.processes.pid}, has not loaded its model")
        return self._loaded

    @property
    def components(self) -> LearnerComponents:
        if self._components is None:
            raise ActorNotLoaded(f"the learner, process {self.world.processes.pid}, does not listen yet")
        return self._components

    # -- start and stop --------------------------------------------------------------------------------------------

    async def start(self) -> dict[str, Any]:
        """Load the model, and the checkpoint if the run is resumed. Returns whereabouts, and what the conductor has to know;
        `written`: see `read_write_sizes`."""
        self._lag_meter.start()
        self._loaded = model = await self._torch_lane.run(self._load_model)
        gpus = await self._torch_lane.run(model.ranks.list_gpus)
        facts = {"backend": self.config.learner.backend, "step": model.counts.steps, "lineage": self.lineage.number}
        ranks = [pid for pid, _ in model.ranks.processes]
        self.events.info("learner_started", pid=self.world.processes.pid, ranks=ranks, **facts)
        sees = shares_run_directory(self.run_dir, self.lineage.number, self.world.files)
        return {**describe_process(self.world), "gpus": gpus, "sees_run": sees, "written": self._write_sizes}

    def _load_model(self) -> LearnerModel:
        path, schedule = self.model_path, self.config.schedule
        cost = build_cost_model(decode_python_json(read_file(path / "config.json", files=self.world.files)))
        backend = load_learner(self.config, path, self.run_dir, self._rank_placements, self.world, self.events.warning)
        if self._resume_path is None:
            return LearnerModel(backend, cost, StepCounts(), GroupBuffer(schedule.samples_per_group, schedule.window))
        state = open_checkpoint(self._resume_path, check_tensors=False, files=self.world.files).state
        backend.restore_checkpoint(self._resume_path)
        buffer = GroupBuffer(
            schedule.samples_per_group, schedule.window, head=state.consumed, beyond=state.consumed_beyond
        )
        return LearnerModel(backend, cost, StepCounts(state.steps, state.version, state.since_publication), buffer)

    async def start_listening(
        self, routing: dict[str, int] | None, transport: str, probe_tokens: list[int] | None = None
    ) -> dict[str, Any]:
        """Take back what the spool kept, and bind the socket. `routing`: of the routes that engines record, which are checked
        on arrival. `transport`: of the weights, see `delivery.build_weight_sender`. `probe_tokens`: the probe's text.

        Returns the endpoint, the keys of those who may send there, and the newest group that something is here of (-1: none)."""
        model, config, world = self.model, self.config, self.world
        reception = self.inbox_class(
            world,
            self.run_id,
            config,
            self.run_dir,
            self.lineage,
            self.events,
            buffer=model.buffer,
            routing=RoutingShape(**routing) if routing else None,
            vocab_size=model.ranks.vocab_size,
            version=lambda: model.counts.version,
        )
        from r3async.learner.trainer import Trainer  # loads torch, which this process has by now

        tracer = RouteFileTracer(self.run_dir, config, self.events.warning, world=world)
        trainer = Trainer(config, model.cost, model.ranks, tracer, self.events, reception.make_stand_in)
        checkpoints = CheckpointWriter(config, self.run_id, self.model_path, self.run_dir, self.events, world=world)
        text = None if probe_tokens is None else np.asarray(probe_tokens, np.int32)
        given = build_weight_server(config, transport, reception.keys, world)
        lanes = self._torch_lane, self._writer_lane
        seconds = config.weights.resolve_write_timeout(self._write_sizes.version_bytes)
        known = world, config, self.lineage, self._timeline, model.ranks, *lanes, text, seconds, given
        publishing = VersionWriter(*known, self.events.warning)
        await publishing.disk_wait.run_with_retries(
            WRITE_DISK_HINT, self._torch_lane.run, model.ranks.set_weight_transport, transport
        )
        self._components = LearnerComponents(
            reception, trainer, NextStep(reception, self._packer_lane, trainer.prepare_step), checkpoints, publishing
        )
        found = {"endpoint": await reception.start(), "keys": reception.keys_for_generators}
        self._last_step_end, _ = self._read_clocks(), self._stage_seconds.read_increment()
        return {**found, "newest_group": reception.buffer.newest_group}

    def interrupt_wait(self) -> None:
        """A `train_step` that waits for groups returns None."""
        self._wait_interrupted.set()
        if self._components is not None:
            self._components.inbox.wake_waiters()

    async def stop(self) -> None:
        self.interrupt_wait()
        self._lag_meter.stop()
        if self._components is not None:
            await self._components.inbox.close()
            await self._components.version_writer.close()
        # Published files that a running step keeps from being removed now are removed when the next run starts.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEARNER_CLOSE_SECONDS):
                for lane in (self._recorder, self._writer_lane, self._packer_lane):
                    await lane.close()
                if self._loaded is not None:
                    await self._torch_lane.run(self._loaded.ranks.close)
                await self._torch_lane.close()
        await self.world.record_flusher.finish_writes(LEARNER_CLOSE_SECONDS)

    # -- how it is -------------------------------------------------------------------------------------------------

    def get_status(self) -> dict[str, Any]:
        """For the watch; cheap. `writing`: a version that engines are to have is not written yet; `weights_wait`: the disk does
        not take it, see `DiskRetrier.current_wait`. `storing`: see `Spool.wait_state`."""
        work = self.components
        return {
            **describe_process(self.world),
            "doing": self._activity,
            "steps": self.model.counts.steps,
            "writing": work.version_writer.is_writing,
            "weights_wait": work.version_writer.disk_wait.current_wait,
            **work.inbox.get_status(),
        }

    async def dump_stacks(self, reason: str) -> str:
        """What this process is doing, to `stacks/learner.txt`; its ranks write what they do to their logs."""
        processes = self.world.processes
        for pid, host in self._loaded.ranks.processes if self._loaded else ():
            processes.request_stack_dump(pid, host)
        return str(processes.dump_stacks(self.run_dir / "stacks" / "learner.txt", reason))

    def missing_episodes(self, group_indices: list[int]) -> dict[int, list[int]]:
        """Episodes of these groups that have not arrived."""
        return self.components.inbox.missing_episodes(group_indices)

    def list_buffered_tasks(self) -> dict[int, int]:
        """Task seeds of the groups that something is here of, by group."""
        return self.components.inbox.buffer.list_task_seeds()

    # -- steps -----------------------------------------------------------------------------------------------------

    async def train_step(self, is_last: bool = False, with_probe_scores: bool = False) -> dict[str, Any] | None:
        """Wait for the next groups, train one step on them; copy the new weights when it is time, or if it is the `is_last`. With
        `with_probe_scores`, these score the probe's text.

        Returns metrics, whether there are new weights (then `write_version` has to be called), the groups consumed, and episode
        previews; None if interrupted while waiting, which has no end of its own (`actors/watch.py`). Raises `StalenessError`,
        without training, if a token is older than the schedule allows.
        """
        self._activity = "waiting"
        try:
            with stage("steps"):
                return await self._train_step(is_last, with_probe_scores)
        finally:
            self._activity = "between steps"

    async def _train_step(self, is_last: bool, with_probe_scores: bool) -> dict[str, Any] | None:
        clock, counts, work = self.world.clock.monotonic, self.model.counts, self.components
        waited_from = clock()
        with self._timeline.measure_span("wait", step=counts.steps + 1):
            indices = await work.inbox.wait_for_groups(counts.since_publication, self._wait_interrupted)
        if not indices:
            return None
        step_from = clock()
        self._activity, version = "training", counts.version
        steps, consumed = counts.since_publication
        since = steps + 1, consumed + len(indices)
        due = is_last or since[0] == self.config.schedule.steps_per_publication
        groups, metrics = await self._train_groups(indices, (0, 0) if due else since)
        trained = clock()
        counts.steps, counts.since_publication = counts.steps + 1, since
        if metrics["optimizer/skipped"] and not metrics["optimizer/no_contrast"]:
            self.events.warning("step_skipped", step=counts.steps, grad_norm=metrics["grad_norm"])
        work.inbox.release_trained(indices)
        self._trained_file.append(
            msgspec.json.encode(make_trained_step(counts.steps, version, groups, self.lineage.number))
        )
        if due:
            counts.version, counts.since_publication = version + 1, (0, 0)
            with self._timeline.measure_span("snapshot", step=counts.steps, version=counts.version):
                await work.version_writer.copy_weights(counts.version, with_probe_scores=with_probe_scores)
        trajectories = [t for group in groups for t in group]
        metrics |= compute_episode_metrics(trajectories) | compute_environment_metrics(trajectories, self._env_labels)
        metrics |= work.inbox.collect_metrics() | work.version_writer.collect_metrics()
        metrics |= {
            f"lag/learner_{name}": value for name, value in self._lag_meter.collect_metrics().items()
        } | self._stage_seconds.read_increment()
        (before, spent), (ended, spent_now) = self._last_step_end, self._read_clocks()
        self._last_step_end = ended, spent_now
        metrics |= {
            "cpu/learner_seconds": spent_now - spent,
            "learner/between_seconds": waited_from - before,
            "learner/rank_restarts": self.model.ranks.restarts,
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
            "scores": score_groups(groups),
            "previews": select_previews(trajectories, self._env_labels),
        }

    def _read_clocks(self) -> tuple[float, float]:
        return self.world.clock.monotonic(), self.world.processes.cpu_seconds()

    async def _train_groups(
        self, indices: list[int], next_since: tuple[int, int]
    ) -> tuple[list[list[Trajectory]], dict[str, float]]:
        """Take these groups and train them, and meanwhile prepare the next step, for which `StepCounts.since_publication` will be
        `next_since`. Returns them as they were trained, and metrics."""
        counts, work, reception = self.model.counts, self.components, self.components.inbox
        taken, _ = reception.buffer.take_groups(indices)
        check_staleness(taken, counts.version, reception.staleness_bound)
        now, oldest = self.world.clock.time(), self.config.schedule.max_token_age
        ages = compute_staleness_metrics(taken, counts.version, reception.staleness_bound, now, oldest)
        number = counts.steps + 1
        with self._timeline.measure_span("train", step=number):
            prepared = await work.next_step.get_result(indices, taken)
            looking = asyncio.create_task(work.next_step.prefetch(next_since, self._wait_interrupted))
            try:
                done = await self._torch_lane.run(work.trainer.train_step, number, counts.version, prepared)
            finally:
                looking.cancel()
        self._recorder.add(number, counts.version, done)
        await reception.quarantine_rejected(done.rejected, done.groups)
        return done.groups, done.metrics | ages

    # -- weights and checkpoints -----------------------------------------------------------------------------------

    async def publish_version(self) -> Published:
        """Copy and write the current weights; see `write_version`."""
        await self.components.version_writer.copy_weights(self.model.counts.version, with_probe_scores=True)
        return await self.write_version()

    async def score_probe(self, version: int) -> np.ndarray | None:
        """What `version` scores the probe's text with, see `Published.scores`; None once it is trained on."""
        counts = self.model.counts
        if self._activity == "training" or counts.version != version or counts.since_publication != (0, 0):
            return None
        return await self.components.version_writer.score_probe()

    async def write_version(self, versions_in_use: Sequence[int] = ()) -> Published:
        """Write the weights that were copied last where engines find them, beside whatever else the learner does.

        Versions that engines are `versions_in_use` stay.
        """
        return await self.components.version_writer.write_version(versions_in_use)

    async def save_failed_version(self, manifest: WeightManifest) -> None:
        """Keep a published version that a probe failed with, as a model directory of the run; see
        `VersionWriter.save_model_directory`."""
        await self.components.version_writer.save_model_directory(
            manifest, self.model_path, self.run_dir / FAILED_MODEL_DIRECTORY
        )

    async def save_model(self, directory: str) -> int:
        """Export the current weights as a Hugging Face model directory, if any update made them. Returns how many did."""
        backend = self.model.ranks
        updates = await self._torch_lane.run(backend.count_updates)
        if updates:
            await self._torch_lane.run(backend.save_model, Path(directory))
        return updates

    async def begin_checkpoint(self, conductor: ConductorState) -> float:
        """Copy the state as it is between two steps, which are recorded, and begin to write the checkpoint of it. Returns how
        long the next step had to wait for that, in seconds. See `CheckpointWriter.save_checkpoint`, also for what it raises."""
        clock, counts, work = self.world.clock.monotonic, self.model.counts, self.components
        began, taken = clock(), work.inbox.buffer.consumed
        state = TrainingState(
            **msgspec.structs.asdict(conductor),
            steps=counts.steps,
            version=counts.version,
            lineage=self.lineage,
            consumed=taken.head,
            consumed_beyond=sorted(taken.beyond_head),
            since_publication=counts.since_publication,
        )
        backend, commit = self.model.ranks, work.inbox.prepare_commit()
        await self._recorder.wait_written()
        state = await state.with_record_positions(self.run_dir, LEARNER_RECORD_FILES, keeper=self.world.record_flusher)
        await work.checkpoints.save_checkpoint(
            state, lambda: self._torch_lane.run(backend.stage_checkpoint), backend.write_checkpoint, commit
        )
        return clock() - began

    async def finish_checkpoint(self) -> None:
        """Wait until the checkpoint that is being written is there. Raises `CheckpointError` if the last one failed."""
        await self.components.checkpoints.wait_until_written()
