"""Small file systems that a scenario fills to the last byte and frees again."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dev.chaos.scenario import ChaosScenario
from r3async.config import ConfigError

TOP_UP_SECONDS = 0.05


@contextmanager
def mount_tmpfs(point: Path, megabytes: int, scenario: str) -> Iterator[Path]:
    """Mount a file system of `megabytes` MB at `point`, and unmount it at the end.

    `scenario` names the scenario in the message of the `ConfigError` that is raised where
    mounting is not allowed.
    """
    point.mkdir(parents=True)
    mounting = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=0700", "tmpfs", str(point)]
    try:
        done = subprocess.run(mounting, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigError(
                f"--scenario {scenario} mounts a file system of {megabytes} MB, which is not "
                f"allowed here ({done.stderr.strip()}): run it as root, or in a namespace of its "
                "own: unshare -rm python -m dev chaos …"
            )
        try:
            yield point
        finally:
            subprocess.run(["umount", "--lazy", str(point)], check=True)
    finally:
        with contextlib.suppress(OSError):
            point.rmdir()


def top_up(descriptor: int) -> None:
    """Write zeros to the file until no byte is free. Raises any `OSError` other than `ENOSPC`."""
    for size in (2**20, 2**12, 1):
        try:
            while True:
                os.write(descriptor, bytes(size))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


class FillingScenario(ChaosScenario):
    """A scenario that fills file systems."""

    def fill_disk(
        self, directory: Path, name: str, is_enough: Callable[[float], bool]
    ) -> tuple[float, float]:
        """Take all free bytes, and those that others free meanwhile, until `is_enough` is true or
        the run is over.

        Args:
            directory: Directory on the file system.
            name: Name of the file system in reports.
            enough: Called with the seconds for which the file system has been full.

        Returns:
            The times from which and until which the file system was full.
        """
        ballast = directory / "ballast"
        began = 0.0
        with ballast.open("ab", buffering=0) as file:
            while not began or not is_enough(time.time() - began):
                top_up(file.fileno())
                if not began:
                    began = time.time()
                    self.fault_counts["disk"] += 1
                    self.print_line(f"chaos: {name} is full, fault {self.fault_counts.total()}")
                if not self.wait_seconds(TOP_UP_SECONDS):
                    break
        ballast.unlink()
        self.print_line(f"chaos: {name} has free bytes again, after {time.time() - began:.1f} s")
        return began, time.time()
