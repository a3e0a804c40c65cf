"""Architectures beside Qwen3-MoE on the engine: log-probs and routes are those of transformers, before an update and after."""

import numpy as np
import pytest
import torch

from r3async.rollout.vllm.engine import VllmEngine
from r3async.weights.version_store import VersionStore
from tests.helpers import architectures as ha
from tests.helpers.engine import TOLERANCE, Reference, prompt, request, same_sets, started
from tests.helpers.engine_models import make_engine_model


async def check(engine: VllmEngine, reference: Reference) -> None:
    ids = prompt(60, seed=1)
    generation = await engine.generate(request(ids, 12, f"of-{engine.version}"))
    everything = np.concatenate([ids, generation.token_ids])
    assert np.abs(generation.logprobs - reference.score(everything)[59:]).max() < TOLERANCE
    if engine.routing is not None:
        assert same_sets(generation.routed_experts, reference.routes(everything)[:-1])


PLAYED = list(ha.VARIANTS)
EACH_TIME = ("deepseek_v3", "llama")
"""Sigmoid routers, and none. An engine starts for each: the others are nightly, and Qwen3-MoE is what all other files have."""


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(
    "variant", [v if v in EACH_TIME else pytest.param(v, marks=pytest.mark.nightly) for v in PLAYED]
)
async def test_log_probs_and_routes_are_those_of_transformers(tmp_path, variant):
    first, second = (make_engine_model(tmp_path / str(seed), variant, seed) for seed in (0, 1))
    async with started(first, 128) as engine:
        await check(engine, Reference(first))
        reference = Reference(second)
        with VersionStore(tmp_path / "published") as publisher:
            await engine.install_version(publisher.write_tensors(0, reference.tensors(), torch.float32), 60)
            assert engine.version == 0
            await check(engine, reference)
