"""The driver of a run: it opens the run's directory, starts the actors, follows them, and restarts and stops them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from r3async.checkpoint import (
    Checkpoint,
    CheckpointDirectory,
    CheckpointError,
    check_resume_settings,
    check_start_model,
    find_checkpoint,
    open_checkpoint,
    rewind_records,
)
from r3async.checkpoint.resume import fingerprint_model
from r3async.checkpoint.run_lock import RunLock
from r3async.checkpoint.run_starts import (
    RunIdentity,
    begin_lineage,
    describe_origin,
    mark_run_directory,
    read_run_starts,
)
from r3async.checkpoint.state import RECORD_FILES
from r3async.config import Config, ConfigError, EnvConfig, config_from_dict, config_to_dict, config_to_toml
from r3async.data.versions import Lineage
from r3async.envs import EnvironmentFactory
from r3async.record.events import EVENTS_FILE, open_event_log
from r3async.record.reading import QUARANTINE_FILE, read_json_objects
from r3async.schedule.watchdog import Watchdog
from r3async.untrusted import MalformedError, decode_json, decode_toml
from r3async.views.summary import NOT_TRAINED, UNFINISHED, get_status_change
from r3async.weights.probe import FAILED_MODEL_DIRECTORY
from r3async.world import (
    ActorLostError,
    ActorOptions,
    ActorRef,
    EventReporter,
    Files,
    InsufficientResourcesError,
    Reservation,
    World,
    ignore_event,
)
from r3async.world.files import fsync_with_parents, make_directory, read_file, replace_file
from r3async.world.real import REAL_WORLD

from .conductor import Conductor
from .generator import GeneratorActor, GeneratorFactories
from .learner import LearnerActor
from .placement import (
    RemoteModelFiles,
    ResourceDemand,
    RunPlacements,
    plan_engine,
    publish_model_files,
    reserve_placements,
    with_transport_host,
)
from .process import NotTrained, PolledCall, ProcessLost, RunFailed, StoppedBeforeStep
from .ranks import LocalRank, RemoteRanks, load_learner

# The driver of a run starts the actors, follows them, and starts them again from the newest checkpoint if one is lost.


STATUS_TIMEOUT_SECONDS = 2.0
"""Seconds to wait for the conductor's status, each time that the driver polls it."""
STACK_DUMP_SECONDS = 2.0
"""Seconds that a process which does not answer gets to write its stacks before it is ended."""
PAUSED_AFTER_SECONDS = 30.0
"""Seconds between two polls after which the driver takes itself for paused, and does not blame the conductor for the
gap."""
CONDUCTOR_ANSWERING = "answering/conductor"
FIRST_ANSWER = f"{CONDUCTOR_ANSWERING} at first"
RUN_POLL_SECONDS = 1.0
LAST_STATUS_SECONDS = 10.0
"""Seconds to wait for the conductor's status when the run has ended and the driver polls it for the last time."""
EXIT_SECONDS = 2.0
"""Seconds that actors may take to end before they are killed."""
EXIT_POLL_SECONDS = 0.02


def connect_cluster(world: World, config: Config) -> None:
    """Join the configured Ray cluster, or start one on this host. Blocking; does nothing if the process has joined
    already. Raises `ConfigError` for a cluster that cannot be reached, and `RunFailed` if none can be started."""
    count, ranks = config.generator.count, config.learner.parallel.world_size
    try:
        world.actors.join_cluster(config.cluster.address or None, count + 2 + (ranks if ranks > 1 else 0))
    except ConnectionError as error:
        raise (ConfigError if config.cluster.address else RunFailed)(str(error)) from error


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
            make_environment: Makes the generators' environments, if they are not made from the configuration alone
                (`envs/factory.py`).
        """
        self.make_environment = make_environment
        self.world, self.config, self.model_path, self.run_dir, self.resume = world, config, model_path, run_dir, resume
        self._offered_model: RemoteModelFiles | None = None
        self.run_id = f"{run_dir.name}-{world.unique_id()[:8]}"
        self.events = open_event_log(run_dir, "driver", world=world)

    def start(self) -> RunHandle:
        """Take a lineage, join a cluster or start one here, and create the actors, which then make the run. Blocking;
        call it on the running event loop."""
        actors, lineage = self.world.actors, self._begin_lineage()
        connect_cluster(self.world, self.config)
        places = self._reserve_placements()
        as_set = config_to_dict(self.config)  # for checkpoints, with which a resumed run's settings are compared
        config = with_transport_host(self.config, places.layout)
        count = config.generator.count
        plain, resume = config_to_dict(config), self.resume
        with_secrets = config_to_dict(config, reveal=True)  # only generators, which serve and play, need them
        directory, model = str(self.run_dir.absolute()), str(self.model_path)
        # With several ranks, the learner actor only receives and packs; its ranks compute in processes of their own.
        learner = actors.spawn_actor(
            self.learner_class,
            self.run_id,
            as_set,
            model,
            directory,
            places.ranks,
            str(resume.path.absolute()) if resume else "",
            lineage,
            config.transport.host,
            name="learner",
            actor_options=places.learner,
        )
        parts = [GeneratorFactories(make_environment=self.make_environment)] if self.make_environment else []

        def spawn(name: str, place: ActorOptions) -> ActorRef:
            return actors.spawn_actor(
                self.generator_class,
                name,
                self.run_id,
                with_secrets,
                self._offer_model() if len(actors.list_nodes()) > 1 else model,
                directory,
                lineage.number,
                *parts,
                name=name,
                actor_options=place,
            )

        home = places.layout.rank_hosts()
        crew = FleetScaler(self.world, config, self.run_dir, self.events, spawn, places.engines, home)
        conductor = actors.spawn_actor(
            self.conductor_class,
            self.run_id,
            plain,
            directory,
            learner,
            crew.generators,
            resume.state if resume else None,
            lineage,
            name="conductor",
            # On the driver's node, because both write the run's records.
            actor_options=ActorOptions(0, max_concurrency=max(1000, 4 * count), same_node=True),
        )
        return RunHandle(self, conductor, learner, crew, places.reservation)

    def _offer_model(self) -> RemoteModelFiles:
        """Return the files of the model, for hosts that may not have it. They are published once."""
        if self._offered_model is None:
            self._offered_model = publish_model_files(self.world, self.model_path)
        return self._offered_model

    def _reserve_placements(self) -> RunPlacements:
        places = reserve_placements(self.world, self.config)
        hosts = places.layout.rank_hosts(), [places.layout.host_of(seat) for seat in places.layout.engines]
        self.events.info("placed", ranks=hosts[0], engines=hosts[1], gpus=places.layout.gpu_count)
        return places

    def _begin_lineage(self) -> Lineage:
        """Begin this start's lineage. It is on the disk before any actor exists, so that a start after a crash of this
        one has another lineage."""
        resume, run_dir, files = self.resume, self.run_dir, self.world.files
        origin = (
            describe_origin(resume, CheckpointDirectory.from_config(self.config, run_dir, files=files).directory)
            if resume
            else ""
        )
        lineage = begin_lineage(run_dir, resume, fingerprint_model(self.model_path, files=files), origin, files=files)
        facts = {"parent": lineage.parent, "version": lineage.version, "step": resume.state.steps if resume else 0}
        self.events.info("lineage_began", lineage=lineage.number, **facts, origin=origin)
        return lineage


class RunHandle:
    """A handle on the actors of a start whose conductor runs. The driver polls `poll_status`, `check_conductor` and
    `wait_finished`, requests an orderly end with `request_stop`, and always calls `end_actors`."""

    def __init__(
        self,
        pipeline: RunLauncher,
        conductor: ActorRef,
        learner: ActorRef,
        scaler: FleetScaler,
        reservation: Reservation,
    ):
        self._reservation, self._scaler = reservation, scaler
        self.config, self.run_dir = pipeline.config, pipeline.run_dir
        self._world, self._events, self._conductor = pipeline.world, pipeline.events, conductor
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
        first = max(supervise.stall_seconds, self.config.learner.start_timeout)
        clock = self._world.clock.monotonic
        self._watchdog = Watchdog(clock, supervise.stall_seconds, {FIRST_ANSWER: first})

    async def poll_status(self, since: int = 0, timeout: float = STATUS_TIMEOUT_SECONDS) -> dict[str, Any] | None:
        """Return the conductor's status with the rows of steps after `since`; None if it did not answer within
        `timeout` seconds.

        If an earlier poll was not answered yet, its answer is returned, with the rows after that poll's `since`.
        """
        status = await self._status_call.poll_answer(timeout, since)
        self._observe_conductor()
        if status is not None:
            self._processes |= status["processes"]
        return status

    def _observe_conductor(self) -> None:
        now, before, answers = self._world.clock.monotonic(), self._last_look_at, self._status_call.answer_count
        self._last_look_at = now
        if answers:
            self._watchdog.forget_stage(FIRST_ANSWER)
        stage = CONDUCTOR_ANSWERING if answers else FIRST_ANSWER
        if now - before > PAUSED_AFTER_SECONDS:  # this very process was paused
            self._watchdog.forget_stage(stage)
        self._watchdog.observe_stage(stage, answers, 1)

    async def check_conductor(self, print_line: Callable[[str], object]) -> None:
        """Check that the conductor answers. Call this after each `poll_status`.

        If it has not answered for `supervise.stall_seconds`, it is named, its stacks are written, and the action of
        `supervise.on_stall` follows: its process is ended, and `ProcessLost` or `RunFailed` is raised.
        """
        for stall in self._watchdog.take_new_stalls():
            action = self.config.supervise.on_stall
            limit = f"limit {stall.limit:g} s, supervise.stall_seconds"
            failure = f"the conductor has not answered for {stall.seconds:.0f} s ({limit})"
            print_line(f"{failure}; what it was doing is in {self.run_dir}/logs/conductor.log, unless it was paused")
            asked = self._world.processes.request_stack_dump(*self._processes.get("conductor", (0, "")))
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
            raise (RunFailed if action == "abort" else ProcessLost)(f"{failure}; its process is ended")

    def restore_directory(self, identity: RunIdentity, print_line: Callable[[str], object]) -> bool:
        """Make the run's directory anew if it was deleted, and say so. Returns True if it was; the run should then stop,
        while the learner still has its state."""
        try:
            if not identity.restore_if_deleted():
                return False
            failure = ""
        except OSError as error:
            failure = str(error)
        lost = "its records and checkpoints so far are lost" + (
            f", and it cannot be made anew: {failure}" * bool(failure)
        )
        print_line(f"{self.run_dir} was deleted or moved while the run uses it: {lost}")
        self._events.error("run_directory_deleted", directory=str(self.run_dir), error=failure)
        return True

    async def wait_finished(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for the end of the run. Returns True if it has ended."""
        await asyncio.wait([self._run_call], timeout=timeout)
        return self._run_call.done()

    def get_result(self) -> dict[str, Any]:
        """Return the result of `Conductor.run` once the run has ended. Raises `RunFailed` with the reason, and
        `ProcessLost` if the run may resume from its newest checkpoint."""
        try:
            return self._run_call.result()
        except RunFailed as error:
            raise error from None
        except ActorLostError as error:
            raise ProcessLost(f"the conductor process was lost: {error}") from None

    def request_stop(self) -> None:
        """Request an orderly end: the running step is finished, a checkpoint is written and the model is saved."""
        self._open_calls.append(asyncio.ensure_future(self._conductor.call("request_stop")))

    async def end_actors(self) -> None:
        """End the actors' processes and release their places."""
        self._scaling_task.cancel()
        for actor in (*self._actors, *self._scaler.generators.values()):
            self._world.actors.kill_actor(actor)
        await self._wait_for_exit()
        for pid, host in self._processes.values():
            self._world.processes.kill_process(pid, host)  # a process that was paused gets no request
        self._scaler.release_placements()
        self._world.actors.release_bundles(self._reservation)
        for call in self._open_calls:
            call.cancel()
        await asyncio.gather(*self._open_calls, self._scaling_task, self._status_call.cancel(), return_exceptions=True)

    async def _wait_for_exit(self) -> None:
        """Wait until the processes on this host have ended, `EXIT_SECONDS` at most. If a process is killed before Ray
        has ended it, Ray reports on the console that it died."""
        for _ in range(int(EXIT_SECONDS / EXIT_POLL_SECONDS)):
            if not any(self._world.processes.is_alive(*process) for process in self._processes.values()):
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
        """Note that the actors exist: the driver looks at `stop_requested` often from now on. May raise."""
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
    """Make the run, and restart it from its newest checkpoint if a process that it cannot do without is lost.

    `make_launcher` may return a launcher of other actors than usual. Raises `RunFailed` with what to do about it, or one
    of its subclasses `NotTrained` (no step made an update) and `StoppedBeforeStep`; and what `restart_run` raises.
    """
    allowed = config.supervise.max_run_restarts
    restarts = 0
    world.files.remove(run.path / SCALE_REQUEST_FILE)  # a new command sets the number of generators itself
    while True:
        wanted = with_requested_scale(config, run.path, files=world.files)
        try:
            return await _run_start(make_launcher(world, wanted, model_path, run.path, run.resume_from), ui)
        except ProcessLost as error:
            if ui.stop_requested or restarts == allowed:
                raise
            restarts += 1
            ui.print_line(f"{error}; the run restarts ({restarts} of {allowed}, supervise.max_run_restarts)")
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
    limit, asked_at = 4 * running.config.supervise.stop_grace_seconds, 0.0
    identity, is_deleted = RunIdentity(running.run_dir, files=world.files), False
    while not await running.wait_finished(RUN_POLL_SECONDS):
        await _show_status(running, ui, STATUS_TIMEOUT_SECONDS)
        await running.check_conductor(ui.print_line)
        is_deleted = is_deleted or running.restore_directory(identity, ui.print_line)
        now = world.clock.monotonic()
        if (ui.stop_requested or is_deleted) and not asked_at:
            asked_at = now
            ui.print_line("stopping: the running step is finished and a checkpoint written (again to stop at once)")
            running.request_stop()
        if asked_at and now - asked_at > limit:
            raise RunFailed(
                f"the actors did not end within {limit:g} s (4 x supervise.stop_grace_seconds) and are ended now; "
                f"the same command with name={running.run_dir.name} resumes from the newest checkpoint"
            )
    await _show_status(running, ui, LAST_STATUS_SECONDS)
    _report_result(running.get_result(), running, ui)


async def _show_status(running: RunHandle, ui: DriverUI, timeout: float) -> None:
    status = await running.poll_status(ui.shown_step, timeout)
    if status is not None:
        ui.show_status(status)


def _report_result(result: Mapping[str, Any], running: RunHandle, ui: DriverUI) -> None:
    """Print how the run ended. Raises `NotTrained` and `StoppedBeforeStep`."""
    steps, name = result["steps"], running.run_dir.name
    if result["model"]:
        ui.print_line(f"trained model: {running.run_dir / 'model'}")
    if result["stopped"] and steps:
        done = f"{steps} of {running.config.steps} steps" + (" without an update" if result.get("updates") == 0 else "")
        ui.print_line(f"stopped after {done}; to resume: the same command with name={name}")
    elif result["stopped"]:
        raise StoppedBeforeStep(f"stopped before a step was made; to resume: the same command with name={name}")
    elif steps and not result["updates"]:
        raise NotTrained(
            f"none of {steps} steps made an update ({result['without_update']}); the weights are those that the run began "
            "with, so no model is saved"
        )


# A run's directory, which is new or has checkpoints to resume from. One driver uses it at a time.


LOCK_WAIT_SECONDS = 60.0
"""Seconds that processes of an earlier start of the run may take to end."""
_COPY_BLOCK_BYTES = 2**20


@dataclass(frozen=True)
class RunDirectory:
    """The opened directory of a run.

    Attributes:
        path: The directory, with the resolved configuration in it.
        resume_from: Checkpoint that the run resumes from, if it does.
        lock: Lock on the directory, which this process holds.
    """

    path: Path
    resume_from: Checkpoint | None
    lock: RunLock
    began_without_checkpoint: bool = False
    """True if the run began before and made no checkpoint: then the start model that it made is in the directory."""

    def find_start_model(self, config: Config, *, files: Files = REAL_WORLD.files) -> Path | None:
        """Return the path of the start model: the configured one, or the one that the run began with; None if there is
        none.

        Raises `CheckpointError` if it is not the model that it was then.
        """
        if config.model.path:
            path = Path(config.model.path).absolute()
        elif self.resume_from is None:
            made = self.path / "init"
            return made.absolute() if self.began_without_checkpoint and files.stat(made / "config.json") else None
        else:
            path = Path(self.resume_from.state.model_path)
            inside = self.path / path.name  # the run may have been moved
            path = path if files.stat(path) or not files.stat(inside) else inside.absolute()
        if self.resume_from is not None:
            check_start_model(self.resume_from.state, path, files=files)
        return path


async def open_run_directory(
    config: Config,
    directory: Path,
    print_line: Callable[[str], object],
    report_event: EventReporter = ignore_event,
    *,
    world: World = REAL_WORLD,
) -> RunDirectory:
    """Open `directory`, which is new, or as its newest intact checkpoint left it. `report_event` gets what is found among the
    checkpoints.

    `resume = auto` resumes in a directory with checkpoints, and starts again in the directory of a run that made none
    yet. `none` moves an existing directory aside. The path of a checkpoint, or of another run, begins a new run there
    with the records of the old one. Raises `ConfigError` and `CheckpointError`, whose messages name what to do; then
    nothing has changed, except that checkpoints which cannot be read are renamed to say so.
    """
    files = world.files
    if _has_content(directory, files):
        if config.resume == "none":
            aside = await _move_aside(directory, print_line, world)
            print_line(f"{directory} is kept as {aside}")
        elif (
            CheckpointDirectory.from_config(config, directory, report_event=report_event, files=files).is_empty
            and read_run_starts(directory, files=files) is None
        ):
            raise _make_foreign_directory_error(directory)
    make_directory(directory, files=files)
    fsync_with_parents(directory, files=files)  # `checkpoints` in it, too
    lock = await _acquire_lock(directory, print_line, world)
    try:
        mark_run_directory(
            directory, files=files
        )  # first of all: whatever ends this process from now on, the directory is known as that of a run
        make_directory(directory / "logs", files=files)
        resume = _open_resume_checkpoint(config, directory, print_line, report_event, files)
        began = resume is None and _restart_without_checkpoint(config, directory, print_line, world)
        replace_file(directory / "config.toml", config_to_toml(config).encode(), files=files)
        _share_lock(lock, directory)
    except BaseException:
        lock.close()
        raise
    return RunDirectory(directory, resume, lock, began)


def check_run_directory(config: Config, directory: Path, *, files: Files = REAL_WORLD.files) -> None:
    """Raise `ConfigError` or `CheckpointError` where `open_run_directory` would refuse the settings. Changes nothing.

    Only the newest checkpoint is looked at, and its tensors are not verified.
    """
    if config.resume != "auto" or not _has_content(directory, files):
        return
    checkpoints = CheckpointDirectory.from_config(config, directory, files=files)
    steps = checkpoints.list_steps()
    if not steps and read_run_starts(directory, files=files) is None:
        raise _make_foreign_directory_error(directory)
    if not steps:
        saved = decode_toml(read_file(directory / "config.toml", files=files))
        check_resume_settings(config_to_dict(config_from_dict(saved)), config)
        return
    try:
        newest = open_checkpoint(checkpoints.step_path(steps[-1]), check_tensors=False, files=files)
    except CheckpointError:
        return  # the start reports it, and takes the one before
    _check_resumable(newest, config, directory)


def _make_foreign_directory_error(directory: Path) -> ConfigError:
    return ConfigError(
        f"`name` = {directory.name!r}: {directory} exists already and has no checkpoint to resume from; choose another "
        'name, or set resume="none", which keeps it under another one'
    )


def _has_content(directory: Path, files: Files) -> bool:
    """Return True if the directory has content. A lock, and a file that was being written when its process was killed,
    do not count."""
    return any(not name.startswith(".") for name in files.list_names(directory))


def _restart_without_checkpoint(config: Config, directory: Path, say: Callable[[str], object], world: World) -> bool:
    """Return True if a run began here and made no checkpoint; then its records are cut back to nothing. Raises
    `CheckpointError` if it had other settings than it needs now."""
    before = directory / "config.toml"
    if world.files.stat(before) is None:
        return False
    saved = decode_toml(read_file(before, files=world.files))
    for key, (was, now) in check_resume_settings(config_to_dict(config_from_dict(saved)), config).items():
        say(f"changed since the run began: {key} was {was!r}, is {now!r}")
    say(f"{directory} has no checkpoint yet: the run starts again, with what its spool has kept")
    events = open_event_log(directory, "driver", world=world)
    events.warning("begun_without_checkpoint", directory=str(directory))
    _rewind_records(directory, None, world.files)
    return True


def _check_origin(opened: Checkpoint | None, checkpoints: CheckpointDirectory, directory: Path, files: Files) -> None:
    """Raise `ConfigError` if a run without checkpoints of its own would resume from elsewhere than where it began: the
    numbers of lineages belong to one line of descent."""
    starts = read_run_starts(directory, files=files) or []
    origin = describe_origin(opened, checkpoints.directory) if opened else ""
    if checkpoints.is_empty and starts and starts[-1].origin != origin:
        where = starts[-1].origin or "its start model"
        raise ConfigError(
            f"{directory} holds a run that began from {where} and has no checkpoint of its own yet: set `resume` to that again, "
            'choose another `name`, or set resume="none"'
        )


async def _acquire_lock(directory: Path, say: Callable[[str], object], world: World) -> RunLock:
    lock = RunLock(directory, files=world.files)
    waiting = lambda: say(f"waiting for processes of {directory} to end")  # noqa: E731
    if not await lock.acquire_exclusive(LOCK_WAIT_SECONDS, waiting, clock=world.clock.monotonic):
        lock.close()
        raise _in_use_error(directory)
    return lock


def _share_lock(lock: RunLock, directory: Path) -> None:
    try:
        lock.acquire_shared()
    except BlockingIOError as error:  # another driver was waiting for it, too
        raise _in_use_error(directory) from error


def _in_use_error(directory: Path) -> ConfigError:
    return ConfigError(
        f"{directory} is in use by another process, which writes to it: wait for it, or choose another name"
    )


async def restart_run(
    config: Config,
    run: RunDirectory,
    print_line: Callable[[str], object],
    report_event: EventReporter = ignore_event,
    *,
    world: World = REAL_WORLD,
) -> RunDirectory:
    """Prepare the restart of a run after one of its processes was lost: from the newest checkpoint, or from the
    beginning if there is none."""
    waiting = lambda: print_line("waiting for the other processes to end")  # noqa: E731
    if not await run.lock.acquire_exclusive(LOCK_WAIT_SECONDS, waiting, clock=world.clock.monotonic):
        raise ConfigError(f"processes that write to {run.path} did not end within {LOCK_WAIT_SECONDS:.0f} s")
    checkpoints = CheckpointDirectory.from_config(config, run.path, report_event=report_event, files=world.files)
    checkpoints.recover_directory()
    resume = checkpoints.recover_newest() or run.resume_from
    checkpoints.remove_later_evaluations(resume)
    _rewind_records(run.path, resume, world.files)
    _share_lock(run.lock, run.path)
    return RunDirectory(run.path, resume, run.lock, began_without_checkpoint=resume is None)


def _open_resume_checkpoint(
    config: Config, directory: Path, say: Callable[[str], object], report_event: EventReporter, files: Files
) -> Checkpoint | None:
    """Return the checkpoint that `resume` means; None to begin. The records are rewound to it, and what came later is
    set aside."""
    checkpoints = CheckpointDirectory.from_config(config, directory, report_event=report_event, files=files)
    if config.resume == "none":
        checkpoints.recover_directory()
        checkpoints.supersede_later(-1)
        return None
    if config.resume == "auto":
        _check_origin(None, checkpoints, directory, files)
        checkpoints.recover_directory()
        opened = checkpoints.recover_newest()
    else:
        opened = _open_named_checkpoint(config, checkpoints, directory, files)
        checkpoints.recover_directory()
        checkpoints.supersede_later(opened.state.steps)
    checkpoints.remove_later_evaluations(opened)
    if opened is None:
        return None
    say(f"resumes from step {opened.state.steps} ({opened.path})")
    for key, (was, now) in _check_resumable(opened, config, directory).items():
        say(f"changed since the checkpoint: {key} was {was!r}, is {now!r}")
    if opened.path.parent.absolute() != checkpoints.directory.absolute():  # of another run
        source = opened.path.parent.parent
        for name in (*RECORD_FILES, QUARANTINE_FILE):
            if files.stat(source / name) is not None:
                _copy_file(source / name, directory / name, files)
    _rewind_records(directory, opened, files)
    return opened


def _open_named_checkpoint(
    config: Config, checkpoints: CheckpointDirectory, directory: Path, files: Files
) -> Checkpoint:
    """Return the checkpoint at the path `resume`, or the newest one of the run there. Raises if this run cannot resume
    from it."""
    found = find_checkpoint(Path(config.resume), files=files)
    _check_resumable(found, config, directory)
    if not checkpoints.is_empty and found.path.parent.absolute() != checkpoints.directory.absolute():
        raise ConfigError(
            f"`resume` = {config.resume!r} is of another run than {directory}, which has checkpoints of its own: choose "
            "another `name`"
        )
    _check_origin(found, checkpoints, directory, files)
    return found


def _copy_file(path: Path, to: Path, files: Files) -> None:
    files.remove(to)
    with files.open(path) as source, files.open(to, exclusive=True) as copy:
        for at in range(0, source.size(), _COPY_BLOCK_BYTES):
            copy.append([source.read(at, _COPY_BLOCK_BYTES)])


def _rewind_records(directory: Path, resume: Checkpoint | None, files: Files) -> None:
    """Rewind the run's records to its checkpoint, or empty them if there is none, and remove the version with which a
    probe failed."""
    files.remove_tree(directory / FAILED_MODEL_DIRECTORY)
    lengths, kept = (resume.state.record_bytes, resume.state.record_kept) if resume else ({}, {})
    rewind_records(directory, dict.fromkeys(RECORD_FILES, 0) | lengths, kept, files=files)


def _ended_early(opened: Checkpoint, config: Config, directory: Path) -> bool:
    """Return True if the checkpoint belongs to the run in `directory`, and that run was stopped or lost, or failed,
    after its last step."""
    ours = CheckpointDirectory.from_config(config, directory).directory
    if opened.path.parent.absolute() != ours.absolute():
        return False
    events = read_json_objects(directory / EVENTS_FILE, files=opened.files)
    status, _ = next((end for event in reversed(events) if (end := get_status_change(event))), (UNFINISHED, ""))
    return status not in ("finished", NOT_TRAINED)


def _check_resumable(opened: Checkpoint, config: Config, directory: Path) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, with old and new values. Raises if the run cannot resume with them, or is over.
    A run that made all its steps, and was stopped or lost while it evaluated or saved, is not over."""
    changed = check_resume_settings(opened.state.config, config)
    if opened.state.steps > config.steps or (
        opened.state.steps == config.steps and not _ended_early(opened, config, directory)
    ):
        raise ConfigError(
            f"the run has made {opened.state.steps} of {config.steps} steps: set `steps` to more, or choose another name"
        )
    return changed


async def _move_aside(directory: Path, say: Callable[[str], object], world: World) -> Path:
    number = 1
    while world.files.stat(aside := directory.with_name(f"{directory.name}.superseded-{number}")) is not None:
        number += 1
    lock = await _acquire_lock(directory, say, world)  # do not move a run that still writes there
    try:
        world.files.rename(directory, aside)
        world.files.fsync_directory(directory.parent)
    finally:
        lock.close()
    return aside


# The number of generators, which the driver keeps as a file of the run's directory says (`r3async scale`).
#
# The driver starts and ends generators, because what it started ends with it. Places for more generators are reserved
# one by one, as hosts have them free. Generators that were added last leave first.


SCALE_REQUEST_FILE = "scale.json"
"""Name of the file in the run's directory with the last scale request. It counts for as long as the run's command
runs."""
SCALE_POLL_SECONDS = 1.0
"""Seconds between two looks at the scale request and at the free places."""
PLACEMENT_WAIT_SECONDS = 0.01
"""Seconds to wait for a place. A place that is not free at once is requested again with the next look."""


class ScaleRequest(msgspec.Struct, frozen=True):
    """A request for a number of generators. `asked` tells one request from another."""

    generators: int
    asked: str

    def __post_init__(self) -> None:
        if self.generators < 1:
            raise ValueError("a run has one generator or more")


def read_scale_request(run_dir: Path, *, files: Files = REAL_WORLD.files) -> ScaleRequest | None:
    """Read the scale request of a run. Returns None if there is none, or it cannot be read."""
    try:
        return decode_json(read_file(run_dir / SCALE_REQUEST_FILE, files=files), ScaleRequest)
    except (OSError, MalformedError):
        return None


def write_scale_request(run_dir: Path, request: ScaleRequest, *, files: Files = REAL_WORLD.files) -> None:
    """Write the scale request of a run. Raises `OSError`."""
    replace_file(run_dir / SCALE_REQUEST_FILE, msgspec.json.encode(request), files=files)


def with_requested_scale(config: Config, run_dir: Path, *, files: Files = REAL_WORLD.files) -> Config:
    """Return the configuration with as many generators as were requested while the run's command runs."""
    wish = read_scale_request(run_dir, files=files)
    if wish is None:
        return config
    return msgspec.structs.replace(config, generator=msgspec.structs.replace(config.generator, count=wish.generators))


class FleetScaler:
    """The generators of a start of the run, as the driver starts and ends them.

    Args:
        events: A structlog logger.
        spawn: `spawn(name, placement)` starts one generator.
        placements: Reserved placements of the first generators.
        home_hosts: Hosts of the learner, by `ClusterNode.node_id`, which further engines prefer.
    """

    def __init__(
        self,
        world: World,
        config: Config,
        run_dir: Path,
        events: Any,
        spawn: Callable[[str, ActorOptions], ActorRef],
        placements: list[ActorOptions],
        home_hosts: list[str],
    ):
        self._world, self._config, self._run_dir, self._events = world, config, run_dir, events
        self._spawn, self._home_hosts = spawn, home_hosts
        self.generators: dict[str, ActorRef] = {}
        self._placements: dict[str, ActorOptions] = {}
        self._next_number = 0
        self._handled_request = read_scale_request(run_dir, files=world.files)
        """Scale request that was fulfilled or refused last: there are as many places as it says."""
        self._wait_reason = ""
        """Reason why the newest request waits, as last reported; empty if none waits."""
        for place in placements:
            self._spawn_generator(place)

    def _spawn_generator(self, place: ActorOptions) -> str:
        name = f"generator-{self._next_number}"
        self._next_number += 1  # a name is never used again: leases and records contain it
        self.generators[name], self._placements[name] = self._spawn(name, place), place
        return name

    def _end_generator(self, name: str) -> None:
        self._world.actors.kill_actor(self.generators.pop(name))
        if (within := self._placements.pop(name).reserved_bundle) is not None:
            self._world.actors.release_bundles(*within)

    def release_placements(self) -> None:
        """Release the places of all generators. Call this when their processes have ended."""
        for place in self._placements.values():
            if place.reserved_bundle is not None:
                self._world.actors.release_bundles(*place.reserved_bundle)

    async def run(self, conductor: ActorRef) -> None:
        """Fulfil scale requests until cancelled, or until the conductor is lost."""
        while True:
            wish = read_scale_request(self._run_dir, files=self._world.files)
            if wish is not None and wish != self._handled_request:
                try:
                    await self._apply_request(conductor, wish)
                except ActorLostError:
                    return  # its run ends, or restarts with as many generators as were requested
            await asyncio.sleep(SCALE_POLL_SECONDS)

    async def _apply_request(self, conductor: ActorRef, wish: ScaleRequest) -> None:
        for name in await conductor.call("list_excluded"):
            if name in self.generators:  # its place is free for another
                self._end_generator(name)
        before, wanted = len(self.generators), wish.generators
        if self._wait_reason == "":
            self._events.info("scaling", generators=wanted, of=before, asked=wish.asked)
        if wanted < before:
            await asyncio.gather(*(self._remove_generator(conductor, name) for name in list(self.generators)[wanted:]))
        refused = ""
        if wanted > before:
            names, waits = await self._spawn_more(wanted - before)
            refused = "; ".join(
                filter(None, await asyncio.gather(*(self._add_generator(conductor, name) for name in names)))
            )
            if waits and not refused:
                if waits != self._wait_reason:
                    self._wait_reason = waits
                    self._events.warning("scale_waits", generators=len(self.generators), asked=wish.asked, reason=waits)
                return
        self._handled_request, self._wait_reason = wish, ""
        facts = {"generators": len(self.generators), "of": before, "asked": wish.asked}
        if refused:
            self._events.error("scale_refused", **facts, reason=refused)
        else:
            self._events.info("scaled", **facts)

    async def _spawn_more(self, count: int) -> tuple[list[str], str]:
        """Start up to `count` generators, as many as there are places for. Returns their names, and why there are not
        more."""
        names = list[str]()
        for _ in range(count):
            try:
                place = await self._world.threads.run(self._reserve_placement)
            except InsufficientResourcesError as error:
                return names, str(error)
            names.append(self._spawn_generator(place))
        return names, ""

    def _reserve_placement(self) -> ActorOptions:
        """Reserve a place for one more generator. Blocking. Raises `InsufficientResourcesError`."""
        demand, made = ResourceDemand.from_config(self._config), []

        def plan(nodes: Any) -> Any:
            made.append(plan_engine(demand, nodes, self._home_hosts))
            return made[-1:]

        reservation: Reservation = self._world.actors.reserve_bundles(plan, PLACEMENT_WAIT_SECONDS)
        generator = self._config.generator
        place = ActorOptions(generator.threads, max_restarts=generator.max_restarts, gpus=made[-1].gpus)
        return replace(place, reserved_bundle=(reservation, 0))

    async def _add_generator(self, conductor: ActorRef, name: str) -> str:
        reason = await conductor.call("add_generator", name, self.generators[name])
        if reason:
            self._end_generator(name)
        return f"{name}: {reason}" if reason else ""

    async def _remove_generator(self, conductor: ActorRef, name: str) -> None:
        await conductor.call("remove_generator", name)
        self._end_generator(name)


# A learner outside of a run.


def load_standalone_learner(config: Config, model_path: Path, run_dir: Path, world: World) -> LocalRank | RemoteRanks:
    """Load a learner for training without engines. If it has several ranks, they run on a Ray cluster that is joined or
    started."""
    if config.learner.parallel.world_size == 1:
        return load_learner(config, model_path, run_dir, world=world)
    connect_cluster(world, config)
    return load_learner(config, model_path, run_dir, reserve_placements(world, config, with_engines=False).ranks, world)
