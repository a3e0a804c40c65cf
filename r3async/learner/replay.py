"""Rollout routing replay: a model's routers use the recorded experts (R3, arXiv 2510.11370). Shared
by all backends.

Replay fixes the *selection* of experts. Their gate weights come from the learner's own scores at
the replayed ids, so the router still receives gradient. A backend's router calls
`MicroBatchRoutes.choose_experts` to know which experts to use, and nothing else.

The micro-batch that a router serves is known at every moment, in any order of forward and
backward passes: `bind_routes` makes a micro-batch current for its forward pass, and a hook on the
output of that pass makes it current again as soon as its backward pass, which may recompute
layers, begins. Nothing is queued, so nothing can run out of step; routes used after the block has
ended raise an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from r3async.data.model_shape import RoutingShape
from r3async.data.routes import RoutingError, iter_sorted_columns, validate_routes
from r3async.learner.device_upload import upload_array
from r3async.learner.micro_batches import MicroBatch
from r3async.learner.results import RouteTrace


class RoutingCounts:
    """The counts of this rank's routers since the last `RoutingReplay.pop_counts`, by local
    router, on the device.

    Padding counts in none of them, and a recomputed forward pass counts once.

    Attributes:
        agreeing_tokens: int64 `[R]`: recorded tokens whose own top-k set is the recorded set.
        compared_tokens: int64 `[R]`: recorded tokens.
        expert_load: int64 `[R, experts]`: tokens sent to each expert.
        aux_loss: float64 scalar: the routers' own loss.
    """

    def __init__(self, routers: int, experts: int, device: torch.device):
        self.agreeing_tokens = torch.zeros(routers, dtype=torch.int64, device=device)
        self.compared_tokens = torch.zeros(routers, dtype=torch.int64, device=device)
        self.expert_load = torch.zeros(routers, experts, dtype=torch.int64, device=device)
        self.aux_loss = torch.zeros((), dtype=torch.float64, device=device)


def count_recorded_load(
    micro_batches: Sequence[MicroBatch], layers: int, experts: int
) -> np.ndarray:
    """Return the number of tokens that the recorded routes send to each expert, float64
    `[layers, experts]`."""
    load = np.zeros((layers, experts))
    for m in micro_batches:
        if "routed_experts" in m.table:
            (recorded,) = np.nonzero(m.table["routing_recorded"])
            rows = m.table["routed_experts"][recorded]
            times = (
                None
                if m.row_multiplicity is None
                else np.repeat(m.row_multiplicity[recorded], rows.shape[2])
            )
            for layer in range(layers):
                load[layer] += np.bincount(rows[:, layer].reshape(-1), times, minlength=experts)
    return load


class _AttachLoss(torch.autograd.Function):
    """The identity of `x` with `loss` attached, which gets the gradient 1 in the backward pass.

    A term of the step's sum has that gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (loss,) = ctx.saved_tensors
        return grads[0], torch.ones_like(loss)


class RowExchange(NamedTuple):
    """The rows that this rank sends to each rank, and receives from it; these by expert too, int64
    `[ranks, experts]`."""

    sent: list[int]
    received: list[int]
    received_by_expert: Tensor


class _UncountedChoice(NamedTuple):
    """A router's choice that `count_choices` has not counted.

    Attributes:
        used: int64 `[n, K]`: the experts that it used.
        is_recorded_set: bool `[n]`: its own choice is the recorded set; None without records.
    """

    used: Tensor
    is_recorded_set: Tensor | None


class MicroBatchRoutes:
    """The routes of one micro-batch for this rank's routers and tokens, created by
    `RoutingReplay.bind_routes`.

    Attributes:
        num_tokens: Number of tokens of the whole micro-batch, over all ranks.
        preferred_experts: `[n, K]` per local router: the experts that it would have chosen; only if
            `keeps_choices` is set.
        used_experts: `[n, K]` per local router: the experts that it used; only if
            `keeps_choices` is set.
    """

    def __init__(self, replay: RoutingReplay, micro_batch: MicroBatch, *, keeps_choices: bool):
        self._replay = replay
        self._micro_batch = micro_batch
        self.num_tokens = micro_batch.num_tokens
        part = replay.slice_tokens(micro_batch.num_tokens)
        self.num_local_tokens = part.stop - part.start
        self._num_real_rows = min(
            max(micro_batch.num_real_tokens - part.start, 0), self.num_local_tokens
        )
        self._sorted_experts: Tensor | None = None
        self._sorted_gates: Tensor | None = None
        """float32 `[R, n, K]`: recorded gates, in the order of their experts' ids."""
        self._is_recorded: Tensor | None = None
        self._row_multiplicity: Tensor | None = None
        if micro_batch.row_multiplicity is not None:
            multiplicity = micro_batch.row_multiplicity[part][: self._num_real_rows]
            self._row_multiplicity = upload_array(multiplicity, replay.device)
        self.keeps_choices = keeps_choices
        self.preferred_experts: list[Tensor | None] = [None] * len(replay.moe_layer_indices)
        self.used_experts: list[Tensor | None] = [None] * len(replay.moe_layer_indices)
        self._chosen_before: list[Tensor | None] = [None] * len(replay.moe_layer_indices)
        """What each router replayed in the forward pass, in a narrow dtype, if that pass
        will be recomputed."""
        self._uncounted: dict[int, _UncountedChoice] = {}
        """By router: choices of the forward pass that `count_choices` has not counted."""
        self.exchanges: dict[int, RowExchange] = {}
        """What each router's dispatcher exchanges with other ranks. A recomputed
        pass does the same."""
        self.is_recomputing = self.is_closed = False
        table = micro_batch.table
        if replay.moe_layer_indices and "routed_experts" in table and "routing_recorded" in table:
            self._load_records(table["routed_experts"], table["routing_recorded"], part)
            if self.has_replayed_routes and "routed_weights" in table:
                self._load_gates(table["routed_experts"], table["routed_weights"], part)

    def _load_gates(self, rows: np.ndarray, gates: np.ndarray, part: slice) -> None:
        if gates.shape != rows.shape:
            raise RoutingError(f"gates have shape {gates.shape}, and routes {rows.shape}")
        layers = self._replay.moe_layer_indices
        order = np.argsort(rows[part][:, layers], axis=2)
        of_layers = np.take_along_axis(gates[part][:, layers], order, axis=2)
        self._sorted_gates = upload_array(
            np.ascontiguousarray(of_layers.transpose(1, 0, 2)), self._replay.device
        )

    def replace_gates(self, router: int, gates: Tensor, experts: Tensor | None = None) -> Tensor:
        """Return the gates of local router `router`, those of recorded tokens replaced by the
        recorded ones.

        A replaced gate passes no gradient on. The result is in the router's graph all the same:
        terms that are attached to its scores get their gradient.

        Args:
            gates: `[n, K]` of `experts`, which `choose_experts` returned, in any order; or `[n, E]`
                of all experts, 0 for those not chosen.
        """
        if self._sorted_gates is None or self._sorted_experts is None:
            return gates
        assert self._is_recorded is not None
        ids = self._sorted_experts[router].long()
        found = gates.new_zeros(len(gates), self._replay.num_experts).scatter_(
            1, ids, self._sorted_gates[router].to(gates.dtype)
        )
        if experts is not None:
            found = found.gather(1, experts)
        return torch.where(self._is_recorded[:, None], found, gates)

    def _load_records(self, rows: np.ndarray, recorded: np.ndarray, part: slice) -> None:
        replay = self._replay
        if rows.shape[1:] != (replay.num_moe_layers, replay.top_k):
            raise RoutingError(
                f"routed experts have shape {rows.shape}, expected [n, {replay.num_moe_layers}, "
                f"{replay.top_k}]: these routes were recorded with another model"
            )
        if not recorded[part].any():
            return
        # Only this rank's tokens and layers go to the device, in the narrowest dtype in which torch
        # has all operations, and sorted: the order of a record has no meaning, so no bit of what is
        # replayed may depend on it.
        narrow = (
            np.uint8
            if rows.dtype == np.uint8
            else np.int16
            if replay.num_experts <= 2**15
            else np.int32
        )
        local = np.empty(
            (len(replay.moe_layer_indices), part.stop - part.start, replay.top_k), narrow
        )
        here = recorded[part]
        valid = True
        for column, layer in zip(local, replay.moe_layer_indices, strict=True):
            for some, ids in iter_sorted_columns(rows[part, layer]):
                bad = ids[-1] >= replay.num_experts
                for lower, upper in itertools.pairwise(ids):
                    bad |= lower == upper
                # Checked before they are on the device, which nobody has to wait for.
                valid = valid and not (bad & here[some]).any()
                for k, of_rank in enumerate(ids):
                    column[some, k] = of_rank
        if not valid:
            # Slow, but its error names the row.
            validate_routes(
                rows[recorded],
                layers=replay.num_moe_layers,
                top_k=replay.top_k,
                num_experts=replay.num_experts,
            )
        self._sorted_experts = upload_array(local, replay.device)
        self._is_recorded = upload_array(here.copy(), replay.device)
        self._all_recorded = bool(here.all())

    @property
    def has_replayed_routes(self) -> bool:
        """True if `choose_experts` may return anything other than the router's own choice."""
        return self._sorted_experts is not None and self._replay.is_enabled

    @property
    def has_gates(self) -> bool:
        """True if `replace_gates` may replace any."""
        return self._sorted_gates is not None

    @torch.no_grad()
    def choose_experts(self, router: int, preferred: Tensor) -> Tensor:
        """Return the expert ids `[n, K]` that local router `router` has to use.

        `preferred` int64 `[n, K]` is the router's own top-k. A row whose recorded set is the
        router's own set comes back in the router's own order, so that replaying what the model
        would do anyway changes no bit. A row that is not recorded is the router's own. A recomputed
        pass replays what the forward pass did. Raises `RoutingError` if the number of tokens is not
        the micro-batch's, or if the block of `bind_routes` has ended.
        """
        replay = self._replay
        if self.is_closed:
            raise RoutingError("a router ran for a micro-batch whose routes have been released")
        if preferred.shape != (self.num_local_tokens, replay.top_k):
            raise RoutingError(
                f"MoE layer {replay.moe_layer_indices[router]}: routes of {self.num_local_tokens} "
                f"tokens with {replay.top_k} experts each are bound, but the router chose "
                f"{tuple(preferred.shape)}"
            )
        before = self._chosen_before[router]
        if self.is_recomputing and before is not None:
            return before.to(preferred.dtype)
        used = preferred
        same = None
        count = not self.is_recomputing
        if self._sorted_experts is not None:
            assert self._is_recorded is not None
            rows = self._sorted_experts[router].to(preferred.dtype)
            same = (preferred.sort(dim=1).values == rows).all(dim=1)
            if replay.is_enabled:
                keep = same if self._all_recorded else same | ~self._is_recorded
                used = torch.where(keep[:, None], preferred, rows)
        if count:
            if router in self._uncounted:
                self.count_choices()
            self._uncounted[router] = _UncountedChoice(used, same)
            if self.keeps_choices:
                self.preferred_experts[router] = preferred
                self.used_experts[router] = used
            if replay.is_recomputed and self.has_replayed_routes:
                self._chosen_before[router] = used.to(
                    torch.int16 if replay.num_experts <= 2**15 else torch.int32
                )
        return used

    @torch.no_grad()
    def count_choices(self) -> None:
        """Count the choices that were made since the last call, in `RoutingReplay.counts`: of all
        routers at once, since a GPU takes as long to start a small operation as to run it."""
        if not self._uncounted:
            return
        counts = self._replay.counts
        routers = sorted(self._uncounted)
        rows: slice | list[int] = (
            slice(None) if len(routers) == len(self._replay.moe_layer_indices) else routers
        )
        choices = [self._uncounted[router] for router in routers]
        self._uncounted = {}
        real = slice(None, self._num_real_rows)
        used = torch.stack([choice.used[real] for choice in choices])
        times = self._weight_rows(torch.ones_like(used[0])).expand_as(used)
        counts.expert_load[rows] = counts.expert_load[rows].scatter_add(
            1, used.flatten(1), times.flatten(1)
        )
        agrees = [
            choice.is_recorded_set[real] for choice in choices if choice.is_recorded_set is not None
        ]
        if agrees:
            assert self._is_recorded is not None
            recorded = self._is_recorded[real]
            agreeing = (torch.stack(agrees) & recorded).T  # [n, R]
            counts.agreeing_tokens[rows] += self._weight_rows(agreeing).sum(dim=0)
            counts.compared_tokens[rows] += self._weight_rows(recorded).sum()

    def add_aux_loss(
        self, router: int, scores: Tensor, probabilities: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return `scores` `[n, experts]` with the load-balance term of local router `router`
        attached, if there is one.

        `probabilities(scores)` returns the router's probability of each expert, rows
        that add up to 1.
        """
        weights = self._replay.aux_loss_weights
        if weights is None:
            return scores
        loss = self._weight_rows(
            probabilities(scores[: self._num_real_rows]).float() @ weights[router]
        ).sum()
        if not self.is_recomputing:
            self._replay.counts.aux_loss += loss.detach()
        return _AttachLoss.apply(scores, loss)

    def _weight_rows(self, of_rows: Tensor) -> Tensor:
        """Multiply `of_rows` `[n, ...]` by the number of samples that each row belongs to."""
        times = self._row_multiplicity
        return (
            of_rows if times is None else of_rows * times.view(-1, *(1 for _ in of_rows.shape[1:]))
        )

    def track_backward(self, output: Tensor) -> Tensor:
        """Make these routes current when the backward pass of `output`, this rank's result of
        the pass, begins."""
        if output.requires_grad:
            output.register_hook(self._on_backward_start)
        return output

    def _on_backward_start(self, _: Tensor) -> None:
        if self.is_closed:
            raise RoutingError(
                "the backward pass of a micro-batch began after its routes were released"
            )
        self.count_choices()
        self.is_recomputing = True
        self._replay.current_routes = self

    def build_trace(self) -> RouteTrace:
        """Return the choices of the routers, padding left out. Only with `keeps_choices`, after
        the forward pass."""
        chosen = (
            torch.stack([t for t in kept if t is not None], dim=1)
            for kept in (self.preferred_experts, self.used_experts)
        )
        own, used = (t[: self._num_real_rows].cpu().numpy().astype(np.uint16) for t in chosen)
        samples = self._micro_batch.sample_ids
        cu_seqlens = self._micro_batch.cu_seqlens[: len(samples) + 1]
        first = self._replay.slice_tokens(self.num_tokens).start
        prefixes = self._micro_batch.prefixes
        shared = None if prefixes is None else prefixes[: len(samples)]
        return RouteTrace(
            samples, cu_seqlens, first, self._replay.moe_layer_indices, own, used, prefixes=shared
        )

    def close(self) -> None:
        """Release everything but the choices that are kept; later use raises."""
        self.is_closed = True
        self._uncounted = {}
        self._sorted_experts = self._sorted_gates = self._is_recorded = None
        self._chosen_before = []


class RoutingReplay:
    """The replay state of one rank.

    Attributes:
        num_moe_layers: Number of MoE layers of the whole model.
        moe_layer_indices: The MoE layer of each of this rank's routers (0-based: its
            column in a record).
        is_enabled: Use the records; otherwise only compare with them.
        token_shard: (index, count) of the equal contiguous parts into which the tokens are split
            among sequence-parallel ranks.
        is_recomputed: The backward pass recomputes routers (`learner.recompute`).
    """

    def __init__(
        self,
        shape: RoutingShape,
        moe_layer_indices: Sequence[int],
        *,
        is_enabled: bool,
        device: torch.device,
        token_shard: tuple[int, int] = (0, 1),
        is_recomputed: bool = False,
    ):
        self.num_moe_layers = shape.layers
        self.top_k = shape.top_k
        self.num_experts = shape.num_experts
        self.moe_layer_indices = list(moe_layer_indices)
        self.is_enabled = is_enabled
        self.device = device
        self.token_shard = token_shard
        self.is_recomputed = is_recomputed
        self.current_routes: MicroBatchRoutes | None = None
        self._open_routes: list[MicroBatchRoutes] = []
        self.aux_loss_weights: Tensor | None = None
        """float32 `[R, experts]`: what a unit of each expert's probability adds to the loss; None
        without that term."""
        self.counts = RoutingCounts(len(self.moe_layer_indices), shape.num_experts, device)

    @staticmethod
    def for_full_model(
        shape: RoutingShape | None,
        *,
        enabled: bool,
        device: torch.device,
        is_recomputed: bool = False,
    ) -> RoutingReplay:
        """Return the replay state of a rank that has every router of a model; `shape` None:
        it has no experts."""
        shape = shape or RoutingShape(layers=0, top_k=1, num_experts=1)
        return RoutingReplay(
            shape,
            range(shape.layers),
            is_enabled=enabled,
            device=device,
            is_recomputed=is_recomputed,
        )

    @property
    def uses_records(self) -> bool:
        """True if recorded routes may replace a router's own choice, on any rank."""
        return self.is_enabled and self.num_moe_layers > 0

    def slice_tokens(self, tokens: int) -> slice:
        """Return this rank's part of `tokens` packed tokens. Raises `RoutingError` if they cannot
        be split evenly."""
        index, count = self.token_shard
        if tokens % count:
            raise RoutingError(
                f"{tokens} tokens cannot be split evenly among {count} sequence-parallel ranks"
            )
        return slice(index * tokens // count, (index + 1) * tokens // count)

    def pop_counts(self) -> RoutingCounts:
        """Return the counts so far, and start new ones."""
        taken = self.counts
        self.counts = RoutingCounts(len(self.moe_layer_indices), self.num_experts, self.device)
        return taken

    @contextmanager
    def use_aux_loss(self, weights: np.ndarray | None) -> Iterator[None]:
        """Give the routers a load-balance term inside this block.

        `weights` float64 `[layers, experts]` are those of the whole model.
        """
        if weights is not None and self.moe_layer_indices:
            self.aux_loss_weights = upload_array(
                weights[self.moe_layer_indices].astype(np.float32), self.device
            )
        try:
            yield
        finally:
            self.aux_loss_weights = None

    @contextmanager
    def bind_routes(
        self, micro_batch: MicroBatch, *, keep: bool = False
    ) -> Iterator[MicroBatchRoutes]:
        """Bind one micro-batch's routes for its forward and backward, and leave nothing behind,
        whatever happens.

        With `keep`, the choice of each router is kept. Raises `RoutingError` if another micro-batch
        is bound, for records that do not fit the model, and for an invalid row.
        """
        with self.bind_pipelined() as bind:
            yield bind(micro_batch, keep)

    @contextmanager
    def bind_pipelined(self) -> Iterator[RouteBinder]:
        """Bind the routes of several micro-batches whose forward and backward passes overlap.

        Like `bind_routes`, for schedules that begin a forward pass before earlier micro-batches
        have had their backward. Yields a function that binds the next micro-batch to run forward.
        All are released when the block ends.
        """
        if self._open_routes:
            raise RoutingError("routes of another micro-batch are still bound")
        try:
            yield self._bind_micro_batch
            for routes in self._open_routes:
                routes.count_choices()
        finally:
            for routes in self._open_routes:
                routes.close()
            self._open_routes.clear()
            self.current_routes = None

    def _bind_micro_batch(self, micro_batch: MicroBatch, keep: bool) -> MicroBatchRoutes:
        # In every schedule backward passes come in the order of the forward passes: when one
        # begins, earlier ones are done.
        if self.current_routes is not None and self.current_routes.is_recomputing:
            last = self._open_routes.index(self.current_routes)
            for routes in self._open_routes[:last]:
                routes.close()
            del self._open_routes[:last]
        self.current_routes = MicroBatchRoutes(self, micro_batch, keeps_choices=keep)
        self._open_routes.append(self.current_routes)
        return self.current_routes

    def check_token_count(self, tokens: int) -> None:
        """Raise `RoutingError` if `tokens` are about to run forward and another number is bound."""
        if self.current_routes is not None and self.current_routes.num_tokens != tokens:
            raise RoutingError(
                f"routes of {self.current_routes.num_tokens} tokens are bound, but {tokens} "
                "tokens are fed forward"
            )


RouteBinder = Callable[[MicroBatch, bool], MicroBatchRoutes]
"""A function that binds the next micro-batch to run forward; its second argument says whether to
keep routers' choices.
"""
