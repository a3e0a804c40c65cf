"""A learner without a model, for tests and for simulated runs (`learner.backend = "scripted"`).

Its weights are a digest of everything that it trained, in order: two learners have equal weights
if, and only if, they made the same updates from the same batches. It always agrees with the
policy that sampled: its log-probs and routes are the recorded ones. There is no forward pass, and
nothing is learnt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors.torch import save as serialize
from torch import Tensor
from torch.nn import Parameter

from r3async.checkpoint.rank_files import TensorSlice
from r3async.config import Config
from r3async.data.model_shape import read_moe_layers
from r3async.learner.backend import LearnerBackend, MicroBatchLoss, MicroBatchScores
from r3async.learner.micro_batches import MicroBatch
from r3async.learner.optimizer import MasterAdamW, OptimizerUpdate, count_updates
from r3async.learner.rank_group import SINGLE_RANK
from r3async.learner.replay import RoutingReplay, count_recorded_load
from r3async.learner.shard_slice import ShardSlice
from r3async.rollout.scripted import DIGEST_TENSOR, UINT32_MASK, scripted_logprobs
from r3async.untrusted import decode_python_json
from r3async.world import Files
from r3async.world.files import make_directory, read_file, replace_directory, replace_file
from r3async.world.real import REAL_WORLD

DIGESTED_COLUMNS = (
    "token_ids",
    "loss_mask",
    "policy_version",
    "rollout_logprobs",
    "advantages",
    "loss_weights",
)
"""The columns of trained samples that the weights depend on, where they exist."""


class DigestOptimizer(MasterAdamW):
    """An optimizer whose parameter is the digest, 32 bytes as float32 `[32]`.

    A step hashes what `add_batch` added onto it: without a gradient, and the same on every machine.
    """

    def __init__(self, config: Config):
        self.digest = Parameter(torch.zeros(32), requires_grad=True)
        super().__init__([self.digest], config.learner, updates_total=count_updates(config))
        self._batch_hash: Any = None
        """The hash of the weights and of what was added since the last step."""

    @property
    def weight_bytes(self) -> Tensor:
        """A copy of the digest: uint8 `[32]`."""
        return self.digest.detach().to(torch.uint8)

    def add_batch(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Add micro-batches that the next step trains."""
        if self._batch_hash is None:
            self._batch_hash = hashlib.sha256(self.weight_bytes.numpy().tobytes())
        for m in micro_batches:
            self._batch_hash.update("\0".join(m.sample_ids).encode())
            for name in DIGESTED_COLUMNS:
                if name in m.table:
                    self._batch_hash.update(np.ascontiguousarray(m.table[name]).data)

    @torch.no_grad()
    def step(self) -> OptimizerUpdate:
        """Replace the digest with one of itself and of the batch."""
        lr = self.lr
        self.add_batch([])
        self.digest.copy_(torch.frombuffer(bytearray(self._batch_hash.digest()), dtype=torch.uint8))
        self.zero_grad()
        self.update_count += 1
        return OptimizerUpdate(0.0, lr)

    def zero_grad(self) -> None:
        self._batch_hash = None


class ScriptedLearner(LearnerBackend):
    """A learner backend without a model; `learner.parallel` has to be one process.

    Counts, routing figures and causes to skip a step are those of any backend. Figures of the loss
    are 0, as there is none.
    """

    name = "scripted"
    optimizer: DigestOptimizer
    can_skip_untrained = False

    def __init__(
        self, config: Config, model_path: Path, model_config: Mapping[str, Any], files: Files
    ):
        self._files = files
        routing, _ = read_moe_layers(model_config)
        replay = RoutingReplay.for_full_model(
            routing, enabled=config.routing.replay != "off", device=SINGLE_RANK.device
        )
        super().__init__(
            config,
            model_path,
            SINGLE_RANK,
            vocab_size=model_config.get("text_config", model_config)["vocab_size"],
            replay=replay,
            optimizer=DigestOptimizer(config),
            parameters=(),
        )

    @classmethod
    def from_pretrained(
        cls, config: Config, model_path: Path, files: Files = REAL_WORLD.files
    ) -> ScriptedLearner:
        """Read the configuration of the model, but not its weights."""
        source = Path(model_path)
        return cls(
            config,
            source,
            decode_python_json(read_file(source / "config.json", files=files)),
            files,
        )

    def iter_scores(
        self,
        micro_batches: Sequence[MicroBatch],
        rows: Sequence[np.ndarray],
        *,
        replay: bool = True,
        keep_choices: bool = False,
        pipeline_loss: MicroBatchLoss | None = None,
    ) -> Iterator[MicroBatchScores]:
        """Add the micro-batches to what the next step trains, and yield nothing; without `replay`,
        which only measures, do nothing.

        Routers choose what is recorded, and nothing for a token without routes.
        """
        if not replay:
            return iter(())
        self.optimizer.add_batch(micro_batches)
        counts = self.replay.counts
        load = count_recorded_load(
            micro_batches, self.replay.num_moe_layers, self.replay.num_experts
        )
        counts.expert_load += torch.from_numpy(load).to(counts.expert_load.dtype)
        recorded = counts.expert_load.sum(dim=1) // self.replay.top_k
        counts.agreeing_tokens += recorded
        counts.compared_tokens += recorded
        return iter(())

    def logprobs(self, micro_batches: Sequence[MicroBatch], **_: Any) -> list[np.ndarray]:
        """Return float32 `[N]` for each micro-batch, as recorded; 0 where the
        record is not finite."""
        found = [m.table["rollout_logprobs"].astype(np.float32) for m in micro_batches]
        return [np.where(np.isfinite(values), values, np.float32(0)) for values in found]

    def record_learner_routes(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return the micro-batches as they are."""
        return list(micro_batches)

    def score_sequence(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """Return float32 `[T - 1]`: the log-probs of a scripted engine with these weights."""
        key = xxhash.xxh3_64_intdigest(self.optimizer.weight_bytes.numpy().tobytes()) & UINT32_MASK
        at = np.arange(1, len(token_ids))
        return scripted_logprobs(at, np.full(len(at), key), np.asarray(token_ids)[1:]) / temperature

    def parameter_slices(self) -> list[ShardSlice]:
        """Return the slice of the digest."""
        return [ShardSlice((TensorSlice.full_tensor(DIGEST_TENSOR, (32,)),))]

    def export_weights(self, *, copy: bool = True) -> dict[str, Tensor]:
        """Return the digest, uint8 `[32]`."""
        return {DIGEST_TENSOR: self.optimizer.weight_bytes}

    def save_pretrained(self, directory: Path) -> None:
        """Write a model directory that no engine but the scripted one can load."""
        aside = directory.with_name(f".{directory.name}.new")
        files = self._files
        files.remove_tree(aside)
        make_directory(aside, files=files)
        for name in files.list_names(self.model_path):
            if Path(name).suffix in (".json", ".jinja"):
                replace_file(
                    aside / name, read_file(self.model_path / name, files=files), files=files
                )
        replace_file(
            aside / "model.safetensors",
            serialize(self.export_weights(), {"format": "pt"}),
            files=files,
        )
        replace_directory(aside, directory, files=files)
