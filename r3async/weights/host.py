"""The versions that a host has: one file each, which all engines of the host map, and one of them fetches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from r3async.weights.delta import VersionDigest
from r3async.weights.publish import LOCK_FILE, claim_directory
from r3async.world import File, World
from r3async.world.real import REAL_WORLD

LOCK_SECONDS = 5.0
"""Others hold these locks for a moment only."""


class HostVersionCache:
    """A folder below `directory` that all processes of this host which give the same `name` share.

    Each holds it with a shared lock; when nobody does, whoever comes next removes it, as a `VersionFolder`. Who has a version in
    use holds its file with a shared lock, so a process that is killed lets go of it. Blocking; raises `OSError`, and
    `WeightError` for a directory of another user's."""

    def __init__(self, directory: Path, name: str, world: World = REAL_WORLD):
        self._files = world.files
        claim_directory(directory, world.files)
        self.path = directory / f"weights-{name}"
        while True:
            with contextlib.suppress(FileExistsError):
                self._files.create_directory(self.path, 0o700)
            with contextlib.suppress(FileNotFoundError):  # somebody removes it, for nobody held it
                lock = self._files.open(self.path / LOCK_FILE, create=True)
                lock.lock(shared=True, timeout=LOCK_SECONDS)
                if self._files.stat(self.path / LOCK_FILE) is not None:
                    break
                lock.close()
        self._lock: File = lock
        self._locked_files: list[File] = []

    def version_path(self, version: VersionDigest) -> Path:
        """Where the file of a version is, if it is here."""
        return self.path / f"version-{version.version}-{version.digest:08x}.safetensors"

    def acquire_version(self, version: VersionDigest) -> Path | None:
        """Its file, if it is here and complete; it stays until another one is used. What was used before may be removed."""
        path = self.version_path(version)
        try:
            file = self._files.open(path)
        except FileNotFoundError:
            return None
        try:
            file.lock(shared=True, timeout=LOCK_SECONDS)
            if self._files.stat(path) is None:  # removed in between
                raise FileNotFoundError
        except (BlockingIOError, FileNotFoundError):
            file.close()
            return None
        used, self._locked_files = self._locked_files, [file]
        for before in used:
            before.close()
        return path

    def discard_version(self, version: VersionDigest) -> None:
        """What is here of it is not what was published. Who has it in use keeps it."""
        self._files.remove(self.version_path(version))

    @contextlib.contextmanager
    def claim_fetch(self) -> Iterator[bool]:
        """True in the block of at most one process of the host. What another one left there when it was killed is removed."""
        with self._files.open(self.path / "fetching", create=True) as lock:
            try:
                lock.lock()
            except BlockingIOError:
                yield False
                return
            for name in self._files.list_names(self.path):
                if name.startswith("."):
                    self._files.remove(self.path / name)
            yield True

    def remove_unused_versions(self, keep: VersionDigest | None) -> None:
        """Remove versions that nobody uses, but for `keep`. For who is fetching."""
        for name in self._files.list_names(self.path):
            path = self.path / name
            if not name.startswith("version-") or (keep is not None and path == self.version_path(keep)):
                continue
            with contextlib.suppress(BlockingIOError, FileNotFoundError), self._files.open(path) as file:
                file.lock()
                self._files.remove(path)

    def close(self) -> None:
        """The last one removes the folder. Idempotent."""
        used, self._locked_files = self._locked_files, []
        for file in used:
            file.close()
        with contextlib.suppress(OSError):
            self._lock.unlock()
            self._lock.lock()
            self._files.remove_tree(self.path)
        self._lock.close()
