"""`MegatronLearner`: Qwen3-MoE on megatron-core with rollout routing replay, on CPU or CUDA, on one rank or many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from r3async.algorithms.trust_region import TrustRegion
from r3async.batching.packing import MicroBatch, aligned, collate
from r3async.checkpoint.tensors import LearnerParts, LearnerState
from r3async.config import Config
from r3async.learners.base import StepResult
from r3async.learners.files import save_model
from r3async.learners.logprobs import LogProbs, split_vocabulary, token_logprobs, whole_vocabulary
from r3async.learners.megatron import cpu, parallel
from r3async.learners.megatron.hf import read_shape, transformer_config
from r3async.learners.megatron.links import Checkpoint, gather_weights, held, links, load_weights
from r3async.learners.megatron.modules import build_model, make_plan
from r3async.learners.megatron.pipeline import run_stages
from r3async.learners.megatron.replay import attach
from r3async.learners.optimizer import MasterAdamW
from r3async.learners.reference import Reference, weights_of
from r3async.learners.replay import MicroBatchRoutes
from r3async.learners.state import Saved, restore, take
from r3async.learners.step import Step
from r3async.learners.whole import predicted
from r3async.records import Sample, TokenTable
from r3async.routing import route_dtype


class MegatronLearner:
    """A `LearnerBackend`. See there for what the methods promise.

    One process is one rank with one device. With `learner.parallel` beyond one rank, the default process group must be
    there, and every rank builds a learner and makes the same calls.
    """

    def __init__(self, config: Config, model_path: Path):
        cpu.prepare()
        self._config, self._source = config, Path(model_path)
        self._device = (
            torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        )
        if self._device.type == "cpu":
            torch.set_num_threads(config.learner.threads)
        learner = config.learner
        self._dtype = getattr(torch, learner.dtype)
        self._shape = read_shape(self._source)
        self._shape.check_divides(learner)
        self.layout = parallel.start(learner.parallel, self._device)
        self.model = build_model(
            transformer_config(self._shape, learner),
            moe_pattern=self._shape.moe_pattern,
            vocab_size=self._shape.vocab_size,
            max_positions=self._shape.max_positions,
            tied=self._shape.tied,
        ).to(self._device)
        self.links = links(self.model, self._shape)
        assert {id(p) for p in self.model.parameters()} == {id(link.parameter) for link in self.links}, "unlinked"
        load_weights(self.links, self._shape, Checkpoint(self._source))
        tp = learner.parallel.tp
        self.replay = attach(
            self.model,
            moe_layers=self._shape.moe_layers,
            shard=(self.layout.tp_rank, tp),
            top_k=self._shape.top_k,
            num_experts=self._shape.experts,
            enabled=config.routing.replay != "off",
            device=self._device,
        )
        summed = parallel.GradientSum(self.links, self.layout)
        self._optimizer = MasterAdamW(
            [link.parameter for link in self.links],
            learner,
            reduce_gradients=summed.reduce if learner.parallel.world > 1 else None,
            squared_norm=summed.squared_norm,
        )
        self._logits_here, self._logprobs_of = self._vocabulary()
        self.trust_region = TrustRegion(config.algorithm.rollout_kl)
        self._reference = Reference(self.model.parameters()) if config.algorithm.reference_kl.coef else None

    def _vocabulary(self) -> tuple[int, LogProbs]:
        """Columns of this rank's logits, and how log-probs are made of them."""
        size, ranks = self._shape.vocab_size, self._config.learner.parallel.tp
        if ranks == 1:
            return size, whole_vocabulary
        rows = -(-size // ranks)
        first = rows * self.layout.tp_rank
        return max(0, min(rows, size - first)), split_vocabulary(first, ps.get_tensor_model_parallel_group())

    @property
    def version(self) -> int:
        """Optimizer steps taken."""
        return self._optimizer.steps

    @property
    def vocab_size(self) -> int:
        """Token ids are `0..vocab_size - 1`."""
        return self._shape.vocab_size

    def train_step(
        self, micro_batches: Sequence[MicroBatch], *, version: int | None = None, trace: bool = False
    ) -> StepResult:
        """One optimizer step; see `LearnerBackend.train_step`."""
        step = self._begin(micro_batches, version, trace)
        report = self._optimizer.skip(step.cause)
        if step.trained:
            with self._nothing_left_if_it_fails():
                self.backward(step)
                report = step.update(self._optimizer, self.trust_region, holds_loss=self.layout.holds_loss)
        return step.result(report, self.replay.take_counts(), self.replay.columns, len(self._shape.moe_layers))

    def _begin(self, micro_batches: Sequence[MicroBatch], version: int | None = None, trace: bool = False) -> Step:
        # Padding keeps sequence-parallel parts equal. One of many ranks takes part also where it trains nothing.
        alone = self._config.learner.parallel.world == 1
        return Step(
            self._aligned(micro_batches),
            self._config,
            replays=self.replay.enabled and bool(self._shape.moe_layers),
            version=self.version if version is None else version,
            rollout_kl_coef=self.trust_region.coef,
            reduce=self.layout.reduce,
            is_first_copy=self.layout.tp_rank == self.layout.pp_rank == 0,
            skip_untrained=alone,
            trace=trace,
            routing=(len(self._shape.moe_layers), self._shape.experts),
        )

    def _aligned(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        return [aligned(m, self._config.learner.parallel.tp) for m in micro_batches]

    @contextmanager
    def _nothing_left_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._optimizer.clear()
            self.replay.take_counts()
            raise

    def backward(self, step: Step) -> None:
        """Forward and backward passes of all micro-batches; gradients of this rank's tokens add up in the optimizer."""
        if step.needs_logprobs:
            step.complete(self.logprobs(step.micro_batches, trained=True))

        def loss(index: int, hidden: Tensor) -> Tensor:
            return step.loss(index, *self._logprobs(hidden, step.micro_batches[index], step.rows(index)))

        def forward(index: int) -> Tensor:
            routes = bind(step.micro_batches[index], keep=step.trace)
            hidden = routes.follow(self._hidden(step.micro_batches[index]))
            step.saw(routes)
            return hidden

        with self.replay.balanced(step.balance):
            if self._config.learner.parallel.pp > 1:
                with self.replay.pipelined() as bind:
                    run_stages(self.model, forward, loss, len(step.micro_batches))
                return
            for index in range(len(step.micro_batches)):
                with self.replay.pipelined() as bind:
                    loss(index, forward(index)).backward()

    def _hidden(self, micro_batch: MicroBatch) -> Tensor:
        """`[N / tp, 1, hidden]`: what this pipeline stage makes of the micro-batch."""
        plan = make_plan(
            micro_batch.cu_seqlens,
            head_dim=self._shape.head_dim,
            rope_theta=self._shape.rope_theta,
            dtype=self._dtype,
            device=self._device,
        )
        ids = self._tensor(micro_batch.table["token_ids"].astype(np.int64))
        return self.model(ids[None], None, None, packed_seq_params=plan)

    def _logprobs(self, hidden: Tensor, micro_batch: MicroBatch, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """float32 `[M]` log-probs of the tokens at `rows`, and entropies. Logits are made for these rows only."""
        if self._config.learner.parallel.tp > 1:
            # Each rank's logits are of its own part of the vocabulary, so their gradients add up in the backward pass.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        ids = micro_batch.table["token_ids"][rows].astype(np.int64)
        weight = self.model.output_weight()[: self._logits_here]
        return token_logprobs(
            lambda h: F.linear(h, weight),
            hidden[:, 0].index_select(0, self._tensor(rows - 1)),
            self._tensor(ids),
            self._tensor(micro_batch.token_temperatures[rows]),
            self._logits_here,
            logprobs=self._logprobs_of,
            entropy_gradient=self._config.algorithm.entropy_coef != 0,
        )

    def _tensor(self, array: np.ndarray) -> Tensor:
        """On the device. `array` must be ours, not a table's column: those may be read-only."""
        return torch.from_numpy(array).to(self._device)

    @torch.no_grad()
    def _forward_only(
        self,
        micro_batches: Sequence[MicroBatch],
        finish: Callable[[int, Tensor], None],
        binds: bool,
        visit: Callable[[int, MicroBatchRoutes], None] | None = None,
    ) -> None:
        """`finish(index, hidden)` on the last stage; `visit(index, routes)`, with what was chosen, on every one."""

        def last(index: int, hidden: Tensor) -> Tensor:
            finish(index, hidden)
            return hidden.new_zeros(())

        with self.replay.pipelined() as bind:

            def forward(index: int) -> Tensor:
                routes = bind(micro_batches[index], keep=visit is not None) if binds else None
                hidden = self._hidden(micro_batches[index])
                if visit is not None and routes is not None:
                    visit(index, routes)
                return hidden

            if self._config.learner.parallel.pp > 1:
                run_stages(self.model, forward, last, len(micro_batches), forward_only=True)
            else:
                for index in range(len(micro_batches)):
                    finish(index, forward(index))
        self.replay.take_counts()

    def logprobs(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        replay: bool = True,
        reference: bool = False,
        trained: bool = False,
    ) -> list[np.ndarray]:
        """A forward-only pass; see `LearnerBackend.logprobs`."""
        if reference:
            with weights_of(self._reference):
                return self.logprobs(micro_batches, replay=replay, trained=trained)
        padded = self._aligned(micro_batches)
        out = [np.zeros(m.tokens, np.float32) for m in padded]

        def finish(index: int, hidden: Tensor) -> None:
            m = padded[index]
            rows = predicted(m, trained=trained)
            out[index][rows] = self._logprobs(hidden, m, rows)[0].cpu().numpy()

        self._forward_only(padded, finish, binds=replay)
        if self._config.learner.parallel.pp > 1:
            for values in out:
                group, source = ps.get_pipeline_model_parallel_group(), ps.get_pipeline_model_parallel_last_rank()
                dist.broadcast(torch.from_numpy(values), source, group)
        return [values[: m.tokens] for values, m in zip(out, micro_batches, strict=True)]

    def score(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """float32 `[T - 1]`; see `LearnerBackend.score`."""
        token_ids = np.asarray(token_ids)
        if token_ids.ndim != 1 or len(token_ids) < 2:
            raise ValueError(f"score needs at least two tokens in one dimension, got shape {token_ids.shape}")
        return self.logprobs([collate([Sample("scored", TokenTable.of_tokens(token_ids), temperature)])], replay=False)[
            0
        ][1:]

    def record_routes(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches with the learner's own routes; see `LearnerBackend.record_routes`."""
        bare = [
            replace(m, table=m.table.without("routed_experts", "routing_recorded"))
            for m in self._aligned(micro_batches)
        ]
        layers, top_k = len(self._shape.moe_layers), self._shape.top_k
        if not layers:
            return list(micro_batches)
        chosen = [torch.zeros(m.tokens, layers, top_k, dtype=torch.int32) for m in bare]

        def visit(index: int, routes: MicroBatchRoutes) -> None:
            part = self.replay.token_slice(bare[index].tokens)
            for column, own in zip(self.replay.columns, routes.own, strict=True):
                assert own is not None
                chosen[index][part, column] = own.cpu().int()

        self._forward_only(bare, lambda index, hidden: None, binds=True, visit=visit)
        out = []
        for micro_batch, rows in zip(micro_batches, chosen, strict=True):
            if self._config.learner.parallel.world > 1:
                # Every row and layer is on one rank, zeros on the others.
                dist.all_reduce(rows, group=ps.get_model_parallel_group())
            routes = rows[: micro_batch.tokens].numpy().astype(route_dtype(self._shape.experts))
            recorded = np.arange(micro_batch.tokens) < micro_batch.real_tokens
            table = micro_batch.table.with_columns(routed_experts=routes, routing_recorded=recorded)
            out.append(replace(micro_batch, table=table))
        return out

    def state(self) -> LearnerState:
        """This rank's part; see `LearnerBackend.state`."""
        return take(self._saved)

    def restore(self, saved: LearnerParts, *, optimizer: bool = True) -> None:
        """See `LearnerBackend.restore`."""
        restore(self._saved, saved, optimizer=optimizer)

    @property
    def _saved(self) -> Saved:
        return Saved(
            backend="megatron",
            source=self._source,
            rank=self.layout.rank,
            world=self._config.learner.parallel.world,
            places=[held(link) for link in self.links],
            optimizer=self._optimizer,
            trust_region=self.trust_region,
        )

    def export(self) -> dict[str, Tensor]:
        """Snapshot of all weights; see `LearnerBackend.export`."""
        return gather_weights(self.links)

    def save(self, directory: Path) -> None:
        """Write a Hugging Face model directory; see `LearnerBackend.save`."""
        tensors = self.export()
        if self.layout.rank == 0:
            save_model(Path(directory), self._source, tensors, self._config.learner.dtype)

    def close(self) -> None:
        """Release the process groups; see `LearnerBackend.close`."""
        self.layout.close()
