"""Publishes versions of the weights: writes them for the engines of a host and offers them to other hosts.

A version is one safetensors file in shared memory, so an engine maps it instead of copying it through a socket. Every
tensor has a checksum over its bytes: the installed weights equal the published ones, or the run stops and names the
tensor. A version arrives as a file that an engine of that host maps, and is verified there before anything is paused.
With `weights.nccl`, the manifest instead names the source from which workers receive it while the engine is paused.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import msgspec
import xxhash

from r3async.data.container import encode_safetensors_header, tensor_bytes, torch_dtype_name
from r3async.data.models import EXPERT_BIAS_SUFFIX
from r3async.weights.delta import (
    DELTA_BLOCK_BYTES,
    VersionDigest,
    digest_version,
    encode_delta,
    encode_records,
    is_delta_worthwhile,
    iter_blocks,
    make_delta_header,
)
from r3async.weights.manifest import TensorEntry, WeightError, WeightManifest
from r3async.world import ActorLostError, Buffer, File, Files, World
from r3async.world.disk import write_at
from r3async.world.files import make_directory, write_atomically
from r3async.world.real import REAL_WORLD

if TYPE_CHECKING:
    import torch

_SPARE_BYTES = 16 * 2**20
DEFAULT_BUCKET_BYTES = 64 * 2**20
ENLARGE_HINT = "enlarge /dev/shm (docker run --shm-size) or set weights.directory to a larger file system"
LOCK_FILE = "lock"
"""Name of the file in each folder that its owner locks."""


class PublishedPart(msgspec.Struct, frozen=True):
    """The part of a version's file that one of the learner's hosts has, as a file of its own.

    A version's file is its parts, one after the other. With one host it is one part.

    Attributes:
        path: The part's file on its host.
        nbytes: Size of that file.
        base: The version that the delta beside it changes into this one; None if there is no delta.
        delta_bytes: Size of the delta.
        endpoint: Address at which a sender of that host serves the part; empty on the learner's own host.
    """

    path: str
    nbytes: int
    base: VersionDigest | None = None
    delta_bytes: int = 0
    endpoint: str = ""

    @property
    def name(self) -> str:
        """The name of the part among all parts: its folder has a name of its own."""
        path = Path(self.path)
        return f"{path.parent.name}/{path.stem}"

    @property
    def file_paths(self) -> dict[str, str]:
        """The files with the part's bytes, and its delta's if there is one, by name."""
        delta = {delta_name(self.name): str(delta_path(Path(self.path)))} if self.base is not None else {}
        return {self.name: self.path, **delta}


class TransferOffer(msgspec.Struct, frozen=True):
    """An offer of a version by the learner's host.

    `transport_data` is what the transport needs besides the manifest.
    """

    manifest: WeightManifest
    transport_data: list[Any] = []


class WeightSender(Protocol):
    """The learner's end of a weight transport. Blocking; one call at a time."""

    def publish_tensors(
        self,
        version: int,
        tensors: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        versions_in_use: Collection[int] = (),
    ) -> TransferOffer:
        """Publish `tensors` as `version`, in their `choose_stored_dtype`. The `versions_in_use` by engines are kept.

        Raises `WeightError`, and `OSError` if the disk does not accept the version, after which it can be published
        again.
        """
        ...

    def announce_version(self, manifest: WeightManifest) -> TransferOffer:
        """Publish a version whose file is on this host already."""
        ...

    def close(self) -> None:
        """Stop serving: no published version can be fetched any more. Idempotent."""
        ...


class WeightReceiver(Protocol):
    """A generator's end of a weight transport, on its event loop. One call at a time."""

    async def fetch_version(
        self, manifest: WeightManifest, transport_data: Sequence[Any], timeout: float
    ) -> WeightManifest:
        """Fetch a version to this host and return its manifest with a local path, or with a `source`.

        The file at that path stays until the next version is fetched. Raises `WeightError`, `OSError` if the disk does
        not accept the file, or `TimeoutError` after `timeout` seconds.
        """
        ...

    async def discard_version(self, manifest: WeightManifest) -> None:
        """Discard a fetched file that differs from what was published, so that the next call fetches it again."""
        ...

    async def close(self) -> None:
        """Remove the fetched files. Idempotent."""
        ...


def default_weights_directory() -> Path:
    """Return `/dev/shm/r3async-<uid>`, or the same name in the temporary directory if there is no shared memory."""
    shared = Path("/dev/shm")
    base = shared if shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    return base / f"r3async-{os.getuid()}"


def claim_directory(directory: Path, files: Files) -> None:
    """Create `directory` for this user alone, and remove folders in it whose owner was lost. Raises `WeightError`."""
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
    """Raise `OSError` if the file system of `path` has no space for a version now, and `WeightError` if it never will.

    `kept_bytes` is the size of the files that stay beside the version.
    """
    wanted, whole, free = nbytes + _SPARE_BYTES, files.total_bytes(path), files.free_bytes(path)
    needs = f"version {version} needs {nbytes / 2**30:.2f} GiB"
    if kept_bytes + wanted > whole:
        needs += f" beside the {kept_bytes / 2**30:.2f} GiB of the one before" * bool(kept_bytes)
        raise WeightError(f"{needs} but {path} can hold {whole / 2**30:.2f} GiB; {ENLARGE_HINT}")
    if wanted > free:
        raise OSError(errno.ENOSPC, f"{needs} but {path} has {free / 2**30:.2f} GiB free; {ENLARGE_HINT}")


def delta_name(name: str) -> str:
    """Return the name of the delta of a part of that name."""
    return f"{name}-delta"


def delta_path(path: Path) -> Path:
    """Return the path of a version's delta from the version before, which is beside the version's file."""
    return path.with_suffix(".delta")


class VersionFolder:
    """A new folder below `directory` with the files of versions, of which the last `keep` stay.

    A file that an engine has mapped stays readable to it after it was removed here. The folder is locked while its
    owner lives; folders whose owner was lost without `close` are removed when the next owner starts, so killed runs do
    not fill the memory. Blocking, and not thread-safe: call it from one thread at a time.
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
        world.files.rename(new, self.path)  # others look only for this name, and by now it is locked
        self._versions: list[tuple[int, Path]] = []
        self._closed = False

    def write_version(
        self, version: int, nbytes: int, parts: Iterable[Buffer], versions_in_use: Collection[int] = ()
    ) -> Path:
        """Write the parts, about `nbytes` in all, in order to the file of `version`, and remove old versions.

        The `versions_in_use` by engines are kept, besides the last `keep`. The file appears under its name only when it
        is complete. Raises `WeightError` if the version is not newer than the last one, and `OSError` if the disk does
        not accept it, after which it can be written again.
        """
        path = self.reserve_version(version, nbytes, versions_in_use)
        write_atomically(path, parts, fsync=False, files=self._files)
        self.add_version(version, path, versions_in_use)
        return path

    def reserve_version(self, version: int, nbytes: int, versions_in_use: Collection[int] = ()) -> Path:
        """Make room for the file of `version` and return its path.

        Old versions are removed if their space is needed, except the last one. Raises the errors of `write_version`.
        """
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


class VersionStore(VersionFolder):
    """A store of a policy's versions for the engines of this host, which keeps the last `keep`.

    An engine may begin to read version v - 1 while v is written, hence `keep=2`. No more than `bucket_bytes` are held
    in memory besides the tensors themselves.
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
        """Implement `WeightSender.publish_tensors`, with one file for all engines of this host."""
        return self.announce_version(self.write_tensors(version, tensors, dtype, versions_in_use))

    def announce_version(self, manifest: WeightManifest) -> TransferOffer:
        """Implement `WeightSender.announce_version`."""
        return TransferOffer(manifest)


class SharedMemoryReceiver:
    """A generator's end of the shared-memory transport. It fetches nothing: the file is on this host already."""

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


# The contents of a version: tensors copied to host memory, and the bytes of their file.


_ALIGN_BYTES = 16
"""Alignment in bytes of a segment of tensors in memory."""


@dataclass(frozen=True)
class TensorSegment:
    """A run of tensors that have one dtype and are published in one dtype.

    `values` `[n]` has them one after the other.
    """

    names: list[str]
    values: torch.Tensor


class HostWeights(dict[str, "torch.Tensor"]):
    """The tensors of a version, copied to one buffer of host memory in the order of their file.

    The buffer is reused for the next version: allocating it for each version would cost more than the copy, and so
    would copying tensors one by one.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        import torch

        super().__init__()
        self._layout = _describe_layout(tensors)
        self._headers: dict[torch.dtype, bytes] = {}
        alike = itertools.groupby(tensors.items(), lambda item: (item[1].dtype, _keeps_own_dtype(item[0])))
        runs = [list(group) for _, group in alike]
        flat = torch.empty(sum(t.nbytes for t in tensors.values()) + _ALIGN_BYTES * len(runs), dtype=torch.uint8)
        self.segments: list[TensorSegment] = []
        at = 0
        for run in runs:
            at = -(-at // _ALIGN_BYTES) * _ALIGN_BYTES
            sizes, dtype = [tensor.numel() for _, tensor in run], run[0][1].dtype
            values = flat[at : at + sum(sizes) * dtype.itemsize].view(dtype)
            for (name, tensor), part in zip(run, values.split(sizes), strict=True):
                self[name] = part.view(tensor.shape)
            self.segments.append(TensorSegment([name for name, _ in run], values))
            at += values.nbytes

    def matches_layout(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Return True if names, shapes and dtypes are those of the buffer, in its order."""
        return self._layout == _describe_layout(tensors)

    def copy_from(self, tensors: Mapping[str, torch.Tensor]) -> Self:
        """Copy `tensors`, on any device and in any memory layout, for which `matches_layout` is True."""
        import torch

        torch._foreach_copy_(list(self.values()), [t.detach() for t in tensors.values()])
        return self

    def copy_in_buckets(self, tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> Self:
        """Copy tensors in any order, holding no more than a bucket of them, or a single one, at once.

        Raises `WeightError` if they are not those of the buffer.
        """
        import torch

        left, held, size = dict.fromkeys(self), dict[str, torch.Tensor](), 0

        def copy() -> None:
            torch._foreach_copy_([self[name] for name in held], [t.detach() for t in held.values()])

        for name, tensor in tensors:
            if name not in left or (self[name].shape, self[name].dtype) != (tensor.shape, tensor.dtype):
                raise WeightError(f"tensor {name!r} is not what it was in the first version of the weights")
            del left[name]
            if held and size + tensor.nbytes > bucket_bytes:
                copy()
                held, size = {}, 0
            held[name], size = tensor, size + tensor.nbytes
        if held:
            copy()
        if left:
            raise WeightError(
                f"tensor {next(iter(left))!r} was in the first version of the weights, and is missing now"
            )
        return self

    def describe_tensors(self, dtype: torch.dtype) -> list[tuple[str, str, tuple[int, ...]]]:
        """Return name, dtype as stored, and shape of each tensor, in the order of the file."""
        return [
            (name, torch_dtype_name(choose_stored_dtype(name, kind, dtype)), tuple(shape))
            for name, shape, kind in self._layout
        ]

    def build_header(self, dtype: torch.dtype) -> bytes:
        """Return the header of the file in which floating-point tensors are stored in `dtype`.

        Raises `ValueError`; see `encode_safetensors_header`.
        """
        if dtype not in self._headers:
            stored = ((name, choose_stored_dtype(name, kind, dtype), shape) for name, shape, kind in self._layout)
            self._headers[dtype] = encode_safetensors_header(stored)
        return self._headers[dtype]


def copy_to_host(tensors: Mapping[str, torch.Tensor], buffer: HostWeights | None) -> HostWeights:
    """Copy tensors to host memory, in `buffer` if it has their layout."""
    if buffer is None or not buffer.matches_layout(tensors):
        buffer = HostWeights(tensors)
    return buffer.copy_from(tensors)


def copy_share_to_host(
    iter_share: Callable[[], Iterable[tuple[str, torch.Tensor]]], buffer: HostWeights | None, bucket_bytes: int
) -> HostWeights:
    """Copy the tensors that `iter_share()` yields one by one to host memory.

    The first time it is called twice, so that all tensors are never in memory twice.
    """
    if buffer is None:
        buffer = HostWeights({name: tensor.to("meta") for name, tensor in iter_share()})
    return buffer.copy_in_buckets(iter_share(), bucket_bytes)


def _describe_layout(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    return [(name, t.shape, t.dtype) for name, t in tensors.items()]


def choose_stored_dtype(name: str, tensor_dtype: torch.dtype, engine_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a tensor of `tensor_dtype` is published for engines of `engine_dtype`.

    It is `engine_dtype`, unless the tensor has no floating-point dtype, or engines keep it in single precision whatever
    they compute in.
    """
    return engine_dtype if tensor_dtype.is_floating_point and not _keeps_own_dtype(name) else tensor_dtype


def _keeps_own_dtype(name: str) -> bool:
    return name.endswith(EXPERT_BIAS_SUFFIX)


class SafetensorsEncoder:
    """A safetensors file as a series of parts, none larger than `bucket_bytes`, encoded one by one during iteration.

    Tensors that are not a `HostWeights` are copied to one. The manifest is known after the last part: the checksums are
    computed over the bytes that were yielded. Raises `WeightError` for a tensor that safetensors cannot hold, or if
    there is none.
    """

    def __init__(self, version: int, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, bucket_bytes: int):
        if not tensors:
            raise WeightError(f"version {version} has no tensors")
        self._version, self._dtype, self._bucket_bytes = version, dtype, bucket_bytes
        self._copy = tensors if isinstance(tensors, HostWeights) else HostWeights(tensors).copy_from(tensors)
        try:
            self._header = self._copy.build_header(dtype)
        except ValueError as error:
            raise WeightError(str(error)) from error
        self.entries: dict[str, TensorEntry] = {}
        """Entries of the tensors yielded so far, by name."""
        runs = self._copy.segments
        self.nbytes = sum(run.values.numel() * self._segment_dtype(run).itemsize for run in runs)

    def _segment_dtype(self, run: TensorSegment) -> torch.dtype:
        return choose_stored_dtype(run.names[0], run.values.dtype, self._dtype)

    def __iter__(self) -> Iterator[Buffer]:
        yield self._header
        yield from self.iter_data()

    def iter_data(self) -> Iterator[Buffer]:
        """Yield the file without its header."""
        for run in self._copy.segments:
            stored = self._segment_dtype(run)
            kind, most = torch_dtype_name(stored), max(1, self._bucket_bytes // stored.itemsize)
            held: list[tuple[str, tuple[int, ...], int]] = []
            start = stop = 0
            for name in run.names:
                tensor = self._copy[name]
                size = tensor.numel()
                if held and stop + size - start > most:
                    yield self._record_bucket(kind, held, tensor_bytes(run.values[start:stop].to(stored)))
                    held, start = [], stop
                if size > most:
                    pieces = run.values[stop : stop + size].split(most)
                    yield from self._iter_large_tensor(kind, name, (piece.to(stored) for piece in pieces))
                    start = stop + size
                else:
                    held.append((name, tuple(tensor.shape), size * stored.itemsize))
                stop += size
            if held:
                yield self._record_bucket(kind, held, tensor_bytes(run.values[start:stop].to(stored)))

    def _record_bucket(self, kind: str, held: list[tuple[str, tuple[int, ...], int]], data: memoryview) -> memoryview:
        at = 0
        for name, shape, nbytes in held:
            self.entries[name] = TensorEntry(kind, shape, xxhash.xxh3_64_intdigest(data[at : at + nbytes]))
            at += nbytes
        return data

    def _iter_large_tensor(self, kind: str, name: str, pieces: Iterable[torch.Tensor]) -> Iterator[Buffer]:
        digest = xxhash.xxh3_64()
        for piece in pieces:
            data = tensor_bytes(piece)
            digest.update(data)
            yield data
        self.entries[name] = TensorEntry(kind, tuple(self._copy[name].shape), digest.intdigest())

    def build_manifest(self, path: str) -> WeightManifest:
        """Return the manifest of the encoded file, which is now at `path`."""
        assert len(self.entries) == len(self._copy)
        return WeightManifest(version=self._version, path=path, tensors=self.entries, nbytes=self.nbytes)


# Versions on the learner's hosts: one file on each, which one process or several ranks together write, and the delta
# beside it.
#
# No rank has more than its own part: each writes its tensors to its region of its host's file, and returns their
# checksums. No host has more than its ranks: the version's file is that of all hosts, one after the other.


CallRanks = Callable[[str, Sequence[tuple[Any, ...] | None]], list[Any]]
"""Function that calls a method of every rank with arguments, which are its own, and returns the results in rank order,
None for the others."""
CallHosts = CallRanks
"""The same with a method of the `PartFolder` of each of the learner's hosts."""


class ShareDescription(msgspec.Struct, frozen=True):
    """A rank's part of `version`, with name, dtype and shape of each tensor as stored, in the order of its region."""

    version: int
    tensors: list[tuple[str, str, tuple[int, ...]]]


class DeltaVersionStore(VersionStore):
    """A `VersionStore` for hosts that fetch. It writes a version's delta from the one before beside it, if worthwhile.

    An offer's only transport data is the `PublishedPart` that is the whole version.
    """

    def __init__(self, directory: Path, bucket_bytes: int = DEFAULT_BUCKET_BYTES, world: World = REAL_WORLD):
        super().__init__(directory, bucket_bytes=bucket_bytes, world=world)
        self._last_manifest: WeightManifest | None = None

    def announce_version(self, manifest: WeightManifest) -> TransferOffer:
        """Publish a version. If the disk does not accept its delta, hosts fetch the whole version."""
        before, self._last_manifest = self._last_manifest, manifest
        made = False
        with contextlib.suppress(OSError):
            made = before is not None and self._write_delta(before, manifest)
        base = digest_version(before) if before is not None and made else None
        return TransferOffer(manifest, [describe_part(Path(manifest.path), base, self._files)])

    def _write_delta(self, before: WeightManifest, manifest: WeightManifest) -> bool:
        """Write the delta, if worthwhile, and return True if it was written."""
        with contextlib.ExitStack() as opened:
            pair = open_delta_pair(opened, Path(before.path), Path(manifest.path), self._files.open)
            if pair is None:
                return False
            pieces = encode_delta(digest_version(before), digest_version(manifest), *pair)
            write_atomically(delta_path(Path(manifest.path)), pieces, fsync=False, files=self._files)
        return True


def describe_part(path: Path, base: VersionDigest | None, files: Files) -> PublishedPart:
    """Describe the file of a part, and its delta if it has a `base`."""
    sizes = [found.size for each in (path, delta_path(path)) if (found := files.stat(each)) is not None]
    return PublishedPart(str(path), sizes[0], base, sizes[1] if base is not None else 0)


def open_delta_pair(
    stack: contextlib.ExitStack, before: Path, path: Path, open_file: Callable[[Path], File]
) -> tuple[File, File] | None:
    """Open the files of two versions, if both exist and a delta between them is worthwhile; else return None."""
    try:
        old, new = (stack.enter_context(open_file(each)) for each in (before, path))
    except FileNotFoundError:
        return None
    return (old, new) if is_delta_worthwhile(old, new) else None


class PartFolder(VersionFolder):
    """The folder of one of the learner's hosts: the parts of versions that the ranks of this host write together."""

    def __init__(self, directory: Path, world: World = REAL_WORLD):
        super().__init__(directory, keep=2, world=world)

    def begin_part(self, version: int, head: bytes, nbytes: int, versions_in_use: Collection[int] = ()) -> str:
        """Make a file aside of `nbytes`, which begins with `head`, and return its path.

        A version that is here already was not finished on another host, and is written again. Raises the errors of
        `VersionFolder.write_version`.
        """
        while self._versions and self._versions[-1][0] == version:
            self._files.remove(self._versions.pop()[1])
        path = self.reserve_version(version, nbytes, versions_in_use)
        aside = path.with_name(f".{path.name}")
        self._files.remove(aside)
        try:
            with self._files.open(aside, exclusive=True, mode=0o600) as file:
                file.append([head])
                file.truncate(nbytes)
        except BaseException:
            self.abandon_part(str(aside))
            raise
        return str(aside)

    def finish_part(self, version: int, aside: str, versions_in_use: Collection[int] = ()) -> str:
        """Give the part's file its name, which is returned, and remove old versions."""
        path = Path(aside).with_name(Path(aside).name.removeprefix("."))
        self._files.rename(Path(aside), path)
        self.add_version(version, path, versions_in_use)
        return str(path)

    def abandon_part(self, aside: str) -> None:
        """Remove a file that will not be finished: its space is needed for the next attempt."""
        with contextlib.suppress(OSError):
            self._files.remove(Path(aside))

    def count_delta_blocks(self, before: str, path: str) -> int | None:
        """Return the number of blocks of a delta between two of the files here; None if it is not worthwhile."""
        with contextlib.ExitStack() as opened:
            pair = open_delta_pair(opened, Path(before), Path(path), self._files.open)
            return None if pair is None else len(list(iter_blocks(pair[1].size(), DELTA_BLOCK_BYTES)))

    def join_delta(self, path: str, base: VersionDigest, made: VersionDigest, pieces: Sequence[str]) -> PublishedPart:
        """Join what the ranks wrote of the delta beside `path`, and describe the part."""
        found = self._files.stat(Path(path))
        assert found is not None
        head = make_delta_header(base, made, found.size)
        joined = self._join_pieces(head, [Path(piece) for piece in pieces])
        write_atomically(delta_path(Path(path)), joined, fsync=False, files=self._files)
        return describe_part(Path(path), base, self._files)

    def copy_part(self, path: str, target: str, start: int) -> None:
        """Write a part into a file from byte `start` on."""
        with self._files.open(Path(path)) as file:
            write_at(Path(target), start, [file.map_bytes()])

    def _join_pieces(self, head: bytes, pieces: Iterable[Path]) -> Iterable[Buffer]:
        yield head
        for piece in pieces:
            with self._files.open(piece) as file:
                yield file.map_bytes()
            self._files.remove(piece)


class ShardedVersionStore:
    """Versions that the ranks of the learner's hosts write together, each host a part of its own.

    The parts are one file of the version, which begins with the first host's: its part has the header. `deltas` adds
    deltas as in `DeltaVersionStore`, one beside each part.

    Args:
        call_hosts: `call_hosts(name, args_by_host)` calls a method of the `PartFolder` of every host for which there
            are arguments, and returns the results, None for the others.
        ranks_by_host: The ranks of each host, the learner's own host first.
    """

    def __init__(
        self, call_hosts: CallHosts, call_ranks: CallRanks, ranks_by_host: Sequence[Sequence[int]], *, deltas: bool
    ):
        self._call_hosts, self._call_ranks, self._deltas = call_hosts, call_ranks, deltas
        self._ranks_by_host = ranks_by_host
        self._rank_count = sum(map(len, ranks_by_host))
        self._last_version: tuple[VersionDigest, list[PublishedPart]] | None = None

    def publish_shares(self, versions_in_use: Collection[int] = ()) -> TransferOffer:
        """Have the ranks write their snapshots; see `VersionFolder.write_version`."""
        shares: list[ShareDescription] = self._call_ranks("describe_snapshot", [()] * self._rank_count)
        version = shares[0].version
        names = [name for share in shares for name, _, _ in share.tensors]
        if any(share.version != version for share in shares):
            raise WeightError(f"the ranks hold versions {sorted({s.version for s in shares})} of the weights")
        if len(set(names)) != len(names) or not names:
            raise WeightError(f"version {version}: {len(names)} tensors of {len(set(names))} names")
        manifest, parts = self._write_shares(version, shares, versions_in_use)
        before, self._last_version = self._last_version, (digest_version(manifest), parts)
        if not self._deltas:
            return TransferOffer(manifest)
        if before is not None:
            with contextlib.suppress(ActorLostError, OSError):  # of a rank, or of the disk; hosts fetch the whole then
                parts = self._write_deltas(before, self._last_version)
        return TransferOffer(manifest, parts)

    def _write_shares(
        self, version: int, shares: Sequence[ShareDescription], versions_in_use: Collection[int]
    ) -> tuple[WeightManifest, list[PublishedPart]]:
        import torch

        in_order = [tensor for ranks in self._ranks_by_host for rank in ranks for tensor in shares[rank].tensors]
        header = encode_safetensors_header((name, getattr(torch, dtype), shape) for name, dtype, shape in in_order)
        regions: dict[int, tuple[int, int]] = {}
        """Host and offset in its file, by rank."""
        part_bytes = []
        for host, ranks in enumerate(self._ranks_by_host):
            at = 0 if host else len(header)
            for rank in ranks:
                regions[rank] = host, at
                at += count_share_bytes(shares[rank])
            part_bytes.append(at)
        heads = [b"" if host else header for host in range(len(part_bytes))]
        asides: list[str] = self._call_hosts(
            "begin_part",
            [(version, head, nbytes, versions_in_use) for head, nbytes in zip(heads, part_bytes, strict=True)],
        )
        try:
            written = self._call_ranks(
                "write_snapshot",
                [(asides[host], start) for host, start in map(regions.__getitem__, range(len(shares)))],
            )
        except BaseException:
            with contextlib.suppress(ActorLostError, OSError):
                self._call_hosts("abandon_part", [(aside,) for aside in asides])
            raise
        paths = self._call_hosts("finish_part", [(version, aside, versions_in_use) for aside in asides])
        entries: dict[str, TensorEntry] = {}
        for ranks in self._ranks_by_host:
            for rank in ranks:
                entries |= written[rank]
        nbytes = sum(part_bytes) - len(header)
        parts = [PublishedPart(*each) for each in zip(paths, part_bytes, strict=True)]
        return WeightManifest(version=version, path=paths[0], tensors=entries, nbytes=nbytes), parts

    def _write_deltas(
        self, before: tuple[VersionDigest, list[PublishedPart]], now: tuple[VersionDigest, list[PublishedPart]]
    ) -> list[PublishedPart]:
        """Write the delta of each part for which it is worthwhile, and return the parts with their deltas."""
        pairs = [(old.path, new.path) for old, new in zip(before[1], now[1], strict=True)]
        counts: list[int | None] = self._call_hosts("count_delta_blocks", pairs)
        pieces: list[list[str]] = []
        args: list[tuple[Any, ...] | None] = [None] * self._rank_count
        for (old, new), count, ranks in zip(pairs, counts, self._ranks_by_host, strict=True):
            path = delta_path(Path(new))
            pieces.append([])
            if count is None:
                continue
            for number, rank in enumerate(ranks):
                first, last = (count * n // len(ranks) for n in (number, number + 1))
                pieces[-1].append(str(path.with_name(f".{path.name}.{number}")))
                args[rank] = old, new, first, last, pieces[-1][-1]
        self._call_ranks("write_delta_part", args)
        joins = [(new, before[0], now[0], each) if each else None for (_, new), each in zip(pairs, pieces, strict=True)]
        return [made or part for made, part in zip(self._call_hosts("join_delta", joins), now[1], strict=True)]


def count_share_bytes(share: ShareDescription) -> int:
    """Return the size of a rank's region of the file."""
    import torch

    return sum(math.prod(shape) * getattr(torch, dtype).itemsize for _, dtype, shape in share.tensors)


def write_share_region(path: str, start: int, encoded: SafetensorsEncoder) -> dict[str, TensorEntry]:
    """Write a rank's tensors to its region of the file, a bucket at a time, and return their entries."""
    write_at(Path(path), start, encoded.iter_data())
    return encoded.entries


def write_delta_part(before: str, path_now: str, first: int, last: int, path: str, world: World = REAL_WORLD) -> None:
    """Write the blocks `first` to `last` of the delta between two files to a separate file."""
    with world.files.open(Path(before)) as old, world.files.open(Path(path_now)) as new:
        write_atomically(Path(path), encode_records(old, new, first, last), fsync=False, files=world.files)
