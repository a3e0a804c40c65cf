"""The learner actor: it receives trajectories, trains on complete groups in lease order or within a
window, and publishes weights.

`LearnerActor.run_step` is the step. A `TrajectoryInbox` here gathers what a `TrajectoryReceiver`
(transport/receiver.py) takes in and a `Spool` (transport/spool.py) stores; `NextStep` prepares a
step ahead; a `Trainer` (learner/trainer.py) makes it on all ranks; a `VersionPublisher`
(version_publisher.py) and a `CheckpointWriter` (checkpoint/writer.py) write what it made.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from r3async.actors.rank_actor import LocalRank
from r3async.actors.ranks import RemoteRanks, load_learner
from r3async.actors.remote_generators import shares_run_directory
from r3async.actors.run_setup import RunSetup
from r3async.actors.step_counts import StepCounts
from r3async.actors.trajectory_inbox import NextStep, TrajectoryInbox
from r3async.actors.version_publisher import WRITE_DISK_HINT, Published, VersionPublisher
from r3async.actors.weight_transport import build_weight_server, with_reachable_host
from r3async.checkpoint import CheckpointWriter, open_checkpoint
from r3async.checkpoint.state import LEARNER_RECORD_FILES, ConductorState, TrainingState
from r3async.config import config_from_dict, resolve_envs
from r3async.data.model_shape import RoutingShape
from r3async.data.tokens import Trajectory
from r3async.data.write_sizes import read_write_sizes
from r3async.learner.micro_batch_plan import CostModel, build_cost_model
from r3async.record.events import open_event_log
from r3async.record.process_time import LagMeter, StageTimer
from r3async.record.recording import StepRecorder
from r3async.record.routes import RouteFileTracer
from r3async.record.timeline import Timeline
from r3async.record.trained_trajectories import (
    TRAINED_FILE,
    compute_environment_metrics,
    compute_episode_metrics,
    make_trained_step,
    select_previews,
)
from r3async.schedule.difficulty import TaskScore, score_groups
from r3async.schedule.groups import GroupBuffer
from r3async.schedule.staleness_check import check_staleness, compute_staleness_metrics
from r3async.untrusted import decode_python_json
from r3async.weights.manifest import WeightManifest
from r3async.weights.probe import FAILED_MODEL_DIRECTORY
from r3async.world import ActorOptions, World
from r3async.world.appending import AppendFile
from r3async.world.files import read_file
from r3async.world.stages import stage

from .process import ActorNotLoaded, describe_process, prepare_process

if TYPE_CHECKING:
    from r3async.learner.prepare import PreparedStep
    from r3async.learner.trainer import StepOutcome, Trainer


LEARNER_CLOSE_SECONDS = 5.0


@dataclass
class LearnerModel:
    """The parts that `LearnerActor.start` loads. `buffer` holds the groups that the run
    has not trained."""

    ranks: LocalRank | RemoteRanks
    cost: CostModel
    counts: StepCounts
    buffer: GroupBuffer


@dataclass
class LearnerComponents:
    """The parts that `LearnerActor.start_listening` makes.

    Attributes:
        inbox: The place where trajectories arrive.
        trainer: Makes the steps on them.
        next_step: Prepares the next step ahead.
        checkpoints: Writes checkpoints of the steps.
        version_publisher: Writes the versions that the steps make.
    """

    inbox: TrajectoryInbox
    trainer: Trainer
    next_step: NextStep[PreparedStep]
    checkpoints: CheckpointWriter
    version_publisher: VersionPublisher


class TrainStepResult(msgspec.Struct, frozen=True):
    """The result of `LearnerActor.run_step`, for the conductor.

    Attributes:
        metrics: Metrics of the step, by name.
        version: Version of the weights that the step made, or has a part in.
        has_new_weights: This version is complete: `write_version` has to be called.
        groups: Indices of the groups that the step consumed.
        scores: Mean rewards of the tasks that these groups played.
        previews: Conversations of a few episodes; see `select_previews`.
    """

    metrics: dict[str, Any]
    version: int
    has_new_weights: bool
    groups: list[int]
    scores: list[TaskScore] = []
    previews: list[dict[str, Any]] = []


class LearnerStatus(msgspec.Struct):
    """The status that the learner reports to `StallMonitor`. The defaults stand for a learner that
    has not answered yet.

    Attributes:
        pid: Process id of the learner, on the host `host`.
        doing: "waiting" for groups, "training", or "between steps".
        steps: Number of steps made.
        writing: True while a version for the engines is not written yet.
        weights_wait: Why the disk does not take this version; see `DiskRetrier.current_wait`.
        received: Number of trajectories received.
        ready_groups: Number of groups that are complete.
        lacking: Episodes that the groups of the next step lack, by group.
        storing: Why trajectories are not acknowledged; see `Spool.wait_state`.
    """

    pid: int = 0
    host: str = ""
    doing: str = ""
    steps: int = 0
    writing: bool = False
    weights_wait: dict[str, Any] | None = None
    received: int = 0
    ready_groups: int = 0
    lacking: dict[int, list[int]] = {}
    storing: dict[str, Any] | None = None


class LearnerActor:
    """The actor that receives and trains. It serves the conductor, which calls `start` and
    `start_listening`, in that order, before anything else.

    The event loop receives. All torch work runs in one thread of its own, and always in the same
    one: Megatron keeps state per process, and torch keeps grad mode and function modes per thread.
    New weights are only copied there; another thread writes the copy while the next step runs, and
    a third one packs the step after that.
    """

    inbox_class: type[TrajectoryInbox] = TrajectoryInbox

    def __init__(
        self,
        world: World,
        setup: RunSetup,
        model_path: str,
        rank_placements: Sequence[ActorOptions] = (),
        resume_path: str = "",
        transport_host: str = "",
    ):
        """Prepare the process; `start` loads the model.

        Args:
            setup: Its configuration is as the user set it: checkpoints record it.
            rank_placements: Placements of the ranks, if they are actors of their own.
            resume_path: Path of the checkpoint that a resumed run begins from.
            transport_host: Value of an unset `transport.host` that follows from the run's hosts;
                empty: the address by which other hosts reach this one.
        """
        self.world = world
        self._setup = setup
        self.run_dir = Path(setup.run_dir)
        self._lock = prepare_process(world, self.run_dir, "learner")
        self.config = config_from_dict(setup.config)
        self.run_id = setup.run_id
        self.model_path = Path(model_path)
        self.lineage = setup.lineage
        self._rank_placements = rank_placements
        self._resume_path = Path(resume_path) if resume_path else None
        self._transport_host = transport_host
        self._config_as_set = self.config
        self.events = open_event_log(self.run_dir, "learner", world=world)
        self._timeline = Timeline(
            self.run_dir, "learner", enabled=self.config.observe.timeline, world=world
        )
        self._lag_meter = LagMeter(world.processes)
        self._stage_seconds = StageTimer("learner", world.processes)
        self._torch_lane = world.threads.new_worker("torch")
        self._writer_lane = world.threads.new_worker("writer")
        self._packer_lane = world.threads.new_worker("prepare")
        self._recorder = StepRecorder(
            self.run_dir, self.config, self.lineage, self.events.warning, world=world
        )
        self._trained_file = AppendFile(self.run_dir / TRAINED_FILE, world=world)
        self._write_sizes = read_write_sizes(self.config, self.model_path, files=world.files)
        self._env_labels = [each.label for each in resolve_envs(self.config)]
        self._wait_interrupted = asyncio.Event()
        self._activity = "between steps"
        self._last_step_end = self._read_clocks()
        """Time at which the last step had ended (monotonic seconds), and the processor time of this
        process until then."""
        self._loaded: LearnerModel | None = None
        self._components: LearnerComponents | None = None

    @property
    def model(self) -> LearnerModel:
        if self._loaded is None:
            raise ActorNotLoaded(
                f"the learner, process {self.world.processes.pid}, has not loaded its model"
            )
        return self._loaded

    @property
    def components(self) -> LearnerComponents:
        if self._components is None:
            raise ActorNotLoaded(
                f"the learner, process {self.world.processes.pid}, does not listen yet"
            )
        return self._components

    # -- start and stop ----------------------------------------------------------------------------

    async def start(self) -> dict[str, Any]:
        """Load the model, and the checkpoint if the run is resumed. Returns the process's pid and
        host, and what the conductor has to know; for `written` see `read_write_sizes`."""
        self._lag_meter.start()
        self.config = with_reachable_host(self.config, self.world, self._transport_host)
        self._loaded = model = await self._torch_lane.run(self._load_model)
        gpus = await self._torch_lane.run(model.ranks.list_gpus)
        self.events.info(
            "learner_started",
            pid=self.world.processes.pid,
            ranks=[pid for pid, _ in model.ranks.processes],
            backend=self.config.learner.backend,
            step=model.counts.steps,
            lineage=self.lineage.number,
        )
        sees = shares_run_directory(self.run_dir, self.lineage.number, self.world.files)
        return {
            **describe_process(self.world),
            "gpus": gpus,
            "rank_hosts": sorted({host for _, host in model.ranks.processes}),
            "sees_run": sees,
            "written": self._write_sizes,
        }

    def _load_model(self) -> LearnerModel:
        path = self.model_path
        schedule = self.config.schedule
        cost = build_cost_model(
            decode_python_json(read_file(path / "config.json", files=self.world.files))
        )
        backend = load_learner(
            self.config, path, self.run_dir, self._rank_placements, self.world, self.events.warning
        )
        if self._resume_path is None:
            return LearnerModel(
                backend, cost, StepCounts(), GroupBuffer(schedule.group_size, schedule.window)
            )
        state = open_checkpoint(
            self._resume_path, check_tensors=False, files=self.world.files
        ).state
        backend.restore_checkpoint(self._resume_path)
        buffer = GroupBuffer(
            schedule.group_size, schedule.window, head=state.consumed, beyond=state.consumed_beyond
        )
        return LearnerModel(
            backend, cost, StepCounts(state.steps, state.version, state.since_publication), buffer
        )

    async def start_listening(
        self, routing: dict[str, Any] | None, transport: str, probe_tokens: list[int] | None = None
    ) -> dict[str, Any]:
        """Recover what the spool kept, and bind the socket.

        Args:
            routing: Shape of the routes that engines record, which are checked on arrival.
            transport: Transport of the weights; see `weight_transport.build_weight_sender`.
            probe_tokens: Tokens of the probe's text.

        Returns the endpoint, the keys that allow generators to send there, and the newest group of
        which a trajectory is here (-1: none).
        """
        model = self.model
        config = self.config
        world = self.world
        inbox = self.inbox_class(
            world,
            self._setup,
            config,
            self.events,
            buffer=model.buffer,
            routing=RoutingShape(**routing) if routing else None,
            vocab_size=model.ranks.vocab_size,
            counts=model.counts,
        )
        from r3async.learner.trainer import Trainer  # loads torch, which this process has by now

        tracer = RouteFileTracer(self.run_dir, config, self.events.warning, world=world)
        trainer = Trainer(config, model.cost, model.ranks, tracer, self.events, inbox.make_stand_in)
        checkpoints = CheckpointWriter(
            self._config_as_set,
            self.run_id,
            self.model_path,
            self.run_dir,
            self.events,
            world=world,
        )
        await checkpoints.take_fingerprint()
        version_publisher = VersionPublisher(
            world,
            config,
            self.lineage,
            self._timeline,
            model.ranks,
            torch_lane=self._torch_lane,
            writer_lane=self._writer_lane,
            probe_tokens=None if probe_tokens is None else np.asarray(probe_tokens, np.int32),
            write_seconds=config.supervise.limits.version_write(self._write_sizes.version_bytes),
            carried=await self._torch_lane.run(model.ranks.list_carried_tensors),
            server=build_weight_server(config, transport, inbox.keys, world),
            remote_ranks=model.ranks
            if isinstance(model.ranks, RemoteRanks) and not model.ranks.is_one_host
            else None,
            report_event=self.events.warning,
        )
        await version_publisher.disk_wait.run_with_retries(
            WRITE_DISK_HINT,
            self._torch_lane.run,
            model.ranks.set_weight_transport,
            transport,
            sender_keys=inbox.keys,
        )
        version_publisher.begin_watching()
        next_step = NextStep(inbox, self._packer_lane, trainer.prepare_step)
        self._components = LearnerComponents(
            inbox, trainer, next_step, checkpoints, version_publisher
        )
        endpoint = await inbox.start()
        self._last_step_end, _ = self._read_clocks(), self._stage_seconds.read_increment()
        return {
            "endpoint": endpoint,
            "keys": inbox.keys_for_generators,
            "newest_group": inbox.buffer.newest_group,
        }

    def interrupt_wait(self) -> None:
        """Make a `run_step` that waits for groups return None."""
        self._wait_interrupted.set()
        if self._components is not None:
            self._components.inbox.wake_waiters()

    async def stop(self) -> None:
        self.interrupt_wait()
        self._lag_meter.stop()
        if self._components is not None:
            await self._components.inbox.close()
            await self._components.version_publisher.close()
        # Published files that a running step keeps from being removed now are removed when the
        # next run starts.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEARNER_CLOSE_SECONDS):
                for lane in (self._recorder, self._writer_lane, self._packer_lane):
                    await lane.close()
                if self._loaded is not None:
                    await self._torch_lane.run(self._loaded.ranks.close)
                await self._torch_lane.close()
        await self.world.record_flusher.finish_writes(LEARNER_CLOSE_SECONDS)

    # -- status ------------------------------------------------------------------------------------

    def get_status(self) -> LearnerStatus:
        """Return the learner's status for `StallMonitor`. The call is cheap."""
        inbox = self.components.inbox
        writer = self.components.version_publisher
        return LearnerStatus(
            **describe_process(self.world),
            doing=self._activity,
            steps=self.model.counts.steps,
            writing=writer.is_writing,
            weights_wait=writer.disk_wait.current_wait,
            received=inbox.receiver.received,
            ready_groups=inbox.buffer.count_ready_groups(),
            lacking=inbox.missing_in_next_groups(),
            storing=inbox.spool.wait_state if inbox.spool is not None else None,
        )

    async def dump_stacks(self, reason: str) -> str:
        """Write the stacks of this process to `stacks/learner.txt` and return the path. Its ranks
        write theirs to their logs."""
        processes = self.world.processes
        for pid, host in self._loaded.ranks.processes if self._loaded else ():
            processes.request_stack_dump(pid, host)
        return str(processes.dump_stacks(self.run_dir / "stacks" / "learner.txt", reason))

    def missing_episodes(self, group_indices: list[int]) -> dict[int, list[int]]:
        """Return the episodes of these groups that have not arrived, by group."""
        return self.components.inbox.missing_episodes(group_indices)

    def list_buffered_tasks(self) -> dict[int, int]:
        """Return the task seeds, by group, of the groups of which a trajectory is here."""
        return self.components.inbox.buffer.list_task_seeds()

    # -- steps -------------------------------------------------------------------------------------

    async def run_step(
        self, is_last: bool = False, with_probe_scores: bool = False
    ) -> TrainStepResult | None:
        """Wait for the next groups, train one step on them, and copy the new weights when
        a version is due.

        Args:
            is_last: This is the last step, which makes a version in any case.
            with_probe_scores: The new weights score the probe's text.

        Returns None if interrupted while waiting. The wait has no time limit here: `StallMonitor`
        (`actors/stalls.py`) judges it. Raises `StalenessError`, without training, if a token is
        older than the schedule allows.
        """
        clock = self.world.clock.monotonic
        counts = self.model.counts
        inbox = self.components.inbox
        waited_from = clock()
        self._activity = "waiting"
        try:
            with stage("steps"):
                # Wait until the groups of this step are complete, in lease order or
                # within the window.
                with self._timeline.measure_span("wait", step=counts.steps + 1):
                    indices = await inbox.wait_for_groups(
                        counts.since_publication, self._wait_interrupted
                    )
                # Only an interrupted wait returns no groups: a stop was requested.
                if not indices:
                    return None
                step_from = clock()
                # From here on the step has a time limit, and the probe's text cannot be scored with
                # this version any more.
                self._activity = "training"
                number = counts.steps + 1
                version = counts.version
                # Consume the groups: no later step, and no resume from a later checkpoint,
                # trains them again.
                taken = inbox.buffer.take_groups(indices)
                # Refuse to train beyond the bound on staleness.
                check_staleness(taken, version, inbox.staleness_bound)
                # Measure ages before the step, against the weights that it starts from.
                now = self.world.clock.time()
                oldest = self.config.schedule.max_token_age
                metrics = compute_staleness_metrics(
                    taken, version, inbox.staleness_bound, now, oldest
                )
                # K steps (`schedule.steps_per_publication`) make a version; the last step makes
                # one in any case.
                steps, consumed = counts.since_publication
                since = steps + 1, consumed + len(indices)
                due = is_last or since[0] == self.config.schedule.steps_per_publication
                # Train; meanwhile the next step is prepared, for which the counts begin anew if
                # a version is due.
                with self._timeline.measure_span("train", step=number):
                    # Use what was prepared during the step before, if it was prepared for these
                    # groups.
                    prepared = await self._take_prepared(indices, taken)
                    # Wait for the groups of the next step beside this one; the packer thread
                    # prepares them.
                    looking = asyncio.create_task(
                        self.components.next_step.prefetch(
                            (0, 0) if due else since, self._wait_interrupted
                        )
                    )
                    try:
                        # All torch work runs in this one thread, so the event loop goes on
                        # receiving.
                        trained = await self._torch_lane.run(
                            self.components.trainer.update_weights, number, version, prepared
                        )
                    finally:
                        # The next step waits for its groups itself; a preparation that has begun
                        # goes on.
                        looking.cancel()
                groups = trained.groups
                # Write what was trained beside the next step, if steps are recorded.
                self._recorder.add(number, version, trained)
                # Trajectories that the step had to replace must not be met again after a resume.
                await inbox.quarantine_rejected(trained.rejected, groups)
                trained_at = clock()
                # Count the step whether or not it made an update: slots are freed by it.
                counts.steps = number
                counts.since_publication = since
                # A step with zero variance is not a fault; any other that made no
                # update is reported.
                if (
                    trained.metrics["optimizer/skipped"]
                    and not trained.metrics["optimizer/zero_variance"]
                ):
                    self.events.warning(
                        "step_skipped", step=number, grad_norm=trained.metrics["grad_norm"]
                    )
                # The groups are trained: the receiver can forget their ids and free their memory.
                inbox.release_trained(indices)
                # Record which trajectories the step trained, and from which version of the weights.
                line = make_trained_step(number, version, groups, self.lineage.number)
                self._trained_file.append(msgspec.json.encode(line))
                # Nothing that arrives from here on is trained, whatever its age.
                if is_last:
                    inbox.finish_training()
                # Copy the weights before the next step changes them; the copy is written
                # beside that step.
                if due:
                    counts.version = version + 1
                    counts.since_publication = (0, 0)
                    with self._timeline.measure_span(
                        "snapshot", step=number, version=counts.version
                    ):
                        writer = self.components.version_publisher
                        await writer.copy_weights(
                            counts.version, with_probe_scores=with_probe_scores
                        )
                metrics = self._complete_metrics(
                    metrics, trained, waited_from, step_from, trained_at
                )
                # With this the conductor frees slots, records the step and has a new
                # version written.
                return TrainStepResult(
                    metrics=metrics,
                    version=version + 1,
                    has_new_weights=due,
                    groups=indices,
                    scores=score_groups(groups),
                    previews=select_previews(
                        [t for group in groups for t in group], self._env_labels
                    ),
                )
        finally:
            self._activity = "between steps"

    async def _take_prepared(
        self, indices: list[int], taken: list[list[Trajectory]]
    ) -> PreparedStep:
        """Return the groups that a step took from the buffer, ready to be trained."""
        return await self.components.next_step.get_result(indices, taken)

    def _complete_metrics(
        self,
        ages: dict[str, float],
        trained: StepOutcome,
        waited_from: float,
        step_from: float,
        trained_at: float,
    ) -> dict[str, float]:
        """Return the metrics of a step, from the trajectories as they were trained.

        Times are readings of the monotonic clock. A step lasts from the end of the one before, so
        that the time between steps is counted, too.
        """
        trajectories = [t for group in trained.groups for t in group]
        work = self.components
        before, spent = self._last_step_end
        ended, spent_now = self._read_clocks()
        self._last_step_end = ended, spent_now
        return {
            **trained.metrics,
            **ages,
            **compute_episode_metrics(trajectories),
            **compute_environment_metrics(trajectories, self._env_labels),
            **work.inbox.collect_metrics(),
            **work.version_publisher.collect_metrics(),
            **{
                f"lag/learner_{name}": value
                for name, value in self._lag_meter.collect_metrics().items()
            },
            **self._stage_seconds.read_increment(),
            "cpu/learner_seconds": spent_now - spent,
            "learner/rank_restarts": self.model.ranks.restarts,
            "timing/step_seconds": ended - before,
            "timing/between_seconds": waited_from - before,
            "timing/wait_seconds": step_from - waited_from,
            "timing/train_seconds": trained_at - step_from,
            "timing/snapshot_seconds": ended - trained_at,
            "batch/groups": len(trained.groups),
            "lineage": self.lineage.number,
        }

    def _read_clocks(self) -> tuple[float, float]:
        return self.world.clock.monotonic(), self.world.processes.cpu_seconds()

    # -- weights and checkpoints -------------------------------------------------------------------

    async def publish_version(self) -> Published:
        """Copy and write the current weights; see `VersionPublisher.copy_weights` and
        `write_version`. Versions of adapters need a base: see `publish_base`."""
        writer = self.components.version_publisher
        alone = self.config.learner.lora.delivers_adapters
        base = await writer.publish_base() if alone else None
        await writer.copy_weights(self.model.counts.version, with_probe_scores=True)
        return msgspec.structs.replace(await self.write_version(), base=base)

    async def score_probe(self, version: int) -> np.ndarray | None:
        """Return the scores that `version` gives the probe's text, see `Published.scores`; None
        once a step has begun to train on from it."""
        counts = self.model.counts
        if (
            self._activity == "training"
            or counts.version != version
            or counts.since_publication != (0, 0)
        ):
            return None
        return await self.components.version_publisher.score_probe()

    async def write_version(self, versions_in_use: Sequence[int] = ()) -> Published:
        """Write the weights that were copied last to where engines find them, beside whatever else
        the learner does. Versions in `versions_in_use`, which engines are reading, stay."""
        return await self.components.version_publisher.write_version(versions_in_use)

    async def save_failed_version(self, manifest: WeightManifest) -> None:
        """Save a published version with which a probe failed as a model directory of the run; see
        `VersionPublisher.save_model_directory`."""
        await self.components.version_publisher.save_model_directory(
            manifest, self.model_path, self.run_dir / FAILED_MODEL_DIRECTORY
        )

    async def save_model(self, directory: str) -> int:
        """Export the current weights as a Hugging Face model directory, if at least one update made
        them. Returns the number of updates."""
        backend = self.model.ranks
        updates = await self._torch_lane.run(backend.count_updates)
        if updates:
            await self._torch_lane.run(backend.save_model, Path(directory))
        return updates

    async def begin_checkpoint(self, conductor: ConductorState) -> float:
        """Copy the state as it is between two steps, wait until these are recorded, and begin to
        write the checkpoint.

        Returns how long the next step had to wait for that, in seconds. For what it raises, see
        `CheckpointWriter.save_checkpoint`.
        """
        clock = self.world.clock.monotonic
        counts = self.model.counts
        work = self.components
        began = clock()
        taken = work.inbox.buffer.consumed
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
        state = await state.with_record_positions(
            self.run_dir, LEARNER_RECORD_FILES, keeper=self.world.record_flusher
        )
        await work.checkpoints.save_checkpoint(
            state,
            lambda: self._torch_lane.run(backend.stage_checkpoint),
            backend.write_checkpoint,
            commit,
        )
        return clock() - began

    async def finish_checkpoint(self) -> None:
        """Wait until the checkpoint that is being written is complete. Raises `CheckpointError` if
        the last one failed."""
        await self.components.checkpoints.wait_until_written()
