"""The manifest of a version of the weights: names, shapes, dtypes and checksums, which are compared
at installation."""

from __future__ import annotations

import zlib

import msgspec


class WeightError(RuntimeError):
    """An error for weights that cannot be published, or for a published file that differs
    from its manifest."""


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor as published; `checksum` is XXH3 (64 bits) of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    checksum: int


class NcclSource(msgspec.Struct, frozen=True):
    """The source from which workers request a version that comes from the learner's GPU;
    see `weights.nccl`.

    `receiver` identifies one start of the generator `generator`, which sends its requests to
    `endpoint` (ZeroMQ).
    """

    endpoint: str
    generator: str
    receiver: str
    timeout: float


BASE_VERSION = -1
"""Number of the start model's weights among the versions of a run whose later versions have
adapters alone. No request runs under it."""


class AdapterFormat(msgspec.Struct, frozen=True):
    """The form of a version that has adapters: `A` and `s B` of some matrices, under PEFT's names.

    `rank` is that of each adapter. They are added to the weights with digest `base_digest`
    (`BASE_VERSION`).
    """

    rank: int
    base_digest: int


class WeightManifest(msgspec.Struct, frozen=True):
    """One version of the weights: a safetensors file with Hugging Face names, and its contents.

    `path` is the path of the file on this host; empty if it has not arrived yet (see
    `WeightReceiver`). With a `source` there is no file to read: workers receive the tensors from
    there, and `path` is the file's path on the learner's host. `nbytes` is the size of the tensors.
    """

    version: int
    path: str
    tensors: dict[str, TensorEntry]
    nbytes: int
    source: NcclSource | None = None
    lineage: int = 0
    """Lineage in which `version` is counted."""
    carried: tuple[str, ...] = ()
    """Names of tensors of the start model that no version has: they are not trained, and engines
    have no use for them."""
    adapter: AdapterFormat | None = None
    """The form of adapters, if the version has these alone; None if it has all weights."""

    @property
    def digest(self) -> int:
        """The crc32 of the contents' names, shapes, dtypes and checksums. Equal contents
        have equal digests."""
        return zlib.crc32(msgspec.msgpack.encode(self.tensors, order="sorted"))


class TensorMismatch(msgspec.Struct, frozen=True):
    """A published tensor that differs in an engine, in `elements` elements of its
    parameter `parameter`."""

    tensor: str
    parameter: str
    elements: int
