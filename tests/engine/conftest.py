"""What several modules of this folder begin with."""

import pytest
import pytest_asyncio

from r3async.weights.version_store import VersionStore
from tests.helpers.engine import Weights, make_model


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("other"), dense_layers=(1,), seed=1)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def weights(vllm_engine, tiny_model, other_model, tmp_path_factory):
    """The two models in turn, published for the suite's engine."""
    with VersionStore(tmp_path_factory.mktemp("published")) as publisher:
        yield Weights(tiny_model, other_model, publisher, vllm_engine.version)
