"""`TorchLearner`: any mixture of experts that transformers has, with rollout routing replay and FSDP2."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from r3async.batching.packing import MicroBatch
from r3async.config import Config
from r3async.learners.base import LearnerError, StepResult
from r3async.learners.files import save_model
from r3async.learners.optimizer import MasterAdamW
from r3async.learners.replay import MicroBatchRoutes, RoutingReplay
from r3async.learners.step import Step
from r3async.learners.torch.model import Packed, PackedModel, load_model
from r3async.learners.torch.routers import attach_replay
from r3async.learners.torch.sharding import Ranks, put_back, recover, shard, whole
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
        causal = load_model(self._source, torch.float32 if self._sharded else self._dtype)
        self.model = PackedModel(
            causal, json.loads((self._source / "config.json").read_text()), longest=config.episode.max_total_tokens
        )
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

    @property
    def version(self) -> int:
        """Optimizer steps taken."""
        return self._optimizer.steps

    @property
    def vocab_size(self) -> int:
        """Token ids are `0..vocab_size - 1`."""
        return self.model.vocab_size

    def train_step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        """One optimizer step; see `LearnerBackend.train_step`."""
        replays = self.replay.enabled and bool(self.replay.columns)
        step = Step(micro_batches, self._config, replays=replays, reduce=self._ranks.reduce)
        self.replay.take_counts()  # of passes since the last step
        report = self._optimizer.not_stepped()
        if step.trained:
            try:
                for index, micro_batch in enumerate(micro_batches):
                    with self.replay.bound(micro_batch) as routes:
                        # Also without trained rows: other ranks wait for this one, and routing is reported for all tokens.
                        step.loss(index, *self._logprobs(micro_batch, step.rows(index), routes)).backward()
            except BaseException:
                self._optimizer.clear()
                recover(self.model)
                raise
            report = self._optimizer.step()
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
