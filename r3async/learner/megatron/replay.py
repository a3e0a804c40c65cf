"""Replaying recorded experts in Megatron's routers. What is replayed is in `r3async.learner.replay`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor

from r3async.learner.megatron.modules import HiddenStatesModel
from r3async.learner.replay import RoutingReplay

TopK = Callable[..., tuple[Tensor, Tensor]]


class ReplayedRouter(RouterReplay):
    """Stands in one router's `router_replay`, and asks `replay` about that router. With nothing bound, the router is exactly
    Megatron's.

    Megatron's own class keeps a class-wide list, a queue for the backward pass and no checks: a record with fewer rows
    than tokens silently leaves the others without expert.
    """

    def __init__(self, replay: RoutingReplay, index: int, *, pre_softmax: bool):
        # RouterReplay.__init__ would enter the instance into the class-wide list: not called on purpose.
        self._replay, self._index, self._pre_softmax = replay, index, pre_softmax
        self.clear_indices()
        self.clear_router_replay_action()

    def _probabilities(self, scores: Tensor) -> Tensor:
        """Scores are logits, unless gates are taken before the choice."""
        return scores if self._pre_softmax else scores.softmax(dim=-1)

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Selected scores and expert ids, `[N, K]` each, for `scores` `[N, experts]`."""
        assert default_compute_topk is not None
        routes = self._replay.current
        if routes is None:
            return default_compute_topk(scores, topk, num_groups, group_topk)
        scores = routes.balance(self._index, scores, self._probabilities)
        if not routes.replays:
            own_scores, own = default_compute_topk(scores, topk, num_groups, group_topk)
            routes.choose(self._index, own)
            return own_scores, own
        with torch.no_grad():
            own = default_compute_topk(scores, topk, num_groups, group_topk)[1]
        chosen = routes.choose(self._index, own)
        return scores.gather(1, chosen), chosen


def attach(
    model: HiddenStatesModel, *, moe_layers: Sequence[int], shard: tuple[int, int], **settings: Any
) -> RoutingReplay:
    """Put `RoutingReplay` into the routers of the decoder's layers that this rank has, found by global layer number.

    `moe_layers`: global numbers (from 1) of all MoE layers of the model, in order: column `l` of a record belongs to
    `moe_layers[l]`. Routers elsewhere, such as those of multi-token prediction, stay as they are.
    """
    routers = {
        layer.layer_number: layer.mlp.router for layer in model.decoder.layers if isinstance(layer.mlp, MoELayer)
    }
    columns = [list(moe_layers).index(number) for number in routers]
    replay = RoutingReplay(layers=len(moe_layers), columns=columns, shard=shard, **settings)
    for index, router in enumerate(routers.values()):
        router.router_replay = ReplayedRouter(replay, index, pre_softmax=model.config.moe_router_pre_softmax)
    # Before any collective: ranks that wait for each other's tokens would wait for ever.
    model.register_forward_pre_hook(lambda module, args: replay.check_tokens(args[0].numel()))
    return replay
