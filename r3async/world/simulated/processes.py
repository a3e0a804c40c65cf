"""Simulated processes: where they run, what they are called, and what they may do to each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from r3async.world import Figures
from r3async.world.simulated.loop import Process

if TYPE_CHECKING:
    from r3async.world.simulated.actors import Actor
    from r3async.world.simulated.world import Host, SimulatedWorld, Simulation


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

    def measure_lag(self, tell: Callable[[float], None]) -> Callable[[], None]:
        self._process.check()
        return lambda: None

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
