"""Settings and fixtures that the whole suite shares."""

from __future__ import annotations

import os

import pytest
import pytest_asyncio

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Directory of a tiny random Qwen3-MoE whose second layer is dense."""
    from tests.helpers_engine import make_model

    return make_model(tmp_path_factory.mktemp("model"), dense_layers=(1,), seed=0)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm_engine(tiny_model):
    """The suite's one vLLM engine, 32 requests at once. Its tests run in the session's event loop."""
    from r3async.engines.vllm import VllmEngine

    engine = VllmEngine(str(tiny_model), dtype="float32", concurrency=32, max_model_len=512, kv_cache_gib=0.25)
    await engine.start()
    yield engine
    await engine.stop()


def _ranks(world, tmp_path_factory):
    from tests.helpers_ranks import Ranks

    ranks = Ranks(world, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory):
    """Two processes in a gloo process group."""
    yield from _ranks(2, tmp_path_factory)


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory):
    """Four processes in a gloo process group."""
    yield from _ranks(4, tmp_path_factory)
