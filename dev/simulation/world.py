"""A simulation: hosts and processes with one loop, one seed and one log, and the world as each
process sees it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Coroutine, Sequence
from functools import cached_property
from random import Random
from typing import Any

from dev.simulation.actors import (
    SharedValue,
    SimulatedActor,
    SimulatedActors,
    SimulatedReservation,
    find_bundle_host,
    release_bundles,
)
from dev.simulation.disk import SimulatedDisk
from dev.simulation.loop import VirtualLoop
from dev.simulation.network import DelayRanges, MessagePath, SimulatedNetwork, draw_seconds
from dev.simulation.processes import HostProcess, SimulatedProcesses, SimulatedThreads
from r3async.world import Buffer, Files, Sockets
from r3async.world.appending import RecordFlusher

START_TIME = 1_700_000_000.0
"""Unix time in seconds at which a simulation begins."""


class SimulatedHost:
    """A simulated machine.

    Attributes:
        boot_seconds: Time of its monotonic clock when the simulation began.
        clock_offset: Seconds by which its wall clock is ahead.
    """

    def __init__(self, name: str, disk: SimulatedDisk, boot_seconds: float):
        self.name = name
        self.disk = disk
        self.boot_seconds = boot_seconds
        self.clock_offset = 0.0
        self.is_lost = False
        self.processes: dict[int, HostProcess] = {}
        """Processes that have not ended, by process id."""


class SimulatedClock:
    """An implementation of `world.Clock`."""

    def __init__(self, loop: VirtualLoop, host: SimulatedHost):
        self._loop = loop
        self._host = host

    def monotonic(self) -> float:
        return self._host.boot_seconds + self._loop.now

    def time(self) -> float:
        return START_TIME + self._loop.now + self._host.clock_offset


class SimulatedWorld:
    """An implementation of `World` for one process."""

    def __init__(self, process: HostProcess):
        self.process = process
        self.clock = SimulatedClock(process.simulation.loop, process.host)
        self.threads = SimulatedThreads(process)
        self.actors = SimulatedActors(process)
        self.processes = SimulatedProcesses(process)

    @cached_property
    def files(self) -> Files:
        return self.process.host.disk.files_for(self.process)

    @cached_property
    def record_flusher(self) -> RecordFlusher:
        return RecordFlusher(world=self)

    def open_sockets(self) -> Sockets:
        self.process.raise_if_ended()
        return self.process.simulation.network.sockets_for(self.process.host.name, self.process)

    def unique_id(self) -> str:
        self.process.raise_if_ended()
        return f"{self.process.rng_for('unique').getrandbits(128):032x}"

    def __reduce__(self) -> Any:
        raise TypeError("a world belongs to its process: actors get their own")


class Simulation:
    """A simulation: everything that is simulated together.

    Args:
        hosts: Names of the hosts. An actor is placed on the one with the fewest processes; the
            first one is for processes that are begun by `begin_process`, and for what has to be
            on the same node.
        max_callbacks: Maximum number of callbacks of the loop.
        max_seconds: Maximum virtual seconds of the loop.
        keep_details: Keep every line of the log.
        gpus: Number of GPUs of each host.
    """

    loop_class: Callable[..., VirtualLoop] = VirtualLoop

    def __init__(
        self,
        seed: int | str,
        *,
        hosts: Sequence[str] = ("host-0",),
        delays: DelayRanges | None = None,
        max_callbacks: int | None = None,
        max_seconds: float | None = None,
        keep_details: bool = False,
        gpus: int = 0,
    ):
        self.seed = seed
        self.delays = delays or DelayRanges()
        self.gpus = gpus
        self.loop = self.loop_class(max_callbacks=max_callbacks, max_seconds=max_seconds)
        self.log = SimulationLog(self.loop.time, keep_details=keep_details)
        boots = self.rng_for("boots")
        self.hosts = {
            name: SimulatedHost(
                name, SimulatedDisk(self.rng_for(f"disk/{name}")), round(boots.uniform(1e3, 1e6), 3)
            )
            for name in hosts
        }
        self.network = SimulatedNetwork(self.loop, self.rng_for("network"), self._log_message)
        self.network.draw_delay = lambda rng: draw_seconds(self.delays.message, rng)
        self.actors: list[SimulatedActor] = []
        self.shared_values: list[SharedValue] = []
        self.reservations: list[SimulatedReservation] = []
        self.processes: list[HostProcess] = []
        """Processes that have not ended, in the order of their start."""
        self.cut_until: dict[tuple[str, str], float] = {}
        """Time until which calls between two hosts wait, by their sorted names."""
        self.plan_start: Callable[[SimulatedActor], tuple[float, bool]] = self._draw_start
        """Function that returns how many seconds a process of an actor takes to start, and whether
        the start fails."""
        self._start_counts: dict[str, int] = {}
        self._last_pid = 1000

    # -- from the seed -----------------------------------------------------------------------------

    def rng_for(self, use: str) -> Random:
        """Return a new random stream, which depends on the seed and `use` alone."""
        return Random(f"{self.seed}/{use}")

    # -- hosts and processes -----------------------------------------------------------------------

    def begin_process(
        self, name: str, host: SimulatedHost, actor: SimulatedActor | None = None
    ) -> HostProcess:
        """Begin a process with its own world, and return it. The driver is a process
        without an actor."""
        self._last_pid += 1
        self._start_counts[name] = number = self._start_counts.get(name, 0) + 1
        process = HostProcess(
            self, host, name, f"{name}.{number}", self._last_pid, actor, SimulatedWorld
        )
        host.processes[process.pid] = process
        self.processes.append(process)
        self.log.log_event(name, "process_begun", pid=process.pid, host=host.name)
        return process

    def place_actor(self, actor: SimulatedActor) -> SimulatedHost | None:
        """Return the host for a process of an actor; None if there is none.

        This is the host of the actor's bundle, unless that moves from a lost host; the spawner's
        host, if the actor must be beside it; otherwise the host with the fewest processes.
        """
        within = actor.placement.reserved_bundle
        if within is not None:
            host, stays = find_bundle_host(self, within)
            if host is not None or stays:
                return host
        if actor.placement.same_node:
            return None if actor.spawner.host.is_lost else actor.spawner.host
        available = [host for host in self.hosts.values() if not host.is_lost]
        return min(available, key=lambda host: len(host.processes)) if available else None

    def _draw_start(self, actor: SimulatedActor) -> tuple[float, bool]:
        assert actor.process is not None
        return draw_seconds(self.delays.start, actor.process.rng_for("start")), False

    def call_delay(self, one: SimulatedHost, other: SimulatedHost, rng: Random) -> float:
        """Return how many seconds a call, or its answer, takes between two hosts."""
        seconds = draw_seconds(self.delays.call, rng)
        if self.cut_until:
            names = min(one.name, other.name), max(one.name, other.name)
            seconds += max(0.0, self.cut_until.get(names, 0.0) - self.loop.now)
        return seconds

    def find_process(self, name: str) -> HostProcess | None:
        """Return the process of this name that has not ended; None if there is none."""
        return next((process for process in self.processes if process.name == name), None)

    # -- faults ------------------------------------------------------------------------------------

    def end_process(self, process: HostProcess, reason: str) -> None:
        """End a process, like `kill -9`. The actors that it spawned end, too. Does nothing
        if it has ended."""
        if process.ended:
            return
        self.log.log_event(process.name, "process_ended", pid=process.pid, reason=reason)
        process.end()
        self.processes.remove(process)
        del process.host.processes[process.pid]
        for actor in process.spawned_actors:
            actor.kill(f"{process.name} ended, which spawned it", restart=False)
        for reservation in process.reservations:
            release_bundles(reservation)
        if process.actor is not None:
            process.actor.on_process_end(reason)

    def freeze_process(self, process: HostProcess) -> None:
        """Stop a process, like SIGSTOP."""
        if process.running:
            self.log.log_event(process.name, "frozen")
            process.freeze()

    def thaw_process(self, process: HostProcess) -> None:
        """Continue a process, like SIGCONT."""
        if not process.ended and not process.running:
            self.log.log_event(process.name, "thawed")
            process.thaw()

    def lose_host(self, host: SimulatedHost) -> None:
        """Fail the power of a host: its processes end, and what its disk had not synced is lost."""
        if not host.is_lost:
            self.log.log_event(host.name, "host_lost")
            host.is_lost = True
            self.network.silence_connections(host.name)
            for process in list(host.processes.values()):
                self.end_process(process, f"{host.name} was lost")
            host.disk.lose_power()

    def restore_host(self, host: SimulatedHost) -> None:
        """Restore a lost host."""
        if host.is_lost:
            self.log.log_event(host.name, "host_restored")
            host.is_lost = False

    def step_clock(self, host: SimulatedHost, seconds: float) -> None:
        """Let the wall clock of a host jump by `seconds`."""
        self.log.log_event(host.name, "clock_stepped", seconds=seconds)
        host.clock_offset += seconds

    def cut_hosts(self, one: SimulatedHost, other: SimulatedHost, seconds: float) -> None:
        """Cut the connections between two hosts. For `seconds`, none is established; calls and
        their answers wait."""
        self.log.log_event(one.name, "cut_off", other=other.name, seconds=seconds)
        names = (min(one.name, other.name), max(one.name, other.name))
        until = self.loop.now + seconds
        self.cut_until[names] = max(until, self.cut_until.get(names, 0.0))
        self.network.cut_connections(one.name, other.name, seconds)

    def _log_message(self, event: str, route: MessagePath, frames: Sequence[Buffer]) -> None:
        self.log.log_detail(
            f"{event} {route.source} {route.target} {[len(frame) for frame in frames]}"
        )

    # -- running -----------------------------------------------------------------------------------

    def run(self, process: HostProcess, main: Coroutine[Any, Any, Any]) -> Any:
        """Run `main` in a process until it returns. Raises what it raises, `DeadlockError` and
        `LimitReachedError`."""
        return self.loop.run_until_complete(
            self.loop.create_task(main, name="main", context=process.context.copy())
        )

    def close(self) -> None:
        """End all processes. Idempotent."""
        for process in list(self.processes):
            self.end_process(process, "the simulation is over")
        self.loop.close()


__all__ = ["SimulatedHost", "SimulatedWorld", "Simulation"]


HASH_BATCH_LINES = 4096
"""Number of lines that are hashed at once."""


def format_field(value: Any) -> str:
    """Return a value in the format of a line: without spaces, and without what differs between
    Python processes."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(format_field, value))}]"
    text = str(value)
    return (
        text
        if text.isprintable() and text and not (set(text) & {" ", '"', "="})
        else json.dumps(text)
    )


class SimulationLog:
    """The log of a simulation, and its hash, which must not differ between two runs of a seed.

    Events (`log_event`) are for people: they are kept in `lines` and passed to `listeners`. Details
    (`log_detail`) go into the hash, and into `lines` only if `keep_details` is set.
    """

    def __init__(self, time: Callable[[], float], *, keep_details: bool = False):
        self.lines: list[str] = []
        self.listeners: list[Callable[[float, str, str, dict[str, Any]], None]] = []
        """Callbacks for each event, called with seconds, who, what and the fields."""
        self.keep_details = keep_details
        self._time = time
        self._hash = hashlib.blake2b(digest_size=16)
        self._batch: list[str] = []

    def log_event(self, who: str, what: str, **fields: Any) -> None:
        """Log an event. `fields` are numbers, short strings, or lists of them; they must not
        contain addresses of objects or paths of this machine."""
        now = self._time()
        line = " ".join(
            [
                f"{now:.6f}",
                who,
                what,
                *(f"{name}={format_field(value)}" for name, value in fields.items()),
            ]
        )
        self.lines.append(line)
        self._add_line(line)
        for listener in self.listeners:
            listener(now, who, what, fields)

    def log_detail(self, line: str) -> None:
        line = f"{self._time():.6f} {line}"
        if self.keep_details:
            self.lines.append(line)
        self._add_line(line)

    def _add_line(self, line: str) -> None:
        self._batch.append(line)
        if len(self._batch) >= HASH_BATCH_LINES:
            self._hash_batch()

    def _hash_batch(self) -> None:
        self._hash.update("".join(f"{line}\n" for line in self._batch).encode())
        self._batch.clear()

    def compute_digest(self) -> str:
        """Return the digest of all lines so far, in hexadecimal digits."""
        self._hash_batch()
        return self._hash.hexdigest()


__all__ = ["SimulationLog", "format_field"]
