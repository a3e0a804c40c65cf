"""GPU checks of vLLM: routes, log-probs, weight updates and speed, eager and with CUDA graphs.

Weights are updated under running requests, and the learner must agree with the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from r3async.config.generator import GeneratorConfig, UpdateHandling
from r3async.data.tokens import Sample, TokenTable
from r3async.learner.micro_batches import collate_samples
from r3async.rollout.engine import Generation, GenerationRequest
from r3async.rollout.vllm.engine import VllmEngine
from r3async.weights.version_store import VersionStore

from .learner import learner_of
from .place import TINY, Place

MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "synchronous": {"enforce_eager": True, "async_scheduling": False},
    "graphs": {"enforce_eager": False},
    "graphs-without-routes": {"enforce_eager": False, "enable_return_routed_experts": False},
}
VOCABULARY = TINY["vocab_size"]
TOP_K = TINY["num_experts_per_tok"]


def read_weights(model: Path) -> dict[str, Tensor]:
    return {
        name: tensor
        for file in sorted(model.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def engine_of(
    place: Place,
    model: Path,
    mode: str,
    *,
    concurrency: int = 64,
    on_update: UpdateHandling = "keep",
) -> VllmEngine:
    share = {} if place.small else {"gpu_memory_utilization": 0.5}
    return VllmEngine(
        str(model),
        GeneratorConfig(
            dtype=place.engine_dtype,
            concurrency=concurrency,
            kv_cache_gib=0.25,
            on_update=on_update,
            engine_args={**share, **MODES[mode]},
        ),
        max_model_len=1024,
        seed=1,
    )


def ask(number: int, prompt: int, answer: int, vocabulary: int = VOCABULARY) -> GenerationRequest:
    ids = np.random.default_rng(number).integers(0, vocabulary, prompt).astype(np.int32)
    return GenerationRequest(f"r{number}", ids, answer)


def generations(place: Place, *, mode: str) -> dict[str, Any]:
    """Generate answers with routes and log-probs, kept for `learner_agrees`. The engine
    rescores its own answer."""
    return asyncio.run(_generations(place, mode))


async def _generations(place: Place, mode: str) -> dict[str, Any]:
    engine = engine_of(place, place.model("tiny", place.engine_dtype), mode)
    began = time.monotonic()
    await engine.start()
    try:
        started = time.monotonic() - began
        asked = [ask(i, 16 + 7 * i % 90, 48) for i in range(6 if place.small else 48)]
        began = time.monotonic()
        answers = await asyncio.gather(*map(engine.generate, asked))
        seconds = time.monotonic() - began
        whole = np.concatenate([asked[0].prompt_ids, answers[0].token_ids])
        again = (await engine.score_tokens(whole))[len(asked[0].prompt_ids) - 1 :]
        unrecorded = engine.collect_stats()["unrecorded_rows"]
    finally:
        await engine.stop()
    arrays: dict[str, Any] = {}
    for i, (request, answer) in enumerate(zip(asked, answers, strict=True)):
        arrays |= {
            f"ids{i}": np.concatenate([request.prompt_ids, answer.token_ids]),
            f"logprobs{i}": answer.logprobs,
        }
        arrays[f"routes{i}"] = answer.routed_experts
    np.savez(place.out / f"generations-{mode}.npz", **arrays)
    found = _routes_of(asked, answers)
    return {
        "start_seconds": started,
        "tokens_per_second": sum(len(a.token_ids) for a in answers) / seconds,
        **found,
        "unrecorded": unrecorded,
        "own_score_difference": float(np.abs(again - answers[0].logprobs).mean()),
        "ok": not found["wrong_length"]
        and found["rows_of_first_experts"] < 0.05
        and not unrecorded,
    }


def _routes_of(asked: Sequence[GenerationRequest], answers: Sequence[Generation]) -> dict[str, Any]:
    """Summarise the routes of the answers.

    Buffers that were never written would have expert 0 everywhere; padding that was not cut off
    would give too many rows.
    """
    rows = [a.routed_experts for a in answers if a.routed_experts is not None]
    expected = [
        len(q.prompt_ids) + len(a.token_ids) - 1 for q, a in zip(asked, answers, strict=True)
    ]
    every = np.concatenate(rows)
    return {
        "rows": len(every),
        "wrong_length": sum(len(r) != n for r, n in zip(rows, expected, strict=True)),
        "rows_of_first_experts": float((np.sort(every, -1) == np.arange(TOP_K)).all(-1).mean()),
        "experts_seen": [len(np.unique(every[:, layer])) for layer in range(every.shape[1])],
    }


def learner_agrees(place: Place, *, mode: str, backend: str) -> dict[str, Any]:
    """Run the learner on the answers of `generations`: its routes, and log-probs with the
    engine's and own routes."""
    kept = np.load(place.out / f"generations-{mode}.npz")
    replayed = []
    own = []
    agreement = []
    settings = {"backend": backend, "dtype": place.engine_dtype}
    with learner_of(place.model("tiny", place.engine_dtype), 8192, **settings) as learner:
        for i in range(sum(name.startswith("ids") for name in kept.files)):
            ids, logprobs, routes = (kept[f"{name}{i}"] for name in ("ids", "logprobs", "routes"))
            rows = np.zeros((len(ids), *routes.shape[1:]), np.uint8)
            rows[: len(routes)] = routes
            rows[len(routes) :] = np.arange(routes.shape[2])
            table = TokenTable.from_tokens(ids.astype(np.int32)).with_columns(
                routed_experts=rows, routing_recorded=np.arange(len(ids)) < len(routes)
            )
            batch = collate_samples([Sample("s", table)])
            first = len(ids) - len(logprobs)
            replayed.append(np.abs(learner.logprobs([batch])[0][first:] - logprobs))
            own.append(np.abs(learner.logprobs([batch], replay=False)[0][first:] - logprobs))
            chosen = learner.record_learner_routes([batch])[0].table["routed_experts"][
                : len(routes)
            ]
            agreement.append((np.sort(chosen, -1) == np.sort(routes, -1)).all(-1).mean())
    mean = float(np.concatenate(replayed).mean())
    return {
        "replayed_mean": mean,
        "replayed_max": float(np.concatenate(replayed).max()),
        "own_routes_mean": float(np.concatenate(own).mean()),
        "agreement": float(np.mean(agreement)),
        "ok": mean < 0.05 and float(np.mean(agreement)) > 0.85,
    }


def updates(place: Place, *, mode: str, on_update: UpdateHandling) -> dict[str, Any]:
    """Install six versions under running requests: durations, the version of every token, and the
    state afterwards."""
    return asyncio.run(_updates(place, mode, on_update))


async def _updates(place: Place, mode: str, on_update: UpdateHandling) -> dict[str, Any]:
    paths = [place.model("tiny", place.engine_dtype, seed) for seed in (0, 1)]
    weights = [read_weights(path) for path in paths]
    engine = engine_of(place, paths[0], mode, on_update=on_update)
    await engine.start()
    text = np.random.default_rng(9).integers(0, VOCABULARY, 200).astype(np.int32)
    scores = [await engine.score_tokens(text)]
    loads = []
    pauses = []
    wrong = 0
    dtype = getattr(torch, place.engine_dtype)
    try:
        with VersionStore(place.out / "published") as publisher:
            for version in range(6):
                asked = [
                    ask(100 * version + i, 20, 60 if place.small else 300)
                    for i in range(4 if place.small else 24)
                ]
                running = [asyncio.create_task(engine.generate(request)) for request in asked]
                await asyncio.sleep(0.4)
                manifest = publisher.write_tensors(version, weights[version % 2], dtype)
                report = await engine.install_version(manifest, 120.0)
                loads.append(report.load_seconds)
                pauses.append(report.pause_seconds)
                for answer in await asyncio.gather(*running):
                    spans = sum(span.stop - span.start for span in answer.version_spans)
                    routes = answer.routed_experts
                    wrong += (
                        spans != len(answer.token_ids)
                        or routes is None
                        or len(routes) != 19 + len(answer.token_ids)
                    )
                if version < 2:
                    scores.append(await engine.score_tokens(text))
            stale = await engine.count_stale_cached_tokens(text)
            different = await engine.find_weight_differences(manifest, 120.0)
    finally:
        await engine.stop()
    back, moved = (float(np.abs(score - scores[0]).mean()) for score in scores[1:])
    return {
        "load_seconds": loads,
        "pause_seconds": pauses,
        "wrong_answers": wrong,
        "same_weights_moved": back,
        "other_weights_moved": moved,
        "stale_cache": stale,
        "differences": len(different),
        "ok": not wrong and back < 1e-3 and moved > 0.01 and not different and not stale,
    }


def throughput(place: Place, *, mode: str, concurrency: int) -> dict[str, Any]:
    """Measure tokens per second of four layers of Qwen3-30B-A3B, and the time to
    install their weights."""
    return asyncio.run(_throughput(place, mode, 4 if place.small else concurrency))


async def _throughput(place: Place, mode: str, concurrency: int) -> dict[str, Any]:
    model = place.model("layers-of-30b", place.engine_dtype)
    engine = engine_of(place, model, mode, concurrency=concurrency)
    began = time.monotonic()
    await engine.start()
    try:
        started = time.monotonic() - began
        answer = 8 if place.small else 256
        seconds = 0.0
        for again in range(2):  # the first one compiles
            began = time.monotonic()
            asked = [ask(i + 1000 * again, 128, answer, 1000) for i in range(concurrency)]
            answers = await asyncio.gather(*map(engine.generate, asked))
            seconds = time.monotonic() - began
        installed = await _installed(place, engine, model)
    finally:
        await engine.stop()
    made = sum(len(a.token_ids) for a in answers)
    return {
        "start_seconds": started,
        "tokens_per_second": made / seconds,
        "ms_per_step": 1e3 * seconds / answer,
        **installed,
        "ok": made == concurrency * answer,
    }


async def _installed(place: Place, engine: VllmEngine, model: Path) -> dict[str, Any]:
    weights = read_weights(model)
    with VersionStore(place.out / "published") as publisher:
        manifest = publisher.write_tensors(0, weights, getattr(torch, place.engine_dtype))
        report = await engine.install_version(manifest, 300.0)
    return {
        "installed_gib": manifest.nbytes / 2**30,
        "load_seconds": report.load_seconds,
        "pause_seconds": report.pause_seconds,
    }
