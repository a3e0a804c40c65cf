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

from dev.chaos.crowd import Seen
from dev.chaos.filling import Filling, mounted
from dev.chaos.scenario import Scenario
from r3async.record.reading import read_json_objects
from r3async.world.sockets import HANDSHAKE_TIMEOUT_MS, MAX_NEW_PEERS

INSTALL_SECONDS = 8.0
STEPS = 60
FEW_RESTARTS = 6
"""Maximum number of restarts of one generator, so that a generator that is lost again and again is detected."""
APART: tuple[str, ...] = (
    "weights.backend=tcp",
    f"weights.install_timeout={INSTALL_SECONDS}",
    f"generator.max_restarts={FEW_RESTARTS}",
    "supervise.on_stall=restart",
)


class InTrouble(Scenario):
    """Base class of the scenarios about weights."""

    settings: ClassVar[Sequence[str]] = APART
    token_seconds = 0.1

    @classmethod
    def steps(cls, faults: int) -> int:
        return STEPS

    def of(self, event: str, generator_id: str) -> list[dict[str, Any]]:
        """Return the recorded events of this name about one generator."""
        return [e for e in self.events(event) if e.get("generator") == generator_id]

    def one_more(self, event: str, generator_id: str) -> Callable[[], bool]:
        """Return a function that tells whether there is one more such event than now."""
        before = len(self.of(event, generator_id))
        return lambda: len(self.of(event, generator_id)) > before

    def made_between(self, began: float, ended: float) -> int:
        """Return how many steps were made between two times."""
        return sum(began < row["time"] < ended for row in read_json_objects(self.run_dir / "metrics.jsonl"))


# -- blocked-line: the connection over which one generator fetches weights is blocked ----------------------------------


class BlockedLine(InTrouble):
    """A connection for weights that is blocked for twice the time that an installation may take, while Ray's works.

    The generator is restarted until the connection works again; the others go on training.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.victim = f"generator-{self.rng.randrange(3)}"
        self.blocked: tuple[float, float] | None = None

    def disturb(self) -> None:
        from dev.chaos.actors import blocked_line

        if not self.wait_for_step(3):
            return
        barrier, began = blocked_line(self.run_dir, self.victim), time.time()
        barrier.touch()
        self.done["line"] += 1
        self.report(f"chaos: the weights of {self.victim} are blocked, fault {self.done.total()}")
        self.wait(2 * INSTALL_SECONDS)
        restarted = self.one_more("generator_restarted", self.victim)
        barrier.unlink()
        self.blocked = began, time.time()
        self.report(f"chaos: the weights of {self.victim} pass again")
        self.wait_for(restarted)

    def problems(self) -> list[str]:
        if self.blocked is None or not self.of("generator_restarted", self.victim):
            return ["the run ended before the blocked generator had weights again: steps is too few"]
        problems = []
        failed = self.events("install_failed")
        if {event["generator"] for event in failed} != {self.victim}:
            problems.append(f"{len(failed)} installations failed, and not of {self.victim} alone: {failed[:3]}")
        elif not all("weights.install_timeout" in event["error"] for event in failed):
            problems.append(f"installations failed by something else than time: {failed[:3]}")
        if not self.made_between(*self.blocked):
            problems.append("no step was made while one generator's weights were blocked")
        if self.events("generator_excluded"):
            problems.append("a generator was excluded, though its line was open again")
        return problems


# -- full-memory: the file systems with the weights of the learner and of one generator are full for a while -----------

MEGABYTES = 64
FULL = "generator-1"
"""The generator whose file system is filled."""
HELD_SECONDS = (3.0, 5.0)


class FullMemory(InTrouble, Filling):
    """A full file system for weights: first the learner's, then that of one generator.

    While the learner's is full, the run waits. The generator whose file system is full is lost; the others go on
    training, and its next process waits for free bytes.
    """

    @classmethod
    @contextmanager
    def place(cls, root: Path) -> Iterator[Path]:
        """Mount two small file systems in a directory for the run. Raises `ConfigError` where that is not allowed."""
        point = root.absolute() / f"full-memory.{os.getpid()}"
        learners = cls._memory(point)
        with contextlib.ExitStack() as stack:
            for memory in (learners, learners.with_name(FULL)):
                stack.enter_context(mounted(memory, MEGABYTES, "full-memory"))
            yield point

    @classmethod
    def settings_in(cls, place: Path) -> Sequence[str]:
        return [f"weights.directory={cls._memory(place)}"]

    @staticmethod
    def _memory(place: Path) -> Path:
        """Return the learner's directory for weights."""
        return place / "memory" / "learner"

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.full: list[tuple[float, float]] = []

    def disturb(self) -> None:
        if not self.wait_for_step(2):
            return
        memory, seconds = self._memory(self.run_dir.parent), self.rng.uniform(*HELD_SECONDS)
        self.full.append(self.fill(memory, "the learner's memory", self._held(self._learner_waits, seconds)))
        if not self.wait_for_step(self.trained() + 3):
            return
        restarted = self.one_more("generator_restarted", FULL)
        memory, seconds = memory.with_name(FULL), self.rng.uniform(*HELD_SECONDS)
        self.full.append(self.fill(memory, f"the memory of {FULL}", self._held(self._next_waits, seconds)))
        self.wait_for(restarted)

    def _learner_waits(self) -> bool:
        return any("directory" in event for event in self.events("weights_stalled"))

    def _next_waits(self) -> bool:
        """Return whether the generator's next process has met the same fault as the one that was lost."""
        return len(self.of("weights_stalled", FULL)) >= 2

    @staticmethod
    def _held(happened: Callable[[], bool], seconds: float) -> Callable[[float], bool]:
        """Return an `enough` for `fill` that is true `seconds` after `happened()` was first true."""
        since: list[float] = []

        def enough(full_for: float) -> bool:
            if not since and happened():
                since.append(full_for)
            return bool(since) and full_for - since[0] >= seconds

        return enough

    def problems(self) -> list[str]:
        if len(self.full) != 2 or not self.of("generator_restarted", FULL):
            return ["the run ended before both memories were full and free again: steps is too few"]
        problems = []
        told = {name: self.events(f"weights_{name}") for name in ("stalled", "go_on")}
        for name, events in told.items():
            if {event.get("generator", "learner") for event in events} != {"learner", FULL}:
                problems.append(
                    f"weights_{name} was not told of the learner and of {FULL}, and of nobody else: {events}"
                )
        if {event["generator"] for event in self.events("generator_lost")} != {FULL}:
            problems.append(f"{FULL} was not lost, or others were")
        if not self.made_between(*self.full[1]):
            problems.append("no step was made while one generator's memory was full")
        if self.events("generator_excluded"):
            problems.append("a generator was excluded, though its memory was free again")
        return problems


# -- strangers: thousands of connections without keys to both ports of the learner -------------------------------------

COUNT = 3000
DESCRIPTORS = 1024
"""Maximum number of the learner's file descriptors, a common system limit. All strangers together would exhaust it."""
CALM_SECONDS = 2.5 * HANDSHAKE_TIMEOUT_MS / 1000
"""Minimum seconds that the strangers stay."""
STEPS_MEANWHILE = 8
PATIENT_SECONDS = 60.0
"""Seconds that an installation may take here: a peer that reconnects waits among the strangers, for about up to two
handshake timeouts."""
AT_ONCE = 400
"""Maximum number of connections that one port accepts before it is closed. Measured beside vLLM on two cores: 306."""


class Strangers(InTrouble):
    """Strangers that are connected while weights are written and fetched, and reconnect when they are disconnected. A
    generator is killed meanwhile: its next process must be let in beside them."""

    settings: ClassVar[Sequence[str]] = (*APART, f"weights.install_timeout={PATIENT_SECONDS}")

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.seen: Seen | None = None
        self.while_there: tuple[float, float] = 0.0, 0.0
        self.before = self.most = 0
        """The learner's file descriptors before the strangers came, and their maximum number afterwards."""

    def disturb(self) -> None:
        from dev.chaos.actors import Ports, ports_file

        if not self.wait_for_step(2) or (learner := self.find("learner")) is None:
            return
        _, hard = resource.prlimit(learner.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(learner.pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, hard))
        ports = msgspec.json.decode(ports_file(self.run_dir, "generator-0").read_bytes(), type=Ports)
        addresses = [address.removeprefix("tcp://") for address in (ports.trajectories, ports.weights)]
        self.before, began, first = learner.num_fds(), time.time(), self.trained()
        command = [sys.executable, "-m", "dev.chaos.crowd", str(COUNT), *addresses]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as crowd:
            self.done["strangers"] += COUNT
            self.report(f"chaos: {COUNT} strangers come to {', '.join(addresses)}")
            if not self.wait(HANDSHAKE_TIMEOUT_MS / 1000) or not self.kill("generator"):
                return

            def enough() -> bool:
                with contextlib.suppress(psutil.Error):
                    self.most = max(self.most, learner.num_fds())
                trained = self.trained() >= first + STEPS_MEANWHILE
                return time.time() - began > CALM_SECONDS and trained and bool(self.events("generator_restarted"))

            self.wait_for(enough)
            told, _ = crowd.communicate(timeout=30)
        self.seen, self.while_there = msgspec.json.decode(told, type=Seen), (began, time.time())
        self.report(f"chaos: they go after {time.time() - began:.1f} s: {self.seen}")

    def problems(self) -> list[str]:
        if self.seen is None:
            return ["the run ended before the strangers had gone: steps is too few"]
        problems = []
        if not self.seen.turned_out:
            problems.append(f"no stranger was turned out: {self.seen}")
        allowed = 2 * (MAX_NEW_PEERS + AT_ONCE)
        if self.most - self.before > allowed:
            problems.append(f"the learner had {self.most - self.before} more descriptors than before, above {allowed}")
        last = max(read_json_objects(self.run_dir / "metrics.jsonl"), key=lambda row: row["step"])
        for port in ("transport", "weights"):
            if not last[f"{port}/strangers"]:
                problems.append(f"{port}/strangers counts none")
        if self.made_between(*self.while_there) < STEPS_MEANWHILE:
            problems.append(f"fewer than {STEPS_MEANWHILE} steps were made while the strangers were there")
        if not any(e["time"] < self.while_there[1] for e in self.events("generator_restarted")):
            problems.append("the generator that was killed did not get in while the strangers were there")
        trouble = [e["event"] for name in ("weights_stalled", "install_failed", "stalled") for e in self.events(name)]
        if trouble:
            problems.append(f"the strangers disturbed the run: {trouble}")
        return problems
