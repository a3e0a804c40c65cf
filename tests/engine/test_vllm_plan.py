"""A plan loads what vLLM's own loader loads, bit by bit, in every kind of model that engines are tested with."""

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, OlmoeConfig, Qwen3MoeConfig

from r3async.rollout.vllm.engine import VllmEngine
from r3async.weights.manifest import WeightManifest
from r3async.weights.version_store import VersionStore
from tests.helpers.engine import Reference, prompt, request, started

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


async def check_plan(engine: VllmEngine, shapes: dict[str, tuple[int, ...]], dtype: str, directory) -> None:
    async def install(seed: int, turned: bool = False) -> WeightManifest:
        tensors = weights(shapes, seed)
        tensors = dict(reversed(tensors.items())) if turned else tensors
        manifest = publisher.write_tensors(engine.version + 1, tensors, getattr(torch, dtype))
        await engine.install_version(manifest, 60)
        return manifest

    async def ask(method: str, *args):
        (answer,) = await engine.core.collective_rpc(method, args=args)
        return answer

    with VersionStore(directory) as publisher:
        # Another order of the same tensors is another file, which has a plan of its own.
        await install(0, turned=True)
        loads = await ask("r3_loads")
        await install(0)
        assert await ask("r3_loads") == loads + 1
        await install(1)
        await install(2)
        # Neither loaded, nor planned, once more.
        assert await ask("r3_loads") == loads + 1
        assert await ask("r3_copies") < len(shapes)
        worked = await ask("r3_worked")
        # Small matrices in single precision are not packed, hence filled where they are.
        assert bool(worked) == (dtype != "float32"), worked
        answer = await engine.generate(request(prompt(20), 5))
        assert len(answer.token_ids) == 5
        last = await install(3)
        by_plan = await ask("r3_digests")
        await ask("r3_load_as_vllm", msgspec.msgpack.encode(last))
        assert await ask("r3_digests") == by_plan
        assert len(by_plan) > 10
        await install(3, turned=True)
        assert await ask("r3_digests") == by_plan
        assert await ask("r3_loads") == loads + 3


async def test_a_plan_loads_what_the_loader_loads(vllm_engine, tiny_model, tmp_path):
    await check_plan(vllm_engine, names_and_shapes(tiny_model), "float32", tmp_path / "published")
    with VersionStore(tmp_path / "after") as publisher:  # other tests take the engine as they find it
        tensors = Reference(tiny_model).tensors()
        manifest = publisher.write_tensors(vllm_engine.version + 1, tensors, torch.float32)
        await vllm_engine.install_version(manifest, 60)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", MODELS)
async def test_a_plan_loads_what_the_loader_loads_in_other_models(kind, tmp_path):
    config, dtype = MODELS[kind]
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    compared = {"worker_extension_cls": "tests.helpers.worker_extensions.ComparedExtension"}
    async with started(tmp_path / "model", 128, concurrency=2, dtype=dtype, **compared) as engine:
        await check_plan(engine, names_and_shapes(tmp_path / "model"), dtype, tmp_path / "published")
