"""What one published set of weights consists of."""

from __future__ import annotations

import msgspec


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor as published; `checksum` is the crc32 of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    checksum: int


class WeightManifest(msgspec.Struct, frozen=True):
    """One version: a safetensors file with Hugging Face names, in this host's shared memory, and its contents."""

    version: int
    path: str
    tensors: dict[str, TensorEntry]
    nbytes: int
