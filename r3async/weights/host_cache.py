"""The cache of versions on a host: one engine fetches a file, and all of the host map it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from r3async.weights.delta import VersionDigest
from r3async.weights.manifest import BASE_VERSION
from r3async.weights.version_folder import LOCK_FILE, claim_directory
from r3async.world import File, World
from r3async.world.real import REAL_WORLD

LOCK_SECONDS = 5.0
"""Seconds to wait for a lock. Other processes hold these locks only for a moment."""


class HostVersionCache:
    """A folder of versions below `directory` that all processes of this host with the
    same `name` share.

    Each process holds a shared lock on the folder. If no process does, the next one to come
    removes it, as with a `VersionFolder`. A process that uses a version holds a shared lock on its
    file, so a killed process releases it. Blocking; raises `OSError`, and `WeightError` for a
    directory of another user.
    """

    def __init__(self, directory: Path, name: str, world: World = REAL_WORLD):
        self._files = world.files
        claim_directory(directory, world.files)
        self.path = directory / f"weights-{name}"
        while True:
            with contextlib.suppress(FileExistsError):
                self._files.create_directory(self.path, 0o700)
            # Another process removes it, since nobody held it.
            with contextlib.suppress(FileNotFoundError):
                lock = self._files.open(self.path / LOCK_FILE, create=True)
                lock.lock(shared=True, timeout=LOCK_SECONDS)
                if self._files.stat(self.path / LOCK_FILE) is not None:
                    break
                lock.close()
        self._lock: File = lock
        self._locked_files: list[File] = []
        self._base_files: list[File] = []

    def version_path(self, version: VersionDigest) -> Path:
        """Return the path of a version's file, whether or not it exists."""
        return self.path / f"version-{version.version}-{version.digest:08x}.safetensors"

    def acquire_version(self, version: VersionDigest) -> Path | None:
        """Return the file of a version if it is here and complete, else None.

        The file stays until another version is acquired. The version acquired
        before may be removed, except `BASE_VERSION`.
        """
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
        if version.version == BASE_VERSION:
            self._base_files.append(file)
            return path
        used = self._locked_files
        self._locked_files = [file]
        for before in used:
            before.close()
        return path

    def discard_version(self, version: VersionDigest) -> None:
        """Remove the file of a version that differs from what was published. Processes
        that use it keep it."""
        self._files.remove(self.version_path(version))

    @contextlib.contextmanager
    def claim_fetch(self) -> Iterator[bool]:
        """Yield True in at most one process of the host at a time, else False.

        If True, files that a killed process has left behind are removed.
        """
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
        """Remove versions that nobody uses, except `keep`. For the process that is fetching."""
        for name in self._files.list_names(self.path):
            path = self.path / name
            if not name.startswith("version-") or (
                keep is not None and path == self.version_path(keep)
            ):
                continue
            with (
                contextlib.suppress(BlockingIOError, FileNotFoundError),
                self._files.open(path) as file,
            ):
                file.lock()
                self._files.remove(path)

    def close(self) -> None:
        """Release the folder; the last process removes it."""
        used = self._locked_files + self._base_files
        self._locked_files = []
        self._base_files = []
        for file in used:
            file.close()
        with contextlib.suppress(OSError):
            self._lock.unlock()
            self._lock.lock()
            self._files.remove_tree(self.path)
        self._lock.close()
