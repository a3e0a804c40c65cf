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
from dev.simulation.environment import EnvironmentProcess, environment_process_of
from dev.simulation.faults import MAX_GENERATORS, PlannedFault, faults_end
from dev.simulation.history import (
    EvaluationEnded,
    FaultReported,
    FaultsOver,
    GroupsLeased,
    LineageBegan,
    PlayRequested,
    RunEvent,
    StepBegan,
    TrajectoriesAcknowledged,
)
from dev.simulation.loop import ProcessKilled
from dev.simulation.network import ANY_NAME, MessagePath, SimulatedFrames
from dev.simulation.observe import MEMORY_DIRECTORY, WatchedSimulation
from dev.simulation.processes import HostProcess
from r3async.actors.fleet_scaler import ScaleRequest, write_scale_request
from r3async.untrusted import MalformedError
from r3async.weights import relay

RUNS = Path("/runs")
"""Directory of runs on the simulated disk."""


class FaultInjector:
    """Injector of a schedule of faults, which is set up in the constructor. `injected_counts`
    counts the faults by kind.

    Args:
        stop: Called when a fault has the user stop the run.
    """

    def __init__(
        self,
        simulation: WatchedSimulation,
        faults: Sequence[PlannedFault],
        stop: Callable[[], None],
    ):
        self._simulation = simulation
        self.injected_counts: Counter[str] = Counter()
        self._active: dict[str, list[PlannedFault]] = {}
        self._rng = simulation.rng_for("faults")
        self._scale_requests = 0
        self._traps: list[tuple[PlannedFault, Counter[str]]] = []
        self._second_kills: list[tuple[PlannedFault, int]] = []
        """Faults whose process is killed once more when a lineage after the given one
        begins to train."""
        self._unsaved_kills: list[PlannedFault] = []
        """Faults whose process is killed when a trajectory is acknowledged that the next
        start has to refuse."""
        self._unsynced_kills: list[PlannedFault] = []
        """Faults for which a process is killed when the spool has a trajectory
        that is not synced."""
        self._waiting_kills: list[PlannedFault] = []
        """Faults whose generator is killed when a call of it waits for work."""
        self._calling_kills: list[PlannedFault] = []
        """Faults whose generator is killed some time after it was leased something, with
        its calls held up."""
        self._evaluated_kills: list[PlannedFault] = []
        """Faults whose process is killed when an evaluation is stored of a step that
        no checkpoint has."""
        self._held_processes: dict[str, HostProcess] = {}
        """Processes whose calls are held up, by the name of the generator whose next process
        has to play first."""
        self._power_failures: list[PlannedFault] = []
        """Faults for which power fails when the next start has begun."""
        self._disk: SimulatedDisk = next(iter(simulation.hosts.values())).disk
        self._original_delay = simulation.network.draw_delay
        self._original_start = simulation.plan_start
        simulation.network.draw_delay = self._draw_delay
        self._original_damage = simulation.network.is_damaged
        simulation.network.is_damaged = self._is_damaged
        simulation.plan_start = self._plan_start
        self._disk.on_operation = self._before_operation
        simulation.listeners.append(self._react_to_event)
        self._actions: dict[str, Callable[[PlannedFault], object]] = {
            "cut": self._cut_generator,
            "half_open": self._half_open_connections,
            "stall": self._stall_generator,
            "delay": self._keep_active,
            "damage": self._damage_messages,
            "damage_weights": self._keep_active,
            "mute": self._mute_generator,
            "memory_full": self._fill_memory,
            "disk_full": self._spoil_disk,
            "disk_error": self._spoil_disk,
            "short_write": self._spoil_disk,
            "short_put": self._set_trap,
            "slow_disk": self._spoil_disk,
            "no_descriptors": self._fill_descriptors,
            "power": self._lose_host,
            "power_writing": self._set_trap,
            "kill": self._kill_process,
            "kill_writing": self._set_trap,
            "kill_again": self._kill_twice,
            "kill_unsaved": self._wait_for_unsaved,
            "kill_unsynced": lambda fault: self._unsynced_kills.append(fault),
            "kill_waiting": lambda fault: self._waiting_kills.append(fault),
            "kill_calling": lambda fault: self._calling_kills.append(fault),
            "kill_evaluated": lambda fault: self._evaluated_kills.append(fault),
            "freeze": self._freeze_process,
            "silence": self._freeze_process,
            "slow_start": self._keep_active,
            "failing_start": self._keep_active,
            "engine_dies": self._end_engine,
            "env_dies": lambda fault: self._spoil_environments(
                fault, lambda helper: helper.end_process("its process died")
            ),
            "env_hangs": lambda fault: self._spoil_environments(
                fault, lambda helper: setattr(helper, "hangs", True)
            ),
            "env_late": self._delay_environments,
            "clock": self._step_clock,
            "stop": lambda fault: stop(),
            "scale": self._request_scale,
        }
        for fault in faults:
            self._schedule_call(fault.at, self._begin_fault, fault)
        self._schedule_call(faults_end(faults), self._end_schedule)

    def _schedule_call(self, when: float, callback: Callable[..., object], *args: Any) -> None:
        self._simulation.loop.call_at(when, callback, *args, context=Context())

    def _end_schedule(self) -> None:
        if not self._waiting_for_hosts():
            self._traps.clear()
            self._second_kills.clear()
            self._unsaved_kills.clear()
            self._unsynced_kills.clear()
            self._waiting_kills.clear()
            self._calling_kills.clear()
            self._evaluated_kills.clear()
            self._power_failures.clear()
            self._simulation.see_event(FaultsOver)
        else:
            self._schedule_call(self._simulation.loop.now + 1.0, self._end_schedule)

    def _waiting_for_hosts(self) -> bool:
        return any(host.is_lost for host in self._simulation.hosts.values())

    def _begin_fault(self, fault: PlannedFault) -> None:
        self.injected_counts[fault.kind] += 1
        self._simulation.see_event(FaultReported, fault.to_text())
        self._actions[fault.kind](fault)

    def _keep_active(
        self, fault: PlannedFault, after_end: Callable[[], None] = lambda: None
    ) -> None:
        """Keep the fault active until its end; then call `after_end()`."""
        self._active.setdefault(fault.kind, []).append(fault)

        def end_fault() -> None:
            self._active[fault.kind].remove(fault)
            self._simulation.see_event(FaultReported, f"{fault.kind.replace('_', ' ')} is over")
            after_end()

        self._schedule_call(fault.ends_at, end_fault)

    def _max_amount(self, kind: str) -> float:
        return max((fault.amount for fault in self._active.get(kind, ())), default=0.0)

    # -- network -----------------------------------------------------------------------------------

    def _cut_generator(self, fault: PlannedFault) -> None:
        """Cut a generator off from the learner. If it is on another host than the learner,
        calls wait, too."""
        simulation = self._simulation
        process = simulation.find_process(fault.target)
        first, *_ = simulation.hosts.values()
        if process is not None and process.host is not first:
            simulation.cut_hosts(process.host, first, fault.seconds)
        simulation.network.cut_connections(fault.target, "learner", fault.seconds)

    def _half_open_connections(self, fault: PlannedFault) -> None:
        self._simulation.network.half_open_connections(fault.target, ANY_NAME, fault.seconds)

    def _stall_generator(self, fault: PlannedFault) -> None:
        self._simulation.network.stall_connections(fault.target, "learner", fault.seconds)

    def _mute_generator(self, fault: PlannedFault) -> None:
        for other in range(MAX_GENERATORS):
            name = f"generator-{other}"
            if name != fault.target:
                self._simulation.network.stall_connections(fault.target, name, fault.seconds)

    def _is_damaged(self, route: MessagePath, frames: SimulatedFrames) -> bool:
        lasting = self._active.get("damage_weights", ())
        share = max(
            (fault.amount for fault in lasting if fault.target == route.target), default=0.0
        )
        if share and _is_chunk(frames) and self._rng.random() < share:
            return True
        return self._original_damage(route, frames)

    def _draw_delay(self, rng: Random) -> float:
        return (
            self._original_delay(rng) + rng.random() * self._max_amount("delay")
            if self._active.get("delay")
            else self._original_delay(rng)
        )

    def _damage_messages(self, fault: PlannedFault) -> None:
        self._keep_active(fault, self._set_damage)
        self._set_damage()

    def _set_damage(self) -> None:
        self._simulation.network.damage_rate = self._max_amount("damage")

    # -- disk --------------------------------------------------------------------------------------

    def _spoil_disk(self, fault: PlannedFault) -> None:
        self._keep_active(fault, self._set_disk)
        self._set_disk()

    def _set_disk(self) -> None:
        root = RUNS  # weights are in shared memory
        if self._active.get("disk_error"):
            self._disk.refuse_operations(root, errno.EIO)
        elif self._active.get("disk_full"):
            self._disk.refuse_operations(root, errno.ENOSPC)
        else:
            self._disk.allow_operations(root)
        self._disk.short_write_rate = self._max_amount("short_write")
        self._disk.latency = self._max_amount("slow_disk")

    def _fill_memory(self, fault: PlannedFault) -> None:
        memory = self._simulation.memory
        memory[fault.target].refuse_operations(MEMORY_DIRECTORY, errno.ENOSPC)
        self._keep_active(fault, lambda: memory[fault.target].allow_operations(MEMORY_DIRECTORY))

    def _lose_host(self, fault: PlannedFault) -> None:
        simulation = self._simulation
        host = simulation.hosts[fault.target]
        lost = [each for each in simulation.hosts.values() if not each.is_lost]
        simulation.lose_host(host)

        def restore_hosts() -> None:
            for each in lost:
                simulation.restore_host(each)

        self._schedule_call(max(fault.ends_at, simulation.loop.now + fault.seconds), restore_hosts)

    # -- processes ---------------------------------------------------------------------------------

    def _kill_process(self, fault: PlannedFault) -> None:
        process = self._simulation.find_process(fault.target)
        if process is not None:
            self._simulation.end_process(process, "killed")

    def _kill_twice(self, fault: PlannedFault) -> None:
        self._second_kills.append((fault, self._simulation.checker.state.lineage))
        self._kill_process(fault)

    def _react_to_event(self, event: RunEvent) -> None:
        """Act on an observed event, for the faults that wait for one."""
        if isinstance(event, TrajectoriesAcknowledged) and self._unsaved_kills:
            if any(map(self._simulation.checker.state.is_unsaved, event.ids)):
                waited = self._unsaved_kills
                self._unsaved_kills = []
                for fault in waited:
                    self._schedule_call(event.at + fault.amount, self._kill_now, fault)
        elif (
            isinstance(event, EvaluationEnded)
            and event.step > self._simulation.checker.state.safe_steps
        ):
            waited = self._evaluated_kills
            self._evaluated_kills = []
            for fault in waited:
                self._schedule_call(event.at + fault.amount, self._kill_now, fault)
        elif isinstance(event, StepBegan) and self._second_kills:
            self._schedule_second_kill(event)
        elif isinstance(event, GroupsLeased):
            self._kill_leased_generator(event)
        elif isinstance(event, PlayRequested) and event.generator in self._held_processes:
            process = self._simulation.find_process(event.generator)
            held = self._held_processes[event.generator]
            if process is not held:
                del self._held_processes[event.generator]
                for actor, call in held.held_calls:
                    self._schedule_call(event.at, actor.receive_held_call, call)
        elif isinstance(event, LineageBegan) and self._power_failures:
            waited = self._power_failures
            self._power_failures = []
            for fault in waited:
                self._schedule_call(event.at + fault.amount, self._lose_now, fault)

    def _kill_leased_generator(self, event: GroupsLeased) -> None:
        """Begin the faults that wait for this answer to a generator."""
        name = event.generator
        playing = self._simulation.checker.state.is_playing
        for fault in [f for f in self._waiting_kills if f.target == name and not event.leases]:
            if event.free and playing(name):
                self._waiting_kills.remove(fault)
                self._schedule_call(event.at + fault.amount, self._kill_now, fault)
        for fault in [f for f in self._calling_kills if f.target == name and event.leases]:
            process = self._simulation.find_process(name)
            if process is not None:
                self._calling_kills.remove(fault)
                process.holds_calls = True
                self._held_processes[name] = process
                self._schedule_call(
                    event.at + fault.amount, self._simulation.end_process, process, "killed"
                )

    def _wait_for_unsaved(self, fault: PlannedFault) -> None:
        self._unsaved_kills.append(fault)

    def _schedule_second_kill(self, event: StepBegan) -> None:
        begun = [fault for fault, lineage in self._second_kills if event.lineage > lineage]
        self._second_kills = [
            (fault, lineage) for fault, lineage in self._second_kills if event.lineage <= lineage
        ]
        for fault in begun:
            when = event.at + fault.amount
            if when < fault.ends_at:
                self._schedule_call(when, self._kill_now, fault)

    def _kill_now(self, fault: PlannedFault) -> None:
        self._simulation.see_event(FaultReported, f"{fault.to_text()}: now")
        self._kill_process(fault)

    def _lose_now(self, fault: PlannedFault) -> None:
        host = next(iter(self._simulation.hosts))
        self._simulation.see_event(FaultReported, f"{fault.to_text()}: power of {host} fails now")
        self._lose_host(PlannedFault(self._simulation.loop.now, "power", host, 1.0))

    def _fill_descriptors(self, fault: PlannedFault) -> None:
        process = self._simulation.find_process(fault.target)
        if process is not None:
            process.out_of_descriptors = True
            self._simulation.network.cut_connections(fault.target)
            self._keep_active(fault, lambda: setattr(process, "out_of_descriptors", False))

    def _freeze_process(self, fault: PlannedFault) -> None:
        process = self._simulation.find_process(fault.target)
        if process is not None:
            self._simulation.freeze_process(process)
            self._schedule_call(fault.ends_at, self._simulation.thaw_process, process)

    def _end_engine(self, fault: PlannedFault) -> None:
        process = self._simulation.find_process(fault.target)
        generator = (
            process.actor.instance if process is not None and process.actor is not None else None
        )
        if generator is not None and generator._loaded is not None:
            generator._loaded.engine.lose_process()

    def _spoil_environments(
        self, fault: PlannedFault, spoil: Callable[[EnvironmentProcess], object]
    ) -> EnvironmentProcess | None:
        process = self._simulation.find_process(fault.target)
        if process is None:
            return None
        helper = environment_process_of(process)
        spoil(helper)
        return helper

    def _delay_environments(self, fault: PlannedFault) -> None:
        helper = self._spoil_environments(
            fault, lambda helper: setattr(helper, "late", fault.amount)
        )
        if helper:
            self._keep_active(fault, lambda: setattr(helper, "late", 0.0))

    def _set_trap(self, fault: PlannedFault) -> None:
        self._traps.append((fault, Counter()))

    def _before_operation(self, process: Any, operation: str, path: Path) -> None:
        """Trigger the faults that wait for this operation, before the disk performs it."""
        if self._unsynced_kills and operation == "sync" and path.suffix == ".spool":
            self._power_failures = self._unsynced_kills
            self._unsynced_kills = []
            self._simulation.see_event(
                FaultReported,
                f"{self._power_failures[0].to_text()}: {process.name} is killed before it syncs",
            )
            self._simulation.end_process(process, "killed before it synced")
            return
        if operation not in WRITE_OPERATIONS or not self._traps:
            return
        for trap in list(self._traps):
            fault, count = trap
            if not _trap_matches(fault, process.name, operation, path):
                continue
            count["operations"] += 1
            if count["operations"] >= fault.amount:
                self._traps.remove(trap)
                self._simulation.see_event(
                    FaultReported, f"{fault.to_text()}: {process.name}, {operation} {path.name}"
                )
                if fault.kind == "short_put":
                    self._disk.next_write_short = True
                elif fault.kind == "power_writing":
                    self._lose_host(fault)
                elif isinstance(process, HostProcess):
                    self._simulation.end_process(process, "killed while it wrote")
                return

    def _plan_start(self, actor: Any) -> tuple[float, bool]:
        seconds, fails = self._original_start(actor)
        fails = fails or any(
            self._rng.random() < fault.amount for fault in self._active.get("failing_start", ())
        )
        return seconds + self._max_amount("slow_start"), fails

    def _request_scale(self, fault: PlannedFault) -> None:
        """Request a number of generators with a command on the first host. The command fails
        if the disk does."""
        host = next(iter(self._simulation.hosts.values()))
        if host.is_lost:
            return
        self._scale_requests += 1
        process = self._simulation.begin_process("person", host)
        with contextlib.suppress(OSError, ProcessKilled):
            write_scale_request(
                RUNS / "run",
                ScaleRequest(int(fault.amount), f"{self._scale_requests}"),
                files=host.disk.files_for(process),
            )
        self._simulation.end_process(process, "the command has ended")

    def _step_clock(self, fault: PlannedFault) -> None:
        self._simulation.step_clock(self._simulation.hosts[fault.target], fault.amount)


def _is_chunk(frames: SimulatedFrames) -> bool:
    """Return whether the message is a chunk of weights."""
    if len(frames) < 2:
        return False
    try:
        return isinstance(relay.decode_relay_message(frames[0]), relay.Chunk)
    except MalformedError:
        return False


def _trap_matches(fault: PlannedFault, process: str, operation: str, path: Path) -> bool:
    """Return whether a trap counts this operation."""
    if fault.kind == "short_put":
        return operation == "append" and path.suffix == ".spool"
    return fault.kind == "power_writing" or process == fault.target
