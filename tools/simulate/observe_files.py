"""The files of a simulated run, watched: what is stored, deleted and fetched, which checkpoint is safe, what was evaluated."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from r3async.checkpoint.directory import EvaluationFile, evaluation_path
from r3async.rollout.scripted import read_weights_key
from r3async.tools.simulate.history import Arrived, Evaluated, Evaluating, Removed, Saved, Stored, Unlinked
from r3async.untrusted import decode_json
from r3async.weights.manifest import WeightError
from r3async.world import File, Files
from r3async.world.disk import FileStat
from r3async.world.files import read_file
from r3async.world.simulated.processes import HostProcess

if TYPE_CHECKING:
    from r3async.tools.simulate.observe import Watched

MEMORY = Path("/memory")
"""A file system in memory, of each host."""
_SPOOL = re.compile(r"(\d{9})-\d+\.spool")
_STEP = re.compile(r"step-(\d{8,})")
_FETCHED = re.compile(r"version-(\d+)-[0-9a-f]{8,}\.safetensors")
"""Where hosts fetch versions to; the learner's own files are named otherwise."""


def weights_in(path: Path, files: Files) -> int:
    """What tells the weights in a file from others; 0 if it has none."""
    try:
        return read_weights_key(path, files)
    except WeightError:
        return 0


class WatchedFiles:
    """See `world.Files`: two file systems of a process, a disk and one in memory. Tells of the spool, of checkpoints that are
    safe, and of weights that were fetched."""

    def __init__(self, files: Files, memory: Files, process: HostProcess, simulation: Watched):
        self._disk, self._memory, self._process, self._simulation = files, memory, process, simulation

    def _of(self, path: Path) -> Files:
        return self._memory if path.is_relative_to(MEMORY) else self._disk

    def shared_name(self, path: Path) -> str:
        """Of a version that was fetched, among all hosts; empty for any other file."""
        return f"{self._process.host.name}: {path.name}" if _FETCHED.fullmatch(path.name) else ""

    def open(self, path: Path, *, create: bool = False, exclusive: bool = False, mode: int = 0o644) -> File:
        file = self._of(path).open(path, create=create, exclusive=exclusive, mode=mode)
        spooled = _spooled(path) if create or exclusive else None
        return WatchedFile(file, self._simulation, int(spooled[1]), path.name) if spooled else file

    def stat(self, path: Path) -> FileStat | None:
        return self._of(path).stat(path)

    def list_names(self, directory: Path) -> list[str]:
        return self._of(directory).list_names(directory)

    def create_directory(self, directory: Path, mode: int = 0o777) -> None:
        self._of(directory).create_directory(directory, mode)

    def make_private_directory(self, directory: Path) -> None:
        self._of(directory).make_private_directory(directory)

    def rename(self, path: Path, new_path: Path) -> None:
        self._of(path).rename(path, new_path)
        if fetched := _FETCHED.fullmatch(new_path.name):
            self._simulation.see(Arrived, self._process.name, int(fetched[1]), weights_in(new_path, self._memory))
        elif new_path.parent.name == "checkpoints" and new_path.suffix == ".json":
            self._see_evaluation(new_path)

    def _see_evaluation(self, path: Path) -> None:
        one = decode_json(read_file(path, files=self._disk), EvaluationFile)
        if path != evaluation_path(path.parent, one.step):
            return
        if not one.is_finished:
            self._simulation.see(Evaluating, one.step)
            return
        tasks, figures = tuple(sorted(map(int, one.result["rewards"]))), one.figures
        self._simulation.see(Evaluated, one.step, tasks, figures["version_min"], figures["version_max"])

    def remove(self, path: Path) -> None:
        spooled = _spooled(path)
        fetched = _FETCHED.fullmatch(path.name)
        there = (spooled or fetched) and self._of(path).stat(path)
        self._of(path).remove(path)
        if spooled and there:
            self._simulation.see(Unlinked, int(spooled[1]), path.name)
        elif there:
            self._simulation.see(Removed, self._process.name, self.shared_name(path))

    def remove_tree(self, path: Path) -> None:
        self._of(path).remove_tree(path)

    def free_bytes(self, path: Path) -> int:
        return self._of(path).free_bytes(path)

    def total_bytes(self, path: Path) -> int:
        return self._of(path).total_bytes(path)

    def fsync_directory(self, directory: Path) -> None:
        self._of(directory).fsync_directory(directory)
        if directory.name == "checkpoints":
            steps = [int(found[1]) for name in self._disk.list_names(directory) if (found := _STEP.fullmatch(name))]
            if steps and max(steps) > self._simulation.checker.known.safe:
                self._simulation.see(Saved, max(steps))


def _spooled(path: Path) -> re.Match[str] | None:
    return _SPOOL.fullmatch(path.name) if path.parent.name == "spool" else None


class WatchedFile:
    """A file of the spool."""

    def __init__(self, file: File, simulation: Watched, group: int, name: str):
        self._file, self._simulation, self._group, self._name = file, simulation, group, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def append(self, buffers: Sequence[Any]) -> int:
        written = self._file.append(buffers)
        self._simulation.see(Stored, self._group, self._name, self._file.size())
        return written

    def __enter__(self) -> WatchedFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()
