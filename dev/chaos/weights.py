"""Scenarios in which the transfer of weights fails in one place. Each generator is on its own host
(`ChaosGenerator`)."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import psutil

from dev.chaos.crowd import ConnectionCounts
from dev.chaos.filling import FillingScenario, mount_tmpfs
from dev.chaos.scenario import ChaosScenario
from r3async.config.supervise import TIME_LIMITS
from r3async.record.reading import read_json_objects
from r3async.world.zmq_sockets import HANDSHAKE_TIMEOUT_MS, MAX_NEW_PEERS

PATIENCE = 0.1
INSTALL_SECONDS = TIME_LIMITS.base_install * PATIENCE
RUN_STEPS = 60
MAX_RESTARTS = 6
"""Maximum number of restarts of one generator, so that a generator that is lost again and
again is detected."""
SEPARATE_HOSTS: tuple[str, ...] = (
    "weights.backend=tcp",
    f"supervise.patience={PATIENCE}",
    f"generator.max_restarts={MAX_RESTARTS}",
    "supervise.on_stall=restart",
)


class WeightsScenario(ChaosScenario):
    """Base class of the scenarios about weights."""

    overrides: ClassVar[Sequence[str]] = SEPARATE_HOSTS
    token_seconds = 0.1

    @classmethod
    def count_steps(cls, faults: int) -> int:
        return RUN_STEPS

    def events_of(self, event: str, generator_id: str) -> list[dict[str, Any]]:
        """Return the recorded events of this name about one generator."""
        return [e for e in self.read_events(event) if e.get("generator") == generator_id]

    def expect_event(self, event: str, generator_id: str) -> Callable[[], bool]:
        """Return a function that tells whether there is one more such event than now."""
        before = len(self.events_of(event, generator_id))
        return lambda: len(self.events_of(event, generator_id)) > before

    def count_steps_between(self, began: float, ended: float) -> int:
        """Return how many steps were made between two times."""
        return sum(
            began < row["time"] < ended for row in read_json_objects(self.run_dir / "metrics.jsonl")
        )


# -- blocked-line: the connection over which one generator fetches weights is blocked --------------


class BlockedLine(WeightsScenario):
    """A connection for weights that is blocked for twice the time that an installation may take,
    while Ray's works.

    The generator is restarted until the connection works again; the others go on training.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.victim = f"generator-{self.rng.randrange(3)}"
        self.blocked_interval: tuple[float, float] | None = None

    def disturb_run(self) -> None:
        from dev.chaos.actors import blocking_file

        if not self.wait_for_step(3):
            return
        barrier = blocking_file(self.run_dir, self.victim)
        began = time.time()
        barrier.touch()
        self.fault_counts["line"] += 1
        self.print_line(
            f"chaos: the weights of {self.victim} are blocked, fault {self.fault_counts.total()}"
        )
        self.wait_seconds(2 * INSTALL_SECONDS)
        restarted = self.expect_event("generator_restarted", self.victim)
        barrier.unlink()
        self.blocked_interval = began, time.time()
        self.print_line(f"chaos: the weights of {self.victim} pass again")
        self.wait_for(restarted)

    def find_problems(self) -> list[str]:
        if self.blocked_interval is None or not self.events_of("generator_restarted", self.victim):
            return [
                "the run ended before the blocked generator had weights again: steps is too few"
            ]
        problems = []
        failed = self.read_events("install_failed")
        if {event["generator"] for event in failed} != {self.victim}:
            problems.append(
                f"{len(failed)} installations failed, and not of {self.victim} alone: {failed[:3]}"
            )
        elif not all("supervise.patience" in event["error"] for event in failed):
            problems.append(f"installations failed by something else than time: {failed[:3]}")
        if not self.count_steps_between(*self.blocked_interval):
            problems.append("no step was made while one generator's weights were blocked")
        if self.read_events("generator_excluded"):
            problems.append("a generator was excluded, though its line was open again")
        return problems


# -- full-memory: the file systems with the weights of the learner and of one generator are
# full for a while ---

MEMORY_MEGABYTES = 64
FULL_GENERATOR = "generator-1"
"""The generator whose file system is filled."""
FULL_SECONDS = (3.0, 5.0)


class FullMemory(WeightsScenario, FillingScenario):
    """A full file system for weights: first the learner's, then that of one generator.

    While the learner's is full, the run waits. The generator whose file system is full is lost; the
    others go on training, and its next process waits for free bytes.
    """

    @classmethod
    @contextmanager
    def provide_directory(cls, root: Path) -> Iterator[Path]:
        """Mount two small file systems in a directory for the run. Raises `ConfigError` where
        that is not allowed."""
        point = root.absolute() / f"full-memory.{os.getpid()}"
        learners = cls._learner_memory(point)
        with contextlib.ExitStack() as stack:
            for memory in (learners, learners.with_name(FULL_GENERATOR)):
                stack.enter_context(mount_tmpfs(memory, MEMORY_MEGABYTES, "full-memory"))
            yield point

    @classmethod
    def overrides_in(cls, place: Path) -> Sequence[str]:
        return [f"weights.directory={cls._learner_memory(place)}"]

    @staticmethod
    def _learner_memory(place: Path) -> Path:
        """Return the learner's directory for weights."""
        return place / "memory" / "learner"

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.full_intervals: list[tuple[float, float]] = []

    def disturb_run(self) -> None:
        if not self.wait_for_step(2):
            return
        memory = self._learner_memory(self.run_dir.parent)
        seconds = self.rng.uniform(*FULL_SECONDS)
        self.full_intervals.append(
            self.fill_disk(
                memory, "the learner's memory", self._full_for(self._learner_waits, seconds)
            )
        )
        if not self.wait_for_step(self.count_trained() + 3):
            return
        restarted = self.expect_event("generator_restarted", FULL_GENERATOR)
        memory = memory.with_name(FULL_GENERATOR)
        seconds = self.rng.uniform(*FULL_SECONDS)
        self.full_intervals.append(
            self.fill_disk(
                memory,
                f"the memory of {FULL_GENERATOR}",
                self._full_for(self._next_process_waits, seconds),
            )
        )
        self.wait_for(restarted)

    def _learner_waits(self) -> bool:
        return any("directory" in event for event in self.read_events("weights_stalled"))

    def _next_process_waits(self) -> bool:
        """Return whether the generator's next process has met the same fault as the
        one that was lost."""
        return len(self.events_of("weights_stalled", FULL_GENERATOR)) >= 2

    @staticmethod
    def _full_for(happened: Callable[[], bool], seconds: float) -> Callable[[float], bool]:
        """Return an `is_enough` for `fill_disk` that is true `seconds` after
        `happened()` was first true."""
        since: list[float] = []

        def is_enough(full_for: float) -> bool:
            if not since and happened():
                since.append(full_for)
            return bool(since) and full_for - since[0] >= seconds

        return is_enough

    def find_problems(self) -> list[str]:
        if len(self.full_intervals) != 2 or not self.events_of(
            "generator_restarted", FULL_GENERATOR
        ):
            return ["the run ended before both memories were full and free again: steps is too few"]
        problems = []
        events_by_name = {
            name: self.read_events(f"weights_{name}") for name in ("stalled", "go_on")
        }
        for name, events in events_by_name.items():
            if {event.get("generator", "learner") for event in events} != {
                "learner",
                FULL_GENERATOR,
            }:
                problems.append(
                    f"weights_{name} was not told of the learner and of {FULL_GENERATOR}, and of "
                    f"nobody else: {events}"
                )
        if {event["generator"] for event in self.read_events("generator_lost")} != {FULL_GENERATOR}:
            problems.append(f"{FULL_GENERATOR} was not lost, or others were")
        if not self.count_steps_between(*self.full_intervals[1]):
            problems.append("no step was made while one generator's memory was full")
        if self.read_events("generator_excluded"):
            problems.append("a generator was excluded, though its memory was free again")
        return problems


# -- strangers: thousands of connections without keys to both ports of the learner -----------------

STRANGER_COUNT = 3000
MAX_DESCRIPTORS = 1024
"""Maximum number of the learner's file descriptors, a common system limit. All strangers together
would exhaust it."""
MIN_STAY_SECONDS = 2.5 * HANDSHAKE_TIMEOUT_MS / 1000
"""Minimum seconds that the strangers stay."""
STEPS_MEANWHILE = 8
LONG_PATIENCE = 0.5
"""An installation may take 60 s here: a peer that reconnects waits among the strangers, for
about up to two handshake timeouts."""
MAX_ACCEPTED_AT_ONCE = 400
"""Maximum number of connections that one port accepts before it is closed. Measured beside vLLM
on two cores: 306."""


class CrowdOfStrangers(WeightsScenario):
    """Strangers that are connected while weights are written and fetched, and reconnect
    when they are disconnected. A generator is killed meanwhile: its next process must be
    let in beside them."""

    overrides: ClassVar[Sequence[str]] = (
        *SEPARATE_HOSTS,
        f"supervise.patience={LONG_PATIENCE}",
    )

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.connection_counts: ConnectionCounts | None = None
        self.stay_interval: tuple[float, float] = 0.0, 0.0
        self.descriptors_before = self.max_descriptors = 0
        """The learner's file descriptors before the strangers came, and their maximum
        number afterwards."""

    def disturb_run(self) -> None:
        from dev.chaos.actors import LearnerAddresses, addresses_file

        if not self.wait_for_step(2) or (learner := self.find_process("learner")) is None:
            return
        _, hard = resource.prlimit(learner.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(learner.pid, resource.RLIMIT_NOFILE, (MAX_DESCRIPTORS, hard))
        ports = msgspec.json.decode(
            addresses_file(self.run_dir, "generator-0").read_bytes(), type=LearnerAddresses
        )
        addresses = [
            address.removeprefix("tcp://") for address in (ports.trajectories, ports.weights)
        ]
        self.descriptors_before, began, first = learner.num_fds(), time.time(), self.count_trained()
        command = [sys.executable, "-m", "dev.chaos.crowd", str(STRANGER_COUNT), *addresses]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as crowd:
            self.fault_counts["strangers"] += STRANGER_COUNT
            self.print_line(f"chaos: {STRANGER_COUNT} strangers come to {', '.join(addresses)}")
            if not self.wait_seconds(HANDSHAKE_TIMEOUT_MS / 1000) or not self.kill_process(
                "generator"
            ):
                return

            def is_enough() -> bool:
                with contextlib.suppress(psutil.Error):
                    self.max_descriptors = max(self.max_descriptors, learner.num_fds())
                trained = self.count_trained() >= first + STEPS_MEANWHILE
                return (
                    time.time() - began > MIN_STAY_SECONDS
                    and trained
                    and bool(self.read_events("generator_restarted"))
                )

            self.wait_for(is_enough)
            output, _ = crowd.communicate(timeout=30)
        self.connection_counts = msgspec.json.decode(output, type=ConnectionCounts)
        self.stay_interval = began, time.time()
        self.print_line(
            f"chaos: they go after {time.time() - began:.1f} s: {self.connection_counts}"
        )

    def find_problems(self) -> list[str]:
        if self.connection_counts is None:
            return ["the run ended before the strangers had gone: steps is too few"]
        problems = []
        if not self.connection_counts.turned_out:
            problems.append(f"no stranger was turned out: {self.connection_counts}")
        allowed = 2 * (MAX_NEW_PEERS + MAX_ACCEPTED_AT_ONCE)
        if self.max_descriptors - self.descriptors_before > allowed:
            problems.append(
                f"the learner had {self.max_descriptors - self.descriptors_before} more "
                f"descriptors than before, above {allowed}"
            )
        last = max(read_json_objects(self.run_dir / "metrics.jsonl"), key=lambda row: row["step"])
        for port in ("transport", "weights"):
            if not last[f"{port}/strangers"]:
                problems.append(f"{port}/strangers counts none")
        if self.count_steps_between(*self.stay_interval) < STEPS_MEANWHILE:
            problems.append(
                f"fewer than {STEPS_MEANWHILE} steps were made while the strangers were there"
            )
        if not any(
            e["time"] < self.stay_interval[1] for e in self.read_events("generator_restarted")
        ):
            problems.append(
                "the generator that was killed did not get in while the strangers were there"
            )
        trouble = [
            e["event"]
            for name in ("weights_stalled", "install_failed", "stalled")
            for e in self.read_events(name)
        ]
        if trouble:
            problems.append(f"the strangers disturbed the run: {trouble}")
        return problems
