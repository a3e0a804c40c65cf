"""The base class of all backends: ranks, passes over micro-batches, saved state, and the
methods left to each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from r3async.checkpoint.rank_files import LearnerStateReader, RankState
from r3async.config import Config
from r3async.data.routes import route_dtype
from r3async.data.tokens import ROUTE_COLUMNS, Sample, TokenTable
from r3async.learner.adapter_states import AdapterStates
from r3async.learner.digests import StageDigests
from r3async.learner.expert_biases import ExpertBias, check_expert_biases, update_expert_biases
from r3async.learner.lora import LoraAdapters
from r3async.learner.micro_batches import MicroBatch, collate_samples, pad_to_multiple
from r3async.learner.model_directory import save_model
from r3async.learner.optimizer import MasterAdamW
from r3async.learner.rank_group import RankGroup
from r3async.learner.reference_weights import ReferenceWeights
from r3async.learner.replay import MicroBatchRoutes, RoutingReplay
from r3async.learner.results import LearnerError
from r3async.learner.shard_slice import ShardSlice
from r3async.learner.state import capture_learner_state, restore_learner_state
from r3async.learner.trust_region import TrustRegion

TokenScores = tuple[Tensor, Tensor]
"""Log-probs of some tokens, and the entropies of the distributions that they come from:
float32 `[M]` each."""
MicroBatchLoss = Callable[[int, Tensor, Tensor], Tensor]
"""A function that returns the loss of micro-batch `index` from its log-probs and entropies."""


class MicroBatchScores(NamedTuple):
    """The scores of some tokens of a micro-batch after its forward pass: see `TokenScores`.

    Attributes:
        batch_index: The position of the micro-batch among those of the pass.
        routes: The routes that were bound for it, with `keep_choices`.
        logprobs: float32 `[M]`; None on a pipeline stage before the last, like `entropies`.
    """

    batch_index: int
    routes: MicroBatchRoutes | None
    logprobs: Tensor | None
    entropies: Tensor | None


class LearnerBackend:
    """A model and its optimizer, or this process's part of them. `train_step.py` has the
    verbs that train it.

    A backend builds the model (in its `from_pretrained`, which is collective; constructors are
    not), runs its forward passes and exports it; the rest is implemented here. With several ranks
    (`learner.parallel`), every call is collective: all ranks have to make it, in the same order.
    Ranks that share a data-parallel index are given the same micro-batches; data-parallel ranks are
    given the same *number* of them (`micro_batches.make_padding_batch` provides the missing ones).

    Every call must come from the thread that built the backend. It need not be the main thread, but
    it has to be a single one: grad mode and the number of OpenMP threads are per thread in torch.

    Raises `LearnerError` if `learner.expert_bias_rate` is set and the model has no expert biases.

    Args:
        model_path: The Hugging Face directory that the run began with.
        vocab_size: Token ids are `0..vocab_size - 1`.
        parameters: The model's parameters, which `algorithm.reference_kl` copies.
        adapters: The adapters that are trained in place of the parameters, with `learner.lora`.
        expert_biases: The expert biases of this rank's routers.
    """

    name: str
    """The backend's name in `learner.backend`."""
    carried: Sequence[str] = ()
    """Names of the tensors of `model_path` that are not trained because the text model does not
    have them. Model directories get them from there, versions do not have them."""

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
        self.config = config
        self.model_path = model_path
        self.ranks = ranks
        self.vocab_size = vocab_size
        self.replay = replay
        self.optimizer = optimizer
        self.trust_region = TrustRegion(config.algorithm.rollout_kl)
        self.adapters = adapters
        self.adapter_states = None if adapters is None else AdapterStates(adapters, optimizer)
        self.expert_biases = expert_biases
        self.stage_digests = StageDigests() if config.observe.record == "full" else None
        if self.stage_digests is not None:
            optimizer.on_gradients = self.stage_digests.add_gradients
        self._reference: ReferenceWeights | LoraAdapters | None = None
        if config.algorithm.reference_kl.coef:
            self._reference = adapters or ReferenceWeights(
                [*parameters, *(bias.tensor for bias in expert_biases)]
            )

    @property
    def update_count(self) -> int:
        """The number of optimizer steps made. A skipped step does not count."""
        return self.optimizer.update_count

    @property
    def can_skip_untrained(self) -> bool:
        """True if micro-batches without a trained token are left out.

        With several ranks, every rank takes part in all of them, because the others wait for it.
        """
        return self.config.learner.parallel.world_size == 1

    def pad_for_parallel(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return the micro-batches with padding that makes sequence-parallel and
        context-parallel parts equal."""
        p = self.config.learner.parallel
        return [pad_to_multiple(m, p.cp * p.tp) for m in micro_batches]

    # -- implemented by each backend ---------------------------------------------------------------

    def forward(
        self, micro_batch: MicroBatch, rows: np.ndarray, routes: MicroBatchRoutes | None
    ) -> Any:
        """Run this rank's part of the model on the micro-batch and return its output.

        On the last pipeline stage, this is what `score_tokens` takes.

        Args:
            rows: int64 `[M]`: the tokens whose log-probs are wanted.
            routes: The routes bound for this pass.
        """
        raise NotImplementedError

    def score_tokens(self, output: Any, micro_batch: MicroBatch, rows: np.ndarray) -> TokenScores:
        """Return the scores of the tokens at `rows`, at their samples' temperatures.

        None of them is a sample's first token. Logits are computed for these tokens only.
        """
        raise NotImplementedError

    def export_weights(self, *, copy: bool = True) -> dict[str, Tensor]:
        """Return a snapshot of all weights by their Hugging Face checkpoint names, contiguous, in
        the compute dtype.

        Rank 0 gets the weights, other ranks get nothing. Later steps do not change the snapshot.
        Without `copy` they may, and tensors need not be contiguous: this is for callers that copy
        the weights themselves, at once.
        """
        raise NotImplementedError

    def iter_full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that this rank exports, as `export_weights(copy=False)`
        would return them.

        Over all ranks each weight comes exactly once, whole, and no rank holds much more of them
        than its part of the model. The memory gathered for one weight is free again when the next
        one is requested. Collective: all ranks have to iterate to the end.
        """
        yield from self.export_weights(copy=False).items()

    def export_adapters(self) -> dict[str, Tensor]:
        """Return the adapters as engines have them; see `LoraAdapters.gather_served_factors`."""
        assert self.adapters is not None, "`learner.lora.rank` is 0"
        return self.adapters.gather_served_factors(self.ranks)

    def use_start_weights(self) -> AbstractContextManager[None]:
        """Compute with the start model's weights in a block; see `LoraAdapters.use_reference_weights`."""
        assert self.adapters is not None, "`learner.lora.rank` is 0"
        return self.adapters.use_reference_weights()

    def parameter_slices(self) -> list[ShardSlice]:
        """Return where this rank's part of each unfrozen parameter lies in the whole, in the
        optimizer's order."""
        raise NotImplementedError

    def trained_slices(self) -> list[ShardSlice]:
        """Return the slices of the trained tensors: those of `parameter_slices`, or of the
        adapters on them."""
        return (
            self.parameter_slices()
            if self.adapters is None
            else [one.shard_slice for one in self.adapters.list_parameters()]
        )

    def owned_slices(self) -> list[ShardSlice]:
        """Return the slices that this rank updates.

        These are all trained ones, or its share of them (`learner.shard_optimizer`).
        """
        shared = zip(
            self.trained_slices(), self.optimizer.parameters, self.optimizer.shares, strict=True
        )
        return [held.narrow_to_share(parameter.shape, share) for held, parameter, share in shared]

    def update_expert_biases(self, expert_load: np.ndarray) -> None:
        """Move the expert biases after an update, according to the tokens that each expert got.

        `expert_load` `[layers, experts]` counts these tokens over all ranks.
        """
        update_expert_biases(self.expert_biases, expert_load, self.config.learner.expert_bias_rate)

    def reset_forward_state(self) -> None:
        """Clear what a pass without a backward pass, or a failed pass, left in the model."""

    def broadcast_logprobs(self, values: Sequence[np.ndarray]) -> None:
        """Fill in `values` on every stage from those of the last pipeline stage."""

    def all_reduce_routes(self, routes: Tensor) -> None:
        """Sum, in place, the ranks' parts of a micro-batch's routes; each rank has zeros
        outside of its part."""

    def close(self) -> None:
        """Release the process group, if this backend created it."""

    # -- passes ------------------------------------------------------------------------------------

    def iter_scores(
        self,
        micro_batches: Sequence[MicroBatch],
        rows: Sequence[np.ndarray],
        *,
        replay: bool = True,
        keep_choices: bool = False,
        pipeline_loss: MicroBatchLoss | None = None,
    ) -> Iterator[MicroBatchScores]:
        """Run micro-batches forward, one after the other, and yield the scores of `rows[index]`.

        The routes of a micro-batch are bound until the next one is requested, so its backward pass
        belongs in the loop over this iterator. With several pipeline stages all passes are made
        before the first yield.

        Args:
            replay: Each micro-batch has its recorded routes, as `routing.replay` says; otherwise
                routers choose for themselves.
            keep_choices: Yield the routes too, with the choices of this rank's routers.
            pipeline_loss: The loss of a micro-batch. With several stages, whose schedule makes
                forward and backward passes in turn, they go back through it and yield no scores.
        """
        for index, (micro_batch, wanted) in enumerate(zip(micro_batches, rows, strict=True)):
            with self.replay.bind_pipelined() as bind:
                routes = bind(micro_batch, keep_choices) if replay else None
                output = self.forward(micro_batch, wanted, routes)
                scores = self.score_tokens(output, micro_batch, wanted)
                del output
                yield MicroBatchScores(index, routes if keep_choices else None, *scores)

    @contextmanager
    def forward_only(self) -> Iterator[None]:
        """Keep nothing for a backward pass, and count nothing, inside this block."""
        try:
            with torch.no_grad():
                yield
        finally:
            self.replay.pop_counts()
            self.reset_forward_state()

    @contextmanager
    def discard_on_error(self) -> Iterator[None]:
        """Discard what a block that fails has left: gradients, counts and the state of a pass in
        the model. The next step would add to them."""
        try:
            yield
        except BaseException:
            self.optimizer.zero_grad()
            self.replay.pop_counts()
            self.reset_forward_state()
            raise

    def logprobs(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        replay: bool = True,
        use_reference: bool = False,
        trained_only: bool = False,
    ) -> list[np.ndarray]:
        """Return the log-probs of each micro-batch's tokens at their samples' temperatures, from a
        forward-only pass.

        For each micro-batch they are float32 `[N]`, and 0 for the first token of a sample and for
        padding. Every rank returns those of its own micro-batches.

        Args:
            replay: See `iter_scores`.
            use_reference: Use the weights that the learner began with
                (`algorithm.reference_kl.coef` must not be 0).
            trained_only: Compute logits only for tokens in `loss_mask`; the log-probs of
                the others are 0.
        """
        if use_reference:
            if self._reference is None:
                raise LearnerError(
                    "there is no reference model: algorithm.reference_kl.coef was 0 when "
                    "the learner started"
                )
            with self._reference.use_reference_weights():
                return self.logprobs(micro_batches, replay=replay, trained_only=trained_only)
        padded = self.pad_for_parallel(micro_batches)
        rows = [find_predicted_rows(m, trained_only=trained_only) for m in padded]
        out = [np.zeros(m.num_tokens, np.float32) for m in padded]
        with self.forward_only():
            for index, _, logprobs, _ in self.iter_scores(padded, rows, replay=replay):
                if logprobs is not None:
                    out[index][rows[index]] = logprobs.cpu().numpy()
        self.broadcast_logprobs(out)
        return [values[: m.num_tokens] for values, m in zip(out, micro_batches, strict=True)]

    def record_learner_routes(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return the micro-batches with the routes that the learner itself chooses now, in a
        forward-only pass.

        This is R2 in the comparison of arXiv 2510.11370 (`routing.replay = learner`).
        """
        layers = self.replay.num_moe_layers
        top_k = self.replay.top_k
        if not layers:
            return list(micro_batches)
        # Recorded routes are removed: no layer's choice may depend on what an
        # earlier layer replays.
        bare = [
            replace(m, table=m.table.without_columns(*ROUTE_COLUMNS))
            for m in self.pad_for_parallel(micro_batches)
        ]
        chosen = [torch.zeros(m.num_tokens, layers, top_k, dtype=torch.int32) for m in bare]
        none = [np.zeros(0, np.int64)] * len(bare)
        with self.forward_only():
            for index, routes, _, _ in self.iter_scores(bare, none, keep_choices=True):
                assert routes is not None
                part = self.replay.slice_tokens(bare[index].num_tokens)
                for column, own in zip(
                    self.replay.moe_layer_indices, routes.preferred_experts, strict=True
                ):
                    assert own is not None
                    chosen[index][part, column] = own.cpu().int()
        out = []
        for m, rows in zip(micro_batches, chosen, strict=True):
            self.all_reduce_routes(rows)
            routes = rows[: m.num_tokens].numpy().astype(route_dtype(self.replay.num_experts))
            recorded = np.arange(m.num_tokens) < m.num_real_tokens
            table = m.table.with_columns(routed_experts=routes, routing_recorded=recorded)
            out.append(replace(m, table=table))
        return out

    def score_sequence(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """Return float32 `[T - 1]`: the log-prob of each token after the first of int
        `[T]`, without replay."""
        token_ids = np.asarray(token_ids)
        if token_ids.ndim != 1 or len(token_ids) < 2:
            raise ValueError(
                f"score needs at least two tokens in one dimension, got shape {token_ids.shape}"
            )
        sample = Sample("scored", TokenTable.from_tokens(token_ids), temperature)
        return self.logprobs([collate_samples([sample])], replay=False)[0][1:]

    # -- saved state -------------------------------------------------------------------------------

    def capture_state(self) -> RankState:
        """Capture this rank's state for `checkpoint.rank_files.write_rank_file`, see
        `state.capture_learner_state`.

        Not collective, but all ranks have to capture theirs between the same two steps. The
        reference model is not part of it: it is loaded from the path that the run began with.
        """
        return capture_learner_state(self)

    def restore_state(self, saved: LearnerStateReader, *, with_optimizer: bool = True) -> None:
        """Resume from a state that any number of ranks wrote, bit by bit.

        Not collective; every rank has to make the call.

        The learner must have been built from the path that the run began with. If the number of
        ranks differs from the one that wrote the state, random number generators stay as they are.
        Without `with_optimizer` only the weights are read, for `save_pretrained`. Raises what
        `state.restore_learner_state` raises; the learner must not be used after that.
        """
        restore_learner_state(self, saved, with_optimizer=with_optimizer)

    def save_pretrained(self, directory: Path) -> None:
        """Write the weights as a Hugging Face model directory, on a file system that
        all ranks share.

        Configuration and tokenizer are those of the source model. The directory is written aside
        and renamed: `directory` is complete or absent. An existing one is replaced. Raises what
        `model_directory.save_model` raises.
        """
        try:
            save_model(
                Path(directory),
                self.model_path,
                self.iter_full_weights(),
                self.config.learner.dtype,
                self.ranks,
                self.carried,
            )
        finally:
            # If writing fails here, the other ranks must not wait forever; they learn of it when
            # this process ends.
            self.ranks.barrier()


def find_predicted_rows(micro_batch: MicroBatch, *, trained_only: bool) -> np.ndarray:
    """Return int64 `[M]`: the rows of tokens that have a token before them in their sample,
    padding left out.

    With `trained_only`, only tokens in `loss_mask`.
    """
    rows = micro_batch.positions[: micro_batch.num_real_tokens] > 0
    return np.flatnonzero(
        rows & micro_batch.table["loss_mask"][: len(rows)] if trained_only else rows
    )
