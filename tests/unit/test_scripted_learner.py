"""The scripted learner keeps the promises of `LearnerBackend` without a model, and its weights tell what it trained."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from r3async.actors.ranks import LocalRank
from r3async.checkpoint.tensors import LearnerStateReader, write_rank_file
from r3async.config import ConfigError, load_config
from r3async.learner import LearnerError, build_learner
from r3async.learner.backend import LearnerBackend
from r3async.learner.batch import MicroBatch
from r3async.learner.trainer import train_minibatch
from r3async.rollout.engine import sample_probe
from r3async.rollout.scripted import DIGEST_TENSOR, ScriptedEngine
from r3async.weights.probe import compare_probe, compare_sampled_probe
from tests.helpers import models as hm
from tests.helpers.parity import batch, config

TEXT = np.arange(10, 60, dtype=np.int32)


def settings(**options):
    made = config(**options)
    made.learner.backend = "scripted"
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
    real = build_learner(replace_backend("torch"), model_path)
    expected = train_minibatch(real, batch(), version=0)
    by_token = {name for name in expected.metrics if re.search("k3_(staleness|turn|position)_", name)}
    assert by_token  # it has no log-probs of its own to compare
    assert set(result.metrics) == set(expected.metrics) - by_token
    for name in ("batch/tokens", "batch/trained_tokens", "batch/micro_batches", "routing/recorded_fraction", "lr"):
        assert result.metrics[name] == expected.metrics[name], name
    assert result.expert_load.shape == expected.expert_load.shape
    assert result.layer_agreement.tolist() == [1.0] * hm.LAYERS


def replace_backend(backend: str):
    made = config()
    made.learner.backend = backend
    return made


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
    local = LocalRank.load(made, model_path)
    engine, stale = ScriptedEngine([[7]]), ScriptedEngine([[7]])
    try:
        local.set_weight_transport("shared_memory")
        for version in range(2):
            local.snapshot_weights(version)
            manifest = local.write_version().manifest
            for each in (engine, stale) if not version else (engine,):
                await each.start()
                await each.install_version(manifest, 5)
            if not version:
                local.train_minibatches([[batch()]], version=0)
        assert torch.equal(load_file(manifest.path)[DIGEST_TENSOR], local.backend.export_weights()[DIGEST_TENSOR])
        scores = np.stack([local.score_tokens(TEXT), local.score_tokens(TEXT, temperature)])
        for each, passes in ((engine, True), (stale, False)):
            tokens = TEXT.tolist()
            assert compare_probe(tokens, scores[0], await each.score_tokens(TEXT), 1e-3).passed is passes
            sampled = await sample_probe(each, TEXT, temperature)
            assert compare_sampled_probe(sampled, scores, temperature, 1e-3).passed  # it says what it samples with
    finally:
        local.close()


def test_it_is_one_process():
    with pytest.raises(ConfigError, match="one rank"):
        load_config("quickstart", ["learner.backend=scripted", "learner.parallel.dp=2", "weights.probe=false"])
