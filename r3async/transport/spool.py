"""The spool of accepted trajectories on disk, in the wire format, from before they are acknowledged
until a checkpoint has trained them.

It is a directory of files `GROUP-N.spool` (`container.py` has the format). A file belongs to one
group, so that one `unlink` removes what is trained, and to one incarnation of the spool (`N`),
which alone appends to it: a record that a killed incarnation left half-written stays at the end of
its file and does no harm.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r3async.config import BufferConfig
from r3async.data.container import FramedRecord, RecordFormat, TornRecord, map_file
from r3async.data.tokens import SCHEMA, TokenSchema, Trajectory
from r3async.data.wire import decode_trajectory, decoded_bytes
from r3async.data.wire_frames import Frame, WireError
from r3async.world import EventReporter, World, ignore_event
from r3async.world.disk_retries import RETRY_SECONDS, DiskRetrier
from r3async.world.files import make_directory
from r3async.world.real import REAL_WORLD

_FILE_NAME = re.compile(r"(\d{9,})-(\d{4,})\.spool")


@dataclass(frozen=True, slots=True)
class SpoolDamage:
    """A place in a spool file that holds no trajectory: one that was being written when the process
    ended, or a defect."""

    path: Path
    offset: int
    reason: str


class Spool:
    """The owner of the spool `directory`. When `put_trajectory` returns, the trajectory is durable:
    always against the loss of any process (the kernel has the bytes), and against power loss with
    `settings.fsync`.

    All work on files is done in one thread. Nothing is lost while the disk cannot take more:
    `put_trajectory` waits. Methods belong to the event loop's thread.

    Args:
        report_event: `report_event(event, **facts)` is called, on the event loop, when the disk
            cannot take more, and when it can again.
        quarantine: `quarantine(trajectory, reason, frames)` gets, in the spool's thread, what
            `remove_trajectories` takes out.
    """

    def __init__(
        self,
        directory: Path,
        settings: BufferConfig,
        *,
        schema: TokenSchema = SCHEMA,
        report_event: EventReporter = ignore_event,
        quarantine: Callable[
            [Trajectory, str, Sequence[Frame]], object
        ] = lambda trajectory, reason, frames: None,
        world: World = REAL_WORLD,
        retry_seconds: float = RETRY_SECONDS,
    ):
        self.directory = directory
        self.memory_bytes = settings.memory_bytes
        self.nbytes = 0
        """Bytes on disk."""
        self.damages: list[SpoolDamage] = []
        """Places without a trajectory that `recover_trajectories` found."""
        self._settings = settings
        self._schema = schema
        self._report_event = report_event
        self._quarantine = quarantine
        self._disk = world.files
        self._disk_wait = DiskRetrier(
            world,
            report_event,
            "spool_stalled",
            "spool_goes_on",
            retry_seconds=retry_seconds,
            directory=str(directory),
        )
        self._files_by_group: dict[int, dict[Path, int]] = {}
        self._open_files: dict[int, tuple[Path, int]] = {}
        """File that this incarnation appends to, and the length of its whole records, by group."""
        self._is_full = False
        self._lane = world.threads.new_worker("spool")

    @property
    def groups(self) -> list[int]:
        """The groups of which the spool has trajectories."""
        return list(self._files_by_group)

    @property
    def free_bytes(self) -> int:
        """The bytes that may still be granted. Negative if groups that could not wait
        exceeded `disk_bytes`."""
        return self._settings.disk_bytes - self.nbytes

    @property
    def stalled_seconds(self) -> float:
        """The seconds that writing waited for space, or for a device that failed."""
        return self._disk_wait.waited_seconds

    @property
    def wait_state(self) -> dict[str, Any] | None:
        """The reason why nothing, or not everything, is acknowledged, and for how many `seconds`:
        the disk takes nothing, or `disk_bytes` are used up until a checkpoint is committed
        (`full`). None otherwise."""
        waits = self._disk_wait.current_wait
        if waits is not None:
            return {**waits, "full": False}
        return (
            {"why": "buffer.disk_bytes are used", "seconds": 0.0, "full": True}
            if self._is_full
            else None
        )

    def set_waiting(self, waiting: bool) -> None:
        """Set whether senders wait because of `free_bytes`. The beginning and the end of such a
        wait are reported."""
        if waiting == self._is_full:
            return
        self._is_full = waiting
        facts = {"bytes": self.nbytes, "directory": str(self.directory)}
        if waiting:
            hint = (
                "generators wait until a checkpoint is committed: raise buffer.disk_bytes, "
                "or save more often"
            )
            self._report_event(
                "spool_full", **facts, disk_bytes=self._settings.disk_bytes, hint=hint
            )
        else:
            self._report_event("spool_has_room", **facts)

    async def recover_trajectories(self) -> list[StoredTrajectory]:
        """Return everything that earlier incarnations left, validated, in the order of groups;
        `damages` has the rest.

        A trajectory that was written twice (its first acknowledgement came too late) is returned
        once. With `settings.fsync`, what is found is durable: the process that wrote it may have
        ended before it was. A file that the disk fails to return is not damaged: reading is retried
        until it succeeds.
        """
        hint = (
            "nothing starts until it can be read: mend the disk, or move the file aside to "
            "continue without what it holds"
        )
        found, self._files_by_group, self.damages = await self._disk_wait.run_with_retries(
            hint, self._lane.run, self._scan_directory
        )
        self._open_files = {}
        self.nbytes = sum(
            size for files in self._files_by_group.values() for size in files.values()
        )
        for damage in self.damages:
            self._report_event(
                "spool_damaged", path=str(damage.path), offset=damage.offset, reason=damage.reason
            )
        return found

    async def put_trajectory(
        self, trajectory: Trajectory, frames: Sequence[Frame], *, spill: bool
    ) -> StoredTrajectory | None:
        """Write a trajectory, and return when it is durable. With `spill`, return it mapped from
        the file, so that its frames can be freed.

        A write to a disk that is full, or fails, is retried until it succeeds.
        """
        hint = "make space there: senders wait until then, and nothing is lost"
        group = trajectory.group_index
        known = self._list_files(group)
        data = list(frames)
        path, offset, length = await self._disk_wait.run_with_retries(
            hint, self._lane.run, self._append_record, group, known, data
        )
        self.nbytes += length
        files = self._files_by_group.setdefault(group, {})
        files[path] = files.get(path, 0) + length
        return await self._lane.run(self._map_record, path, offset, length) if spill else None

    async def delete_trained(self, groups: Iterable[int]) -> int:
        """Delete groups that a committed checkpoint has trained. Returns the bytes
        that are free again.

        Mapped trajectories of them stay readable. Groups that are not there are skipped. If the
        disk does not allow it, this is reported, and they stay among the `groups`.
        """
        over = [group for group in groups if group in self._files_by_group]
        try:
            await self._lane.run(
                self._delete_files, {group: self._list_files(group) for group in over}
            )
        except OSError as error:
            self._report_event("spool_not_cleaned", groups=over, error=str(error))
            return 0
        freed = sum(sum(self._files_by_group.pop(group, {}).values()) for group in over)
        self.nbytes -= freed
        return freed

    async def remove_trajectories(self, rejected: Mapping[tuple[int, str], str]) -> int:
        """Remove trajectories that will never be trained; whatever else their files hold stays.
        Returns the bytes that are free again.

        If the disk does not allow it, this is reported, and they stay until the next start.

        Args:
            rejected: The reason for each trajectory, by group and id.
        """
        freed = 0
        for group in sorted({group for group, _ in rejected}):
            reasons = {name: reason for (of, name), reason in rejected.items() if of == group}
            try:
                files = await self._lane.run(
                    self._rewrite_group, group, self._list_files(group), reasons
                )
            except OSError as error:
                self._report_event(
                    "spool_not_cleaned", group=group, trajectories=sorted(reasons), error=str(error)
                )
                continue
            freed += sum(self._files_by_group.pop(group, {}).values()) - sum(files.values())
            if files:
                self._files_by_group[group] = files
        self.nbytes -= freed
        return freed

    def _list_files(self, group: int) -> list[Path]:
        return list(self._files_by_group.get(group, ()))

    async def close(self) -> None:
        """Finish what is being written. The files stay. Idempotent."""
        await self._lane.close()

    # The methods below run in the spool's thread.

    def _append_record(
        self, group: int, known: list[Path], frames: Sequence[Frame]
    ) -> tuple[Path, int, int]:
        if group not in self._open_files:
            make_directory(self.directory, files=self._disk)
            self._open_files[group] = self._next_path(group, known), 0
        path, size = self._open_files[group]  # remains of a failed write are cut off first
        offset, length = SPOOL_FORMAT.append_record(
            path, frames, fsync=self._settings.fsync, valid_bytes=size, files=self._disk
        )
        if not size and self._settings.fsync:
            self._disk.fsync_directory(self.directory)
        self._open_files[group] = path, offset + length
        return path, offset, length

    def _map_record(self, path: Path, offset: int, length: int) -> StoredTrajectory:
        record = next(SPOOL_FORMAT.iter_records(map_file(path, offset, length, files=self._disk)))
        assert isinstance(record, FramedRecord)
        return load_record(record, self._schema)

    def _delete_files(self, groups: Mapping[int, list[Path]]) -> None:
        old = [
            path for group, known in groups.items() for path in self._list_all_files(group, known)
        ]
        for group in groups:
            self._open_files.pop(group, None)
        for path in old:
            self._disk.remove(path)
        if old and self._settings.fsync:
            self._disk.fsync_directory(self.directory)

    def _next_path(self, group: int, known: list[Path]) -> Path:
        numbers = [int(p.stem.partition("-")[2]) for p in self._list_all_files(group, known)]
        return self.directory / f"{group:09d}-{max(numbers, default=-1) + 1:04d}.spool"

    def _rewrite_group(
        self, group: int, known: list[Path], reasons: Mapping[str, str]
    ) -> dict[Path, int]:
        """Rewrite the group's files as one, without the trajectories in `reasons`. Returns the new
        file and its size, if it holds anything.

        If the process ends here, both old and new files remain; a trajectory that is there twice
        is returned once.
        """
        old = self._list_all_files(group, known)
        path = self._next_path(group, known)
        dropped: list[tuple[Trajectory, str, FramedRecord]] = []
        size = 0
        try:
            for record in (
                r
                for file in old
                for r in SPOOL_FORMAT.iter_records(map_file(file, files=self._disk))
                if isinstance(r, FramedRecord)
            ):
                try:
                    trajectory = load_record(record, self._schema).trajectory
                except WireError:  # damage that is reported already
                    continue
                if trajectory.trajectory_id in reasons:
                    dropped.append((trajectory, reasons[trajectory.trajectory_id], record))
                else:
                    size += SPOOL_FORMAT.append_record(
                        path, record.frames, fsync=self._settings.fsync, files=self._disk
                    )[1]
            if self._settings.fsync and old:
                self._disk.fsync_directory(self.directory)
        except OSError:
            self._disk.remove(path)
            raise
        for trajectory, reason, record in dropped:
            self._quarantine(trajectory, reason, record.frames)
        for file in old:
            self._disk.remove(file)
        if self._settings.fsync and old:
            self._disk.fsync_directory(self.directory)
        self._open_files.pop(group, None)
        if size:
            self._open_files[group] = path, size
        return {path: size} if size else {}

    def _list_all_files(self, group: int, known: list[Path]) -> list[Path]:
        """Return the `known` files and the one that is being written: a file whose first write
        failed is known only here."""
        return sorted({*known, self._open_files[group][0]} if group in self._open_files else known)

    def _scan_directory(
        self,
    ) -> tuple[list[StoredTrajectory], dict[int, dict[Path, int]], list[SpoolDamage]]:
        found: dict[tuple[int, str], StoredTrajectory] = {}
        files: dict[int, dict[Path, int]] = {}
        damage: list[SpoolDamage] = []
        for path in [
            self.directory / name
            for name in self._disk.list_names(self.directory)
            if name.endswith(".spool")
        ]:
            named = _FILE_NAME.fullmatch(path.name)
            if named is None:
                damage.append(SpoolDamage(path, 0, "not a file of the spool"))
                continue
            group = int(named[1])
            view = map_file(path, files=self._disk)
            files.setdefault(group, {})[path] = len(view)
            for record in SPOOL_FORMAT.iter_records(view):
                if isinstance(record, TornRecord):
                    damage.append(SpoolDamage(path, record.offset, record.reason))
                    continue
                try:
                    stored = load_record(record, self._schema)
                    if stored.trajectory.group_index != group:
                        raise WireError(
                            f"a trajectory of group {stored.trajectory.group_index}, not {group}"
                        )
                except WireError as error:
                    damage.append(SpoolDamage(path, record.offset, str(error)))
                else:
                    # Keep the last one: an earlier one may be of steps that a resume took back, and
                    # was refused then.
                    found[group, stored.trajectory.trajectory_id] = stored
        if self._settings.fsync and self._disk.stat(self.directory) is not None:
            for path in [path for paths in files.values() for path in paths]:
                with self._disk.open(path) as file:
                    file.fsync()
            self._disk.fsync_directory(self.directory)
            self._disk.fsync_directory(self.directory.parent)
        return list(found.values()), files, damage


SPOOL_FORMAT = RecordFormat(b"r3spool1")


@dataclass(frozen=True, slots=True)
class StoredTrajectory:
    """A trajectory whose columns are mapped from disk; `nbytes` is the memory that it
    takes all the same."""

    trajectory: Trajectory
    nbytes: int


def load_record(record: FramedRecord, schema: TokenSchema) -> StoredTrajectory:
    """Return the trajectory of a record, on the mapped file. Raises `WireError`."""
    trajectory = decode_trajectory(record.frames, schema)
    mapped = sum(frame.nbytes for frame in record.frames[1:])
    return StoredTrajectory(trajectory, decoded_bytes(record.frames, trajectory) - mapped)
