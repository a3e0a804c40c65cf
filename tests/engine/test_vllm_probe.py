"""The probe against real vLLM and a real learner: reported log-probs that are not those of sampling are found."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from r3async.learner.torch.backend import TorchLearner
from r3async.rollout.engines import sample_probe
from r3async.rollout.engines.vllm import VllmEngine
from r3async.weights.probe import compare_probe, compare_sampled, probe_text
from r3async.weights.publish import Publisher
from tests.helpers import torch as ht
from tests.helpers.engine import Reference

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEXT = np.frombuffer(probe_text(200).encode(), np.uint8).astype(np.int32)


@pytest.fixture(scope="module")
def learner(tiny_model):
    learner = TorchLearner.load(ht.settings(), tiny_model)
    yield learner
    learner.close()


def scores(learner, temperature: float) -> np.ndarray:
    return np.stack([learner.score(TEXT), learner.score(TEXT, temperature)])


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
async def test_what_is_sampled_is_what_the_learner_thinks_at_the_runs_temperature(
    vllm_engine, learner, tiny_model, tmp_path, temperature
):
    reference = Reference(tiny_model)
    with Publisher(tmp_path) as publisher:  # other tests may have left other weights
        version = vllm_engine.version + 1
        await vllm_engine.install(publisher.publish(version, reference.tensors(), torch.float32), 30)
    ours = scores(learner, temperature)
    assert np.abs(ours[1] - reference.score(TEXT, temperature)).max() < 1e-4
    result = compare_sampled(await sample_probe(vllm_engine, TEXT, temperature), ours, temperature, 1e-3)
    assert result.passed, result.describe_sampled(temperature)
    assert result.max_difference < 1e-3


async def test_log_probs_before_temperature_pass_a_probe_of_given_text_and_are_found_by_the_sampled_one(
    tiny_model, learner
):
    """A fault that the configuration would have refused."""
    engine = VllmEngine(
        str(tiny_model),
        dtype="float32",
        concurrency=16,
        max_model_len=256,
        kv_cache_gib=0.25,
        engine_args={"logprobs_mode": "raw_logprobs"},
    )
    await engine.start()
    try:
        assert compare_probe(TEXT.tolist(), learner.score(TEXT), await engine.score(TEXT), 1e-3).passed
        result = compare_sampled(await sample_probe(engine, TEXT, 0.7), scores(learner, 0.7), 0.7, 1e-3)
        assert not result.passed
        assert result.mean_difference > 0.05
        # At temperature 1 there is no difference to be found, and none to be afraid of.
        assert compare_sampled(await sample_probe(engine, TEXT, 1.0), scores(learner, 1.0), 1.0, 1e-3).passed
    finally:
        await engine.stop()
