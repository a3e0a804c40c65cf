"""A learner without a model, for tests and for simulated runs (`learner.backend = "scripted"`).

Its weights are a digest of everything that it trained, in order: two learners have equal weights if, and only if, they made the
same updates from the same batches. It always agrees with whoever sampled: its log-probs are those recorded, its routes too.
Nothing is fed forward, and nothing is learnt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import xxhash
from safetensors.torch import save as serialize
from torch import Tensor
from torch.nn import Parameter

from r3async.algorithms.trust_region import TrustRegion
from r3async.batching.packing import MicroBatch
from r3async.checkpoint.tensors import LearnerParts, LearnerState, Place
from r3async.config import Config
from r3async.engines.base import moe_geometry
from r3async.engines.scripted import DIGEST, MASK, scripted_logprobs
from r3async.files import make_directory, read_file, replace_file
from r3async.learners.base import StepResult
from r3async.learners.optimizer import MasterAdamW, StepReport
from r3async.learners.replay import RoutingCounts
from r3async.learners.state import Held, Saved, restore, take
from r3async.learners.step import Step
from r3async.world import Files
from r3async.world.real import REAL

COLUMNS = ("token_ids", "loss_mask", "policy_version", "rollout_logprobs", "advantages", "loss_weights")
"""Of what is trained: those that the weights depend on, where they are there."""


class DigestOptimizer(MasterAdamW):
    """The digest, 32 bytes as float32 `[32]`, in place of parameters. A step hashes what was `fed` onto it: no gradient, and the
    same on every machine."""

    def __init__(self, config: Config):
        self.digest = Parameter(torch.zeros(32), requires_grad=True)
        super().__init__([self.digest], config.learner)
        self._fed = hashlib.sha256()

    @property
    def weights(self) -> Tensor:
        """A copy: uint8 `[32]`."""
        return self.digest.detach().to(torch.uint8)

    def feed(self, micro_batches: Sequence[MicroBatch]) -> None:
        """What the next step trains."""
        self._fed = hashlib.sha256(self.weights.numpy().tobytes())
        for m in micro_batches:
            self._fed.update("\0".join(m.sample_ids).encode())
            for name in COLUMNS:
                if name in m.table:
                    self._fed.update(np.ascontiguousarray(m.table[name]).data)

    @torch.no_grad()
    def step(self) -> StepReport:
        """The digest of before, and of what was fed, is the new one."""
        lr = self.lr
        self.digest.copy_(torch.frombuffer(bytearray(self._fed.digest()), dtype=torch.uint8))
        self.steps += 1
        return StepReport(0.0, lr)


class ScriptedLearner:
    """A `LearnerBackend`. See there for what the methods promise; `learner.parallel` has to be one process.

    Counts, routing figures and causes to skip a step are those of any backend. Figures of the loss are 0, for there is none.
    """

    def __init__(self, config: Config, model_path: Path, files: Files = REAL.files):
        self._config, self._source, self._files = config, Path(model_path), files
        described = json.loads(read_file(self._source / "config.json", files=files))
        routing, _ = moe_geometry(described)
        self._layers, self._experts = (routing.layers, routing.num_experts) if routing else (0, 1)
        self.vocab_size: int = described.get("text_config", described)["vocab_size"]
        self._optimizer = DigestOptimizer(config)
        self.trust_region = TrustRegion(config.algorithm.rollout_kl)

    @property
    def version(self) -> int:
        """Optimizer steps taken."""
        return self._optimizer.steps

    def train_step(
        self, micro_batches: Sequence[MicroBatch], *, version: int | None = None, trace: bool = False
    ) -> StepResult:
        """See `LearnerBackend.train_step`. There are no traces."""
        step = Step(
            micro_batches,
            self._config,
            replays=self._config.routing.replay != "off" and self._layers > 0,
            version=self.version if version is None else version,
            rollout_kl_coef=self.trust_region.coef,
            routing=(self._layers, self._experts),
        )
        self._optimizer.feed(micro_batches)
        report = step.update(self._optimizer, self.trust_region)
        return step.result(report, self._routed(micro_batches), range(self._layers), self._layers)

    def _routed(self, micro_batches: Sequence[MicroBatch]) -> RoutingCounts:
        """As recorded: nothing of a token without routes."""
        counts = RoutingCounts(self._layers, self._experts, torch.device("cpu"))
        for m in micro_batches:
            if "routed_experts" not in m.table:
                continue
            rows = m.table["routed_experts"][m.table["routing_recorded"]]
            counts.agreed += len(rows)
            counts.compared += len(rows)
            for layer in range(self._layers):
                load = np.bincount(rows[:, layer].reshape(-1), minlength=self._experts)
                counts.load[layer] += torch.from_numpy(load)
        return counts

    def logprobs(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        replay: bool = True,
        reference: bool = False,
        trained: bool = False,
    ) -> list[np.ndarray]:
        """float32 `[N]` for each micro-batch, as recorded; 0 where nothing finite is."""
        found = [m.table["rollout_logprobs"].astype(np.float32) for m in micro_batches]
        return [np.where(np.isfinite(values), values, np.float32(0)) for values in found]

    def record_routes(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """As they are."""
        return list(micro_batches)

    def score(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """float32 `[T - 1]`: what a scripted engine with these weights says."""
        key = xxhash.xxh3_64_intdigest(self._optimizer.weights.numpy().tobytes()) & MASK
        at = np.arange(1, len(token_ids))
        return scripted_logprobs(at, np.full(len(at), key), np.asarray(token_ids)[1:]) / temperature

    def state(self) -> LearnerState:
        """See `LearnerBackend.state`."""
        return take(self._saved)

    def restore(self, saved: LearnerParts, *, optimizer: bool = True) -> None:
        """See `LearnerBackend.restore`."""
        restore(self._saved, saved, optimizer=optimizer)

    @property
    def _saved(self) -> Saved:
        return Saved(
            backend="scripted",
            source=self._source,
            rank=0,
            world=1,
            places=[Held((Place.whole(DIGEST, (32,)),))],
            optimizer=self._optimizer,
            trust_region=self.trust_region,
        )

    def export(self) -> dict[str, Tensor]:
        """The digest, uint8 `[32]`."""
        return {DIGEST: self._optimizer.weights}

    def save(self, directory: Path) -> None:
        """A model directory that no engine but the scripted one can load."""
        aside, files = directory.with_name(f".{directory.name}.new"), self._files
        files.remove_tree(aside)
        make_directory(aside, files=files)
        for name in files.list(self._source):
            if Path(name).suffix in (".json", ".jinja"):
                replace_file(aside / name, read_file(self._source / name, files=files), files=files)
        replace_file(aside / "model.safetensors", serialize(self.export(), {"format": "pt"}), files=files)
        files.remove_tree(directory)
        files.rename(aside, directory)
        files.sync_directory(directory.parent)

    def close(self) -> None:
        """Nothing."""
