"""The scenarios of `python -m dev chaos`."""

from __future__ import annotations

import contextlib
import operator
import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import psutil

from dev.chaos.filling import Filling, mounted
from dev.chaos.scenario import TAIL, Role, Scenario
from dev.chaos.weights import BlockedLine, FullMemory, Strangers
from r3async.record.reading import read_json_objects
from r3async.record.writer import TRAINED_FILE

# -- kills: processes of every role, one after the other, by `kill -9` --------------------------------------------------

SHARES: dict[Role, int] = {"generator": 4, "environment": 4, "learner": 1, "conductor": 1}
"""Relative share of each role among the kills. Losing a learner or a conductor restarts the whole run, which takes ten
times as long as losing another process."""
STEPS_PER_KILL = 2


def draw_roles(kills: int, rng: random.Random) -> list[Role]:
    """Return the roles to kill, in order. They are not drawn independently: every role gets its share, however few
    kills there are."""
    shares: list[Role] = [role for role, share in SHARES.items() for _ in range(share)]
    rng.shuffle(shares)
    roles = [shares[i % len(shares)] for i in range(kills)]
    rng.shuffle(roles)
    return roles


class Kills(Scenario):
    """Kills spread evenly over the run. Each comes a fixed number of steps after the one before, at least
    `STEPS_PER_KILL`, plus up to a second."""

    def disturb(self) -> None:
        self.roles = self._drawn()
        apart = max(STEPS_PER_KILL, (self.length - TAIL) // (len(self.roles) + 1))
        for number, role in enumerate(self.roles):
            if not self.wait_for_step(1 + apart * number) or not self.wait(self.rng.uniform(0, 1)):
                return
            if not self.kill(role):
                return

    def _drawn(self) -> Sequence[Role]:
        return self.roles or draw_roles(self.faults, self.rng)

    def problems(self) -> list[str]:
        spared = len(self.roles or range(self.faults)) - self.done.total()
        if not spared:
            return []
        return [f"{spared} processes were not killed: the run ended before; steps is too few"]


# -- rewind and first-checkpoint: the run is lost again before it has caught up after the previous loss ----------------

EVERY = 5
"""Steps from one checkpoint to the next."""
LOST: tuple[Role, ...] = ("learner", "conductor")


class Losses(Scenario):
    """A scenario that kills the learner or the conductor, whose loss rolls the run back."""

    settings: ClassVar[Sequence[str]] = (
        f"checkpoint.every_steps={EVERY}",
        f"steps={3 * EVERY + 1}",
        "env.args={ seconds = 0.1 }",
    )

    @classmethod
    def steps(cls, faults: int) -> int:
        return 3 * EVERY + 1

    def lose(self, lineage: int, step: int) -> bool:
        """Kill learner or conductor when `lineage` has trained `step`. Returns False if the run ended before."""
        if not self.wait_for(lambda: self.reached() >= (lineage, step)):
            return False
        return self.kill(self.rng.choice(LOST))

    def reached(self) -> tuple[int, int]:
        """Return lineage and step of the newest trained step; (0, 0) if there is none."""
        return max(
            ((line["lineage"], line["step"]) for line in read_json_objects(self.run_dir / TRAINED_FILE)), default=(0, 0)
        )

    def began(self) -> list[int]:
        """Return for each lineage the step after which it began."""
        return [event["step"] for event in self.events("lineage_began")]


class Rewind(Losses):
    """Two losses between the first checkpoint and the second, and a third one as soon as the second exists.

    So steps and versions are made three times. After the third loss, the numbers of the first two timelines are in the
    spool again, unless something removed them.
    """

    def disturb(self) -> None:
        for lineage in (1, 2):
            if not self.lose(lineage, EVERY + self.rng.randint(2, 3)):
                return
        second = self.run_dir / "checkpoints" / f"step-{2 * EVERY:08d}"
        if self.wait_for(second.is_dir):
            self.kill(self.rng.choice(LOST))

    def problems(self) -> list[str]:
        began = self.began()
        if began == [0, EVERY, EVERY, 2 * EVERY]:
            return []
        return [f"lineages began after steps {began}, and not twice after {EVERY}: kills came too late"]


class FirstCheckpoint(Losses):
    """Two losses before there is any checkpoint: acknowledged trajectories are then in the spool alone."""

    def disturb(self) -> None:
        for lineage in (1, 2):
            if not self.lose(lineage, self.rng.randint(1, 2)):
                return

    def problems(self) -> list[str]:
        adopted = [event for event in self.events("resumed") if not event["checkpoint"]]
        problems = []
        if self.began() != [0, 0, 0]:
            problems.append(f"lineages began after steps {self.began()}, not all with none")
        if not adopted:
            problems.append("nothing of the spool was adopted without a checkpoint")
        return problems


# -- frozen: processes of every role are stopped (SIGSTOP), some for good and some for a while --------------------------

STEPS_PER_FAULT = 2
ASLEEP_SECONDS = 8.0
"""Maximum seconds that a generator which wakes again is stopped: less than `supervise.stall_seconds`."""
NAP_SECONDS = 3.0


class Frozen(Scenario):
    """Six stops of processes, in an order drawn from the seed, `STEPS_PER_FAULT` steps apart.

    An environment, a generator, the learner and the conductor are stopped for good. Another generator, and the learner
    once more, are woken again.
    """

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

    def disturb(self) -> None:
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
        """Stop one process of this role with SIGSTOP. Returns None if the run ended before there was one."""
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
        """Stop a generator, and wake it when it is suspected and training went on without it, or after
        `ASLEEP_SECONDS`."""
        suspected, trained = len(self.events("generator_suspect")), self.trained()
        generator = self.stop("generator")
        until = time.monotonic() + ASLEEP_SECONDS
        self.wait_for(
            lambda: (
                time.monotonic() > until
                or (len(self.events("generator_suspect")) > suspected and self.trained() >= trained + STEPS_PER_FAULT)
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


# -- full-disk: the run's directory is on a file system of 20 MB that is filled up and freed during the run ------------

MEGABYTES = 20
FILLS = 2
STEPS = 60
HELD_SECONDS = (3.0, 5.0)


class FullDisk(Filling):
    """A disk that is full twice, for some seconds. The rows of steps trained meanwhile must be there in the end."""

    settings: ClassVar[Sequence[str]] = (
        # A full spool pauses generators, but here the run must go on training.
        "buffer.durability=memory",
        "routing.trace=all",
    )
    token_seconds = 0.05

    @classmethod
    def steps(cls, faults: int) -> int:
        return STEPS

    @classmethod
    @contextmanager
    def place(cls, root: Path) -> Iterator[Path]:
        """Mount a file system of `MEGABYTES` MB below `root`. Raises `ConfigError` where mounting is not allowed."""
        with mounted(root.absolute() / f"full-disk.{os.getpid()}", MEGABYTES, "full-disk") as point:
            yield point

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.full: list[tuple[float, float]] = []
        """Intervals in which the disk was full, each with begin and end."""

    def disturb(self) -> None:
        for number in range(FILLS):
            if not self.wait_for_step(2 + number * STEPS // 2):
                return
            held_long_enough = partial(operator.le, self.rng.uniform(*HELD_SECONDS))
            self.full.append(self.fill(self.run_dir.parent, "the disk", held_long_enough))

    def problems(self) -> list[str]:
        problems = []
        if len(self.full) != FILLS:
            problems.append(f"the disk was full {len(self.full)} times, not {FILLS}: the run ended before")
        made = [row["time"] for row in read_json_objects(self.run_dir / "metrics.jsonl")]
        for began, ended in self.full:
            if not any(began < at < ended for at in made):
                problems.append(f"no step was made in {ended - began:.1f} s in which the disk was full")
        kept, written, lost = (len(self.events(f"records_{what}")) for what in ("kept", "written", "lost"))
        if not kept or kept != written or lost:
            problems.append(f"{kept} processes kept records in memory, and {written} wrote them later")
        return problems


SCENARIOS: dict[str, type[Scenario]] = {
    "blocked-line": BlockedLine,
    "first-checkpoint": FirstCheckpoint,
    "frozen": Frozen,
    "full-disk": FullDisk,
    "full-memory": FullMemory,
    "kills": Kills,
    "rewind": Rewind,
    "strangers": Strangers,
}
