"""Drift between engine and learner by what is replayed, and by the precision of their heads.

Real vLLM plays, and a learner of the same dtype scores the same tokens. With the engine's routes,
each of both computes its logits twice: rounded to that dtype, and as float32 sums. With float32
sums on both sides it scores without any replay, with routes, and with their gates as well. Models
are random, with routers that decide clearly. It is no part of the tests:

    python -m dev.bench.engine_drift --families qwen3_moe,olmoe --seeds 0,1,2

With `--int8` the engine's projections are rounded to 255 levels a row, as a quantized engine's are;
its activations are not.

Each line of JSON is one case of a family and seed: k3, mean and largest difference of log-probs in
nats, all over the sampled tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from r3async.config import config_from_dict
from r3async.config.generator import GeneratorConfig
from r3async.data.tokens import ROUTE_COLUMNS, Sample, TokenTable
from r3async.learner.micro_batches import pack_samples
from r3async.learner.torch.backend import TorchLearner
from r3async.rollout.engine import GenerationRequest
from r3async.rollout.vllm.engine import VllmEngine
from r3async.weights.version_store import VersionStore

if TYPE_CHECKING:
    from r3async.rollout.engine import Generation

VOCABULARY = 8192
PROMPTS = 12
PROMPT_TOKENS = 32
SAMPLED_TOKENS = 64
TIMEOUT = 120.0
HEADS = {"model": False, "float32": True}
REPLAYED: dict[str, tuple[str, ...]] = {
    "nothing": ROUTE_COLUMNS,
    "routes": ROUTE_COLUMNS[2:],
    "gates": (),
}
"""Columns that the learner does not see, by what it replays."""


def round_to_int8(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Return a projection with each row rounded to int8 times a float32 scale; another tensor as it
    is."""
    if "_proj" not in name or weight.ndim < 2:
        return weight
    scale = weight.float().abs().amax(dim=-1, keepdim=True) / torch.iinfo(torch.int8).max
    return (weight / scale).round().mul(scale).to(weight.dtype)


async def play_prompts(
    model: Path, learner: TorchLearner, seed: int, float32_head: bool, int8: bool
) -> list[Sample]:
    """Return samples of an engine with the learner's weights, or rounded ones, and its dtype."""
    dtype = learner.config.learner.dtype
    engine = VllmEngine(
        str(model),
        GeneratorConfig(dtype=dtype, concurrency=PROMPTS, kv_cache_gib=0.25),
        max_model_len=256,
        seed=seed,
        float32_head=float32_head,
        extra_records=["gates"],
    )
    await engine.start()
    try:
        with tempfile.TemporaryDirectory() as directory, VersionStore(Path(directory)) as store:
            exported = learner.export_weights()
            if int8:
                exported = {name: round_to_int8(name, w) for name, w in exported.items()}
            weights = store.write_tensors(0, exported, getattr(torch, dtype))
            await engine.install_version(weights, TIMEOUT)
            rng = np.random.default_rng(seed)
            prompts = rng.integers(0, 256, (PROMPTS, PROMPT_TOKENS)).astype(np.int32)
            requests = [
                GenerationRequest(f"request-{number}", prompt, SAMPLED_TOKENS)
                for number, prompt in enumerate(prompts)
            ]
            played = await asyncio.gather(*(engine.generate(request) for request in requests))
    finally:
        await engine.stop()
    return [
        make_sample(f"s{number}", prompt, generation)
        for number, (prompt, generation) in enumerate(zip(prompts, played, strict=True))
    ]


def make_sample(name: str, prompt: np.ndarray, generation: Generation) -> Sample:
    """Return the sample of a generation, with its routes and gates."""
    table = TokenTable.from_tokens(np.concatenate([prompt, generation.token_ids]))
    columns = {name: table[name] for name in table.schema.columns if name in table}
    columns["rollout_logprobs"][len(prompt) :] = generation.logprobs
    columns["loss_mask"][len(prompt) :] = True
    routes = generation.routed_experts
    if routes is not None:
        rows = np.tile(
            np.arange(routes.shape[2], dtype=routes.dtype), (len(table), routes.shape[1], 1)
        )
        rows[: len(routes)] = routes
        recorded = np.zeros(len(table), bool)
        recorded[: len(routes)] = True
        gates = np.zeros(rows.shape, np.float32)
        gates[: len(routes)] = generation.routed_weights
        columns |= {
            "routed_experts": rows,
            "routing_recorded": recorded,
            "routed_weights": gates,
        }
    return Sample(name, TokenTable(columns))


def measure_drift(
    learner: TorchLearner, samples: list[Sample], replayed: str, float32_head: bool
) -> dict[str, float]:
    """Return the drift of the sampled tokens, in nats."""
    learner.model.float32_head = float32_head
    seen = [Sample(s.sample_id, s.table.without_columns(*REPLAYED[replayed])) for s in samples]
    micro_batches = pack_samples(seen, 1024)
    differences = np.concatenate(
        [
            (scores - micro_batch.table["rollout_logprobs"])[micro_batch.table["loss_mask"]]
            for micro_batch, scores in zip(
                micro_batches, learner.logprobs(micro_batches), strict=True
            )
        ]
    ).astype(np.float64)
    return {
        "k3": float(np.mean(np.expm1(differences) - differences)),
        "mean": float(np.mean(np.abs(differences))),
        "largest": float(np.max(np.abs(differences))),
        "tokens": len(differences),
    }


def sharpen_head(model: Path, factor: float) -> None:
    """Multiply the output matrix of a model in one file: random ones make flat distributions."""
    file = model / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] *= factor
    save_file(tensors, file, {"format": "pt"})


def measure_model(family: str, seed: int, sharpness: float, dtype: str, int8: bool) -> None:
    """Print the cases of one model."""
    from tests.helpers.engine_models import make_engine_model

    with tempfile.TemporaryDirectory() as directory:
        model = make_engine_model(
            Path(directory) / "model", family, seed, dtype, vocab_size=VOCABULARY
        )
        sharpen_head(model, sharpness)
        config = config_from_dict({"learner": {"dtype": dtype, "backend": "torch"}})
        learner = TorchLearner.from_pretrained(config, model)
        for engine_head, engine_float32 in HEADS.items():
            samples = asyncio.run(play_prompts(model, learner, seed, engine_float32, int8))
            for learner_head, learner_float32 in HEADS.items():
                for replayed in REPLAYED if engine_float32 and learner_float32 else ("routes",):
                    case = {
                        "family": family,
                        "seed": seed,
                        "dtype": dtype,
                        "int8": int8,
                        "engine_head": engine_head,
                        "learner_head": learner_head,
                        "replayed": replayed,
                    }
                    figures = measure_drift(learner, samples, replayed, learner_float32)
                    print(json.dumps(case | figures), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", default="qwen3_moe,olmoe,deepseek_v3,qwen3_5_moe_text")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--sharpness", type=float, default=4.0)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--int8", action="store_true")
    args = parser.parse_args()
    for family in args.families.split(","):
        for seed in args.seeds.split(","):
            measure_model(family, int(seed), args.sharpness, args.dtype, args.int8)


if __name__ == "__main__":
    main()
