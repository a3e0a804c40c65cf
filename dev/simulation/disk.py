"""A simulated disk in memory: its files, what a power failure leaves of them, and faults
of its operations."""

from __future__ import annotations

import contextlib
import errno
import math
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple, Protocol

from r3async.world import Buffer, Files, FileStat

__all__ = [
    "GROW_OPERATIONS",
    "READ_OPERATIONS",
    "WRITE_OPERATIONS",
    "DirectoryNode",
    "DiskProcess",
    "EntryChange",
    "FileNode",
    "FileTree",
    "SimulatedDisk",
    "SimulatedFile",
    "SimulatedFiles",
    "TreeNode",
    "os_error",
]

SECTOR_BYTES = 512
"""Number of bytes that reach the disk together or not at all."""


class FileNode:
    """A file's content. Its first `_synced_bytes` bytes are synced. The synced content continues
    with `_truncated_tail`, which was truncated since."""

    def __init__(self, mode: int = 0o644):
        self.data = bytearray()
        self.mode = mode
        self.modified = 0
        self.is_linked = True
        self.locks: dict[object, bool] = {}
        """Locks by open file, each True if it is shared."""
        self._synced_bytes = 0
        self._truncated_tail = b""

    def truncate(self, size: int) -> None:
        if size < self._synced_bytes:
            self._truncated_tail = (
                bytes(self.data[size : self._synced_bytes]) + self._truncated_tail
            )
            self._synced_bytes = size
        if size <= len(self.data):
            del self.data[size:]
        else:
            self.data.extend(bytes(size - len(self.data)))

    def mark_synced(self) -> None:
        self._synced_bytes = len(self.data)
        self._truncated_tail = b""

    def lose_unsynced(self, rng: Random) -> None:
        """Lose power: unsynced content is lost, kept, or kept in part, with blocks of zeros or
        of random bytes."""
        if len(self.data) > self._synced_bytes or self._truncated_tail:
            match rng.choice(("lost", "there", "in part", "in part")):
                case "lost":
                    self.data[self._synced_bytes :] = self._truncated_tail
                case "in part":
                    del self.data[rng.randint(self._synced_bytes, len(self.data)) :]
                    self._damage_blocks(rng)
        self.mark_synced()
        self.locks.clear()

    def _damage_blocks(self, rng: Random) -> None:
        start = self._synced_bytes
        while start < len(self.data):
            end = min(start - start % SECTOR_BYTES + SECTOR_BYTES, len(self.data))
            if rng.random() < 0.2:
                self.data[start:end] = (
                    bytes(end - start) if rng.random() < 0.7 else rng.randbytes(end - start)
                )
            start = end


class DirectoryNode:
    """The names in a directory. `synced_names` are those that a power failure leaves."""

    def __init__(self) -> None:
        self.names: dict[str, TreeNode] = {}
        self.synced_names: dict[str, TreeNode] = {}
        self.modified = 0


TreeNode = FileNode | DirectoryNode


class EntryChange(NamedTuple):
    """A change of a name in a directory, which stands for `node` from now on; None for a name
    that is removed."""

    directory: DirectoryNode
    name: str
    node: TreeNode | None

    def apply_to(self, names: dict[str, TreeNode]) -> None:
        if self.node is None:
            names.pop(self.name, None)
        else:
            names[self.name] = self.node


class FileTree:
    """The tree of paths of a disk, and the unsynced changes of names, in their order.

    A change reaches the disk whole or not at all. A power failure leaves the first few changes
    in each directory.
    """

    def __init__(self) -> None:
        self.root = DirectoryNode()
        self.used_bytes = 0
        """Total size of all files in bytes."""
        self._changes: list[tuple[EntryChange, ...]] = []

    def find_node(self, path: Path) -> TreeNode:
        """Return the file or directory at a path. Raises `FileNotFoundError` and
        `NotADirectoryError`."""
        node: TreeNode = self.root
        for name in _path_names(path):
            if isinstance(node, FileNode):
                raise os_error(errno.ENOTDIR, path)
            if name not in node.names:
                raise os_error(errno.ENOENT, path)
            node = node.names[name]
        return node

    def find_parent(self, path: Path) -> tuple[DirectoryNode, str]:
        """Return the directory that contains `path`, and the name in it; "" for the root. Raises
        like `find_node`."""
        names = _path_names(path)
        parent = self.find_node(path.parent) if names else self.root
        if isinstance(parent, FileNode):
            raise os_error(errno.ENOTDIR, path)
        return parent, names[-1] if names else ""

    def apply_changes(self, *entries: EntryChange) -> None:
        """Apply changes of names, in order, as one change that is not synced yet."""
        for entry in entries:
            entry.apply_to(entry.directory.names)
        self._changes.append(entries)

    def sync_names(self, directory: DirectoryNode) -> None:
        """Sync the changes of a directory's names, and the earlier changes of other directories
        that belong to them."""
        with_it = {directory}
        synced = []
        unsynced = []
        for change in reversed(self._changes):
            if any(entry.directory in with_it for entry in change):
                with_it.update(entry.directory for entry in change)
                synced.append(change)
            else:
                unsynced.append(change)
        for change in reversed(synced):
            for entry in change:
                entry.apply_to(entry.directory.synced_names)
        self._changes = unsynced[::-1]

    def write_back(self) -> None:
        """Sync everything."""
        for change in self._changes:
            for entry in change:
                entry.apply_to(entry.directory.synced_names)
        self._changes = []
        for node in self._all_nodes(self.root):
            if isinstance(node, FileNode):
                node.mark_synced()

    def lose_unsynced(self, rng: Random) -> None:
        """Lose power: of the unsynced changes in each directory, only the first few are kept."""
        counts: dict[DirectoryNode, int] = {}
        for change in self._changes:
            for directory in dict.fromkeys(entry.directory for entry in change):
                counts[directory] = counts.get(directory, 0) + 1
        kept_counts = {
            directory: rng.choice((0, count, rng.randint(0, count)))
            for directory, count in counts.items()
        }
        for change in self._changes:
            directories = dict.fromkeys(entry.directory for entry in change)
            if all(kept_counts[directory] for directory in directories):
                for entry in change:
                    entry.apply_to(entry.directory.synced_names)
                kept_counts |= {directory: kept_counts[directory] - 1 for directory in directories}
            else:
                kept_counts |= dict.fromkeys(directories, 0)
        self._changes = []
        self.used_bytes = 0
        pending: list[TreeNode] = [self.root]
        while pending:
            node = pending.pop()
            if isinstance(node, DirectoryNode):
                node.names = dict(sorted(node.synced_names.items()))
                pending += node.names.values()
            else:
                node.is_linked = True
                node.lose_unsynced(rng)
                self.used_bytes += len(node.data)

    def _all_nodes(self, node: TreeNode) -> list[TreeNode]:
        found: list[TreeNode] = [node]
        for each in found:
            if isinstance(each, DirectoryNode):
                found += each.names.values()
        return found


def _path_names(path: Path) -> tuple[str, ...]:
    if ".." in path.parts:
        raise ValueError(f"{path}: '..' is not simulated")
    return path.parts[1:] if path.is_absolute() else path.parts


def os_error(number: int, path: Path) -> OSError:
    """Return the exception for an errno: `FileNotFoundError` for `ENOENT`, and so on."""
    return OSError(number, os.strerror(number), str(path))


# The disk of a host, kept in memory. It can fill up, fail, be slow, and lose power.


READ_OPERATIONS = frozenset({"open", "size", "read", "map", "stat", "list", "free", "lock"})
GROW_OPERATIONS = frozenset({"create", "append", "make"})
WRITE_OPERATIONS = GROW_OPERATIONS | {"truncate", "sync", "rename", "remove", "sync_directory"}
OPEN_OPERATIONS = frozenset({"open", "create", "list", "sync_directory"})
"""Names of operations, as passed to `refuse_operations` and `on_operation`. `create` is an
`open` of a new file."""


class DiskProcess(Protocol):
    """The interface of a simulated process that a disk needs.

    Attributes:
        out_of_descriptors: True if the process can open nothing more.
        disk_seconds: Seconds that its work on files takes; the disk adds to it.
    """

    name: str
    ended: bool
    out_of_descriptors: bool
    disk_seconds: float

    def raise_if_ended(self) -> None:
        """Raise an exception if the process has ended."""
        ...

    def add_end_callback(self, callback: Callable[[], None]) -> None: ...


class SimulatedDisk:
    """The disk of one host. All randomness comes from `rng`.

    What a process wrote outlives its end. What is not synced may be lost by `lose_power`.
    """

    def __init__(self, rng: Random, *, total_bytes: int = 2**50):
        self.rng = rng
        self.total_bytes = total_bytes
        self.latency = 0.0
        self.bytes_per_second = math.inf
        """Speed of operations: seconds for each operation, and bytes per second that it
        reads or writes."""
        self.short_write_rate = 0.0
        """Probability that an append writes only a part and fails."""
        self.next_write_short = False
        """True if the next append writes only a part and fails."""
        self.on_operation: Callable[[DiskProcess, str, Path], object] = (
            lambda process, operation, path: None
        )
        """Callback before each operation. It may end the process, or fail the host's power; then a
        part of what was to be appended may be there."""
        self.power_failures = 0
        self._modified = 0
        self._tree = FileTree()
        self._refused_operations: dict[str, tuple[int, Collection[str]]] = {}

    @property
    def used_bytes(self) -> int:
        """The total size of all files in bytes."""
        return self._tree.used_bytes

    def files_for(self, process: DiskProcess) -> SimulatedFiles:
        """Return the disk as one process sees it, until the process ends."""
        return SimulatedFiles(self, self._tree, process)

    def refuse_operations(
        self, path: Path, error_number: int, operations: Collection[str] | None = None
    ) -> None:
        """Let these operations on `path`, and on everything below it, fail with
        `error_number` from now on.

        By default these are the operations that need space, for `ENOSPC` and `EDQUOT`, and
        otherwise all that write.
        """
        full = error_number in (errno.ENOSPC, errno.EDQUOT)
        self._refused_operations[str(path)] = (
            error_number,
            operations or (GROW_OPERATIONS if full else WRITE_OPERATIONS),
        )

    def allow_operations(self, path: Path) -> None:
        """Undo `refuse_operations` for `path`."""
        self._refused_operations.pop(str(path), None)

    def lose_power(self) -> None:
        """Lose what is not synced, in whole or in part. The caller must end the
        host's processes."""
        self.power_failures += 1
        self._tree.lose_unsynced(self.rng)

    def write_back(self) -> None:
        """Sync everything that was written, as an operating system does from time to time."""
        self._tree.write_back()

    # -- for its files -----------------------------------------------------------------------------

    def begin_operation(
        self, process: DiskProcess, operation: str, path: Path, nbytes: int = 0
    ) -> None:
        """Begin an operation: count its time, and call `on_operation`. Raises `OSError` if the
        operation is refused."""
        process.raise_if_ended()
        process.disk_seconds += self.latency + nbytes / self.bytes_per_second
        self.on_operation(process, operation, path)
        process.raise_if_ended()
        if process.out_of_descriptors and operation in OPEN_OPERATIONS:
            raise os_error(errno.EMFILE, path)
        number = self.refusal_errno(operation, path)
        if number:
            raise os_error(number, path)

    def refusal_errno(self, operation: str, path: Path) -> int:
        """Return the errno with which an operation is refused; 0 if it is not."""
        if self._refused_operations:
            text = str(path)
            for prefix, (number, operations) in self._refused_operations.items():
                if operation in operations and (
                    text == prefix or text.startswith(prefix.rstrip("/") + "/")
                ):
                    return number
        return 0

    def append_bytes(self, process: DiskProcess, node: FileNode, path: Path, data: bytes) -> None:
        """Append all of `data`, or append a part and raise `OSError`."""
        process.raise_if_ended()
        process.disk_seconds += self.latency + len(data) / self.bytes_per_second
        failures = self.power_failures
        self.on_operation(process, "append", path)
        number = self.refusal_errno("append", path)
        length = len(data)
        if process.ended or number:
            length = self.rng.choice((0, self.rng.randint(0, length)))
        elif self.next_write_short or (
            self.short_write_rate and self.rng.random() < self.short_write_rate
        ):
            self.next_write_short = False
            number = errno.EIO
            length = self.rng.randint(0, length)
        if node.is_linked:
            free = max(0, self.total_bytes - self.used_bytes)
            if length > free:
                number = number or errno.ENOSPC
                length = free
        if failures == self.power_failures:
            node.data += data[:length]
            self.add_used_bytes(node, length)
            self.mark_modified(node)
        process.raise_if_ended()
        if number:
            raise os_error(number, path)

    def add_used_bytes(self, node: FileNode, nbytes: int) -> None:
        """Count `nbytes` more bytes of `node`, if it still has a name."""
        if node.is_linked:
            self._tree.used_bytes += nbytes

    def unlink_file(self, node: FileNode) -> None:
        """Record that `node` has no name any more, and release its bytes."""
        self.add_used_bytes(node, -len(node.data))
        node.is_linked = False

    def mark_modified(self, node: TreeNode) -> None:
        self._modified = node.modified = self._modified + 1


class SimulatedFiles:
    """An implementation of `world.Files` for one process."""

    def __init__(self, disk: SimulatedDisk, tree: FileTree, process: DiskProcess):
        self.disk = disk
        self.process = process
        self._tree = tree
        self.open_files: dict[SimulatedFile, None] = {}
        process.add_end_callback(self.close_all)

    def close_all(self) -> None:
        """Close all files of the process, which has ended, and release its locks. Idempotent."""
        for file in list(self.open_files):
            file.close_and_unlock()
        self.open_files.clear()

    def open(
        self, path: Path, *, create: bool = False, exclusive: bool = False, mode: int = 0o644
    ) -> SimulatedFile:
        writable = create or exclusive
        self._begin_operation(
            "create" if writable and self._find_node(path) is None else "open", path
        )
        parent, name = self._tree.find_parent(path)
        node = parent.names.get(name)
        if node is not None and exclusive:
            raise os_error(errno.EEXIST, path)
        if isinstance(node, DirectoryNode) or not name:
            raise os_error(errno.EISDIR, path)
        if node is None and not writable:
            raise os_error(errno.ENOENT, path)
        if node is None:
            self._require_space(path)
            node = FileNode(mode)
            self._change_entries(EntryChange(parent, name, node))
        return SimulatedFile(self, node, path, writable)

    def stat(self, path: Path) -> FileStat | None:
        self._begin_operation("stat", path)
        node = self._find_node(path)
        if node is None:
            return None
        if isinstance(node, DirectoryNode):
            return FileStat(0, node.modified, is_directory=True, mode=0o755)
        return FileStat(len(node.data), node.modified, is_directory=False, mode=node.mode)

    def list_names(self, directory: Path) -> list[str]:
        self._begin_operation("list", directory)
        try:
            return sorted(self._find_directory(directory).names)
        except FileNotFoundError:
            return []

    def create_directory(self, directory: Path, mode: int = 0o777) -> None:
        self._begin_operation("make", directory)
        parent, name = self._tree.find_parent(directory)
        if not name or name in parent.names:
            raise os_error(errno.EEXIST, directory)
        self._require_space(directory)
        self._change_entries(EntryChange(parent, name, DirectoryNode()))

    def make_private_directory(self, directory: Path) -> None:
        """Create `directory` if it does not exist. There is only one user, so
        nothing is checked."""
        with contextlib.suppress(FileExistsError):
            self.create_directory(directory, 0o700)

    def rename(self, path: Path, new_path: Path) -> None:
        self._begin_operation("rename", path)
        self._begin_operation("rename", new_path)
        existing = self._find_node(new_path)
        if existing is not None and isinstance(existing, DirectoryNode):
            raise os_error(errno.EEXIST, new_path)
        parent, name = self._tree.find_parent(path)
        target, new_name = self._tree.find_parent(new_path)
        node = parent.names.get(name)
        if node is None:
            raise os_error(errno.ENOENT, path)
        if isinstance(node, DirectoryNode) and path in new_path.parents:
            raise os_error(errno.EINVAL, path)
        replaced = target.names.get(new_name)
        if isinstance(node, DirectoryNode) and replaced is not None:
            raise os_error(errno.ENOTDIR, new_path)
        if replaced is node:
            return
        if isinstance(replaced, FileNode):
            self.disk.unlink_file(replaced)
        self._change_entries(EntryChange(parent, name, None), EntryChange(target, new_name, node))

    def remove(self, path: Path) -> None:
        self._begin_operation("remove", path)
        try:
            parent, name = self._tree.find_parent(path)
        except (FileNotFoundError, NotADirectoryError):
            return
        node = parent.names.get(name)
        if node is None:
            return
        if isinstance(node, FileNode):
            self.disk.unlink_file(node)
        elif node.names:
            raise os_error(errno.ENOTEMPTY, path)
        self._change_entries(EntryChange(parent, name, None))

    def remove_tree(self, path: Path) -> None:
        node = self._find_node(path)
        if isinstance(node, DirectoryNode):
            for name in sorted(node.names):
                self.remove_tree(path / name)
        if node is not None:
            self.remove(path)

    def fsync_directory(self, directory: Path) -> None:
        self._begin_operation("sync_directory", directory)
        self._tree.sync_names(self._find_directory(directory))

    def free_bytes(self, path: Path) -> int:
        self._begin_operation("free", path)
        self._tree.find_node(path)
        return max(0, self.disk.total_bytes - self.disk.used_bytes)

    def total_bytes(self, path: Path) -> int:
        self._begin_operation("free", path)
        return self.disk.total_bytes

    def _find_node(self, path: Path) -> TreeNode | None:
        try:
            return self._tree.find_node(path)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _begin_operation(self, operation: str, path: Path) -> None:
        self.disk.begin_operation(self.process, operation, path)

    def _find_directory(self, path: Path) -> DirectoryNode:
        node = self._tree.find_node(path)
        if isinstance(node, FileNode):
            raise os_error(errno.ENOTDIR, path)
        return node

    def _require_space(self, path: Path) -> None:
        if self.disk.used_bytes >= self.disk.total_bytes:
            raise os_error(errno.ENOSPC, path)

    def _change_entries(self, *entries: EntryChange) -> None:
        for entry in entries:
            self.disk.mark_modified(entry.directory)
            if isinstance(entry.node, FileNode) and not entry.node.modified:
                self.disk.mark_modified(entry.node)
        self._tree.apply_changes(*entries)


class SimulatedFile:
    """An implementation of `world.File`."""

    def __init__(self, files: SimulatedFiles, node: FileNode, path: Path, is_writable: bool):
        self._files = files
        self._disk = files.disk
        self._node = node
        self._path = path
        self._is_writable = is_writable
        self._is_open = True
        files.open_files[self] = None

    def size(self) -> int:
        self._begin_operation("size")
        return len(self._node.data)

    def is_at(self, path: Path) -> bool:
        return self._files._find_node(path) is self._node

    def read(self, start: int = 0, length: int | None = None) -> bytes:
        end = len(self._node.data) if length is None else start + length
        self._begin_operation("read", max(0, end - start))
        return bytes(self._node.data[start : max(start, end)])

    def map_bytes(self, start: int = 0, length: int | None = None) -> memoryview:
        end = len(self._node.data) if length is None else start + length
        self._begin_operation("map", max(0, end - start))
        return memoryview(bytes(self._node.data[start : max(start, end)]))

    def append(self, buffers: Sequence[Buffer]) -> int:
        self._check_open(errno.EBADF if buffers else 0)
        data = b"".join(buffers)
        self._disk.append_bytes(self._files.process, self._node, self._path, data)
        return len(data)

    def truncate(self, size: int) -> None:
        self._check_open(errno.EINVAL)
        self._begin_operation("truncate")
        before = len(self._node.data)
        if self._node.is_linked and size - before > self._disk.total_bytes - self._disk.used_bytes:
            raise os_error(errno.ENOSPC, self._path)
        self._node.truncate(size)
        self._disk.add_used_bytes(self._node, size - before)
        self._disk.mark_modified(self._node)

    def fsync(self) -> None:
        self._begin_operation("sync")
        self._node.mark_synced()

    def lock(self, *, shared: bool = False, timeout: float = 0.0) -> None:
        """Implement `File.lock`. No other process runs while a call waits, so a lock that is held
        is still held after the wait."""
        self._begin_operation("lock")
        locks = self._node.locks
        locks.pop(self, None)  # as `flock` does, even if the new lock is refused
        if locks and not (shared and all(locks.values())):
            self._files.process.disk_seconds += timeout
            raise os_error(errno.EAGAIN, self._path)
        locks[self] = shared

    def unlock(self) -> None:
        self.release_lock()

    def close(self) -> None:
        self.close_and_unlock()
        self._files.open_files.pop(self, None)

    def close_and_unlock(self) -> None:
        """Close the file and release its lock."""
        self._is_open = False
        self.release_lock()

    def release_lock(self) -> None:
        self._node.locks.pop(self, None)

    def __enter__(self) -> SimulatedFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _begin_operation(self, operation: str, nbytes: int = 0) -> None:
        self._check_open(0)
        self._disk.begin_operation(self._files.process, operation, self._path, nbytes)

    def _check_open(self, write_errno: int) -> None:
        """Raise `OSError` if the file is closed, or if it is open for reading only and
        `write_errno` is not 0.

        `write_errno` is the errno of a write to a file that is open for reading only; 0 for
        other operations.
        """
        self._files.process.raise_if_ended()
        if not self._is_open:
            raise os_error(errno.EBADF, self._path)
        if write_errno and not self._is_writable:
            raise os_error(write_errno, self._path)


_: type[Files] = SimulatedFiles
