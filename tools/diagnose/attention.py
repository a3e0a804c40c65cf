"""Causes in attention: positions, norms, scale, mask, order of heads, cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from r3async.tools.diagnose.experiments import Found, given, minimised
from r3async.tools.diagnose.judge import Case
from r3async.tools.diagnose.reference import Trial, causal


def _turn(trial: Trial, change: Callable[[Tensor], Tensor]) -> None:
    rotary: Any = trial.rotary
    rotary.inv_freq = change(rotary.inv_freq)
    if hasattr(rotary, "original_inv_freq"):
        rotary.original_inv_freq = rotary.inv_freq


def _theta(case: Case) -> float:
    rope = getattr(case.reference.config, "rope_parameters", None) or {}
    return float(rope.get("rope_theta", 1e4))


def rope_base(case: Case) -> Found:
    theirs = _theta(case)

    def change(trial: Trial, theta: float) -> None:
        def other(frequencies: Tensor) -> Tensor:
            share = torch.arange(len(frequencies)) / len(frequencies)
            return frequencies * (theirs / theta) ** share

        _turn(trial, other)

    best = minimised(case, change, [10 ** (i / 4) for i in range(4, 33)])
    early, late = (float(part.mean()) for part in case.errors[1:].chunk(2))
    yield (
        lambda trial: change(trial, best),
        f"rope_theta is {best:.4g}, and {theirs:.4g} in config.json; the difference is {early:.2g} in the first half of the "
        f"positions, {late:.2g} in the second, {float(case.errors[0]):.2g} at position 0",
    )


def rope_scale(case: Case) -> Found:
    for factor in (0.125, 0.25, 0.5, 2.0, 4.0, 8.0, 16.0, 32.0):
        yield (
            given(lambda trial, by: _turn(trial, lambda frequencies: frequencies / by), factor),
            f"positions turn 1/{factor:g} as far as config.json says",
        )
    yield lambda trial: _turn(trial, torch.zeros_like), "positions do not turn queries and keys at all"


def rope_pairs(case: Case) -> Found:
    """Other pairs are the same as other rows of the projections: products of queries and keys do not change."""

    def order(size: int, back: bool) -> Tensor:
        apart = torch.cat([torch.arange(0, size, 2), torch.arange(1, size, 2)])
        return apart.argsort() if back else apart

    for back in (False, True):

        def change(trial: Trial, back: bool = back) -> None:
            attention: Any = trial.part
            rows = order(attention.head_dim, back)
            for name in ("q", "k"):
                for tensor in getattr(attention, f"{name}_proj").parameters():
                    by_head = tensor.data.unflatten(0, (-1, len(rows)))
                    tensor.data = by_head[:, rows].flatten(0, 1)
                norm = getattr(attention, f"{name}_norm", None)
                if norm is not None:
                    norm.weight.data = norm.weight.data.unflatten(0, (-1, len(rows)))[:, rows].flatten()

        yield change, "values that turn together are neighbours in one, and half a head apart in the other"


def query_norm(case: Case) -> Found:
    if getattr(case.trial().part, "q_norm", None) is None:
        return

    def change(trial: Trial, eps: float) -> None:
        for norm in (trial.part.q_norm, trial.part.k_norm):
            norm.variance_epsilon = eps

    best = minimised(case, change, [10.0**i for i in range(-12, 2)])
    yield lambda trial: change(trial, best), f"epsilon of the norms of queries and keys is {best:.3g}"

    def none(trial: Trial) -> None:
        trial.part.q_norm = trial.part.k_norm = nn.Identity()

    yield none, "queries and keys are not normalised"


def attention_scale(case: Case) -> Found:
    part: Any = case.trial().part

    def change(trial: Trial, scale: float) -> None:
        trial.part.scaling = scale

    best = minimised(case, change, [part.scaling * 2 ** (i / 2) for i in range(-12, 13)])
    yield (
        lambda trial: change(trial, best),
        f"scores are multiplied by {best:.4g}, and by {part.scaling:.4g} in the files",
    )


def window(case: Case) -> Found:
    tokens = len(case.x)
    first = int((case.errors > case.tolerance).nonzero()[0])
    for window in {first, first + 1, *(2**i for i in range(1, 16) if 2**i < tokens)} - {0}:
        yield (
            given(lambda trial, w: setattr(trial, "mask", causal(tokens, w)), window),
            f"a token sees the last {window} alone; the first {first} tokens agree",
        )
    yield lambda trial: setattr(trial, "mask", causal(tokens, None)), "every token before it is seen, without a window"
    yield (
        lambda trial: setattr(trial, "mask", torch.zeros(tokens, tokens)),
        "tokens see those that follow: no causal mask",
    )


def head_order(case: Case) -> Found:
    c = case.reference.config
    heads, groups = c.num_attention_heads, getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    if groups == heads or groups == 1:
        return

    def change(trial: Trial) -> None:
        attention: Any = trial.part
        order = torch.arange(heads).view(groups, -1).T.flatten()
        back = order.argsort()
        for rows in (order, back):
            out = attention.o_proj.weight.data
            size = attention.q_proj.weight.shape[0] // heads
            if rows is order:
                for tensor in attention.q_proj.parameters():
                    tensor.data = tensor.data.unflatten(0, (heads, size))[rows].flatten(0, 1)
                attention.o_proj.weight.data = out.unflatten(1, (heads, size))[:, rows].flatten(1, 2)

    yield change, "heads of queries use the keys and values of other groups"


def projections(case: Case) -> Found:
    def keys_are_values(trial: Trial) -> None:
        a: Any = trial.part
        a.k_proj.weight.data, a.v_proj.weight.data = a.v_proj.weight.data, a.k_proj.weight.data

    def no_bias(trial: Trial) -> None:
        for name, parameter in trial.part.named_parameters():
            if name.endswith("bias"):
                parameter.data.zero_()

    yield keys_are_values, "projections of keys and values are exchanged"
    if any(name.endswith("bias") for name, _ in case.trial().part.named_parameters()):
        yield no_bias, "the biases of queries, keys and values are left out"


def cache(case: Case) -> Found:
    from transformers import AttentionInterface

    for dtype, kept, how in _KEPT:
        name = f"r3async_{how}_{dtype}".replace("torch.", "")

        def rounded(
            module: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            mask: Tensor,
            scaling: float,
            kept: Callable[[Tensor, torch.dtype], Tensor] = kept,
            dtype: torch.dtype = dtype,
            **_: Any,
        ) -> tuple[Tensor, None]:
            key, value = (kept(t, dtype).repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
            shares = (query @ key.transpose(2, 3) * scaling + mask).softmax(-1)
            return (shares @ value).transpose(1, 2).contiguous(), None

        AttentionInterface.register(name, rounded)

        def change(trial: Trial, name: str = name) -> None:
            trial.part.config._attn_implementation = name

        yield change, f"keys and values are {how} to {str(dtype).removeprefix('torch.')} when they are kept"


def _rounded(kept: Tensor, dtype: torch.dtype) -> Tensor:
    return kept.to(dtype).to(kept.dtype)


def _cut(kept: Tensor, dtype: torch.dtype) -> Tensor:
    """Towards zero, to an 8-bit dtype: the number before it, in its bits, where rounding went away from zero."""
    nearest = kept.to(dtype)
    away = nearest.to(kept.dtype).abs() > kept.abs()
    return (nearest.view(torch.uint8) - away.to(torch.uint8)).view(dtype).to(kept.dtype)


_KEPT = (
    (torch.float8_e4m3fn, _rounded, "rounded"),
    (torch.float8_e4m3fn, _cut, "cut"),  # as vLLM's CPU engine (0.30) does it
    (torch.float8_e5m2, _rounded, "rounded"),
    (torch.float8_e5m2, _cut, "cut"),
    (torch.bfloat16, _rounded, "rounded"),
    (torch.float16, _rounded, "rounded"),
)
