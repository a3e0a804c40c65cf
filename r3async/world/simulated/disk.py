"""A host's disk in memory, which can fill up, fail, be slow, and lose power."""

from __future__ import annotations

import contextlib
import errno
import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from random import Random
from typing import Protocol

from r3async.world import Buffer, Files
from r3async.world.disk import Stat
from r3async.world.simulated.tree import DirectoryNode, Entry, FileNode, Node, Tree, error

READING = frozenset({"open", "size", "read", "map", "stat", "list", "free", "lock"})
GROWING = frozenset({"create", "append", "make"})
WRITING = GROWING | {"truncate", "sync", "rename", "remove", "sync_directory"}
OPENING = frozenset({"open", "create", "list", "sync_directory"})
"""Operations, as `refuse` takes and `observe` gets them. `create`: `open` of a file that is not there."""


class Owner(Protocol):
    """A simulated process. `disk_seconds`: how long its work on files takes; it is added to. `full`: it opens nothing more."""

    name: str
    ended: bool
    full: bool
    disk_seconds: float

    def check(self) -> None:
        """Raises if it has ended."""
        ...

    def at_end(self, callback: Callable[[], None]) -> None: ...


class SimulatedDisk:
    """One for a host. Everything random is from `rng`.

    What a process wrote is there when it is killed. What is not synced may be lost with `lose_power`.
    """

    def __init__(self, rng: Random, *, capacity: int = 2**50):
        self.rng, self.capacity = rng, capacity
        self.latency, self.bytes_per_second = 0.0, math.inf
        """How long an operation takes: seconds of each, and of what it reads or writes."""
        self.short_writes = 0.0
        """How probable it is that an append writes a part only, and fails."""
        self.short_once = False
        """The next one does."""
        self.observe: Callable[[Owner, str, Path], object] = lambda process, operation, path: None
        """Called before each operation. It may end the process, or lose the host's power; then a part of what was to be appended
        may be there."""
        self.power_failures = 0
        self._modified = 0
        self._tree = Tree()
        self._refused: dict[str, tuple[int, Collection[str]]] = {}

    @property
    def used(self) -> int:
        """Bytes of all files."""
        return self._tree.used

    def files(self, process: Owner) -> SimulatedFiles:
        """The disk as a process sees it, until that ends."""
        return SimulatedFiles(self, self._tree, process)

    def refuse(self, path: Path, number: int, operations: Collection[str] | None = None) -> None:
        """From now on, these operations on `path`, and on what is in it, fail with that errno. By default: what needs space for
        `ENOSPC` and `EDQUOT`, else all that writes."""
        full = number in (errno.ENOSPC, errno.EDQUOT)
        self._refused[str(path)] = number, operations or (GROWING if full else WRITING)

    def allow(self, path: Path) -> None:
        """Take back `refuse`."""
        self._refused.pop(str(path), None)

    def lose_power(self) -> None:
        """What is not synced is lost, in whole or in part. The host's processes have to be ended."""
        self.power_failures += 1
        self._tree.lose(self.rng)

    def write_back(self) -> None:
        """Everything that was written is synced, as an operating system does it from time to time."""
        self._tree.write_back()

    # -- for its files ---------------------------------------------------------------------------------------------------

    def enter(self, process: Owner, operation: str, path: Path, nbytes: int = 0) -> None:
        """Begin an operation. Raises `OSError` if it is refused."""
        process.check()
        process.disk_seconds += self.latency + nbytes / self.bytes_per_second
        self.observe(process, operation, path)
        process.check()
        if process.full and operation in OPENING:
            raise error(errno.EMFILE, path)
        if number := self.refusal(operation, path):
            raise error(number, path)

    def refusal(self, operation: str, path: Path) -> int:
        """The errno with which it fails; 0 if it does not."""
        if self._refused:
            text = str(path)
            for prefix, (number, operations) in self._refused.items():
                if operation in operations and (text == prefix or text.startswith(prefix.rstrip("/") + "/")):
                    return number
        return 0

    def append(self, process: Owner, node: FileNode, path: Path, data: bytes) -> None:
        """All of it, or a part and an error."""
        process.check()
        process.disk_seconds += self.latency + len(data) / self.bytes_per_second
        failures = self.power_failures
        self.observe(process, "append", path)
        number = self.refusal("append", path)
        length = len(data)
        if process.ended or number:
            length = self.rng.choice((0, self.rng.randint(0, length)))
        elif self.short_once or (self.short_writes and self.rng.random() < self.short_writes):
            self.short_once = False
            number, length = errno.EIO, self.rng.randint(0, length)
        if node.linked and length > (free := max(0, self.capacity - self.used)):
            number, length = number or errno.ENOSPC, free
        if failures == self.power_failures:
            node.data += data[:length]
            self.grow(node, length)
            self.touch(node)
        process.check()
        if number:
            raise error(number, path)

    def grow(self, node: FileNode, nbytes: int) -> None:
        """`node` has so many bytes more."""
        if node.linked:
            self._tree.used += nbytes

    def unlink(self, node: FileNode) -> None:
        """`node` has no name any more."""
        self.grow(node, -len(node.data))
        node.linked = False

    def touch(self, node: Node) -> None:
        self._modified = node.modified = self._modified + 1


class SimulatedFiles:
    """See `world.Files`: those of one process."""

    def __init__(self, disk: SimulatedDisk, tree: Tree, process: Owner):
        self.disk, self.process, self._tree = disk, process, tree
        self.opened: dict[SimulatedFile, None] = {}
        process.at_end(self.end)

    def end(self) -> None:
        """The process has ended: what it has open is closed, and its locks are released. Idempotent."""
        for file in list(self.opened):
            file.release()
        self.opened.clear()

    def open(self, path: Path, *, create: bool = False, new: bool = False, mode: int = 0o644) -> SimulatedFile:
        writable = create or new
        self._enter("create" if writable and self._find(path) is None else "open", path)
        parent, name = self._tree.parent(path)
        found = parent.names.get(name)
        if found is not None and new:
            raise error(errno.EEXIST, path)
        if isinstance(found, DirectoryNode) or not name:
            raise error(errno.EISDIR, path)
        if found is None and not writable:
            raise error(errno.ENOENT, path)
        if found is None:
            self._need_capacity(path)
            found = FileNode(mode)
            self._change(Entry(parent, name, found))
        return SimulatedFile(self, found, path, writable)

    def stat(self, path: Path) -> Stat | None:
        self._enter("stat", path)
        node = self._find(path)
        if node is None:
            return None
        if isinstance(node, DirectoryNode):
            return Stat(0, node.modified, directory=True, mode=0o755)
        return Stat(len(node.data), node.modified, directory=False, mode=node.mode)

    def list(self, directory: Path) -> list[str]:
        self._enter("list", directory)
        try:
            return sorted(self._directory(directory).names)
        except FileNotFoundError:
            return []

    def make(self, directory: Path, mode: int = 0o777) -> None:
        self._enter("make", directory)
        parent, name = self._tree.parent(directory)
        if not name or name in parent.names:
            raise error(errno.EEXIST, directory)
        self._need_capacity(directory)
        self._change(Entry(parent, name, DirectoryNode()))

    def claim(self, directory: Path) -> None:
        """There is one user only."""
        with contextlib.suppress(FileExistsError):
            self.make(directory, 0o700)

    def rename(self, path: Path, to: Path) -> None:
        self._enter("rename", path)
        self._enter("rename", to)
        if (found := self._find(to)) is not None and isinstance(found, DirectoryNode):
            raise error(errno.EEXIST, to)
        parent, name = self._tree.parent(path)
        target, new_name = self._tree.parent(to)
        node = parent.names.get(name)
        if node is None:
            raise error(errno.ENOENT, path)
        if isinstance(node, DirectoryNode) and path in to.parents:
            raise error(errno.EINVAL, path)
        replaced = target.names.get(new_name)
        if isinstance(node, DirectoryNode) and replaced is not None:
            raise error(errno.ENOTDIR, to)
        if replaced is node:
            return
        if isinstance(replaced, FileNode):
            self.disk.unlink(replaced)
        self._change(Entry(parent, name, None), Entry(target, new_name, node))

    def remove(self, path: Path) -> None:
        self._enter("remove", path)
        try:
            parent, name = self._tree.parent(path)
        except (FileNotFoundError, NotADirectoryError):
            return
        node = parent.names.get(name)
        if node is None:
            return
        if isinstance(node, FileNode):
            self.disk.unlink(node)
        elif node.names:
            raise error(errno.ENOTEMPTY, path)
        self._change(Entry(parent, name, None))

    def remove_tree(self, path: Path) -> None:
        node = self._find(path)
        if isinstance(node, DirectoryNode):
            for name in sorted(node.names):
                self.remove_tree(path / name)
        if node is not None:
            self.remove(path)

    def sync_directory(self, directory: Path) -> None:
        self._enter("sync_directory", directory)
        self._tree.sync(self._directory(directory))

    def free(self, path: Path) -> int:
        self._enter("free", path)
        self._tree.find(path)
        return max(0, self.disk.capacity - self.disk.used)

    def capacity(self, path: Path) -> int:
        self._enter("free", path)
        return self.disk.capacity

    def _find(self, path: Path) -> Node | None:
        try:
            return self._tree.find(path)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _enter(self, operation: str, path: Path) -> None:
        self.disk.enter(self.process, operation, path)

    def _directory(self, path: Path) -> DirectoryNode:
        node = self._tree.find(path)
        if isinstance(node, FileNode):
            raise error(errno.ENOTDIR, path)
        return node

    def _need_capacity(self, path: Path) -> None:
        if self.disk.used >= self.disk.capacity:
            raise error(errno.ENOSPC, path)

    def _change(self, *entries: Entry) -> None:
        for entry in entries:
            self.disk.touch(entry.directory)
            if isinstance(entry.node, FileNode) and not entry.node.modified:
                self.disk.touch(entry.node)
        self._tree.change(*entries)


class SimulatedFile:
    """See `world.File`."""

    def __init__(self, files: SimulatedFiles, node: FileNode, path: Path, writable: bool):
        self._files, self._disk, self._node = files, files.disk, node
        self._path, self._writable, self._open = path, writable, True
        files.opened[self] = None

    def size(self) -> int:
        self._enter("size")
        return len(self._node.data)

    def read(self, start: int = 0, length: int | None = None) -> bytes:
        end = len(self._node.data) if length is None else start + length
        self._enter("read", max(0, end - start))
        return bytes(self._node.data[start : max(start, end)])

    def map(self, start: int = 0, length: int | None = None) -> memoryview:
        end = len(self._node.data) if length is None else start + length
        self._enter("map", max(0, end - start))
        return memoryview(bytes(self._node.data[start : max(start, end)]))

    def append(self, pieces: Sequence[Buffer]) -> int:
        self._check(errno.EBADF if pieces else 0)
        data = b"".join(pieces)
        self._disk.append(self._files.process, self._node, self._path, data)
        return len(data)

    def truncate(self, size: int) -> None:
        self._check(errno.EINVAL)
        self._enter("truncate")
        before = len(self._node.data)
        if self._node.linked and size - before > self._disk.capacity - self._disk.used:
            raise error(errno.ENOSPC, self._path)
        self._node.truncate(size)
        self._disk.grow(self._node, size - before)
        self._disk.touch(self._node)

    def sync(self) -> None:
        self._enter("sync")
        self._node.sync()

    def lock(self, *, shared: bool = False, wait: float = 0.0) -> None:
        """Nobody else runs while a call waits: what another one holds, it holds when the wait is over."""
        self._enter("lock")
        locks = self._node.locks
        locks.pop(self, None)  # as `flock` does it, also where the new lock is not to be had
        if locks and not (shared and all(locks.values())):
            self._files.process.disk_seconds += wait
            raise error(errno.EAGAIN, self._path)
        locks[self] = shared

    def unlock(self) -> None:
        self.release_lock()

    def close(self) -> None:
        self.release()
        self._files.opened.pop(self, None)

    def release(self) -> None:
        """Close it, and let go of its lock."""
        self._open = False
        self.release_lock()

    def release_lock(self) -> None:
        self._node.locks.pop(self, None)

    def __enter__(self) -> SimulatedFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _enter(self, operation: str, nbytes: int = 0) -> None:
        self._check(0)
        self._disk.enter(self._files.process, operation, self._path, nbytes)

    def _check(self, unwritable: int) -> None:
        """`unwritable`: the errno of what writes to a file that is open for reading only; 0 for what does not write."""
        self._files.process.check()
        if not self._open:
            raise error(errno.EBADF, self._path)
        if unwritable and not self._writable:
            raise error(unwritable, self._path)


_: type[Files] = SimulatedFiles

__all__ = ["GROWING", "READING", "WRITING", "Owner", "SimulatedDisk", "SimulatedFile", "SimulatedFiles"]
