"""A simulation that observes everything that an invariant needs at the interface of the `World`.

It observes calls between actors and their answers, frames on the wire, operations on files, and
what the learner's thread is given to train. The production code is not aware of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from dev.simulation.actors import (
    DEFAULT_OPTIONS,
    SimulatedActor,
    SimulatedActorRef,
    SimulatedActors,
)
from dev.simulation.disk import SimulatedDisk
from dev.simulation.history import (
    CheckpointSaved,
    EvaluationBegan,
    EvaluationEnded,
    EvaluationGivenUp,
    EvaluationRemoved,
    GaveUp,
    GeneratorStopped,
    GroupsLeased,
    GroupsLimited,
    InstallRequested,
    LineageBegan,
    MissingReported,
    ParentAssigned,
    ParentRequested,
    PlayRequested,
    PowerFailed,
    ProcessEnded,
    PublishedRemoved,
    RunEvent,
    SlotsReported,
    SpoolFileGrew,
    SpoolFileRemoved,
    StepBegan,
    StepTrained,
    TrajectoriesAcknowledged,
    TrajectoriesDelivered,
    TrajectoryQuarantined,
    TrajectoryRefused,
    TrajectorySent,
    VersionArrived,
    VersionFetched,
    VersionRemoved,
    WeightsInstalled,
    WeightsPublished,
)
from dev.simulation.invariants import InvariantChecker, InvariantViolated
from dev.simulation.processes import HostProcess, SimulatedThreads
from dev.simulation.trajectory_facts import facts_of
from dev.simulation.world import SimulatedHost, SimulatedWorld, Simulation
from r3async.actors.conductor import Conductor
from r3async.actors.generator import GeneratorActor
from r3async.actors.learner import LearnerActor
from r3async.actors.leasing import LeaseAnswer, LeaseCall
from r3async.actors.run_setup import RunSetup
from r3async.checkpoint import RunState
from r3async.checkpoint.evaluations import EvaluationFile, evaluation_path
from r3async.data.control_messages import (
    Ack,
    ControlMessage,
    Deliver,
    Hello,
    Reject,
    Welcome,
    decode_control,
    join_item_frames,
)
from r3async.data.model_shape import RoutingShape
from r3async.data.wire import decode_trajectory, decoded_bytes
from r3async.data.wire_frames import WireError
from r3async.learner.prepare import PreparedStep
from r3async.learner.trainer import StepOutcome, Trainer
from r3async.rollout.engine import EngineLostError
from r3async.rollout.renderer import ChatRenderer
from r3async.rollout.scripted import DIGEST_TENSOR, read_weights_key
from r3async.transport.memory_budget import NO_GROUP_LIMIT
from r3async.untrusted import MalformedError, decode_json, decode_msgpack
from r3async.weights import relay
from r3async.weights.manifest import WeightError
from r3async.world import ActorOptions, File, Files, FileStat, WorkerThread
from r3async.world.files import read_file

P = ParamSpec("P")
R = TypeVar("R")


class WatchedSimulation(Simulation):
    """A simulation that judges the events it observes. At the first event that violates an
    invariant, it sets `violation` and stops the loop."""

    def __init__(
        self,
        seed: int,
        checker: InvariantChecker,
        *,
        routing: RoutingShape | None,
        memory_bytes_per_second: float = math.inf,
        **options: Any,
    ):
        super().__init__(seed, **options)
        self.checker = checker
        self.routing = routing
        self.history: list[RunEvent] = []
        self.violation: InvariantViolated | None = None
        self.listeners: list[Callable[[RunEvent], object]] = []
        """Callbacks for each event, after it was judged."""
        self.delay_training: Callable[[HostProcess], float] = lambda process: 0.0
        """Function that returns how many seconds a training step takes."""
        first = next(iter(self.hosts.values()))
        self._memory_speed = memory_bytes_per_second
        self.memory = {name: self._new_memory(name) for name in self.hosts}
        """The in-memory file system of each host, which contains weights. That of the
        learner's host is fast."""
        self._sessions: dict[bytes, str] = {}
        """Current session of each sender, by identity, as reported to the learner."""
        self._avoided: dict[bytes, tuple[str, ...]] = {}
        """Addresses that failed a host, by the identity with which it asked for a place
        in the relay tree."""
        for host in self.hosts.values():  # a run's directory is shared by all hosts
            host.disk = first.disk

    def see_event(self, kind: type[RunEvent], *args: Any) -> None:
        """Record and judge an event that happened now. `args` are its fields after the time."""
        if self.violation is not None:
            return
        event = kind(round(self.loop.now, 6), *args)
        self.history.append(event)
        try:
            self.checker.check_event(event)
        except InvariantViolated as violation:
            self.violation = violation
            self.loop.stop()
            return
        for listener in self.listeners:
            listener(event)

    # -- processes and hosts -----------------------------------------------------------------------

    def begin_process(self, name: str, host: SimulatedHost, actor: Any = None) -> HostProcess:
        process = super().begin_process(name, host, actor)
        process.world = WatchedWorld(process)
        return process

    def place_actor(self, actor: SimulatedActor) -> SimulatedHost | None:
        """Place generators on the hosts after the first, in turn, and all other actors on the first
        host, which the configuration names. Returns None if the host is lost."""
        hosts = list(self.hosts.values())
        name, _, number = actor.name.partition("-")
        if name == "generator" and len(hosts) > 1:
            hosts = hosts[1 + int(number) % (len(hosts) - 1) :]
        return None if hosts[0].is_lost else hosts[0]

    def end_process(self, process: HostProcess, reason: str) -> None:
        if not process.ended:
            self.see_event(ProcessEnded, process.name)
        super().end_process(process, reason)

    def lose_host(self, host: SimulatedHost) -> None:
        """Lose a host. The first host has the disk, so losing it stops all hosts."""
        hosts = list(self.hosts.values())
        if host is not hosts[0]:
            self._stop_host(host)
            return
        for each in hosts:
            self._stop_host(each)
        host.disk.lose_power()
        self.see_event(PowerFailed, host.name)

    def _stop_host(self, host: SimulatedHost) -> None:
        if not host.is_lost:
            self.log.log_event(host.name, "host_lost")
            host.is_lost = True
            self.memory[host.name] = self._new_memory(host.name)
            self.network.silence_connections(host.name)
            for process in list(host.processes.values()):
                self.end_process(process, f"{host.name} was lost")

    def _new_memory(self, host: str) -> SimulatedDisk:
        memory = SimulatedDisk(self.rng_for(f"memory/{host}/{self.loop.now}"))
        if host != next(iter(self.hosts)):
            memory.bytes_per_second = self._memory_speed
        return memory

    # -- the wire ----------------------------------------------------------------------------------

    def _log_message(self, event: str, route: Any, frames: Sequence[Any]) -> None:
        super()._log_message(event, route, frames)
        if event == "lost" or not frames:
            return
        try:
            message = decode_control(frames[0])
        except WireError:  # not a message of senders
            self._see_relayed(event, route, frames[0])
            return
        if event == "sent":
            self._see_control(route, message, frames)
        elif route.to_router:
            self._see_arrived(route, message)

    def _see_relayed(self, event: str, route: Any, head: bytes) -> None:
        """Record a message between the learner and hosts about weights."""
        try:
            message = relay.decode_relay_message(head)
        except MalformedError:
            return  # not one of these messages, or damaged
        if isinstance(message, relay.Join) and event == "arrived":
            self._avoided[route.identity] = message.avoid
        elif isinstance(message, relay.Join):
            self.see_event(ParentRequested, route.source)
        elif isinstance(message, relay.Place) and event == "sent":
            self.see_event(
                ParentAssigned, route.target, message.parent, self._avoided.get(route.identity, ())
            )

    def _see_arrived(self, route: Any, message: ControlMessage) -> None:
        """Record a message of a sender that arrived at the learner."""
        if isinstance(message, Hello):
            self._sessions[route.identity] = message.session
        elif isinstance(message, Deliver):
            current = self._sessions.get(route.identity) == message.session
            self.see_event(
                TrajectoriesDelivered,
                route.source,
                tuple(item.trajectory_id for item in message.items),
                current,
            )

    def _see_control(self, route: Any, message: ControlMessage, frames: Sequence[Any]) -> None:
        """Record a message that was sent between a sender and the learner."""
        try:
            if isinstance(message, Ack):
                self.see_event(TrajectoriesAcknowledged, route.target, tuple(message.ids))
            elif isinstance(message, Reject) and message.again == "never":
                self.see_event(
                    TrajectoryRefused, route.target, message.trajectory_id, message.reason
                )
            elif isinstance(message, Welcome) and message.until < NO_GROUP_LIMIT:
                self.see_event(GroupsLimited, route.target, message.until)
            elif isinstance(message, Deliver):
                for item, pieces in zip(
                    message.items, message.split_by_item(frames[1:]), strict=True
                ):
                    self._see_sent(route.source, join_item_frames(item, pieces))
        except WireError:
            return  # malformed; the receiver reports it

    def _see_sent(self, generator: str, frames: Sequence[Any]) -> None:
        trajectory = decode_trajectory(frames)
        nbytes = decoded_bytes(frames, trajectory)
        self.see_event(
            TrajectorySent,
            generator,
            facts_of(trajectory, self.checker.state.published_keys, self.routing, nbytes),
        )

    # -- steps -------------------------------------------------------------------------------------

    def see_trained(self, lineage: int, step: int, version: int, done: StepOutcome) -> None:
        """Record what the learner's thread has trained."""
        keys = self.checker.state.published_keys
        groups = tuple(
            tuple(facts_of(t, keys, self.routing) for t in group) for group in done.groups
        )
        updates = int(done.metrics.get("optimizer/updates", 0))
        self.see_event(StepTrained, lineage, step, version, groups, updates)


class WatchedWorld(SimulatedWorld):
    """The world of one process, with observed threads, actors and files."""

    def __init__(self, process: HostProcess):
        super().__init__(process)
        self.threads = WatchedThreads(process)
        self.actors = WatchedActors(process)

    @cached_property
    def files(self) -> Files:
        simulation = _watched_simulation(self.process)
        host = self.process.host
        memory = simulation.memory[host.name].files_for(self.process)
        return WatchedFiles(host.disk.files_for(self.process), memory, self.process, simulation)


def _watched_simulation(process: HostProcess) -> WatchedSimulation:
    assert isinstance(process.simulation, WatchedSimulation)
    return process.simulation


# -- threads ---------------------------------------------------------------------------------------


class WatchedThreads(SimulatedThreads):
    """Threads in which a training step takes its time."""

    def new_worker(self, name: str) -> WorkerThread:  # type: ignore[override]
        return WatchedWorkerThread(super().new_worker(name), self._process)


class WatchedWorkerThread:
    """An implementation of `world.WorkerThread` that observes training steps."""

    def __init__(self, lane: WorkerThread, process: HostProcess):
        self._lane = lane
        self._process = process

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        if getattr(function, "__func__", None) is not Trainer.update_weights:
            return await self._lane.run(function, *args, **kwargs)
        simulation = _watched_simulation(self._process)
        lineage = (
            self._process.actor.instance.lineage.number if self._process.actor is not None else 0
        )
        number, version, _ = cast("tuple[int, int, PreparedStep]", args)
        await asyncio.sleep(simulation.delay_training(self._process))
        done = await self._lane.run(function, *args, **kwargs)
        simulation.see_trained(lineage, number, version, cast(StepOutcome, done))
        return done

    async def close(self) -> None:
        await self._lane.close()


# -- actors ----------------------------------------------------------------------------------------


class WatchedActors(SimulatedActors):
    """Actors whose calls and answers are observed: their classes are replaced by
    observing subclasses."""

    def spawn_actor(
        self,
        actor_class: type,
        *args: Any,
        name: str,
        actor_options: ActorOptions = DEFAULT_OPTIONS,
    ) -> SimulatedActorRef:
        simulation = _watched_simulation(self._process)
        if issubclass(actor_class, Conductor):
            simulation.see_event(LineageBegan, *_start_fields(args))
        return super().spawn_actor(
            _observing_class(actor_class), *args, name=name, actor_options=actor_options
        )


def _start_fields(args: Sequence[Any]) -> tuple[Any, ...]:
    """Return the fields of `LineageBegan` from a conductor's arguments: lineage and
    checkpoint of this start."""
    lineage = next(arg.lineage for arg in args if isinstance(arg, RunSetup))
    state = next((arg for arg in args if isinstance(arg, RunState)), None)
    if state is None:
        return lineage.number, 0, 0, 0, 0, ()
    beyond = tuple(sorted(state.consumed_beyond))
    return lineage.number, lineage.parent, lineage.version, state.steps, state.consumed, beyond


@lru_cache
def _observing_class(kind: type) -> type:
    for base, observe_class in _OBSERVING_CLASSES.items():
        if issubclass(kind, base):
            return observe_class(kind)
    return kind


def _observe_conductor(kind: type) -> type:
    class ObservingConductor(kind):
        reported_slots = (0, 0)

        async def lease_groups(self, message: bytes) -> bytes:
            answer = await super().lease_groups(message)
            call = decode_msgpack(message, LeaseCall)
            reply = decode_msgpack(answer, LeaseAnswer)
            generator_id = call.generator_id
            leases = reply.leases
            leased = tuple((lease.group_index, lease.episode_indices) for lease in leases)
            simulation = _watched_simulation(self.world.process)
            caller = simulation.find_process(generator_id)
            ended = caller is None or caller.pid != self.fleet[generator_id].pid
            versions = tuple(lease.version for lease in leases)
            free = call.free if reply.more else 0
            outdated = call.process != self.fleet[generator_id].process
            simulation.see_event(
                GroupsLeased, generator_id, leased, ended, versions, free, outdated
            )
            return answer

        def get_status(self, since: int) -> dict[str, Any]:
            answer = super().get_status(since)
            slots = (answer["slots_taken"], answer["slots"])
            if slots != self.reported_slots:
                self.reported_slots = slots
                _watched_simulation(self.world.process).see_event(SlotsReported, *slots)
            return answer

    return ObservingConductor


def _observe_learner(kind: type) -> type:
    class ObservingLearner(kind):
        def missing_episodes(self, group_indices: list[int]) -> dict[int, list[int]]:
            answer = super().missing_episodes(group_indices)
            _watched_simulation(self.world.process).see_event(
                MissingReported, {group: list(lacking) for group, lacking in answer.items()}
            )
            return answer

        async def _take_prepared(self, indices: list[int], taken: Any) -> Any:
            # The groups were taken now. The step begins when they are prepared: an older group may
            # be complete by then.
            counts = self.model.counts
            _watched_simulation(self.world.process).see_event(
                StepBegan, self.lineage.number, counts.steps + 1, counts.version, tuple(indices)
            )
            return await super()._take_prepared(indices, taken)

        # `publish` calls it, too.
        async def write_version(self, versions_in_use: Sequence[int] = ()) -> Any:
            published = await super().write_version(versions_in_use)
            manifest = published.publication.manifest
            process = self.world.process
            weights = manifest.tensors[DIGEST_TENSOR].checksum
            files = _count_versions(Path(manifest.path).parent, self.world.files, process)
            _watched_simulation(process).see_event(
                WeightsPublished,
                manifest.lineage,
                manifest.version,
                weights,
                files,
                len(versions_in_use),
            )
            return published

    return ObservingLearner


_RENDERERS: dict[tuple[str, str], ChatRenderer] = {}
"""Renderers by path and template arguments: a tokenizer is read once for all simulations."""


def _observe_generator(kind: type) -> type:
    class ObservingGenerator(kind):
        def make_renderer(self, model_path: str) -> ChatRenderer:
            key = model_path, repr(self.config.episode.template_args)
            if key not in _RENDERERS:
                _RENDERERS[key] = super().make_renderer(model_path)
            return _RENDERERS[key]

        async def install_version(self, publication: Any) -> Any:
            simulation = _watched_simulation(self.world.process)
            who = self.generator_id
            manifest = publication.manifest
            simulation.see_event(InstallRequested, who, manifest.lineage, manifest.version)
            try:
                report = await super().install_version(publication)
            except Exception as error:
                simulation.see_event(GaveUp, who, f"{type(error).__name__}: {error}")
                raise
            weights = weights_key_in(
                Path(self._installed_manifest.path), self.world.files, self.world.process
            )
            simulation.see_event(WeightsInstalled, who, manifest.lineage, report.version, weights)
            return report

        async def connect_to_learner(self, *args: Any) -> None:
            await super().connect_to_learner(*args)
            weights = self._connection.weight_receiver
            fetch = weights.fetch_version

            async def fetch_and_record(*args: Any) -> Any:
                manifest = await fetch(*args)
                name = self.world.files.shared_name(Path(manifest.path))
                _watched_simulation(self.world.process).see_event(
                    VersionFetched, self.generator_id, name
                )
                return manifest

            weights.fetch_version = fetch_and_record

        async def stop(self) -> None:
            _watched_simulation(self.world.process).see_event(GeneratorStopped, self.generator_id)
            await super().stop()

        async def evaluate(self) -> Any:
            try:
                return await super().evaluate()
            except EngineLostError:
                raise  # another one plays it
            except Exception:
                _watched_simulation(self.world.process).see_event(
                    EvaluationGivenUp, self.generator_id
                )
                raise

        async def run(self, conductor: Any) -> None:
            _watched_simulation(self.world.process).see_event(PlayRequested, self.generator_id)
            await super().run(conductor)

    return ObservingGenerator


_OBSERVING_CLASSES: dict[type, Callable[[type], type]] = {
    Conductor: _observe_conductor,
    LearnerActor: _observe_learner,
    GeneratorActor: _observe_generator,
}


# Observation of files: what is stored, deleted and fetched, which checkpoint is safe, and
# what was evaluated.


MEMORY_DIRECTORY = Path("/memory")
"""Directory of each host's in-memory file system."""
_SPOOL_FILE = re.compile(r"(\d{9})-\d+\.spool")
_STEP_DIRECTORY = re.compile(r"step-(\d{8,})")
_EVALUATION_FILE = re.compile(r"evaluation-(\d{8,})\.json")
_VERSION_FILE = re.compile(r"version-(\d+)-[0-9a-f]{8,}\.safetensors")
"""Pattern of the files to which hosts fetch versions; the learner's own files have other names."""
_PUBLISHED_FILE = re.compile(r"version-(\d+)\.safetensors")
"""Pattern of the learner's own files."""


@contextlib.contextmanager
def _beside_process(process: HostProcess) -> Iterator[None]:
    """Let the observer read beside the process, none of whose descriptors it needs."""
    out_of_descriptors = process.out_of_descriptors
    process.out_of_descriptors = False
    try:
        yield
    finally:
        process.out_of_descriptors = out_of_descriptors


def weights_key_in(path: Path, files: Files, process: HostProcess) -> int:
    """Return the key that identifies the weights in a file of `process`; 0 if it contains none."""
    with _beside_process(process):
        try:
            return read_weights_key(path, files)
        except WeightError:
            return 0


def _count_versions(folder: Path, files: Files, process: HostProcess) -> int:
    """Return the number of versions in a folder."""
    with _beside_process(process):
        names = files.list_names(folder)
    return sum(
        bool(_VERSION_FILE.fullmatch(name) or _PUBLISHED_FILE.fullmatch(name)) for name in names
    )


class WatchedFiles:
    """An implementation of `world.Files` over two file systems of a process: a disk and one in
    memory. It records changes of the spool, safe checkpoints, evaluations, and fetched weights."""

    def __init__(
        self, files: Files, memory: Files, process: HostProcess, simulation: WatchedSimulation
    ):
        self._disk = files
        self._memory = memory
        self._process = process
        self._simulation = simulation

    def _file_system(self, path: Path) -> Files:
        return self._memory if path.is_relative_to(MEMORY_DIRECTORY) else self._disk

    def shared_name(self, path: Path) -> str:
        """Return the name of a fetched version's file, unique among all hosts; empty
        for any other file."""
        return (
            f"{self._process.host.name}: {path.name}" if _VERSION_FILE.fullmatch(path.name) else ""
        )

    def open(
        self, path: Path, *, create: bool = False, exclusive: bool = False, mode: int = 0o644
    ) -> File:
        file = self._file_system(path).open(path, create=create, exclusive=exclusive, mode=mode)
        spooled = _match_spool_file(path) if create or exclusive else None
        if (create or exclusive) and path.parent.name == "quarantine":
            self._simulation.see_event(TrajectoryQuarantined, int(path.name.partition("-")[0]))
        return WatchedFile(file, self._simulation, int(spooled[1]), path.name) if spooled else file

    def stat(self, path: Path) -> FileStat | None:
        return self._file_system(path).stat(path)

    def list_names(self, directory: Path) -> list[str]:
        return self._file_system(directory).list_names(directory)

    def create_directory(self, directory: Path, mode: int = 0o777) -> None:
        self._file_system(directory).create_directory(directory, mode)

    def make_private_directory(self, directory: Path) -> None:
        self._file_system(directory).make_private_directory(directory)

    def rename(self, path: Path, new_path: Path) -> None:
        self._file_system(path).rename(path, new_path)
        fetched = _VERSION_FILE.fullmatch(new_path.name)
        if fetched:
            self._simulation.see_event(
                VersionArrived,
                self._process.name,
                int(fetched[1]),
                weights_key_in(new_path, self._memory, self._process),
                _count_versions(new_path.parent, self._memory, self._process),
            )
        elif new_path.parent.name == "checkpoints" and new_path.suffix == ".json":
            self._see_evaluation(new_path)

    def _see_evaluation(self, path: Path) -> None:
        evaluation = decode_json(read_file(path, files=self._disk), EvaluationFile)
        if path != evaluation_path(path.parent, evaluation.step):
            return
        if not evaluation.is_finished:
            self._simulation.see_event(EvaluationBegan, evaluation.step)
            return
        tasks = tuple(sorted(map(int, evaluation.result["rewards"])))
        figures = evaluation.figures
        self._simulation.see_event(
            EvaluationEnded, evaluation.step, tasks, figures["version_min"], figures["version_max"]
        )

    def remove(self, path: Path) -> None:
        spooled = _match_spool_file(path)
        fetched = _VERSION_FILE.fullmatch(path.name)
        published = _PUBLISHED_FILE.fullmatch(path.name)
        evaluated = _EVALUATION_FILE.fullmatch(path.name)
        was_there = (spooled or fetched or published or evaluated) and self._file_system(path).stat(
            path
        )
        self._file_system(path).remove(path)
        if not was_there:
            return
        if spooled:
            self._simulation.see_event(SpoolFileRemoved, int(spooled[1]), path.name)
        elif fetched:
            self._simulation.see_event(VersionRemoved, self._process.name, self.shared_name(path))
        elif published:
            self._simulation.see_event(PublishedRemoved, int(published[1]))
        elif evaluated:
            self._simulation.see_event(EvaluationRemoved, int(evaluated[1]))

    def remove_tree(self, path: Path) -> None:
        self._file_system(path).remove_tree(path)

    def free_bytes(self, path: Path) -> int:
        return self._file_system(path).free_bytes(path)

    def total_bytes(self, path: Path) -> int:
        return self._file_system(path).total_bytes(path)

    def fsync_directory(self, directory: Path) -> None:
        self._file_system(directory).fsync_directory(directory)
        if directory.name == "checkpoints":
            steps = [
                int(found[1])
                for name in self._disk.list_names(directory)
                if (found := _STEP_DIRECTORY.fullmatch(name))
            ]
            if steps and max(steps) > self._simulation.checker.state.safe_steps:
                self._simulation.see_event(CheckpointSaved, max(steps))


def _match_spool_file(path: Path) -> re.Match[str] | None:
    return _SPOOL_FILE.fullmatch(path.name) if path.parent.name == "spool" else None


class WatchedFile:
    """A file of the spool whose appends are recorded."""

    def __init__(self, file: File, simulation: WatchedSimulation, group: int, name: str):
        self._file = file
        self._simulation = simulation
        self._group = group
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def append(self, buffers: Sequence[Any]) -> int:
        written = self._file.append(buffers)
        self._simulation.see_event(SpoolFileGrew, self._group, self._name, self._file.size())
        return written

    def __enter__(self) -> WatchedFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()
