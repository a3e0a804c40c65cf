"""The vLLM engine against transformers: what it says it sampled, with what, and by which weights."""

import asyncio
import gc
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from r3async.data.model_shape import RoutingShape
from r3async.data.versions import expand_version_spans
from r3async.rollout.engine import EngineError
from r3async.rollout.vllm.cpu_patches import NORM_KERNELS
from r3async.rollout.vllm.engine import COLLECTOR_THRESHOLD
from tests.helpers.engine import END, OBSERVED, TOLERANCE, Reference, prompt, replay, request, same_sets, started

pytestmark = pytest.mark.asyncio(loop_scope="session")


def flip_a_bit(path: Path, tensor: torch.Tensor) -> None:
    content, inside = bytearray(path.read_bytes()), tensor.numpy().tobytes()
    content[content.index(inside) + len(inside) // 2] ^= 64
    path.write_bytes(content)


@pytest.fixture
def current(vllm_engine, weights) -> Reference:
    """transformers with the weights that the engine has now."""
    return weights.reference(vllm_engine.version)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
async def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(vllm_engine, current, temperature):
    ids = prompt(40)
    generation = await vllm_engine.generate(request(ids, 60, temperature=temperature))
    assert generation.stop_reason == "length"
    assert len(generation.token_ids) == 60
    expected = current.score(np.concatenate([ids, generation.token_ids]), temperature)[39:]
    assert np.abs(generation.logprobs - expected).max() < TOLERANCE
    assert generation.token_ids.dtype == np.int32
    assert generation.logprobs.dtype == np.float32


async def test_the_collector_looks_rarely_at_what_reference_counts_free(vllm_engine):
    assert gc.get_threshold()[0] == COLLECTOR_THRESHOLD


async def test_norms_are_computed_by_vllms_kernels(vllm_engine):
    assert await vllm_engine.core.collective_rpc("r3_norm_providers") == [[[NORM_KERNELS, "native"]] * 2]


async def test_the_cache_is_no_larger_than_what_all_requests_fill_twice(vllm_engine):
    (whole,) = await vllm_engine.core.collective_rpc("r3_cache_bytes")
    (episode,) = await vllm_engine.core.collective_rpc("r3_cache_of_an_episode")
    assert whole == 2 * 32 * episode < 2**28


async def test_a_cache_whose_size_was_chosen_has_it(tiny_model):
    async with started(tiny_model, concurrency=1, **OBSERVED, kv_cache_memory_bytes=2**26) as engine:
        (whole,) = await engine.core.collective_rpc("r3_cache_bytes")
    assert 2**25 < whole <= 2**26


async def test_routes_are_those_of_the_router_for_moe_layers_only(vllm_engine, current):
    assert vllm_engine.routing == RoutingShape(layers=2, top_k=2, num_experts=8)
    ids = prompt(200, seed=1)
    generation = await vllm_engine.generate(request(ids, 30))
    expected = current.routes(np.concatenate([ids, generation.token_ids]))[:-1]
    assert generation.routed_experts.dtype == np.uint8
    assert same_sets(generation.routed_experts, expected)


@pytest.mark.parametrize(("first", "tokens"), [(0, 1), (17, 5), (199, 1), (200, 4), (200, 1)])
async def test_routes_begin_where_they_are_asked_for(vllm_engine, current, first, tokens):
    ids = prompt(200, seed=1)
    generation = await vllm_engine.generate(request(ids, tokens, routes_from=first))
    expected = current.routes(np.concatenate([ids, generation.token_ids]))[first:-1]
    assert same_sets(generation.routed_experts, expected)


async def test_the_second_turn_gives_the_rows_that_the_first_did_not(vllm_engine, current):
    first = prompt(150, seed=2)
    one = await vllm_engine.generate(request(first, 20))
    second = np.concatenate([first, one.token_ids, prompt(30, seed=3)])
    fed = len(first) + 20 - 1
    two = await vllm_engine.generate(request(second, 20, routes_from=fed))
    everything = np.concatenate([second, two.token_ids])
    assert np.abs(two.logprobs - current.score(everything)[len(second) - 1 :]).max() < TOLERANCE
    assert same_sets(np.concatenate([one.routed_experts, two.routed_experts]), current.routes(everything)[:-1])


async def test_many_requests_at_once(vllm_engine, current):
    prompts = [prompt(5 + 7 * i, seed=i) for i in range(48)]
    generations = await asyncio.gather(
        *(vllm_engine.generate(request(ids, 3 + i % 40, f"many-{i}")) for i, ids in enumerate(prompts))
    )
    for i, (ids, generation) in enumerate(zip(prompts, generations, strict=True)):
        everything = np.concatenate([ids, generation.token_ids])
        assert len(generation.token_ids) == 3 + i % 40
        assert np.abs(generation.logprobs - current.score(everything)[len(ids) - 1 :]).max() < TOLERANCE
        assert same_sets(generation.routed_experts, current.routes(everything)[:-1])
    assert vllm_engine.collect_stats()["running"] == 0


async def test_only_the_requests_stop_tokens_end_it(vllm_engine):
    before = vllm_engine.collect_stats()["generated_tokens"]
    stop = tuple(range(0, 264, 4))
    generation = await vllm_engine.generate(request(prompt(10), 200, stop_token_ids=stop))
    assert generation.stop_reason == "stop"
    assert generation.token_ids[-1] in stop
    assert not set(generation.token_ids[:-1].tolist()) & set(stop)
    assert len(generation.routed_experts) == 10 + len(generation.token_ids) - 1
    assert vllm_engine.collect_stats()["generated_tokens"] == before + len(generation.token_ids)
    generations = await asyncio.gather(*(vllm_engine.generate(request(prompt(10), 200)) for _ in range(8)))
    assert all(len(g.token_ids) == 200 for g in generations)
    assert any(END in g.token_ids for g in generations)


async def test_greedy_answers_are_the_likeliest_tokens_and_all_the_same(vllm_engine, current):
    ids = prompt(20, seed=7)
    made = await asyncio.gather(
        *(vllm_engine.generate(request(ids, 12, f"greedy-{n}", temperature=0)) for n in range(4))
    )
    assert len({tuple(g.token_ids.tolist()) for g in made}) == 1
    assert all(np.isfinite(g.logprobs).all() for g in made)
    tokens = made[0].token_ids
    first = [await vllm_engine.score_tokens(np.append(ids, np.int32(token))) for token in (int(tokens[0]), 5, 17, 99)]
    assert max(scores[-1] for scores in first) == first[0][-1]


async def test_score_ignores_caches_and_temperature(vllm_engine, current):
    ids = prompt(300, seed=4)
    await vllm_engine.generate(request(ids, 2, temperature=0.5))
    for _ in range(2):
        scores = await vllm_engine.score_tokens(ids)
        assert scores.dtype == np.float32
        assert np.abs(scores - current.score(ids)).max() < TOLERANCE


async def test_versions_are_exact_to_the_token(vllm_engine, weights):
    """On both sides of each boundary the log-probs and routes are those of the version that the span names."""
    first_version = vllm_engine.version
    ids = [prompt(20 + i, seed=20 + i) for i in range(6)]
    tasks = [asyncio.create_task(vllm_engine.generate(request(p, 250, f"spans-{i}"))) for i, p in enumerate(ids)]
    for _ in range(3):
        await asyncio.sleep(0.12)
        report = await vllm_engine.install_version(weights.publish(), 30)
        assert report.version == vllm_engine.version == weights.version
        assert 0 < report.pause_seconds < report.update_seconds
    generations = await asyncio.gather(*tasks)
    boundaries = 0
    for p, generation in zip(ids, generations, strict=True):
        versions = expand_version_spans(generation.version_spans, 250)
        assert versions[0] == first_version
        logprobs, routes = replay(weights.by_version, p, generation.token_ids, versions)
        assert np.abs(generation.logprobs - logprobs).max() < TOLERANCE
        assert same_sets(generation.routed_experts, routes)
        for span in generation.version_spans[1:]:
            boundaries += 1
            early, late = versions.copy(), versions.copy()
            early[span.start - 1], late[span.start] = span.version, versions[span.start - 1]
            for wrong in (early, late):  # One token off would be seen.
                logprobs, _ = replay(weights.by_version, p, generation.token_ids, wrong)
                assert np.abs(generation.logprobs - logprobs).max() > 100 * TOLERANCE
    assert boundaries >= 6


async def test_a_new_request_never_sees_an_older_versions_cache(vllm_engine, weights):
    ids = prompt(300, seed=5)
    for _ in range(2):
        await vllm_engine.generate(request(ids, 2))
        await vllm_engine.install_version(weights.publish(), 30)
        generation = await vllm_engine.generate(request(ids, 10))
        everything = np.concatenate([ids, generation.token_ids])
        reference = weights.reference(weights.version)
        assert {s.version for s in generation.version_spans} == {weights.version}
        assert np.abs(generation.logprobs - reference.score(everything)[299:]).max() < TOLERANCE
        assert same_sets(generation.routed_experts, reference.routes(everything)[:-1])


async def test_requests_that_come_and_go_during_installations(vllm_engine, weights):
    """Before, in and after a pause, waiting, half prefilled or running: every number belongs to its version."""
    finished = []

    async def play(worker: int) -> None:
        for i in range(4):
            ids = prompt(4 + 37 * ((worker + i) % 9), seed=7)
            finished.append((ids, await vllm_engine.generate(request(ids, 1 + (worker * 5 + i) % 24))))

    players = [asyncio.create_task(play(worker)) for worker in range(36)]
    while not all(player.done() for player in players):
        await vllm_engine.install_version(weights.publish(), 30)
        await asyncio.sleep(0.03)
    await asyncio.gather(*players)
    several = 0
    for ids, generation in finished:
        versions = expand_version_spans(generation.version_spans, len(generation.token_ids))
        several += len(generation.version_spans) > 1
        logprobs, routes = replay(weights.by_version, ids, generation.token_ids, versions)
        assert np.abs(generation.logprobs - logprobs).max() < TOLERANCE
        assert same_sets(generation.routed_experts, routes)
    assert several > 10
    assert len({s.version for _, g in finished for s in g.version_spans}) > 4


async def test_weights_that_do_not_verify_are_refused_and_the_old_ones_stay(vllm_engine, weights, current):
    version = vllm_engine.version
    manifest = weights.publish()
    name = "model.layers.2.mlp.experts.5.down_proj.weight"
    flip_a_bit(Path(manifest.path), weights.reference(manifest.version).tensors()[name])
    with pytest.raises(EngineError, match=f"tensor '{name}' is corrupt"):
        await vllm_engine.install_version(manifest, 30)
    del manifest.tensors["model.norm.weight"]
    with pytest.raises(EngineError, match=r"tensor 'model\.norm\.weight' is missing"):
        await vllm_engine.install_version(manifest, 30)
    assert vllm_engine.version == version
    ids = prompt(50)
    assert np.abs(await vllm_engine.score_tokens(ids) - current.score(ids)).max() < TOLERANCE


async def test_versions_do_not_go_back(vllm_engine, weights):
    await vllm_engine.install_version(weights.publish(), 30)
    older = msgspec.structs.replace(weights.publish(), version=0)
    with pytest.raises(EngineError, match="version 0 is older than the installed"):
        await vllm_engine.install_version(older, 30)


async def test_cancelling_aborts_and_aborting_returns_what_there_is(vllm_engine, current):
    tasks = [asyncio.create_task(vllm_engine.generate(request(prompt(9, i), 480, f"long-{i}"))) for i in range(4)]
    await asyncio.sleep(0.2)
    for task in tasks[:3]:
        task.cancel()
    assert [type(e) for e in await asyncio.gather(*tasks[:3], return_exceptions=True)] == [asyncio.CancelledError] * 3
    assert vllm_engine.collect_stats()["running"] == 1
    await vllm_engine.abort_request("long-3")
    generation = await asyncio.wait_for(tasks[3], 120)
    assert generation.stop_reason == "abort"
    assert 0 < len(generation.token_ids) < 480
    everything = np.concatenate([prompt(9, 3), generation.token_ids])
    assert np.abs(generation.logprobs - current.score(everything)[8:]).max() < TOLERANCE
    assert same_sets(generation.routed_experts, current.routes(everything)[:-1])


@pytest.mark.parametrize("bad", [request(prompt(600), 5), request(prompt(10), 5, routes_from=11)])
async def test_a_refused_request_does_not_hurt_the_engine(vllm_engine, bad):
    with pytest.raises(EngineError, match="request"):
        await vllm_engine.generate(bad)
    assert len((await vllm_engine.generate(request(prompt(10), 5))).token_ids) == 5


async def test_the_environment_is_as_before(vllm_engine):
    assert not [n for n in os.environ if n.startswith("VLLM_")]
    assert "TORCH_COMPILE_DISABLE" not in os.environ
    assert "tcmalloc" not in os.environ.get("LD_PRELOAD", "")
