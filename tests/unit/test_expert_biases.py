"""Biases of experts that follow the tokens: the rule, what is counted, and what becomes of them, on both backends."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from r3async.checkpoint.tensors import LearnerStateReader, write_rank_file
from r3async.config import Config, ConfigError, config_from_dict
from r3async.data.models import EXPERT_BIAS_SUFFIX
from r3async.learner import LearnerError, build_learner
from r3async.learner.trainer import train_minibatch
from tests.helpers import architectures as ha
from tests.helpers import checkpoint as hc
from tests.helpers import models as hm
from tests.helpers.expert_biases import RATE, biases_of, counted, moved, settings
from tests.helpers.parity import batch

BACKENDS = ["megatron", "torch"]


@pytest.fixture(scope="module", params=["deepseek_v3", "glm4_moe"])
def path(request, tmp_path_factory):
    return ha.make_model(tmp_path_factory.mktemp("model") / "m", request.param)


def recorded(path, seed: int = 3):
    return batch(seed, layers=ha.mixtures(path))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_biases_follow_the_tokens_of_replayed_routes(path, backend, dtype):
    """Rows of the record are counted as they are, padding is not, and rows without a record are the model's own choice: one a
    sample, its last."""
    learner, micro_batches = build_learner(settings(backend, dtype=dtype), path), recorded(path)
    before = biases_of(learner)
    try:
        result = train_minibatch(learner, micro_batches)
        after = biases_of(learner)
    finally:
        learner.close()
    assert len(before) == ha.mixtures(path)
    known, unrecorded = counted(micro_batches)
    assert (result.expert_load >= known).all()
    assert (result.expert_load - known).sum() == unrecorded * hm.TOP_K * len(before)
    for column, name in enumerate(sorted(before)):
        assert torch.equal(after[name], moved(before[name], result.expert_load[column]))
        assert not torch.equal(after[name], before[name])


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_rate_they_stay(path, backend):
    learner = build_learner(settings(backend, rate=0.0), path)
    before = biases_of(learner)
    train_minibatch(learner, recorded(path))
    assert all(torch.equal(before[name], tensor) for name, tensor in biases_of(learner).items())
    learner.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_skipped_update_leaves_them(path, backend):
    """Equal versions have equal weights."""
    learner = build_learner(settings(backend), path)
    before = biases_of(learner)
    micro_batches = [
        changed(m, advantages=np.zeros(m.num_tokens, np.float32), loss_mask=np.zeros(m.num_tokens, bool))
        for m in recorded(path)
    ]
    assert train_minibatch(learner, micro_batches).metrics["optimizer/skipped"] == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in biases_of(learner).items())
    learner.close()


def changed(micro_batch, **columns):
    return replace(micro_batch, table=micro_batch.table.with_columns(**columns))


@pytest.mark.parametrize("backend", BACKENDS)
def test_they_are_balanced_after_many_steps(path, backend):
    """With own routes: the busiest expert of a layer gets less than before."""
    learner = build_learner(settings(backend, rate=0.02, replay="off"), path)
    micro_batches = recorded(path)
    loads = [train_minibatch(learner, micro_batches).expert_load for _ in range(12)]
    assert (loads[-1].max(axis=1) < loads[0].max(axis=1)).all()
    learner.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_resumes_with_them(path, tmp_path, backend):
    config = settings(backend)
    first = build_learner(config, path)
    train_minibatch(first, recorded(path))
    write_rank_file(tmp_path, first.capture_state())
    train_minibatch(first, recorded(path, 4))
    expected = first.export_weights()
    first.close()
    for later in (config, without(config)):
        second = build_learner(later, path)
        second.restore_state(LearnerStateReader(hc.paths(tmp_path)))
        if later is config:
            train_minibatch(second, recorded(path, 4))
            assert all(torch.equal(tensor, expected[name]) for name, tensor in second.export_weights().items())
        else:  # and keeps them where they no longer move
            start = load_file(path / "model.safetensors")
            assert all(not torch.equal(tensor, start[name]) for name, tensor in biases_of(second).items())
        second.close()


def without(config: Config) -> Config:
    return msgspec.structs.replace(config, learner=msgspec.structs.replace(config.learner, expert_bias_rate=0.0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_reference_model_has_those_of_the_start(path, backend):
    config = settings(backend, rate=0.3, replay="off")
    config.algorithm.reference_kl.coef = 0.1
    learner, micro_batches = build_learner(config, path), recorded(path)
    start = learner.logprobs(micro_batches)
    train_minibatch(learner, [with_reference(m, learner, i) for i, m in enumerate(micro_batches)])
    now = biases_of(learner)
    again = learner.logprobs(micro_batches, use_reference=True)
    assert all((a == b).all() for a, b in zip(start, again, strict=True))
    assert all(torch.equal(now[name], tensor) for name, tensor in biases_of(learner).items())
    learner.close()


def with_reference(micro_batch, learner, index):
    return changed(micro_batch, reference_logprobs=learner.logprobs([micro_batch], use_reference=True)[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", ["qwen3_moe", "llama"])
def test_a_model_without_biases_is_refused(tmp_path, backend, variant):
    path = ha.make_model(tmp_path / "m", variant)
    with pytest.raises(LearnerError, match=r"learner\.expert_bias_rate = 0\.01, but no bias decides"):
        build_learner(settings(backend, replay="off"), path)


@pytest.mark.parametrize("other", [{"lora": {"rank": 2}}, {"freeze_router": True}])
def test_what_leaves_routers_as_they_are_is_refused(other):
    with pytest.raises(ConfigError, match="`expert_bias_rate` changes what routers choose"):
        config_from_dict({"learner": {"expert_bias_rate": RATE, **other}})


def test_names_of_biases_are_those_of_the_checkpoint(path):
    names = {name for name in load_file(path / "model.safetensors") if name.endswith(EXPERT_BIAS_SUFFIX)}
    learner = build_learner(settings("megatron"), path)
    assert {bias.name for bias in learner.expert_biases} == names
    learner.close()
