"""Models with recurrent layers, and gpt-oss, on the engine: two updates under running requests leave what an engine that was
started with those weights holds, and what is left out of an update is found."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from r3async.config import config_from_dict
from r3async.data.model_shape import parse_model_shape
from r3async.rollout.vllm.core import CPU_BLOCK_TOKENS
from r3async.rollout.vllm.engine import VllmEngine
from r3async.tools.memory import estimate_engine_memory
from r3async.weights.manifest import WeightManifest
from r3async.weights.probe import ROUNDED_TOLERANCE, ProbeResult, compare_probe, make_probe_text
from r3async.weights.version_store import VersionStore
from tests.helpers.engine import OBSERVED, prompt, request, revive, sampled, started
from tests.helpers.engine_models import PlainModel, make_engine_model

pytestmark = pytest.mark.asyncio(loop_scope="session")

MEAN_TOLERANCE, SAME_SETS = 0.1, 0.8
"""What bfloat16 leaves: mean difference of log-probs, and the share of (token, layer) with the same experts. Other weights are
ten times as far away."""
ENGINE = {"dtype": "bfloat16", "enable_prefix_caching": True, "max_num_batched_tokens": 64, **OBSERVED}
"""Prompts are longer than what a step may feed."""
LAYER = "model.layers.0"
EXPERTS = f"{LAYER}.mlp.experts.routed_experts.w13_weight"
DELTA_NET = {
    f"{LAYER}.linear_attn.A_log": f"{LAYER}.linear_attn.A_log",
    f"{LAYER}.linear_attn.conv1d.weight": f"{LAYER}.linear_attn.conv1d.weight",
    f"{LAYER}.mlp.gate.weight": f"{LAYER}.mlp.gate.weight",
    EXPERTS: f"{LAYER}.mlp.experts.0.gate_proj.weight",
}
STALE = {
    "granitemoehybrid": {
        f"{LAYER}.mamba.A": f"{LAYER}.mamba.A",  # vLLM computes it, so it has no published name
        f"{LAYER}.mamba.conv_weights": f"{LAYER}.mamba.conv1d.weight",
        f"{LAYER}.block_sparse_moe.gate.weight": f"{LAYER}.block_sparse_moe.router.layer.weight",
        EXPERTS.replace("mlp", "block_sparse_moe"): f"{LAYER}.block_sparse_moe.input_linear.weight",
    },
    "qwen3_next": DELTA_NET,
    "qwen3_5_moe_text": DELTA_NET,
    "gpt_oss": {
        f"{LAYER}.attn.sinks": f"{LAYER}.self_attn.sinks",
        f"{LAYER}.mlp.router.weight": f"{LAYER}.mlp.router.weight",
        EXPERTS: f"{LAYER}.mlp.experts.gate_up_proj",
        EXPERTS.replace("w13_weight", "w2_bias"): f"{LAYER}.mlp.experts.down_proj_bias",
    },
}
"""What the last update leaves out, by the name of what holds it, and the name that it was published by."""
CONSTANTS = {f"{LAYER}.attn.rotary_emb.cos_sin_cache"}
"""Cosines of another process may differ in the last bit."""
TEXT = np.frombuffer(make_probe_text(200).encode(), np.uint8).astype(np.int32)


async def ask(engine: VllmEngine, method: str, *args: object):
    (answer,) = await engine.core.collective_rpc(method, args=args)
    return answer


def plan_episode_cache(model: Path) -> int:
    """Return the bytes of the cache for an episode as a plan says them, with the blocks that an engine has on CPU, and states in
    the dtype that this CPU's kernels take."""
    args = {"block_size": CPU_BLOCK_TOKENS}
    if torch.cpu._is_avx512_bf16_supported():
        args["mamba_ssm_cache_dtype"] = "float32"
    config = config_from_dict(
        {
            "episode": {"max_total_tokens": 512, "max_prompt_tokens": 64},
            "generator": {"dtype": "bfloat16", "engine_args": args},
        }
    )
    shape = parse_model_shape(json.loads((model / "config.json").read_text()))
    return estimate_engine_memory(shape, config).kv_per_episode


async def check(engine: VllmEngine, plain: PlainModel) -> None:
    """Check an answer, and its routes, to a prompt that takes several steps."""
    ids = prompt(150, seed=1)
    generation = await engine.generate(request(ids, 24, f"of-{engine.version}"))
    everything = np.concatenate([ids, generation.token_ids])
    logprobs, routes = plain.read(everything)
    assert np.abs(generation.logprobs - logprobs[149:]).mean() < MEAN_TOLERANCE
    assert generation.routed_experts.shape == routes[:-1].shape
    assert (np.sort(generation.routed_experts, -1) == routes[:-1]).all(-1).mean() > SAME_SETS


async def look(engine: VllmEngine) -> tuple[dict[str, int], np.ndarray]:
    """Return the digests of what an engine holds, and the scores of a text."""
    return await ask(engine, "r3_digests"), await engine.score_tokens(prompt(120, seed=3))


async def check_that_it_is_found(
    engine: VllmEngine, manifest: WeightManifest, plain: PlainModel, held: str, published: str
) -> None:
    """Leave a tensor out of the last update: digest, comparison and probe find it. Of few numbers, the probe may see too
    little."""

    async def probe() -> ProbeResult:
        return compare_probe(TEXT.tolist(), plain.read(TEXT)[0], await engine.score_tokens(TEXT), ROUNDED_TOLERANCE)

    before, sound = await ask(engine, "r3_digests"), await probe()
    assert sound.passed, sound.describe_scored()
    await ask(engine, "r3_put_back", held)
    after, stale = await ask(engine, "r3_digests"), await probe()
    assert held in {name for name, digest in after.items() if before[name] != digest}
    assert not stale.passed or held.endswith(("sinks", "bias")), (held, stale.describe_scored())
    found = await engine.find_weight_differences(manifest, 60)
    assert published in {mismatch.tensor for mismatch in found}
    await revive(engine)


@pytest.mark.parametrize(
    "family", [kind if kind == "granitemoehybrid" else pytest.param(kind, marks=pytest.mark.nightly) for kind in STALE]
)
async def test_updates_under_requests_leave_a_fresh_engine(tmp_path, family, monkeypatch):
    paths = [make_engine_model(tmp_path / str(seed), family, seed, "bfloat16") for seed in range(3)]
    plain = [PlainModel(path) for path in paths]
    async with started(paths[0], 512, **ENGINE) as engine:
        await check(engine, plain[0])
        taken = await ask(engine, "r3_cache_of_an_episode")
        planned = plan_episode_cache(paths[0])
        # A plan counts layers with a window as if they kept every token.
        assert taken < planned if family == "gpt_oss" else taken == planned
        with VersionStore(tmp_path / "published") as store:
            for version, mode in ((0, "keep"), (1, "recompute")):
                monkeypatch.setattr(engine.installer, "on_update", mode)
                manifest = store.write_tensors(version, plain[version + 1].tensors(), torch.bfloat16)
                name = f"running-{version}"
                running = [asyncio.create_task(engine.generate(request(prompt(40, seed=4), 120, name)))]
                await sampled(engine, name, 20)
                running.append(asyncio.create_task(engine.generate(request(prompt(150, seed=5), 60, f"{name}-too"))))
                await engine.install_version(manifest, 60)
                if not version:
                    await ask(engine, "r3_keep", list(STALE[family]))
                answers = await asyncio.gather(*running)
                assert [span.version for span in answers[0].version_spans] == [version - 1, version]
                await check(engine, plain[version + 1])
            updated = await look(engine)
            for held, published in STALE[family].items():
                await check_that_it_is_found(engine, manifest, plain[2], held, published)
            assert await ask(engine, "r3_digests") == updated[0]
    async with started(paths[2], 512, **ENGINE) as engine:
        fresh = await look(engine)
    assert {name for name in updated[0] if updated[0][name] != fresh[0].get(name)} <= CONSTANTS
    assert np.array_equal(updated[1], fresh[1])
