"""What every scenario of chaos shares: a thread beside a run, which finds its processes and does something to them."""

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
from r3async.record.writer import TRAINED_FILE

Role = Literal["generator", "learner", "conductor", "environment"]
WAIT_SECONDS = 0.05
TAIL = 8
"""Steps after the last fault, at least."""


class Scenario(threading.Thread, ABC):
    """Does something to the run in `run_dir`. A subclass has `disturb`, which runs in this thread and ends when
    `wait` or `wait_for` says that the run is over.

    `faults`: how many, for a scenario that can have more or fewer. `rng`: of the seed, and of nothing else. `report(text)` is
    called with each fault, for the person who watches. `roles`: whom to hit, in order, in place of what the seed draws. `steps`:
    of the run; by default as many as `steps(faults)`.
    """

    settings: ClassVar[Sequence[str]] = ()
    """Overrides, over those that all scenarios share and under what the person sets."""
    token_seconds: ClassVar[float] = 0.005
    """Of the scripted engine: the run takes longer than what happens to it."""

    def __init__(
        self,
        run_dir: Path,
        faults: int,
        rng: random.Random,
        report: Callable[[str], object],
        roles: Sequence[Role] = (),
        steps: int | None = None,
    ):
        super().__init__(name="chaos", daemon=True)
        self.run_dir, self.faults, self.rng, self.report, self.roles = run_dir, faults, rng, report, roles
        self.length = self.steps(faults) if steps is None else steps
        self.done: Counter[str] = Counter()
        """Faults made so far, by what they hit."""
        self.failure: BaseException | None = None
        self._most = 0
        self._over = threading.Event()

    @classmethod
    def steps(cls, faults: int) -> int:
        """Steps of a run that gives time for so many faults. The last one comes up to a second after its step, and a second is
        several steps."""
        return 2 * (faults + 1) + TAIL

    @classmethod
    def place(cls, root: Path) -> AbstractContextManager[Path]:
        """Where the run's directory is made, when `root` was asked for."""
        return contextlib.nullcontext(root)

    @classmethod
    def settings_in(cls, place: Path) -> Sequence[str]:
        """Further overrides, which name what is there."""
        return ()

    @abstractmethod
    def disturb(self) -> None:
        """What happens to the run, in this thread."""

    def problems(self) -> list[str]:
        """When the run has ended: what of the scenario did not happen as it should have."""
        return []

    # -- the thread ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """When the actors exist: what an earlier run of that name recorded is set aside by then. Idempotent."""
        if not self.ident:
            self.start()

    def run(self) -> None:
        try:
            self.disturb()
        except BaseException as error:
            self.failure = error

    def end(self) -> None:
        """The run has ended. Raises what the thread failed with."""
        self._over.set()
        if self.ident:
            self.join(10)
        if self.failure is not None:
            raise self.failure

    # -- for `disturb` ------------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def wait(self, seconds: float) -> bool:
        """False if the run ended meanwhile."""
        return not self._over.wait(seconds)

    def wait_for(self, what: Callable[[], bool]) -> bool:
        """Until `what()` holds. False if the run ended before."""
        while not what():
            if not self.wait(WAIT_SECONDS):
                return False
        return True

    def wait_for_step(self, step: int) -> bool:
        """Until so many steps were trained. False if the run ended before."""
        return self.wait_for(lambda: self.trained() >= step)

    def trained(self) -> int:
        """Steps trained so far, at the most: what a resume takes back counts as well."""
        self._most = max(self._most, len(read_json_objects(self.run_dir / TRAINED_FILE)))
        return self._most

    def events(self, name: str) -> list[dict[str, Any]]:
        """Of that name, that the run has recorded."""
        return [event for event in read_json_objects(self.run_dir / "events.jsonl") if event["event"] == name]

    def find(self, role: Role) -> psutil.Process | None:
        """A process of that role that lives now, waiting until there is one; None if the run ended before."""
        while not self.over:
            if living := self.living(role):
                return self.rng.choice(living)
            self.wait(WAIT_SECONDS)
        return None

    def living(self, role: Role) -> list[psutil.Process]:
        """Processes of that role that live now."""
        pids = {event["pid"] for event in self.events(f"{'generator' if role == 'environment' else role}_started")}
        living = [p for pid in sorted(pids) if (p := actor_process(pid)) is not None]
        if role == "environment":
            living = [child for p in living for child in environment_workers(p)]
        return living

    def kill(self, role: Role) -> bool:
        """`kill -9` of one process of that role. False if the run ended before there was one."""
        while (victim := self.find(role)) is not None:
            with contextlib.suppress(psutil.Error):
                victim.kill()
                self.done[role] += 1
                self.report(f"chaos: kill -9 of {role} ({victim.pid}), fault {self.done.total()}")
                return True
        return False


def actor_process(pid: int) -> psutil.Process | None:
    """Process ids are used again: only what calls itself a worker of Ray is taken for the one that recorded its start."""
    try:
        process = psutil.Process(pid)
        return process if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::") else None
    except psutil.Error:
        return None


def environment_workers(generator: psutil.Process) -> list[psutil.Process]:
    try:
        return [p for p in generator.children() if any("pool_worker" in part for part in p.cmdline())]
    except psutil.Error:
        return []
