"""What is on a simulated disk, and what of it a power failure leaves."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from random import Random
from typing import NamedTuple

BLOCK = 512
"""Bytes that reach the disk together or not at all."""


class FileNode:
    """A file's content. Its first `stable` bytes are synced; after them the synced content has `cut`, truncated since."""

    def __init__(self, mode: int = 0o644):
        self.data = bytearray()
        self.mode, self.modified, self.linked = mode, 0, True
        self.locks: dict[object, bool] = {}
        """By open file: whether it is shared."""
        self._stable, self._cut = 0, b""

    def truncate(self, size: int) -> None:
        if size < self._stable:
            self._cut = bytes(self.data[size : self._stable]) + self._cut
            self._stable = size
        if size <= len(self.data):
            del self.data[size:]
        else:
            self.data.extend(bytes(size - len(self.data)))

    def sync(self) -> None:
        self._stable, self._cut = len(self.data), b""

    def lose(self, rng: Random) -> None:
        """Power fails: what is not synced is lost, is there, or is there in part, with blocks of zeros or of anything."""
        if len(self.data) > self._stable or self._cut:
            match rng.choice(("lost", "there", "in part", "in part")):
                case "lost":
                    self.data[self._stable :] = self._cut
                case "in part":
                    del self.data[rng.randint(self._stable, len(self.data)) :]
                    self._damage(rng)
        self.sync()
        self.locks.clear()

    def _damage(self, rng: Random) -> None:
        start = self._stable
        while start < len(self.data):
            end = min(start - start % BLOCK + BLOCK, len(self.data))
            if rng.random() < 0.2:
                self.data[start:end] = bytes(end - start) if rng.random() < 0.7 else rng.randbytes(end - start)
            start = end


class DirectoryNode:
    """Names in a directory. `synced`: those that a power failure leaves."""

    def __init__(self) -> None:
        self.names: dict[str, Node] = {}
        self.synced: dict[str, Node] = {}
        self.modified = 0


Node = FileNode | DirectoryNode


class Entry(NamedTuple):
    """What a name in a directory stands for from now on; None: nothing."""

    directory: DirectoryNode
    name: str
    node: Node | None

    def enter(self, names: dict[str, Node]) -> None:
        if self.node is None:
            names.pop(self.name, None)
        else:
            names[self.name] = self.node


class Tree:
    """Paths, and the changes of names that are not synced, in their order. A change is made whole or not at all; of those in one
    directory, a power failure leaves the first few."""

    def __init__(self) -> None:
        self.root = DirectoryNode()
        self.used = 0
        """Bytes of files."""
        self._changes: list[tuple[Entry, ...]] = []

    def find(self, path: Path) -> Node:
        """Raises `FileNotFoundError`, `NotADirectoryError`."""
        node: Node = self.root
        for name in _names(path):
            if isinstance(node, FileNode):
                raise error(errno.ENOTDIR, path)
            if name not in node.names:
                raise error(errno.ENOENT, path)
            node = node.names[name]
        return node

    def parent(self, path: Path) -> tuple[DirectoryNode, str]:
        """The directory of `path`, and the name in it; "" for the root. Raises like `find`."""
        names = _names(path)
        parent = self.find(path.parent) if names else self.root
        if isinstance(parent, FileNode):
            raise error(errno.ENOTDIR, path)
        return parent, names[-1] if names else ""

    def change(self, *entries: Entry) -> None:
        """In order."""
        for entry in entries:
            entry.enter(entry.directory.names)
        self._changes.append(entries)

    def sync(self, directory: DirectoryNode) -> None:
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
                entry.enter(entry.directory.synced)
        self._changes = left[::-1]

    def write_back(self) -> None:
        """Everything is on the disk."""
        for change in self._changes:
            for entry in change:
                entry.enter(entry.directory.synced)
        self._changes = []
        for node in self._all(self.root):
            if isinstance(node, FileNode):
                node.sync()

    def lose(self, rng: Random) -> None:
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
                    entry.enter(entry.directory.synced)
                left |= {directory: left[directory] - 1 for directory in directories}
            else:
                left |= dict.fromkeys(directories, 0)
        self._changes = []
        self.used = 0
        pending: list[Node] = [self.root]
        while pending:
            node = pending.pop()
            if isinstance(node, DirectoryNode):
                node.names = dict(sorted(node.synced.items()))
                pending += node.names.values()
            else:
                node.linked = True
                node.lose(rng)
                self.used += len(node.data)

    def _all(self, node: Node) -> list[Node]:
        found: list[Node] = [node]
        for each in found:
            if isinstance(each, DirectoryNode):
                found += each.names.values()
        return found


def _names(path: Path) -> tuple[str, ...]:
    if ".." in path.parts:
        raise ValueError(f"{path}: '..' is not simulated")
    return path.parts[1:] if path.is_absolute() else path.parts


def error(number: int, path: Path) -> OSError:
    """`FileNotFoundError` for `ENOENT`, and so on."""
    return OSError(number, os.strerror(number), str(path))


__all__ = ["DirectoryNode", "Entry", "FileNode", "Node", "Tree", "error"]
