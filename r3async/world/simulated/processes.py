"""Simulated processes: where they run, what they are called, and what they may do to each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from r3async.world import Figures
from r3async.world.simulated.loop import Process

if TYPE_CHECKING:
    from r3async.world.simulated.actors import Actor
    from r3async.world.simulated.reserved import SimulatedReservation
    from r3async.world.simulated.world import Host, SimulatedWorld, Simulation
import functools
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import ParamSpec, TypeVar

from r3async.world.simulated.loop import Future, Killed
from r3async.world.simulated.network import draw


class HostProcess(Process):
    """A process on a host. `label` is its own; `name` is that of the actor, and of the process that takes its place."""

    def __init__(
        self,
        simulation: Simulation,
        host: Host,
        name: str,
        label: str,
        pid: int,
        actor: Actor | None,
        world: Callable[[HostProcess], SimulatedWorld],
    ):
        super().__init__(simulation.loop, name)
        self.simulation, self.host, self.label, self.pid, self.actor = simulation, host, label, pid, actor
        self._rngs: dict[str, Random] = {}
        self.spawned: list[Actor] = []
        """They end when it does."""
        self.reserved: list[SimulatedReservation] = []
        """Of hosts, until it ends."""
        self.arrivals: dict[Actor, float] = {}
        """When the last call to an actor arrives: calls do not overtake each other."""
        self.disk_seconds = 0.0
        """How long its work on files since the last look takes."""
        self.world = world(self)

    def rng(self, use: str) -> Random:
        """A stream of its own for each process and use."""
        found = self._rngs.get(use)
        if found is None:
            found = self._rngs[use] = self.simulation.rng(f"{use}/{self.label}")
        return found


class SimulatedProcesses:
    """See `world.Processes`. It prints nothing, and serves no figures."""

    def __init__(self, process: HostProcess):
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def host(self) -> str:
        return self._process.host.name

    def redirect_output(self, log: Path) -> None:
        self._process.check()

    def serve_figures(self, serve: Callable[[], Figures | None]) -> None:
        self._process.check()

    def show_figures(self, read: Callable[[], Mapping[str, Any]]) -> None:
        self._process.check()

    def measure_loop(self, tell: Callable[[float, float], None]) -> Callable[[], None]:
        self._process.check()
        return lambda: None

    def stage_seconds(self) -> tuple[dict[str, float], dict[str, float]]:
        self._process.check()
        return {}, {}

    def cpu_seconds(self, others: Sequence[int] = ()) -> float:
        self._process.check()
        return 0.0

    def dump_stacks(self, path: Path, reason: str) -> Path:
        """Records that they were asked for."""
        self._process.check()
        self._process.simulation.log.event(self._process.name, "stacks_dumped", reason=reason)
        return path

    def ask_for_stacks(self, pid: int, host: str) -> bool:
        found = self._find(pid, host)
        if found is not None:
            self._process.simulation.log.event(self._process.name, "stacks_asked", of=found.name)
        return found is not None

    def alive(self, pid: int, host: str) -> bool:
        return self._find(pid, host) is not None

    def kill(self, pid: int, host: str) -> bool:
        found = self._find(pid, host)
        if found is not None:
            self._process.simulation.end(found, f"killed by {self._process.name}")
            self._process.check()
        return found is not None

    def _find(self, pid: int, host: str) -> HostProcess | None:
        self._process.check()
        return self._process.host.processes.get(pid) if host == self.host else None


__all__ = ["HostProcess", "SimulatedProcesses"]


P = ParamSpec("P")
R = TypeVar("R")


class SimulatedThreads:
    """See `world.Threads`."""

    def __init__(self, process: HostProcess):
        self._process = process
        self._loop, self._rng = process.simulation.loop, process.rng("threads")

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        self._process.check()
        answer = self._loop.create_future()
        self._loop.call_later(self._delay(), self._work, answer, functools.partial(function, *args, **kwargs))
        return await answer

    def _delay(self) -> float:
        return draw(self._process.simulation.delays.thread, self._rng)

    def _work(self, answer: Future, call: Callable[[], Any]) -> float:
        """Returns how long the call takes."""
        if answer.cancelled():
            return 0.0
        self._process.disk_seconds = 0.0  # what the event loop did itself
        failed, result = False, None
        try:
            result = call()
        except Killed:
            raise
        except BaseException as error:
            failed, result = True, error
        seconds, self._process.disk_seconds = self._process.disk_seconds, 0.0
        if seconds > 0:
            self._loop.call_later(seconds, _settle, answer, failed, result)
        else:
            _settle(answer, failed, result)
        return seconds

    def lane(self, name: str) -> SimulatedLane:
        return SimulatedLane(self)

    def repeat(self, name: str, seconds: float, function: Callable[[], bool]) -> None:
        self._process.check()

        def work() -> None:
            if not function():
                self._loop.call_later(seconds, work)

        self._loop.call_later(seconds, work, context=self._process.context.copy())

    def lock(self) -> AbstractContextManager[Any]:
        """Nobody else runs meanwhile."""
        return nullcontext()


class SimulatedLane:
    """See `world.Lane`."""

    def __init__(self, threads: SimulatedThreads):
        self._threads = threads
        self._waiting: deque[tuple[Future, Callable[[], Any]]] = deque()
        self._busy = self._closed = False
        self._idle: list[Future] = []

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        self._threads._process.check()
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        answer = self._threads._loop.create_future()
        self._waiting.append((answer, functools.partial(function, *args, **kwargs)))
        if not self._busy:
            self._next()
        return await answer

    def _next(self) -> None:
        while self._waiting and self._waiting[0][0].cancelled():
            self._waiting.popleft()
        self._busy = bool(self._waiting)
        if self._busy:
            self._threads._loop.call_later(self._threads._delay(), self._work)
        else:
            for waiting in self._idle:
                _settle(waiting, False, None)
            self._idle.clear()

    def _work(self) -> None:
        seconds = self._threads._work(*self._waiting.popleft()) if self._waiting else 0.0
        self._threads._loop.call_later(seconds, self._next)

    async def close(self) -> None:
        self._closed = True
        for answer, _ in self._waiting:
            answer.cancel()
        self._waiting.clear()
        if self._busy:
            idle = self._threads._loop.create_future()
            self._idle.append(idle)
            await idle


def _settle(answer: Future, failed: bool, result: Any) -> None:
    if answer.done():
        return
    if failed:
        answer.set_exception(result)
    else:
        answer.set_result(result)


__all__ = ["SimulatedLane", "SimulatedThreads"]
