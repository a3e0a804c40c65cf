"""The scenario `frozen`: processes of every role are stopped (SIGSTOP), some for good and some for a while."""

from __future__ import annotations

import contextlib
import time
from typing import Any, ClassVar

import psutil

from r3async.record.reading import read_objects
from r3async.tools.chaos.sabotage import Role, Saboteur

STEPS_PER_FAULT = 2
ASLEEP_SECONDS = 8.0
"""At most, of one that wakes again: less than `supervise.stall_seconds`."""
NAP_SECONDS = 3.0


class Frozen(Saboteur):
    """In an order of the seed: an environment, a generator, the learner and the conductor stop for good; another generator, and
    the learner once more, wake again. Each when `STEPS_PER_FAULT` more steps were trained than at the one before."""

    settings: ClassVar = (
        "supervise.on_stall=restart",
        "supervise.stall_seconds=20",
        "supervise.silence_seconds=1",
        "supervise.stop_grace_seconds=5",
        "env.step_timeout=5",
    )

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.stopped: dict[psutil.Process, Role] = {}

    @classmethod
    def steps(cls, faults: int) -> int:
        return STEPS_PER_FAULT * 7

    planned = 6

    def sabotage(self) -> None:
        acts = [
            lambda: self.stop("environment"),
            lambda: self.stop("generator"),
            self.generator_that_wakes,
            lambda: self.stop("learner"),
            self.learner_that_wakes,
            lambda: self.stop("conductor"),
        ]
        assert len(acts) == self.planned
        self.rng.shuffle(acts)
        for number, act in enumerate(acts):
            if not self.wait_for_step(1 + STEPS_PER_FAULT * number):
                return
            act()

    def stop(self, role: Role) -> psutil.Process | None:
        """None if the run ended before there was one."""
        while (victim := self.find(role)) is not None:
            with contextlib.suppress(psutil.Error):
                if victim.status() == psutil.STATUS_STOPPED:
                    self.wait(0.05)
                    continue
                victim.suspend()
                self.stopped[victim] = role
                self.done[role] += 1
                self.report(f"chaos: SIGSTOP of {role} ({victim.pid}), fault {self.done.total()}")
                return victim
        return None

    def generator_that_wakes(self) -> None:
        """When others have trained on without it, as far as it goes."""
        suspected, trained = self._count("generator_suspect"), self.trained()
        generator = self.stop("generator")
        until = time.monotonic() + ASLEEP_SECONDS
        self.wait_for(
            lambda: (
                time.monotonic() > until
                or (self._count("generator_suspect") > suspected and self.trained() >= trained + STEPS_PER_FAULT)
            )
        )
        self._wake("generator", generator)

    def learner_that_wakes(self) -> None:
        learner = self.stop("learner")
        self.wait(NAP_SECONDS)
        self._wake("learner", learner)

    def problems(self) -> list[str]:
        problems = []
        if self.done.total() < self.planned:
            problems.append(f"{self.planned - self.done.total()} processes were not stopped: the run ended before")
        for process, role in self.stopped.items():
            with contextlib.suppress(psutil.Error):
                if process.is_running() and process.status() == psutil.STATUS_STOPPED:
                    process.kill()
                    problems.append(f"the {role} ({process.pid}) was stopped and outlived the run")
        return problems

    def _wake(self, role: Role, process: psutil.Process | None) -> None:
        if process is not None:
            with contextlib.suppress(psutil.Error):
                process.resume()
                self.report(f"chaos: {role} ({process.pid}) wakes")

    def _count(self, event: str) -> int:
        return sum(e["event"] == event for e in read_objects(self.run_dir / "events.jsonl"))
