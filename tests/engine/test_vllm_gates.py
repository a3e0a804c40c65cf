"""Gates of real vLLM: those that multiply the experts' outputs, bit by bit, with and without its prefix cache."""

import json

import numpy as np
import pytest
from safetensors.torch import load_file

from r3async.config.generator import GeneratorConfig
from r3async.rollout.engine import GenerationRequest
from r3async.rollout.vllm.engine import VllmEngine
from tests.helpers.engine import prompt
from tests.helpers.engine_models import make_engine_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.mark.parametrize(("family", "dtype"), [("qwen3_moe", "float32"), ("deepseek_v3", "bfloat16")])
async def test_gates_are_what_outputs_of_experts_are_multiplied_by(tmp_path, family, dtype):
    """DeepSeek's are multiplied by a constant after their sum."""
    model = make_engine_model(tmp_path / "model", family, 0, dtype)
    settings = GeneratorConfig(dtype=dtype, concurrency=2, kv_cache_gib=0.1)
    engine = VllmEngine(str(model), settings, max_model_len=256, seed=0, extra_records=("gates",))
    await engine.start()
    try:
        ids = prompt(100, seed=1) % 97
        first = await engine.generate(GenerationRequest("first", ids, 20))
        whole = np.concatenate([ids, first.token_ids, ids[:9]])
        later = await engine.generate(GenerationRequest("later", whole, 2))
        await engine.record_activations(ids, tmp_path / "stages")
    finally:
        await engine.stop()
    shape = (engine.routing.layers, engine.routing.top_k)
    assert first.routed_weights.shape == first.routed_experts.shape == (len(ids) + 19, *shape)
    assert later.routed_weights.shape == later.routed_experts.shape == (len(whole) + 1, *shape)
    # The prefix cache served these to the second call.
    cached = (len(ids) + 19) // 32 * 32
    assert np.array_equal(later.routed_weights[:cached], first.routed_weights[:cached])
    scale = json.loads((model / "config.json").read_text()).get("routed_scaling_factor", 1.0)
    assert (scale == 1.0) == (family == "qwen3_moe")
    stages = load_file(tmp_path / "stages")
    gates = [tensor for name, tensor in sorted(stages.items()) if name.endswith(".gates.out")]
    chosen = [tensor for name, tensor in sorted(stages.items()) if name.endswith(".choice.out")]
    assert len(gates) == engine.routing.layers
    for column, (used, ids_used) in enumerate(zip(gates, chosen, strict=True)):
        assert np.array_equal(first.routed_experts[: len(ids), column], ids_used.numpy())
        assert np.array_equal(first.routed_weights[: len(ids), column], used.numpy() * np.float32(scale))
