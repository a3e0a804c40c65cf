"""The experts of a layer in two parameters, plugged into Megatron by its layer specifications."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import all_to_all
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Parameter

from r3async.learner.deterministic_gather import DeterministicGather
from r3async.learner.replay import RoutingReplay, RowExchange
from r3async.learner.stacked_experts import (
    ExpertDispatch,
    RowGroups,
    WeightedSwiGLU,
    grouped_linear,
)


class GroupedExperts(torch.nn.Module):
    """This rank's experts of a layer: `weight1 [E, 2 W, hidden]` (gate over up) and
    `weight2 [E, hidden, W]`.

    Megatron's own experts need TransformerEngine, or run one after the other.
    """

    def __init__(self, num_local_experts: int, config: TransformerConfig, **_: Any):
        super().__init__()
        hidden = config.hidden_size
        width = config.moe_ffn_hidden_size
        self.weight1 = Parameter(
            torch.empty(num_local_experts, 2 * width, hidden, dtype=config.params_dtype)
        )
        self.weight2 = Parameter(
            torch.empty(num_local_experts, hidden, width, dtype=config.params_dtype)
        )

    def forward(self, tokens: Tensor, counts: Tensor, gates: Tensor) -> tuple[Tensor, None]:
        """Return the experts' outputs for `tokens [P, hidden]` in the order of
        experts, and no bias.

        `counts` int64 `[E]` are the tokens of each expert, and `gates [P]` the gates of the tokens.
        """
        groups = RowGroups.from_counts(counts)
        wide = grouped_linear(tokens, self.weight1, groups)
        return grouped_linear(WeightedSwiGLU.apply(wide, gates), self.weight2, groups), None


class LocalDispatcher(MoETokenDispatcher):
    """A dispatcher that sends tokens to experts that are all on this rank.

    Megatron's dispatchers read each expert's token count from the device three times a layer, and
    sum the results in no fixed order.
    """

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the sent rows and their gates, from `[n, 1, hidden]` and twice `[n, E]`."""
        self._shape = hidden_states.shape
        self._dispatch = ExpertDispatch(routing_map, self.config.moe_router_topk)
        return self._dispatch.dispatch_rows(
            hidden_states.reshape(-1, self._shape[-1])
        ), self._dispatch.gather_gates(probs)

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        return hidden_states, probs

    def dispatch_postprocess(
        self, hidden_states: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return hidden_states, self._dispatch.expert_counts, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        return self._dispatch.combine_outputs(hidden_states)

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Restore the shape: `[n, hidden]` -> `[n, 1, hidden]`."""
        return hidden_states.view(self._shape)


class ExchangeDispatcher(LocalDispatcher):
    """A dispatcher that sends tokens to the ranks that have their experts, by all-to-all.

    The host has to know how many rows it sends and receives: once a layer, also if the layer is
    recomputed. Megatron's dispatcher reads from the device five times a pass, and sums the results
    in no fixed order.

    Rows are sent in the order of experts and then of tokens, and so leave in blocks, one for each
    rank. They arrive in the order of ranks, experts and tokens, and are put into that of experts,
    ranks and tokens.
    """

    replay: RoutingReplay
    router: int
    """The number of the layer's router among those of this rank."""

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        routes = self.replay.current_routes
        exchange = (
            routes.exchanges.get(self.router)
            if routes is not None and routes.is_recomputing
            else None
        )
        self._exchange = exchange or self._plan_exchange(self._dispatch.expert_counts)
        if routes is not None:
            routes.exchanges[self.router] = self._exchange
        self._to_experts, self._to_ranks = order_by_expert(self._exchange)
        return self._send(hidden_states), self._send(probs)

    def _plan_exchange(self, sent: Tensor) -> RowExchange:
        """Agree with the other ranks on the rows that everyone sends, from those of each
        expert, int64 `[E]`."""
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.ep_group)
        by_rank = (counts.view(self.ep_size, -1).sum(dim=1) for counts in (sent, received))
        sizes = torch.cat([*by_rank]).tolist()
        return RowExchange(
            sizes[: self.ep_size], sizes[self.ep_size :], received.view(self.ep_size, -1)
        )

    def _send(self, rows: Tensor) -> Tensor:
        arrived: Tensor = all_to_all(
            self.ep_group, rows, self._exchange.received, self._exchange.sent
        )
        return arrived

    def dispatch_postprocess(
        self, hidden_states: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        counts = self._exchange.received_by_expert.sum(dim=0)
        return self._to_experts(hidden_states), counts, self._to_experts(probs)

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        return self._to_ranks(hidden_states)

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        returned: Tensor = all_to_all(
            self.ep_group, hidden_states, self._exchange.sent, self._exchange.received
        )
        return returned

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        return super().combine_postprocess(self._dispatch.combine_outputs(hidden_states))


def order_by_expert(exchange: RowExchange) -> tuple[DeterministicGather, DeterministicGather]:
    """Return the gathers of received rows in the order of experts, and of these in the order in
    which they came."""
    by_expert = exchange.received_by_expert
    total = sum(exchange.received)
    ranks, experts = by_expert.shape
    expert_of_block = torch.arange(experts, device=by_expert.device).repeat(ranks)
    expert_of_row = expert_of_block.repeat_interleave(by_expert.flatten(), output_size=total)
    order = expert_of_row.argsort(stable=True)
    back = torch.empty_like(order).index_copy_(0, order, torch.arange(total, device=order.device))
    return DeterministicGather(order, back, None), DeterministicGather(back, order, None)


def use_own_dispatchers(layers: Iterable[Any], config: TransformerConfig) -> None:
    """Give the mixtures among `layers` our dispatchers."""
    dispatcher = LocalDispatcher if config.expert_model_parallel_size == 1 else ExchangeDispatcher
    for layer in layers:
        if isinstance(layer.mlp, MoELayer):
            layer.mlp.token_dispatcher = dispatcher(config, get_default_pg_collection())
