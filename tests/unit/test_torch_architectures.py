"""Every declared architecture on the transformers learner: replayed routes, gradients and export beside plain transformers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from r3async.data.models import RECURRENT_MODEL_TYPES, TORCH_ONLY_ARCHITECTURES, parse_model_shape
from r3async.learner import LearnerError
from r3async.learner.torch.backend import TorchLearner
from r3async.learner.torch.model import ATTENTION_NAME, PackedModel
from tests.helpers import architectures as ha
from tests.helpers import models as hm
from tests.helpers.equality import assert_equal_transformers
from tests.helpers.learner import LENGTHS, fully_recorded
from tests.helpers.torch import logits, settings


@pytest.mark.parametrize("variant", ha.ALL)
def test_logits_gradients_and_export_are_those_of_transformers(tmp_path, variant):
    path = ha.make_model(tmp_path / "m", variant)
    learner, plain, layers = TorchLearner.from_pretrained(settings(), path), ha.load_plain(path), ha.mixtures(path)
    samples = hm.make_samples(1, LENGTHS, layers=layers or 1, routes=layers > 0)
    samples = fully_recorded(samples) if layers else samples
    assert_equal_transformers(
        learner, plain, samples, logits=logits, gradients=lambda learner: ha.gradients_of(learner.model.causal_lm)
    )
    source, out = load_file(path / "model.safetensors"), learner.export_weights()
    assert set(out) == set(source)
    assert all(torch.equal(out[name], tensor) for name, tensor in source.items())


@pytest.mark.parametrize("variant", ["deepseek_v3", "glm4_moe"])
def test_biases_of_experts_keep_float32_in_a_bfloat16_model(tmp_path, variant):
    path = ha.make_model(tmp_path / "m", variant)
    out, source = (
        TorchLearner.from_pretrained(settings(learner__dtype="bfloat16"), path).export_weights(),
        load_file(path / "model.safetensors"),
    )
    biases = [name for name in source if name.endswith("e_score_correction_bias")]
    assert biases
    assert all(torch.equal(out[name], source[name]) for name in biases)
    assert all(tensor.dtype == torch.bfloat16 for name, tensor in out.items() if name not in biases)


def test_numbers_of_the_plan_are_those_of_models_that_only_this_backend_trains(tmp_path):
    assert {name.partition("/")[0] for name in ha.TORCH_ONLY} == set(TORCH_ONLY_ARCHITECTURES)
    for variant in ha.TORCH_ONLY:
        path = ha.make_model(tmp_path / variant, variant)
        shape = parse_model_shape(json.loads((path / "config.json").read_text()))
        assert shape.num_parameters == sum(p.numel() for p in ha.load_plain(path).parameters())


SMALL = {
    **{"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 512, "pad_token_id": 0},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "num_experts_per_tok": 2},
    **{"num_experts": 8, "num_local_experts": 8},
}
BY_OTHER_WORDS = {"kimi_linear", "nemotron_h", "qwen3_5", "qwen3_5_moe"}
"""Their configuration nests these numbers, or has other names for them."""


@pytest.mark.parametrize("kind", sorted({"gemma2", "phimoe", *RECURRENT_MODEL_TYPES} - BY_OTHER_WORDS))
def test_what_is_refused_by_name_this_backend_would_refuse_when_it_looks(kind):
    known = AutoConfig.for_model(kind).to_dict()
    config = AutoConfig.for_model(kind, **{name: value for name, value in SMALL.items() if name in known})
    with torch.device("meta"):
        causal = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME)
    why = {"gemma2": "uses soft-capping", "phimoe": "routes of this model cannot"}
    with pytest.raises(LearnerError, match=why.get(kind, "calls attention 0 times instead of once")):
        PackedModel(causal.eval(), config.to_dict(), max_total_tokens=64)


@pytest.mark.parametrize("variant", ["gpt_oss", "deepseek_v3", "qwen2_moe", "glm4_moe"])
def test_scores_with_own_routes_sinks_and_windows_are_those_of_transformers(tmp_path, variant):
    path = ha.make_model(tmp_path / "m", variant)
    ids = np.random.default_rng(0).integers(0, hm.VOCAB, 65)
    with torch.no_grad():
        theirs = torch.log_softmax(ha.load_plain(path)(torch.from_numpy(ids)[None]).logits[0], -1)
    expected = theirs[:-1].gather(1, torch.from_numpy(ids)[1:, None])[:, 0].numpy()
    assert np.abs(TorchLearner.from_pretrained(settings(), path).score_sequence(ids) - expected).max() < 1e-4
