"""GPU checks of single operations at the shapes of Qwen3-30B-A3B: packed attention, and experts."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from r3async.learner.packed_attention import attend_padded, packed_attention, plan_attention

from .place import Place


def attention(place: Place, *, layout: str, tokens: int) -> dict[str, Any]:
    """Time the forward and backward pass of two samples in one micro-batch, for a new shape and for
    one seen before.

    Args:
        layout: `packed`, the layout that the learner takes here, or `padded`, which it takes for
            what has no other.
    """
    tokens = 256 if place.small else tokens
    firsts = []
    steadies = []
    rng = np.random.default_rng(0)
    for _ in range(2 if place.small else 6):
        first = int(rng.integers(tokens // 8, tokens - tokens // 8))
        q, k, v = _random_heads(place, tokens, torch.bfloat16 if place.cuda else torch.float32)
        gradient = torch.randn_like(q)
        plan = plan_attention(np.array([0, first, tokens]), q.device)
        attend = partial(packed_attention, q, k, v, plan, None)
        if layout == "padded":
            attend = partial(attend_padded, q, k, v, plan.padded_layout, None)
        one, each = timed(place, partial(_backward, attend, gradient))
        firsts.append(one)
        steadies.append(each)
    found: dict[str, Any] = {
        "first_ms": firsts,
        "steady_ms": steadies,
        "steady_median_ms": float(np.median(steadies)),
    }
    if place.cuda:
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return found | {"ok": True}


def attention_agrees(place: Place) -> dict[str, Any]:
    """Compare the learner's attention with that in float32: whole samples, a window, and
    a shared prefix."""
    edges = np.array([0, 700, 740, 1200])
    prefixes = np.array([[0, 0], [0, 500], [1, 520]], np.int32)
    cases = {
        "samples": (None, None),
        "window": (None, 100),
        "prefixes": (prefixes, None),
        "prefixes_and_window": (prefixes, 100),
    }
    torch.manual_seed(0)
    exact = _random_heads(place, int(edges[-1]), torch.float32)
    gradient = torch.randn_like(exact[0])
    found: dict[str, Any] = {}
    for name, (shared, window) in cases.items():
        plan = plan_attention(edges, exact[0].device, shared)
        results = []
        for dtype in (torch.float32, torch.bfloat16):
            heads = [x.detach().to(dtype).requires_grad_() for x in exact]
            out = packed_attention(heads[0], heads[1], heads[2], plan, None, window=window)
            results.append([out, *torch.autograd.grad(out, heads, gradient.to(dtype))])
        errors = [
            float((ours.float() - theirs).norm() / theirs.norm())
            for theirs, ours in zip(*results, strict=True)
        ]
        found[name] = errors
    return found | {"ok": all(error < 0.02 for errors in found.values() for error in errors)}


def _random_heads(place: Place, tokens: int, dtype: torch.dtype) -> list[Tensor]:
    if place.cuda:
        heads = 32
        groups = 4
    else:
        heads = 4
        groups = 2
    options: dict[str, Any] = {"device": place.device, "dtype": dtype, "requires_grad": True}
    return [torch.randn(tokens, n, 128, **options) for n in (heads, groups, groups)]


def experts(place: Place, *, how: str) -> dict[str, Any]:
    """Time forward and backward of one layer's experts on 8192 tokens: one by one, or in one
    grouped product."""
    if place.small:
        count = 8
        hidden = 64
        width = 32
        rows = 512
    else:
        count = 128
        hidden = 2048
        width = 768
        rows = 8192 * 8
    options: dict[str, Any] = {"device": place.device, "dtype": torch.bfloat16}
    up = torch.randn(count, 2 * width, hidden, **options).mul_(0.02).requires_grad_()
    down = torch.randn(count, hidden, width, **options).mul_(0.02).requires_grad_()
    x = torch.randn(rows, hidden, **options, requires_grad=True)
    chosen = torch.multinomial(torch.rand(count) + 0.2, rows, True)
    sizes = torch.bincount(chosen, minlength=count)
    ends, gradient = sizes.cumsum(0).int().to(place.device), torch.randn_like(x)

    def gated(both: Tensor) -> Tensor:
        gate, value = both.chunk(2, -1)
        return F.silu(gate) * value

    def sequential() -> Tensor:
        parts = zip(x.split(sizes.tolist()), up, down, strict=True)
        return torch.cat([F.linear(gated(F.linear(rows, a)), b) for rows, a, b in parts])

    def grouped() -> Tensor:
        inner = gated(F.grouped_mm(x, up.transpose(1, 2), offs=ends))
        return F.grouped_mm(inner, down.transpose(1, 2), offs=ends)

    make = {"sequential": sequential, "grouped": grouped}[how]
    with torch.no_grad():
        worst = float((grouped() - sequential()).abs().max())
    first, steady = timed(place, partial(_backward, make, gradient))
    # Three matrices of this size forward, and twice as much backward.
    operations = 3 * 3 * 2 * rows * hidden * width
    return {
        "first_ms": first,
        "steady_ms": steady,
        "tflops": operations / steady / 1e9,
        "worst": worst,
        "ok": worst < 0.05,
    }


def _backward(make: Callable[[], Tensor], gradient: Tensor) -> None:
    make().backward(gradient)


def timed(place: Place, call: Callable[[], Any], times: int = 5) -> tuple[float, float]:
    """Return the milliseconds of the first call and the mean of the following ones."""

    def run(count: int) -> float:
        place.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            call()
        place.synchronize()
        return 1e3 * (time.perf_counter() - began) / count

    return run(1), run(times)
