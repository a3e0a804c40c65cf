"""A causal depthwise convolution over packed samples, none of which sees the one before it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from r3async.learner.recurrent_layout import RecurrentLayout

CPU_BLOCK_ELEMENTS = 2**16
"""Elements of a block of rows: the passes over it take them from a core's cache."""
GPU_BLOCK_ELEMENTS = 2**24
"""The same on a GPU, where a block is only a limit to the memory of the backward pass."""


def causal_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, layout: RecurrentLayout
) -> Tensor:
    """Convolve each channel: `x [N, C]`, `weight [C, K]`, `bias [C]` -> `[N, C]`.

    `y_t = bias + sum_s weight[:, K - 1 - s] x_(t - s)`, over the tokens `t - s` of the sample of
    `t`. Computes in the dtype of `weight`, and returns that of `x`.
    """
    out: Tensor = _Convolution.apply(x.to(weight.dtype), weight, layout.positions)
    return (out if bias is None else out + bias).to(x.dtype)


class _Convolution(torch.autograd.Function):
    """The autograd function of `causal_convolution`, without its bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, positions)
        taps = weight.t().flip(0)
        out = torch.empty_like(x)
        for start, end in _iter_blocks(x):
            torch.mul(x[start:end], taps[0], out=out[start:end])
            for back in range(1, len(taps)):
                first = min(max(start, back), end)
                seen = (positions[first:end, None] >= back).to(x.dtype)
                out[first:end].addcmul_(x[first - back : end - back] * seen, taps[back])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, positions = ctx.saved_tensors
        taps = weight.t().flip(0)
        by_out = grads[0]
        by_x = torch.empty_like(x)
        blocks = list(_iter_blocks(x))
        products = x.new_zeros(len(taps), *x[slice(*blocks[0])].shape)
        for start, end in blocks:
            torch.mul(by_out[start:end], taps[0], out=by_x[start:end])
            products[0, : end - start].addcmul_(by_out[start:end], x[start:end])
            for back in range(1, len(taps)):
                last = max(min(end, len(x) - back), start)
                rows = slice(start + back, last + back)
                grad = by_out[rows] * (positions[rows, None] >= back).to(x.dtype)
                by_x[start:last].addcmul_(grad, taps[back])
                products[back, : last - start].addcmul_(grad, x[start:last])
        return by_x, products.sum(1).flip(0).t(), None


def _iter_blocks(x: Tensor) -> Iterator[tuple[int, int]]:
    """Yield the first row of each block, and the end of the block."""
    elements = GPU_BLOCK_ELEMENTS if x.is_cuda else CPU_BLOCK_ELEMENTS
    rows = max(1, elements // x.shape[1])
    for start in range(0, len(x), rows):
        yield start, min(start + rows, len(x))
