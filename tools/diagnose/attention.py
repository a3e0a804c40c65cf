"""Causes in attention: positions, norms, scale, mask, order of heads, cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .experiments import Experiments, bind_value, find_minimum
from .judge import DivergentStage
from .reference import StageTrial, make_causal_mask


def _change_rotary(trial: StageTrial, change: Callable[[Tensor], Tensor]) -> None:
    rotary: Any = trial.rotary
    rotary.inv_freq = change(rotary.inv_freq)
    if hasattr(rotary, "original_inv_freq"):
        rotary.original_inv_freq = rotary.inv_freq


def _read_rope_theta(case: DivergentStage) -> float:
    rope = getattr(case.reference.config, "rope_parameters", None) or {}
    return float(rope.get("rope_theta", 1e4))


def try_rope_base(case: DivergentStage) -> Experiments:
    theirs = _read_rope_theta(case)

    def change(trial: StageTrial, theta: float) -> None:
        def other(frequencies: Tensor) -> Tensor:
            share = torch.arange(len(frequencies)) / len(frequencies)
            return frequencies * (theirs / theta) ** share

        _change_rotary(trial, other)

    best = find_minimum(case, change, [10 ** (i / 4) for i in range(4, 33)])
    early, late = (float(part.mean()) for part in case.token_errors[1:].chunk(2))
    yield (
        lambda trial: change(trial, best),
        f"rope_theta is {best:.4g}, and {theirs:.4g} in config.json; the difference is {early:.2g} "
        f"in the first half of the positions, {late:.2g} in the second, "
        f"{float(case.token_errors[0]):.2g} at position 0",
    )


def try_rope_scale(case: DivergentStage) -> Experiments:
    for factor in (0.125, 0.25, 0.5, 2.0, 4.0, 8.0, 16.0, 32.0):
        yield (
            bind_value(
                lambda trial, by: _change_rotary(trial, lambda frequencies: frequencies / by),
                factor,
            ),
            f"positions turn 1/{factor:g} as far as config.json says",
        )
    yield (
        lambda trial: _change_rotary(trial, torch.zeros_like),
        "positions do not turn queries and keys at all",
    )


def try_rope_pairs(case: DivergentStage) -> Experiments:
    """Try the other pairing of rotated values.

    Other pairs are equivalent to other rows of the projections: products of queries and
    keys do not change.
    """

    def order(size: int, back: bool) -> Tensor:
        apart = torch.cat([torch.arange(0, size, 2), torch.arange(1, size, 2)])
        return apart.argsort() if back else apart

    for back in (False, True):

        def change(trial: StageTrial, back: bool = back) -> None:
            attention: Any = trial.module
            rows = order(attention.head_dim, back)
            for name in ("q", "k"):
                for tensor in getattr(attention, f"{name}_proj").parameters():
                    by_head = tensor.data.unflatten(0, (-1, len(rows)))
                    tensor.data = by_head[:, rows].flatten(0, 1)
                norm = getattr(attention, f"{name}_norm", None)
                if norm is not None:
                    norm.weight.data = norm.weight.data.unflatten(0, (-1, len(rows)))[
                        :, rows
                    ].flatten()

        yield (
            change,
            "values that turn together are neighbours in one, and half a head apart in the other",
        )


def try_query_norm(case: DivergentStage) -> Experiments:
    if getattr(case.make_trial().module, "q_norm", None) is None:
        return

    def change(trial: StageTrial, eps: float) -> None:
        for norm in (trial.module.q_norm, trial.module.k_norm):
            norm.variance_epsilon = eps

    best = find_minimum(case, change, [10.0**i for i in range(-12, 2)])
    yield (
        lambda trial: change(trial, best),
        f"epsilon of the norms of queries and keys is {best:.3g}",
    )

    def none(trial: StageTrial) -> None:
        trial.module.q_norm = trial.module.k_norm = nn.Identity()

    yield none, "queries and keys are not normalised"


def try_attention_scale(case: DivergentStage) -> Experiments:
    part: Any = case.make_trial().module

    def change(trial: StageTrial, scale: float) -> None:
        trial.module.scaling = scale

    best = find_minimum(case, change, [part.scaling * 2 ** (i / 2) for i in range(-12, 13)])
    yield (
        lambda trial: change(trial, best),
        f"scores are multiplied by {best:.4g}, and by {part.scaling:.4g} in the files",
    )


def try_window(case: DivergentStage) -> Experiments:
    tokens = len(case.input)
    first = int((case.token_errors > case.tolerance).nonzero()[0])
    for window in {first, first + 1, *(2**i for i in range(1, 16) if 2**i < tokens)} - {0}:
        yield (
            bind_value(
                lambda trial, w: setattr(trial, "mask", make_causal_mask(tokens, w)), window
            ),
            f"a token sees the last {window} alone; the first {first} tokens agree",
        )
    yield (
        lambda trial: setattr(trial, "mask", make_causal_mask(tokens, None)),
        "every token before it is seen, without a window",
    )
    yield (
        lambda trial: setattr(trial, "mask", torch.zeros(tokens, tokens)),
        "tokens see those that follow: no causal mask",
    )


def try_head_order(case: DivergentStage) -> Experiments:
    c = case.reference.config
    heads, groups = (
        c.num_attention_heads,
        getattr(c, "num_key_value_heads", None) or c.num_attention_heads,
    )
    if groups == heads or groups == 1:
        return

    def change(trial: StageTrial) -> None:
        attention: Any = trial.module
        order = torch.arange(heads).view(groups, -1).T.flatten()
        back = order.argsort()
        for rows in (order, back):
            out = attention.o_proj.weight.data
            size = attention.q_proj.weight.shape[0] // heads
            if rows is order:
                for tensor in attention.q_proj.parameters():
                    tensor.data = tensor.data.unflatten(0, (heads, size))[rows].flatten(0, 1)
                attention.o_proj.weight.data = out.unflatten(1, (heads, size))[:, rows].flatten(
                    1, 2
                )

    yield change, "heads of queries use the keys and values of other groups"


def try_projections(case: DivergentStage) -> Experiments:
    def keys_are_values(trial: StageTrial) -> None:
        a: Any = trial.module
        a.k_proj.weight.data, a.v_proj.weight.data = a.v_proj.weight.data, a.k_proj.weight.data

    def no_bias(trial: StageTrial) -> None:
        for name, parameter in trial.module.named_parameters():
            if name.endswith("bias"):
                parameter.data.zero_()

    yield keys_are_values, "projections of keys and values are exchanged"
    if any(name.endswith("bias") for name, _ in case.make_trial().module.named_parameters()):
        yield no_bias, "the biases of queries, keys and values are left out"


def try_quantized_cache(case: DivergentStage) -> Experiments:
    from transformers import AttentionInterface

    for dtype, kept, how in _CACHE_ROUNDINGS:
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
            key, value = (
                kept(t, dtype).repeat_interleave(query.shape[1] // t.shape[1], 1)
                for t in (key, value)
            )
            shares = (query @ key.transpose(2, 3) * scaling + mask).softmax(-1)
            return (shares @ value).transpose(1, 2).contiguous(), None

        AttentionInterface.register(name, rounded)

        def change(trial: StageTrial, name: str = name) -> None:
            trial.module.config._attn_implementation = name

        yield (
            change,
            f"keys and values are {how} to {str(dtype).removeprefix('torch.')} when they are kept",
        )


def _round_to_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype).to(tensor.dtype)


def _truncate_to_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Round towards zero to an 8-bit dtype: take the bit pattern one below where rounding
    went away from zero."""
    nearest = tensor.to(dtype)
    away = nearest.to(tensor.dtype).abs() > tensor.abs()
    return (nearest.view(torch.uint8) - away.to(torch.uint8)).view(dtype).to(tensor.dtype)


_CACHE_ROUNDINGS = (
    (torch.float8_e4m3fn, _round_to_dtype, "rounded"),
    (torch.float8_e4m3fn, _truncate_to_dtype, "cut"),  # as vLLM's CPU engine (0.30) does it
    (torch.float8_e5m2, _round_to_dtype, "rounded"),
    (torch.float8_e5m2, _truncate_to_dtype, "cut"),
    (torch.bfloat16, _round_to_dtype, "rounded"),
    (torch.float16, _round_to_dtype, "rounded"),
)
