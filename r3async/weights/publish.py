"""Publishing weights for the engines of this host, and reading them back verified.

A version is one safetensors file in shared memory, so an engine maps it instead of copying it through a socket. Every
tensor has a checksum over its bytes: what was published is what is installed, or the run stops and names the tensor.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from r3async.weights.manifest import TensorEntry, WeightManifest

if TYPE_CHECKING:
    import torch

_SAFETENSORS_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_SPARE_BYTES = 16 * 2**20
BUCKET_BYTES = 64 * 2**20

Buffer = bytes | memoryview


class WeightError(RuntimeError):
    """Weights that can not be published, or a published file that is not what its manifest says."""


def default_directory() -> Path:
    """`/dev/shm/r3async-<uid>`, or the same name in the temporary directory where there is no shared memory."""
    shared = Path("/dev/shm")
    base = shared if shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    return base / f"r3async-{os.getuid()}"


def claim_directory(directory: Path) -> None:
    """Make `directory` (0700), or see that it is this user's own and nobody else writes there. Raises `WeightError`.

    In a place like `/dev/shm` anyone may have made a folder, or a link, of the name that we would use: who owns the folder
    can put other weights in the place of ours.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        found = directory.lstat()
        if stat.S_ISLNK(found.st_mode) and not _shared(directory.parent):
            found = directory.stat()  # a link that only this user can have made
        if not stat.S_ISDIR(found.st_mode):
            raise _not_ours(directory, "is a link, or no directory") from None
        if found.st_uid != os.getuid():
            raise _not_ours(directory, f"belongs to user {found.st_uid}, and this is user {os.getuid()}") from None
        if found.st_mode & 0o022:
            directory.chmod(0o700)


def _shared(directory: Path) -> bool:
    """Others may make files there."""
    return bool(directory.stat().st_mode & 0o022)


def _not_ours(directory: Path, why: str) -> WeightError:
    return WeightError(
        f"{directory} {why}: weights there could be replaced by others. Remove it, or set weights.directory to a "
        "directory of your own"
    )


class VersionFolder:
    """Files of versions in a folder of its own below `directory`, of which the last `keep` stay.

    A file that an engine has mapped stays readable to it after it was removed here. The folder is locked while its owner
    lives; folders whose owner died without `close` are removed when the next one starts, so killed runs do not fill the
    memory. Blocking, and not thread-safe: call it from one thread at a time.
    """

    def __init__(self, directory: Path, keep: int):
        if keep < 1:
            raise ValueError(f"`keep` must be at least 1, got {keep}")
        claim_directory(directory)
        self.keep = keep
        _remove_abandoned(directory)
        new = Path(tempfile.mkdtemp(prefix="new-", dir=directory))
        self._lock = _lock(new)
        # Locked before it has the name that others look for.
        self.path = new.rename(directory / f"weights-{new.name.removeprefix('new-')}")
        self._versions: list[tuple[int, Path]] = []

    def write(self, version: int, nbytes: int, parts: Iterable[Buffer], reading: Collection[int] = ()) -> Path:
        """Write the parts, about `nbytes` in all, one after the other into the file of `version`, and forget old versions.

        Versions that engines are `reading` stay, beside the last `keep`. The file appears under its name only when it is
        complete. Raises `WeightError` if the version is not newer than the last one, or if there is no space.
        """
        if self._versions and version <= self._versions[-1][0]:
            raise WeightError(f"version {version} can not follow version {self._versions[-1][0]}: versions only go up")
        free = shutil.disk_usage(self.path).free
        if nbytes + _SPARE_BYTES > free:
            raise WeightError(
                f"version {version} needs {nbytes / 2**30:.2f} GiB but {self.path} has {free / 2**30:.2f} GiB free; "
                "enlarge /dev/shm (docker run --shm-size) or set weights.directory to a larger file system"
            )
        path = self.path / f"version-{version}.safetensors"
        temporary = path.with_suffix(".partial")
        try:
            with open(temporary, "wb") as file:
                for part in parts:
                    file.write(part)
            temporary.rename(path)
        except OSError as error:
            raise WeightError(f"version {version} could not be written to {path}: {error}") from error
        finally:
            temporary.unlink(missing_ok=True)
        self._versions.append((version, path))
        for old in self._versions[: -self.keep]:
            if old[0] not in reading:
                self._versions.remove(old)
                old[1].unlink(missing_ok=True)
        return path

    def close(self) -> None:
        """Remove every version. Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


class Publisher:
    """Writes versions of a policy where the engines of this host find them, and keeps the last `keep`; see `VersionFolder`.

    An engine may begin to read version v - 1 while v is written, hence `keep=2`. No more than `bucket_bytes` are held beside
    the tensors themselves.
    """

    def __init__(self, directory: Path, keep: int = 2, bucket_bytes: int = BUCKET_BYTES):
        self._folder = VersionFolder(directory, keep)
        self._bucket_bytes = bucket_bytes

    @property
    def directory(self) -> Path:
        """Where the files are."""
        return self._folder.path

    def publish(
        self, version: int, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, reading: Collection[int] = ()
    ) -> WeightManifest:
        """Write `tensors` (Hugging Face names, any device) as `version`; floating-point ones are cast to `dtype`.

        See `VersionFolder.write`. Raises `WeightError` also if there are no tensors.
        """
        encoded = EncodedWeights(version, tensors, dtype, self._bucket_bytes)
        path = self._folder.write(version, encoded.nbytes, encoded, reading)
        return encoded.manifest(str(path))

    def close(self) -> None:
        """Remove every published version. Idempotent."""
        self._folder.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EncodedWeights:
    """A safetensors file as a series of parts, none larger than `bucket_bytes`, made one by one as it is iterated over.

    The manifest is known when the last part has been taken: the checksums come from the bytes that were given out. Raises
    `WeightError` for a tensor that safetensors can not hold, or if there is none.
    """

    def __init__(self, version: int, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, bucket_bytes: int):
        if not tensors:
            raise WeightError(f"version {version} has no tensors")
        self._version, self._tensors, self._bucket_bytes = version, tensors, bucket_bytes
        self._stored = {name: dtype if t.is_floating_point() else t.dtype for name, t in tensors.items()}
        self._header = _header(tensors, self._stored)
        self._entries: dict[str, TensorEntry] = {}
        self.nbytes = sum(t.numel() * self._stored[name].itemsize for name, t in tensors.items())

    def __iter__(self) -> Iterator[Buffer]:
        yield self._header
        for name, tensor in self._tensors.items():
            stored, digest = self._stored[name], xxhash.xxh3_64()
            for piece in tensor.detach().reshape(-1).split(max(1, self._bucket_bytes // stored.itemsize)):
                data = _bytes(piece.to("cpu", stored))
                digest.update(data)
                yield data
            self._entries[name] = TensorEntry(_name(stored), tuple(tensor.shape), digest.intdigest())

    def manifest(self, path: str) -> WeightManifest:
        """What was given out, and is now at `path`."""
        assert len(self._entries) == len(self._tensors)
        return WeightManifest(version=self._version, path=path, tensors=self._entries, nbytes=self.nbytes)


def read_verified(manifest: WeightManifest, *, checksums: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a published version in the manifest's order, mapped from the file rather than copied.

    Names, shapes and dtypes are checked before the first tensor is given out, the checksum of each just before it is.
    `checksums=False` leaves out the latter, for a reader whose caller has verified the same file a moment ago.
    Raises `WeightError` that names the file or the tensor.
    """
    from safetensors import SafetensorError, safe_open

    where = f"weights version {manifest.version} ({manifest.path})"
    try:
        file = safe_open(manifest.path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise WeightError(f"{where} can not be read: {error}") from error
    with file:
        names = set(file.keys())
        if missing := sorted(set(manifest.tensors) - names):
            raise WeightError(f"{where}: tensor {missing[0]!r} is missing ({len(missing)} in all)")
        if unknown := sorted(names - set(manifest.tensors)):
            raise WeightError(f"{where}: tensor {unknown[0]!r} is not in the manifest ({len(unknown)} in all)")
        tensors = {}
        for name, entry in manifest.tensors.items():
            tensor = file.get_tensor(name)
            if tuple(tensor.shape) != entry.shape or _name(tensor.dtype) != entry.dtype:
                raise WeightError(
                    f"{where}: tensor {name!r} is {_name(tensor.dtype)} {list(tensor.shape)}, "
                    f"the manifest says {entry.dtype} {list(entry.shape)}"
                )
            tensors[name] = tensor
        for name, tensor in tensors.items():
            if checksums and xxhash.xxh3_64_intdigest(_bytes(tensor)) != manifest.tensors[name].checksum:
                raise WeightError(f"{where}: tensor {name!r} is corrupt: its checksum differs from the published one")
            yield name, tensor


def verify(manifest: WeightManifest) -> None:
    """Check a whole published file. Blocking: about a second for 3 to 5 GB. Raises `WeightError`."""
    for _ in read_verified(manifest):
        pass


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes, without a copy if it is contiguous."""
    import torch

    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def _header(tensors: Mapping[str, torch.Tensor], stored: Mapping[str, torch.dtype]) -> bytes:
    """The safetensors header: its length as a little-endian u64, then JSON, padded to 8 bytes."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        if _name(stored[name]) not in _SAFETENSORS_DTYPES:
            raise WeightError(f"tensor {name!r} has dtype {stored[name]}, which safetensors can not hold")
        end = offset + tensor.numel() * stored[name].itemsize
        table[name] = {
            "dtype": _SAFETENSORS_DTYPES[_name(stored[name])],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _lock(folder: Path) -> int:
    """An open, locked descriptor of the folder; -1 if somebody else holds it or it is gone."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return -1
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return -1
    return descriptor


def _remove_abandoned(directory: Path) -> None:
    for folder in directory.glob("weights-*"):
        if (descriptor := _lock(folder)) >= 0:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)
