"""An engine whose versions are adapters beside its weights: requests keep theirs, and it holds what was published."""

import asyncio
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import pytest_asyncio
import torch

from r3async.config.learner import SERVED_MODULES, LoraConfig, is_served_module
from r3async.data.model_shape import parse_model_shape
from r3async.data.versions import VersionSpan
from r3async.rollout.engine import CorruptWeightsError, EngineError
from r3async.rollout.vllm.engine import AdapterSettings
from r3async.tools.adapted import count_slot_parameters
from r3async.weights.manifest import BASE_VERSION, AdapterFormat, WeightManifest
from r3async.weights.version_store import VersionStore
from tests.helpers.engine import TOLERANCE, Reference, prompt, request, revive, same_sets, sampled, started

pytestmark = pytest.mark.asyncio(loop_scope="session")

RANK, SLOTS = 3, 3
PREFIX = "base_model.model"


class Policies:
    """Versions of adapters of attention and of dense layers, and transformers' model with those of each merged."""

    def __init__(self, path: Path, publisher: VersionStore):
        self.path, self.publisher, self.version = path, publisher, -1
        self.base = publisher.write_tensors(BASE_VERSION, Reference(path).tensors(), torch.float32)
        self.merged: dict[int, Reference] = {}

    @torch.no_grad()
    def publish(self) -> WeightManifest:
        self.version += 1
        rng = torch.Generator().manual_seed(self.version)
        self.merged[self.version] = merged = Reference(self.path)
        factors = {}
        for name, parameter in merged.model.named_parameters():
            module = name.removesuffix(".weight")
            if is_served_module(module):
                rows, columns = parameter.shape
                a = torch.randn(RANK, columns, generator=rng) * 0.2
                b = torch.randn(rows, RANK, generator=rng) * 0.2
                parameter += b @ a
                factors |= {f"{PREFIX}.{module}.lora_A.weight": a, f"{PREFIX}.{module}.lora_B.weight": b}
        manifest = self.publisher.write_tensors(self.version, factors, torch.float32, [BASE_VERSION])
        return msgspec.structs.replace(manifest, adapter=AdapterFormat(RANK, self.base.digest))

    def check(self, ids: np.ndarray, generation) -> int:
        """Check log-probs and routes of an answer under one version, and return it."""
        (span,) = generation.version_spans
        assert span == VersionSpan(span.version, 0, len(generation.token_ids))
        everything = np.concatenate([ids, generation.token_ids])
        reference = self.merged[span.version]
        scores = reference.score(everything)[len(ids) - 1 :]
        assert np.abs(generation.logprobs - scores).max() < TOLERANCE
        assert same_sets(generation.routed_experts, reference.routes(everything)[:-1])
        return span.version


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(tiny_model):
    async with started(
        tiny_model,
        concurrency=16,
        gib=0.25,
        adapters=AdapterSettings(RANK, SERVED_MODULES, SLOTS),
        scheduler_cls="tests.helpers.scheduler.ObservedScheduler",
        worker_extension_cls="tests.helpers.scheduler.PlantingExtension",
    ) as engine:
        yield engine


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def policies(engine, tiny_model, tmp_path_factory):
    with VersionStore(tmp_path_factory.mktemp("published")) as publisher:
        policies = Policies(tiny_model, publisher)
        with pytest.raises(EngineError, match="does not hold the weights that they are added to"):
            await engine.install_version(policies.publish(), 30)
        await engine.install_version(policies.base, 60)
        assert engine.version == BASE_VERSION
        with pytest.raises(EngineError, match="no version of adapters yet"):
            await engine.generate(request(prompt(9), 5))
        yield policies


async def test_slots_have_the_memory_of_the_plan(engine, tiny_model):
    shape = parse_model_shape(json.loads((tiny_model / "config.json").read_text()))
    planned = SLOTS * 4 * count_slot_parameters(shape, LoraConfig(RANK), tp=1)
    assert await engine.core.collective_rpc("r3_adapter_bytes") == [planned]


async def test_requests_keep_the_version_that_they_began_with_across_three(engine, policies):
    """Nothing is marked, nothing begins again, and a new request has the newest version though others run."""
    ids = prompt(60, seed=3)
    before = engine.collect_stats()["restarted"]
    calls, first = [], policies.version + 1
    for number in range(3):
        report = await engine.install_version(policies.publish(), 30)
        assert 0 < report.load_seconds == report.pause_seconds < report.update_seconds
        calls.append(asyncio.create_task(engine.generate(request(ids, 300, f"keeps-{number}"))))
        await sampled(engine, f"keeps-{number}", 5)
    assert not any(call.done() for call in calls)
    found = [policies.check(ids, await call) for call in calls]
    assert found == [first, first + 1, first + 2]
    assert engine.collect_stats()["restarted"] == before
    # What no request needs is removed with the next version, and what may still be asked for stays.
    await engine.install_version(policies.publish(), 30)
    assert await engine.core.collective_rpc("r3_adapters") == [[first + 3, first + 4]]


async def test_more_versions_than_slots_wait_for_one_and_are_right(engine, policies):
    ids, calls = prompt(30, seed=4), []
    for number in range(SLOTS + 1):
        await engine.install_version(policies.publish(), 30)
        calls.append(asyncio.create_task(engine.generate(request(ids, 120, f"many-{number}"))))
        if number < SLOTS:
            await sampled(engine, f"many-{number}", 3)
    versions = [policies.check(ids, await call) for call in calls]
    assert versions == list(range(versions[0], versions[0] + SLOTS + 1))


@pytest.mark.parametrize("salted", [True, False])
async def test_no_prefix_of_another_versions_adapters_is_found(engine, policies, monkeypatch, salted):
    """vLLM's hash of a block has the adapters' name: not even without the salt."""
    if not salted:
        monkeypatch.setattr(engine, "_build_cache_salt", lambda version: "the same for every version")
    text = prompt(100, seed=9)
    await engine.install_version(policies.publish(), 30)
    await engine.count_stale_cached_tokens(text)
    again = await engine._run_single_text("again", np.resize(text, 100).tolist(), use_cache=True)
    assert again.cached_tokens >= engine.core.block_size
    await engine.install_version(policies.publish(), 30)
    assert await engine.count_stale_cached_tokens(text) == 0
    score = policies.merged[policies.version].score(text)
    assert np.abs(await engine.score_tokens(text) - score).max() < TOLERANCE


async def test_requests_name_versions_that_the_engine_keeps(engine, policies):
    ids = prompt(20, seed=6)
    published = []
    for _ in range(4):
        published.append(policies.publish())
        await engine.install_version(published[-1], 30)
        engine.installer.kept_versions = {published[0].version}
    first, second, _, last = (manifest.version for manifest in published)
    calls = [engine.generate(request(ids, 12, version=version)) for version in (first, last)]
    assert [policies.check(ids, answer) for answer in await asyncio.gather(*calls)] == [first, last]
    scores, top = await engine.score_alternatives(ids, version=first, top_logprobs=3)
    assert np.abs(scores - policies.merged[first].score(ids)).max() < TOLERANCE
    assert top.token_ids.shape == top.logprobs.shape == (len(ids) - 1, 3)
    with pytest.raises(EngineError, match=f"does not hold version {second}"):
        await engine.generate(request(ids, 12, version=second))
    engine.installer.kept_versions = set()
    await engine.install_version(policies.publish(), 30)
    with pytest.raises(EngineError, match=f"does not hold version {first}"):
        await engine.score_alternatives(ids, version=first)


async def test_a_seed_draws_the_same_tokens_and_the_most_likely_ones_are_those_of_a_second_pass(engine, policies):
    ids = prompt(20, seed=7)
    await engine.install_version(policies.publish(), 30)
    wider = asyncio.create_task(engine.generate(request(ids, 40, top_logprobs=20)))  # in the same steps
    calls = [engine.generate(request(ids, 12, seed=seed, top_logprobs=3)) for seed in (5, 5, 6)]
    first, again, other = await asyncio.gather(*calls)
    assert np.array_equal(first.token_ids, again.token_ids)
    assert not np.array_equal(first.token_ids, other.token_ids)
    whole = np.concatenate([ids, first.token_ids])
    _, scored = await engine.score_alternatives(whole, top_logprobs=3)
    assert np.array_equal(first.top_tokens.token_ids, scored.token_ids[len(ids) - 1 :])
    assert np.abs(first.top_tokens.logprobs - scored.logprobs[len(ids) - 1 :]).max() < TOLERANCE
    assert (await wider).top_tokens.token_ids.shape == (40, 20)
    assert (await engine.generate(request(ids, 3))).top_tokens is None


def flip_bit(manifest: WeightManifest) -> None:
    content = bytearray(Path(manifest.path).read_bytes())
    content[-3] ^= 4
    Path(manifest.path).write_bytes(content)


async def test_a_damaged_file_is_not_loaded_and_an_older_version_is_refused(engine, policies):
    kept, manifest = engine.version, policies.publish()
    flip_bit(manifest)
    with pytest.raises(CorruptWeightsError, match="is corrupt"):
        await engine.install_version(manifest, 30)
    assert engine.version == kept
    flip_bit(manifest)
    await engine.install_version(manifest, 30)
    assert policies.check(prompt(9), await engine.generate(request(prompt(9), 5))) == manifest.version
    await engine.install_version(policies.base, 30)  # it is here, and nothing happens
    assert engine.version == manifest.version
    with pytest.raises(EngineError, match="is older than the installed version"):
        await engine.install_version(msgspec.structs.replace(manifest, version=0), 30)


async def test_a_tensor_that_no_layer_applies_is_named(engine, policies):
    manifest = policies.publish()
    tensors = {f"{PREFIX}.model.layers.0.mlp.down_proj.lora_{s}.weight": torch.ones(3, 3) for s in "AB"}
    other = policies.publisher.write_tensors(policies.version + 1, tensors, torch.float32, [BASE_VERSION])
    policies.version += 1
    with pytest.raises(EngineError, match=r"does not hold tensor .*layers\.0\.mlp\.down_proj\.lora_A"):
        await engine.install_version(msgspec.structs.replace(other, adapter=manifest.adapter), 30)
    assert policies.check(prompt(9), await engine.generate(request(prompt(9), 5))) == engine.version


async def test_a_comparison_finds_what_was_changed_in_adapters_and_in_weights(engine, policies):
    manifest = policies.publish()
    await engine.install_version(manifest, 30)
    running = asyncio.create_task(engine.generate(request(prompt(9), 200, "compared")))
    await sampled(engine, "compared", 20)
    assert await engine.find_weight_differences(manifest, 60) == []
    assert not running.done()
    assert policies.check(prompt(9), await asyncio.wait_for(running, 120)) == manifest.version
    slots = engine.core.collective_rpc
    for module, tensor in (
        ("model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.q_proj"),
        ("model.layers.1.mlp.down_proj", "model.layers.1.mlp.down_proj"),
    ):
        for slot in range(SLOTS):
            await slots("r3_plant_in_adapter", args=(module, slot))
        found = await engine.find_weight_differences(manifest, 60)
        assert [(m.tensor, m.parameter, m.elements) for m in found] == [(f"{PREFIX}.{tensor}.lora_B.weight", module, 1)]
        await revive(engine)
        manifest = policies.publish()
        await engine.install_version(manifest, 30)
    await slots("r3_plant_in_weights", args=("model.layers.2.self_attn.o_proj.base_layer.weight",))
    (found,) = await engine.find_weight_differences(manifest, 60)
    assert (found.tensor, found.elements) == ("model.layers.2.self_attn.o_proj.weight", 1)
    await revive(engine)
