"""`r3async diagnose` on real vLLM: planted faults are located, and a sound engine is left alone."""

import pytest
import pytest_asyncio

from r3async.config import config_from_dict
from r3async.learner import build_learner
from r3async.tools.diagnose.command import make_prompt
from r3async.tools.diagnose.diagnosis import examine_outputs
from r3async.tools.diagnose.reference import ReferenceModel
from r3async.tools.diagnose.witnesses import observe_engine
from tests.helpers import mismatches as hf
from tests.helpers.engine import revive, started
from tests.helpers.engine_mismatches import IN_ENGINE

pytestmark = pytest.mark.asyncio(loop_scope="module")


CONFIG = config_from_dict(
    {
        "learner": {"backend": "torch", "dtype": "float32"},
        "generator": {"dtype": "float32", "kv_cache_gib": 0.1},
        "episode": {"temperature": 0.8, "max_total_tokens": 512, "max_prompt_tokens": 256},
    }
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return hf.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(model):
    return ReferenceModel(model)


@pytest.fixture(scope="module")
def tensors(model):
    learner = build_learner(CONFIG, model, frozen=True)
    yield learner.export_weights()
    learner.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model):
    async with started(model, worker_extension_cls="tests.helpers.engine_mismatches.PlantingExtension") as engine:
        yield engine


async def seen(engine, reference, tensors, model, tmp_path):
    await revive(engine)  # it does not hold what it was given, but here all of it is loaded each time
    prompt = make_prompt(model, CONFIG, 264)
    side = await observe_engine(engine, CONFIG, tensors, prompt, tmp_path)
    return examine_outputs(reference, side.outputs)


@pytest.mark.parametrize("fault", IN_ENGINE, ids=lambda f: f.name.replace(" ", "-"))
async def test_a_fault_in_vllm_is_located(engine, reference, tensors, model, tmp_path, fault):
    await engine.core.collective_rpc("r3_plant", args=(fault.name,))
    try:
        hf.check_first(await seen(engine, reference, tensors, model, tmp_path), fault)
    finally:
        await engine.core.collective_rpc("r3_heal")


async def test_sound_vllm_is_left_alone(engine, reference, tensors, model, tmp_path):
    assert await seen(engine, reference, tensors, model, tmp_path) == []


async def test_keys_of_older_weights_in_the_prefix_cache_are_reported(
    engine, reference, tensors, model, tmp_path, monkeypatch
):
    monkeypatch.setattr(engine, "_build_cache_salt", lambda version: "one salt for all versions")
    hf.check_first(
        await seen(engine, reference, tensors, model, tmp_path),
        hf.Fault("", "sampling", [-1], "from a prefix cache that older weights made"),
    )


async def test_columns_of_routes_that_are_read_as_other_layers_are_reported(
    engine, reference, tensors, model, tmp_path, monkeypatch
):
    monkeypatch.setattr(engine, "_moe_layers", engine._moe_layers[::-1])
    hf.check_first(
        await seen(engine, reference, tensors, model, tmp_path),
        hf.Fault("", "routes", [0, 2]),
    )
