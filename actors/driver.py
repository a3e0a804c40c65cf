"""The driver of a run starts the actors, follows them, and starts them again from the newest
checkpoint if one is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from r3async.actors.fleet_scaler import SCALE_REQUEST_FILE, FleetScaler, with_requested_scale
from r3async.actors.placement_plan import with_transport_host
from r3async.actors.rank_actor import LocalRank
from r3async.actors.ranks import RemoteRanks, load_learner
from r3async.actors.remote_generators import (
    RemoteModelFiles,
    publish_model_files,
    write_engine_model,
)
from r3async.actors.run_directory import RunDirectory, restart_run
from r3async.actors.run_placements import RunPlacements, reserve_placements
from r3async.actors.run_setup import RunSetup
from r3async.checkpoint import Checkpoint, CheckpointDirectory
from r3async.checkpoint.resume_checks import fingerprint_model
from r3async.checkpoint.run_starts import RunIdentity, begin_lineage, describe_origin
from r3async.config import Config, ConfigError, EnvConfig, config_to_dict
from r3async.data.versions import Lineage
from r3async.envs import EnvironmentFactory
from r3async.record.events import open_event_log
from r3async.schedule.watchdog import Watchdog
from r3async.world import ActorLostError, ActorOptions, ActorRef, EventReporter, Reservation, World

from .conductor import Conductor
from .generator import GeneratorActor
from .learner import LearnerActor
from .process import NotTrained, PolledCall, ProcessLost, RunFailed, StoppedBeforeStep

STATUS_TIMEOUT_SECONDS = 2.0
"""Seconds to wait for the conductor's status, each time that the driver polls it."""
STACK_DUMP_SECONDS = 2.0
"""Seconds that a process which does not answer gets to write its stacks before it is ended."""
PAUSED_AFTER_SECONDS = 30.0
"""Seconds between two polls after which the driver takes itself for paused, and does not blame the
conductor for the gap."""
CONDUCTOR_ANSWERING = "answering/conductor"
FIRST_ANSWER = f"{CONDUCTOR_ANSWERING} at first"
RUN_POLL_SECONDS = 1.0
LAST_STATUS_SECONDS = 10.0
"""Seconds to wait for the conductor's status when the run has ended and the driver polls it
for the last time."""
EXIT_SECONDS = 2.0
"""Seconds that actors may take to end before they are killed."""
EXIT_POLL_SECONDS = 0.02


def connect_cluster(world: World, config: Config) -> None:
    """Join the configured Ray cluster, or start one on this host. Blocking; does nothing if the
    process has joined already. Raises `ConfigError` for a cluster that cannot be reached, and
    `RunFailed` if none can be started."""
    count = config.generator.count
    ranks = config.learner.parallel.world_size
    try:
        world.actors.join_cluster(
            config.cluster.address or None, count + 2 + (ranks if ranks > 1 else 0)
        )
    except ConnectionError as error:
        if config.cluster.address:
            raise ConfigError(str(error)) from error
        raise RunFailed(str(error)) from error


class RunLauncher:
    """The launcher of one start of a run. Subclasses may start other classes of actors."""

    learner_class: type[LearnerActor] = LearnerActor
    generator_class: type[GeneratorActor] = GeneratorActor
    conductor_class: type[Conductor] = Conductor

    def __init__(
        self,
        world: World,
        config: Config,
        model_path: Path,
        run_dir: Path,
        resume: Checkpoint | None = None,
        make_environment: Callable[[EnvConfig], EnvironmentFactory] | None = None,
    ):
        """Prepare a start in `run_dir`; `start` starts it.

        Args:
            resume: The checkpoint that the run resumes from.
            make_environment: Makes the generators' environments, if they are not made from the
                configuration alone (`envs/factory.py`).
        """
        self.make_environment = make_environment
        self.world = world
        self.config = config
        self.model_path = model_path
        self.run_dir = run_dir
        self.resume = resume
        self._offered_model: RemoteModelFiles | None = None
        self.run_id = f"{run_dir.name}-{world.unique_id()[:8]}"
        self.events = open_event_log(run_dir, "driver", world=world)

    def start(self) -> RunHandle:
        """Take a lineage, join a cluster or start one here, and create the actors, which then make
        the run. Blocking; call it on the running event loop."""
        actors, lineage = self.world.actors, self._begin_lineage()
        connect_cluster(self.world, self.config)
        places = self._reserve_placements()
        # For checkpoints, with which a resumed run's settings are compared.
        as_set = config_to_dict(self.config)
        config = with_transport_host(self.config, places.layout)
        count = config.generator.count
        plain = config_to_dict(config)
        resume = self.resume
        # Only generators, which serve and play, need them.
        with_secrets = config_to_dict(config, reveal=True)
        directory = str(self.run_dir.absolute())
        model = str(self.model_path)
        # With several ranks, the learner actor only receives and packs; its ranks compute in
        # processes of their own.
        learner = actors.spawn_actor(
            self.learner_class,
            RunSetup(self.run_id, as_set, directory, lineage),
            model,
            places.ranks,
            str(resume.path.absolute()) if resume else "",
            config.transport.host,
            name="learner",
            actor_options=places.learner,
        )
        parts = [self.make_environment] if self.make_environment else []
        engine_model = write_engine_model(self.world, self.model_path, self.run_dir)

        def spawn(name: str, place: ActorOptions) -> ActorRef:
            return actors.spawn_actor(
                self.generator_class,
                RunSetup(self.run_id, with_secrets, directory, lineage),
                name,
                self._offer_model(engine_model)
                if len(actors.list_nodes()) > 1
                else str(engine_model),
                *parts,
                name=name,
                actor_options=place,
            )

        home = places.layout.rank_hosts()
        crew = FleetScaler(
            self.world, config, self.run_dir, self.events, spawn, places.engines, home
        )
        conductor = actors.spawn_actor(
            self.conductor_class,
            RunSetup(self.run_id, plain, directory, lineage),
            learner,
            crew.generators,
            resume.state if resume else None,
            name="conductor",
            # On the driver's node, because both write the run's records.
            actor_options=ActorOptions(0, max_concurrency=max(1000, 4 * count), same_node=True),
        )
        return RunHandle(self, conductor, learner, crew, places.reservation)

    def _offer_model(self, path: Path) -> RemoteModelFiles:
        """Return the files of the model, for hosts that may not have it. They
        are published once."""
        if self._offered_model is None:
            self._offered_model = publish_model_files(self.world, path)
        return self._offered_model

    def _reserve_placements(self) -> RunPlacements:
        places = reserve_placements(self.world, self.config)
        hosts = (
            places.layout.rank_hosts(),
            [places.layout.host_of(seat) for seat in places.layout.engines],
        )
        self.events.info("placed", ranks=hosts[0], engines=hosts[1], gpus=places.layout.gpu_count)
        return places

    def _begin_lineage(self) -> Lineage:
        """Begin this start's lineage. It is on the disk before any actor exists, so that a start
        after a crash of this one has another lineage."""
        resume = self.resume
        run_dir = self.run_dir
        files = self.world.files
        origin = (
            describe_origin(
                resume, CheckpointDirectory.from_config(self.config, run_dir, files=files).directory
            )
            if resume
            else ""
        )
        lineage = begin_lineage(
            run_dir, resume, fingerprint_model(self.model_path, files=files), origin, files=files
        )
        facts = {
            "parent": lineage.parent,
            "version": lineage.version,
            "step": resume.state.steps if resume else 0,
        }
        self.events.info("lineage_began", lineage=lineage.number, **facts, origin=origin)
        return lineage


class RunHandle:
    """A handle on the actors of a start whose conductor runs. The driver polls `poll_status`,
    `check_conductor` and `wait_finished`, requests an orderly end with `request_stop`, and always
    calls `end_actors`."""

    def __init__(
        self,
        pipeline: RunLauncher,
        conductor: ActorRef,
        learner: ActorRef,
        scaler: FleetScaler,
        reservation: Reservation,
    ):
        self._reservation = reservation
        self._scaler = scaler
        self.config = pipeline.config
        self.run_dir = pipeline.run_dir
        self._world = pipeline.world
        self._events = pipeline.events
        self._conductor = conductor
        self._actors = [conductor, learner]
        self._scaling_task = asyncio.ensure_future(scaler.run(conductor))
        self._run_call = asyncio.ensure_future(conductor.call("run"))
        self._status_call = PolledCall(partial(conductor.call, "get_status"))
        self._open_calls: list[asyncio.Future[Any]] = [self._run_call]
        self._last_look_at = 0.0
        self._processes: dict[str, tuple[int, str]] = {}
        """Process id and host by role."""
        supervise = self.config.supervise
        # The conductor is created, and imports what it needs, before it answers for the first time.
        first = max(supervise.stall_seconds, supervise.limits.start)
        clock = self._world.clock.monotonic
        self._watchdog = Watchdog(clock, supervise.stall_seconds, {FIRST_ANSWER: first})

    async def poll_status(
        self, since: int = 0, timeout: float = STATUS_TIMEOUT_SECONDS
    ) -> dict[str, Any] | None:
        """Return the conductor's status with the rows of steps after `since`; None if it did not
        answer within `timeout` seconds.

        If an earlier poll was not answered yet, its answer is returned, with the rows after
        that poll's `since`.
        """
        status = await self._status_call.poll_answer(timeout, since)
        self._observe_conductor()
        if status is not None:
            self._processes |= status["processes"]
        return status

    def _observe_conductor(self) -> None:
        now = self._world.clock.monotonic()
        before = self._last_look_at
        answers = self._status_call.answer_count
        self._last_look_at = now
        if answers:
            self._watchdog.forget_stage(FIRST_ANSWER)
        stage = CONDUCTOR_ANSWERING if answers else FIRST_ANSWER
        if now - before > PAUSED_AFTER_SECONDS:  # this very process was paused
            self._watchdog.forget_stage(stage)
        self._watchdog.observe_stage(stage, answers, 1)

    async def check_conductor(self, print_line: Callable[[str], object]) -> None:
        """Check that the conductor answers. Call this after each `poll_status`.

        If it has not answered for `supervise.stall_seconds`, it is named, its stacks are written,
        and the action of `supervise.on_stall` follows: its process is ended, and `ProcessLost` or
        `RunFailed` is raised.
        """
        for stall in self._watchdog.take_new_stalls():
            action = self.config.supervise.on_stall
            limit = f"limit {stall.limit:g} s, supervise.stall_seconds"
            failure = f"the conductor has not answered for {stall.seconds:.0f} s ({limit})"
            print_line(
                f"{failure}; what it was doing is in {self.run_dir}/logs/conductor.log, "
                "unless it was paused"
            )
            asked = self._world.processes.request_stack_dump(
                *self._processes.get("conductor", (0, ""))
            )
            self._events.error(
                "stalled",
                stage=CONDUCTOR_ANSWERING,
                seconds=round(stall.seconds, 1),
                limit=stall.limit,
                action=action,
                asked=asked,
            )
            if action == "warn":
                continue
            if asked:
                await asyncio.sleep(STACK_DUMP_SECONDS)
            if action == "abort":
                raise RunFailed(f"{failure}; its process is ended")
            raise ProcessLost(f"{failure}; its process is ended")

    def restore_directory(self, identity: RunIdentity, print_line: Callable[[str], object]) -> bool:
        """Make the run's directory anew if it was deleted, and say so. Returns True if it was; the
        run should then stop, while the learner still has its state."""
        try:
            if not identity.restore_if_deleted():
                return False
            failure = ""
        except OSError as error:
            failure = str(error)
        lost = "its records and checkpoints so far are lost" + (
            f", and it cannot be made anew: {failure}" if failure else ""
        )
        print_line(f"{self.run_dir} was deleted or moved while the run uses it: {lost}")
        self._events.error("run_directory_deleted", directory=str(self.run_dir), error=failure)
        return True

    async def wait_finished(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for the end of the run. Returns True if it has ended."""
        await asyncio.wait([self._run_call], timeout=timeout)
        return self._run_call.done()

    def get_result(self) -> dict[str, Any]:
        """Return the result of `Conductor.run` once the run has ended. Raises `RunFailed` with the
        reason, and `ProcessLost` if the run may resume from its newest checkpoint."""
        try:
            return self._run_call.result()
        except RunFailed as error:
            raise error from None
        except ActorLostError as error:
            raise ProcessLost(f"the conductor process was lost: {error}") from None

    def request_stop(self) -> None:
        """Request an orderly end: the running step is finished, a checkpoint is written and
        the model is saved."""
        self._open_calls.append(asyncio.ensure_future(self._conductor.call("request_stop")))

    async def end_actors(self) -> None:
        """End the actors' processes and release their places."""
        self._scaling_task.cancel()
        for actor in (*self._actors, *self._scaler.generators.values()):
            self._world.actors.kill_actor(actor)
        await self._wait_for_exit()
        for pid, host in self._processes.values():
            # A process that was paused gets no request.
            self._world.processes.kill_process(pid, host)
        self._scaler.release_placements()
        self._world.actors.release_bundles(self._reservation)
        for call in self._open_calls:
            call.cancel()
        await asyncio.gather(
            *self._open_calls,
            self._scaling_task,
            self._status_call.cancel(),
            return_exceptions=True,
        )

    async def _wait_for_exit(self) -> None:
        """Wait until the processes on this host have ended, `EXIT_SECONDS` at most. If a process is
        killed before Ray has ended it, Ray reports on the console that it died."""
        for _ in range(int(EXIT_SECONDS / EXIT_POLL_SECONDS)):
            if not any(
                self._world.processes.is_alive(*process) for process in self._processes.values()
            ):
                return
            await asyncio.sleep(EXIT_POLL_SECONDS)


class DriverUI(Protocol):
    """The interface between the driver and the user who started the run."""

    @property
    def stop_requested(self) -> bool:
        """True if the user wants the run to end in order."""
        ...

    @property
    def shown_step(self) -> int:
        """The step of the newest row that was shown."""
        ...

    def print_line(self, line: str) -> None: ...

    def show_phase(self, text: str) -> None:
        """Show what the driver does now."""
        ...

    @property
    def report_event(self) -> EventReporter:
        """The function that reports what is found among the checkpoints."""
        ...

    def begin_loading(self) -> None:
        """Note that the driver does not look at `stop_requested` from now on."""
        ...

    def confirm_started(self) -> None:
        """Note that the actors exist: the driver looks at `stop_requested` often from
        now on. May raise."""
        ...

    def show_status(self, status: dict[str, Any]) -> None:
        """Show the conductor's status; see `Conductor.get_status`."""
        ...

    def rewind_to_step(self, step: int) -> None:
        """Go back to `step`, after which the run restarts."""
        ...


async def supervise_run(
    world: World,
    config: Config,
    model_path: Path,
    run: RunDirectory,
    ui: DriverUI,
    make_launcher: Callable[..., RunLauncher] = RunLauncher,
) -> None:
    """Make the run, and restart it from its newest checkpoint if a process that it cannot do
    without is lost.

    `make_launcher` may return a launcher of other actors than usual. Raises `RunFailed` with what
    to do about it, or one of its subclasses `NotTrained` (no step made an update) and
    `StoppedBeforeStep`; and what `restart_run` raises.
    """
    allowed = config.supervise.max_run_restarts
    restarts = 0
    # A new command sets the number of generators itself.
    world.files.remove(run.path / SCALE_REQUEST_FILE)
    while True:
        wanted = with_requested_scale(config, run.path, files=world.files)
        try:
            return await _run_start(
                make_launcher(world, wanted, model_path, run.path, run.resume_from), ui
            )
        except ProcessLost as error:
            if ui.stop_requested or restarts == allowed:
                raise
            restarts += 1
            ui.print_line(
                f"{error}; the run restarts ({restarts} of {allowed}, supervise.max_run_restarts)"
            )
            ui.begin_loading()
            run = await restart_run(config, run, ui.print_line, ui.report_event, world=world)
            step = run.resume_from.state.steps if run.resume_from else 0
            ui.print_line(f"resumes from step {step}")
            ui.rewind_to_step(step)


async def _run_start(launcher: RunLauncher, ui: DriverUI) -> None:
    ui.show_phase("starting Ray and the actors")
    try:
        running = launcher.start()
        try:
            ui.confirm_started()
            await _follow_run(launcher.world, running, ui)
        finally:
            await running.end_actors()
    finally:
        launcher.world.actors.leave_cluster()


async def _follow_run(world: World, running: RunHandle, ui: DriverUI) -> None:
    limit = 4 * running.config.supervise.stop_grace_seconds
    asked_at = 0.0
    identity = RunIdentity(running.run_dir, files=world.files)
    is_deleted = False
    while not await running.wait_finished(RUN_POLL_SECONDS):
        await _show_status(running, ui, STATUS_TIMEOUT_SECONDS)
        await running.check_conductor(ui.print_line)
        is_deleted = is_deleted or running.restore_directory(identity, ui.print_line)
        now = world.clock.monotonic()
        if (ui.stop_requested or is_deleted) and not asked_at:
            asked_at = now
            ui.print_line(
                "stopping: the running step is finished and a checkpoint written (again "
                "to stop at once)"
            )
            running.request_stop()
        if asked_at and now - asked_at > limit:
            raise RunFailed(
                f"the actors did not end within {limit:g} s (4 x supervise.stop_grace_seconds) and "
                f"are ended now; the same command with name={running.run_dir.name} resumes from "
                "the newest checkpoint"
            )
    await _show_status(running, ui, LAST_STATUS_SECONDS)
    _report_result(running.get_result(), running, ui)


async def _show_status(running: RunHandle, ui: DriverUI, timeout: float) -> None:
    status = await running.poll_status(ui.shown_step, timeout)
    if status is not None:
        ui.show_status(status)


def _report_result(result: Mapping[str, Any], running: RunHandle, ui: DriverUI) -> None:
    """Print how the run ended. Raises `NotTrained` and `StoppedBeforeStep`."""
    steps = result["steps"]
    name = running.run_dir.name
    if result["model"]:
        ui.print_line(f"trained model: {running.run_dir / 'model'}")
    if result["stopped"] and steps:
        done = f"{steps} of {running.config.steps} steps" + (
            " without an update" if result.get("updates") == 0 else ""
        )
        ui.print_line(f"stopped after {done}; to resume: the same command with name={name}")
    elif result["stopped"]:
        raise StoppedBeforeStep(
            f"stopped before a step was made; to resume: the same command with name={name}"
        )
    elif steps and not result["updates"]:
        raise NotTrained(
            f"none of {steps} steps made an update ({result['without_update']}); the weights are "
            "those that the run began with, so no model is saved"
        )


# A learner outside of a run.


def load_standalone_learner(
    config: Config, model_path: Path, run_dir: Path, world: World
) -> LocalRank | RemoteRanks:
    """Load a learner for training without engines. If it has several ranks, they run on a Ray
    cluster that is joined or started."""
    if config.learner.parallel.world_size == 1:
        return load_learner(config, model_path, run_dir, world=world)
    connect_cluster(world, config)
    return load_learner(
        config,
        model_path,
        run_dir,
        reserve_placements(world, config, with_engines=False).ranks,
        world,
    )
