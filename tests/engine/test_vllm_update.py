"""New weights in the middle of an answer, by each `generator.on_update`; and an engine that does not have what it should."""

import asyncio
import statistics
import time

import numpy as np
import pytest

from r3async.data.versions import VersionSpan, expand_version_spans
from r3async.rollout.engine import EngineError
from r3async.rollout.vllm.version_installer import confirm_installed
from r3async.weights.manifest import WeightManifest
from tests.helpers.engine import TOLERANCE, prompt, replay_feeds, request, same_sets, sampled

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT, ANSWER = 140, 200
MODES = ["keep", "recompute", "drain"]


@pytest.fixture(params=MODES)
def mode(request, vllm_engine, monkeypatch):
    monkeypatch.setattr(vllm_engine.installer, "on_update", request.param)
    return request.param


async def test_both_sides_of_the_switch_are_those_of_their_version_and_new_requests_are_of_the_new_one_alone(
    vllm_engine, weights, mode
):
    await vllm_engine.install_version(weights.publish(), 30)
    manifest = weights.publish()
    old, new = manifest.version - 1, manifest.version
    ids = prompt(PROMPT, seed=5)
    neighbours = [asyncio.create_task(vllm_engine.generate(request(prompt(30 + i, i), 180))) for i in range(4)]
    call = asyncio.create_task(vllm_engine.generate(request(ids, ANSWER, f"middle-{mode}")))
    await sampled(vllm_engine, f"middle-{mode}", 60)
    install = asyncio.create_task(vllm_engine.install_version(manifest, 60))
    if mode == "drain":  # what comes now waits for the weights
        await asyncio.sleep(0.3)
    later = asyncio.create_task(vllm_engine.generate(request(ids, 20)))
    report = await install
    generation = await call
    assert report.version == vllm_engine.version == new
    versions = expand_version_spans(generation.version_spans, ANSWER)
    everything = np.concatenate([ids, generation.token_ids])
    known = len(everything) - 1
    if mode == "drain":
        assert generation.version_spans == [VersionSpan(old, 0, ANSWER)]
        assert report.drain_seconds > report.pause_seconds
        feeds = [(old, 0, known)]
    else:
        (first, second) = generation.version_spans
        assert (first.version, second.version) == (old, new)
        assert 60 <= first.stop < ANSWER
        fed = PROMPT + first.stop - 1
        # Onto the keys and values of the old weights, or all of it once more.
        feeds = [(old, 0, fed), (new, fed if mode == "keep" else 0, known)]
        wrong = [(old, 0, fed), (new, 0 if mode == "keep" else fed, known)]
        logprobs, _ = replay_feeds(weights.by_version, everything, wrong)
        assert np.abs(generation.logprobs - logprobs[PROMPT - 1 :]).max() > 100 * TOLERANCE
    logprobs, routes = replay_feeds(weights.by_version, everything, feeds)
    assert np.abs(generation.logprobs - logprobs[PROMPT - 1 :]).max() < TOLERANCE
    assert same_sets(generation.routed_experts, routes)
    assert (versions == old).any()

    waited = await later
    if mode == "drain":
        assert waited.version_spans == [VersionSpan(new, 0, 20)]
    await asyncio.gather(*neighbours)
    again = await vllm_engine.generate(request(ids, 40))
    everything = np.concatenate([ids, again.token_ids])
    assert np.abs(again.logprobs - weights.reference(new).score(everything)[PROMPT - 1 :]).max() < TOLERANCE
    assert same_sets(again.routed_experts, weights.reference(new).routes(everything)[:-1])


async def test_what_does_not_drain_in_time_leaves_the_old_version_and_goes_on(vllm_engine, weights, monkeypatch):
    monkeypatch.setattr(vllm_engine.installer, "on_update", "drain")
    old, manifest = vllm_engine.version, weights.publish()
    call = asyncio.create_task(vllm_engine.generate(request(prompt(9), 480, "endless")))
    await sampled(vllm_engine, "endless", 5)
    message = r'waited 0\.1 s \(supervise\.patience\) for 1 running .*on_update="keep"'
    with pytest.raises(EngineError, match=message):
        await vllm_engine.install_version(manifest, 0.1)
    assert vllm_engine.version == old
    assert len((await vllm_engine.generate(request(prompt(9), 5))).token_ids) == 5
    assert (await call).version_spans == [VersionSpan(old, 0, 480)]
    await vllm_engine.install_version(manifest, 30)
    assert vllm_engine.version == manifest.version


async def test_an_update_holds_sixteen_answers_up_for_less_time_than_they_take(vllm_engine, weights, mode):
    """Load included. Both are measured here, side by side: what a machine is capable of does not matter."""

    def answers():
        return [asyncio.create_task(vllm_engine.generate(request(prompt(20, i), 60))) for i in range(16)]

    reports, alone, before = [], [], vllm_engine.collect_stats()["pause_seconds"]
    for _ in range(7):
        began = time.perf_counter()
        await asyncio.gather(*answers())
        alone.append(time.perf_counter() - began)
        calls = answers()
        await asyncio.sleep(0.1)
        reports.append(await vllm_engine.install_version(weights.publish(), 60))
        await asyncio.gather(*calls)
    assert statistics.median(r.pause_seconds for r in reports) < statistics.median(alone)
    assert all(0 < r.load_seconds < r.pause_seconds for r in reports)
    total = sum(r.pause_seconds for r in reports)
    assert vllm_engine.collect_stats()["pause_seconds"] - before == pytest.approx(total)


async def test_a_prefix_cache_of_older_weights_is_found(vllm_engine, weights, monkeypatch):
    text = prompt(100, seed=9)
    assert await vllm_engine.count_stale_cached_tokens(text) == 0
    await vllm_engine.install_version(weights.publish(), 30)
    assert await vllm_engine.count_stale_cached_tokens(text) == 0
    monkeypatch.setattr(vllm_engine, "_build_cache_salt", lambda version: "the same for every version")
    for _ in range(2):
        await vllm_engine.install_version(weights.publish(), 30)
        stale = await vllm_engine.count_stale_cached_tokens(text)
    assert stale >= vllm_engine.core.block_size
    monkeypatch.setattr(
        vllm_engine.installer, "on_update", "recompute"
    )  # clears the cache: then the salt is not needed
    await vllm_engine.install_version(weights.publish(), 30)
    assert await vllm_engine.count_stale_cached_tokens(text) == 0


async def test_an_engine_that_holds_what_was_published_continues_after_a_comparison(vllm_engine, weights):
    """With the same weights to the bit; what runs meanwhile waits, and later versions are installed as ever."""
    manifest = weights.publish()
    await vllm_engine.install_version(manifest, 30)
    text = prompt(40)
    before = await vllm_engine.score_tokens(text)
    running = asyncio.create_task(vllm_engine.generate(request(prompt(9), ANSWER, "compared")))
    await sampled(vllm_engine, "compared", 20)
    assert await vllm_engine.find_weight_differences(manifest, 60) == []
    assert not running.done()
    assert len((await asyncio.wait_for(running, 120)).token_ids) == ANSWER
    assert np.array_equal(await vllm_engine.score_tokens(text), before)
    for _ in range(2):
        manifest = weights.publish()
        await vllm_engine.install_version(manifest, 30)
        expected = weights.reference(manifest.version).score(text)
        assert np.abs(await vllm_engine.score_tokens(text) - expected).max() < TOLERANCE
        assert await vllm_engine.find_weight_differences(manifest, 60) == []


async def test_a_worker_that_missed_an_update_is_named_by_what_it_says_it_holds():
    manifest = WeightManifest(version=1, path="", tensors={}, nbytes=0)
    with pytest.raises(EngineError, match="worker 1 holds version 0 and not version 1"):
        confirm_installed([(1, manifest.digest), (0, 5)], manifest)
    confirm_installed([[1, manifest.digest]] * 2, manifest)
