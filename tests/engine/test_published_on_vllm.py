"""Checkpoints in published forms on the engine: its log-probs are the learner's, from versions and from what is exported."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from r3async.actors.remote_generators import write_engine_model
from r3async.learner.micro_batches import pack_samples
from r3async.learner.torch.backend import TorchLearner
from r3async.rollout.vllm.engine import VllmEngine
from r3async.weights.version_store import VersionStore
from r3async.world.real import REAL_WORLD
from tests.helpers import architectures as ha
from tests.helpers import models as hm
from tests.helpers import published
from tests.helpers.engine import prompt, request, started
from tests.helpers.learner import fully_recorded
from tests.helpers.steps import train_minibatch
from tests.helpers.torch import settings

pytestmark = pytest.mark.engine
FP8 = {"hidden_size": 192, "head_dim": 32, "moe_intermediate_size": 160, "intermediate_size": 160}


def load_trained(path: Path, layers: int) -> TorchLearner:
    """Return a learner whose weights two minibatches have moved."""
    learner = TorchLearner.from_pretrained(settings(), path)
    samples = fully_recorded(hm.make_samples(1, [9, 30, 5], layers=layers))
    for _ in range(2):
        train_minibatch(learner, pack_samples(samples, 48))
    return learner


ROUNDING = 0.2
"""Mean difference of log-probs in bfloat16, where a few tokens may have other experts. Another model differs by more
than 1."""


async def compare(engine: VllmEngine, learner: TorchLearner, name: str) -> np.ndarray:
    """Return the differences of log-probs, `[12]`."""
    ids = prompt(60, seed=1) % hm.VOCAB
    generation = await engine.generate(request(ids, 12, name))
    scores = learner.score_sequence(np.concatenate([ids, generation.token_ids]))
    return np.abs(generation.logprobs - scores[59:])


@pytest.mark.asyncio(loop_scope="session")
async def test_an_engine_of_a_quantized_model_gets_its_weights_from_the_learner(tmp_path):
    path = ha.make_model(tmp_path / "m", "qwen3_moe", **FP8)
    published.quantize_to_fp8(path)
    learner = TorchLearner.from_pretrained(settings(), path)
    given = write_engine_model(REAL_WORLD, path, tmp_path / "run")
    with VersionStore(tmp_path / "versions") as store:
        async with started(given, 128) as engine:
            await engine.install_version(store.write_tensors(0, learner.export_weights(), torch.float32), 60)
            assert (await compare(engine, learner, "fp8")).max() < 1e-4


@pytest.mark.nightly
@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("form", ["fp8", "shards without an index"])
async def test_an_engine_loads_what_is_exported_of_a_published_form(tmp_path, form):
    path = ha.make_model(tmp_path / "m", "qwen3_moe", **FP8)
    if form == "fp8":
        published.quantize_to_fp8(path)
    else:
        published.split_files(path, has_index=False)
    learner = load_trained(path, ha.mixtures(path))
    learner.save_pretrained(tmp_path / "out")
    async with started(tmp_path / "out", 128) as engine:
        assert (await compare(engine, learner, form)).max() < 1e-4


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("is_fused", [True, pytest.param(False, marks=pytest.mark.nightly)])
async def test_the_text_of_a_model_with_vision_is_generated_and_updated(tmp_path, is_fused):
    # Without a layer that keeps a state vLLM 0.30 does not run this class.
    path = published.make_vision_model(
        tmp_path / "m", is_fused=is_fused, layer_types=["linear_attention", "full_attention"]
    )
    learner = load_trained(path, 2)
    learner.save_pretrained(tmp_path / "out")
    async with started(tmp_path / "out", 128, dtype="bfloat16") as engine:
        assert (await compare(engine, learner, "exported")).mean() < ROUNDING
        learner.model.causal_lm.lm_head.weight.data.mul_(-1)
        with VersionStore(tmp_path / "versions") as store:
            manifest = store.write_tensors(0, learner.export_weights(), torch.bfloat16)
            manifest = msgspec.structs.replace(manifest, carried=tuple(learner.carried))
            await engine.install_version(manifest, 60)
        assert (await compare(engine, learner, "updated")).mean() < ROUNDING
