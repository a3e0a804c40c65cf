"""A plan loads what vLLM's own loader loads, bit by bit, in every kind of model that engines are tested with."""

from __future__ import annotations

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, OlmoeConfig, Qwen3MoeConfig

from r3async.rollout.vllm.engine import VllmEngine
from r3async.weights.publish import VersionStore
from tests.helpers.engine import prompt, request

pytestmark = pytest.mark.asyncio(loop_scope="session")

COMMON = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 257,
    "pad_token_id": 256,
}
QWEN = {"num_experts": 12, "moe_intermediate_size": 32, "norm_topk_prob": True}
MODELS = {
    "qwen3": (Qwen3MoeConfig(**COMMON, **QWEN, mlp_only_layers=[1]), "float32"),
    "qwen3-bfloat16": (Qwen3MoeConfig(**COMMON, **QWEN), "bfloat16"),
    "mixtral": (MixtralConfig(**COMMON, num_local_experts=4), "bfloat16"),
    "olmoe": (OlmoeConfig(**(COMMON | {"num_attention_heads": 2}), num_experts=8), "float32"),
}


def names_and_shapes(path) -> dict[str, tuple[int, ...]]:
    from safetensors import safe_open

    with safe_open(path / "model.safetensors", framework="pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def weights(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    "kind", [kind if kind == "qwen3" else pytest.param(kind, marks=pytest.mark.nightly) for kind in MODELS]
)
async def test_a_plan_loads_what_the_loader_loads(kind, tmp_path):
    config, dtype = MODELS[kind]
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    shapes = names_and_shapes(tmp_path / "model")
    engine = VllmEngine(
        str(tmp_path / "model"),
        dtype=dtype,
        concurrency=2,
        max_model_len=128,
        kv_cache_gib=0.1,
        engine_args={"worker_extension_cls": "tests.helpers.engine.ComparedExtension"},
    )
    await engine.start()
    try:
        with VersionStore(tmp_path / "published") as publisher:

            async def install(version: int) -> None:
                await engine.install_version(
                    publisher.write_tensors(version, weights(shapes, version), getattr(torch, dtype)), 60
                )

            await install(0)
            (loads,) = await engine._core.collective_rpc("r3_loads")
            assert loads == 1
            await install(1)
            await install(2)
            # Neither loaded, nor planned, once more.
            assert await engine._core.collective_rpc("r3_loads") == [1]
            (copies,) = await engine._core.collective_rpc("r3_copies")
            assert copies < len(shapes)
            (worked,) = await engine._core.collective_rpc("r3_worked")
            # Small matrices in single precision are not packed, hence filled where they are.
            assert bool(worked) == (dtype != "float32"), worked
            answer = await engine.generate(request(prompt(20), 5))
            assert len(answer.token_ids) == 5
            last = publisher.write_tensors(3, weights(shapes, 3), getattr(torch, dtype))
            await engine.install_version(last, 60)
            (by_plan,) = await engine._core.collective_rpc("r3_digests")
            await engine._core.collective_rpc("r3_load_as_vllm", args=(msgspec.msgpack.encode(last),))
            (by_loader,) = await engine._core.collective_rpc("r3_digests")
            assert by_plan == by_loader
            assert len(by_plan) > 10
            # Another order of the same tensors is another file, which has a plan of its own.
            turned = dict(reversed(weights(shapes, 3).items()))
            await engine.install_version(publisher.write_tensors(4, turned, getattr(torch, dtype)), 60)
            assert (await engine._core.collective_rpc("r3_digests")) == [by_plan]
            assert await engine._core.collective_rpc("r3_loads") == [3]
    finally:
        await engine.stop()
