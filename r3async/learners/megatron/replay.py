"""Replaying recorded experts in Megatron's routers, one micro-batch at a time.

Replay fixes the *selection* of experts. Their gate weights come from the learner's own scores at the replayed ids, so the
router still receives gradient (R3, arXiv 2510.11370).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor

from r3async.batching.packing import MicroBatch
from r3async.routing import RoutingError, validate_rows

TopK = Callable[..., tuple[Tensor, Tensor]]


@dataclass
class _Target:
    """What one router is bound to: `experts` int64 `[N, K]`, `recorded` bool `[N]`."""

    experts: Tensor
    recorded: Tensor
    all_recorded: bool
    replay: bool
    agreed: Tensor | None = None


@dataclass
class Agreement:
    """Of the recorded (position, MoE layer) pairs, those where the learner's own top-k set is the recorded set."""

    agreed: int = 0
    compared: int = 0

    @property
    def share(self) -> float:
        """0 if nothing was compared."""
        return self.agreed / self.compared if self.compared else 0.0


class CheckedRouterReplay(RouterReplay):
    """Stands in one router's `router_replay`. Unbound, the router is exactly Megatron's.

    Megatron's own class keeps a class-wide list, a queue for the backward pass and no checks: a record with fewer rows
    than tokens silently leaves the others without expert. This one is in no list, and has one target that serves forward
    and recomputed forward alike, so that it can not run out of step.
    """

    def __init__(self, layer_number: int):
        # RouterReplay.__init__ would enter the instance into the class-wide list: not called on purpose.
        self.layer_number = layer_number
        self.target: _Target | None = None
        self.clear_indices()
        self.clear_router_replay_action()

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Selected scores and expert ids, `[N, K]` each, for `scores` `[N, experts]`.

        Raises `RoutingError` if the record bound does not have exactly one row per token.
        """
        assert default_compute_topk is not None
        target = self.target
        if target is None:
            return default_compute_topk(scores, topk, num_groups, group_topk)
        if target.experts.shape != (len(scores), topk):
            raise RoutingError(
                f"layer {self.layer_number}: routes of shape {tuple(target.experts.shape)} are bound, but the router got "
                f"{len(scores)} tokens and chooses {topk} experts"
            )
        if not target.replay:
            own_scores, own = default_compute_topk(scores, topk, num_groups, group_topk)
            target.agreed = _agreed(own, target)
            return own_scores, own
        with torch.no_grad():
            own = default_compute_topk(scores, topk, num_groups, group_topk)[1]
            target.agreed = _agreed(own, target)
            chosen = target.experts
            if not target.all_recorded:
                chosen = torch.where(target.recorded[:, None], chosen, own)
        return scores.gather(1, chosen), chosen


def _agreed(own: Tensor, target: _Target) -> Tensor:
    """Recorded rows whose set of ids is the recorded one, int64 scalar. Ids are distinct in both."""
    same = (own.sort(dim=1).values == target.experts.sort(dim=1).values).all(dim=1)
    return (same & target.recorded).sum()


@dataclass
class RoutingReplay:
    """Binds recorded routes to the routers of this rank's layers.

    `moe_layers`: global numbers (from 1) of all MoE layers of the model, in order: column `l` of a record belongs to
    `moe_layers[l]`. `replay`: whether to use the records, or only to compare with them.
    """

    model: GPTModel
    moe_layers: Sequence[int]
    top_k: int
    num_experts: int
    replay: bool
    _routers: list[tuple[int, CheckedRouterReplay]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        for layer in self.model.decoder.layers:
            if isinstance(layer.mlp, MoELayer):
                hook = CheckedRouterReplay(layer.layer_number)
                layer.mlp.router.router_replay = hook
                self._routers.append((list(self.moe_layers).index(layer.layer_number), hook))

    @contextmanager
    def bound(self, micro_batch: MicroBatch) -> Iterator[Agreement]:
        """Bind one micro-batch's routes for its forward and backward, and leave nothing behind, whatever happens.

        Rows that are not recorded route by themselves, as without replay. Yields the agreement, filled in when the block
        ends without an exception. Raises `RoutingError` for records that do not fit the model or hold an invalid row.
        """
        if any(hook.target is not None for _, hook in self._routers):
            raise RoutingError("routes of another micro-batch are still bound")
        agreement = Agreement()
        targets = self._targets(micro_batch)
        try:
            for (_, hook), target in zip(self._routers, targets, strict=False):
                hook.target = target
            yield agreement
        finally:
            for _, hook in self._routers:
                hook.target = None
        counts = [t.agreed for t in targets if t.agreed is not None]
        if counts:
            agreement.agreed = int(torch.stack(counts).sum())
            agreement.compared = len(counts) * int(np.count_nonzero(micro_batch.table["routing_recorded"]))

    def _targets(self, micro_batch: MicroBatch) -> list[_Target]:
        """One per local router; none if the micro-batch has no record at all, so that routers stay unbound."""
        table = micro_batch.table
        if "routed_experts" not in table or "routing_recorded" not in table:
            return []
        rows, recorded = table["routed_experts"], table["routing_recorded"]
        validate_rows(rows[recorded], layers=len(self.moe_layers), top_k=self.top_k, num_experts=self.num_experts)
        device = next(self.model.parameters()).device
        # One copy to [L, N, K] makes each layer's rows contiguous; the table's own arrays may be read-only.
        experts = torch.from_numpy(np.ascontiguousarray(rows.transpose(1, 0, 2)).astype(np.int64)).to(device)
        known = torch.from_numpy(recorded.copy()).to(device)
        common: dict[str, Any] = {"recorded": known, "all_recorded": bool(recorded.all()), "replay": self.replay}
        return [_Target(experts=experts[index], **common) for index, _ in self._routers]
