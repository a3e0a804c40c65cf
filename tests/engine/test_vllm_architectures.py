"""Architectures beside Qwen3-MoE on the engine: log-probs and routes are those of transformers, before an update and after."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from r3async.data.models import find_architecture
from r3async.rollout.engine import EngineError
from r3async.rollout.vllm.engine import VllmEngine
from r3async.weights.version_store import VersionStore
from tests.helpers import architectures as ha
from tests.helpers.engine import TOLERANCE, VOCABULARY, Reference, make_model, prompt, request, same_sets, started

SIZES = {"vocab_size": VOCABULARY, "max_position_embeddings": 1024, "hidden_size": 128, "intermediate_size": 128}
EXPERTS = {"moe_intermediate_size": 64}
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}
MORE = {
    "qwen3_moe": {"head_dim": 32} | EXPERTS,
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 64},
    "deepseek_v3": LATENT | EXPERTS,
    "glm4_moe": {"head_dim": 64} | EXPERTS,
    "qwen3": {"head_dim": 32},
    "gpt_oss": {"head_dim": 32},
    "llama/linear": {"hidden_size": 1024, "num_hidden_layers": 1},
}
"""The engine's kernels on CPU take heads of 32 values and more, of latent attention 576, and pad experts to a multiple of 32. An
output layer of 2^18 weights, which are the embedding's, is packed."""


def make(directory: Path, variant: str, seed: int) -> Path:
    """A model whose routers decide clearly."""
    ha.make_model(directory, variant, **(SIZES | MORE.get(variant, MORE.get(variant.partition("/")[0], {}))))
    file = directory / "model.safetensors"
    tensors, generator = load_file(file), torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if tensor.dim() > 1:
            std = 0.5 if name.endswith(("gate.weight", "router.weight")) else 0.1
            tensor.copy_(std * torch.randn(tensor.shape, generator=generator))
    save_file(tensors, file, metadata={"format": "pt"})
    for part in make_model(directory / "tokenizer").glob("tok*"):
        shutil.copy(part, directory)
    return directory


async def check(engine: VllmEngine, reference: Reference) -> None:
    ids = prompt(60, seed=1)
    generation = await engine.generate(request(ids, 12, f"of-{engine.version}"))
    everything = np.concatenate([ids, generation.token_ids])
    assert np.abs(generation.logprobs - reference.score(everything)[59:]).max() < TOLERANCE
    if engine.routing is not None:
        assert same_sets(generation.routed_experts, reference.routes(everything)[:-1])


PLAYED = [v for v in ha.ALL if not find_architecture(v.partition("/")[0]).engine_unsupported_reason]
EACH_TIME = ("deepseek_v3", "llama")
"""Sigmoid routers, and none. An engine starts for each: the others are nightly, and Qwen3-MoE is what all other files have."""


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(
    "variant", [v if v in EACH_TIME else pytest.param(v, marks=pytest.mark.nightly) for v in PLAYED]
)
async def test_log_probs_and_routes_are_those_of_transformers(tmp_path, variant):
    first, second = (make(tmp_path / str(seed), variant, seed) for seed in (0, 1))
    async with started(first, 128) as engine:
        await check(engine, Reference(first))
        reference = Reference(second)
        with VersionStore(tmp_path / "published") as publisher:
            await engine.install_version(publisher.write_tensors(0, reference.tensors(), torch.float32), 60)
            assert engine.version == 0
            await check(engine, reference)


@pytest.mark.nightly
@pytest.mark.asyncio(loop_scope="session")
async def test_gpt_oss_is_the_same_model_and_refuses_other_weights(tmp_path):
    """In bfloat16: vLLM's attention with sinks on CPU has no other precision. Over 72 tokens, so that windows of 8 cut. Once it
    takes other weights, nothing has to be refused any more."""
    path = make(tmp_path / "m", "gpt_oss", 0)
    async with started(path, 128, dtype="bfloat16") as engine:
        reference, ids = Reference(path), prompt(60, seed=1)
        generation = await engine.generate(request(ids, 12, "of--1"))
        everything = np.concatenate([ids, generation.token_ids])
        assert np.abs(generation.logprobs - reference.score(everything)[59:]).max() < 0.1
        assert (np.sort(generation.routed_experts, -1) == reference.routes(everything)[:-1]).all(-1).mean() > 0.95
        with VersionStore(tmp_path / "published") as publisher:
            with pytest.raises(EngineError, match=r"vLLM's loader left out 'model\.layers\.0\.attn'"):
                await engine.install_version(publisher.write_tensors(0, reference.tensors(), torch.bfloat16), 60)
