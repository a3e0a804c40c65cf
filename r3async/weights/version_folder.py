"""A folder of versions, which the next process removes if its owner was killed."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Self

from r3async.weights.interfaces import delta_path
from r3async.weights.manifest import WeightError
from r3async.world import Buffer, Files, World
from r3async.world.files import make_directory, write_atomically
from r3async.world.real import REAL_WORLD

_SPARE_BYTES = 16 * 2**20


ENLARGE_HINT = (
    "enlarge /dev/shm (docker run --shm-size) or set weights.directory to a larger file system"
)
LOCK_FILE = "lock"
"""Name of the file in each folder that its owner locks."""


def default_weights_directory() -> Path:
    """Return `/dev/shm/r3async-<uid>`, or the same name in the temporary directory if there is
    no shared memory."""
    shared = Path("/dev/shm")
    base = shared if shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    return base / f"r3async-{os.getuid()}"


def claim_directory(directory: Path, files: Files) -> None:
    """Create `directory` for this user alone, and remove folders in it whose owner was lost.
    Raises `WeightError`."""
    make_directory(directory.parent, files=files)
    try:
        files.make_private_directory(directory)
    except PermissionError as error:
        raise WeightError(
            f"{directory} {error.strerror}: weights there could be replaced by others. Remove it, "
            "or set weights.directory to a directory of your own"
        ) from error
    _remove_abandoned_folders(directory, files)


def check_free_space(
    path: Path, nbytes: int, version: int, files: Files, kept_bytes: int = 0
) -> None:
    """Raise `OSError` if the file system of `path` has no space for a version now, and
    `WeightError` if it never will.

    `kept_bytes` is the size of the files that stay beside the version.
    """
    wanted = nbytes + _SPARE_BYTES
    whole = files.total_bytes(path)
    free = files.free_bytes(path)
    needs = f"version {version} needs {nbytes / 2**30:.2f} GiB"
    if kept_bytes + wanted > whole:
        if kept_bytes:
            needs += f" beside the {kept_bytes / 2**30:.2f} GiB of the one before"
        raise WeightError(f"{needs} but {path} can hold {whole / 2**30:.2f} GiB; {ENLARGE_HINT}")
    if wanted > free:
        raise OSError(
            errno.ENOSPC, f"{needs} but {path} has {free / 2**30:.2f} GiB free; {ENLARGE_HINT}"
        )


class VersionFolder:
    """A new folder below `directory` with the files of versions, of which the last `keep` stay.

    A file that an engine has mapped stays readable to it after it was removed here. The folder is
    locked while its owner lives; folders whose owner was lost without `close` are removed when the
    next owner starts, so killed runs do not fill the memory. Blocking, and not thread-safe: call it
    from one thread at a time.
    """

    def __init__(self, directory: Path, keep: int, world: World = REAL_WORLD):
        if keep < 1:
            raise ValueError(f"`keep` must be at least 1, got {keep}")
        self.keep = keep
        self._files = world.files
        claim_directory(directory, world.files)
        name = world.unique_id()[:16]
        new = directory / f"new-{name}"
        self.path = directory / f"weights-{name}"
        world.files.create_directory(new, 0o700)
        self._lock = world.files.open(new / LOCK_FILE, exclusive=True)
        self._lock.lock()
        # Others look only for this name, and by now it is locked.
        world.files.rename(new, self.path)
        self._versions: list[tuple[int, Path]] = []
        self._closed = False

    def write_version(
        self,
        version: int,
        nbytes: int,
        parts: Iterable[Buffer],
        versions_in_use: Collection[int] = (),
    ) -> Path:
        """Write the parts, about `nbytes` in all, in order to the file of `version`, and
        remove old versions.

        The `versions_in_use` by engines are kept, besides the last `keep`. The file appears under
        its name only when it is complete. Raises `WeightError` if the version is not newer than the
        last one, and `OSError` if the disk does not accept it, after which it can be written again.
        """
        path = self.reserve_version(version, nbytes, versions_in_use)
        write_atomically(path, parts, fsync=False, files=self._files)
        self.add_version(version, path, versions_in_use)
        return path

    def reserve_version(
        self, version: int, nbytes: int, versions_in_use: Collection[int] = ()
    ) -> Path:
        """Make room for the file of `version` and return its path.

        Old versions are removed if their space is needed, except the last one. Raises the errors of
        `write_version`.
        """
        if self._versions and version <= self._versions[-1][0]:
            raise WeightError(
                f"version {version} cannot follow version {self._versions[-1][0]}: "
                "versions only go up"
            )
        beside = nbytes if self._versions else 0
        try:
            check_free_space(self.path, nbytes, version, self._files, beside)
        except OSError:
            self._remove_old_versions(1, versions_in_use)
            check_free_space(self.path, nbytes, version, self._files, beside)
        return self.path / f"version-{version}.safetensors"

    def add_version(self, version: int, path: Path, versions_in_use: Collection[int] = ()) -> None:
        """Add a version whose file is written, and remove old versions."""
        self._versions.append((version, path))
        self._remove_old_versions(self.keep, versions_in_use)

    def _remove_old_versions(self, keep: int, versions_in_use: Collection[int]) -> None:
        """Remove all versions except the last `keep` and the `versions_in_use` by engines."""
        for old in self._versions[:-keep]:
            if old[0] not in versions_in_use:
                with contextlib.suppress(OSError):  # tried again with the next version
                    self._files.remove(old[1])
                    self._files.remove(delta_path(old[1]))
                    self._versions.remove(old)

    def close(self) -> None:
        """Remove every version. Idempotent."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(OSError):
                self._files.remove_tree(self.path)
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _remove_abandoned_folders(directory: Path, files: Files) -> None:
    for name in files.list_names(directory):
        if name.startswith("weights-"):
            with (
                contextlib.suppress(OSError),
                files.open(directory / name / LOCK_FILE, create=True) as lock,
            ):
                lock.lock()  # else its owner lives
                files.remove_tree(directory / name)
