"""Accepted trajectories on disk, in the wire format, from before they are acknowledged until a checkpoint has trained them.

A directory of files `GROUP-N.spool` (`container.py` has the format). A file belongs to one group, so that what is trained
goes with one `unlink`, and to one incarnation of the spool (`N`), which alone appends to it: what a killed one left
half-written stays at the end of its file and harms nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r3async.config import BufferConfig
from r3async.data.container import Container, Record, Torn, map_file
from r3async.data.records import SCHEMA, Schema, Trajectory
from r3async.transport.wire import Frame, WireError, decode_trajectory, decoded_bytes
from r3async.world import World
from r3async.world.disk_waits import RETRY_SECONDS, DiskWait
from r3async.world.files import make_directory
from r3async.world.real import REAL

_NAME = re.compile(r"(\d{9,})-(\d{4,})\.spool")


@dataclass(frozen=True, slots=True)
class Damage:
    """A place in a spool file that holds no trajectory: one that was being written when the process ended, or a defect."""

    path: Path
    offset: int
    reason: str


class Spool:
    """Owns `directory`. `put` is durable when it returns: against the loss of any process always (the kernel has the
    bytes), against power loss with `settings.fsync`.

    All work on files is done in one thread. `report(event, **facts)` is called, on the event loop, when the disk cannot
    take more, and when it can again; nothing is lost in between, `put` waits. `aside(trajectory, reason, frames)` is given, in
    the spool's thread, what `remove` takes out. Methods belong to the event loop's thread.
    """

    def __init__(
        self,
        directory: Path,
        settings: BufferConfig,
        *,
        schema: Schema = SCHEMA,
        report: Callable[..., None] = lambda event, **facts: None,
        aside: Callable[[Trajectory, str, Sequence[Frame]], object] = lambda trajectory, reason, frames: None,
        world: World = REAL,
        retry_seconds: float = RETRY_SECONDS,
    ):
        self.directory = directory
        self.memory_bytes = settings.memory_bytes
        self.nbytes = 0
        """Bytes on disk."""
        self.damage: list[Damage] = []
        """What `recover` found that is not a trajectory."""
        self._settings = settings
        self._schema = schema
        self._report = report
        self._aside = aside
        self._disk = world.files
        self._disk_wait = DiskWait(
            world, report, "spool_stalled", "spool_goes_on", retry_seconds=retry_seconds, directory=str(directory)
        )
        self._files: dict[int, dict[Path, int]] = {}
        self._new: dict[int, tuple[Path, int]] = {}
        """By group: the file that this incarnation appends to, and the length of its whole records."""
        self._full = False
        self._lane = world.threads.lane("spool")

    @property
    def groups(self) -> list[int]:
        """Those that it has something of."""
        return list(self._files)

    @property
    def free_bytes(self) -> int:
        """Bytes that may still be granted. Negative if groups that could not wait went beyond `disk_bytes`."""
        return self._settings.disk_bytes - self.nbytes

    @property
    def stalled_seconds(self) -> float:
        """How long writing waited for space, or for a device that failed."""
        return self._disk_wait.seconds

    @property
    def waits(self) -> dict[str, Any] | None:
        """Why nothing is acknowledged, or not all of it, and for how many `seconds`: the disk takes nothing, or `disk_bytes` are
        used up until a checkpoint is committed (`full`). None while it is not so."""
        if (waits := self._disk_wait.waits) is not None:
            return {**waits, "full": False}
        return {"why": "buffer.disk_bytes are used", "seconds": 0.0, "full": True} if self._full else None

    def note_waiting(self, waiting: bool) -> None:
        """Whether senders wait because of `free_bytes`: reported when it begins and when it ends."""
        if waiting == self._full:
            return
        self._full = waiting
        facts = {"bytes": self.nbytes, "directory": str(self.directory)}
        if waiting:
            hint = "generators wait until a checkpoint is committed: raise buffer.disk_bytes, or save more often"
            self._report("spool_full", **facts, disk_bytes=self._settings.disk_bytes, hint=hint)
        else:
            self._report("spool_has_room", **facts)

    async def recover(self) -> list[Stored]:
        """Everything that an earlier incarnation left, validated, in the order of groups; `damage` has the rest.

        A trajectory that was written twice (its first acknowledgement came too late) comes once. With `settings.fsync`, what is
        found is durable: the process that wrote it may have ended before it was. A file that the disk does not give is no
        damage: it is tried again until it does.
        """
        hint = "nothing starts until it can be read: mend the disk, or move the file aside to continue without what it holds"
        found, self._files, self.damage = await self._disk_wait.insist(hint, self._lane.run, self._scan)
        self._new = {}
        self.nbytes = sum(size for files in self._files.values() for size in files.values())
        for damage in self.damage:
            self._report("spool_damaged", path=str(damage.path), offset=damage.offset, reason=damage.reason)
        return found

    async def put(self, trajectory: Trajectory, frames: Sequence[Frame], *, spill: bool) -> Stored | None:
        """Write a trajectory. Returns when it is durable; with `spill`, as it is mapped back, so that its frames can go.

        A disk that is full, or fails, is tried again until it takes it.
        """
        hint = "make space there: senders wait until then, and nothing is lost"
        group = trajectory.group_index
        known, data = self._known(group), list(frames)
        path, offset, length = await self._disk_wait.insist(hint, self._lane.run, self._write, group, known, data)
        self.nbytes += length
        files = self._files.setdefault(group, {})
        files[path] = files.get(path, 0) + length
        return await self._lane.run(self._map, path, offset, length) if spill else None

    async def commit(self, groups: Iterable[int]) -> int:
        """A checkpoint that has trained these groups is committed: delete them. Returns the bytes that are free again.

        What is mapped of them stays readable. Groups that are not there are skipped. A disk that does not allow it is reported,
        and they stay among the `groups`.
        """
        over = [group for group in groups if group in self._files]
        try:
            await self._lane.run(self._unlink, {group: self._known(group) for group in over})
        except OSError as error:
            self._report("spool_not_cleaned", groups=over, error=str(error))
            return 0
        freed = sum(sum(self._files.pop(group, {}).values()) for group in over)
        self.nbytes -= freed
        return freed

    async def remove(self, refused: Mapping[tuple[int, str], str]) -> int:
        """Take out trajectories, by group and id, that will never be trained, each for its reason; what else their files hold
        stays. Returns the bytes that are free again. A disk that does not allow it is reported, and they stay until the
        next start."""
        freed = 0
        for group in sorted({group for group, _ in refused}):
            reasons = {name: reason for (of, name), reason in refused.items() if of == group}
            try:
                files = await self._lane.run(self._rewrite, group, self._known(group), reasons)
            except OSError as error:
                self._report("spool_not_cleaned", group=group, trajectories=sorted(reasons), error=str(error))
                continue
            freed += sum(self._files.pop(group, {}).values()) - sum(files.values())
            if files:
                self._files[group] = files
        self.nbytes -= freed
        return freed

    def _known(self, group: int) -> list[Path]:
        return list(self._files.get(group, ()))

    async def close(self) -> None:
        """Finish what is being written. The files stay. Idempotent."""
        await self._lane.close()

    # What follows runs in the spool's thread.

    def _write(self, group: int, known: list[Path], frames: Sequence[Frame]) -> tuple[Path, int, int]:
        if group not in self._new:
            make_directory(self.directory, files=self._disk)
            self._new[group] = self._next(group, known), 0
        path, size = self._new[group]  # what a failed write left there is cut off first
        offset, length = SPOOL.append(path, frames, fsync=self._settings.fsync, at=size, files=self._disk)
        if not size and self._settings.fsync:
            self._disk.sync_directory(self.directory)
        self._new[group] = path, offset + length
        return path, offset, length

    def _map(self, path: Path, offset: int, length: int) -> Stored:
        record = next(SPOOL.records(map_file(path, offset, length, files=self._disk)))
        assert isinstance(record, Record)
        return load(record, self._schema)

    def _unlink(self, groups: Mapping[int, list[Path]]) -> None:
        old = [path for group, known in groups.items() for path in self._of_group(group, known)]
        for group in groups:
            self._new.pop(group, None)
        for path in old:
            self._disk.remove(path)
        if old and self._settings.fsync:
            self._disk.sync_directory(self.directory)

    def _next(self, group: int, known: list[Path]) -> Path:
        numbers = [int(p.stem.partition("-")[2]) for p in self._of_group(group, known)]
        return self.directory / f"{group:09d}-{max(numbers, default=-1) + 1:04d}.spool"

    def _rewrite(self, group: int, known: list[Path], reasons: Mapping[str, str]) -> dict[Path, int]:
        """The group's files as one, without those that `reasons` names. A process that ends here leaves both; what is there twice
        comes once. Returns the new file and its size, if it holds anything."""
        old, path = self._of_group(group, known), self._next(group, known)
        dropped: list[tuple[Trajectory, str, Record]] = []
        size = 0
        try:
            for record in (
                r for file in old for r in SPOOL.records(map_file(file, files=self._disk)) if isinstance(r, Record)
            ):
                try:
                    trajectory = load(record, self._schema).trajectory
                except WireError:  # damaged, and reported
                    continue
                if trajectory.trajectory_id in reasons:
                    dropped.append((trajectory, reasons[trajectory.trajectory_id], record))
                else:
                    size += SPOOL.append(path, record.frames, fsync=self._settings.fsync, files=self._disk)[1]
            if self._settings.fsync and old:
                self._disk.sync_directory(self.directory)
        except OSError:
            self._disk.remove(path)
            raise
        for trajectory, reason, record in dropped:
            self._aside(trajectory, reason, record.frames)
        for file in old:
            self._disk.remove(file)
        if self._settings.fsync and old:
            self._disk.sync_directory(self.directory)
        self._new.pop(group, None)
        if size:
            self._new[group] = path, size
        return {path: size} if size else {}

    def _of_group(self, group: int, known: list[Path]) -> list[Path]:
        """The `known` files, and the one that is being written: a first write that failed is known to nobody else."""
        return sorted({*known, self._new[group][0]} if group in self._new else known)

    def _scan(self) -> tuple[list[Stored], dict[int, dict[Path, int]], list[Damage]]:
        found: dict[tuple[int, str], Stored] = {}
        files: dict[int, dict[Path, int]] = {}
        damage: list[Damage] = []
        for path in [self.directory / name for name in self._disk.list(self.directory) if name.endswith(".spool")]:
            if (named := _NAME.fullmatch(path.name)) is None:
                damage.append(Damage(path, 0, "not a file of the spool"))
                continue
            group, view = int(named[1]), map_file(path, files=self._disk)
            files.setdefault(group, {})[path] = len(view)
            for record in SPOOL.records(view):
                if isinstance(record, Torn):
                    damage.append(Damage(path, record.offset, record.reason))
                    continue
                try:
                    stored = load(record, self._schema)
                    if stored.trajectory.group_index != group:
                        raise WireError(f"a trajectory of group {stored.trajectory.group_index}, not {group}")
                except WireError as error:
                    damage.append(Damage(path, record.offset, str(error)))
                else:
                    # The last: one before it may be of steps that a resume took back, and was refused then.
                    found[group, stored.trajectory.trajectory_id] = stored
        if self._settings.fsync and self._disk.stat(self.directory) is not None:
            for path in [path for paths in files.values() for path in paths]:
                with self._disk.open(path) as file:
                    file.sync()
            self._disk.sync_directory(self.directory)
            self._disk.sync_directory(self.directory.parent)
        return list(found.values()), files, damage


SPOOL = Container(b"r3spool1")


@dataclass(frozen=True, slots=True)
class Stored:
    """A trajectory whose columns are mapped from disk. `nbytes`: what it takes in memory all the same."""

    trajectory: Trajectory
    nbytes: int


def load(record: Record, schema: Schema) -> Stored:
    """The trajectory of a record, on the mapped file. Raises `WireError`."""
    trajectory = decode_trajectory(record.frames, schema)
    mapped = sum(frame.nbytes for frame in record.frames[1:])
    return Stored(trajectory, decoded_bytes(record.frames, trajectory) - mapped)
