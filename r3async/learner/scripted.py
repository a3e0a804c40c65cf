"""A learner without a model, for tests and for simulated runs (`learner.backend = "scripted"`).

Its weights are a digest of everything that it trained, in order: two learners have equal weights if, and only if, they made the
same updates from the same batches. It always agrees with whoever sampled: its log-probs are those recorded, its routes too.
Nothing is fed forward, and nothing is learnt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors.torch import save as serialize
from torch import Tensor
from torch.nn import Parameter

from r3async.checkpoint.tensors import Place
from r3async.config import Config
from r3async.data.model_shape import moe_geometry
from r3async.learner.backend import ALONE, Finish, LearnerBackend
from r3async.learner.batch.packing import MicroBatch
from r3async.learner.minibatch import recorded_load
from r3async.learner.optimizer import MasterAdamW, Update, total_updates
from r3async.learner.replay import RoutingReplay
from r3async.learner.state import Held
from r3async.rollout.engines.scripted import DIGEST, MASK, scripted_logprobs
from r3async.untrusted import decode_python_json
from r3async.world import Files
from r3async.world.files import make_directory, read_file, replace_directory, replace_file
from r3async.world.real import REAL

COLUMNS = ("token_ids", "loss_mask", "policy_version", "rollout_logprobs", "advantages", "loss_weights")
"""Of what is trained: those that the weights depend on, where they are there."""


class DigestOptimizer(MasterAdamW):
    """The digest, 32 bytes as float32 `[32]`, in place of parameters. A step hashes what was `fed` onto it: no gradient, and the
    same on every machine."""

    def __init__(self, config: Config):
        self.digest = Parameter(torch.zeros(32), requires_grad=True)
        super().__init__([self.digest], config.learner, total=total_updates(config))
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
    def step(self) -> Update:
        """The digest of before, and of what was fed, is the new one."""
        lr = self.lr
        self.digest.copy_(torch.frombuffer(bytearray(self._fed.digest()), dtype=torch.uint8))
        self.steps += 1
        return Update(0.0, lr)


class ScriptedLearner(LearnerBackend):
    """See `LearnerBackend`; `learner.parallel` has to be one process.

    Counts, routing figures and causes to skip a step are those of any backend. Figures of the loss are 0, for there is none.
    """

    name = "scripted"
    optimizer: DigestOptimizer
    skips_untrained = False

    def __init__(self, config: Config, source: Path, described: Mapping[str, Any], files: Files):
        self._files = files
        routing, _ = moe_geometry(described)
        replay = RoutingReplay.whole(routing, enabled=config.routing.replay != "off", device=ALONE.device)
        super().__init__(
            config,
            source,
            ALONE,
            vocab_size=described.get("text_config", described)["vocab_size"],
            replay=replay,
            optimizer=DigestOptimizer(config),
            parameters=(),
        )

    @classmethod
    def load(cls, config: Config, model_path: Path, files: Files = REAL.files) -> ScriptedLearner:
        """Read the configuration of the model, whose weights are not looked at."""
        source = Path(model_path)
        return cls(config, source, decode_python_json(read_file(source / "config.json", files=files)), files)

    def feed(
        self,
        micro_batches: Sequence[MicroBatch],
        rows: Sequence[np.ndarray],
        finish: Finish | None,
        *,
        replay: bool = True,
        **_: Any,
    ) -> None:
        """What the next step trains; not without `replay`, which is only to look. Routers choose what is recorded: nothing for a
        token without routes."""
        if not replay:
            return
        self.optimizer.feed(micro_batches)
        counts = self.replay.counts
        load = recorded_load(micro_batches, self.replay.layers, self.replay.num_experts)
        counts.load += torch.from_numpy(load).to(counts.load.dtype)
        recorded = counts.load.sum(dim=1) // self.replay.top_k
        counts.agreed += recorded
        counts.compared += recorded

    def logprobs(self, micro_batches: Sequence[MicroBatch], **_: Any) -> list[np.ndarray]:
        """float32 `[N]` for each micro-batch, as recorded; 0 where nothing finite is."""
        found = [m.table["rollout_logprobs"].astype(np.float32) for m in micro_batches]
        return [np.where(np.isfinite(values), values, np.float32(0)) for values in found]

    def record_routes(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """As they are."""
        return list(micro_batches)

    def score(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """float32 `[T - 1]`: those of a scripted engine with these weights."""
        key = xxhash.xxh3_64_intdigest(self.optimizer.weights.numpy().tobytes()) & MASK
        at = np.arange(1, len(token_ids))
        return scripted_logprobs(at, np.full(len(at), key), np.asarray(token_ids)[1:]) / temperature

    def weight_places(self) -> list[Held]:
        """Of the digest."""
        return [Held((Place.whole(DIGEST, (32,)),))]

    def export(self, *, copy: bool = True) -> dict[str, Tensor]:
        """The digest, uint8 `[32]`."""
        return {DIGEST: self.optimizer.weights}

    def save(self, directory: Path) -> None:
        """A model directory that no engine but the scripted one can load."""
        aside, files = directory.with_name(f".{directory.name}.new"), self._files
        files.remove_tree(aside)
        make_directory(aside, files=files)
        for name in files.list(self.source):
            if Path(name).suffix in (".json", ".jinja"):
                replace_file(aside / name, read_file(self.source / name, files=files), files=files)
        replace_file(aside / "model.safetensors", serialize(self.export(), {"format": "pt"}), files=files)
        replace_directory(aside, directory, files=files)
