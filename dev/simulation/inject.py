"""Injection of faults into a simulation at their times."""

from __future__ import annotations

import contextlib
import errno
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import Context
from pathlib import Path
from random import Random
from typing import Any

from dev.simulation.disk import WRITE_OPERATIONS, SimulatedDisk
from dev.simulation.environment import Helper, helper_of
from dev.simulation.faults import MOST_GENERATORS, Fault, quiet_after
from dev.simulation.history import Acknowledged, Began, Event, Injected, Quiet, Taken
from dev.simulation.loop import ProcessKilled
from dev.simulation.network import ANY_NAME, MessagePath, SimulatedFrames
from dev.simulation.observe import MEMORY, Watched
from dev.simulation.processes import HostProcess
from r3async.actors.driver import ScaleRequest, write_scale_request
from r3async.untrusted import MalformedError
from r3async.weights import fetch as relay

RUNS = Path("/runs")
"""Directory of runs on the simulated disk."""


class Injector:
    """Injector of a schedule of faults, which is set up in the constructor. `injected` counts the faults by kind.

    Args:
        stop: Called when a fault has the user stop the run.
    """

    def __init__(self, simulation: Watched, faults: Sequence[Fault], stop: Callable[[], None]):
        self._simulation = simulation
        self.injected: Counter[str] = Counter()
        self._active: dict[str, list[Fault]] = {}
        self._rng = simulation.rng_for("faults")
        self._scaled = 0
        self._traps: list[tuple[Fault, Counter[str]]] = []
        self._again: list[tuple[Fault, int]] = []
        """Faults whose process is killed once more when a lineage after the given one begins to train."""
        self._unsaved: list[Fault] = []
        """Faults whose process is killed when a trajectory is acknowledged that the next start has to refuse."""
        self._unsynced: list[Fault] = []
        """Faults for which a process is killed when the spool has a trajectory that is not synced."""
        self._powerless: list[Fault] = []
        """Faults for which power fails when the next start has begun."""
        self._disk: SimulatedDisk = next(iter(simulation.hosts.values())).disk
        self._delay = simulation.network.draw_delay
        self._start = simulation.plan_start
        simulation.network.draw_delay = self._delayed
        self._spoils = simulation.network.is_damaged
        simulation.network.is_damaged = self._spoiled
        simulation.plan_start = self._planned_start
        self._disk.on_operation = self._before
        simulation.listeners.append(self._after)
        self._kinds: dict[str, Callable[[Fault], object]] = {
            "cut": self._cut,
            "half_open": self._half_open,
            "stall": self._stall,
            "delay": self._lasts,
            "damage": self._damage,
            "damage_weights": self._lasts,
            "mute": self._mute,
            "memory_full": self._fill_memory,
            "disk_full": self._spoil_disk,
            "disk_error": self._spoil_disk,
            "short_write": self._spoil_disk,
            "short_put": self._trap,
            "slow_disk": self._spoil_disk,
            "no_descriptors": self._fill_descriptors,
            "power": self._lose,
            "power_writing": self._trap,
            "kill": self._kill,
            "kill_writing": self._trap,
            "kill_again": self._kill_twice,
            "kill_unsaved": self._wait_for_unsaved,
            "kill_unsynced": lambda fault: self._unsynced.append(fault),
            "freeze": self._freeze,
            "silence": self._freeze,
            "slow_start": self._lasts,
            "failing_start": self._lasts,
            "env_dies": lambda fault: self._spoil_environments(fault, lambda helper: helper.end("its process died")),
            "env_hangs": lambda fault: self._spoil_environments(fault, lambda helper: setattr(helper, "hangs", True)),
            "env_late": self._delay_environments,
            "clock": self._step_clock,
            "stop": lambda fault: stop(),
            "scale": self._scale,
        }
        for fault in faults:
            self._at(fault.at, self._begin, fault)
        self._at(quiet_after(faults), self._all_over)

    def _at(self, when: float, callback: Callable[..., object], *args: Any) -> None:
        self._simulation.loop.call_at(when, callback, *args, context=Context())

    def _all_over(self) -> None:
        if not self._waiting_for_hosts():
            self._traps.clear()
            self._again.clear()
            self._unsaved.clear()
            self._unsynced.clear()
            self._powerless.clear()
            self._simulation.see(Quiet)
        else:
            self._at(self._simulation.loop.now + 1.0, self._all_over)

    def _waiting_for_hosts(self) -> bool:
        return any(host.is_lost for host in self._simulation.hosts.values())

    def _begin(self, fault: Fault) -> None:
        self.injected[fault.kind] += 1
        self._simulation.see(Injected, fault.describe())
        self._kinds[fault.kind](fault)

    def _lasts(self, fault: Fault, over: Callable[[], None] = lambda: None) -> None:
        """Keep the fault active until its end; then call `over()`."""
        self._active.setdefault(fault.kind, []).append(fault)

        def end() -> None:
            self._active[fault.kind].remove(fault)
            self._simulation.see(Injected, f"{fault.kind.replace('_', ' ')} is over")
            over()

        self._at(fault.end, end)

    def _most(self, kind: str) -> float:
        return max((fault.amount for fault in self._active.get(kind, ())), default=0.0)

    # -- network -------------------------------------------------------------------------------------------------------

    def _cut(self, fault: Fault) -> None:
        """Cut a generator off from the learner. If it is on another host than the learner, calls wait, too."""
        simulation = self._simulation
        process, (first, *_) = simulation.find_process(fault.target), simulation.hosts.values()
        if process is not None and process.host is not first:
            simulation.cut_hosts(process.host, first, fault.seconds)
        simulation.network.cut_connections(fault.target, "learner", fault.seconds)

    def _half_open(self, fault: Fault) -> None:
        self._simulation.network.half_open_connections(fault.target, ANY_NAME, fault.seconds)

    def _stall(self, fault: Fault) -> None:
        self._simulation.network.stall_connections(fault.target, "learner", fault.seconds)

    def _mute(self, fault: Fault) -> None:
        for other in range(MOST_GENERATORS):
            if (name := f"generator-{other}") != fault.target:
                self._simulation.network.stall_connections(fault.target, name, fault.seconds)

    def _spoiled(self, route: MessagePath, frames: SimulatedFrames) -> bool:
        lasting = self._active.get("damage_weights", ())
        share = max((fault.amount for fault in lasting if fault.target == route.target), default=0.0)
        if share and _is_chunk(frames) and self._rng.random() < share:
            return True
        return self._spoils(route, frames)

    def _delayed(self, rng: Random) -> float:
        return self._delay(rng) + rng.random() * self._most("delay") if self._active.get("delay") else self._delay(rng)

    def _damage(self, fault: Fault) -> None:
        self._lasts(fault, self._set_damage)
        self._set_damage()

    def _set_damage(self) -> None:
        self._simulation.network.damage_rate = self._most("damage")

    # -- disk ----------------------------------------------------------------------------------------------------------

    def _spoil_disk(self, fault: Fault) -> None:
        self._lasts(fault, self._set_disk)
        self._set_disk()

    def _set_disk(self) -> None:
        root = RUNS  # weights are in shared memory
        if self._active.get("disk_error"):
            self._disk.refuse_operations(root, errno.EIO)
        elif self._active.get("disk_full"):
            self._disk.refuse_operations(root, errno.ENOSPC)
        else:
            self._disk.allow_operations(root)
        self._disk.short_write_rate = self._most("short_write")
        self._disk.latency = self._most("slow_disk")

    def _fill_memory(self, fault: Fault) -> None:
        memory = self._simulation.memory
        memory[fault.target].refuse_operations(MEMORY, errno.ENOSPC)
        self._lasts(fault, lambda: memory[fault.target].allow_operations(MEMORY))

    def _lose(self, fault: Fault) -> None:
        simulation = self._simulation
        host = simulation.hosts[fault.target]
        lost = [each for each in simulation.hosts.values() if not each.is_lost]
        simulation.lose_host(host)

        def restore() -> None:
            for each in lost:
                simulation.restore_host(each)

        self._at(max(fault.end, simulation.loop.now + fault.seconds), restore)

    # -- processes -----------------------------------------------------------------------------------------------------

    def _kill(self, fault: Fault) -> None:
        if (process := self._simulation.find_process(fault.target)) is not None:
            self._simulation.end_process(process, "killed")

    def _kill_twice(self, fault: Fault) -> None:
        self._again.append((fault, self._simulation.checker.known.lineage))
        self._kill(fault)

    def _after(self, event: Event) -> None:
        """Act on an observed event, for the faults that wait for one."""
        if isinstance(event, Acknowledged) and self._unsaved:
            if any(map(self._simulation.checker.known.is_unsaved, event.ids)):
                waited, self._unsaved = self._unsaved, []
                for fault in waited:
                    self._at(event.at + fault.amount, self._kill_now, fault)
        elif isinstance(event, Taken) and self._again:
            self._end_once_more(event)
        elif isinstance(event, Began) and self._powerless:
            waited, self._powerless = self._powerless, []
            for fault in waited:
                self._at(event.at + fault.amount, self._lose_now, fault)

    def _wait_for_unsaved(self, fault: Fault) -> None:
        self._unsaved.append(fault)

    def _end_once_more(self, event: Taken) -> None:
        begun = [fault for fault, lineage in self._again if event.lineage > lineage]
        self._again = [(fault, lineage) for fault, lineage in self._again if event.lineage <= lineage]
        for fault in begun:
            if (when := event.at + fault.amount) < fault.end:
                self._at(when, self._kill_now, fault)

    def _kill_now(self, fault: Fault) -> None:
        self._simulation.see(Injected, f"{fault.describe()}: now")
        self._kill(fault)

    def _lose_now(self, fault: Fault) -> None:
        host = next(iter(self._simulation.hosts))
        self._simulation.see(Injected, f"{fault.describe()}: power of {host} fails now")
        self._lose(Fault(self._simulation.loop.now, "power", host, 1.0))

    def _fill_descriptors(self, fault: Fault) -> None:
        if (process := self._simulation.find_process(fault.target)) is not None:
            process.out_of_descriptors = True
            self._simulation.network.cut_connections(fault.target)
            self._lasts(fault, lambda: setattr(process, "out_of_descriptors", False))

    def _freeze(self, fault: Fault) -> None:
        if (process := self._simulation.find_process(fault.target)) is not None:
            self._simulation.freeze_process(process)
            self._at(fault.end, self._simulation.thaw_process, process)

    def _spoil_environments(self, fault: Fault, spoil: Callable[[Helper], object]) -> Helper | None:
        if (process := self._simulation.find_process(fault.target)) is None:
            return None
        spoil(helper := helper_of(process))
        return helper

    def _delay_environments(self, fault: Fault) -> None:
        if helper := self._spoil_environments(fault, lambda helper: setattr(helper, "late", fault.amount)):
            self._lasts(fault, lambda: setattr(helper, "late", 0.0))

    def _trap(self, fault: Fault) -> None:
        self._traps.append((fault, Counter()))

    def _before(self, process: Any, operation: str, path: Path) -> None:
        """Trigger the faults that wait for this operation, before the disk performs it."""
        if self._unsynced and operation == "sync" and path.suffix == ".spool":
            self._powerless, self._unsynced = self._unsynced, []
            self._simulation.see(Injected, f"{self._powerless[0].describe()}: {process.name} is killed before it syncs")
            self._simulation.end_process(process, "killed before it synced")
            return
        if operation not in WRITE_OPERATIONS or not self._traps:
            return
        for trap in list(self._traps):
            fault, count = trap
            if not _concerns(fault, process.name, operation, path):
                continue
            count["operations"] += 1
            if count["operations"] >= fault.amount:
                self._traps.remove(trap)
                self._simulation.see(Injected, f"{fault.describe()}: {process.name}, {operation} {path.name}")
                if fault.kind == "short_put":
                    self._disk.next_write_short = True
                elif fault.kind == "power_writing":
                    self._lose(fault)
                elif isinstance(process, HostProcess):
                    self._simulation.end_process(process, "killed while it wrote")
                return

    def _planned_start(self, actor: Any) -> tuple[float, bool]:
        seconds, fails = self._start(actor)
        fails = fails or any(self._rng.random() < fault.amount for fault in self._active.get("failing_start", ()))
        return seconds + self._most("slow_start"), fails

    def _scale(self, fault: Fault) -> None:
        """Request a number of generators with a command on the first host. The command fails if the disk does."""
        host = next(iter(self._simulation.hosts.values()))
        if host.is_lost:
            return
        self._scaled += 1
        process = self._simulation.begin_process("person", host)
        with contextlib.suppress(OSError, ProcessKilled):
            write_scale_request(
                RUNS / "run", ScaleRequest(int(fault.amount), f"{self._scaled}"), files=host.disk.files_for(process)
            )
        self._simulation.end_process(process, "the command has ended")

    def _step_clock(self, fault: Fault) -> None:
        self._simulation.step_clock(self._simulation.hosts[fault.target], fault.amount)


def _is_chunk(frames: SimulatedFrames) -> bool:
    """Return whether the message is a chunk of weights."""
    if len(frames) < 2:
        return False
    try:
        return isinstance(relay.decode_relay_message(frames[0]), relay.Chunk)
    except MalformedError:
        return False


def _concerns(fault: Fault, process: str, operation: str, path: Path) -> bool:
    """Return whether a trap counts this operation."""
    if fault.kind == "short_put":
        return operation == "append" and path.suffix == ".spool"
    return fault.kind == "power_writing" or process == fault.target
