"""The engine of `bench replay-map` differs from the learner as vLLM does, with the same noise in the routers of both."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from dev.bench.replay_engine import BatchEngine
from dev.bench.replay_map import Setting, config_of
from dev.bench.replay_report import RandomModel, k3
from dev.bench.replay_rollouts import make_random_model
from dev.bench.replay_training import tables_of
from r3async.data.tokens import Sample
from r3async.learner.batch import pack_samples
from r3async.learner.torch.backend import TorchLearner
from r3async.rollout.engine import GenerationRequest
from r3async.rollout.samples import SampleBuilder
from r3async.rollout.vllm.engine import VllmEngine
from tests.helpers.router_noise import NOISE

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

PROMPTS, PROMPT_TOKENS, NEW = 96, 8, 24


class Apart(NamedTuple):
    """k3 of the engine to the learner with the engine's routes and with the learner's own, and the share of equal choices."""

    replayed: float
    own: float
    agreement: float


def apart(learner: TorchLearner, samples: list[Sample]) -> Apart:
    micro_batches = pack_samples(samples, 8192)
    found = []
    for replay in (True, False):
        scored = zip(learner.logprobs(micro_batches, replay=replay), micro_batches, strict=True)
        deltas = [(s.astype(np.float64) - m.table["rollout_logprobs"])[m.table["loss_mask"]] for s, m in scored]
        found.append(k3(np.concatenate(deltas)))
    equal = []
    for recorded, own in zip(micro_batches, learner.record_learner_routes(micro_batches), strict=True):
        rows = recorded.table["routing_recorded"]
        a, b = (np.sort(m.table["routed_experts"][rows], axis=-1) for m in (recorded, own))
        equal.append((a == b).all(axis=-1))
    return Apart(*found, float(np.concatenate(equal).mean()))


def of_vllm(path: Path, prompts: np.ndarray) -> list[Sample]:
    async def sample() -> list[Sample]:
        engine = VllmEngine(
            str(path),
            dtype="float32",
            concurrency=32,
            max_model_len=64,
            kv_cache_gib=0.25,
            engine_args={"seed": 3, "worker_extension_cls": "tests.helpers.router_noise.NoisyRouters"},
        )
        await engine.start()
        try:

            async def one(index: int) -> Sample:
                builder = SampleBuilder(engine.routing)
                builder.append_context(prompts[index])
                generation = await engine.generate(GenerationRequest(f"s{index}", prompts[index], NEW))
                builder.append_answer(0, generation)
                return Sample(f"s{index}", builder.build_table())

            return await asyncio.gather(*map(one, range(len(prompts))))
        finally:
            await engine.stop()

    return asyncio.run(sample())


def test_both_engines_are_equally_far_from_the_learner(tmp_path: Path) -> None:
    shape = RandomModel(layers=4, experts=8, top_k=2)
    make_random_model(tmp_path / "model", shape)
    learner = TorchLearner.from_pretrained(config_of(Setting(), "rollout", 0), tmp_path / "model")
    prompts = np.random.default_rng(0).integers(0, learner.vocab_size, (PROMPTS, PROMPT_TOKENS)).astype(np.int32)
    theirs = apart(learner, of_vllm(tmp_path / "model", prompts))

    engine = BatchEngine(learner.model.causal_lm, precision="float32", noise=NOISE, seed=0)
    engine.load(dict(learner.model.causal_lm.named_parameters()))
    tables = tables_of(prompts, engine.answer(prompts, NEW, [-1]), 0, [0.0] * PROMPTS)
    ours = apart(learner, [Sample(f"s{i}", table) for i, table in enumerate(tables)])

    print(f"vLLM {theirs}, in this process {ours}")
    assert ours.agreement == pytest.approx(theirs.agreement, abs=0.02)
    assert ours.own == pytest.approx(theirs.own, rel=0.35)
    assert ours.replayed == pytest.approx(theirs.replayed, rel=0.35)
    assert theirs.replayed < theirs.own / 2
