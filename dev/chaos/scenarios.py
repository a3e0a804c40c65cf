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

from dev.chaos.filling import FillingScenario, mount_tmpfs
from dev.chaos.scenario import TAIL_STEPS, ChaosScenario, Role
from dev.chaos.weights import BlockedLine, CrowdOfStrangers, FullMemory
from r3async.record.reading import read_json_objects
from r3async.record.trained_trajectories import TRAINED_FILE

# -- kills: processes of every role, one after the other, by `kill -9` -----------------------------

ROLE_SHARES: dict[Role, int] = {"generator": 4, "environment": 4, "learner": 1, "conductor": 1}
"""Relative share of each role among the kills. Losing a learner or a conductor restarts the whole
run, which takes ten times as long as losing another process."""
STEPS_PER_KILL = 2


def draw_roles(kills: int, rng: random.Random) -> list[Role]:
    """Return the roles to kill, in order. They are not drawn independently: every role gets its
    share, however few kills there are."""
    shares: list[Role] = [role for role, share in ROLE_SHARES.items() for _ in range(share)]
    rng.shuffle(shares)
    roles = [shares[i % len(shares)] for i in range(kills)]
    rng.shuffle(roles)
    return roles


class SpreadKills(ChaosScenario):
    """Kills spread evenly over the run. Each comes a fixed number of steps after the one before, at
    least `STEPS_PER_KILL`, plus up to a second."""

    def disturb_run(self) -> None:
        self.roles = self._chosen_roles()
        step_distance = max(STEPS_PER_KILL, (self.step_count - TAIL_STEPS) // (len(self.roles) + 1))
        for number, role in enumerate(self.roles):
            if not self.wait_for_step(1 + step_distance * number) or not self.wait_seconds(
                self.rng.uniform(0, 1)
            ):
                return
            if not self.kill_process(role):
                return

    def _chosen_roles(self) -> Sequence[Role]:
        return self.roles or draw_roles(self.faults, self.rng)

    def find_problems(self) -> list[str]:
        spared = len(self.roles or range(self.faults)) - self.fault_counts.total()
        if not spared:
            return []
        return [f"{spared} processes were not killed: the run ended before; steps is too few"]


# -- rewind and first-checkpoint: the run is lost again before it has caught up after the
# previous loss ---

CHECKPOINT_STEPS = 5
"""Steps from one checkpoint to the next."""
RESTARTING_ROLES: tuple[Role, ...] = ("learner", "conductor")


class RunLosses(ChaosScenario):
    """A scenario that kills the learner or the conductor, whose loss rolls the run back."""

    overrides: ClassVar[Sequence[str]] = (
        f"checkpoint.every_steps={CHECKPOINT_STEPS}",
        f"steps={3 * CHECKPOINT_STEPS + 1}",
        "env.args={ seconds = 0.1 }",
    )

    @classmethod
    def count_steps(cls, faults: int) -> int:
        return 3 * CHECKPOINT_STEPS + 1

    def lose_run(self, lineage: int, step: int) -> bool:
        """Kill learner or conductor when `lineage` has trained `step`. Returns False if the
        run ended before."""
        if not self.wait_for(lambda: self.newest_trained() >= (lineage, step)):
            return False
        return self.kill_process(self.rng.choice(RESTARTING_ROLES))

    def newest_trained(self) -> tuple[int, int]:
        """Return lineage and step of the newest trained step; (0, 0) if there is none."""
        return max(
            (
                (line["lineage"], line["step"])
                for line in read_json_objects(self.run_dir / TRAINED_FILE)
            ),
            default=(0, 0),
        )

    def lineage_start_steps(self) -> list[int]:
        """Return for each lineage the step after which it began."""
        return [event["step"] for event in self.read_events("lineage_began")]


class RepeatedRewind(RunLosses):
    """Two losses between the first checkpoint and the second, and a third one as soon as
    the second exists.

    So steps and versions are made three times. After the third loss, the numbers of the first two
    timelines are in the spool again, unless something removed them.
    """

    def disturb_run(self) -> None:
        for lineage in (1, 2):
            if not self.lose_run(lineage, CHECKPOINT_STEPS + self.rng.randint(2, 3)):
                return
        second = self.run_dir / "checkpoints" / f"step-{2 * CHECKPOINT_STEPS:08d}"
        if self.wait_for(second.is_dir):
            self.kill_process(self.rng.choice(RESTARTING_ROLES))

    def find_problems(self) -> list[str]:
        began = self.lineage_start_steps()
        if began == [0, CHECKPOINT_STEPS, CHECKPOINT_STEPS, 2 * CHECKPOINT_STEPS]:
            return []
        return [
            (
                f"lineages began after steps {began}, and not twice after {CHECKPOINT_STEPS}: "
                "kills came too late"
            )
        ]


class FirstCheckpoint(RunLosses):
    """Two losses before there is any checkpoint: acknowledged trajectories are then in
    the spool alone."""

    def disturb_run(self) -> None:
        for lineage in (1, 2):
            if not self.lose_run(lineage, self.rng.randint(1, 2)):
                return

    def find_problems(self) -> list[str]:
        adopted = [event for event in self.read_events("resumed") if not event["checkpoint"]]
        problems = []
        if self.lineage_start_steps() != [0, 0, 0]:
            problems.append(
                f"lineages began after steps {self.lineage_start_steps()}, not all with none"
            )
        if not adopted:
            problems.append("nothing of the spool was adopted without a checkpoint")
        return problems


# -- frozen: processes of every role are stopped (SIGSTOP), some for good and some for a while -----

STEPS_PER_FAULT = 2
MAX_SLEEP_SECONDS = 8.0
"""Maximum seconds that a generator which wakes again is stopped: less than
`supervise.stall_seconds`."""
NAP_SECONDS = 3.0


class FrozenProcesses(ChaosScenario):
    """Six stops of processes, in an order drawn from the seed, `STEPS_PER_FAULT` steps apart.

    An environment, a generator, the learner and the conductor are stopped for good. Another
    generator, and the learner once more, are woken again.
    """

    overrides: ClassVar = (
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
    def count_steps(cls, faults: int) -> int:
        return STEPS_PER_FAULT * 7

    planned_stops = 6

    def disturb_run(self) -> None:
        acts = [
            lambda: self.stop_process("environment"),
            lambda: self.stop_process("generator"),
            self.stop_and_wake_generator,
            lambda: self.stop_process("learner"),
            self.stop_and_wake_learner,
            lambda: self.stop_process("conductor"),
        ]
        assert len(acts) == self.planned_stops
        self.rng.shuffle(acts)
        for number, act in enumerate(acts):
            if not self.wait_for_step(1 + STEPS_PER_FAULT * number):
                return
            act()

    def stop_process(self, role: Role) -> psutil.Process | None:
        """Stop one process of this role with SIGSTOP. Returns None if the run ended
        before there was one."""
        while (victim := self.find_process(role)) is not None:
            with contextlib.suppress(psutil.Error):
                if victim.status() == psutil.STATUS_STOPPED:
                    self.wait_seconds(0.05)
                    continue
                victim.suspend()
                self.stopped[victim] = role
                self.fault_counts[role] += 1
                self.print_line(
                    f"chaos: SIGSTOP of {role} ({victim.pid}), fault {self.fault_counts.total()}"
                )
                return victim
        return None

    def stop_and_wake_generator(self) -> None:
        """Stop a generator, and wake it when it is suspected and training went on without it, or
        after `ASLEEP_SECONDS`."""
        suspected, trained = len(self.read_events("generator_suspect")), self.count_trained()
        generator = self.stop_process("generator")
        until = time.monotonic() + MAX_SLEEP_SECONDS
        self.wait_for(
            lambda: (
                time.monotonic() > until
                or (
                    len(self.read_events("generator_suspect")) > suspected
                    and self.count_trained() >= trained + STEPS_PER_FAULT
                )
            )
        )
        self._wake_process("generator", generator)

    def stop_and_wake_learner(self) -> None:
        learner = self.stop_process("learner")
        self.wait_seconds(NAP_SECONDS)
        self._wake_process("learner", learner)

    def find_problems(self) -> list[str]:
        problems = []
        if self.fault_counts.total() < self.planned_stops:
            problems.append(
                f"{self.planned_stops - self.fault_counts.total()} processes were not stopped: the "
                "run ended before"
            )
        for process, role in self.stopped.items():
            with contextlib.suppress(psutil.Error):
                if process.is_running() and process.status() == psutil.STATUS_STOPPED:
                    process.kill()
                    problems.append(f"the {role} ({process.pid}) was stopped and outlived the run")
        return problems

    def _wake_process(self, role: Role, process: psutil.Process | None) -> None:
        if process is not None:
            with contextlib.suppress(psutil.Error):
                process.resume()
                self.print_line(f"chaos: {role} ({process.pid}) wakes")


# -- full-disk: the run's directory is on a file system of 20 MB that is filled up and freed
# during the run ---

DISK_MEGABYTES = 20
FILL_COUNT = 2
DISK_RUN_STEPS = 60
FULL_SECONDS = (3.0, 5.0)


class FullDisk(FillingScenario):
    """A disk that is full twice, for some seconds. The rows of steps trained meanwhile must be
    there in the end."""

    overrides: ClassVar[Sequence[str]] = (
        # A full spool pauses generators, but here the run must go on training.
        "buffer.durability=memory",
        "routing.trace=all",
    )
    token_seconds = 0.05

    @classmethod
    def count_steps(cls, faults: int) -> int:
        return DISK_RUN_STEPS

    @classmethod
    @contextmanager
    def provide_directory(cls, root: Path) -> Iterator[Path]:
        """Mount a file system of `MEGABYTES` MB below `root`. Raises `ConfigError` where
        mounting is not allowed."""
        with mount_tmpfs(
            root.absolute() / f"full-disk.{os.getpid()}", DISK_MEGABYTES, "full-disk"
        ) as point:
            yield point

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.full_intervals: list[tuple[float, float]] = []
        """Intervals in which the disk was full, each with begin and end."""

    def disturb_run(self) -> None:
        for number in range(FILL_COUNT):
            if not self.wait_for_step(2 + number * DISK_RUN_STEPS // 2):
                return
            held_long_enough = partial(operator.le, self.rng.uniform(*FULL_SECONDS))
            self.full_intervals.append(
                self.fill_disk(self.run_dir.parent, "the disk", held_long_enough)
            )

    def find_problems(self) -> list[str]:
        problems = []
        if len(self.full_intervals) != FILL_COUNT:
            problems.append(
                f"the disk was full {len(self.full_intervals)} times, not {FILL_COUNT}: the "
                "run ended before"
            )
        step_times = [row["time"] for row in read_json_objects(self.run_dir / "metrics.jsonl")]
        for began, ended in self.full_intervals:
            if not any(began < at < ended for at in step_times):
                problems.append(
                    f"no step was made in {ended - began:.1f} s in which the disk was full"
                )
        kept, written, lost = (
            len(self.read_events(f"records_{what}")) for what in ("kept", "written", "lost")
        )
        if not kept or kept != written or lost:
            problems.append(
                f"{kept} processes kept records in memory, and {written} wrote them later"
            )
        return problems


SCENARIOS: dict[str, type[ChaosScenario]] = {
    "blocked-line": BlockedLine,
    "first-checkpoint": FirstCheckpoint,
    "frozen": FrozenProcesses,
    "full-disk": FullDisk,
    "full-memory": FullMemory,
    "kills": SpreadKills,
    "rewind": RepeatedRewind,
    "strangers": CrowdOfStrangers,
}
