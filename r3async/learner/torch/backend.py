"""`TorchLearner`: any mixture of experts that transformers has, with rollout routing replay and FSDP2."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from r3async.config import Config
from r3async.learner.backend import LearnerBackend, Scores
from r3async.learner.batch.packing import MicroBatch
from r3async.learner.optimizer import MasterAdamW
from r3async.learner.ranks import Ranks
from r3async.learner.replay import MicroBatchRoutes, RoutingReplay
from r3async.learner.state import Held
from r3async.learner.torch.model import Packed, PackedModel, load_model, read_config
from r3async.learner.torch.routers import attach_replay
from r3async.learner.torch.sharding import join, places, settle, shard, sharded_norm, whole


class TorchLearner(LearnerBackend):
    """See `LearnerBackend`.

    One process trains alone. With `learner.parallel.dp` of them, in the default process group (gloo or nccl), every
    parameter is divided among them by FSDP2, in float32: the shards are the master weights. While it loads, each process
    holds the whole model in host memory.
    """

    name = "torch"

    def __init__(self, config: Config, source: Path, ranks: Ranks, model: PackedModel, replay: RoutingReplay):
        self.model = model
        super().__init__(
            config,
            source,
            ranks,
            vocab_size=model.vocab_size,
            replay=replay,
            optimizer=MasterAdamW(model.parameters(), config.learner, squared_norm=partial(sharded_norm, ranks)),
            parameters=model.parameters(),
        )

    @classmethod
    def load(cls, config: Config, model_path: Path) -> TorchLearner:
        """Load the model, with the other ranks where there are any. Raises `LearnerError` for one that this backend would train
        wrongly."""
        ranks, source = join(config.learner.parallel.dp), Path(model_path)
        if ranks.device.type == "cpu":
            torch.set_num_threads(config.learner.threads)
        dtype = getattr(torch, config.learner.dtype)
        described = read_config(source)
        causal = load_model(source, torch.float32 if ranks.world > 1 else dtype)
        model = PackedModel(causal, described, longest=config.episode.max_total_tokens)
        model.entropy_gradient = config.algorithm.entropy_coef != 0
        replay = RoutingReplay.whole(model.routing, enabled=config.routing.replay != "off", device=ranks.device)
        if model.routing:
            attach_replay(model.routers, model.routing, replay)
        model.recompute(config.learner.recompute)
        if ranks.world > 1:
            shard(model, ranks, dtype)
        else:
            model.to(ranks.device)
        return cls(config, source, ranks, model, replay)

    def forward(self, micro_batch: MicroBatch, rows: np.ndarray, routes: MicroBatchRoutes | None) -> Scores:
        """The scores themselves: what FSDP shards is all of a pass."""
        m, device = micro_batch, self.ranks.device
        return self.model(
            Packed.of(m.table["token_ids"], m.positions, m.cu_seqlens, device),
            torch.from_numpy(rows).to(device),
            torch.from_numpy(m.token_temperatures[rows]).to(device),
            routes,
        )

    def scores(self, output: Any, micro_batch: MicroBatch, rows: np.ndarray) -> Scores:
        """See `forward`."""
        return output

    def settle(self) -> None:
        """See `sharding.settle`."""
        settle(self.model)

    def places(self) -> list[Held]:
        """See `LearnerBackend.places`."""
        return places(self.model, self.ranks.rank)

    def export(self) -> dict[str, Tensor]:
        """See `LearnerBackend.export`; in host memory."""
        dtype = getattr(torch, self.config.learner.dtype)
        return self.model.checkpoint_tensors(partial(whole, dtype=dtype, ranks=self.ranks))
