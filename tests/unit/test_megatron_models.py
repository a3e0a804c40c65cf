"""Every declared architecture on megatron-core against transformers' own class: logits, gradients, checkpoints, numbers."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from r3async.data.model_shape import parse_model_shape
from r3async.data.models import ARCHITECTURES
from r3async.learner.megatron.backend import MegatronLearner
from r3async.learner.micro_batches import pack_samples
from tests.helpers import architectures as ha
from tests.helpers import models as hm
from tests.helpers.equality import assert_equal_transformers
from tests.helpers.learner import LENGTHS, fully_recorded, gradients, logits, settings
from tests.helpers.steps import train_minibatch

SPARSE = {"mlp_only_layers": [], "decoder_sparse_step": 2, "num_key_value_heads": 4, "rope_theta": 1e6}
"""Changes of "qwen3_moe" that make its first and its last layer dense."""


@pytest.fixture(scope="module", params=[*ha.VARIANTS, "qwen3_moe sparse"])
def path(request, tmp_path_factory):
    variant, _, changed = request.param.partition(" ")
    return ha.make_model(tmp_path_factory.mktemp("model") / "m", variant, **SPARSE if changed else {})


def load(path) -> MegatronLearner:
    off = {} if ha.mixtures(path) else {"routing__replay": "off"}
    return MegatronLearner.from_pretrained(settings(**off), path)


@pytest.fixture(scope="module")
def learner(path):
    """No test changes its weights."""
    learner = load(path)
    yield learner
    learner.close()


def samples_for(learner: MegatronLearner, seed: int = 1):
    layers = len(learner.shape.moe_layers)
    samples = hm.make_samples(seed, LENGTHS, layers=layers or 1, routes=layers > 0)
    return fully_recorded(samples) if layers else samples


def test_every_architecture_has_a_model_here():
    assert {name.partition("/")[0] for name in ha.VARIANTS} == set(ARCHITECTURES)


@pytest.mark.long
def test_logits_and_all_gradients_equal_transformers(learner, path):
    assert_equal_transformers(learner, hm.load_hf(path), samples_for(learner), logits=logits, gradients=gradients)
    learner.optimizer.zero_grad()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_own_routes_are_those_of_transformers(learner, path, temperature):
    """Groups, biases of experts and scores: what decides who is chosen."""
    ids = np.random.default_rng(0).integers(0, hm.VOCAB, 65)
    expected = hm.score(hm.load_hf(path), ids, temperature)
    assert np.abs(learner.score_sequence(ids, temperature) - expected).max() < 1e-4


def test_export_gives_every_bit_back(learner, path):
    source, out = load_file(path / "model.safetensors"), learner.export_weights()
    if learner.shape.tied_embeddings:
        source.pop("lm_head.weight", None)
    assert set(out) == set(source) == set(learner.shape.list_tensor_shapes())
    assert all(out[name].dtype == tensor.dtype and torch.equal(out[name], tensor) for name, tensor in source.items())


def test_numbers_of_the_plan_are_those_of_the_model(learner, path):
    shape = parse_model_shape(json.loads((path / "config.json").read_text()))
    assert shape.num_parameters == sum(p.numel() for p in hm.load_hf(path).parameters())
    assert shape.rank_parameters(learner.config.learner, 0) == sum(p.numel() for p in learner.model.parameters())


def test_a_step_trains_every_weight(path):
    learner = load(path)
    before = learner.export_weights()
    assert train_minibatch(learner, pack_samples(samples_for(learner, 2), 64)).metrics["optimizer/skipped"] == 0
    same = [name for name, tensor in learner.export_weights().items() if torch.equal(before[name], tensor)]
    assert [name for name in same if not name.endswith("e_score_correction_bias")] == []
    learner.close()
