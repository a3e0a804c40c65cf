"""Versions of the weights: what one consists of, how it gets from the learner to the engines' hosts, and how it is verified.

A version is one safetensors file in shared memory, so an engine maps it instead of copying it through a socket. Every
tensor has a checksum over its bytes: what was published is what is installed, or the run stops and names the tensor. A version
arrives as a file that an engine of that host maps, and is verified there before anything is paused. Or, with `weights.nccl`, the
manifest says where workers receive it when the engine is paused.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import msgspec

from r3async.weights.content import SafetensorsEncoder
from r3async.weights.manifest import WeightError, WeightManifest
from r3async.world import Buffer, Files, World
from r3async.world.files import make_directory, write_atomically
from r3async.world.real import REAL_WORLD

if TYPE_CHECKING:
    import torch

_SPARE_BYTES = 16 * 2**20
DEFAULT_BUCKET_BYTES = 64 * 2**20
ENLARGE_HINT = "enlarge /dev/shm (docker run --shm-size) or set weights.directory to a larger file system"
LOCK_FILE = "lock"
"""A file in each folder, which its owner holds."""


class TransferOffer(msgspec.Struct, frozen=True):
    """A version as the learner's host gives it away. `transport_data` are what the transport needs beside the manifest."""

    manifest: WeightManifest
    transport_data: list[Any] = []


class WeightSender(Protocol):
    """At the learner. Blocking; one call at a time."""

    def publish_tensors(
        self,
        version: int,
        tensors: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        versions_in_use: Collection[int] = (),
    ) -> TransferOffer:
        """Give away `tensors` as `version`, in their `choose_stored_dtype`. Versions that engines are `versions_in_use` stay.

        Raises `WeightError`, and `OSError`, after which it can be sent again, if the disk does not take it.
        """
        ...

    def announce_version(self, manifest: WeightManifest) -> TransferOffer:
        """Give away a version whose file is on this host already."""
        ...

    def close(self) -> None:
        """Nothing that was sent can be fetched any more. Idempotent."""
        ...


class WeightReceiver(Protocol):
    """At a generator, on its event loop. One call at a time."""

    async def fetch_version(
        self, manifest: WeightManifest, transport_data: Sequence[Any], timeout: float
    ) -> WeightManifest:
        """Bring a version to this host. The manifest that is returned has the path of a file that is here, and stays until
        the next version is fetched, or a `source`. Raises `WeightError`, `OSError` if the disk does not take it, or
        `TimeoutError` after `timeout` seconds."""
        ...

    async def discard_version(self, manifest: WeightManifest) -> None:
        """The file that `fetch_version` returned is not what was published: it is fetched again when it is asked for next."""
        ...

    async def close(self) -> None:
        """Remove what was fetched. Idempotent."""
        ...


def default_weights_directory() -> Path:
    """`/dev/shm/r3async-<uid>`, or the same name in the temporary directory where there is no shared memory."""
    shared = Path("/dev/shm")
    base = shared if shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    return base / f"r3async-{os.getuid()}"


def claim_directory(directory: Path, files: Files) -> None:
    """Have `directory`, for this user alone, and remove folders in it whose owner was lost. Raises `WeightError`."""
    make_directory(directory.parent, files=files)
    try:
        files.make_private_directory(directory)
    except PermissionError as error:
        raise WeightError(
            f"{directory} {error.strerror}: weights there could be replaced by others. Remove it, or set "
            "weights.directory to a directory of your own"
        ) from error
    _remove_abandoned_folders(directory, files)


def check_free_space(path: Path, nbytes: int, version: int, files: Files, kept_bytes: int = 0) -> None:
    """Raises `OSError` if the file system of `path` has no space for a version now, and `WeightError` if it never has,
    `kept_bytes` so many bytes that stay."""
    wanted, whole, free = nbytes + _SPARE_BYTES, files.total_bytes(path), files.free_bytes(path)
    needs = f"version {version} needs {nbytes / 2**30:.2f} GiB"
    if kept_bytes + wanted > whole:
        needs += f" beside the {kept_bytes / 2**30:.2f} GiB of the one before" * bool(kept_bytes)
        raise WeightError(f"{needs} but {path} can hold {whole / 2**30:.2f} GiB; {ENLARGE_HINT}")
    if wanted > free:
        raise OSError(errno.ENOSPC, f"{needs} but {path} has {free / 2**30:.2f} GiB free; {ENLARGE_HINT}")


def delta_path(path: Path) -> Path:
    """Beside the file of a version: what makes it of the version before."""
    return path.with_suffix(".delta")


class VersionFolder:
    """Files of versions in a folder of its own below `directory`, of which the last `keep` stay.

    A file that an engine has mapped stays readable to it after it was removed here. The folder is locked while its owner
    lives; folders whose owner was lost without `close` are removed when the next one starts, so killed runs do not fill the
    memory. Blocking, and not thread-safe: call it from one thread at a time.
    """

    def __init__(self, directory: Path, keep: int, world: World = REAL_WORLD):
        if keep < 1:
            raise ValueError(f"`keep` must be at least 1, got {keep}")
        self.keep, self._files = keep, world.files
        claim_directory(directory, world.files)
        name = world.unique_id()[:16]
        new, self.path = directory / f"new-{name}", directory / f"weights-{name}"
        world.files.create_directory(new, 0o700)
        self._lock = world.files.open(new / LOCK_FILE, exclusive=True)
        self._lock.lock()
        world.files.rename(new, self.path)  # others look for this name only, and now it is locked
        self._versions: list[tuple[int, Path]] = []
        self._closed = False

    def write_version(
        self, version: int, nbytes: int, parts: Iterable[Buffer], versions_in_use: Collection[int] = ()
    ) -> Path:
        """Write the parts, about `nbytes` in all, one after the other into the file of `version`, and forget old versions.

        Versions that engines are `versions_in_use` stay, beside the last `keep`. The file appears under its name only when it is
        complete. Raises `WeightError` if the version is not newer than the last one, and `OSError`, after which it can be written
        again, if the disk does not take it.
        """
        path = self.reserve_version(version, nbytes, versions_in_use)
        write_atomically(path, parts, fsync=False, files=self._files)
        self.add_version(version, path, versions_in_use)
        return path

    def reserve_version(self, version: int, nbytes: int, versions_in_use: Collection[int] = ()) -> Path:
        """Where the file of `version` is to be. What it needs the space of is forgotten, but for the last version. Raises what
        `write_version` raises."""
        if self._versions and version <= self._versions[-1][0]:
            raise WeightError(f"version {version} cannot follow version {self._versions[-1][0]}: versions only go up")
        beside = nbytes if self._versions else 0
        try:
            check_free_space(self.path, nbytes, version, self._files, beside)
        except OSError:
            self._remove_old_versions(1, versions_in_use)
            check_free_space(self.path, nbytes, version, self._files, beside)
        return self.path / f"version-{version}.safetensors"

    def add_version(self, version: int, path: Path, versions_in_use: Collection[int] = ()) -> None:
        """The file is there: forget old versions."""
        self._versions.append((version, path))
        self._remove_old_versions(self.keep, versions_in_use)

    def _remove_old_versions(self, keep: int, versions_in_use: Collection[int]) -> None:
        """All versions but the last `keep`, and those that engines are `versions_in_use`."""
        for old in self._versions[:-keep]:
            if old[0] not in versions_in_use:
                with contextlib.suppress(OSError):  # else with the next version
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


class VersionStore(VersionFolder):
    """Writes versions of a policy where the engines of this host find them, and keeps the last `keep`.

    An engine may begin to read version v - 1 while v is written, hence `keep=2`. No more than `bucket_bytes` are held beside
    the tensors themselves.
    """

    def __init__(
        self, directory: Path, keep: int = 2, bucket_bytes: int = DEFAULT_BUCKET_BYTES, world: World = REAL_WORLD
    ):
        super().__init__(directory, keep, world)
        self._bucket_bytes = bucket_bytes

    def write_tensors(
        self,
        version: int,
        tensors: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        versions_in_use: Collection[int] = (),
    ) -> WeightManifest:
        """Write `tensors` (Hugging Face names, any device) as `version`; see `choose_stored_dtype`.

        See `VersionFolder.write_version`. Raises `WeightError` also if there are no tensors.
        """
        encoded = SafetensorsEncoder(version, tensors, dtype, self._bucket_bytes)
        path = self.write_version(version, encoded.nbytes, encoded, versions_in_use)
        return encoded.build_manifest(str(path))

    def publish_tensors(
        self,
        version: int,
        tensors: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        versions_in_use: Collection[int] = (),
    ) -> TransferOffer:
        """See `WeightSender`: once for all engines of this host."""
        return self.announce_version(self.write_tensors(version, tensors, dtype, versions_in_use))

    def announce_version(self, manifest: WeightManifest) -> TransferOffer:
        """See `WeightSender`."""
        return TransferOffer(manifest)


class SharedMemoryReceiver:
    """Nothing to bring: the file is on this host."""

    async def fetch_version(self, manifest: WeightManifest, parts: Sequence[Any], timeout: float) -> WeightManifest:
        return manifest

    async def discard_version(self, manifest: WeightManifest) -> None:
        pass

    async def close(self) -> None:
        pass


def _remove_abandoned_folders(directory: Path, files: Files) -> None:
    for name in files.list_names(directory):
        if name.startswith("weights-"):
            with contextlib.suppress(OSError), files.open(directory / name / LOCK_FILE, create=True) as lock:
                lock.lock()  # else its owner lives
                files.remove_tree(directory / name)
