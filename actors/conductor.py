"""The conductor actor, which drives a run step by step to its end: it leases groups, has the
learner train, delivers versions of the weights and records each step. It never touches a payload.

`Conductor.run` is the run. Beside its steps are loops, each of which waits for an event:

    generators                      loops of the conductor                            learner
    lease_groups  ----------------> dispatcher.run       (leases_due)
    GeneratorActor.run  ---------------- trajectories over ZeroMQ -----------------> receiver
                                    run: the steps  ----- run_step ----------------> waits for groups,
                                      sets leases_due  <---- groups, version -------   trains them
                                      _publish_version  -- write_version ----------> writes its weights
                                        sets weights_due
    install_version  <------------- _deliver_versions    (weights_due)
    start, run  <------------------ supervisor.run       (restarts_due)

The components do not know the run; they return, or set an event that one of the loops awaits:

* `AdmissionController` (schedule/run_ahead.py) decides which groups may be leased
  with which version;
* `LeaseDispatcher` (lease_dispatcher.py) answers the calls of generators with leases;
* `TaskSource` (tasks.py) chooses the task of each group, and quarantines those that always fail;
* `Fleet` (fleet.py) knows the generators and their health;
* `GeneratorSupervisor` (generator_supervisor.py) restarts generators, adds and removes them;
* `VersionDelivery` (version_delivery.py) installs versions in engines, and probes them;
* `Evaluator` (evaluator.py) plays evaluations beside training;
* `PaceMonitor` (schedule/pace.py) finds the side that waits for the other;
* `StallMonitor` (stalls.py) notices a stage that makes no progress;
* `StepWriter` (record/step_writer.py) writes the row of a step when it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from r3async.actors.evaluator import Evaluator
from r3async.actors.lease_dispatcher import LeaseDispatcher
from r3async.actors.leasing import LeaseAnswer, LeaseCall
from r3async.actors.remote_generators import check_shares_run_directory
from r3async.actors.run_setup import RunSetup
from r3async.actors.tasks import TaskSource
from r3async.actors.weight_transport import choose_weight_backend
from r3async.checkpoint import CheckpointSchedule, RunState, restore_admission
from r3async.checkpoint.state import CONDUCTOR_RECORD_FILES, ConductorState
from r3async.config import Config, config_from_dict
from r3async.data.write_sizes import UNKNOWN_SIZES, WriteSizes
from r3async.record.events import EVENTS_FILE, open_event_log
from r3async.record.process_time import LagMeter, StageTimer
from r3async.record.step_writer import DeviceCounts, StepWriter
from r3async.record.timeline import Timeline
from r3async.schedule.pace import PaceMonitor
from r3async.schedule.run_ahead import AdmissionController
from r3async.schedule.update_monitor import UpdateMonitor
from r3async.untrusted import decode_msgpack
from r3async.world import ActorLostError, ActorRef, World
from r3async.world.appending import AppendFile
from r3async.world.disk_retries import RETRY_SECONDS, is_disk_error
from r3async.world.stages import create_stage_task, stage

from .fleet import Fleet, LearnerAddress
from .generator_supervisor import GeneratorSupervisor
from .learner import TrainStepResult
from .process import (
    RPC_SECONDS,
    ProcessLost,
    RunFailed,
    await_guarded,
    await_or_stopped,
    call_with_limit,
    describe_root_cause,
    prepare_process,
)
from .stalls import StallMonitor
from .version_delivery import VersionDelivery

STOP_SECONDS_WHILE_LOADING = 5.0


class Conductor:
    """The actor that controls a run. It serves generators (`lease_groups`) and the driver (`run`,
    `get_status`, `request_stop`) on one event loop, and does no blocking work."""

    def __init__(
        self,
        world: World,
        setup: RunSetup,
        learner: ActorRef,
        generators: Mapping[str, ActorRef],
        resume_state: RunState | None = None,
    ):
        """Set up the run's state; nothing is loaded before `run`.

        Args:
            resume_state: State of the checkpoint that the run resumes from.
        """
        self.world = world
        self.run_dir = Path(setup.run_dir)
        self._lock = prepare_process(world, self.run_dir, "conductor")
        self.config: Config = config_from_dict(setup.config)
        self.run_id = setup.run_id
        self.lineage = setup.lineage
        self.learner = learner
        self.events = open_event_log(self.run_dir, "conductor", world=world)
        self._remote_events = AppendFile(self.run_dir / EVENTS_FILE, world=world)
        self.timeline = Timeline(
            self.run_dir, "weights", enabled=self.config.observe.timeline, world=world
        )
        self.step_rows = StepWriter(
            self.run_dir, self.events.error, DeviceCounts.from_config(self.config), world=world
        )
        self.task_source = TaskSource(self.config, self.run_dir, self.events, world=world)
        schedule = self.config.schedule
        clock = world.clock.monotonic
        self.admission = AdmissionController(
            schedule,
            # If steps take groups until they have enough tokens, the total number of groups is not
            # known beforehand.
            total_groups=None
            if schedule.takes_extra_groups
            else self.config.steps * schedule.prompts_per_step,
            choose_task=self.task_source.choose_task,
        )
        self.lag_meter = LagMeter(world.processes)
        self._stage_seconds = StageTimer("conductor", world.processes)
        self.pacing = PaceMonitor(schedule, self.events.warning, clock)
        self._processes = {"conductor": (world.processes.pid, world.processes.host)}
        self._stop_requested = asyncio.Event()
        self.fleet = Fleet(self.config, self.events, generators, clock)
        self.dispatcher = LeaseDispatcher(self.admission, self.fleet, learner, self._stop_requested)
        self.supervisor = GeneratorSupervisor(
            world, self.config, self.events, self.fleet, self.dispatcher, self._stop_requested
        )
        self.evaluator = Evaluator(self.config, self.run_dir, self.events, self.fleet, world=world)
        self._actor_stop_seconds = STOP_SECONDS_WHILE_LOADING
        """Seconds that the actors may take to end. While they load, there is no work that
        they have to finish."""
        self._phase = "starting"
        self._write_sizes = UNKNOWN_SIZES
        self._resume_state = resume_state
        self.step = resume_state.steps if resume_state else 0
        """Number of steps made, over all starts of the run."""
        self.version = resume_state.version if resume_state else 0
        """Version of the weights that the last step made, or had a part in."""
        self._delivered_version = -1
        """Newest version that the generators have."""
        self._update_monitor = UpdateMonitor(
            self.config.supervise.max_skipped_steps, self.events.warning, self.events.info
        )
        self._checkpoint_due = CheckpointSchedule(
            self.config.checkpoint, clock, self.config.evaluation.every_steps, self.step
        )
        self._resumed_tokens = resume_state.generated_tokens if resume_state else 0
        self._started_at = clock() - (resume_state.elapsed if resume_state else 0.0)

    # -- called by generators ----------------------------------------------------------------------

    async def lease_groups(self, message: bytes) -> bytes:
        """Answer a generator's call for leases; see `LeaseDispatcher.answer_call`.

        `message` is a `LeaseCall` in MessagePack, and the result a `LeaseAnswer` in MessagePack:
        one value each way costs Ray the least.
        """
        with stage("lease"):
            call = decode_msgpack(message, LeaseCall)
            generator = self.fleet.generators.get(call.generator_id)
            stats = call.stats
            if generator is None or not generator.is_current_process(*call.process):
                # It has left, or another process has taken its place, which would have to play
                # these leases without knowing of them.
                return msgspec.msgpack.encode(LeaseAnswer([], more=False))
            self.fleet.note_answer(generator)
            generator.has_played |= bool(call.ended)
            for line in call.told:
                self._remote_events.append(line)
            self.task_source.record_ends(call.ended, self.admission.groups_leased)
            generator.generated_tokens = int(stats["generated_tokens"])
            self.pacing.report_generator(call.generator_id, stats)
            return msgspec.msgpack.encode(await self.dispatcher.answer_call(call))

    # -- called by the driver ----------------------------------------------------------------------

    async def add_generator(self, generator_id: str, handle: ActorRef) -> str:
        """Add a generator to the running fleet; see `GeneratorSupervisor.add_generator`."""
        return await self.supervisor.add_generator(generator_id, handle)

    async def remove_generator(self, generator_id: str) -> None:
        """Remove a generator from the running fleet; see `GeneratorSupervisor.remove_generator`."""
        await self.supervisor.remove_generator(generator_id)

    def list_excluded(self) -> list[str]:
        """Return `GeneratorSupervisor.excluded_ids`."""
        return self.supervisor.excluded_ids

    def get_status(self, since: int) -> dict[str, Any]:
        """Return the run's status for the live line. The call is cheap.

        Its rows are those of the steps after step `since`; `evaluations` are the last evaluation
        rows of this start.
        """
        return {
            "phase": self._phase,
            "steps": self.config.steps,
            "rows": self.step_rows.rows_after(since),
            "evaluations": list(self.evaluator.recent_rows),
            "slots_taken": self.admission.slots_taken,
            "slots": self.admission.slots,
            "generators": self.fleet.describe_generators(),
            "processes": self._processes | {g.generator_id: g.process for g in self.fleet},
            "generated_tokens": self._generated_tokens,
            "elapsed": self._elapsed_seconds,
        }

    @property
    def _generated_tokens(self) -> int:
        return self._resumed_tokens + self.fleet.generated_tokens

    @property
    def _elapsed_seconds(self) -> float:
        return self.world.clock.monotonic() - self._started_at

    @property
    def stop_requested(self) -> bool:
        return self._stop_requested.is_set()

    async def request_stop(self) -> None:
        """Request that the run finish the running step, write a checkpoint and end.
        Returns at once."""
        if not self.stop_requested:
            self._stop_requested.set()
            # Calls that wait for leases are answered: there will be none.
            self.fleet.leases_due.set()
            self.events.warning("stop_requested")
            await self.learner.call("interrupt_wait")

    async def run(self) -> dict[str, Any]:
        """Make the whole run: load, train, save, evaluate, and end the actors.

        Returns the fields of the event `run_finished`. `updates` is the number of optimizer updates
        that made the weights, over all steps and resumes; without any there is no `model`.
        `without_update` says what the steps of this process that made no update lacked. A run that
        was stopped while it loaded has neither. Raises `RunFailed` with the reason.
        """
        self.events.info(
            "conductor_started",
            pid=self.world.processes.pid,
            step=self.step,
            lineage=self.lineage.number,
        )
        # Every row has this event loop's lag, measured from the start.
        self.lag_meter.start()
        # The time that this task takes is booked to the stage "steps".
        with stage("steps"):
            # What goes on beside the steps. A failure of any of it ends the steps at once.
            background: list[asyncio.Task[None]] = []
            try:
                # Load learner and engines, and install the first weights: nothing can be played
                # or trained before.
                installer = await await_or_stopped(self._stop_requested, self._start_actors())
                if installer is None:
                    # The stop came during loading: no step was made in this start, so there is
                    # nothing to save.
                    self.events.info("run_finished", steps=self.step, stopped=True, model=None)
                    return {"steps": self.step, "model": "", "stopped": True}
                self._phase = "training"
                # From now on the actors have work that they have to finish when they
                # are asked to end.
                self._actor_stop_seconds = self.config.supervise.stop_grace_seconds
                # The time spent loading must not lower the rates of the first row.
                self.step_rows.restart_clock()
                # Deliver versions in a task of its own: training never waits for an installation.
                delivering = create_stage_task("deliver", self._deliver_versions(installer))
                # Detect a run in which no process fails but nothing progresses.
                watching = create_stage_task("watch", self._build_stall_monitor(installer).run())
                # End the run as soon as too many tasks have failed.
                background += [
                    delivering,
                    watching,
                    create_stage_task("watch", self.task_source.raise_when_failed()),
                ]
                # Start the generators and restart those that are lost, from now on and
                # beside the steps.
                background.append(create_stage_task("deliver", self.supervisor.run()))
                # Answer calls that wait for leases, when there is something to lease.
                background.append(create_stage_task("lease", self.dispatcher.run()))
                # Begin the evaluation that was due at this step, if it is not there; it is played
                # beside training.
                self.evaluator.resume_evaluations(self.step, self.version)

                publishing: asyncio.Task[None] | None = None
                # `next_version` is the version that the next step makes, or has a part in.
                next_version = self.version + 1
                while self.step < self.config.steps and not self.stop_requested:
                    # The last step publishes its weights even if their version has fewer
                    # steps than usual.
                    last = self.step + 1 == self.config.steps
                    # If a generator is due to be probed with this version, the learner scores the
                    # probe's text with it, too.
                    scored = installer.needs_probe_scores(next_version)
                    # Train one step; meanwhile a failure of a background task ends the run.
                    step: TrainStepResult | None = await await_guarded(
                        self.learner.call("run_step", is_last=last, with_probe_scores=scored),
                        background,
                    )
                    # The learner was interrupted while it waited for groups: a stop was requested.
                    if step is None:
                        break
                    self.step = self.step + 1
                    self.version = step.version
                    # The leases of these groups are over; their slots stay taken until the
                    # version is published.
                    self.admission.step_trained(self.version, step.groups)
                    # Rewards of a task decide how often it is posed again (`schedule.difficulty`).
                    self.task_source.record_scores(step.groups, step.scores)
                    # Before slots are freed, for the row has how many were taken.
                    self._write_row(step)
                    # Free the slots before the weights arrive: new leases begin at once and wait
                    # for them at their engine.
                    if step.has_new_weights:
                        self.admission.version_published(self.version)
                    # Serve the generators that wait for leases.
                    self.fleet.leases_due.set()
                    # An evaluation runs beside training, so it only begins here.
                    self.evaluator.evaluate_if_due(self.step, self.version)
                    # Without new weights, the next step is part of the same version.
                    if step.has_new_weights:
                        next_version = self.version + 1
                        # At most one copy waits: the learner has written it before it copied the
                        # next, so this wait is short.
                        if publishing is not None:
                            await await_guarded(publishing, background)
                        # Write and deliver the new version beside the next step. If it cannot be
                        # written, the run ends at once, and not only at the next version.
                        publishing = asyncio.create_task(self._publish_version(installer))
                        background.append(publishing)
                        # Checkpoint between two steps, and only where a version is complete.
                        if self._checkpoint_due(self.step):
                            await await_guarded(self._begin_checkpoint(), background)

                # The last version must be published before its delivery can be finished.
                if publishing is not None:
                    await publishing
                self._phase = "writing a checkpoint"
                # Checkpoint the last step first, so that whatever fails from here
                # on can be resumed.
                await await_guarded(self._begin_last_checkpoint(), [delivering])
                watching.cancel()  # the phases that follow have limits of their own
                # A delivery of the last weights that fails is not passed over.
                await self._finish_delivery(installer, delivering)
                # Save the model and wait until the checkpoint is written, before the learner ends.
                updates = await self._save_model() if self.step else 0
                self._phase = "evaluating"
                # Evaluate the last weights while the engines that have them still live.
                undone = await self.evaluator.finish_evaluations(
                    self.step, self.version, self._stop_requested
                )
                # A stop request that came when everything was done has stopped nothing.
                stopped = self.stop_requested and (undone or self.step < self.config.steps)
                # A run without an update in which most episodes failed has failed, and was
                # not merely idle.
                if not updates and not stopped:
                    failure = self._update_monitor.describe_failure()
                    if failure:
                        raise RunFailed(f"{failure}. The last one: {self.task_source.last_failure}")
                # The event and the result have the same fields.
                ended = {
                    "steps": self.step,
                    "stopped": stopped,
                    "updates": updates,
                    "without_update": self._update_monitor.describe_no_updates(),
                    "model": str(self.run_dir / "model") if updates else None,
                }
                self.events.info("run_finished", **ended)
                return ended
            except Exception as error:
                # Name the innermost cause, in the record and to the driver.
                cause = describe_root_cause(error, self.run_dir)
                self.events.error("run_failed", error=cause)
                # After the loss of a process the driver may restart the run from its
                # newest checkpoint.
                if isinstance(error, ActorLostError):
                    raise ProcessLost(cause) from error
                raise RunFailed(cause) from error
            finally:
                # From here on nothing is leased, and a loss of a generator restarts nothing.
                self._stop_requested.set()
                self._phase = "ending the actors"
                self.lag_meter.stop()
                # Cancel evaluation and background tasks before the actors that they call end.
                await self.evaluator.cancel()
                for left in background:
                    left.cancel()
                await asyncio.gather(*background, return_exceptions=True)
                # End the actors in order, within a limit: the driver kills those that do not end.
                await self._stop_actors()
                # The records are complete only when what is kept in memory is in the files.
                await self.world.record_flusher.finish_writes(
                    self.config.supervise.stop_grace_seconds
                )
                self._phase = "ended"

    # -- start -------------------------------------------------------------------------------------

    async def _start_actors(self) -> VersionDelivery:
        """Load and start everything that the first step needs. Returns the installer of weights."""
        config = self.config
        self._phase = "loading learner and engine"
        info, infos = await asyncio.gather(self._load_learner(), self.fleet.load_engines())
        check_shares_run_directory(info, self.run_dir)
        self._write_sizes = WriteSizes(*info["written"])
        self._processes["learner"] = info["pid"], info["host"]
        self.fleet.check_generators(infos, self.admission.slots)
        self.task_source.set_task_counts(infos[0]["tasks"])
        hosts = {i["host"] for i in infos} | {info["host"], *info["rank_hosts"]}
        backend = choose_weight_backend(
            config, hosts, info["gpus"], [i["gpus"] for i in infos], info["rank_hosts"]
        )
        probe_tokens = await self.fleet.encode_probe_text()
        listening = await self.learner.call(
            "start_listening", infos[0]["routing"], backend, probe_tokens
        )
        learner_address = LearnerAddress(listening["endpoint"], backend, listening["keys"])
        if self._resume_state is not None or listening["newest_group"] >= 0:
            await self._resume_run(listening["newest_group"])
        self.task_source.extend_quarantine(self.admission.groups_leased)
        installer = await self._deliver_first_version(learner_address, probe_tokens)
        self.supervisor.begin_supervision(
            installer, self.world.actors.current_actor(), infos[0], hosts
        )
        return installer

    async def _load_learner(self) -> dict[str, Any]:
        """Have the learner load. Returns what it reports about itself."""
        report: dict[str, Any] = await call_with_limit(
            self.learner,
            "start",
            failure="the learner did not load",
            seconds=self.config.supervise.limits.start,
        )
        self._phase = "loading engine"
        return report

    async def _resume_run(self, newest_group: int) -> None:
        """Continue where the checkpoint left off, or without one at the beginning. Episodes of
        untrained groups that the learner still has are not played again."""
        state = self._resume_state
        if state is not None:
            # Every engine installs these weights before anything is leased.
            restore_admission(self.admission, state)
        groups = range(
            self.admission.oldest_group, max(self.admission.groups_leased, newest_group + 1)
        )
        missing = await self.learner.call("missing_episodes", list(groups))
        self.task_source.load_state_dict(state, await self.learner.call("list_buffered_tasks"))
        again = self.admission.requeue_after_resume(newest_group, lambda g: missing.get(g, []))
        if state is not None:
            self.step_rows.restore(state.generated_tokens, state.pending_rows or ())
        self.events.warning(
            "resumed",
            step=self.step,
            version=self.version,
            lineage=self.lineage.number,
            checkpoint=state is not None,
            groups_played_again=again,
        )

    async def _deliver_first_version(
        self, learner_address: LearnerAddress, probe_tokens: list[int] | None
    ) -> VersionDelivery:
        self._phase = "delivering weights"
        published = await self.learner.call("publish_version")
        installer = VersionDelivery(
            self.fleet,
            self.learner,
            learner_address=learner_address,
            probe_tokens=probe_tokens,
            newest_published=published,
            world=self.world,
        )
        # Nothing else calls the learner until every engine has its weights, which may take minutes.
        watching = create_stage_task("watch", self._watch_learner())
        try:
            await await_guarded(installer.install_first_version(), [watching])
        finally:
            watching.cancel()
        self.admission.version_published(published.version)
        self._delivered_version = published.version
        return installer

    async def _watch_learner(self) -> None:
        """Raise `ActorLostError` when the learner is lost."""
        while True:
            await asyncio.sleep(RPC_SECONDS)
            await self.learner.call("get_status")

    # -- steps -------------------------------------------------------------------------------------

    def _write_row(self, step: TrainStepResult) -> None:
        """Write the row of a step that ended. Raises `RunFailed` if too many steps in a row were
        skipped."""
        lag = self.lag_meter.collect_metrics()
        metrics = {
            **step.metrics,
            # Who waited for whom in this step.
            **self.pacing.record_step(self.step, len(step.groups), step.metrics),
            "generator/restarts": self.fleet.restarts,
            "slots/taken": self.admission.slots_taken,
            "weights/paused_share": self.fleet.paused_share,
            **{f"lag/conductor_{name}": value for name, value in lag.items()},
            **self.dispatcher.collect_metrics(),
            **self.task_source.collect_metrics(self.admission.groups_leased),
        }
        self.step_rows.devices = DeviceCounts.from_config(self.config, len(self.fleet.generators))
        self.dispatcher.cpu_seconds.add(
            "conductor", self.world.processes.cpu_seconds(), "conductor"
        )
        self.step_rows.write_step(
            self.step,
            self.version,
            metrics,
            step.previews,
            generated_tokens=self._generated_tokens,
            cpu_seconds=self.dispatcher.cpu_seconds.totals,
            stage_seconds=self.dispatcher.stage_seconds.totals
            | self._stage_seconds.total_seconds(),
        )
        reason = self._update_monitor.record_step(self.step, metrics)
        if reason:
            raise RunFailed(reason)

    async def _begin_checkpoint(self) -> None:
        """Begin a checkpoint of the run as it is between two steps. A checkpoint that
        cannot be begun, for example because file descriptors are lacking, is due again
        after the next step."""
        state = ConductorState(
            admission=self.admission.state_dict(),
            tasks=self.task_source.state_dict(),
            elapsed=self._elapsed_seconds,
            generated_tokens=self._generated_tokens,
        )
        try:
            state = await state.with_record_positions(
                self.run_dir, CONDUCTOR_RECORD_FILES, keeper=self.world.record_flusher
            )
            with self.timeline.measure_span("checkpoint", step=self.step):
                seconds = await self.learner.call("begin_checkpoint", state)
        except OSError as error:
            if not is_disk_error(error):
                raise
            self.events.error(
                "checkpoint_failed", step=self.step, error=f"{type(error).__name__}: {error}"
            )
            return
        self._checkpoint_due.mark_begun(self.step)
        self.events.info(
            "checkpoint_begun", step=self.step, training_waited_seconds=round(seconds, 4)
        )

    async def _begin_last_checkpoint(self) -> None:
        """Begin the checkpoint of the last step, and try again for as long as a checkpoint may
        take. Raises `RunFailed` after that."""
        clock = self.world.clock.monotonic
        limit = self.config.supervise.limits.checkpoint_write(self._write_sizes.checkpoint_bytes)
        deadline = clock() + limit
        while self.step != self._checkpoint_due.last_step:
            await self._begin_checkpoint()
            if self.step != self._checkpoint_due.last_step:
                if clock() > deadline:
                    raise RunFailed(
                        f"the checkpoint of step {self.step} could not be begun within {limit:g} s "
                        f"(supervise.patience): see checkpoint_failed in {EVENTS_FILE}, mend "
                        "the cause and resume"
                    )
                await asyncio.sleep(RETRY_SECONDS)

    async def _publish_version(self, installer: VersionDelivery) -> None:
        """Have the learner write the copied weights, and make them the version that
        engines install.

        The learner may be several versions ahead of an engine: versions that are being read now
        must stay, however many follow. What engines begin to read from here on is the newest
        version, which outlives the next one in any case.
        """
        published = await self.learner.call("write_version", installer.versions_in_use)
        self.step_rows.add_delivery({"timing/weight_write_seconds": published.seconds})
        installer.newest_published = published
        self.fleet.weights_due.set()

    async def _deliver_versions(self, installer: VersionDelivery) -> None:
        """Install the newest weights in every generator that answers. Runs until cancelled."""
        while True:
            # A new version, or a generator that may lack one, wakes this loop.
            await self.fleet.weights_due.wait()
            # Clear before looking, so that what changes meanwhile leads to another look.
            self.fleet.weights_due.clear()
            version = installer.newest_published.version
            # It may have been woken for nothing.
            if not installer.needs_delivery and version <= self._delivered_version:
                continue
            with self.timeline.measure_span("deliver", version=version):
                figures = await installer.deliver_newest()
            if figures is None:
                # Nobody has it: a generator that is restarted, or recovers, installs it and
                # wakes this loop.
                continue
            # A generator that got it later, for example after a restart, was waited for by nobody.
            if version > self._delivered_version:
                self._delivered_version = version
                self.step_rows.add_delivery(figures)

    async def _finish_delivery(
        self, installer: VersionDelivery, delivering: asyncio.Task[None]
    ) -> None:
        """Wait until the last weights are delivered, for `RPC_SECONDS` at most. Raises what the
        delivery failed with."""
        clock = self.world.clock.monotonic
        deadline = clock() + RPC_SECONDS
        while self._delivered_version < installer.newest_published.version and clock() < deadline:
            self.fleet.weights_due.set()
            await await_guarded(asyncio.sleep(0.05), [delivering])

    # -- the end -----------------------------------------------------------------------------------

    async def _save_model(self) -> int:
        """Have the learner save the model and finish the last checkpoint. Returns how many updates
        made the weights."""
        self._phase = "saving the model"
        model = str(self.run_dir / "model")
        limits = self.config.supervise.limits
        updates: int = await call_with_limit(
            self.learner,
            "save_model",
            model,
            failure="the model was not saved",
            seconds=limits.start,
        )
        self._phase = "writing a checkpoint"
        await call_with_limit(
            self.learner,
            "finish_checkpoint",
            failure="the last checkpoint was not written",
            seconds=limits.checkpoint_write(self._write_sizes.checkpoint_bytes) + RPC_SECONDS,
        )
        return updates

    async def _stop_actors(self) -> None:
        """Ask the actors to end in order, and wait for it as long as they may take."""
        actors = [*(g.handle for g in self.fleet), self.learner]
        seconds = self._actor_stop_seconds
        ended = asyncio.gather(*(actor.call("stop") for actor in actors), return_exceptions=True)
        try:
            await asyncio.wait_for(ended, seconds)
        except TimeoutError:
            self.events.warning("actors_did_not_stop", seconds=seconds)

    def _build_stall_monitor(self, installer: VersionDelivery) -> StallMonitor:
        return StallMonitor(
            self.world,
            self.run_dir,
            dispatcher=self.dispatcher,
            installer=installer,
            evaluator=self.evaluator,
            write_seconds=self.config.supervise.limits.version_write(
                self._write_sizes.version_bytes
            ),
            stop_requested=self._stop_requested,
        )
