"""Triton kernels that read a chunk of logits once, for log-probs and entropies and for their
gradients. `token_logprobs` has the formulas, and the same in torch's operations.

Torch's operations are a dozen, each of which reads or writes the whole chunk: on a GPU that takes
several times as long as the product that made the logits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_COLUMNS = 4096
"""Logits of a row that a program has in registers at once: 16 a thread."""
WARPS = 8


def summarize_rows(
    logits: Tensor, temperatures: Tensor, columns: Tensor, excluded: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four figures of each row of `z = logits / temperature`, float32 `[m]`: the maximum,
    the sum of `e = exp(z - maximum)`, the sum of `e (z - maximum)`, and `z` in the row's column.

    Args:
        logits: `[m, V]`, contiguous.
        temperatures: float32 `[m]`.
        columns: int64 `[m]`. Where one is negative, the last figure is 0.
        excluded: bool `[m, V]`, contiguous: logits that count as minus infinity. A row of nothing
            else has the maximum minus infinity, and sums of 0.
    """
    rows, width = logits.shape
    figures = torch.empty((4, rows), dtype=torch.float32, device=logits.device)
    _summarize_row[(rows,)](
        logits,
        temperatures,
        columns,
        logits if excluded is None else excluded,
        figures,
        width,
        HAS_EXCLUDED=excluded is not None,
        BLOCK=BLOCK_COLUMNS,
        num_warps=WARPS,
    )
    top, total, spread, picked = figures.unbind()
    return top, total, spread, picked


def write_gradients(
    logits: Tensor,
    temperatures: Tensor,
    columns: Tensor,
    excluded: Tensor | None,
    norms: Tensor,
    entropies: Tensor,
    by_logprob: Tensor,
    by_entropy: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient by `logits`, `[m, V]` of `dtype`: a new tensor.

    Args:
        logits, temperatures, columns, excluded: As in `summarize_rows`.
        norms: float32 `[m]`: the logarithm of the sum of `exp(z)`, over all ranks.
        entropies: float32 `[m]`.
        by_logprob: float32 `[m]`: the gradient by the log-prob of the row's column.
        by_entropy: float32 `[m]`: the gradient by the entropy.
    """
    rows, width = logits.shape
    out = torch.empty(logits.shape, dtype=dtype, device=logits.device)
    _write_gradient_of_row[(rows,)](
        logits,
        temperatures,
        columns,
        logits if excluded is None else excluded,
        norms,
        entropies,
        by_logprob,
        by_entropy,
        out,
        width,
        HAS_EXCLUDED=excluded is not None,
        BLOCK=BLOCK_COLUMNS,
        num_warps=WARPS,
    )
    return out


@triton.jit
def _summarize_row(
    logits: Any,
    temperatures: Any,
    columns: Any,
    excluded: Any,
    figures: Any,
    width: Any,
    HAS_EXCLUDED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Each lane keeps the figures of its own columns; they are joined at the end of the row."""
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    temperature = tl.load(temperatures + row)
    lane = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    spread = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        at = start + lane
        inside = at < width
        z = tl.load(logits + row * width + at, mask=inside, other=-float("inf")).to(tl.float32)
        z = z / temperature
        if HAS_EXCLUDED:
            out = tl.load(excluded + row * width + at, mask=inside, other=1)
            z = tl.where(out != 0, -float("inf"), z)
        new_top = tl.maximum(top, z)
        # Nothing was finite before: there is no sum to scale, and the difference is NaN.
        fall = tl.where(top == -float("inf"), 0.0, top - new_top)
        rise = tl.where(z == -float("inf"), 0.0, z - new_top)
        old = tl.exp(fall)
        new = tl.where(z == -float("inf"), 0.0, tl.exp(rise))
        spread = old * (spread + fall * total) + new * rise
        total = old * total + new
        top = new_top
    best = tl.max(top, 0)
    fall = tl.where(top == -float("inf"), 0.0, top - best)
    scale = tl.exp(fall)
    tl.store(figures + row, best)
    tl.store(figures + rows + row, tl.sum(scale * total, 0))
    tl.store(figures + 2 * rows + row, tl.sum(scale * (spread + fall * total), 0))
    column = tl.load(columns + row)
    mine = column >= 0
    z = tl.load(logits + row * width + column, mask=mine, other=0.0).to(tl.float32) / temperature
    if HAS_EXCLUDED:
        out = tl.load(excluded + row * width + column, mask=mine, other=0)
        z = tl.where(out != 0, -float("inf"), z)
    tl.store(figures + 3 * rows + row, z)


@triton.jit
def _write_gradient_of_row(
    logits: Any,
    temperatures: Any,
    columns: Any,
    excluded: Any,
    norms: Any,
    entropies: Any,
    by_logprob: Any,
    by_entropy: Any,
    result: Any,
    width: Any,
    HAS_EXCLUDED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    column = tl.load(columns + row)
    norm = tl.load(norms + row)
    entropy = tl.load(entropies + row)
    of_logprob = tl.load(by_logprob + row)
    of_entropy = tl.load(by_entropy + row)
    lane = tl.arange(0, BLOCK)
    for start in range(0, width, BLOCK):
        at = start + lane
        inside = at < width
        z = tl.load(logits + row * width + at, mask=inside, other=-float("inf")).to(tl.float32)
        log = z / temperature - norm
        if HAS_EXCLUDED:
            out = tl.load(excluded + row * width + at, mask=inside, other=1)
            log = tl.where(out != 0, -float("inf"), log)
        p = tl.exp(log)
        # A token without probability has no gradient, but an infinite logarithm.
        information = tl.where(p == 0.0, 0.0, log) + entropy
        by_z = -p * (of_entropy * information + of_logprob)
        by_z += tl.where(at == column, of_logprob, 0.0)
        tl.store(result + row * width + at, by_z / temperature, mask=inside)
