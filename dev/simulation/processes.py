"""Simulated processes on hosts, their operations on each other, and their threads."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from dev.simulation.loop import ProcessKilled, VirtualFuture, VirtualProcess
from dev.simulation.network import draw_seconds
from r3async.world import MetricsServer

if TYPE_CHECKING:
    from dev.simulation.actors import ActorCall, SimulatedActor, SimulatedReservation
    from dev.simulation.world import SimulatedHost, SimulatedWorld, Simulation


class HostProcess(VirtualProcess):
    """A process on a host. `rng_label` is unique; `name` is that of the actor, and so is shared
    with the process that replaces it."""

    def __init__(
        self,
        simulation: Simulation,
        host: SimulatedHost,
        name: str,
        rng_label: str,
        pid: int,
        actor: SimulatedActor | None,
        make_world: Callable[[HostProcess], SimulatedWorld],
    ):
        super().__init__(simulation.loop, name)
        self.simulation = simulation
        self.host = host
        self.rng_label = rng_label
        self.pid = pid
        self.actor = actor
        self._rngs: dict[str, Random] = {}
        self.spawned_actors: list[SimulatedActor] = []
        """Actors that end with this process."""
        self.reservations: list[SimulatedReservation] = []
        """Reservations that are released when this process ends."""
        self.last_arrivals: dict[SimulatedActor, float] = {}
        """Arrival time of the last call to each actor: calls do not overtake each other."""
        self.holds_calls = False
        """True if its calls do not leave it; they are then in `held_calls`."""
        self.held_calls: list[tuple[SimulatedActor, ActorCall]] = []
        self.disk_seconds = 0.0
        """Seconds that its work on files since the last reset takes."""
        self.world = make_world(self)

    def rng_for(self, use: str) -> Random:
        """Return a separate random stream for each process and use."""
        found = self._rngs.get(use)
        if found is None:
            found = self._rngs[use] = self.simulation.rng_for(f"{use}/{self.rng_label}")
        return found


class SimulatedProcesses:
    """An implementation of `world.Processes`. It prints nothing and serves no metrics."""

    def __init__(self, process: HostProcess):
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def host(self) -> str:
        return self._process.host.name

    def redirect_output(self, log_path: Path) -> None:
        self._process.raise_if_ended()

    def serve_metrics(self, open_endpoint: Callable[[], MetricsServer | None]) -> None:
        self._process.raise_if_ended()

    def add_metrics_source(self, read_metrics: Callable[[], Mapping[str, Any]]) -> None:
        self._process.raise_if_ended()

    def measure_event_loop(self, on_lag: Callable[[float, float], None]) -> Callable[[], None]:
        self._process.raise_if_ended()
        return lambda: None

    def stage_seconds(self) -> tuple[dict[str, float], dict[str, float]]:
        self._process.raise_if_ended()
        return {}, {}

    def cpu_seconds(self, other_pids: Sequence[int] = ()) -> float:
        self._process.raise_if_ended()
        return 0.0

    def dump_stacks(self, path: Path, reason: str) -> Path:
        """Record in the log that a dump was requested. Writes no file."""
        self._process.raise_if_ended()
        self._process.simulation.log.log_event(self._process.name, "stacks_dumped", reason=reason)
        return path

    def request_stack_dump(self, pid: int, host: str) -> bool:
        found = self._find_process(pid, host)
        if found is not None:
            self._process.simulation.log.log_event(
                self._process.name, "stacks_asked", of=found.name
            )
        return found is not None

    def is_alive(self, pid: int, host: str) -> bool:
        return self._find_process(pid, host) is not None

    def kill_process(self, pid: int, host: str) -> bool:
        found = self._find_process(pid, host)
        if found is not None:
            self._process.simulation.end_process(found, f"killed by {self._process.name}")
            self._process.raise_if_ended()
        return found is not None

    def _find_process(self, pid: int, host: str) -> HostProcess | None:
        self._process.raise_if_ended()
        return self._process.host.processes.get(pid) if host == self.host else None


__all__ = ["HostProcess", "SimulatedProcesses"]


P = ParamSpec("P")
R = TypeVar("R")


class SimulatedThreads:
    """An implementation of `world.Threads`. Functions run on the loop, and take virtual time."""

    def __init__(self, process: HostProcess):
        self._process = process
        self._loop = process.simulation.loop
        self._rng = process.rng_for("threads")

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        self._process.raise_if_ended()
        answer = self._loop.create_future()
        self._loop.call_later(
            self._draw_delay(), self._run_call, answer, functools.partial(function, *args, **kwargs)
        )
        return await answer

    def _draw_delay(self) -> float:
        return draw_seconds(self._process.simulation.delays.thread, self._rng)

    def _run_call(self, answer: VirtualFuture, call: Callable[[], Any]) -> float:
        """Run the call, settle `answer`, and return the virtual seconds that the call takes."""
        if answer.cancelled():
            return 0.0
        self._process.disk_seconds = 0.0  # discard the work of the event loop
        failed = False
        result = None
        try:
            result = call()
        except ProcessKilled:
            raise
        except BaseException as error:
            failed = True
            result = error
        seconds = self._process.disk_seconds
        self._process.disk_seconds = 0.0
        if seconds > 0:
            self._loop.call_later(seconds, _settle_answer, answer, failed, result)
        else:
            _settle_answer(answer, failed, result)
        return seconds

    def new_worker(self, name: str) -> SimulatedWorkerThread:
        return SimulatedWorkerThread(self)

    def repeat_until_done(self, name: str, seconds: float, function: Callable[[], bool]) -> None:
        self._process.raise_if_ended()

        def run_function() -> None:
            if not function():
                self._loop.call_later(seconds, run_function)

        self._loop.call_later(seconds, run_function, context=self._process.context.copy())

    def new_lock(self) -> AbstractContextManager[Any]:
        """Return a context that does nothing: nothing else runs meanwhile."""
        return nullcontext()


class SimulatedWorkerThread:
    """An implementation of `world.WorkerThread`."""

    def __init__(self, threads: SimulatedThreads):
        self._threads = threads
        self._queued_calls: deque[tuple[VirtualFuture, Callable[[], Any]]] = deque()
        self._is_busy = self._is_closed = False
        self._idle_waiters: list[VirtualFuture] = []

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        self._threads._process.raise_if_ended()
        if self._is_closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        answer = self._threads._loop.create_future()
        self._queued_calls.append((answer, functools.partial(function, *args, **kwargs)))
        if not self._is_busy:
            self._start_next()
        return await answer

    def _start_next(self) -> None:
        while self._queued_calls and self._queued_calls[0][0].cancelled():
            self._queued_calls.popleft()
        self._is_busy = bool(self._queued_calls)
        if self._is_busy:
            self._threads._loop.call_later(self._threads._draw_delay(), self._run_next)
        else:
            for waiting in self._idle_waiters:
                _settle_answer(waiting, False, None)
            self._idle_waiters.clear()

    def _run_next(self) -> None:
        seconds = (
            self._threads._run_call(*self._queued_calls.popleft()) if self._queued_calls else 0.0
        )
        self._threads._loop.call_later(seconds, self._start_next)

    async def close(self) -> None:
        self._is_closed = True
        for answer, _ in self._queued_calls:
            answer.cancel()
        self._queued_calls.clear()
        if self._is_busy:
            idle = self._threads._loop.create_future()
            self._idle_waiters.append(idle)
            await idle


def _settle_answer(answer: VirtualFuture, failed: bool, result: Any) -> None:
    if answer.done():
        return
    if failed:
        answer.set_exception(result)
    else:
        answer.set_result(result)


__all__ = ["SimulatedThreads", "SimulatedWorkerThread"]
