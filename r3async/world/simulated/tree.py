"""What is on a simulated disk, and what of it a power failure leaves."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from random import Random
from typing import NamedTuple

SECTOR_BYTES = 512
"""Bytes that reach the disk together or not at all."""


class FileNode:
    """A file's content. Its first `stable` bytes are synced; after them the synced content has `cut`, truncated since."""

    def __init__(self, mode: int = 0o644):
        self.data = bytearray()
        self.mode, self.modified, self.is_linked = mode, 0, True
        self.locks: dict[object, bool] = {}
        """By open file: whether it is shared."""
        self._synced_bytes, self._truncated_tail = 0, b""

    def truncate(self, size: int) -> None:
        if size < self._synced_bytes:
            self._truncated_tail = bytes(self.data[size : self._synced_bytes]) + self._truncated_tail
            self._synced_bytes = size
        if size <= len(self.data):
            del self.data[size:]
        else:
            self.data.extend(bytes(size - len(self.data)))

    def mark_synced(self) -> None:
        self._synced_bytes, self._truncated_tail = len(self.data), b""

    def lose_unsynced(self, rng: Random) -> None:
        """Power fails: what is not synced is lost, is there, or is there in part, with blocks of zeros or of anything."""
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
                self.data[start:end] = bytes(end - start) if rng.random() < 0.7 else rng.randbytes(end - start)
            start = end


class DirectoryNode:
    """Names in a directory. `synced_names`: those that a power failure leaves."""

    def __init__(self) -> None:
        self.names: dict[str, TreeNode] = {}
        self.synced_names: dict[str, TreeNode] = {}
        self.modified = 0


TreeNode = FileNode | DirectoryNode


class EntryChange(NamedTuple):
    """What a name in a directory stands for from now on; None: nothing."""

    directory: DirectoryNode
    name: str
    node: TreeNode | None

    def apply_to(self, names: dict[str, TreeNode]) -> None:
        if self.node is None:
            names.pop(self.name, None)
        else:
            names[self.name] = self.node


class FileTree:
    """Paths, and the changes of names that are not synced, in their order. A change is made whole or not at all; of those in one
    directory, a power failure leaves the first few."""

    def __init__(self) -> None:
        self.root = DirectoryNode()
        self.used_bytes = 0
        """Bytes of files."""
        self._changes: list[tuple[EntryChange, ...]] = []

    def find_node(self, path: Path) -> TreeNode:
        """Raises `FileNotFoundError`, `NotADirectoryError`."""
        node: TreeNode = self.root
        for name in _path_names(path):
            if isinstance(node, FileNode):
                raise os_error(errno.ENOTDIR, path)
            if name not in node.names:
                raise os_error(errno.ENOENT, path)
            node = node.names[name]
        return node

    def find_parent(self, path: Path) -> tuple[DirectoryNode, str]:
        """The directory of `path`, and the name in it; "" for the root. Raises like `find_node`."""
        names = _path_names(path)
        parent = self.find_node(path.parent) if names else self.root
        if isinstance(parent, FileNode):
            raise os_error(errno.ENOTDIR, path)
        return parent, names[-1] if names else ""

    def apply_changes(self, *entries: EntryChange) -> None:
        """In order."""
        for entry in entries:
            entry.apply_to(entry.directory.names)
        self._changes.append(entries)

    def sync_names(self, directory: DirectoryNode) -> None:
        """The changes of its names, and whatever was changed before together with them, are on the disk."""
        with_it, synced, left = {directory}, [], []
        for change in reversed(self._changes):
            if any(entry.directory in with_it for entry in change):
                with_it.update(entry.directory for entry in change)
                synced.append(change)
            else:
                left.append(change)
        for change in reversed(synced):
            for entry in change:
                entry.apply_to(entry.directory.synced_names)
        self._changes = left[::-1]

    def write_back(self) -> None:
        """Everything is on the disk."""
        for change in self._changes:
            for entry in change:
                entry.apply_to(entry.directory.synced_names)
        self._changes = []
        for node in self._all_nodes(self.root):
            if isinstance(node, FileNode):
                node.mark_synced()

    def lose_unsynced(self, rng: Random) -> None:
        """Power fails."""
        counts: dict[DirectoryNode, int] = {}
        for change in self._changes:
            for directory in dict.fromkeys(entry.directory for entry in change):
                counts[directory] = counts.get(directory, 0) + 1
        left = {directory: rng.choice((0, count, rng.randint(0, count))) for directory, count in counts.items()}
        for change in self._changes:
            directories = dict.fromkeys(entry.directory for entry in change)
            if all(left[directory] for directory in directories):
                for entry in change:
                    entry.apply_to(entry.directory.synced_names)
                left |= {directory: left[directory] - 1 for directory in directories}
            else:
                left |= dict.fromkeys(directories, 0)
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
    """`FileNotFoundError` for `ENOENT`, and so on."""
    return OSError(number, os.strerror(number), str(path))


__all__ = ["DirectoryNode", "EntryChange", "FileNode", "FileTree", "TreeNode", "os_error"]
