"""The forms in which checkpoints are published: which files hold the weights, and how quantized
ones are named.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from r3async.untrusted import decode_python_json

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
"""Keys of a `config.json`, or of one nested in it, that describe quantized weights."""
DECODER_PREFIXES = {"model", "language_model", "backbone"}
"""Parts of a tensor's name before the decoder's `layers`. Other towers have layers as well."""
FP8_SCALE_SUFFIX = "_scale_inv"
"""Suffix that a matrix's name has in the name of its scales, in fp8."""
MXFP4_SUFFIXES = ("_blocks", "_scales")
"""Suffixes that a stack of matrices has in the names of its values and of its scales, in MXFP4."""


class CheckpointFormError(ValueError):
    """An error for a checkpoint in a form that nothing here reads."""


class QuantizedForm(msgspec.Struct, frozen=True):
    """The form of a checkpoint's quantized weights, which are dequantized when they are read.

    Attributes:
        method: `fp8`: float8 values with a float scale for each block of a matrix, the factor of
            its values. `mxfp4`: two 4-bit values a byte, with an exponent for each 32.
        block: Rows and columns of a block, in fp8.
    """

    method: str
    block: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        return f"fp8 (blocks of {self.block[0]}x{self.block[1]})" if self.block[0] else "MXFP4"

    def list_dequantized_names(self, names: Collection[str]) -> list[str]:
        """Return the names of the tensors that the tensors of these `names` are dequantized to."""
        every = set(names)
        values, scales = MXFP4_SUFFIXES
        kept = dict.fromkeys(names)
        for name in names:
            base = name.removesuffix(values)
            if self.method == "fp8" and name + FP8_SCALE_SUFFIX in every:
                del kept[name + FP8_SCALE_SUFFIX]
            elif self.method == "mxfp4" and base != name and base + scales in every:
                del kept[name], kept[base + scales]
                kept[base] = None
        return list(kept)


def read_quantized_form(config: Mapping[str, Any]) -> QuantizedForm | None:
    """Return the form of the quantized weights that a `config.json` describes; None if it
    describes none.

    Raises `CheckpointFormError` for any other form than fp8 in blocks, and MXFP4 of gpt-oss.
    """
    parts = [config, *(part for part in config.values() if isinstance(part, Mapping))]
    found = [part[key] for part in parts for key in QUANTIZATION_KEYS if part.get(key) is not None]
    if not found:
        return None
    described = found[0] if isinstance(found[0], Mapping) else {}
    method = described.get("quant_method")
    block = described.get("weight_block_size")
    what = f"`quant_method` = {method!r:.40}"
    if method == "mxfp4":
        if config.get("model_type") == "gpt_oss":
            return QuantizedForm("mxfp4")
        what += f" of `model_type` = {config.get('model_type')!r:.40}"
    elif method == "fp8":
        if described.get("activation_scheme", "dynamic") != "dynamic":
            what += f" with `activation_scheme` = {described['activation_scheme']!r:.40}"
        elif isinstance(block, list) and _is_block(block):
            return QuantizedForm("fp8", (block[0], block[1]))
        else:
            what += f" with `weight_block_size` = {block!r:.40}"
    raise CheckpointFormError(
        f"quantized weights ({what}) cannot be trained, only fp8 in blocks and MXFP4 of gpt-oss, "
        "which are dequantized: set `model.path` to the model in full precision"
    )


def _is_block(sizes: list[Any]) -> bool:
    return len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes)


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `config.json` without what describes quantized weights, also in nested
    configurations."""
    return {
        key: without_quantization(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in QUANTIZATION_KEYS
    }


def is_prediction_key(key: str) -> bool:
    """Return True for a key of `config.json` that describes layers for multi-token prediction."""
    return "nextn" in key or "mtp" in key.split("_")


def declares_prediction_layers(config: Mapping[str, Any]) -> bool:
    """Return True if a `config.json`, or a configuration nested in it, has layers for multi-token
    prediction."""
    return any(
        declares_prediction_layers(value)
        if isinstance(value, Mapping)
        else bool(value) and is_prediction_key(key)
        for key, value in config.items()
    )


def is_prediction_tensor(name: str, layers: int) -> bool:
    """Return True for the name of a tensor of layers for multi-token prediction, in a model whose
    decoder has that many `layers` besides."""
    parts = name.split(".")
    if "mtp" in parts:
        return True
    where = parts.index("layers") if "layers" in parts else len(parts)
    number = parts[where + 1] if where + 1 < len(parts) else ""
    in_decoder = set(parts[:where]) <= DECODER_PREFIXES
    return in_decoder and number.isdigit() and int(number) >= layers


def list_weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files that hold a checkpoint's weights: those that its index names,
    or its single file, or all.

    Other files may lie beside them, with the same weights by other names. Raises `OSError` or
    `ValueError` for an index that cannot be read.
    """
    index = directory / INDEX_FILE
    single = directory / SINGLE_FILE
    if index.is_file():
        named = decode_python_json(index.read_bytes()).get("weight_map", {})
        return [directory / name for name in sorted(set(map(str, named.values())))]
    if single.is_file():
        return [single]
    return sorted(directory.glob("*.safetensors"))
