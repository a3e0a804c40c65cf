"""The conductor actor: leases, steps, weights, health and the record of the run. It never touches a payload."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from r3async.actors.away import check_shares_run_directory
from r3async.actors.delivery import choose_weight_backend, zero_delivery_metrics
from r3async.actors.ending import save_final_model, stop_actors
from r3async.actors.fleet import Fleet, FleetGenerator, LearnerAddress
from r3async.actors.installer import VersionInstaller
from r3async.actors.leasing import LeaseAnswer, LeaseCall, LeaseDispatcher
from r3async.actors.members import FleetMembership
from r3async.actors.process import (
    RPC_SECONDS,
    ProcessLost,
    RunFailed,
    await_guarded,
    await_or_stopped,
    call_with_limit,
    describe_root_cause,
    prepare_process,
)
from r3async.actors.tasks import Evaluator, TaskSource
from r3async.actors.watch import StallMonitor
from r3async.checkpoint import CheckpointSchedule, RunState, restore_admission
from r3async.checkpoint.state import CONDUCTOR_RECORD_FILES, ConductorState
from r3async.config import Config, config_from_dict
from r3async.data.versions import FIRST_LINEAGE, Lineage
from r3async.data.written import UNKNOWN_SIZES, WriteSizes
from r3async.record.events import EVENTS_FILE, open_event_log
from r3async.record.steps import DeviceCounts, StepWriter
from r3async.record.timeline import LagMeter, StageTimer, Timeline
from r3async.schedule.admission import AdmissionController
from r3async.schedule.health import UpdateMonitor
from r3async.schedule.pace import PaceMonitor
from r3async.untrusted import decode_msgpack
from r3async.world import ActorLostError, ActorRef, World
from r3async.world.appending import AppendFile
from r3async.world.disk_waits import RETRY_SECONDS, is_disk_error
from r3async.world.stages import create_stage_task, in_stage, stage

STOP_SECONDS_WHILE_LOADING = 5.0


class Conductor:
    """Serves generators (`lease_groups`) and the driver (`run`, `get_status`, `request_stop`). One event loop; no blocking
    work."""

    def __init__(
        self,
        world: World,
        run_id: str,
        config: dict[str, Any],
        run_dir: str,
        learner: ActorRef,
        generators: Mapping[str, ActorRef],
        resume_state: RunState | None = None,
        lineage: Lineage = FIRST_LINEAGE,
    ):
        """`resume_state`: of the checkpoint that the run resumes from. `lineage`: of this start."""
        self.world, self._lock = world, prepare_process(world, Path(run_dir), "conductor")
        self.config: Config = config_from_dict(config)
        self.run_id, self.run_dir, self.lineage, self.learner = run_id, Path(run_dir), lineage, learner
        self.events = open_event_log(self.run_dir, "conductor", world=world)
        self._remote_events = AppendFile(self.run_dir / EVENTS_FILE, world=world)
        self.timeline = Timeline(self.run_dir, "weights", enabled=self.config.observe.timeline, world=world)
        self.step_rows = StepWriter(self.run_dir, self.events.error, DeviceCounts.from_config(self.config), world=world)
        self.task_source = TaskSource(self.config, self.run_dir, self.events, world=world)
        schedule, clock = self.config.schedule, world.clock.monotonic
        self.admission = AdmissionController(
            schedule,
            # Steps that take as many groups as have enough tokens need nobody knows how many.
            total_groups=None if schedule.takes_extra_groups else self.config.steps * schedule.groups_per_step,
            choose_task=self.task_source.choose_task,
            on_change=lambda: self.dispatcher.serve_soon(),
        )
        self.lag_meter, self._stage_seconds = LagMeter(world.processes), StageTimer("conductor", world.processes)
        self.pacing = PaceMonitor(schedule, self.events.warning, clock)
        self._processes = {"conductor": (world.processes.pid, world.processes.host)}
        self.delivery_due = asyncio.Event()
        """There may be something to deliver."""
        self.fleet = Fleet(self.config, self.events, generators, clock, self._wake_waiters)
        resting = lambda: self.stop_requested  # noqa: E731
        self.dispatcher = LeaseDispatcher(self.admission, self.fleet, resting)
        known = self.config, self.events, self.fleet, self.dispatcher
        self.membership = FleetMembership(
            *known, self._requeue_leases, self._handle_fleet_resize, resting, world.actors.kill_actor, clock
        )
        revive = self.membership.revive_generator
        self.evaluator = Evaluator(
            self.config, self.run_dir, self.events, self.fleet, revive_generator=revive, world=world
        )
        self._stop_requested = asyncio.Event()
        self._actor_stop_seconds = STOP_SECONDS_WHILE_LOADING
        """How long the actors may take to end: while they load, nothing has to be finished."""
        self._phase = "starting"
        self._write_sizes = UNKNOWN_SIZES
        self._resume_state = resume_state
        self.step = resume_state.steps if resume_state else 0
        """Steps, in all starts of the run."""
        self.version = resume_state.version if resume_state else 0
        """That the last step made, or had a part in."""
        self._update_monitor = UpdateMonitor(
            self.config.supervise.max_skipped_steps, self.events.warning, self.events.info
        )
        self._checkpoint_due = CheckpointSchedule(
            self.config.checkpoint, clock, self.config.evaluation.every, self.step
        )
        self._resumed_tokens = resume_state.generated_tokens if resume_state else 0
        self._started_at = clock() - (resume_state.elapsed if resume_state else 0.0)

    # -- called by generators ------------------------------------------------------------------------------------

    async def lease_groups(self, message: bytes) -> bytes:
        """See `LeaseDispatcher.answer_call`. A `LeaseCall` in MessagePack, and a `LeaseAnswer`: one value each way costs
        Ray the least."""
        with stage("lease"):
            call = decode_msgpack(message, LeaseCall)
            generator, stats = self.fleet.generators.get(call.generator_id), call.stats
            if generator is None or not generator.is_current_process(*call.process):
                # It has left; or what it would be leased, the process in its place would have to play, and knows nothing of.
                return msgspec.msgpack.encode(LeaseAnswer([], more=False))
            self.fleet.note_answer(generator)
            for line in call.told:
                self._remote_events.append(line)
            self.task_source.record_ends(call.ended, self.admission.groups_leased)
            generator.generated_tokens = int(stats["generated_tokens"])
            self.pacing.report_generator(call.generator_id, stats)
            return msgspec.msgpack.encode(await self.dispatcher.answer_call(call))

    # -- called by the driver ------------------------------------------------------------------------------------

    async def add_generator(self, generator_id: str, handle: ActorRef) -> str:
        """See `FleetMembership.add_generator`."""
        return await self.membership.add_generator(generator_id, handle)

    async def remove_generator(self, generator_id: str) -> None:
        """See `FleetMembership.remove_generator`."""
        await self.membership.remove_generator(generator_id)

    def list_excluded(self) -> list[str]:
        """See `FleetMembership.excluded_ids`."""
        return self.membership.excluded_ids

    def get_status(self, since: int) -> dict[str, Any]:
        """For the live line; cheap. `step_rows`: of the steps after step `since`; `evaluations`: the last rows of this start."""
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
        """Finish the running step, write a checkpoint, end the run. Returns at once."""
        if not self.stop_requested:
            self._stop_requested.set()
            self.dispatcher.serve_soon()
            self.events.warning("stop_requested")
            await self.learner.call("interrupt_wait")

    async def run(self) -> dict[str, Any]:
        """The whole run. Returns what the event `run_finished` says; raises `RunFailed` with the reason.

        `updates`: that made the weights, of all steps and resumes; without any there is no `model`. `without_update`: what
        the steps of this process lacked that made none. A run that was stopped while it loaded has neither."""
        self.events.info("conductor_started", pid=self.world.processes.pid, step=self.step, lineage=self.lineage.number)
        self.lag_meter.start()
        return await in_stage("steps", self._run_phases())

    async def _run_phases(self) -> dict[str, Any]:
        background: list[asyncio.Task[None]] = []
        try:
            installer = await self._load_unless_stopped()
            if installer is None:
                self.events.info("run_finished", steps=self.step, stopped=True, model=None)
                return {"steps": self.step, "model": "", "stopped": True}
            self._phase = "training"
            self.step_rows.restart_clock()
            delivering = create_stage_task("deliver", self._deliver_versions(installer))
            watching = create_stage_task("watch", self._build_stall_monitor(installer).run())
            background += [delivering, watching, create_stage_task("watch", self.task_source.raise_when_failed())]
            background.append(create_stage_task("deliver", self.membership.run()))
            self.evaluator.resume_evaluations(self.step, self.version)
            await self._train_steps(installer, list(background))
            self._phase = "writing a checkpoint"
            await await_guarded(self._begin_last_checkpoint(), [delivering])
            watching.cancel()  # what follows has limits of its own
            await self._finish_delivery(delivering)
            given = (
                self.config,
                self.learner,
                self.run_dir,
                self._write_sizes.checkpoint_bytes,
                partial(setattr, self, "_phase"),
            )
            updates = await save_final_model(*given) if self.step else 0
            self._phase = "evaluating"
            undone = await self.evaluator.finish_evaluations(self.step, self.version, lambda: self.stop_requested)
            stopped = self.stop_requested and (undone or self.step < self.config.steps)  # and not when all was done
            if not updates and not stopped and (failure := self._update_monitor.describe_failure()):
                raise RunFailed(f"{failure}. The last one: {self.task_source.last_failure}")
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
            cause = describe_root_cause(error, self.run_dir)
            self.events.error("run_failed", error=cause)
            raise (ProcessLost if isinstance(error, ActorLostError) else RunFailed)(cause) from error
        finally:
            self._stop_requested.set()
            self._phase = "ending the actors"
            self.lag_meter.stop()
            await self.evaluator.cancel()
            for left in background:
                left.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            await stop_actors([*(g.handle for g in self.fleet), self.learner], self._actor_stop_seconds, self.events)
            await self.world.record_flusher.finish_writes(self.config.supervise.stop_grace_seconds)
            self._phase = "ended"

    # -- start ---------------------------------------------------------------------------------------------------

    def _wake_waiters(self) -> None:
        """Of a generator: it may need weights, or be leased something."""
        self.delivery_due.set()
        self.dispatcher.serve_soon()

    async def _load_unless_stopped(self) -> VersionInstaller | None:
        """Everything before the first step. None, without waiting for it any longer, if a stop is requested meanwhile."""
        installer = await await_or_stopped(self._stop_requested, self._start_actors())
        if installer is not None:
            self._actor_stop_seconds = self.config.supervise.stop_grace_seconds
        return installer

    async def _start_actors(self) -> VersionInstaller:
        self._phase = "loading learner and engine"
        config, failure = self.config, "the learner did not load"
        learner = asyncio.ensure_future(
            call_with_limit(config, "learner.start_timeout", self.learner, "start", failure=failure)
        )
        learner.add_done_callback(lambda _: setattr(self, "_phase", "loading engine"))
        info, infos = await asyncio.gather(learner, self.fleet.load_engines())
        check_shares_run_directory(info, self.run_dir)
        self._write_sizes = WriteSizes(*info["written"])
        self._processes["learner"] = info["pid"], info["host"]
        self.fleet.check_generators(infos, self.admission.slots)
        self.task_source.set_task_counts(infos[0]["tasks"])
        hosts = {i["host"] for i in infos} | {info["host"]}
        backend = choose_weight_backend(config, hosts, info["gpus"], [i["gpus"] for i in infos])
        tokens = await self.fleet.encode_probe_text()
        listening = await self.learner.call("start_listening", infos[0]["routing"], backend, tokens)
        way = LearnerAddress(listening["endpoint"], backend, listening["keys"])
        if self._resume_state is not None or listening["newest_group"] >= 0:
            await self._resume_run(listening["newest_group"])
        self.task_source.extend_quarantine(self.admission.groups_leased)
        installer = await self._deliver_first_version(way, tokens)
        self.membership.begin_membership(installer, self.world.actors.current_actor(), infos[0], hosts)
        return installer

    def _handle_fleet_resize(self) -> None:
        """The fleet is another one."""
        self.step_rows.devices = DeviceCounts.from_config(self.config, len(self.fleet.generators))
        self._wake_waiters()

    async def _resume_run(self, newest_group: int) -> None:
        """Where the checkpoint left off, or without one at the beginning: what the learner has of groups that were not trained is
        not played again."""
        if (state := self._resume_state) is not None:
            restore_admission(self.admission, state)  # of what follows, every engine has its weights first of all
        groups = range(self.admission.oldest_group, max(self.admission.groups_leased, newest_group + 1))
        missing = await self.learner.call("missing_episodes", list(groups))
        self.task_source.load_state_dict(state, await self.learner.call("list_buffered_tasks"))
        again = self.admission.requeue_after_resume(newest_group, lambda g: missing.get(g, []))
        if state is not None:
            self.step_rows.restore_pending(state.pending_rows, state.generated_tokens)
        where = {"step": self.step, "version": self.version, "lineage": self.lineage.number}
        self.events.warning("resumed", **where, checkpoint=state is not None, groups_played_again=again)

    async def _deliver_first_version(self, way: LearnerAddress, tokens: list[int] | None) -> VersionInstaller:
        self._phase = "delivering weights"
        published = await self.learner.call("publish_version")
        known = self.config, self.events, self.fleet, self.learner, way, tokens, published
        installer = VersionInstaller(*known, world=self.world, on_work=self._wake_waiters)
        await installer.install_first_version()
        self.admission.version_published(published.version)
        self._write_delivered_rows(published.version, zero_delivery_metrics())  # of a resumed run's last step
        return installer

    # -- steps ---------------------------------------------------------------------------------------------------

    async def _train_steps(self, installer: VersionInstaller, background: list[asyncio.Task[None]]) -> None:
        """Until all steps are made or a stop is requested. Raises what a background task fails with.

        A version is written, and then delivered, beside the steps that follow it.
        """
        publishing, version = None, self.version + 1
        while self.step < self.config.steps and not self.stop_requested:
            last = self.step + 1 == self.config.steps
            scored = installer.needs_probe_scores(version)
            result = await await_guarded(
                self.learner.call("train_step", is_last=last, with_probe_scores=scored), background
            )
            if result is None:
                break
            self._finish_step(result)
            version = self.version + result["new_weights"]
            if result["new_weights"]:
                if publishing is not None:  # the learner has written it before it copied the next
                    await await_guarded(publishing, background)
                publishing = asyncio.create_task(self._publish_version(installer, self.version))
                background.append(publishing)
                if self._checkpoint_due(self.step):
                    await await_guarded(self._begin_checkpoint(), background)
        if publishing is not None:
            await publishing

    def _finish_step(self, result: dict[str, Any]) -> None:
        metrics, groups = result["metrics"], result["groups"]
        self.step, self.version = self.step + 1, result["version"]
        self.admission.step_trained(self.version, groups)
        self.task_source.record_scores(groups, result["scores"])
        if result["new_weights"]:
            self.admission.version_published(self.version)
        metrics |= self.pacing.record_step(self.step, len(groups), metrics)
        self.step_rows.add(self.step, self.version, metrics, result["previews"])
        if reason := self._update_monitor.record_step(self.step, metrics):
            raise RunFailed(reason)
        self.evaluator.evaluate_if_due(self.step, self.version)

    async def _begin_checkpoint(self) -> None:
        """Begin a checkpoint of the run as it is between two steps. One that cannot be begun, as for want of descriptors, is due
        again after the next step."""
        state = ConductorState(
            admission=self.admission.state_dict(),
            tasks=self.task_source.state_dict(),
            pending_rows=self.step_rows.pending_rows,
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
            self.events.error("checkpoint_failed", step=self.step, error=f"{type(error).__name__}: {error}")
            return
        self._checkpoint_due.mark_begun(self.step)
        self.events.info("checkpoint_begun", step=self.step, training_waited_seconds=round(seconds, 4))

    async def _begin_last_checkpoint(self) -> None:
        """Begin the one of the last step, which is tried again for as long as a checkpoint may take. Raises `RunFailed`."""
        clock = self.world.clock.monotonic
        limit = self.config.checkpoint.resolve_write_timeout(self._write_sizes.checkpoint_bytes)
        deadline = clock() + limit
        while self.step != self._checkpoint_due.last_step:
            await self._begin_checkpoint()
            if self.step != self._checkpoint_due.last_step:
                if clock() > deadline:
                    raise RunFailed(
                        f"the checkpoint of step {self.step} could not be begun within {limit:g} s (checkpoint.write_timeout): "
                        f"see checkpoint_failed in {EVENTS_FILE}, mend the cause and resume"
                    )
                await asyncio.sleep(RETRY_SECONDS)

    async def _publish_version(self, installer: VersionInstaller, version: int) -> None:
        """Have the copied weights written, and make them those that engines are to install.

        The learner may be several versions ahead of an engine: what is read now must stay, however many follow. What is read
        from here on is the newest version, which outlives the next one in any case.
        """
        published = await self.learner.call("write_version", installer.versions_in_use)
        self.step_rows.update_pending(version, {"weights/write_seconds": published.seconds})
        installer.newest_published = published
        self.delivery_due.set()

    async def _deliver_versions(self, installer: VersionInstaller) -> None:
        """Install the newest weights in every generator that answers; write the rows of what was trained."""
        while True:
            await self.delivery_due.wait()
            self.delivery_due.clear()
            version = installer.newest_published.version
            if not installer.needs_delivery and not self.step_rows.has_pending(version):
                continue
            with self.timeline.measure_span("deliver", version=version):
                figures = await installer.deliver_newest()
            if figures is None:
                continue  # nobody answers: one that is restarted, or recovers, installs the newest version and wakes this
            self._write_delivered_rows(version, figures)

    async def _finish_delivery(self, delivering: asyncio.Task[None]) -> None:
        """Let the last weights be delivered, so that every step has its row. Raises what the delivery failed with."""
        deadline = self.world.clock.monotonic() + RPC_SECONDS
        while not self.step_rows.is_empty and self.world.clock.monotonic() < deadline:
            self.delivery_due.set()
            await await_guarded(asyncio.sleep(0.05), [delivering])
        self._write_delivered_rows(self.version, zero_delivery_metrics())

    def _write_delivered_rows(self, version: int, metrics: dict[str, float]) -> None:
        """`version` is installed: the rows of what made it, and of what was before, are written."""
        metrics = metrics | {
            "generator/restarts": self.fleet.restarts,
            "slots/taken": self.admission.slots_taken,
            **{f"lag/conductor_{name}": value for name, value in self.lag_meter.collect_metrics().items()},
            **self.dispatcher.collect_metrics(),
            **self.task_source.collect_metrics(self.admission.groups_leased),
        }
        self.dispatcher.cpu_seconds.add("conductor", self.world.processes.cpu_seconds(), "conductor")
        stages = self.dispatcher.stage_seconds.totals | self._stage_seconds.total_seconds()
        self.step_rows.write_delivered(
            version, self._generated_tokens, metrics, self.dispatcher.cpu_seconds.totals, stages
        )

    # -- the end -------------------------------------------------------------------------------------------------

    def _build_stall_monitor(self, installer: VersionInstaller) -> StallMonitor:
        known: dict[str, Any] = {"fleet": self.fleet, "admission": self.admission, "learner": self.learner}
        return StallMonitor(
            *(self.world, self.config, self.run_dir, self.events),
            **known,
            load_reports=self.dispatcher.load_reports,
            newest_version=lambda: installer.newest_published.version,
            write_seconds=self.config.weights.resolve_write_timeout(self._write_sizes.version_bytes),
            is_resting=lambda: self.stop_requested or self.evaluator.is_running,
        )

    async def _requeue_leases(self, generator: FleetGenerator) -> list[int]:
        """Its leases return. Returns the groups that are leased again."""
        self.dispatcher.forget_generator(generator.generator_id)
        missing = await self.learner.call("missing_episodes", self.admission.list_leased_groups(generator.generator_id))
        return self.admission.requeue_leases(generator.generator_id, lambda g: missing.get(g, []))
