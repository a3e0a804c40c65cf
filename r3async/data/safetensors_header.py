"""Safetensors files piece by piece, so that no file is in memory as a whole."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from r3async.untrusted import MalformedError, decode_json
from r3async.world import Buffer

if TYPE_CHECKING:
    import torch


SAFETENSORS_DTYPES = {
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
"""Names of dtypes in safetensors, keyed by their names in torch."""


def torch_dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype, as in the keys of `SAFETENSORS_DTYPES`."""
    return str(dtype).removeprefix("torch.")


def encode_safetensors_header(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]],
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """Return the header of a safetensors file: its length as a little-endian u64, then JSON,
    padded to 8 bytes.

    `tensors` gives the name, dtype and shape of each tensor, in the order in which their bytes
    follow. Raises `ValueError` for a dtype that safetensors cannot hold.
    """
    table: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    at = 0
    for name, dtype, shape in tensors:
        if torch_dtype_name(dtype) not in SAFETENSORS_DTYPES:
            raise ValueError(f"tensor {name!r} has dtype {dtype}, which safetensors cannot hold")
        end = at + math.prod(shape) * dtype.itemsize
        table[name] = {
            "dtype": SAFETENSORS_DTYPES[torch_dtype_name(dtype)],
            "shape": list(shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class SafetensorsEntry(msgspec.Struct, forbid_unknown_fields=True):
    """The entry of a tensor in the header of a safetensors file.

    Attributes:
        dtype: A value of `SAFETENSORS_DTYPES`.
        data_offsets: Start and end of the tensor's bytes, counted from the end of the header.
    """

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def decode_safetensors_header(data: Buffer) -> tuple[dict[str, SafetensorsEntry], int]:
    """Return the tensors of a safetensors file, in the order of its header, and the offset at which
    their bytes begin.

    Raises `ValueError` for a malformed header.
    """
    view = memoryview(data)
    end = 8 + int.from_bytes(view[:8], "little")
    if not 8 < end <= view.nbytes:
        raise ValueError(f"a header of {end - 8} bytes in a file of {view.nbytes}")
    try:
        table = decode_json(view[8:end], dict[str, msgspec.Raw])
        table.pop("__metadata__", None)
        return {name: decode_json(text, SafetensorsEntry) for name, text in table.items()}, end
    except MalformedError as error:
        raise ValueError(f"its header: {error}") from error


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor in host memory, without a copy if it is contiguous."""
    import torch

    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
