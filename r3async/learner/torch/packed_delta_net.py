"""The gated-delta-net layers of transformers on packed samples, with the rule and the convolution
of this package."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.utils import is_causal_conv1d_available, is_flash_linear_attention_available

from r3async.learner.gated_delta_rule import gated_delta_rule
from r3async.learner.packed_attention import AttentionPlan
from r3async.learner.packed_convolution import causal_convolution

MIXERS = (
    "Qwen3NextGatedDeltaNet",
    "Qwen3_5GatedDeltaNet",
    "Qwen3_5MoeGatedDeltaNet",
    "OlmoHybridGatedDeltaNet",
)
"""The classes that are served: their decay is one number a head and token."""


def use_packed_delta_rule(model: nn.Module) -> list[nn.Module]:
    """Let the gated-delta-net layers of a model keep samples apart in each pass that has an
    `attention_plan`; other passes are transformers' own. Returns these layers, in order.

    The layers hand the keyword arguments of the pass to two functions of their module, which are
    replaced for the whole process.
    """
    served = [module for module in model.modules() if type(module).__name__ in MIXERS]
    for module in {type(layer).__module__ for layer in served}:
        functions = vars(sys.modules[module])
        for name, use in (
            ("causal_conv1d_fn", _use_packed_convolution),
            ("torch_chunk_gated_delta_rule", _use_packed_rule),
        ):
            if not hasattr(functions[name], "packed_by_r3async"):
                functions[name] = use(functions[name])
                functions[name].packed_by_r3async = True
    return served


def _use_packed_convolution(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `causal_conv1d_fn` of transformers, `hidden_states [1, C, N]`, with packed samples
    kept apart."""

    @wraps(own)
    def convolve(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        *,
        attention_plan: AttentionPlan | None = None,
        **options: Any,
    ) -> Tensor:
        if attention_plan is None:
            return own(hidden_states, weight, bias, activation, **options)
        layout = attention_plan.recurrent_layout
        if hidden_states.is_cuda and is_causal_conv1d_available():
            options["seq_idx"] = layout.sample_numbers[None]
            return own(hidden_states, weight, bias, activation, **options)
        out = causal_convolution(hidden_states[0].mT, weight, bias, layout)
        return (out if activation is None else ACT2FN[activation](out)).mT[None]

    return convolve


def _use_packed_rule(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return `torch_chunk_gated_delta_rule` of transformers, `query [1, N, groups, Dk]`, with
    packed samples kept apart."""

    @wraps(own)
    def apply_rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        attention_plan: AttentionPlan | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if attention_plan is None:
            return own(query, key, value, g=g, beta=beta, **options)
        layout = attention_plan.recurrent_layout
        if query.is_cuda and is_flash_linear_attention_available():
            options["cu_seqlens"] = layout.edges
            return own(query, key, value, g=g, beta=beta, **options)
        return gated_delta_rule(query[0], key[0], value[0], g[0], beta[0], layout)[None], None

    return apply_rule
