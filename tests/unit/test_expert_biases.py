"""Biases of experts that follow the tokens: the rule, what is counted, and what becomes of them, on both backends."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from r3async.checkpoint.rank_files import LearnerStateReader, write_rank_file
from r3async.config import Config, ConfigError, config_from_dict
from r3async.data.models import EXPERT_BIAS_SUFFIX
from r3async.learner import LearnerError, build_learner
from tests.helpers import architectures as ha
from tests.helpers import checkpoint as hc
from tests.helpers import models as hm
from tests.helpers.expert_biases import RATE, biases_of, counted, moved, settings
from tests.helpers.parity import batch
from tests.helpers.steps import train_minibatch

BACKENDS = ["megatron", "torch"]


@pytest.fixture(scope="module", params=["deepseek_v3", "glm4_moe"])
def path(request, tmp_path_factory):
    return ha.make_model(tmp_path_factory.mktemp("model") / "m", request.param)


@pytest.fixture
def build(learners, path):
    return lambda of, **options: learners(of if isinstance(of, Config) else settings(of, **options), path)


def recorded(path, seed: int = 3):
    return batch(seed, layers=ha.mixtures(path))


def changed(micro_batch, **columns):
    return replace(micro_batch, table=micro_batch.table.with_columns(**columns))


def assert_biases(learner, expected) -> None:
    assert all(torch.equal(expected[name], tensor) for name, tensor in biases_of(learner).items())


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_biases_follow_the_tokens_of_replayed_routes(path, build, backend, dtype):
    """Rows of the record are counted as they are, padding is not, and rows without a record are the model's own choice: one a
    sample, its last."""
    learner, micro_batches = build(backend, dtype=dtype), recorded(path)
    before = biases_of(learner)
    result = train_minibatch(learner, micro_batches)
    after = biases_of(learner)
    assert len(before) == ha.mixtures(path)
    known, unrecorded = counted(micro_batches)
    assert (result.expert_load >= known).all()
    assert (result.expert_load - known).sum() == unrecorded * hm.TOP_K * len(before)
    for column, name in enumerate(sorted(before)):
        assert torch.equal(after[name], moved(before[name], result.expert_load[column]))
        assert not torch.equal(after[name], before[name])


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_rate_or_an_update_they_stay(path, build, backend):
    """Equal versions have equal weights."""
    learner = build(backend, rate=0.0)
    before = biases_of(learner)
    train_minibatch(learner, recorded(path))
    assert_biases(learner, before)
    learner = build(backend)
    nothing = [
        changed(m, advantages=np.zeros(m.num_tokens, np.float32), loss_mask=np.zeros(m.num_tokens, bool))
        for m in recorded(path)
    ]
    assert train_minibatch(learner, nothing).metrics["optimizer/skipped"] == 1
    assert_biases(learner, before)


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_they_are_balanced_after_many_steps(path, build, backend):
    """With own routes: the busiest expert of a layer gets less than before."""
    learner, micro_batches = build(backend, rate=0.02, replay="off"), recorded(path)
    loads = [train_minibatch(learner, micro_batches).expert_load for _ in range(12)]
    assert (loads[-1].max(axis=1) < loads[0].max(axis=1)).all()


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_resumes_with_them(path, build, tmp_path, backend):
    first = build(backend)
    train_minibatch(first, recorded(path))
    write_rank_file(tmp_path, first.capture_state())
    train_minibatch(first, recorded(path, 4))
    second, without_rate = build(backend), build(backend, rate=0.0)
    for learner in (second, without_rate):
        learner.restore_state(LearnerStateReader(hc.paths(tmp_path)))
    train_minibatch(second, recorded(path, 4))
    expected = first.export_weights()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in second.export_weights().items())
    start = load_file(path / "model.safetensors")
    assert not any(torch.equal(tensor, start[name]) for name, tensor in biases_of(without_rate).items())


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_reference_model_has_those_of_the_start(path, build, backend):
    config = settings(backend, rate=0.3, replay="off")
    config.algorithm.reference_kl.coef = 0.1
    learner, micro_batches = build(config), recorded(path)
    start = learner.logprobs(micro_batches)
    train_minibatch(learner, [with_reference(m, learner) for m in micro_batches])
    now = biases_of(learner)
    again = learner.logprobs(micro_batches, use_reference=True)
    assert all((a == b).all() for a, b in zip(start, again, strict=True))
    assert_biases(learner, now)


def with_reference(micro_batch, learner):
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


def test_names_of_biases_are_those_of_the_checkpoint(path, build):
    names = {name for name in load_file(path / "model.safetensors") if name.endswith(EXPERT_BIAS_SUFFIX)}
    assert {bias.name for bias in build("megatron").expert_biases} == names
