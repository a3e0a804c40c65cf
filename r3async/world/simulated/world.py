"""A simulation: hosts and their processes, one loop, one seed, one log. And the world as each process sees it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Coroutine, Sequence
from functools import cached_property
from random import Random
from typing import Any

from r3async.world import Buffer, Files, Sockets
from r3async.world.appending import Keeper
from r3async.world.simulated.actors import Actor, Shared, SimulatedActors
from r3async.world.simulated.disk import SimulatedDisk
from r3async.world.simulated.loop import VirtualLoop
from r3async.world.simulated.network import Delays, SimulatedNetwork, draw
from r3async.world.simulated.processes import HostProcess, SimulatedProcesses, SimulatedThreads
from r3async.world.simulated.reserved import SimulatedReservation, host_within, release
from r3async.world.simulated.sockets import Route

EPOCH = 1_700_000_000.0
"""Seconds since 1970 when a simulation begins."""


class Host:
    """A machine. `steps` is by how much its wall clock is ahead; `booted`, what its monotonic clock showed at the beginning."""

    def __init__(self, name: str, disk: SimulatedDisk, booted: float):
        self.name, self.disk, self.booted = name, disk, booted
        self.steps = 0.0
        self.lost = False
        self.processes: dict[int, HostProcess] = {}
        """By process id; those that have not ended."""


class SimulatedClock:
    """See `world.Clock`."""

    def __init__(self, loop: VirtualLoop, host: Host):
        self._loop, self._host = loop, host

    def monotonic(self) -> float:
        return self._host.booted + self._loop.now

    def time(self) -> float:
        return EPOCH + self._loop.now + self._host.steps


class SimulatedWorld:
    """See `World`: that of one process."""

    def __init__(self, process: HostProcess):
        self.process = process
        self.clock = SimulatedClock(process.simulation.loop, process.host)
        self.threads = SimulatedThreads(process)
        self.actors = SimulatedActors(process)
        self.processes = SimulatedProcesses(process)

    @cached_property
    def files(self) -> Files:
        return self.process.host.disk.files(self.process)

    @cached_property
    def keeper(self) -> Keeper:
        return Keeper(world=self)

    def sockets(self) -> Sockets:
        self.process.check()
        return self.process.simulation.network.sockets(self.process.host.name, self.process)

    def unique(self) -> str:
        self.process.check()
        return f"{self.process.rng('unique').getrandbits(128):032x}"

    def __reduce__(self) -> Any:
        raise TypeError("a world belongs to its process: actors get their own")


class Simulation:
    """Everything that is simulated together.

    `hosts`: their names; actors are placed on them in turn, the first being for processes that are begun by `begin_process` and
    what is placed `beside` them; `gpus` of each. `callbacks`, `seconds`: limits of the loop. `details`: keep every line of the
    log.
    """

    loop_kind: Callable[..., VirtualLoop] = VirtualLoop

    def __init__(
        self,
        seed: int | str,
        *,
        hosts: Sequence[str] = ("host-0",),
        delays: Delays | None = None,
        callbacks: int | None = None,
        seconds: float | None = None,
        details: bool = False,
        gpus: int = 0,
    ):
        self.seed, self.delays, self.gpus = seed, delays or Delays(), gpus
        self.loop = self.loop_kind(callbacks=callbacks, seconds=seconds)
        self.log = EventLog(self.loop.time, details=details)
        boots = self.rng("boots")
        self.hosts = {
            name: Host(name, SimulatedDisk(self.rng(f"disk/{name}")), round(boots.uniform(1e3, 1e6), 3))
            for name in hosts
        }
        self.network = SimulatedNetwork(self.loop, self.rng("network"), self._message)
        self.network.delay = lambda rng: draw(self.delays.message, rng)
        self.actors: list[Actor] = []
        self.shared: list[Shared] = []
        self.reservations: list[SimulatedReservation] = []
        self.processes: list[HostProcess] = []
        """Those that have not ended, in the order of their beginning."""
        self.cuts: dict[tuple[str, str], float] = {}
        """Until when calls between two hosts wait, by their names in order."""
        self.plan_start: Callable[[Actor], tuple[float, bool]] = self._plan_start
        """How long a process of an actor takes to start, and whether it fails."""
        self._begun: dict[str, int] = {}
        self._pid = 1000

    # -- from the seed -----------------------------------------------------------------------------------------------

    def rng(self, use: str) -> Random:
        """A new stream, which depends on the seed and its name alone."""
        return Random(f"{self.seed}/{use}")

    # -- hosts and processes -----------------------------------------------------------------------------------------

    def begin_process(self, name: str, host: Host, actor: Actor | None = None) -> HostProcess:
        """A process with a world of its own. The driver is one without an actor."""
        self._pid += 1
        self._begun[name] = number = self._begun.get(name, 0) + 1
        process = HostProcess(self, host, name, f"{name}.{number}", self._pid, actor, SimulatedWorld)
        host.processes[process.pid] = process
        self.processes.append(process)
        self.log.event(name, "process_begun", pid=process.pid, host=host.name)
        return process

    def place(self, actor: Actor) -> Host | None:
        """Where its bundle is, unless that moves from a host that is lost; on the spawner's host if it has to be beside it;
        else on the host with the fewest processes. None if none is left."""
        if (within := actor.placement.within) is not None:
            host, stays = host_within(self, within)
            if host is not None or stays:
                return host
        if actor.placement.beside:
            return None if actor.spawner.host.lost else actor.spawner.host
        there = [host for host in self.hosts.values() if not host.lost]
        return min(there, key=lambda host: len(host.processes)) if there else None

    def _plan_start(self, actor: Actor) -> tuple[float, bool]:
        assert actor.process is not None
        return draw(self.delays.start, actor.process.rng("start")), False

    def delay(self, one: Host, other: Host, rng: Random) -> float:
        """How long a call, or its answer, is on its way."""
        seconds = draw(self.delays.call, rng)
        if self.cuts:
            names = min(one.name, other.name), max(one.name, other.name)
            seconds += max(0.0, self.cuts.get(names, 0.0) - self.loop.now)
        return seconds

    def find(self, name: str) -> HostProcess | None:
        """The process of that name that has not ended."""
        return next((process for process in self.processes if process.name == name), None)

    # -- faults ------------------------------------------------------------------------------------------------------

    def end(self, process: HostProcess, reason: str) -> None:
        """As `kill -9`; the actors that it spawned end too. Nothing happens if it has ended."""
        if process.ended:
            return
        self.log.event(process.name, "process_ended", pid=process.pid, reason=reason)
        process.end()
        self.processes.remove(process)
        del process.host.processes[process.pid]
        for actor in process.spawned:
            actor.kill(f"{process.name} ended, which spawned it", restart=False)
        for reservation in process.reserved:
            release(reservation)
        if process.actor is not None:
            process.actor.process_ended(reason)

    def freeze(self, process: HostProcess) -> None:
        """As SIGSTOP."""
        if process.running:
            self.log.event(process.name, "frozen")
            process.freeze()

    def thaw(self, process: HostProcess) -> None:
        """As SIGCONT."""
        if not process.ended and not process.running:
            self.log.event(process.name, "thawed")
            process.thaw()

    def lose(self, host: Host) -> None:
        """The machine loses power: its processes end, and what its disk had not synced is lost."""
        if not host.lost:
            self.log.event(host.name, "host_lost")
            host.lost = True
            self.network.vanish(host.name)
            for process in list(host.processes.values()):
                self.end(process, f"{host.name} was lost")
            host.disk.lose_power()

    def restore(self, host: Host) -> None:
        """The machine is there again."""
        if host.lost:
            self.log.event(host.name, "host_restored")
            host.lost = False

    def step_clock(self, host: Host, seconds: float) -> None:
        """Its wall clock jumps."""
        self.log.event(host.name, "clock_stepped", seconds=seconds)
        host.steps += seconds

    def cut(self, one: Host, other: Host, seconds: float) -> None:
        """Connections between two hosts are lost, and none stands up for so long; calls, and their answers, wait."""
        self.log.event(one.name, "cut_off", other=other.name, seconds=seconds)
        names, until = (min(one.name, other.name), max(one.name, other.name)), self.loop.now + seconds
        self.cuts[names] = max(until, self.cuts.get(names, 0.0))
        self.network.cut(one.name, other.name, seconds)

    def _message(self, event: str, route: Route, frames: Sequence[Buffer]) -> None:
        self.log.detail(f"{event} {route.source} {route.target} {[len(frame) for frame in frames]}")

    # -- running -----------------------------------------------------------------------------------------------------

    def run(self, process: HostProcess, main: Coroutine[Any, Any, Any]) -> Any:
        """Run `main` in a process until it returns. Raises what it raises, `Deadlock` and `LimitReached`."""
        return self.loop.run_until_complete(self.loop.create_task(main, name="main", context=process.context.copy()))

    def close(self) -> None:
        """End all processes. Idempotent."""
        for process in list(self.processes):
            self.end(process, "the simulation is over")
        self.loop.close()


__all__ = ["Host", "SimulatedWorld", "Simulation"]


BATCH = 4096
"""Lines that are hashed at once."""


def shown(value: Any) -> str:
    """A value as a line has it: without spaces, and without what differs from one Python process to the next."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(shown, value))}]"
    text = str(value)
    return text if text.isprintable() and text and not (set(text) & {" ", '"', "="}) else json.dumps(text)


class EventLog:
    """`event` is for people: kept in `lines`, and for `listeners`. `detail` is what else may not differ between two runs of a
    seed: it goes into the hash, and into `lines` only if `details` is set."""

    def __init__(self, time: Callable[[], float], *, details: bool = False):
        self.lines: list[str] = []
        self.listeners: list[Callable[[float, str, str, dict[str, Any]], None]] = []
        """Called with seconds, who, what and the fields."""
        self.details = details
        self._time, self._hash = time, hashlib.blake2b(digest_size=16)
        self._batch: list[str] = []

    def event(self, who: str, what: str, **fields: Any) -> None:
        """`fields`: numbers, short texts, lists of them. Neither addresses of objects nor paths of this machine."""
        now = self._time()
        line = " ".join([f"{now:.6f}", who, what, *(f"{name}={shown(value)}" for name, value in fields.items())])
        self.lines.append(line)
        self._add(line)
        for listener in self.listeners:
            listener(now, who, what, fields)

    def detail(self, line: str) -> None:
        line = f"{self._time():.6f} {line}"
        if self.details:
            self.lines.append(line)
        self._add(line)

    def _add(self, line: str) -> None:
        self._batch.append(line)
        if len(self._batch) >= BATCH:
            self._flush()

    def _flush(self) -> None:
        self._hash.update("".join(f"{line}\n" for line in self._batch).encode())
        self._batch.clear()

    def digest(self) -> str:
        """Of all lines so far, in hexadecimal digits."""
        self._flush()
        return self._hash.hexdigest()


__all__ = ["EventLog", "shown"]
