"""A simulated disk, and a process as that disk sees one."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from dev.simulation.disk import SimulatedDisk, SimulatedFiles


class Ended(BaseException):
    pass


class Process:
    """A process as the simulated disk sees one."""

    name = "learner"
    out_of_descriptors = False

    def __init__(self) -> None:
        self.ended, self.disk_seconds = False, 0.0
        self._at_end: list[Callable[[], None]] = []

    def raise_if_ended(self) -> None:
        if self.ended:
            raise Ended

    def add_end_callback(self, callback: Callable[[], None]) -> None:
        self._at_end.append(callback)

    def end(self) -> None:
        self.ended = True
        for callback in self._at_end:
            callback()


def disk_and_files(seed: int = 0, **options: Any) -> tuple[SimulatedDisk, SimulatedFiles]:
    disk = SimulatedDisk(Random(seed), **options)
    files = disk.files_for(Process())
    files.create_directory(Path("/run"))
    files.fsync_directory(Path("/"))
    return disk, files


def write(files: SimulatedFiles, path: Path, data: bytes) -> None:
    with files.open(path, create=True) as file:
        file.append([data])


def read(files: SimulatedFiles, path: Path) -> bytes | None:
    if files.stat(path) is None:
        return None
    with files.open(path) as file:
        return file.read()
