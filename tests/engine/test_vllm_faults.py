"""One engine with one fault after the other, which no configuration would let it have: each is found, and named."""

import asyncio

import numpy as np
import psutil
import pytest
import pytest_asyncio

from r3async.config.generator import GeneratorConfig
from r3async.learner.torch.backend import TorchLearner
from r3async.rollout.engine import EngineError, EngineLostError, sample_probe
from r3async.rollout.vllm.engine import VllmEngine
from r3async.weights.probe import compare_probe, compare_sampled_probe
from r3async.weights.version_store import VersionStore
from tests.engine.test_vllm_probe import TEXT, scores
from tests.helpers import torch as ht
from tests.helpers.engine import TOLERANCE, Weights, prompt, request, revive, started

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def faulty(tiny_model):
    planting = {
        "worker_extension_cls": "tests.helpers.worker_extensions.FaultyExtension",
        "logprobs_mode": "raw_logprobs",
    }
    async with started(tiny_model, concurrency=16, gib=0.25, **planting) as engine:
        yield engine


@pytest.fixture(scope="module")
def weights(faulty, tiny_model, other_model, tmp_path_factory):
    with VersionStore(tmp_path_factory.mktemp("published")) as publisher:
        yield Weights(tiny_model, other_model, publisher, faulty.version)


async def plant(engine: VllmEngine, fault: str) -> None:
    await revive(engine)
    await engine.core.collective_rpc("r3_plant", args=(fault,))


async def test_what_vllms_processes_leave_is_in_the_directory_that_ends_with_the_engine(faulty):
    names = [path.name for path in faulty.core._scratch.directory.iterdir()]
    assert any(name.startswith("vllm_dist_") for name in names), names


async def test_log_probs_before_temperature_pass_a_probe_of_given_text_and_are_found_by_the_sampled_one(
    faulty, weights, tiny_model
):
    await faulty.install_version(weights.publish(), 30)
    await faulty.install_version(weights.publish(), 30)
    learner = TorchLearner.from_pretrained(ht.settings(), tiny_model)
    try:
        given = learner.score_sequence(TEXT), await faulty.score_tokens(TEXT)
        assert compare_probe(TEXT.tolist(), *given, 1e-3).passed
        result = compare_sampled_probe(await sample_probe(faulty, TEXT, 0.7), scores(learner, 0.7), 0.7, 1e-3)
        assert not result.passed
        assert result.mean_difference > 0.05
        # At temperature 1 there is no difference to be found, and none to be afraid of.
        assert compare_sampled_probe(await sample_probe(faulty, TEXT, 1.0), scores(learner, 1.0), 1.0, 1e-3).passed
    finally:
        learner.close()


async def test_what_an_engine_does_not_hold_is_named_to_the_tensor(faulty, weights):
    """After the checksums: the worker was given other bytes. vLLM has packed and fused them by then."""
    await plant(faulty, "flipped")
    manifest = weights.publish()
    await faulty.install_version(manifest, 30)
    found = await faulty.find_weight_differences(manifest, 60)
    expected = {
        "model.layers.0.mlp.experts.3.up_proj.weight": ("w13_weight", 1),
        "model.layers.2.self_attn.k_proj.weight": ("qkv_proj.weight", 1),
        "model.norm.weight": ("model.norm.weight", 1),
    }
    assert {d.tensor for d in found} == set(expected)
    for difference in found:
        parameter, elements = expected[difference.tensor]
        assert difference.parameter.endswith(parameter)
        assert difference.elements == elements
    with pytest.raises(EngineError, match="must be restarted"):
        await faulty.generate(request(prompt(9), 5))


async def test_a_broken_installation_is_seen_by_the_score_and_a_failed_one_ends_the_engine(faulty, weights, tiny_model):
    """The last test of this file: the engine has no process after it."""
    unstarted = VllmEngine(
        str(tiny_model), GeneratorConfig(dtype="float32", concurrency=4, kv_cache_gib=0.25), max_model_len=512
    )
    with pytest.raises(EngineError, match="has not been started"):
        await unstarted.generate(request(prompt(4), 4))
    await plant(faulty, "")
    ids, manifest = prompt(60), weights.publish()
    await faulty.install_version(manifest, 30)
    expected = weights.reference(manifest.version).score(ids)
    assert np.abs(await faulty.score_tokens(ids) - expected).max() < TOLERANCE
    await plant(faulty, "unfinished")
    manifest = weights.publish()
    await faulty.install_version(manifest, 30)
    expected = weights.reference(manifest.version).score(ids)
    assert np.abs(await faulty.score_tokens(ids) - expected).mean() > 0.1
    await plant(faulty, "lost")
    running = asyncio.create_task(faulty.generate(request(prompt(4), 500)))
    await asyncio.sleep(0.1)
    manifest = weights.publish()
    message = rf"installing version {manifest.version} failed: .*lost half-way.* must be restarted"
    with pytest.raises(EngineError, match=message):
        await faulty.install_version(manifest, 30)
    for call in (
        running,
        faulty.generate(request(prompt(4), 4)),
        faulty.score_tokens(ids),
        faulty.install_version(manifest, 5),
    ):
        with pytest.raises(EngineLostError, match="lost half-way"):
            await asyncio.wait_for(call, 120)
    await faulty.stop()
    assert faulty.process_ids
    assert not any(psutil.pid_exists(pid) for pid in faulty.process_ids)
