"""A simulation that observes everything that an invariant needs at the interface of the `World`.

It observes calls between actors and their answers, frames on the wire, operations on files, and what the learner's
thread is given to train. The production code is not aware of it.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from dev.simulation.actors import DEFAULT_OPTIONS, SimulatedActor, SimulatedActorRef, SimulatedActors
from dev.simulation.disk import SimulatedDisk
from dev.simulation.history import (
    Acknowledged,
    Arrived,
    Asked,
    Began,
    Delivered,
    Evaluated,
    Evaluating,
    Event,
    Fetched,
    GaveUp,
    Installed,
    Installing,
    Leased,
    Limited,
    Looked,
    Lost,
    NotEvaluated,
    Placed,
    Plays,
    PowerFailed,
    Published,
    Refused,
    Removed,
    Saved,
    Sent,
    Slots,
    Stored,
    Taken,
    Trained,
    Unlinked,
)
from dev.simulation.invariants import Checker, Violated
from dev.simulation.processes import HostProcess, SimulatedThreads
from dev.simulation.trajectory_facts import facts_of
from dev.simulation.world import SimulatedHost, SimulatedWorld, Simulation
from r3async.actors.conductor import Conductor
from r3async.actors.generator import GeneratorActor
from r3async.actors.learner import LearnerActor
from r3async.actors.leasing import LeaseAnswer, LeaseCall
from r3async.checkpoint import RunState
from r3async.checkpoint.directory import EvaluationFile, evaluation_path
from r3async.data.models import RoutingShape
from r3async.data.versions import Lineage
from r3async.data.wire import (
    Ack,
    ControlMessage,
    Deliver,
    Hello,
    Reject,
    Welcome,
    WireError,
    decode_control,
    decode_trajectory,
    decoded_bytes,
    join_item_frames,
)
from r3async.learner.trainer import PreparedStep, StepOutcome, Trainer
from r3async.rollout.chat import ChatRenderer
from r3async.rollout.scripted import DIGEST_TENSOR, read_weights_key
from r3async.transport.receiver import NO_GROUP_LIMIT
from r3async.untrusted import MalformedError, decode_json, decode_msgpack
from r3async.weights import fetch as relay
from r3async.weights.manifest import WeightError
from r3async.world import ActorOptions, File, Files, WorkerThread
from r3async.world.disk import FileStat
from r3async.world.files import read_file

P = ParamSpec("P")
R = TypeVar("R")


class Watched(Simulation):
    """A simulation that judges the events it observes. At the first event that violates an invariant, it sets
    `violation` and stops the loop."""

    def __init__(
        self,
        seed: int,
        checker: Checker,
        *,
        routing: RoutingShape | None,
        memory_bytes_per_second: float = math.inf,
        **options: Any,
    ):
        super().__init__(seed, **options)
        self.checker, self.routing = checker, routing
        self.history: list[Event] = []
        self.violation: Violated | None = None
        self.listeners: list[Callable[[Event], object]] = []
        """Callbacks for each event, after it was judged."""
        self.delay_training: Callable[[HostProcess], float] = lambda process: 0.0
        """Function that returns how many seconds a training step takes."""
        first = next(iter(self.hosts.values()))
        self._memory_speed = memory_bytes_per_second
        self.memory = {name: self._new_memory(name) for name in self.hosts}
        """The in-memory file system of each host, which contains weights. That of the learner's host is fast."""
        self._sessions: dict[bytes, str] = {}
        """Current session of each sender, by identity, as reported to the learner."""
        self._avoided: dict[bytes, tuple[str, ...]] = {}
        """Addresses that failed a host, by the identity with which it asked for a place in the relay tree."""
        for host in self.hosts.values():  # a run's directory is shared by all hosts
            host.disk = first.disk

    def see(self, kind: type[Event], *args: Any) -> None:
        """Record and judge an event that happened now. `args` are its fields after the time."""
        if self.violation is not None:
            return
        event = kind(round(self.loop.now, 6), *args)
        self.history.append(event)
        try:
            self.checker.see(event)
        except Violated as violation:
            self.violation = violation
            self.loop.stop()
            return
        for listener in self.listeners:
            listener(event)

    # -- processes and hosts -------------------------------------------------------------------------------------------

    def begin_process(self, name: str, host: SimulatedHost, actor: Any = None) -> HostProcess:
        process = super().begin_process(name, host, actor)
        process.world = WatchedWorld(process)
        return process

    def place_actor(self, actor: SimulatedActor) -> SimulatedHost | None:
        """Place generators on the hosts after the first, in turn, and all other actors on the first host, which the
        configuration names. Returns None if the host is lost."""
        hosts = list(self.hosts.values())
        name, _, number = actor.name.partition("-")
        if name == "generator" and len(hosts) > 1:
            hosts = hosts[1 + int(number) % (len(hosts) - 1) :]
        return None if hosts[0].is_lost else hosts[0]

    def end_process(self, process: HostProcess, reason: str) -> None:
        if not process.ended:
            self.see(Lost, process.name)
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
        self.see(PowerFailed, host.name)

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

    # -- the wire ------------------------------------------------------------------------------------------------------

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
            self.see(Looked, route.source)
        elif isinstance(message, relay.Place) and event == "sent":
            self.see(Placed, route.target, message.parent, self._avoided.get(route.identity, ()))

    def _see_arrived(self, route: Any, message: ControlMessage) -> None:
        """Record a message of a sender that arrived at the learner."""
        if isinstance(message, Hello):
            self._sessions[route.identity] = message.session
        elif isinstance(message, Deliver):
            current = self._sessions.get(route.identity) == message.session
            self.see(Delivered, route.source, tuple(item.trajectory_id for item in message.items), current)

    def _see_control(self, route: Any, message: ControlMessage, frames: Sequence[Any]) -> None:
        """Record a message that was sent between a sender and the learner."""
        try:
            if isinstance(message, Ack):
                self.see(Acknowledged, route.target, tuple(message.ids))
            elif isinstance(message, Reject) and message.again == "never":
                self.see(Refused, route.target, message.trajectory_id, message.reason)
            elif isinstance(message, Welcome) and message.until < NO_GROUP_LIMIT:
                self.see(Limited, route.target, message.until)
            elif isinstance(message, Deliver):
                for item, pieces in zip(message.items, message.split_by_item(frames[1:]), strict=True):
                    self._see_sent(route.source, join_item_frames(item, pieces))
        except WireError:
            return  # malformed; the receiver reports it

    def _see_sent(self, generator: str, frames: Sequence[Any]) -> None:
        trajectory = decode_trajectory(frames)
        nbytes = decoded_bytes(frames, trajectory)
        self.see(Sent, generator, facts_of(trajectory, self.checker.known.published, self.routing, nbytes))

    # -- steps ---------------------------------------------------------------------------------------------------------

    def see_trained(self, lineage: int, step: int, version: int, done: StepOutcome) -> None:
        """Record what the learner's thread has trained."""
        keys = self.checker.known.published
        groups = tuple(tuple(facts_of(t, keys, self.routing) for t in group) for group in done.groups)
        updates = int(done.metrics.get("optimizer/updates", 0))
        self.see(Trained, lineage, step, version, groups, updates)


class WatchedWorld(SimulatedWorld):
    """The world of one process, with observed threads, actors and files."""

    def __init__(self, process: HostProcess):
        super().__init__(process)
        self.threads = WatchedThreads(process)
        self.actors = WatchedActors(process)

    @cached_property
    def files(self) -> Files:
        simulation, host = _watched(self.process), self.process.host
        memory = simulation.memory[host.name].files_for(self.process)
        return WatchedFiles(host.disk.files_for(self.process), memory, self.process, simulation)


def _watched(process: HostProcess) -> Watched:
    assert isinstance(process.simulation, Watched)
    return process.simulation


# -- threads -----------------------------------------------------------------------------------------------------------


class WatchedThreads(SimulatedThreads):
    """Threads in which a training step takes its time. The tokenizer is read once for all simulations."""

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        if function == ChatRenderer.from_model:
            return await super().run(_renderer, function, *args)
        return await super().run(function, *args, **kwargs)

    def new_worker(self, name: str) -> WorkerThread:  # type: ignore[override]
        return WatchedWorkerThread(super().new_worker(name), self._process)


_RENDERERS: dict[str, Any] = {}


def _renderer(function: Callable[..., Any], *args: Any) -> Any:
    key = repr(args)
    if key not in _RENDERERS:
        _RENDERERS[key] = function(*args)
    return _RENDERERS[key]


class WatchedWorkerThread:
    """An implementation of `world.WorkerThread` that observes training steps."""

    def __init__(self, lane: WorkerThread, process: HostProcess):
        self._lane, self._process = lane, process

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        if getattr(function, "__func__", None) is not Trainer.train_step:
            return await self._lane.run(function, *args, **kwargs)
        simulation = _watched(self._process)
        lineage = self._process.actor.instance.lineage.number if self._process.actor is not None else 0
        number, version, _ = cast("tuple[int, int, PreparedStep]", args)
        await asyncio.sleep(simulation.delay_training(self._process))
        done = await self._lane.run(function, *args, **kwargs)
        simulation.see_trained(lineage, number, version, cast(StepOutcome, done))
        return done

    async def close(self) -> None:
        await self._lane.close()


# -- actors ------------------------------------------------------------------------------------------------------------


class WatchedActors(SimulatedActors):
    """Actors whose calls and answers are observed: their classes are replaced by observing subclasses."""

    def spawn_actor(
        self, actor_class: type, *args: Any, name: str, actor_options: ActorOptions = DEFAULT_OPTIONS
    ) -> SimulatedActorRef:
        simulation = _watched(self._process)
        if issubclass(actor_class, Conductor):
            simulation.see(Began, *_began(args))
        return super().spawn_actor(_telling(actor_class), *args, name=name, actor_options=actor_options)


def _began(args: Sequence[Any]) -> tuple[Any, ...]:
    """Return the fields of `Began` from a conductor's arguments: lineage and checkpoint of this start."""
    lineage = next(arg for arg in args if isinstance(arg, Lineage))
    state = next((arg for arg in args if isinstance(arg, RunState)), None)
    if state is None:
        return lineage.number, 0, 0, 0, 0, ()
    beyond = tuple(sorted(state.consumed_beyond))
    return lineage.number, lineage.parent, lineage.version, state.steps, state.consumed, beyond


@lru_cache
def _telling(kind: type) -> type:
    for base, made in _TELLING.items():
        if issubclass(kind, base):
            return made(kind)
    return kind


def _conductor(kind: type) -> type:
    class TellingConductor(kind):
        slots_told = (0, 0)

        async def lease_groups(self, message: bytes) -> bytes:
            answer = await super().lease_groups(message)
            call, said = decode_msgpack(message, LeaseCall), decode_msgpack(answer, LeaseAnswer)
            generator_id, leases = call.generator_id, said.leases
            told = tuple((lease.group_index, lease.episode_indices) for lease in leases)
            simulation = _watched(self.world.process)
            asked = simulation.find_process(generator_id)
            ended = asked is None or asked.pid != self.fleet[generator_id].pid
            versions, free = tuple(lease.version for lease in leases), call.free if said.more else 0
            simulation.see(Leased, generator_id, told, ended, versions, free)
            return answer

        def get_status(self, since: int) -> dict[str, Any]:
            answer = super().get_status(since)
            if (slots := (answer["slots_taken"], answer["slots"])) != self.slots_told:
                self.slots_told = slots
                _watched(self.world.process).see(Slots, *slots)
            return answer

    return TellingConductor


def _learner(kind: type) -> type:
    class TellingLearner(kind):
        def missing_episodes(self, group_indices: list[int]) -> dict[int, list[int]]:
            answer = super().missing_episodes(group_indices)
            _watched(self.world.process).see(Asked, {group: list(lacking) for group, lacking in answer.items()})
            return answer

        async def _train_groups(self, number: int, indices: list[int], *args: Any) -> Any:
            # The groups were taken now. The step begins when they are prepared: an older group may be complete by then.
            version = self.model.counts.version
            _watched(self.world.process).see(Taken, self.lineage.number, number, version, tuple(indices))
            return await super()._train_groups(number, indices, *args)

        async def write_version(self, *args: Any) -> Any:  # `publish` calls it, too
            published = await super().write_version(*args)
            manifest = published.publication.manifest
            weights = manifest.tensors[DIGEST_TENSOR].checksum
            _watched(self.world.process).see(Published, manifest.lineage, manifest.version, weights)
            return published

    return TellingLearner


def _generator(kind: type) -> type:
    class TellingGenerator(kind):
        async def install_version(self, publication: Any) -> Any:
            simulation, who, manifest = _watched(self.world.process), self.generator_id, publication.manifest
            simulation.see(Installing, who, manifest.lineage, manifest.version)
            try:
                report = await super().install_version(publication)
            except Exception:
                simulation.see(GaveUp, who)
                raise
            weights = weights_in(Path(self._installed_manifest.path), self.world.files)
            simulation.see(Installed, who, manifest.lineage, report.version, weights)
            return report

        async def connect_to_learner(self, *args: Any) -> None:
            await super().connect_to_learner(*args)
            weights = self._connection.weight_receiver
            fetch = weights.fetch_version

            async def told(*args: Any) -> Any:
                manifest = await fetch(*args)
                name = self.world.files.shared_name(Path(manifest.path))
                _watched(self.world.process).see(Fetched, self.generator_id, name)
                return manifest

            weights.fetch_version = told

        async def stop(self) -> None:
            _watched(self.world.process).see(GaveUp, self.generator_id)
            await super().stop()

        async def evaluate(self) -> Any:
            try:
                return await super().evaluate()
            except Exception:
                _watched(self.world.process).see(NotEvaluated, self.generator_id)
                raise

        async def run(self, conductor: Any) -> None:
            _watched(self.world.process).see(Plays, self.generator_id)
            await super().run(conductor)

    return TellingGenerator


_TELLING: dict[type, Callable[[type], type]] = {
    Conductor: _conductor,
    LearnerActor: _learner,
    GeneratorActor: _generator,
}


# Observation of files: what is stored, deleted and fetched, which checkpoint is safe, and what was evaluated.


MEMORY = Path("/memory")
"""Directory of each host's in-memory file system."""
_SPOOL = re.compile(r"(\d{9})-\d+\.spool")
_STEP = re.compile(r"step-(\d{8,})")
_FETCHED = re.compile(r"version-(\d+)-[0-9a-f]{8,}\.safetensors")
"""Pattern of the files to which hosts fetch versions; the learner's own files have other names."""


def weights_in(path: Path, files: Files) -> int:
    """Return the key that identifies the weights in a file; 0 if it contains none."""
    try:
        return read_weights_key(path, files)
    except WeightError:
        return 0


class WatchedFiles:
    """An implementation of `world.Files` over two file systems of a process: a disk and one in memory. It records
    changes of the spool, safe checkpoints, evaluations, and fetched weights."""

    def __init__(self, files: Files, memory: Files, process: HostProcess, simulation: Watched):
        self._disk, self._memory, self._process, self._simulation = files, memory, process, simulation

    def _of(self, path: Path) -> Files:
        return self._memory if path.is_relative_to(MEMORY) else self._disk

    def shared_name(self, path: Path) -> str:
        """Return the name of a fetched version's file, unique among all hosts; empty for any other file."""
        return f"{self._process.host.name}: {path.name}" if _FETCHED.fullmatch(path.name) else ""

    def open(self, path: Path, *, create: bool = False, exclusive: bool = False, mode: int = 0o644) -> File:
        file = self._of(path).open(path, create=create, exclusive=exclusive, mode=mode)
        spooled = _spooled(path) if create or exclusive else None
        return WatchedFile(file, self._simulation, int(spooled[1]), path.name) if spooled else file

    def stat(self, path: Path) -> FileStat | None:
        return self._of(path).stat(path)

    def list_names(self, directory: Path) -> list[str]:
        return self._of(directory).list_names(directory)

    def create_directory(self, directory: Path, mode: int = 0o777) -> None:
        self._of(directory).create_directory(directory, mode)

    def make_private_directory(self, directory: Path) -> None:
        self._of(directory).make_private_directory(directory)

    def rename(self, path: Path, new_path: Path) -> None:
        self._of(path).rename(path, new_path)
        if fetched := _FETCHED.fullmatch(new_path.name):
            self._simulation.see(Arrived, self._process.name, int(fetched[1]), weights_in(new_path, self._memory))
        elif new_path.parent.name == "checkpoints" and new_path.suffix == ".json":
            self._see_evaluation(new_path)

    def _see_evaluation(self, path: Path) -> None:
        one = decode_json(read_file(path, files=self._disk), EvaluationFile)
        if path != evaluation_path(path.parent, one.step):
            return
        if not one.is_finished:
            self._simulation.see(Evaluating, one.step)
            return
        tasks, figures = tuple(sorted(map(int, one.result["rewards"]))), one.figures
        self._simulation.see(Evaluated, one.step, tasks, figures["version_min"], figures["version_max"])

    def remove(self, path: Path) -> None:
        spooled = _spooled(path)
        fetched = _FETCHED.fullmatch(path.name)
        there = (spooled or fetched) and self._of(path).stat(path)
        self._of(path).remove(path)
        if spooled and there:
            self._simulation.see(Unlinked, int(spooled[1]), path.name)
        elif there:
            self._simulation.see(Removed, self._process.name, self.shared_name(path))

    def remove_tree(self, path: Path) -> None:
        self._of(path).remove_tree(path)

    def free_bytes(self, path: Path) -> int:
        return self._of(path).free_bytes(path)

    def total_bytes(self, path: Path) -> int:
        return self._of(path).total_bytes(path)

    def fsync_directory(self, directory: Path) -> None:
        self._of(directory).fsync_directory(directory)
        if directory.name == "checkpoints":
            steps = [int(found[1]) for name in self._disk.list_names(directory) if (found := _STEP.fullmatch(name))]
            if steps and max(steps) > self._simulation.checker.known.safe:
                self._simulation.see(Saved, max(steps))


def _spooled(path: Path) -> re.Match[str] | None:
    return _SPOOL.fullmatch(path.name) if path.parent.name == "spool" else None


class WatchedFile:
    """A file of the spool whose appends are recorded."""

    def __init__(self, file: File, simulation: Watched, group: int, name: str):
        self._file, self._simulation, self._group, self._name = file, simulation, group, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def append(self, buffers: Sequence[Any]) -> int:
        written = self._file.append(buffers)
        self._simulation.see(Stored, self._group, self._name, self._file.size())
        return written

    def __enter__(self) -> WatchedFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()
