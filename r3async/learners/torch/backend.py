"""`TorchLearner`: any mixture of experts that transformers has, with rollout routing replay and FSDP2."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from r3async.algorithms.trust_region import TrustRegion
from r3async.batching.packing import MicroBatch, collate
from r3async.checkpoint.tensors import LearnerParts, LearnerState
from r3async.config import Config
from r3async.learners.base import StepResult
from r3async.learners.files import save_model
from r3async.learners.optimizer import MasterAdamW
from r3async.learners.reference import Reference, weights_of
from r3async.learners.replay import MicroBatchRoutes, RoutingReplay
from r3async.learners.state import Saved, restore, take
from r3async.learners.step import Step
from r3async.learners.torch.model import Packed, PackedModel, load_model, read_config
from r3async.learners.torch.routers import attach_replay
from r3async.learners.torch.sharding import Ranks, places, settle, shard, whole
from r3async.learners.whole import predicted
from r3async.records import Sample, TokenTable
from r3async.routing import route_dtype


class TorchLearner:
    """A `LearnerBackend`. See there for what the methods promise.

    One process trains alone. With `learner.parallel.dp` of them, in the default process group (gloo or nccl), every
    parameter is divided among them by FSDP2, in float32: the shards are the master weights. While it loads, each process
    holds the whole model in host memory.
    """

    def __init__(self, config: Config, model_path: Path):
        self._config, self._source = config, Path(model_path)
        self._ranks = Ranks.join(config.learner.parallel.dp)
        self._device = self._ranks.device
        if self._device.type == "cpu":
            torch.set_num_threads(config.learner.threads)
        self._dtype = getattr(torch, config.learner.dtype)
        self._sharded = self._ranks.world > 1
        described = read_config(self._source)
        causal = load_model(self._source, torch.float32 if self._sharded else self._dtype)
        self.model = PackedModel(causal, described, longest=config.episode.max_total_tokens)
        self.model.entropy_gradient = config.algorithm.entropy_coef != 0
        routing = self.model.routing
        self.replay = RoutingReplay(
            layers=routing.layers if routing else 0,
            columns=range(routing.layers if routing else 0),
            top_k=routing.top_k if routing else 1,
            num_experts=routing.num_experts if routing else 1,
            enabled=config.routing.replay != "off",
            device=self._device,
        )
        if routing:
            attach_replay(self.model.routers, routing, self.replay)
        self.model.recompute(config.learner.recompute)
        if self._sharded:
            shard(self.model, self._ranks, self._dtype)
            self._optimizer = MasterAdamW(
                self.model.parameters(), config.learner, squared_norm=self._ranks.squared_norm
            )
        else:
            self.model.to(self._device)
            self._optimizer = MasterAdamW(self.model.parameters(), config.learner)
        self.trust_region = TrustRegion(config.algorithm.rollout_kl)
        self._reference = Reference(self.model.parameters()) if config.algorithm.reference_kl.coef else None

    @property
    def version(self) -> int:
        """Optimizer steps taken."""
        return self._optimizer.steps

    @property
    def vocab_size(self) -> int:
        """Token ids are `0..vocab_size - 1`."""
        return self.model.vocab_size

    def train_step(
        self, micro_batches: Sequence[MicroBatch], *, version: int | None = None, trace: bool = False
    ) -> StepResult:
        """One optimizer step; see `LearnerBackend.train_step`."""
        step = Step(
            micro_batches,
            self._config,
            replays=self.replay.enabled and bool(self.replay.columns),
            version=self.version if version is None else version,
            rollout_kl_coef=self.trust_region.coef,
            reduce=self._ranks.reduce,
            # One of many ranks takes part also where it trains nothing: the others wait for its part of the weights.
            skip_untrained=not self._sharded,
            trace=trace,
            routing=(self.replay.layers, self.replay.num_experts),
        )
        report = self._optimizer.skip(step.cause)
        if step.trained:
            try:
                if step.needs_logprobs:
                    step.complete(self.logprobs(step.micro_batches, trained=True))
                with self.replay.balanced(step.balance):
                    for index, micro_batch in enumerate(step.micro_batches):
                        with self.replay.bound(micro_batch, keep=trace) as routes:
                            logprobs, entropies = self._logprobs(micro_batch, step.rows(index), routes)
                            step.saw(routes)
                            step.loss(index, logprobs, entropies).backward()
            except BaseException:
                self._optimizer.clear()
                self.replay.take_counts()
                settle(self.model)
                raise
            report = step.update(self._optimizer, self.trust_region)
        return step.result(report, self.replay.take_counts(), self.replay.columns, self.replay.layers)

    def _logprobs(
        self, micro_batch: MicroBatch, rows: np.ndarray, routes: MicroBatchRoutes | None
    ) -> tuple[Tensor, Tensor]:
        """float32 `[M]` log-probs of the tokens at `rows`, and entropies."""
        m = micro_batch
        return self.model(
            Packed.of(m.table["token_ids"], m.positions, m.cu_seqlens, self._device),
            torch.from_numpy(rows).to(self._device),
            torch.from_numpy(m.token_temperatures[rows]).to(self._device),
            routes,
        )

    def logprobs(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        replay: bool = True,
        reference: bool = False,
        trained: bool = False,
    ) -> list[np.ndarray]:
        """float32 `[N]` for each micro-batch; see `LearnerBackend.logprobs`."""
        if reference:
            with weights_of(self._reference):
                return self.logprobs(micro_batches, replay=replay, trained=trained)
        results = []
        with self._forward_only():
            for m in micro_batches:
                rows = predicted(m, trained=trained)
                with self.replay.bound(m) if replay else nullcontext() as routes:
                    logprobs, _ = self._logprobs(m, rows, routes)
                results.append(np.zeros(m.tokens, np.float32))
                results[-1][rows] = logprobs.cpu().numpy()
        return results

    def record_routes(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """With the routes that the learner chooses by itself; see `LearnerBackend.record_routes`."""
        if not self.replay.columns:
            return list(micro_batches)
        dtype = route_dtype(self.replay.num_experts)
        nothing = np.zeros(0, np.int64)
        results = []
        with self._forward_only():
            for m in micro_batches:
                # Without what is recorded already: no layer's choice may follow from what an earlier layer replays.
                plain = replace(m, table=m.table.without("routed_experts", "routing_recorded"))
                with self.replay.bound(plain, keep=True) as routes:
                    self._logprobs(plain, nothing, routes)
                    own = torch.stack([ids for ids in routes.own if ids is not None], dim=1).cpu().numpy()
                recorded = np.arange(m.tokens) < m.real_tokens
                table = plain.table.with_columns(routed_experts=own.astype(dtype), routing_recorded=recorded)
                results.append(replace(m, table=table))
        return results

    def score(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """float32 `[T - 1]`; see `LearnerBackend.score`."""
        token_ids = np.asarray(token_ids)
        if token_ids.ndim != 1 or len(token_ids) < 2:
            raise ValueError(f"score needs at least two tokens in one dimension, got shape {token_ids.shape}")
        sample = Sample("scored", TokenTable.of_tokens(token_ids), temperature)
        return self.logprobs([collate([sample])], replay=False)[0][1:]

    @contextmanager
    def _forward_only(self) -> Iterator[None]:
        try:
            with torch.no_grad():
                yield
        finally:
            self.replay.take_counts()
            settle(self.model)

    def state(self) -> LearnerState:
        """This rank's part; see `LearnerBackend.state`."""
        return take(self._saved)

    def restore(self, saved: LearnerParts, *, optimizer: bool = True) -> None:
        """See `LearnerBackend.restore`."""
        restore(self._saved, saved, optimizer=optimizer)

    @property
    def _saved(self) -> Saved:
        return Saved(
            backend="torch",
            source=self._source,
            rank=self._ranks.rank,
            world=self._ranks.world,
            places=places(self.model, self._ranks.rank),
            optimizer=self._optimizer,
            trust_region=self.trust_region,
        )

    def export(self) -> dict[str, Tensor]:
        """Snapshot of all weights, in host memory, on rank 0; see `LearnerBackend.export`. Empty on the other ranks."""
        return self.model.checkpoint_tensors(partial(whole, dtype=self._dtype, ranks=self._ranks))

    def save(self, directory: Path) -> None:
        """Write a Hugging Face model directory; see `LearnerBackend.save`."""
        tensors = self.export()
        try:
            if self._ranks.rank == 0:
                save_model(Path(directory), self._source, tensors, self._config.learner.dtype)
        finally:
            # If writing failed here, the other ranks learn of it from this process's end, but do not wait for ever.
            self._ranks.barrier()

    def close(self) -> None:
        """Nothing: the process group is its maker's."""
