"""Replay of recorded experts in Megatron's routers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor

from r3async.data.model_shape import RoutingShape
from r3async.learner.megatron.model import HiddenStatesModel
from r3async.learner.replay import RoutingReplay

TopKFunction = Callable[..., tuple[Tensor, Tensor]]


class RouterReplayAdapter(RouterReplay):
    """A stand-in for one router's `router_replay`, which asks `replay` about that router.

    With nothing bound, the router behaves exactly like Megatron's. Megatron's own class keeps a
    class-wide list, a queue for the backward pass and no checks: a record with fewer rows than
    tokens silently leaves the others without expert.
    """

    def __init__(self, replay: RoutingReplay, index: int, *, pre_softmax: bool):
        # RouterReplay.__init__ is not called on purpose: it would add the instance to the
        # class-wide list.
        self._replay = replay
        self._index = index
        self._pre_softmax = pre_softmax
        self.clear_indices()
        self.clear_router_replay_action()

    def _to_probabilities(self, scores: Tensor) -> Tensor:
        """Return probabilities from scores, which are logits unless gates are computed
        before the choice."""
        return scores if self._pre_softmax else scores.softmax(dim=-1)

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopKFunction | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return selected scores and expert ids, `[N, K]` each, for `scores` `[N, experts]`."""
        assert default_compute_topk is not None
        routes = self._replay.current_routes
        if routes is None:
            return default_compute_topk(scores, topk, num_groups, group_topk)
        scores = routes.add_aux_loss(self._index, scores, self._to_probabilities)
        if not routes.has_replayed_routes:
            own_scores, own = default_compute_topk(scores, topk, num_groups, group_topk)
            routes.choose_experts(self._index, own)
            return own_scores, own
        with torch.no_grad():
            own = default_compute_topk(scores, topk, num_groups, group_topk)[1]
        chosen = routes.choose_experts(self._index, own)
        return scores.gather(1, chosen), chosen


def _route_with_gates(
    route: Callable[..., tuple[Tensor, Tensor]],
    replay: RoutingReplay,
    index: int,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Return what a router's `routing` returns, gates of all experts and a mask `[N, experts]`,
    with the recorded gates."""
    gates, mask = route(*args, **kwargs)
    routes = replay.current_routes
    return gates if routes is None else routes.replace_gates(index, gates), mask


def attach_replay(
    model: HiddenStatesModel,
    *,
    moe_layers: Sequence[int],
    top_k: int,
    num_experts: int,
    shard: tuple[int, int],
    cp_size: int = 1,
    **settings: Any,
) -> RoutingReplay:
    """Put `RoutingReplay` into the routers of the decoder's layers that this rank has, found by
    global layer number.

    Routers elsewhere, such as those of multi-token prediction, stay as they are.

    Args:
        moe_layers: Global numbers (from 1) of all MoE layers of the model, in order: column `l` of
            a record belongs to `moe_layers[l]`.
        cp_size: The number of ranks among which the model's input tokens are divided.
    """
    mixtures = {
        layer.layer_number: layer.mlp
        for layer in model.decoder.layers
        if isinstance(layer.mlp, MoELayer)
    }
    columns = [list(moe_layers).index(number) for number in mixtures]
    shape = RoutingShape(len(moe_layers), top_k, num_experts)
    replay = RoutingReplay(shape, columns, token_shard=shard, **settings)
    for index, mixture in enumerate(mixtures.values()):
        mixture.router.router_replay = RouterReplayAdapter(
            replay, index, pre_softmax=model.config.moe_router_pre_softmax
        )
        mixture.router.routing = partial(_route_with_gates, mixture.router.routing, replay, index)
        mixture.token_dispatcher.replay = replay
        mixture.token_dispatcher.router = index
    # Checked before any collective: ranks that wait for each other's tokens would wait forever.
    model.register_forward_pre_hook(
        lambda module, args: replay.check_token_count(cp_size * args[0].numel())
    )
    return replay
