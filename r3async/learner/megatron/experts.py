"""Experts of a layer in two parameters, plugged into Megatron through its layer specifications."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Parameter

from r3async.learner.experts import ExpertDispatch, WeightedSwiGLU, grouped_linear


class GroupedExperts(torch.nn.Module):
    """This rank's experts of a layer: `weight1 [E, 2 W, hidden]` (gate over up) and `weight2 [E, hidden, W]`.

    Megatron's own need TransformerEngine, or run one after the other.
    """

    def __init__(self, num_local_experts: int, config: TransformerConfig, **_: Any):
        super().__init__()
        hidden, width = config.hidden_size, config.moe_ffn_hidden_size
        self.weight1 = Parameter(torch.empty(num_local_experts, 2 * width, hidden, dtype=config.params_dtype))
        self.weight2 = Parameter(torch.empty(num_local_experts, hidden, width, dtype=config.params_dtype))

    def forward(self, tokens: Tensor, counts: Tensor, gates: Tensor) -> tuple[Tensor, None]:
        """`tokens [P, hidden]` in the order of experts, `counts` int64 `[E]` of each, `gates [P]`: their gates. No bias."""
        wide = grouped_linear(tokens, self.weight1, counts)
        return grouped_linear(WeightedSwiGLU.apply(wide, gates), self.weight2, counts), None


class LocalDispatcher(MoETokenDispatcher):
    """Brings tokens to experts that are all on this rank. Megatron's dispatchers ask the device three times a layer how many
    tokens each has, and add up what comes back in no fixed order."""

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """`[n, 1, hidden]`, `[n, E]` twice -> the sent rows and their gates."""
        self._shape = hidden_states.shape
        self._dispatch = ExpertDispatch(routing_map, self.config.moe_router_topk)
        return self._dispatch.dispatch_rows(hidden_states.reshape(-1, self._shape[-1])), self._dispatch.gather_gates(
            probs
        )

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        return hidden_states, probs

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return hidden_states, self._dispatch.expert_counts, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        return self._dispatch.combine_outputs(hidden_states)

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """`[n, hidden]` -> `[n, 1, hidden]`."""
        return hidden_states.view(self._shape)


def use_local_dispatcher(layers: Iterable[Any], config: TransformerConfig) -> None:
    """Give the mixtures among `layers` our dispatcher, unless experts are divided among ranks."""
    for layer in layers:
        if isinstance(layer.mlp, MoELayer) and config.expert_model_parallel_size == 1:
            layer.mlp.token_dispatcher = LocalDispatcher(config, get_default_pg_collection())
