"""A scripted learner and engine of the Tinker server, whose results show which weights made them.

A model's weights are a digest of all that was applied to it, in order. Log-probs, tokens and routes
follow from them, so a client that knows what it sent knows what every result has to be.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np

from dev.simulation.invariants import InvariantViolated
from r3async.tinker.backend import LossBatch, ServedModel, StateLostError
from r3async.tinker.protocol import (
    AdamParams,
    LoraConfig,
    SampledSequence,
    SamplingParams,
    TopLogprobs,
    TrainResult,
)
from r3async.tinker.sessions import Snapshot
from r3async.world import Files
from r3async.world.files import read_file, replace_file

BASE_NAME = "tiny/moe"
VOCABULARY = 1000
LAYERS = 2
TOP_K = 2
EXPERTS = 8
POISON = VOCABULARY - 1
"""A token with which every call fails."""
LETHAL = VOCABULARY - 2
"""A token with which every call ends the learner."""


def digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def start_weights(rank: int) -> str:
    return digest("adapter", rank)


def accumulate(gradient: str, tokens: list[list[int]]) -> str:
    return digest(gradient, tokens)


def step(weights: str, gradient: str, learning_rate: float) -> str:
    return digest(weights, gradient, learning_rate)


def score(weights: str) -> float:
    """Return the log-prob of every token, which float32 holds exactly."""
    return -int(weights[:6], 16) / 2**24


def draw_tokens(weights: str, prompt: list[int], seed: int, index: int, length: int) -> list[int]:
    rng = Random(digest("sample", weights, prompt, seed, index))
    return [rng.randrange(LETHAL) for _ in range(length)]


def route_tokens(weights: str, tokens: list[int]) -> np.ndarray:
    """Return the experts of each token that was fed, uint8 `[n - 1, LAYERS, TOP_K]`."""
    rng = np.random.default_rng(int(digest("routes", weights, tokens), 16))
    first = rng.integers(0, EXPERTS, (len(tokens) - 1, LAYERS, 1))
    return np.concatenate([first, (first + 1) % EXPERTS], axis=2).astype(np.uint8)


class _Model:
    def __init__(self, weights: str):
        self.weights = weights
        self.gradient = ""
        self.is_busy = False


class ScriptedBackend:
    """An implementation of `TinkerBackend`.

    Args:
        rng: How long calls take.
        report: Called with what breaks the backend's interface.
    """

    def __init__(self, files: Files, rng: Random, report: Callable[[InvariantViolated], None]):
        self.served = ServedModel(BASE_NAME, "/tokenizer", VOCABULARY, 4096)
        self.snapshots: dict[str, str] = {"base": digest("base")}
        self.models: dict[str, _Model] = {}
        self.failures_left = 0
        """Calls that are to fail in their middle."""
        self.learner_losses = 0
        self._files = files
        self._rng = rng
        self._report = report

    def lose_learner(self) -> None:
        self.models.clear()
        self.learner_losses += 1

    def lose_engine(self) -> None:
        self.snapshots = {"base": self.snapshots["base"]}

    def open_snapshots(self, model_id: str) -> list[str]:
        return [name for name in self.snapshots if f"{model_id}/snapshots/" in name]

    async def _work(self, model_id: str) -> _Model:
        """Take time on a model, and return it. Raises `StateLostError` if it is lost meanwhile."""
        model = self.models.get(model_id)
        if model is None:
            raise StateLostError(model_id)
        if model.is_busy:
            self._report(InvariantViolated("one", f"two calls for {model_id} at once"))
        model.is_busy = True
        await asyncio.sleep(self._rng.uniform(0.05, 1.0))
        model.is_busy = False
        if self.models.get(model_id) is not model:
            raise StateLostError(model_id)
        return model

    async def create_model(self, model_id: str, lora: LoraConfig | None) -> None:
        await asyncio.sleep(self._rng.uniform(0.1, 2.0))
        assert lora is not None
        self.models[model_id] = _Model(start_weights(lora.rank))

    async def close_model(self, model_id: str) -> None:
        self.models.pop(model_id, None)

    async def forward(self, model_id: str, batch: LossBatch) -> TrainResult:
        return _make_result(await self._work(model_id), batch)

    async def forward_backward(self, model_id: str, batch: LossBatch) -> TrainResult:
        tokens = [one.datum.tokens.tolist() for one in batch.data]
        used = {token for row in tokens for token in row}
        model = await self._work(model_id)
        if LETHAL in used:
            self.lose_learner()
            raise StateLostError(model_id)
        result = _make_result(model, batch)
        if self.failures_left or POISON in used:
            self.failures_left = max(0, self.failures_left - 1)
            model.gradient = digest("a part of", model.gradient, tokens)
            raise RuntimeError("out of memory")
        model.gradient = accumulate(model.gradient, tokens)
        return result

    async def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        model = await self._work(model_id)
        model.weights = step(model.weights, model.gradient, params.learning_rate)
        model.gradient = ""
        return {"weights:unique": score(model.weights)}

    async def save_state(self, model_id: str, directory: Path) -> None:
        model = await self._work(model_id)
        replace_file(directory / "learner", model.weights.encode(), files=self._files)

    async def load_state(self, model_id: str, directory: Path, *, with_optimizer: bool) -> None:
        model = await self._work(model_id)
        model.weights = read_file(directory / "learner", files=self._files).decode()

    async def publish(self, snapshot: Snapshot, directory: Path) -> None:
        model = await self._work(snapshot.model_id)
        replace_file(directory / "adapter", model.weights.encode(), files=self._files)

    async def open_snapshot(self, snapshot: Snapshot, directory: Path) -> None:
        await asyncio.sleep(self._rng.uniform(0.01, 0.5))
        weights = read_file(directory / "adapter", files=self._files).decode()
        self.snapshots[snapshot.name] = weights

    async def close_snapshot(self, snapshot: Snapshot) -> None:
        self.snapshots.pop(snapshot.name, None)

    async def sample(
        self,
        snapshot: Snapshot,
        prompt: np.ndarray,
        params: SamplingParams,
        *,
        num_samples: int,
        top_k: int,
    ) -> list[SampledSequence]:
        await asyncio.sleep(self._rng.uniform(0.2, 2.0))
        if snapshot.name not in self.snapshots:
            raise StateLostError(snapshot.name)
        weights = self.snapshots[snapshot.name]
        found = []
        for index in range(num_samples):
            length = params.max_tokens or 1
            tokens = draw_tokens(weights, prompt.tolist(), params.seed or 0, index, length)
            routes = route_tokens(weights, [*prompt.tolist(), *tokens])
            logprobs = np.full(length, score(weights), np.float32)
            array = np.asarray(tokens, np.int32)
            found.append(SampledSequence(array, logprobs, False, routes))
        return found

    async def compute_logprobs(
        self, snapshot: Snapshot, tokens: np.ndarray, *, top_k: int
    ) -> tuple[np.ndarray, TopLogprobs | None]:
        raise NotImplementedError


def _make_result(model: _Model, batch: LossBatch) -> TrainResult:
    recorded = sum(int(one.recorded.sum()) for one in batch.data)
    total = sum(len(one.recorded) for one in batch.data)
    routes = [one.routes for one in batch.data if one.routes is not None]
    versions = np.concatenate([one.versions for one in batch.data])
    ages = batch.version - versions[versions >= 0]
    metrics = {
        "routes/recorded:mean": recorded / total,
        "routes/sum:sum": float(sum(int(found.sum()) for found in routes)),
        "staleness:max": float(ages.max()) if len(ages) else -1.0,
        "version:unique": float(batch.version),
    }
    value = np.float32(score(model.weights))
    return TrainResult([np.full(len(one.versions), value) for one in batch.data], metrics)
