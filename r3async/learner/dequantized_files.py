"""Checkpoints with quantized weights, read like ones in full precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from r3async.data.checkpoint_forms import FP8_SCALE_SUFFIX, MXFP4_SUFFIXES, QuantizedForm
from r3async.learner.results import LearnerError

MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the 3 lower bits of an element; the highest one is the sign (E2M1, in the OCP
Microscaling Formats specification 1.0, section 5.3.3)."""
MXFP4_EXPONENT_BIAS = 127
"""Bias of the exponent that 32 elements share (E8M0, section 5.4.1)."""
MXFP4_GROUP = 32


class DequantizedFile:
    """Open safetensors files whose quantized tensors are dequantized when they are read, and only
    the part that is read.

    `files` has the open file of each tensor. fp8 is dequantized to float32, whose values are the
    products of weight and scale, and MXFP4 to bfloat16, which has its values exactly.
    """

    def __init__(self, files: Mapping[str, Any], form: QuantizedForm):
        self._files = files
        self._form = form

    def list_tensors(self) -> dict[str, Any]:
        """Return the file of each tensor by its name: this one for those that are dequantized."""
        names = self._form.list_dequantized_names(self._files)
        return {name: self if self._is_quantized(name) else self._files[name] for name in names}

    def _is_quantized(self, name: str) -> bool:
        return name not in self._files or name + FP8_SCALE_SUFFIX in self._files

    def get_slice(self, name: str) -> DequantizedSlice:
        """Return the tensor, of which nothing is read yet."""
        if self._form.method == "mxfp4":
            values, scales = (
                self._files[name + end].get_slice(name + end) for end in MXFP4_SUFFIXES
            )
            return Mxfp4Slice(name, values, scales)
        scale = name + FP8_SCALE_SUFFIX
        return Fp8Slice(
            name,
            self._files[name].get_slice(name),
            self._files[scale].get_slice(scale),
            self._form.block,
        )

    def get_tensor(self, name: str) -> Tensor:
        """Read the whole tensor."""
        return self.get_slice(name)[...]


class DequantizedSlice:
    """A tensor that is not read yet, with the methods of a slice of safetensors.

    `values` and `scales` are the slices of its two parts. Raises `LearnerError` if they do not
    fit together.
    """

    shape: tuple[int, ...]

    def __init__(self, name: str, values: Any, scales: Any):
        self._values = values
        self._scales = scales
        self._check_shapes(name, tuple(values.get_shape()), tuple(scales.get_shape()))

    def _check_shapes(self, name: str, values: tuple[int, ...], scales: tuple[int, ...]) -> None:
        raise NotImplementedError

    def get_shape(self) -> list[int]:
        """Return the shape of the dequantized tensor."""
        return list(self.shape)

    def __getitem__(self, index: Any) -> Tensor:
        """Read a part: `...`, or slices of the first dimensions."""
        taken = () if index is ... else index if isinstance(index, tuple) else (index,)
        bounds = [
            part.indices(size)[:2]
            for part, size in zip((*taken, *[slice(None)] * 8), self.shape, strict=False)
        ]
        part = [slice(first, max(first, end)) for first, end in bounds]
        if any(bound.start == bound.stop for bound in part):
            return torch.empty([bound.stop - bound.start for bound in part])
        return self._dequantize_part(part)

    def _dequantize_part(self, part: list[slice]) -> Tensor:
        raise NotImplementedError


class Fp8Slice(DequantizedSlice):
    """Matrices of float8 values with a scale for each block of their rows and columns."""

    def __init__(self, name: str, values: Any, scales: Any, block: tuple[int, int]):
        self._block = block
        super().__init__(name, values, scales)

    def _check_shapes(self, name: str, values: tuple[int, ...], scales: tuple[int, ...]) -> None:
        rows, columns = self._block
        needed = (*values[:-2], -(-values[-2] // rows), -(-values[-1] // columns))
        if scales != needed:
            raise LearnerError(
                f"{name}: {scales} scales for a shape of {values} in blocks of {rows}x{columns}"
            )
        self.shape = values

    def _dequantize_part(self, part: list[slice]) -> Tensor:
        rows, columns = part[-2:]
        height, width = self._block
        # A part need not begin with a block: ranks divide rows evenly.
        scales = self._scales[
            (*part[:-2], _cover_blocks(rows, height), _cover_blocks(columns, width))
        ].float()
        across = scales.repeat_interleave(width, -1)
        skipped = columns.start % width
        across = across[..., skipped : skipped + columns.stop - columns.start]
        out: Tensor = self._values[tuple(part)].float()
        first = rows.start - rows.start % height
        for number, start in enumerate(range(first, rows.stop, height)):
            inside = slice(max(start, rows.start) - rows.start, start + height - rows.start)
            out[..., inside, :] *= across[..., number, None, :]
        return out


def _cover_blocks(part: slice, size: int) -> slice:
    """Return the blocks of which a part of a dimension has something."""
    return slice(part.start // size, -(-part.stop // size))


class Mxfp4Slice(DequantizedSlice):
    """Matrices of 4-bit values, of which 32 in a row share an exponent.

    They are stored as `[experts, out, in / 32, 16]` bytes, the first of two values in the lower
    bits, and read as `[experts, in, out]`.
    """

    def _check_shapes(self, name: str, values: tuple[int, ...], scales: tuple[int, ...]) -> None:
        if values[:-1] != scales or len(values) != 4 or values[-1] * 2 != MXFP4_GROUP:
            raise LearnerError(f"{name}: {scales} exponents for a shape of {values}")
        experts, out, groups, _ = values
        self.shape = (experts, groups * MXFP4_GROUP, out)

    def _dequantize_part(self, part: list[slice]) -> Tensor:
        experts, within, out = part
        table = torch.tensor([*MXFP4_VALUES, *(-value for value in MXFP4_VALUES)])
        values = self._values[experts, out]
        exponents = self._scales[experts, out].int() - MXFP4_EXPONENT_BIAS
        size = tuple(bound.stop - bound.start for bound in part)
        whole = torch.empty(size, dtype=torch.bfloat16)
        for expert, (pairs, exponent) in enumerate(zip(values, exponents, strict=True)):
            elements = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2).long()
            scaled = torch.ldexp(table[elements], exponent[..., None])
            whole[expert] = scaled.flatten(-2)[:, within].T
        return whole
