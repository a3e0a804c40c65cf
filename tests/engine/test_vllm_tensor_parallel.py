"""An engine of two workers: tokens, log-probs and routes are those of one, before new weights and after."""

import asyncio

import numpy as np
import pytest
import pytest_asyncio

from r3async.rollout.vllm.engine import VllmEngine
from r3async.weights.version_store import VersionStore
from tests.helpers.engine import TOLERANCE, Reference, Weights, make_model, prompt, request, same_sets, started

pytestmark = pytest.mark.asyncio(loop_scope="session")
WIDTH = 64
"""Of an expert: what each worker has of it must be a multiple of 32."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(tmp_path_factory):
    model = make_model(tmp_path_factory.mktemp("halves"), dense_layers=(1,), expert_hidden_size=WIDTH)
    async with started(model, 256, tensor_parallel_size=2) as engine:
        yield engine


async def agrees(engine: VllmEngine, reference: Reference, seed: int) -> None:
    ids = [prompt(40 + 7 * i, seed=seed + i) for i in range(3)]
    asked = [engine.generate(request(some, 20, name=f"{seed} {i}")) for i, some in enumerate(ids)]
    for some, generation in zip(ids, await asyncio.wait_for(asyncio.gather(*asked), 120), strict=True):
        whole = np.concatenate([some, generation.token_ids])
        assert np.abs(generation.logprobs - reference.score(whole)[len(some) - 1 :]).max() < TOLERANCE
        assert same_sets(generation.routed_experts, reference.routes(whole)[:-1])


async def test_two_workers_say_what_one_would_and_take_new_weights(engine, tmp_path_factory):
    other = make_model(tmp_path_factory.mktemp("other"), dense_layers=(1,), expert_hidden_size=WIDTH, seed=1)
    assert len(engine.process_ids) > 2
    with VersionStore(tmp_path_factory.mktemp("published")) as publisher:
        weights = Weights(engine.engine_args["model"], other, publisher, engine.version)
        await agrees(engine, weights.reference(-1), 0)
        for _ in range(3):  # vLLM's loader, its copies by plan, and those once more
            manifest = weights.publish()
            await asyncio.wait_for(engine.install_version(manifest, timeout=100), 120)
            await agrees(engine, weights.reference(manifest.version), 10 * manifest.version + 10)
