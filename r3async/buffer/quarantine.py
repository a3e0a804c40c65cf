"""Trajectories that will never be trained, kept aside for a person to look at (`r3async inspect runs/NAME/quarantine`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from r3async.buffer.spool_file import append
from r3async.files import make_directory
from r3async.records import Trajectory
from r3async.transport.wire import Frame, WireError, encode_trajectory


class Quarantine:
    """A directory of spool files, one a trajectory, of `limit` bytes together: the oldest make way. One thread at a time.

    Each is named, with its reason, by `report("trajectory_quarantined", **facts)`, also where it could not be kept.
    """

    def __init__(self, directory: Path, limit: int, report: Callable[..., object]):
        self.directory, self._limit, self._report = directory, limit, report

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
        make_directory(self.directory)
        held = sorted((p.stat().st_mtime_ns, p) for p in self.directory.glob("*.spool"))
        number = max([int(p.stem.rpartition("-")[2]) for _, p in held if p.stem[-4:].isdigit()], default=-1) + 1
        path = self.directory / f"{group:09d}-{number:06d}.spool"
        _, size = append(path, frames, fsync=False)
        total = size + sum(p.stat().st_size for _, p in held)
        for _, old in held:
            if total <= self._limit:
                break
            total -= old.stat().st_size
            old.unlink()
        return path
