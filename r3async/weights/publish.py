"""Versions of the weights: what one consists of, how it gets from the learner to the engines' hosts, and how it is verified.

A version is one safetensors file in shared memory, so an engine maps it instead of copying it through a socket. Every
tensor has a checksum over its bytes: what was published is what is installed, or the run stops and names the tensor. A version
arrives as a file that an engine of that host maps, and is verified there before anything is paused. Or, with `weights.nccl`, the
manifest says where workers receive it when the engine is paused.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import msgspec
import xxhash

from r3async.data.container import dtype_name, encode_header, tensor_bytes
from r3async.world import Files, World
from r3async.world.files import make_directory, write_aside
from r3async.world.real import REAL

if TYPE_CHECKING:
    import torch

_SPARE_BYTES = 16 * 2**20
BUCKET_BYTES = 64 * 2**20
_ALIGN = 16
"""Bytes: where a run of tensors may begin in memory."""
LOCK = "lock"
"""A file in each folder, which its owner holds."""

Buffer = bytes | memoryview


class WeightError(RuntimeError):
    """Weights that cannot be published, or a published file that is not what its manifest says."""


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor as published; `checksum` is XXH3 (64 bits) of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    checksum: int


class NcclSource(msgspec.Struct, frozen=True):
    """Where workers ask for a version that comes to them from the learner's GPU; see `weights.nccl`.

    `receiver` is one start of a generator, `generator`; it asks at `endpoint` (ZeroMQ).
    """

    endpoint: str
    generator: str
    receiver: str
    timeout: float


class WeightManifest(msgspec.Struct, frozen=True):
    """One version: a safetensors file with Hugging Face names, and its contents.

    `path` is where the file is on this host; empty where it has not arrived yet (see `WeightReceiver`). With a `source`
    there is no file to read: workers receive the tensors from there, and `path` is the file's on the learner's host. `nbytes`
    are those of the tensors.
    """

    version: int
    path: str
    tensors: dict[str, TensorEntry]
    nbytes: int
    source: NcclSource | None = None
    lineage: int = 0
    """In which `version` is counted."""

    @property
    def digest(self) -> int:
        """crc32 of the contents' names, shapes, dtypes and checksums: equal contents have equal digests."""
        return zlib.crc32(msgspec.msgpack.encode(self.tensors, order="sorted"))


class Difference(msgspec.Struct, frozen=True):
    """A published tensor of which an engine holds something else: in `elements` places of its `parameter`."""

    tensor: str
    parameter: str
    elements: int


class Publication(msgspec.Struct, frozen=True):
    """A version as the learner's host gives it away. `parts` are what the transport needs beside the manifest."""

    manifest: WeightManifest
    parts: list[Any] = []


class WeightSender(Protocol):
    """At the learner. Blocking; one call at a time."""

    def send(
        self, version: int, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, reading: Collection[int] = ()
    ) -> Publication:
        """Give away `tensors` as `version`, floating-point ones in `dtype`. Versions that engines are `reading` stay.

        Raises `WeightError`.
        """
        ...

    def close(self) -> None:
        """Nothing that was sent can be fetched any more. Idempotent."""
        ...


class WeightReceiver(Protocol):
    """At a generator. Blocking; one call at a time."""

    def fetch(self, manifest: WeightManifest, parts: Sequence[Any], timeout: float) -> WeightManifest:
        """Bring a version to this host. The manifest that is returned has the path of a file that is here, and stays until
        the next version is fetched, or a `source`. Raises `WeightError`, or `TimeoutError` after `timeout` seconds."""
        ...

    def close(self) -> None:
        """Remove what was fetched. Idempotent."""
        ...


def default_directory() -> Path:
    """`/dev/shm/r3async-<uid>`, or the same name in the temporary directory where there is no shared memory."""
    shared = Path("/dev/shm")
    base = shared if shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    return base / f"r3async-{os.getuid()}"


class VersionFolder:
    """Files of versions in a folder of its own below `directory`, of which the last `keep` stay.

    A file that an engine has mapped stays readable to it after it was removed here. The folder is locked while its owner
    lives; folders whose owner was lost without `close` are removed when the next one starts, so killed runs do not fill the
    memory. Blocking, and not thread-safe: call it from one thread at a time.
    """

    def __init__(self, directory: Path, keep: int, world: World = REAL):
        if keep < 1:
            raise ValueError(f"`keep` must be at least 1, got {keep}")
        self.keep, self._files = keep, world.files
        make_directory(directory.parent, files=world.files)
        try:
            world.files.claim(directory)
        except PermissionError as error:
            raise WeightError(
                f"{directory} {error.strerror}: weights there could be replaced by others. Remove it, or set "
                "weights.directory to a directory of your own"
            ) from error
        _remove_abandoned(directory, world.files)
        name = world.unique()[:16]
        new, self.path = directory / f"new-{name}", directory / f"weights-{name}"
        world.files.make(new, 0o700)
        self._lock = world.files.open(new / LOCK, new=True)
        self._lock.lock()
        world.files.rename(new, self.path)  # others look for this name only, and now it is locked
        self._versions: list[tuple[int, Path]] = []
        self._closed = False

    def write(self, version: int, nbytes: int, parts: Iterable[Buffer], reading: Collection[int] = ()) -> Path:
        """Write the parts, about `nbytes` in all, one after the other into the file of `version`, and forget old versions.

        Versions that engines are `reading` stay, beside the last `keep`. The file appears under its name only when it is
        complete. Raises `WeightError` if the version is not newer than the last one, or if there is no space.
        """
        if self._versions and version <= self._versions[-1][0]:
            raise WeightError(f"version {version} cannot follow version {self._versions[-1][0]}: versions only go up")
        free = self._files.free(self.path)
        if nbytes + _SPARE_BYTES > free:
            raise WeightError(
                f"version {version} needs {nbytes / 2**30:.2f} GiB but {self.path} has {free / 2**30:.2f} GiB free; "
                "enlarge /dev/shm (docker run --shm-size) or set weights.directory to a larger file system"
            )
        path = self.path / f"version-{version}.safetensors"
        try:
            write_aside(path, parts, sync=False, files=self._files)
        except OSError as error:
            raise WeightError(f"version {version} could not be written to {path}: {error}") from error
        self._versions.append((version, path))
        for old in self._versions[: -self.keep]:
            if old[0] not in reading:
                self._versions.remove(old)
                self._files.remove(old[1])
        return path

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


class Publisher(VersionFolder):
    """Writes versions of a policy where the engines of this host find them, and keeps the last `keep`.

    An engine may begin to read version v - 1 while v is written, hence `keep=2`. No more than `bucket_bytes` are held beside
    the tensors themselves.
    """

    def __init__(self, directory: Path, keep: int = 2, bucket_bytes: int = BUCKET_BYTES, world: World = REAL):
        super().__init__(directory, keep, world)
        self._bucket_bytes = bucket_bytes

    def publish(
        self, version: int, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, reading: Collection[int] = ()
    ) -> WeightManifest:
        """Write `tensors` (Hugging Face names, any device) as `version`; floating-point ones are cast to `dtype`.

        See `VersionFolder.write`. Raises `WeightError` also if there are no tensors.
        """
        encoded = EncodedWeights(version, tensors, dtype, self._bucket_bytes)
        path = self.write(version, encoded.nbytes, encoded, reading)
        return encoded.manifest(str(path))

    def send(
        self, version: int, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, reading: Collection[int] = ()
    ) -> Publication:
        """See `WeightSender`: once for all engines of this host."""
        return Publication(self.publish(version, tensors, dtype, reading))


class SharedMemoryReceiver:
    """Nothing to bring: the file is on this host."""

    def fetch(self, manifest: WeightManifest, parts: Sequence[Any], timeout: float) -> WeightManifest:
        return manifest

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Run:
    """Tensors of one dtype, one behind the other: `values` `[n]` are all of them."""

    names: list[str]
    values: torch.Tensor


class HostCopy(dict[str, "torch.Tensor"]):
    """Tensors copied into one buffer of host memory, in the order of their file, and used again for the next version: memory
    that is allocated for each costs more than the copy, and so does each tensor that is handled by itself."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        import torch

        super().__init__()
        self._described = _described(tensors)
        self._headers: dict[torch.dtype, bytes] = {}
        runs = [list(group) for _, group in itertools.groupby(tensors.items(), lambda item: item[1].dtype)]
        flat = torch.empty(sum(t.nbytes for t in tensors.values()) + _ALIGN * len(runs), dtype=torch.uint8)
        self.runs: list[Run] = []
        at = 0
        for run in runs:
            at = -(-at // _ALIGN) * _ALIGN
            sizes, dtype = [tensor.numel() for _, tensor in run], run[0][1].dtype
            values = flat[at : at + sum(sizes) * dtype.itemsize].view(dtype)
            for (name, tensor), part in zip(run, values.split(sizes), strict=True):
                self[name] = part.view(tensor.shape)
            self.runs.append(Run([name for name, _ in run], values))
            at += values.nbytes

    def fits(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Names, shapes and dtypes are those of the buffer, in its order."""
        return self._described == _described(tensors)

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> Self:
        """Copy `tensors`, on any device and in any layout, which `fits`."""
        import torch

        torch._foreach_copy_(list(self.values()), [t.detach() for t in tensors.values()])
        return self

    def header(self, dtype: torch.dtype) -> bytes:
        """Of the file, floating-point tensors being stored in `dtype`. Raises `ValueError`; see `encode_header`."""
        if dtype not in self._headers:
            stored = ((name, _stored(kind, dtype), shape) for name, shape, kind in self._described)
            self._headers[dtype] = encode_header(stored)
        return self._headers[dtype]


def _described(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    return [(name, t.shape, t.dtype) for name, t in tensors.items()]


def _stored(kind: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    return dtype if kind.is_floating_point else kind


class EncodedWeights:
    """A safetensors file as a series of parts, none larger than `bucket_bytes`, made one by one as it is iterated over.

    Tensors that are not a `HostCopy` are copied into one. The manifest is known when the last part has been taken: the checksums
    come from the bytes that were given out. Raises `WeightError` for a tensor that safetensors cannot hold, or if there is none.
    """

    def __init__(self, version: int, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, bucket_bytes: int):
        if not tensors:
            raise WeightError(f"version {version} has no tensors")
        self._version, self._dtype, self._bucket_bytes = version, dtype, bucket_bytes
        self._copy = tensors if isinstance(tensors, HostCopy) else HostCopy(tensors).fill(tensors)
        try:
            self._header = self._copy.header(dtype)
        except ValueError as error:
            raise WeightError(str(error)) from error
        self._entries: dict[str, TensorEntry] = {}
        runs = self._copy.runs
        self.nbytes = sum(run.values.numel() * _stored(run.values.dtype, dtype).itemsize for run in runs)

    def __iter__(self) -> Iterator[Buffer]:
        yield self._header
        for run in self._copy.runs:
            stored = _stored(run.values.dtype, self._dtype)
            kind, most = dtype_name(stored), max(1, self._bucket_bytes // stored.itemsize)
            held: list[tuple[str, tuple[int, ...], int]] = []
            start = stop = 0
            for name in run.names:
                tensor = self._copy[name]
                size = tensor.numel()
                if held and stop + size - start > most:
                    yield self._together(kind, held, tensor_bytes(run.values[start:stop].to(stored)))
                    held, start = [], stop
                if size > most:
                    pieces = run.values[stop : stop + size].split(most)
                    yield from self._alone(kind, name, (piece.to(stored) for piece in pieces))
                    start = stop + size
                else:
                    held.append((name, tuple(tensor.shape), size * stored.itemsize))
                stop += size
            if held:
                yield self._together(kind, held, tensor_bytes(run.values[start:stop].to(stored)))

    def _together(self, kind: str, held: list[tuple[str, tuple[int, ...], int]], data: memoryview) -> memoryview:
        at = 0
        for name, shape, nbytes in held:
            self._entries[name] = TensorEntry(kind, shape, xxhash.xxh3_64_intdigest(data[at : at + nbytes]))
            at += nbytes
        return data

    def _alone(self, kind: str, name: str, pieces: Iterable[torch.Tensor]) -> Iterator[Buffer]:
        digest = xxhash.xxh3_64()
        for piece in pieces:
            data = tensor_bytes(piece)
            digest.update(data)
            yield data
        self._entries[name] = TensorEntry(kind, tuple(self._copy[name].shape), digest.intdigest())

    def manifest(self, path: str) -> WeightManifest:
        """What was given out, and is now at `path`."""
        assert len(self._entries) == len(self._copy)
        return WeightManifest(version=self._version, path=path, tensors=self._entries, nbytes=self.nbytes)


def _remove_abandoned(directory: Path, files: Files) -> None:
    for name in files.list(directory):
        if name.startswith("weights-"):
            with contextlib.suppress(OSError), files.open(directory / name / LOCK, create=True) as lock:
                lock.lock()  # else its owner lives
                files.remove_tree(directory / name)
