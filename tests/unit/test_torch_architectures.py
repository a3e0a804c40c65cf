"""Architectures on the transformers learner: replayed routes, gradients and export beside plain transformers, and which models
it refuses at start.
"""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from r3async.data.model_shape import RoutingShape, parse_model_shape
from r3async.data.models import TORCH_ONLY_ARCHITECTURES
from r3async.learner import LearnerError
from r3async.learner.micro_batches import pack_samples
from r3async.learner.torch.backend import TorchLearner
from r3async.learner.torch.model import ATTENTION_NAME, PackedModel
from tests.helpers import architectures as ha
from tests.helpers import models as hm
from tests.helpers import torch as ht
from tests.helpers.equality import assert_equal_transformers
from tests.helpers.learner import LENGTHS, fully_recorded
from tests.helpers.steps import train_minibatch
from tests.helpers.torch import SHARED, logits, settings


@pytest.mark.long
@pytest.mark.parametrize("variant", ha.ALL)
def test_logits_gradients_and_export_are_those_of_transformers(tmp_path, variant):
    path = ha.make_model(tmp_path / "m", variant)
    learner, plain, layers = TorchLearner.from_pretrained(settings(), path), hm.load_hf(path), ha.mixtures(path)
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
    out = TorchLearner.from_pretrained(settings(learner__dtype="bfloat16"), path).export_weights()
    source = load_file(path / "model.safetensors")
    biases = [name for name in source if name.endswith("e_score_correction_bias")]
    assert biases
    assert all(torch.equal(out[name], source[name]) for name in biases)
    assert all(tensor.dtype == torch.bfloat16 for name, tensor in out.items() if name not in biases)


def test_numbers_of_the_plan_are_those_of_models_that_only_this_backend_trains(tmp_path):
    assert {name.partition("/")[0].removesuffix("_text") for name in ha.TORCH_ONLY} == set(TORCH_ONLY_ARCHITECTURES)
    for variant in ha.TORCH_ONLY:
        path = ha.make_model(tmp_path / variant, variant)
        shape = parse_model_shape(json.loads((path / "config.json").read_text()))
        model = hm.load_hf(path)
        # Small norms and biases of hybrids are not counted.
        within = 0 if variant == "gpt_oss" else 0.003
        assert shape.num_parameters == pytest.approx(sum(p.numel() for p in model.parameters()), rel=within), variant


SMALL = {
    **{"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 512, "pad_token_id": 0},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "num_experts_per_tok": 2},
    **{"num_experts": 8, "num_local_experts": 8},
}


@pytest.mark.parametrize("kind", ["gemma2", "phimoe"])
def test_what_is_refused_by_name_this_backend_would_refuse_when_it_looks(kind):
    known = AutoConfig.for_model(kind).to_dict()
    config = AutoConfig.for_model(kind, **{name: value for name, value in SMALL.items() if name in known})
    with torch.device("meta"):
        causal = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME)
    why = {"gemma2": "uses soft-capping", "phimoe": "routes of this model cannot"}
    with pytest.raises(LearnerError, match=why[kind]):
        PackedModel(causal.eval(), config.to_dict(), max_total_tokens=64).find_routers(torch.device("meta"))


@pytest.mark.parametrize(
    "variant", ["gpt_oss", "deepseek_v3", "qwen2_moe", "glm4_moe", "granitemoehybrid", "falcon_h1", "jamba"]
)
def test_scores_with_own_routes_sinks_windows_and_scaled_logits_are_those_of_transformers(tmp_path, variant):
    path = ha.make_model(tmp_path / "m", variant)
    ids = np.random.default_rng(0).integers(0, hm.VOCAB, 65)
    expected = hm.score(hm.load_hf(path), ids)
    assert np.abs(TorchLearner.from_pretrained(settings(), path).score_sequence(ids) - expected).max() < 1e-4


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {name: ht.make_model(tmp_path_factory.mktemp(name), name) for name in ("qwen3", "mixtral")}


def test_a_dense_model_trains_without_routes(tmp_path):
    config = {k: v for k, v in SHARED.items() if k != "num_experts_per_tok"}
    path = ht.save_random(tmp_path / "m", tf.Qwen3Config(**config, head_dim=16, intermediate_size=56))
    learner = TorchLearner.from_pretrained(
        settings(learner__recompute="selective", routing__min_recorded_fraction=0.9), path
    )
    micro_batches = pack_samples(ht.recorded_samples(0), ht.BUDGET)
    assert learner.record_learner_routes(micro_batches) == micro_batches
    result = train_minibatch(learner, micro_batches)
    assert result.metrics["optimizer/skipped"] == 0
    assert len(result.layer_agreement) == 0


MOE = {"intermediate_size": 56, "moe_intermediate_size": 40, "n_shared_experts": 1, "first_k_dense_replace": 1}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "v_head_dim": 16}
DEEPSEEK = SHARED | MOE | LATENT | {"qk_nope_head_dim": 16, "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
QWEN = SHARED | {"intermediate_size": 56, "moe_intermediate_size": 40, "num_experts": 8}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            lambda: tf.DeepseekV2Config(**DEEPSEEK, topk_method="group_limited_greedy"),
            "DeepseekV2TopkRouter takes gate weights from scores in which some groups of experts are masked",
        ),
        (
            lambda: tf.Gemma2Config(**QWEN, attn_logit_softcapping=None),
            "changes its logits",
        ),
        (
            lambda: tf.Qwen3MoeConfig(**QWEN, head_dim=16, rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
            "rope_type 'dynamic'",
        ),
    ],
    ids=["masked-groups", "capped-logits", "dynamic-rope"],
)
def test_what_would_be_trained_wrongly_is_refused_at_start(tmp_path, config, message):
    path = ht.save_random(tmp_path / "m", config())
    with pytest.raises(LearnerError, match=message):
        TorchLearner.from_pretrained(settings(), path)


def test_the_engines_geometry_has_to_be_the_models(models, monkeypatch):
    from r3async.learner.torch import model

    monkeypatch.setattr(
        model,
        "read_moe_layers",
        lambda config: (RoutingShape(layers=2, top_k=ht.TOP_K, num_experts=ht.EXPERTS), [0, 1]),
    )
    with pytest.raises(LearnerError, match=r"layers \[0, 1\] are mixtures .* \[0, 2\]"):
        TorchLearner.from_pretrained(settings(), models["qwen3"])


def _tensors(change):
    def spoil(path):
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})

    return spoil


def _config(**changes):
    def spoil(path):
        described = json.loads((path / "config.json").read_text()) | changes
        (path / "config.json").write_text(json.dumps(described))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_tensors(lambda t: t.pop("model.norm.weight")), "model.path.*missing keys: model.norm.weight"),
        (_tensors(lambda t: t.pop("model.layers.1.block_sparse_moe.experts.3.w1.weight")), "cannot load `model.path`"),
        (_tensors(lambda t: t.update(extra=torch.ones(3))), "unexpected keys: extra"),
        (_config(num_local_experts=4), "cannot load `model.path`"),
        (_config(model_type="nonsense"), "cannot load `model.path`.*nonsense"),
        (_config(num_experts_per_tok=9), "cannot run on packed samples"),
        (_config(quantization_config={"quant_method": "fp8"}), "quantized weights"),
        (lambda path: (path / "config.json").unlink(), "`model.path`.*not a Hugging Face model directory"),
        (lambda path: (path / "model.safetensors").write_bytes(b"no"), "cannot load `model.path`"),
    ],
    ids=["missing", "missing-expert", "left-over", "experts", "type", "top-k", "quantized", "no-config", "broken-file"],
)
def test_models_that_can_not_be_loaded_are_refused(models, tmp_path, spoil, message):
    path = shutil.copytree(models["mixtral"], tmp_path / "m")
    spoil(path)
    with pytest.raises(LearnerError, match=message):
        TorchLearner.from_pretrained(settings(), path)


def test_the_number_of_ranks_has_to_be_the_settings(models):
    with pytest.raises(LearnerError, match=r"learner\.parallel\.dp is 2, but 1 rank"):
        TorchLearner.from_pretrained(settings(learner__parallel={"dp": 2}), models["mixtral"])
