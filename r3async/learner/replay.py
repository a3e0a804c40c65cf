"""Replaying recorded experts in a model's routers: what every backend shares (R3, arXiv 2510.11370).

Replay fixes the *selection* of experts. Their gate weights come from the learner's own scores at the replayed ids, so the
router still receives gradient. A backend's router asks `RoutingReplay.choose` which experts to use, and nothing else.

Which micro-batch a router serves is known at every moment, in any order of forward and backward passes: `bound` makes a
micro-batch current for its forward pass, and a hook on the output of that pass makes it current again as soon as its
backward pass, which may recompute layers, begins. Nothing is queued, so nothing can run out of step; what is used after
the block has ended raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from r3async.data.model_shape import RoutingShape
from r3async.data.routes import RoutingError, sorted_columns, validate_rows
from r3async.learner import RouteTrace
from r3async.learner.batch.packing import MicroBatch


class RoutingCounts:
    """What this rank's routers did since the last `RoutingReplay.take_counts`, by local router, on the device.

    `agreed`, `compared` int64 `[R]`: of the recorded tokens, those whose own top-k set is the recorded set. `load` int64
    `[R, experts]`: tokens sent to each expert. `auxiliary` float64 scalar: the routers' own loss. Padding is in none of
    them, a recomputed forward pass counts once.
    """

    def __init__(self, routers: int, experts: int, device: torch.device):
        self.agreed = torch.zeros(routers, dtype=torch.int64, device=device)
        self.compared = torch.zeros(routers, dtype=torch.int64, device=device)
        self.load = torch.zeros(routers, experts, dtype=torch.int64, device=device)
        self.auxiliary = torch.zeros((), dtype=torch.float64, device=device)


class _WithLoss(torch.autograd.Function):
    """`x` as it is; in the backward pass `loss` gets the gradient 1, as a term of the step's sum does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (loss,) = ctx.saved_tensors
        return grads[0], torch.ones_like(loss)


class MicroBatchRoutes:
    """Routes of one micro-batch for this rank's routers and tokens. Made by `RoutingReplay.bound`.

    `tokens`: of the whole micro-batch, over all ranks. `own`: what each local router would have chosen and `used`: what it
    did choose, `[n, K]` per router, kept only if `keep` is set.
    """

    def __init__(self, replay: RoutingReplay, micro_batch: MicroBatch, *, keep: bool):
        self._replay, self._micro_batch = replay, micro_batch
        self.tokens = micro_batch.tokens
        part = replay.token_slice(micro_batch.tokens)
        self.local_tokens = part.stop - part.start
        self._real = min(max(micro_batch.real_tokens - part.start, 0), self.local_tokens)
        self._sorted: Tensor | None = None
        self._recorded: Tensor | None = None
        self._times: Tensor | None = None
        if micro_batch.times is not None:
            self._times = torch.from_numpy(micro_batch.times[part][: self._real]).to(replay.device)
        self.keep = keep
        self.own: list[Tensor | None] = [None] * len(replay.columns)
        self.used: list[Tensor | None] = [None] * len(replay.columns)
        self.recomputing = self.closed = False
        table = micro_batch.table
        if replay.columns and "routed_experts" in table and "routing_recorded" in table:
            self._load(table["routed_experts"], table["routing_recorded"], part)

    def _load(self, rows: np.ndarray, recorded: np.ndarray, part: slice) -> None:
        replay = self._replay
        if rows.shape[1:] != (replay.layers, replay.top_k):
            raise RoutingError(
                f"routed experts have shape {rows.shape}, expected [n, {replay.layers}, {replay.top_k}]: "
                "these routes were recorded with another model"
            )
        if not recorded[part].any():
            return
        # Only this rank's tokens and layers go to the device, in the narrowest dtype in which torch can do all it has to, and
        # sorted: the order of a record carries nothing, so that no bit of what is replayed may depend on it.
        narrow = np.uint8 if rows.dtype == np.uint8 else np.int16 if replay.num_experts <= 2**15 else np.int32
        local = np.empty((len(replay.columns), part.stop - part.start, replay.top_k), narrow)
        for column, layer in zip(local, replay.columns, strict=True):
            for some, ids in sorted_columns(rows[part, layer]):
                for k, of_rank in enumerate(ids):
                    column[some, k] = of_rank
        self._sorted = torch.from_numpy(local).to(replay.device)
        self._recorded = torch.from_numpy(recorded[part].copy()).to(replay.device)
        bad = self._sorted[..., -1].to(torch.int32) >= replay.num_experts
        if replay.top_k > 1:
            bad |= (self._sorted[..., 1:] == self._sorted[..., :-1]).any(dim=-1)
        if replay.top_k == 1 or bool((bad & self._recorded).any()):
            # Slow, but names the row.
            validate_rows(rows[recorded], layers=replay.layers, top_k=replay.top_k, num_experts=replay.num_experts)
        self._all_recorded = bool(recorded[part].all())

    @property
    def replays(self) -> bool:
        """Whether `choose` may return anything else than the router's own choice."""
        return self._sorted is not None and self._replay.enabled

    @torch.no_grad()
    def choose(self, router: int, own: Tensor) -> Tensor:
        """Expert ids `[n, K]` that local router `router` has to use; `own` int64 `[n, K]`: its own top-k.

        A row whose recorded set is the router's own set comes back in the router's own order, so that replaying what the
        model would do anyway changes no bit. A row that is not recorded is the router's own. Raises `RoutingError` if the
        number of tokens is not the micro-batch's, or if the block of `bound` has ended.
        """
        replay = self._replay
        if self.closed:
            raise RoutingError("a router ran for a micro-batch whose routes have been released")
        if own.shape != (self.local_tokens, replay.top_k):
            raise RoutingError(
                f"MoE layer {replay.columns[router]}: routes of {self.local_tokens} tokens with {replay.top_k} experts each "
                f"are bound, but the router chose {tuple(own.shape)}"
            )
        used, count = own, not self.recomputing
        if self._sorted is not None:
            assert self._recorded is not None
            rows = self._sorted[router].to(own.dtype)
            same = (own.sort(dim=1).values == rows).all(dim=1)
            if replay.enabled:
                keep = same if self._all_recorded else same | ~self._recorded
                used = torch.where(keep[:, None], own, rows)
            if count:
                recorded = self._recorded[: self._real]
                replay.counts.agreed[router] += self._each(same[: self._real] & recorded).sum()
                replay.counts.compared[router] += self._each(recorded).sum()
        if count:
            chosen = used[: self._real]
            ones = self._each(torch.ones_like(chosen))
            replay.counts.load[router].scatter_add_(0, chosen.reshape(-1), ones.reshape(-1))
            if self.keep:
                self.own[router], self.used[router] = own, used
        return used

    def balance(self, router: int, scores: Tensor, probabilities: Callable[[Tensor], Tensor]) -> Tensor:
        """`scores` `[n, experts]`, with the load-balance term of local router `router` hung on them, if there is one.

        `probabilities(scores)`: the router's probability of each expert, rows that add up to 1.
        """
        weights = self._replay.balance
        if weights is None:
            return scores
        loss = self._each(probabilities(scores[: self._real]).float() @ weights[router]).sum()
        if not self.recomputing:
            self._replay.counts.auxiliary += loss.detach()
        return _WithLoss.apply(scores, loss)

    def _each(self, of_rows: Tensor) -> Tensor:
        """`of_rows` `[n, ...]` times the number of samples that each row is of."""
        times = self._times
        return of_rows if times is None else of_rows * times.view(-1, *(1 for _ in of_rows.shape[1:]))

    def follow(self, output: Tensor) -> Tensor:
        """Make these routes current when the backward pass of `output`, this rank's result for the micro-batch, begins."""
        if output.requires_grad:
            output.register_hook(self._backward_begins)
        return output

    def _backward_begins(self, _: Tensor) -> None:
        if self.closed:
            raise RoutingError("the backward pass of a micro-batch began after its routes were released")
        self.recomputing = True
        self._replay.current = self

    def trace(self) -> RouteTrace:
        """What was chosen, padding left out. Only with `keep`, after the forward pass."""
        chosen = (torch.stack([t for t in kept if t is not None], dim=1) for kept in (self.own, self.used))
        own, used = (t[: self._real].cpu().numpy().astype(np.uint16) for t in chosen)
        samples = self._micro_batch.sample_ids
        cu_seqlens = self._micro_batch.cu_seqlens[: len(samples) + 1]
        first = self._replay.token_slice(self.tokens).start
        prefixes = self._micro_batch.prefixes
        shared = None if prefixes is None else prefixes[: len(samples)]
        return RouteTrace(samples, cu_seqlens, first, self._replay.columns, own, used, prefixes=shared)

    def close(self) -> None:
        """Release everything; later use raises."""
        self.closed = True
        self._sorted = self._recorded = None
        self.own, self.used = [], []


class RoutingReplay:
    """The replay state of one rank.

    `layers`: MoE layers of the whole model. `columns`: for each of this rank's routers, which of them it is (0-based: its
    column in a record). `enabled`: whether to use the records, or only to compare with them. `shard`: (index, count) of the
    equal contiguous parts into which the tokens are split among sequence-parallel ranks.
    """

    def __init__(
        self,
        *,
        layers: int,
        columns: Sequence[int],
        top_k: int,
        num_experts: int,
        enabled: bool,
        device: torch.device,
        shard: tuple[int, int] = (0, 1),
    ):
        self.layers, self.columns = layers, list(columns)
        self.top_k, self.num_experts = top_k, num_experts
        self.enabled, self.device, self.shard = enabled, device, shard
        self.current: MicroBatchRoutes | None = None
        self._open: list[MicroBatchRoutes] = []
        self.balance: Tensor | None = None
        """float32 `[R, experts]`: what a unit of each expert's probability adds to the loss; None without that term."""
        self.counts = RoutingCounts(len(self.columns), num_experts, device)

    @staticmethod
    def whole(shape: RoutingShape | None, *, enabled: bool, device: torch.device) -> RoutingReplay:
        """Of a rank that has every router of a model; `shape` None: it has no experts."""
        layers, top_k, experts = (shape.layers, shape.top_k, shape.num_experts) if shape else (0, 1, 1)
        return RoutingReplay(
            layers=layers, columns=range(layers), top_k=top_k, num_experts=experts, enabled=enabled, device=device
        )

    def token_slice(self, tokens: int) -> slice:
        """This rank's part of `tokens` packed tokens. Raises `RoutingError` if they cannot be split evenly."""
        index, count = self.shard
        if tokens % count:
            raise RoutingError(f"{tokens} tokens cannot be split evenly among {count} sequence-parallel ranks")
        return slice(index * tokens // count, (index + 1) * tokens // count)

    def take_counts(self) -> RoutingCounts:
        """The counts so far; they start again."""
        taken = self.counts
        self.counts = RoutingCounts(len(self.columns), self.num_experts, self.device)
        return taken

    @contextmanager
    def balanced(self, weights: np.ndarray | None) -> Iterator[None]:
        """In this block the routers have a load-balance term: `weights` float64 `[layers, experts]`, of the whole model."""
        if weights is not None and self.columns:
            self.balance = torch.from_numpy(weights[self.columns]).to(self.device, torch.float32)
        try:
            yield
        finally:
            self.balance = None

    @contextmanager
    def bound(self, micro_batch: MicroBatch, *, keep: bool = False) -> Iterator[MicroBatchRoutes]:
        """Bind one micro-batch's routes for its forward and backward, and leave nothing behind, whatever happens.

        `keep`: remember what each router chose. Raises `RoutingError` if another micro-batch is bound, for records that do
        not fit the model, and for an invalid row.
        """
        with self.pipelined() as bind:
            yield bind(micro_batch, keep)

    @contextmanager
    def pipelined(self) -> Iterator[Binder]:
        """Like `bound`, for schedules that begin a forward pass before earlier micro-batches have had their backward.

        Yields a function that binds the next micro-batch to be fed forward. All are released when the block ends.
        """
        if self._open:
            raise RoutingError("routes of another micro-batch are still bound")
        try:
            yield self._bind
        finally:
            for routes in self._open:
                routes.close()
            self._open.clear()
            self.current = None

    def _bind(self, micro_batch: MicroBatch, keep: bool) -> MicroBatchRoutes:
        # In every schedule backward passes come in the order of the forward passes: when one begins, earlier ones are over.
        if self.current is not None and self.current.recomputing:
            last = self._open.index(self.current)
            for routes in self._open[:last]:
                routes.close()
            del self._open[:last]
        self.current = MicroBatchRoutes(self, micro_batch, keep=keep)
        self._open.append(self.current)
        return self.current

    def check_tokens(self, tokens: int) -> None:
        """Raise `RoutingError` if `tokens` are about to be fed forward and another number is bound."""
        if self.current is not None and self.current.tokens != tokens:
            raise RoutingError(f"routes of {self.current.tokens} tokens are bound, but {tokens} tokens are fed forward")


Binder = Callable[[MicroBatch, bool], MicroBatchRoutes]
"""Binds the next micro-batch to be fed forward; whether what each router chooses is kept."""
