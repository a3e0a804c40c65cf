"""What every backend shares: ranks, passes over micro-batches, what is saved, and what is asked of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from r3async.checkpoint.tensors import LearnerStateReader, RankState
from r3async.config import Config
from r3async.data.routes import route_dtype
from r3async.data.tokens import Sample, TokenTable
from r3async.learner import LearnerError
from r3async.learner.batch import MicroBatch, collate_samples, pad_to_multiple
from r3async.learner.digests import StageDigests
from r3async.learner.drift import TrustRegion
from r3async.learner.lora import LoraAdapters
from r3async.learner.optimizer import ExpertBias, MasterAdamW, check_expert_biases, update_expert_biases
from r3async.learner.replay import MicroBatchRoutes, RouteBinder, RoutingReplay
from r3async.learner.state import ReferenceWeights, ShardSlice, capture_learner_state, restore_learner_state, save_model

TokenScores = tuple[Tensor, Tensor]
"""float32 `[M]` each: log-probs of some tokens, and the entropies of the distributions that they are from."""
ScoreCallback = Callable[[int, Tensor, Tensor], Tensor | None]
"""`finish(index, log-probs, entropies)` of a micro-batch; the loss that is propagated back, if any is."""
RoutesCallback = Callable[[int, MicroBatchRoutes], object]
"""`visit(index, routes)`: with what the routers of this rank have chosen."""


@dataclass(frozen=True)
class RankGroup:
    """This process among those that train together: `rank` of `world_size`, all in the default process group. `device`: where
    figures are reduced."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_batch_reporter(self) -> bool:
        """Of the ranks that are given the same micro-batches, the one that counts them."""
        return True

    @property
    def is_loss_reporter(self) -> bool:
        """Of the ranks that compute the same losses, the one that reports them."""
        return True

    def all_reduce(self, values: np.ndarray, op: Literal["sum", "max"]) -> np.ndarray:
        """`values` float64 `[n]` reduced over all ranks; every rank gets the result. Collective."""
        if self.world_size == 1:
            return values
        # A copy: gloo reduces in place.
        total = torch.from_numpy(np.array(values, np.float64)).to(self.device)
        dist.all_reduce(total, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op])
        return total.cpu().numpy()

    def barrier(self) -> None:
        """Wait for the other ranks."""
        if self.world_size > 1:
            dist.barrier()


SINGLE_RANK = RankGroup(0, 1, torch.device("cpu"))


class LearnerBackend:
    """A model and its optimizer, or this process's part of them. `trainer.py` makes steps of it.

    A backend builds the model (its `from_pretrained`, which is collective; no constructor is), feeds it forward and exports
    it; the rest is here. Where there are several ranks (`learner.parallel`), every call is collective: all ranks have to make
    it, in the same order. Ranks that share a data-parallel index are given the same micro-batches; data-parallel ranks are
    given the same *number* of them (`batch.make_padding_batch` makes up for what is missing).

    Every call must come from the thread that built the backend. It need not be the main thread, but it has to be one:
    grad mode and the number of OpenMP threads are per thread in torch.

    `model_path`: the Hugging Face directory that the run began with. `vocab_size`: token ids are `0..vocab_size - 1`.
    `parameters`: the model's, for the copy that `algorithm.reference_kl` takes of them. `adapters`: what is trained in their
    place, with `learner.lora`. `expert_biases`: of this rank's routers. Raises `LearnerError` if `learner.expert_bias_rate` is to
    change some, and the model has none.
    """

    name: str
    """Of `learner.backend`."""

    def __init__(
        self,
        config: Config,
        model_path: Path,
        ranks: RankGroup,
        *,
        vocab_size: int,
        replay: RoutingReplay,
        optimizer: MasterAdamW,
        parameters: Iterable[Parameter],
        adapters: LoraAdapters | None = None,
        expert_biases: Sequence[ExpertBias] = (),
    ):
        check_expert_biases(expert_biases, config.learner, replay)
        self.config, self.model_path, self.ranks, self.vocab_size = config, model_path, ranks, vocab_size
        self.replay, self.optimizer = replay, optimizer
        self.trust_region = TrustRegion(config.algorithm.rollout_kl)
        self._adapters, self.expert_biases = adapters, expert_biases
        self.stage_digests = StageDigests() if config.observe.record == "full" else None
        if self.stage_digests is not None:
            optimizer.on_gradients = self.stage_digests.add_gradients
        self._reference: ReferenceWeights | LoraAdapters | None = None
        if config.algorithm.reference_kl.coef:
            self._reference = adapters or ReferenceWeights([*parameters, *(bias.tensor for bias in expert_biases)])

    @property
    def update_count(self) -> int:
        """Optimizer steps taken. A step that was skipped does not count."""
        return self.optimizer.update_count

    @property
    def can_skip_untrained(self) -> bool:
        """Whether micro-batches in which nothing is trained are left out. One of many ranks takes part in them all: the
        others wait for it."""
        return self.config.learner.parallel.world_size == 1

    def pad_for_parallel(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """With padding that keeps sequence-parallel and context-parallel parts equal."""
        p = self.config.learner.parallel
        return [pad_to_multiple(m, p.cp * p.tp) for m in micro_batches]

    # -- what differs ----------------------------------------------------------------------------------------------

    def forward(self, micro_batch: MicroBatch, rows: np.ndarray, routes: MicroBatchRoutes | None) -> Any:
        """What this rank's part of the model makes of the micro-batch: what `score_tokens` takes, on the last pipeline stage.
        `rows` int64 `[M]`: the tokens whose log-probs are wanted. `routes`: those bound for this pass."""
        raise NotImplementedError

    def score_tokens(self, output: Any, micro_batch: MicroBatch, rows: np.ndarray) -> TokenScores:
        """Of the tokens at `rows`, none a sample's first, at their samples' temperatures. Logits are made for these only."""
        raise NotImplementedError

    def export_weights(self, *, copy: bool = True) -> dict[str, Tensor]:
        """A snapshot of all weights under their Hugging Face checkpoint names, contiguous, in the compute dtype: on rank 0,
        nothing elsewhere. Later steps do not change it. Without `copy` they may, and tensors need not be contiguous: for who
        copies them himself, at once."""
        raise NotImplementedError

    def iter_full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that this rank hands in, as `export_weights(copy=False)` would: over all ranks each is there once,
        whole, and no rank has much more of them than it holds of the model. What is put together for one is free again when
        the next is asked for. Collective: all ranks have to ask to the end."""
        raise NotImplementedError

    def parameter_slices(self) -> list[ShardSlice]:
        """Where this rank's part of each parameter that is not frozen lies in the whole, in the optimizer's order."""
        raise NotImplementedError

    def trained_slices(self) -> list[ShardSlice]:
        """The same of what is trained: these, or their adapters."""
        return (
            self.parameter_slices()
            if self._adapters is None
            else [one.shard_slice for one in self._adapters.list_parameters()]
        )

    def owned_slices(self) -> list[ShardSlice]:
        """The same of what this rank updates: all, or its share (`learner.shard_optimizer`)."""
        shared = zip(self.trained_slices(), self.optimizer.parameters, self.optimizer.shares, strict=True)
        return [held.narrow_to_share(parameter.shape, share) for held, parameter, share in shared]

    def run_schedule(
        self,
        forward: Callable[[int, RouteBinder], Any],
        on_output: Callable[[int, Any], Tensor | None],
        count: int,
        *,
        backward: bool,
    ) -> None:
        """Micro-batches `0..count`, each forward and, with `backward`, back before the next one."""
        for index in range(count):
            with self.replay.bind_pipelined() as bind:
                loss = on_output(index, forward(index, bind))
                if backward and loss is not None:
                    loss.backward()

    def update_expert_biases(self, expert_load: np.ndarray) -> None:
        """After an update: biases of experts follow the tokens that they got, `expert_load` `[layers, experts]`, over all
        ranks."""
        update_expert_biases(self.expert_biases, expert_load, self.config.learner.expert_bias_rate)

    def reset_forward_state(self) -> None:
        """Leave nothing in the model of a pass without a backward, or of one that failed."""

    def broadcast_logprobs(self, values: Sequence[np.ndarray]) -> None:
        """Fill `values`, of the last pipeline stage, in on every stage."""

    def all_reduce_routes(self, routes: Tensor) -> None:
        """Add up, in place, what each rank has of the routes of a micro-batch, zeros elsewhere."""

    def close(self) -> None:
        """Release the process group, if this backend made it."""

    # -- passes ----------------------------------------------------------------------------------------------------

    def run_micro_batches(
        self,
        micro_batches: Sequence[MicroBatch],
        rows: Sequence[np.ndarray],
        on_scores: ScoreCallback | None,
        *,
        replay: bool = True,
        on_routes: RoutesCallback | None = None,
        backward: bool = False,
    ) -> None:
        """Forward passes over micro-batches; with `backward`, back through the loss that `on_scores` returns.

        With `replay` each has its recorded routes, as `routing.replay` says; without, routers choose by themselves. `on_scores`
        is called with the scores of `rows[index]` where this rank has them.
        """

        def forward(index: int, bind: RouteBinder) -> Any:
            routes = bind(micro_batches[index], on_routes is not None) if replay else None
            output = self.forward(micro_batches[index], rows[index], routes)
            if on_routes is not None and routes is not None:
                on_routes(index, routes)
            return output

        def last(index: int, output: Any) -> Tensor | None:
            return (
                None
                if on_scores is None
                else on_scores(index, *self.score_tokens(output, micro_batches[index], rows[index]))
            )

        self.run_schedule(forward, last, len(micro_batches), backward=backward)

    @contextmanager
    def forward_only(self) -> Iterator[None]:
        """In this block nothing is kept for a backward pass, and nothing counted."""
        try:
            with torch.no_grad():
                yield
        finally:
            self.replay.pop_counts()
            self.reset_forward_state()

    def abort_step(self) -> None:
        """Of a step that failed: its gradients, its counts, what it left in the model."""
        self.optimizer.zero_grad()
        self.replay.pop_counts()
        self.reset_forward_state()

    def logprobs(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        replay: bool = True,
        use_reference: bool = False,
        trained_only: bool = False,
    ) -> list[np.ndarray]:
        """A forward-only pass: for each micro-batch float32 `[N]`, the log-prob of every token at its sample's temperature.

        0 for the first token of a sample, and for padding. `replay`: see `run_micro_batches`. With `use_reference` the
        weights are those that the learner began with (`algorithm.reference_kl.coef` must not be 0). With `trained_only` only
        tokens in `loss_mask` have theirs, and the others 0: logits of the others are not made. Every rank returns those of
        its own micro-batches.
        """
        if use_reference:
            if self._reference is None:
                raise LearnerError(
                    "there is no reference model: algorithm.reference_kl.coef was 0 when the learner started"
                )
            with self._reference.use_reference_weights():
                return self.logprobs(micro_batches, replay=replay, trained_only=trained_only)
        padded = self.pad_for_parallel(micro_batches)
        rows = [find_predicted_rows(m, trained_only=trained_only) for m in padded]
        out = [np.zeros(m.num_tokens, np.float32) for m in padded]

        def finish(index: int, logprobs: Tensor, _: Tensor) -> None:
            out[index][rows[index]] = logprobs.cpu().numpy()

        with self.forward_only():
            self.run_micro_batches(padded, rows, finish, replay=replay)
        self.broadcast_logprobs(out)
        return [values[: m.num_tokens] for values, m in zip(out, micro_batches, strict=True)]

    def record_learner_routes(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches with the routes that the learner itself chooses now, in a forward-only pass (R2 of arXiv
        2510.11370's comparison, `routing.replay = learner`)."""
        layers, top_k = self.replay.num_moe_layers, self.replay.top_k
        if not layers:
            return list(micro_batches)
        # Without what is recorded already: no layer's choice may follow from what an earlier layer replays.
        bare = [
            replace(m, table=m.table.without_columns("routed_experts", "routing_recorded"))
            for m in self.pad_for_parallel(micro_batches)
        ]
        chosen = [torch.zeros(m.num_tokens, layers, top_k, dtype=torch.int32) for m in bare]

        def visit(index: int, routes: MicroBatchRoutes) -> None:
            part = self.replay.slice_tokens(bare[index].num_tokens)
            for column, own in zip(self.replay.moe_layer_indices, routes.preferred_experts, strict=True):
                assert own is not None
                chosen[index][part, column] = own.cpu().int()

        with self.forward_only():
            self.run_micro_batches(bare, [np.zeros(0, np.int64)] * len(bare), None, on_routes=visit)
        out = []
        for m, rows in zip(micro_batches, chosen, strict=True):
            self.all_reduce_routes(rows)
            routes = rows[: m.num_tokens].numpy().astype(route_dtype(self.replay.num_experts))
            recorded = np.arange(m.num_tokens) < m.num_real_tokens
            table = m.table.with_columns(routed_experts=routes, routing_recorded=recorded)
            out.append(replace(m, table=table))
        return out

    def score_sequence(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """float32 `[T - 1]`: log-prob of each token after the first of int `[T]`, with own routing."""
        token_ids = np.asarray(token_ids)
        if token_ids.ndim != 1 or len(token_ids) < 2:
            raise ValueError(f"score needs at least two tokens in one dimension, got shape {token_ids.shape}")
        sample = Sample("scored", TokenTable.from_tokens(token_ids), temperature)
        return self.logprobs([collate_samples([sample])], replay=False)[0][1:]

    # -- what is saved ---------------------------------------------------------------------------------------------

    def capture_state(self) -> RankState:
        """See `state.capture_learner_state`; for `checkpoint.tensors.write_rank_file`. Not collective, but all ranks have to
        take theirs between the same two steps. The reference model is not in it: it is the start path's."""
        return capture_learner_state(self)

    def restore_state(self, saved: LearnerStateReader, *, with_optimizer: bool = True) -> None:
        """Resume from a state that any number of ranks wrote, bit by bit. Not collective; every rank has to make the call.

        The learner must have been built from the path that the run began with. With another number of ranks than wrote it,
        random number generators stay as they are. Without `with_optimizer` only the weights are read, for `save_pretrained`.
        Raises what `state.restore_learner_state` raises; then the learner is not to be used.
        """
        restore_learner_state(self, saved, with_optimizer=with_optimizer)

    def save_pretrained(self, directory: Path) -> None:
        """Write `export_weights()` as a Hugging Face model directory with the source model's configuration and tokenizer.

        It is written aside and renamed: `directory` is complete or not there. One that exists is replaced.
        """
        tensors = self.export_weights()
        try:
            if self.ranks.rank == 0:
                save_model(Path(directory), self.model_path, tensors, self.config.learner.dtype)
        finally:
            # If writing failed here, the other ranks learn of it from this process's end, but do not wait for ever.
            self.ranks.barrier()


def find_predicted_rows(micro_batch: MicroBatch, *, trained_only: bool) -> np.ndarray:
    """int64 `[M]`: the tokens that another one of their sample is before, padding left out; with `trained_only` those of
    `loss_mask` only."""
    rows = micro_batch.positions[: micro_batch.num_real_tokens] > 0
    return np.flatnonzero(rows & micro_batch.table["loss_mask"][: len(rows)] if trained_only else rows)
