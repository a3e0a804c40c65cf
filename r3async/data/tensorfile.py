"""Safetensors files as series of bytes: the header, and then each tensor's own. So that no file has to be in memory at once."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CODES = {
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
"""What safetensors calls a dtype, by its name in torch."""


def dtype_name(dtype: torch.dtype) -> str:
    """As in `CODES`."""
    return str(dtype).removeprefix("torch.")


def encode_header(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The length of the header as a little-endian u64, then JSON, padded to 8 bytes.

    `tensors`: name, dtype and shape, in the order in which their bytes follow. Raises `ValueError` for a dtype that safetensors
    cannot hold.
    """
    table: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    at = 0
    for name, dtype, shape in tensors:
        if dtype_name(dtype) not in CODES:
            raise ValueError(f"tensor {name!r} has dtype {dtype}, which safetensors cannot hold")
        end = at + math.prod(shape) * dtype.itemsize
        table[name] = {"dtype": CODES[dtype_name(dtype)], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Those of a tensor in host memory, without a copy if it is contiguous."""
    import torch

    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
