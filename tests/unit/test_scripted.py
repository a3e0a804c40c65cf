"""Scripted engine and learner keep the promises of `Engine` and `LearnerBackend`, so that tests built on them prove something."""

import asyncio
import contextlib
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from r3async.actors.rank_actor import LocalRank
from r3async.checkpoint.rank_files import LearnerStateReader, write_rank_file
from r3async.config import ConfigError, load_config
from r3async.data.model_shape import RoutingShape
from r3async.data.routes import validate_routes
from r3async.data.versions import expand_version_spans
from r3async.learner import LearnerError, build_learner
from r3async.learner.backend import LearnerBackend
from r3async.learner.micro_batches import MicroBatch
from r3async.rollout import build_engine
from r3async.rollout.engine import EngineError, GenerationRequest, sample_probe
from r3async.rollout.scripted import (
    DIGEST_TENSOR,
    LETTER_TOKEN_IDS,
    SCRIPTED_ROUTING,
    ScriptedEngine,
    scripted_logprobs,
)
from r3async.weights.manifest import WeightManifest
from r3async.weights.probe import compare_probe, compare_sampled_probe
from r3async.weights.version_store import VersionStore
from tests.helpers import models as hm
from tests.helpers.parity import batch, config
from tests.helpers.scripted import scripted_logprob, scripted_routes
from tests.helpers.serving import make_scripted_engine
from tests.helpers.steps import train_minibatch
from tests.helpers.world import Clock, Outside

PROMPT = np.asarray([5, 6, 7], np.int32)


class Gate:
    """A pace that lets tokens through one by one."""

    def __init__(self):
        self._semaphore = asyncio.Semaphore(0)

    async def __call__(self) -> None:
        async with asyncio.timeout(120):
            await self._semaphore.acquire()

    async def let(self, tokens: int) -> None:
        for _ in range(tokens):
            self._semaphore.release()
        for _ in range(20):
            await asyncio.sleep(0)


def manifest(version: int) -> WeightManifest:
    return WeightManifest(version=version, path="", tensors={}, nbytes=0)


async def started(script, **options) -> ScriptedEngine:
    engine = make_scripted_engine(script, **options)
    await engine.start()
    return engine


def request(max_tokens: int = 10, **values) -> GenerationRequest:
    return GenerationRequest("r", PROMPT, max_tokens, **values)


@pytest.mark.parametrize(
    ("answer", "max_tokens", "expected", "reason"),
    [
        ([1, 2, 9, 3], 10, [1, 2, 9], "stop"),
        ([1, 2, 3, 4], 2, [1, 2], "length"),
        ([1, 2], 10, [1, 2], "stop"),
        ([1, 9], 2, [1, 9], "stop"),
        ([], 2, [], "stop"),
    ],
)
async def test_answers_end_at_a_stop_token_or_the_limit(answer, max_tokens, expected, reason):
    engine = await started([answer])
    generation = await engine.generate(request(max_tokens, stop_token_ids=(9,)))
    assert generation.token_ids.tolist() == expected
    assert generation.token_ids.dtype == np.int32
    assert generation.logprobs.dtype == np.float32
    assert generation.stop_reason == reason


async def test_scripts_are_functions_of_the_call_or_tables():
    engine = await started(lambda request, index: [index, len(request.prompt_ids)])
    assert [(await engine.generate(request())).token_ids.tolist() for _ in range(2)] == [[0, 3], [1, 3]]
    assert len(engine.requests) == 2
    engine = await started([[1], [2]])
    assert [(await engine.generate(request())).token_ids.tolist() for _ in range(3)] == [[1], [2], [1]]


async def test_numbers_depend_on_position_version_and_token_only():
    first, second = await started([[4, 5]]), await started([[9], [4, 5]])
    await second.generate(request())
    a, b = await first.generate(request()), await second.generate(request())
    assert a.logprobs.tolist() == b.logprobs.tolist()
    assert np.array_equal(a.routed_experts, b.routed_experts)
    assert a.logprobs[1] == pytest.approx(scripted_logprob(4, -1, 5))
    assert a.routed_experts[3].tolist() == scripted_routes(3, -1, 4, SCRIPTED_ROUTING)
    assert len({scripted_logprob(p, v, t) for p in range(20) for v in range(5) for t in range(20)}) == 2000
    assert (await first.score_tokens(np.asarray([5, 6, 7, 4]))).tolist() == pytest.approx(
        [scripted_logprob(1, -1, 6), scripted_logprob(2, -1, 7), scripted_logprob(3, -1, 4)]
    )


@pytest.mark.parametrize("shape", [RoutingShape(3, 2, 8), RoutingShape(2, 8, 8), RoutingShape(1, 4, 300)])
async def test_routes_are_valid_and_begin_where_asked(shape):
    engine = await started([list(range(50))], routing=shape)
    everything = (await engine.generate(request(50))).routed_experts
    assert everything.shape == (3 + 50 - 1, shape.layers, shape.top_k)
    assert everything.dtype == (np.uint8 if shape.num_experts <= 256 else np.uint16)
    validate_routes(everything, layers=shape.layers, top_k=shape.top_k, num_experts=shape.num_experts)
    for first in (1, 3):
        rows = (await engine.generate(request(50, routes_from=first))).routed_experts
        assert np.array_equal(rows, everything[first:])


async def test_an_installation_in_the_middle_of_an_answer_splits_its_spans():
    gate = Gate()
    engine = await started([[1, 2, 3, 4, 5]], before_token=gate)
    running = asyncio.create_task(engine.generate(request()))
    await gate.let(2)
    assert (await engine.install_version(manifest(0), 1.0)).version == engine.version == 0
    await gate.let(1)
    await engine.install_version(manifest(3), 1.0)
    await gate.let(2)
    generation = await asyncio.wait_for(running, 120)
    versions = expand_version_spans(generation.version_spans, 5)
    assert versions.tolist() == [-1, -1, 0, 3, 3]
    assert generation.logprobs.tolist() == pytest.approx(
        [scripted_logprob(3 + i, v, i + 1) for i, v in enumerate(versions.tolist())]
    )
    # Token i is fed by the step that samples token i + 1, under its version.
    assert generation.routed_experts[4].tolist() == scripted_routes(4, 0, 2, SCRIPTED_ROUTING)
    assert engine.installed_versions == [0, 3]


async def test_nothing_is_sampled_while_weights_are_installed():
    gate, loading = Gate(), asyncio.Event()

    async def slow(manifest):
        await loading.wait()

    engine = await started([[1, 2, 3]], before_token=gate, before_install=slow)
    running = asyncio.create_task(engine.generate(request()))
    await gate.let(1)
    installing = asyncio.create_task(engine.install_version(manifest(0), 5.0))
    await gate.let(2)
    assert not running.done()
    loading.set()
    await asyncio.wait_for(installing, 120)
    generation = await asyncio.wait_for(running, 120)
    assert expand_version_spans(generation.version_spans, 3).tolist() == [-1, 0, 0]


async def test_abort_returns_what_was_sampled_and_cancel_nothing():
    gate = Gate()
    engine = await started([[1, 2, 3, 4]], before_token=gate)
    running = asyncio.create_task(engine.generate(request()))
    await gate.let(2)
    await engine.abort_request("r")
    await gate.let(1)
    generation = await asyncio.wait_for(running, 120)
    assert (generation.token_ids.tolist(), generation.stop_reason) == ([1, 2], "abort")
    assert len(generation.routed_experts) == 3 + 2 - 1
    running = asyncio.create_task(engine.generate(request()))
    await gate.let(1)
    assert engine.collect_stats()["running"] == 1
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert engine.collect_stats() == {"running": 0, "generated_tokens": 2, "pause_seconds": 0.0}


async def test_failures_are_engine_errors():
    async def broken(manifest):
        raise OSError("no such file")

    engine = make_scripted_engine([[1]], before_install=broken)
    with pytest.raises(EngineError, match="not running"):
        await engine.generate(request())
    await engine.start()
    with pytest.raises(EngineError, match="installing version 1 failed: OSError"):
        await engine.install_version(manifest(1), 1.0)
    with pytest.raises(EngineError, match="not running"):
        await engine.generate(request())
    engine = await started([[1]])
    await engine.install_version(manifest(2), 1.0)
    with pytest.raises(EngineError, match="version 1 is older"):
        await engine.install_version(manifest(1), 1.0)
    await engine.stop()
    with pytest.raises(EngineError, match="not running"):
        await engine.score_tokens(PROMPT)


async def test_an_answer_may_take_as_long_as_a_function_says_and_weights_come_in_its_middle():
    clock, loading = Clock(), asyncio.Event()

    async def load(manifest):
        clock.now += 5.0
        await loading.wait()

    engine = await started([list(range(1, 11))] * 2, token_seconds=0.1, world=Outside(clock))
    first = asyncio.create_task(engine.generate(request(20)))
    await asyncio.sleep(0)
    clock.now = 0.4
    engine.before_install = load
    installing = asyncio.create_task(engine.install_version(manifest(3), 5))
    await asyncio.sleep(0.2)  # the loop's clock goes on, and the engine's stands
    second = asyncio.create_task(engine.generate(request(20)))
    await asyncio.sleep(0)
    assert not first.done()
    loading.set()
    assert (await installing).pause_seconds == 5.0
    await asyncio.sleep(0.2)
    assert not first.done()
    clock.now = 6.5
    a, b = await asyncio.wait_for(asyncio.gather(first, second), 120)
    assert [(s.version, s.start, s.stop) for s in a.version_spans] == [(-1, 0, 4), (3, 4, 10)]
    assert a.routed_experts[0].tolist() == scripted_routes(0, -1, 5, SCRIPTED_ROUTING)
    assert [(s.version, s.start, s.stop) for s in b.version_spans] == [(3, 0, 10)]
    assert b.routed_experts[0].tolist() == scripted_routes(0, 3, 5, SCRIPTED_ROUTING)
    assert engine.collect_stats()["generated_tokens"] == 20


async def test_an_answer_that_takes_time_is_aborted_with_what_was_sampled_and_ends_with_the_engine():
    clock = Clock()
    engine = await started([list(range(1, 11))] * 2, token_seconds=0.1, world=Outside(clock))
    first = asyncio.create_task(engine.generate(request(20)))
    await asyncio.sleep(0)
    clock.now = 0.3
    await engine.abort_request("r")
    generation = await asyncio.wait_for(first, 120)
    assert (generation.token_ids.tolist(), generation.stop_reason) == ([1, 2, 3], "abort")
    second = asyncio.create_task(engine.generate(request(20)))
    await asyncio.sleep(0)
    await engine.stop()
    with pytest.raises(EngineError, match="not running"):
        await asyncio.wait_for(second, 120)


async def test_a_run_can_have_an_engine_without_vllm_whose_routes_fit_the_model(tmp_path):
    geometry = {"num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 3, "mlp_only_layers": [0]}
    (tmp_path / "config.json").write_text(json.dumps(geometry))
    config = load_config("quickstart", ["generator.engine=scripted", "weights.probe=false"])
    engines = [build_engine(config, str(tmp_path), seed) for seed in (1, 2)]
    answers = []
    for engine in engines:
        await engine.start()
        await engine.install_version(WeightManifest(version=0, path="", tensors={}, nbytes=0), timeout=1)
        prompt = np.asarray([5, 6], np.int32)
        requests = [GenerationRequest(name, prompt, max_tokens=50, stop_token_ids=(257,)) for name in "abca"]
        generations = [await engine.generate(request) for request in requests]
        answers.append([g.token_ids.tolist() for g in generations])
        for generation in generations:
            assert generation.routed_experts.shape == (1 + len(generation.token_ids), 2, 2)
            assert generation.stop_reason in ("stop", "length")
            assert set(generation.token_ids.tolist()) <= {*LETTER_TOKEN_IDS, 257}
        assert engine.requests == []  # a long run asks millions
    # An episode that is played again, by whomever, is the same: what a resumed run trains can be compared.
    assert answers[0] == answers[1]
    assert answers[0][0] == answers[0][3]
    assert len({tuple(answer) for answer in answers[0]}) == 3


def test_an_engine_without_weights_refuses_a_probe_and_settings_of_another(tmp_path):
    with pytest.raises(ConfigError, match=r"weights\.probe"):
        load_config("quickstart", ["generator.engine=scripted"])
    args = "generator.engine_args={ block_size = 16 }"
    config = load_config("quickstart", ["generator.engine=scripted", "weights.probe=false", args])
    with pytest.raises(
        ValueError, match="'block_size': the scripted engine knows `token_seconds` and `install_seconds` only"
    ):
        build_engine(config, str(tmp_path), 0)


def test_it_installs_the_bytes_of_the_file_and_refuses_those_that_were_not_published(tmp_path):
    weights = [{DIGEST_TENSOR: torch.full((32,), version, dtype=torch.uint8)} for version in (0, 1)]
    with VersionStore(tmp_path) as publisher:
        first, second = (publisher.write_tensors(v, each, torch.bfloat16) for v, each in enumerate(weights))
        scores, failure = asyncio.run(installed(first, second))
        assert not failure
        key = first.tensors[DIGEST_TENSOR].checksum & 0xFFFFFFFF
        at = np.arange(1, len(PROMPT))
        assert scores.tolist() == scripted_logprobs(at, np.full(len(at), key), PROMPT[1:]).tolist()
        # A file in which the weights of another version are found is not what the manifest says.
        Path(second.path).write_bytes(Path(first.path).read_bytes())
        assert "'scripted.digest' is corrupt" in asyncio.run(installed(first, second))[1]
        for content in (b"", b"{}", Path(first.path).read_bytes()[:40]):
            Path(second.path).write_bytes(content)
            assert "cannot be read" in asyncio.run(installed(first, second))[1]
        Path(second.path).unlink()
        assert "cannot be read" in asyncio.run(installed(first, second))[1]


async def installed(first: WeightManifest, second: WeightManifest) -> tuple[np.ndarray, str]:
    """Scores with the first of two versions that are installed, and why the second one was not."""
    engine = await started([[1]])
    await engine.install_version(first, timeout=5)
    scores = await engine.score_tokens(PROMPT)
    try:
        await engine.install_version(second, timeout=5)
    except EngineError as error:
        return scores, str(error)
    return scores, ""


async def test_installing_takes_its_seconds_of_the_clock(tiny_model):
    config = load_config(
        "quickstart",
        ["generator.engine=scripted", "weights.probe=false", "generator.engine_args={ install_seconds = 0.05 }"],
    )
    engine = build_engine(config, str(tiny_model), seed=0)
    await engine.start()
    reports = [await engine.install_version(manifest(version), timeout=5) for version in range(8)]
    assert all(0 <= report.pause_seconds <= 1 for report in reports)
    assert max(report.pause_seconds for report in reports) > 0


TEXT = np.arange(10, 60, dtype=np.int32)


def settings(backend="scripted", **options):
    made = config(**options)
    made.learner.backend = backend
    return made


def learner(model_path: Path) -> LearnerBackend:
    return build_learner(settings(), model_path)


def digest(of: LearnerBackend) -> bytes:
    return of.export_weights()[DIGEST_TENSOR].numpy().tobytes()


def changed(batches: list[MicroBatch], name: str, row: int = 5) -> list[MicroBatch]:
    """With another value of that column in one row."""
    first, *rest = batches
    values = first.table[name].copy()
    values[row] = ~values[row] if values.dtype == bool else values[row] + 1
    return [replace(first, table=first.table.with_columns(**{name: values})), *rest]


def test_equal_batches_make_equal_weights_and_anything_else_others(model_path):
    a, b = learner(model_path), learner(model_path)
    seen = [digest(a)]
    for seed in (1, 2, 3):
        train_minibatch(a, batch(seed), version=seed)
        train_minibatch(b, batch(seed), version=seed)
        assert digest(a) == digest(b)
        seen.append(digest(a))
    first = [changed(batch(1), name) for name in ("token_ids", "policy_version", "rollout_logprobs", "advantages")]
    renamed = replace(batch(1)[0], sample_ids=("other", *batch(1)[0].sample_ids[1:]))
    for batches in [*first, batch(1)[::-1], batch(1)[1:], [renamed, *batch(1)[1:]], batch(2)]:
        other = learner(model_path)
        train_minibatch(other, batches, version=1)
        seen.append(digest(other))
    assert len(set(seen)) == len(seen)
    assert a.update_count == b.update_count == 3


def test_figures_are_those_of_any_backend(model_path):
    result = train_minibatch(learner(model_path), batch(), version=0)
    expected = train_minibatch(build_learner(settings("torch"), model_path), batch(), version=0)
    by_token = {name for name in expected.metrics if re.search("k3_(staleness|turn|position)_", name)}
    assert by_token  # it has no log-probs of its own to compare
    assert set(result.metrics) == set(expected.metrics) - by_token
    for name in ("batch/tokens", "batch/trained_tokens", "batch/micro_batches", "routing/recorded_fraction", "lr"):
        assert result.metrics[name] == expected.metrics[name], name
    assert result.expert_load.shape == expected.expert_load.shape
    assert result.layer_agreement.tolist() == [1.0] * hm.LAYERS


def test_a_step_without_an_advantage_changes_nothing_and_a_batch_without_routes_is_refused(model_path):
    trained = learner(model_path)
    before = digest(trained)
    nothing = [replace(m, table=m.table.with_columns(advantages=0 * m.table["advantages"])) for m in batch()]
    result = train_minibatch(trained, nothing, version=0)
    assert result.metrics["optimizer/zero_variance"] == result.metrics["optimizer/skipped"] == 1
    assert (digest(trained), trained.update_count) == (before, 0)
    bare = [replace(m, table=m.table.without_columns("routed_experts", "routing_recorded")) for m in batch()]
    strict = settings()
    strict.routing.min_recorded_fraction = 0.9
    with pytest.raises(LearnerError, match="min_recorded_fraction"):
        train_minibatch(build_learner(strict, model_path), bare, version=0)


def test_a_resume_goes_on_with_the_same_weights(model_path, tmp_path):
    whole, saved = learner(model_path), learner(model_path)
    for seed in (1, 2):
        train_minibatch(whole, batch(seed))
        train_minibatch(saved, batch(seed))
    record = write_rank_file(tmp_path, saved.capture_state())
    train_minibatch(saved, batch(9))  # taken back
    resumed = learner(model_path)
    resumed.restore_state(LearnerStateReader([tmp_path / record.name]))
    assert (digest(resumed), resumed.update_count) == (digest(whole), 2)
    for of in (whole, resumed):
        train_minibatch(of, batch(3))
    assert digest(resumed) == digest(whole) != digest(saved)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_an_engine_with_its_weights_passes_the_probe_and_one_with_older_ones_does_not(
    model_path, tmp_path, temperature
):
    made = settings()
    made.weights.directory = str(tmp_path / "weights")
    engine, stale = ScriptedEngine([[7]]), ScriptedEngine([[7]])
    with contextlib.closing(LocalRank.load(made, model_path)) as local:
        local.set_weight_transport("shared_memory")
        for version in range(2):
            local.snapshot_weights(version)
            manifest = local.write_version().manifest
            for each in (engine, stale) if not version else (engine,):
                await each.start()
                await each.install_version(manifest, 5)
            if not version:
                local.run_minibatches([[batch()]], version=0)
        assert torch.equal(load_file(manifest.path)[DIGEST_TENSOR], local.backend.export_weights()[DIGEST_TENSOR])
        scores = np.stack([local.score_tokens(TEXT), local.score_tokens(TEXT, temperature)])
        for each, passes in ((engine, True), (stale, False)):
            assert compare_probe(TEXT.tolist(), scores[0], await each.score_tokens(TEXT), 1e-3).passed is passes
            sampled = await sample_probe(each, TEXT, temperature)
            assert compare_sampled_probe(sampled, scores, temperature, 1e-3).passed  # it says what it samples with


def test_it_is_one_process():
    with pytest.raises(ConfigError, match="one rank"):
        load_config("quickstart", ["learner.backend=scripted", "learner.parallel.dp=2", "weights.probe=false"])
