"""Trajectories that will never be trained, kept aside to be inspected (`r3async inspect runs/NAME/quarantine`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from r3async.data.records import Trajectory
from r3async.schedule.spool import SPOOL
from r3async.transport.wire import Frame, WireError, encode_trajectory
from r3async.world import Files
from r3async.world.files import make_directory
from r3async.world.real import REAL


class Quarantine:
    """A directory of spool files, one a trajectory, of `limit` bytes together: the oldest make way. One thread at a time.

    Each is named, with its reason, by `report("trajectory_quarantined", **facts)`, also where it could not be kept.
    """

    def __init__(self, directory: Path, limit: int, report: Callable[..., object], *, files: Files = REAL.files):
        self.directory, self._limit, self._report, self._files = directory, limit, report, files

    def keep(self, trajectory: Trajectory, reason: str, frames: Sequence[Frame] | None = None) -> None:
        """`frames`: the trajectory as it came, if they are at hand. Blocks for as long as the disk does, and never raises for
        it: what is not kept is only named."""
        path, problem = None, ""
        try:
            path = self._write(trajectory.group_index, encode_trajectory(trajectory) if frames is None else frames)
        except (OSError, WireError) as error:
            problem = str(error)
        self._report(
            "trajectory_quarantined",
            trajectory_id=trajectory.trajectory_id,
            group=trajectory.group_index,
            lineage=trajectory.lineage,
            reason=reason,
            kept_as=str(path) if path else "",
            **({"not_kept": problem} if problem else {}),
        )

    def _write(self, group: int, frames: Sequence[Frame]) -> Path | None:
        size = sum(memoryview(frame).nbytes for frame in frames)
        if size > self._limit:
            return None
        make_directory(self.directory, files=self._files)
        names = [name for name in self._files.list(self.directory) if name.endswith(".spool")]
        found = [
            (stat.modified, name, stat.size) for name in names if (stat := self._files.stat(self.directory / name))
        ]
        numbers = [name.removesuffix(".spool").rpartition("-")[2] for name in names]
        number = max([int(digits) for digits in numbers if digits.isdigit()], default=-1) + 1
        path = self.directory / f"{group:09d}-{number:06d}.spool"
        _, size = SPOOL.append(path, frames, fsync=False, files=self._files)
        total = size + sum(nbytes for _, _, nbytes in found)
        for _, name, nbytes in sorted(found):
            if total <= self._limit:
                break
            total -= nbytes
            self._files.remove(self.directory / name)
        return path
