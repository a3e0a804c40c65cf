"""What one published set of weights consists of."""

from __future__ import annotations

import zlib

import msgspec


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor as published; `checksum` is the crc32 of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    checksum: int


class WeightManifest(msgspec.Struct, frozen=True):
    """One version: a safetensors file with Hugging Face names, and its contents.

    `path` is where the file is on this host; empty where it has not arrived yet (see `weights.transport`). `nbytes` are those
    of the tensors.
    """

    version: int
    path: str
    tensors: dict[str, TensorEntry]
    nbytes: int

    @property
    def digest(self) -> int:
        """crc32 of the contents' names, shapes, dtypes and checksums: equal contents have equal digests."""
        return zlib.crc32(msgspec.msgpack.encode(self.tensors, order="sorted"))


class Difference(msgspec.Struct, frozen=True):
    """A published tensor of which an engine holds something else: in `elements` places of its `parameter`."""

    tensor: str
    parameter: str
    elements: int
