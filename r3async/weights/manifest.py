"""What a version of the weights is: names, shapes, dtypes and checksums, which whoever installs it compares."""

from __future__ import annotations

import zlib

import msgspec


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


class TensorMismatch(msgspec.Struct, frozen=True):
    """A published tensor of which an engine holds something else: in `elements` places of its `parameter`."""

    tensor: str
    parameter: str
    elements: int
