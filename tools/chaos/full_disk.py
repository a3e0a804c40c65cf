"""The scenario `full-disk`: the run's directory is a file system of 20 MB that is filled up meanwhile, and freed."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from r3async.config import ConfigError
from r3async.record.reading import read_objects
from r3async.tools.chaos.sabotage import Saboteur

MEGABYTES = 20
FILLS = 2
STEPS = 60
HELD_SECONDS = (3.0, 5.0)
TOP_UP_SECONDS = 0.05


class FullDisk(Saboteur):
    """Fills the disk twice, each time for some seconds. Rows of steps that were made meanwhile have to be there in the end."""

    settings: ClassVar[Sequence[str]] = (
        # A full spool pauses generators; here the run has to make steps all the while.
        "buffer.durability=memory",
        "routing.trace=all",
        # Not faster than the disk can be filled and freed.
        "generator.engine_args={ token_seconds = 0.05 }",
    )

    @classmethod
    def steps(cls, faults: int) -> int:
        return STEPS

    @classmethod
    @contextmanager
    def place(cls, root: Path) -> Iterator[Path]:
        """A file system of that size, mounted below `root`. Raises `ConfigError` where that is not allowed."""
        point = root.absolute() / f"full-disk.{os.getpid()}"
        point.mkdir(parents=True)
        mounting = ["mount", "-t", "tmpfs", "-o", f"size={MEGABYTES}m", "tmpfs", str(point)]
        try:
            done = subprocess.run(mounting, capture_output=True, text=True, check=False)
            if done.returncode:
                raise ConfigError(
                    f"--scenario full-disk mounts a file system of {MEGABYTES} MB, which is not allowed here "
                    f"({done.stderr.strip()}): run it as root, or in a namespace of its own: unshare -rm r3async chaos …"
                )
            try:
                yield point
            finally:
                subprocess.run(["umount", "--lazy", str(point)], check=True)
        finally:
            with contextlib.suppress(OSError):
                point.rmdir()

    def sabotage(self) -> None:
        self.full: list[tuple[float, float]] = []
        for number in range(FILLS):
            if not self.wait_for_step(2 + number * STEPS // 2):
                return
            self._fill(self.rng.uniform(*HELD_SECONDS))

    def _fill(self, seconds: float) -> None:
        ballast, began, until = self.run_dir.parent / "ballast", 0.0, 0.0
        with ballast.open("ab", buffering=0) as file:
            while not until or time.time() < until:
                self._top_up(file.fileno())
                if not until:
                    began = time.time()
                    until = began + seconds
                    self.done["disk"] += 1
                    self.report(f"chaos: the disk is full for {seconds:.1f} s, fault {self.done.total()}")
                if not self.wait(TOP_UP_SECONDS):
                    break
        ballast.unlink()
        self.full.append((began, time.time()))
        self.report("chaos: the disk has free bytes again")

    @staticmethod
    def _top_up(descriptor: int) -> None:
        """To the last byte: what others free meanwhile, too."""
        for size in (2**20, 2**12, 1):
            try:
                while True:
                    os.write(descriptor, bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    def problems(self) -> list[str]:
        full = getattr(self, "full", [])
        problems = [f"the disk was full {len(full)} times, not {FILLS}: the run ended before"] * (len(full) != FILLS)
        made = [row["time"] for row in read_objects(self.run_dir / "metrics.jsonl")]
        for began, ended in full:
            if not any(began < at < ended for at in made):
                problems.append(f"no step was made in {ended - began:.1f} s in which the disk was full")
        events = [e["event"] for e in read_objects(self.run_dir / "events.jsonl")]
        kept, written = events.count("records_kept"), events.count("records_written")
        if not kept or kept != written or "records_lost" in events:
            problems.append(f"{kept} processes kept records in memory, and {written} wrote them later")
        return problems
