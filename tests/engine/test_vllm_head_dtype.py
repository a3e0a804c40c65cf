"""The engine's head in float32: its log-probs are those of its own last hidden states, to float32's precision."""

import pytest
import torch
from safetensors.torch import load_file

from r3async.config.generator import GeneratorConfig
from r3async.rollout.vllm.engine import VllmEngine
from tests.helpers.engine import VOCABULARY, prompt
from tests.helpers.engine_models import make_engine_model

pytestmark = pytest.mark.engine


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(
    ("changes", "float32_head"),
    [
        ({}, True),
        ({"hidden_size": 1024, "num_hidden_layers": 1, "mlp_only_layers": [], "tie_word_embeddings": True}, True),
        ({}, False),
    ],
    ids=["float32", "packed and tied", "rounded"],
)
async def test_log_probs_are_of_float32_logits(tmp_path, changes, float32_head):
    model = make_engine_model(tmp_path / "model", "qwen3_moe", 0, "bfloat16", **changes)
    engine = VllmEngine(
        str(model),
        GeneratorConfig(dtype="bfloat16", concurrency=2, kv_cache_gib=0.1),
        max_model_len=128,
        float32_head=float32_head,
    )
    await engine.start()
    try:
        ids = prompt(60, seed=1) % VOCABULARY
        logprobs, dtype = await engine.record_activations(ids, tmp_path / "stages")
    finally:
        await engine.stop()
    assert dtype == "bfloat16"
    tensors = load_file(model / "model.safetensors")
    matrix = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).float()
    hidden = load_file(tmp_path / "stages")["final_norm.out"].float()
    exact = (hidden[:-1] @ matrix.T).log_softmax(-1).gather(1, torch.from_numpy(ids[1:]).long()[:, None])[:, 0]
    difference = (torch.from_numpy(logprobs) - exact).abs().max()
    assert difference < 1e-4 if float32_head else difference > 1e-3
