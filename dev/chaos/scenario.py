"""Base class of the chaos scenarios: a thread beside a run, which finds the run's processes
and disturbs them."""

from __future__ import annotations

import contextlib
import random
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Literal

import psutil

from r3async.record.reading import read_json_objects
from r3async.record.trained_trajectories import TRAINED_FILE

Role = Literal["generator", "learner", "conductor", "environment"]
WAIT_SECONDS = 0.05
TAIL_STEPS = 8
"""Minimum number of steps after the last fault."""


class ChaosScenario(threading.Thread, ABC):
    """A thread that disturbs the run in `run_dir`. A subclass implements `disturb_run`, which
    runs in this thread and returns when `wait_seconds` or `wait_for` returns False because
    the run is over.

    Args:
        faults: Number of faults, for a scenario whose number can be chosen.
        rng: Random numbers that depend on the seed alone.
        print_line: Called with a line of text for each fault, for the user who watches.
        roles: Roles to hit, in this order, instead of those drawn from the seed.
        steps: Steps of the run; by default `count_steps(faults)`.
    """

    overrides: ClassVar[Sequence[str]] = ()
    """Overrides of this scenario. They override those that all scenarios share; the user's
    own override them."""
    token_seconds: ClassVar[float] = 0.005
    """Seconds per token of the scripted engine, so that the run takes longer than its faults."""

    def __init__(
        self,
        run_dir: Path,
        faults: int,
        rng: random.Random,
        print_line: Callable[[str], object],
        roles: Sequence[Role] = (),
        steps: int | None = None,
    ):
        super().__init__(name="chaos", daemon=True)
        self.run_dir = run_dir
        self.faults = faults
        self.rng = rng
        self.print_line = print_line
        self.roles = roles
        self.step_count = self.count_steps(faults) if steps is None else steps
        self.fault_counts: Counter[str] = Counter()
        """Faults made so far, by what they hit."""
        self.failure: BaseException | None = None
        self._max_trained = 0
        self._over = threading.Event()

    @classmethod
    def count_steps(cls, faults: int) -> int:
        """Return how many steps a run needs for this number of faults. The last fault comes up to a
        second after its step, and a second is several steps."""
        return 2 * (faults + 1) + TAIL_STEPS

    @classmethod
    def provide_directory(cls, root: Path) -> AbstractContextManager[Path]:
        """Return a context that provides the directory for runs; by default `root`,
        which the user chose."""
        return contextlib.nullcontext(root)

    @classmethod
    def overrides_in(cls, place: Path) -> Sequence[str]:
        """Return further overrides, which name paths in `place`."""
        return ()

    @abstractmethod
    def disturb_run(self) -> None:
        """Disturb the run. Runs in this thread."""

    def find_problems(self) -> list[str]:
        """Return, after the run has ended, what did not happen as the scenario requires."""
        return []

    # -- the thread --------------------------------------------------------------------------------

    def begin_disturbing(self) -> None:
        """Start the thread. Called when the actors exist: by then the records of an earlier run of
        the same name have been set aside. Idempotent."""
        if not self.ident:
            self.start()

    def run(self) -> None:
        try:
            self.disturb_run()
        except BaseException as error:
            self.failure = error

    def stop_disturbing(self) -> None:
        """Stop the thread, because the run has ended. Raises the exception with which
        the thread failed."""
        self._over.set()
        if self.ident:
            self.join(10)
        if self.failure is not None:
            raise self.failure

    # -- for `disturb_run` -------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def wait_seconds(self, seconds: float) -> bool:
        """Wait for `seconds`. Returns False if the run ended meanwhile."""
        return not self._over.wait(seconds)

    def wait_for(self, what: Callable[[], bool]) -> bool:
        """Wait until `what()` is true. Returns False if the run ended before."""
        while not what():
            if not self.wait_seconds(WAIT_SECONDS):
                return False
        return True

    def wait_for_step(self, step: int) -> bool:
        """Wait until `step` steps were trained. Returns False if the run ended before."""
        return self.wait_for(lambda: self.count_trained() >= step)

    def count_trained(self) -> int:
        """Return the maximum number of steps that were trained so far. Steps that a resume rolls
        back count as well."""
        self._max_trained = max(
            self._max_trained, len(read_json_objects(self.run_dir / TRAINED_FILE))
        )
        return self._max_trained

    def read_events(self, name: str) -> list[dict[str, Any]]:
        """Return the recorded events of this name."""
        return [
            event
            for event in read_json_objects(self.run_dir / "events.jsonl")
            if event["event"] == name
        ]

    def find_process(self, role: Role) -> psutil.Process | None:
        """Wait for a live process of this role, and return a random one; None if the
        run ended before."""
        while not self.is_over:
            living = self.live_processes(role)
            if living:
                return self.rng.choice(living)
            self.wait_seconds(WAIT_SECONDS)
        return None

    def live_processes(self, role: Role) -> list[psutil.Process]:
        """Return the live processes of this role."""
        pids = {
            event["pid"]
            for event in self.read_events(
                f"{'generator' if role == 'environment' else role}_started"
            )
        }
        living = [p for pid in sorted(pids) if (p := actor_process(pid)) is not None]
        if role == "environment":
            living = [child for p in living for child in environment_workers(p)]
        return living

    def kill_process(self, role: Role) -> bool:
        """Kill one process of this role with `kill -9`. Returns False if the run ended
        before there was one."""
        while (victim := self.find_process(role)) is not None:
            with contextlib.suppress(psutil.Error):
                victim.kill()
                self.fault_counts[role] += 1
                self.print_line(
                    f"chaos: kill -9 of {role} ({victim.pid}), fault {self.fault_counts.total()}"
                )
                return True
        return False


def actor_process(pid: int) -> psutil.Process | None:
    """Return the actor's process; None if it has ended. Process ids are reused, so a process counts
    only if its command line is that of a Ray worker."""
    try:
        process = psutil.Process(pid)
        return (
            process if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::") else None
        )
    except psutil.Error:
        return None


def environment_workers(generator: psutil.Process) -> list[psutil.Process]:
    try:
        kept = [program for keeper in generator.children() for program in keeper.children()]
        return [
            program for program in kept if any("pool_worker" in part for part in program.cmdline())
        ]
    except psutil.Error:
        return []
