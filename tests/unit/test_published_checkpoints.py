"""Checkpoints in the forms in which they are published: read, trained and exported again."""

import json
import logging
import shutil

import numpy as np
import pytest
import torch
import transformers as tf

from r3async.data.checkpoint_forms import CheckpointFormError, is_prediction_tensor, read_quantized_form
from r3async.data.engine_models import list_needed_config
from r3async.data.model_shape import RoutingShape
from r3async.learner import LearnerError, build_learner
from r3async.learner.micro_batches import pack_samples
from r3async.learner.model import check_model_directory, open_model_files
from r3async.learner.model_directory import copy_version_file, save_version_as_model
from r3async.learner.torch import model
from r3async.learner.torch.backend import TorchLearner
from r3async.weights.version_store import VersionStore
from tests.helpers import architectures as ha
from tests.helpers import models as hm
from tests.helpers import published
from tests.helpers.learner import fully_recorded
from tests.helpers.learner import settings as learner_settings
from tests.helpers.steps import train_minibatch
from tests.helpers.torch import settings

LENGTHS = [9, 30, 5]


def train(learner, layers):
    samples = fully_recorded(hm.make_samples(1, LENGTHS, layers=layers))
    for _ in range(2):
        train_minibatch(learner, pack_samples(samples, 48))


def read_config(path):
    return json.loads((path / "config.json").read_text())


def same(one, other):
    return one.dtype == other.dtype and torch.equal(one, other)


def score(model, length=20):
    with torch.no_grad():
        return torch.log_softmax(model(torch.arange(length)[None]).logits[0].float(), -1)


@pytest.mark.long
@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("files", ["one", "index", "no index"])
def test_a_model_with_vision_comes_out_in_the_form_in_which_it_went_in(tmp_path, is_fused, files):
    path = published.make_vision_model(tmp_path / "m", is_fused=is_fused)
    if files != "one":
        published.split_files(path, has_index=files == "index")
    before = published.read(path)
    learner = TorchLearner.from_pretrained(settings(learner__dtype="bfloat16"), path)
    learner.save_pretrained(tmp_path / "untrained")
    after = published.read(tmp_path / "untrained")
    assert after.keys() == before.keys()
    assert all(same(after[name], tensor) for name, tensor in before.items())
    assert read_config(tmp_path / "untrained") == read_config(path)

    train(learner, 2)
    learner.save_pretrained(tmp_path / "trained")
    trained = published.read(tmp_path / "trained")
    moved = {name for name, tensor in before.items() if not same(trained[name], tensor)}
    beside = {name for name in before if name.startswith(("model.visual.", "mtp."))}
    assert trained.keys() == before.keys()
    assert len(beside) == 23
    assert not moved & beside
    assert {name for name in before if ".layers.0." in name and "experts.1." not in name} <= moved
    assert read_config(tmp_path / "trained") == read_config(path)

    whole, info = tf.AutoModelForImageTextToText.from_pretrained(
        tmp_path / "trained", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    again = TorchLearner.from_pretrained(settings(), tmp_path / "trained")
    scores = score(whole)[:-1].gather(1, torch.arange(1, 20)[:, None])[:, 0]
    np.testing.assert_allclose(again.score_sequence(np.arange(20)), scores.numpy(), atol=1e-5)


def test_a_version_as_a_model_directory_has_the_carried_tensors(tmp_path):
    path = published.make_vision_model(tmp_path / "m")
    learner = TorchLearner.from_pretrained(settings(), path)
    before = published.read(path)
    with VersionStore(tmp_path / "versions") as store:
        manifest = store.write_tensors(0, learner.export_weights(), torch.bfloat16)
        assert {*manifest.tensors, *learner.carried} == before.keys()
        assert len(learner.carried) == 23
        file = tmp_path / manifest.path
        save_version_as_model(
            tmp_path / "out", path, lambda target: copy_version_file(file, target), "bfloat16", learner.carried
        )
    after = published.read(tmp_path / "out")
    assert all(same(after[name], tensor) for name, tensor in before.items())
    assert read_config(tmp_path / "out") == read_config(path)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == before.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in before.values())
    tf.AutoModelForImageTextToText.from_pretrained(tmp_path / "out")


def test_stale_layers_for_multi_token_prediction_are_named_in_the_log(tmp_path, caplog):
    path = published.make_vision_model(tmp_path / "m")
    with caplog.at_level(logging.WARNING):
        TorchLearner.from_pretrained(settings(), path)
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("r3async")]
    assert "23 tensors (model.visual." in line
    assert "2 of them are layers for multi-token prediction" in line


@pytest.mark.parametrize("backend", ["torch", "megatron"])
@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
def test_layers_behind_the_last_one_are_carried_where_they_are_declared(tmp_path, kind, backend):
    config = learner_settings(learner__backend=backend)
    path = ha.make_model(tmp_path / "m", kind)
    extra = {f"model.layers.3.{name}": torch.randn(4, 4) for name in ("eh_proj.weight", "mlp.experts.0.up_proj.weight")}
    published.rewrite(path, lambda tensors: tensors | extra, num_nextn_predict_layers=0)
    with pytest.raises(LearnerError, match=r"(unexpected keys:|tensors that are not of .*:) model\.layers\.3\.eh_proj"):
        build_learner(config, path)
    published.rewrite(path, lambda tensors: tensors, num_nextn_predict_layers=1)
    learner = build_learner(config, path)
    learner.save_pretrained(tmp_path / "out")
    after = published.read(tmp_path / "out")
    assert sorted(learner.carried) == sorted(extra)
    assert after.keys() == published.read(path).keys()
    assert all(same(after[name], tensor) for name, tensor in extra.items())
    assert read_config(tmp_path / "out")["num_nextn_predict_layers"] == 1


def test_megatron_refuses_a_model_that_has_more_than_text(tmp_path):
    path = published.make_vision_model(tmp_path / "m")
    with pytest.raises(LearnerError, match=r'more than a text model.* set `learner.backend` = "torch"'):
        check_model_directory(path, learner_settings().learner)


def test_megatron_reads_fp8_dequantized(tmp_path):
    path = ha.make_model(tmp_path / "m", "qwen3_moe", **FP8)
    meant = published.quantize_to_fp8(path)
    check_model_directory(path, learner_settings().learner)
    out = build_learner(learner_settings(learner__backend="megatron"), path).export_weights()
    assert out.keys() == meant.keys()
    assert all(torch.equal(out[name], meant[name]) for name in out)


def test_a_tensor_inside_the_text_model_is_never_carried(tmp_path):
    path = published.make_vision_model(tmp_path / "m")
    name = "model.language_model.layers.0.self_attn.q_proj.bias"
    published.rewrite(path, lambda tensors: tensors | {name: torch.zeros(64)})
    with pytest.raises(LearnerError, match=r"unexpected keys: model\.layers\.0\.self_attn\.q_proj\.bias"):
        TorchLearner.from_pretrained(settings(), path)


def test_other_files_beside_those_of_the_index_are_not_read(tmp_path):
    path = ha.make_model(tmp_path / "m", "qwen3_moe")
    shutil.copy(path / "model.safetensors", tmp_path / "whole")
    published.split_files(path)
    before = published.read(path)
    published.save_file({"tok_embeddings.weight": torch.ones(2)}, path / "consolidated.safetensors")
    assert TorchLearner.from_pretrained(settings(), path).export_weights().keys() == before.keys()


def test_names_that_transformers_would_change_are_published_as_they_were_read(tmp_path, monkeypatch):
    config = {key: value for key, value in ha.SHARED.items() if key != "num_key_value_heads"}
    latent = {"kv_lora_rank": 24, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    kinds = {"layer_types": ["full_attention"] * 3, "mlp_layer_types": ["dense", "sparse", "sparse"]}
    experts = {"moe_intermediate_size": 32, "num_local_experts": hm.EXPERTS, "num_key_value_heads": 4}
    path = hm.save_random(
        tmp_path / "m", tf.AutoConfig.for_model("kimi_linear", **config, **latent, **kinds, **experts)
    )
    published.rewrite(
        path,
        lambda tensors: {name.replace("layers.0.block_sparse_moe.", "layers.0.mlp."): t for name, t in tensors.items()},
    )
    before = published.read(path)
    assert "model.layers.0.mlp.up_proj.weight" in before
    routing = RoutingShape(layers=2, top_k=hm.TOP_K, num_experts=hm.EXPERTS)
    monkeypatch.setattr(model, "read_moe_layers", lambda config: (routing, [1, 2]))
    learner = TorchLearner.from_pretrained(settings(), path)
    out = learner.export_weights()
    assert out.keys() == before.keys()
    assert all(torch.equal(out[name], tensor) for name, tensor in before.items())
    assert not learner.carried


FP8 = {"hidden_size": 192, "moe_intermediate_size": 160, "intermediate_size": 160}


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3", "vision", "vision per expert"])
def test_fp8_in_blocks_is_dequantized_when_it_is_read(tmp_path, caplog, kind):
    if kind.startswith("vision"):
        path = published.make_vision_model(tmp_path / "m", is_fused=kind == "vision", hidden_size=192)
    else:
        path = ha.make_model(tmp_path / "m", kind, **FP8)
    meant = published.quantize_to_fp8(path)
    assert all(name in open_model_files(path) for name in meant)
    assert len(open_model_files(path)) == len(meant)
    with caplog.at_level(logging.WARNING):
        learner = TorchLearner.from_pretrained(settings(), path)
    assert "its weights in fp8 (blocks of 128x128) are dequantized" in caplog.text
    out = learner.export_weights()
    assert out
    assert all(torch.equal(out[name], meant[name]) for name in out)
    half = TorchLearner.from_pretrained(settings(learner__dtype="bfloat16"), path)
    half.save_pretrained(tmp_path / "out")
    written = published.read(tmp_path / "out")
    assert written.keys() == meant.keys()
    trained = [name for name in out if not name.endswith("e_score_correction_bias")]
    assert all(same(written[name], meant[name].bfloat16()) for name in trained)
    config = read_config(path)
    del config["quantization_config"]
    config |= {"num_nextn_predict_layers": 0} if kind == "deepseek_v3" else {}  # its files have none
    assert read_config(tmp_path / "out") == config | {"dtype": "bfloat16"}


@pytest.mark.parametrize("shape", [(192, 320), (2, 576, 192)])
def test_any_part_of_a_matrix_in_fp8_is_that_part_of_the_whole(tmp_path, shape):
    (tmp_path / "config.json").write_text("{}")
    published.save_file({"w_proj": torch.randn(shape)}, tmp_path / "model.safetensors")
    meant = published.quantize_to_fp8(tmp_path, (128, 64))["w_proj"]
    taken = open_model_files(tmp_path)["w_proj"].get_slice("w_proj")
    assert taken.get_shape() == list(shape)
    assert torch.equal(taken[...], meant)
    rng = np.random.default_rng(0)
    for _ in range(20):
        bounds = [np.sort(rng.integers(0, size + 1, 2)) for size in shape]
        part = tuple(slice(int(first), int(end)) for first, end in bounds)
        assert torch.equal(taken[part], meant[part])
        assert torch.equal(taken[part[0]], meant[part[0]])


def make_gpt_oss(directory):
    path = ha.make_model(directory, "gpt_oss", hidden_size=64, intermediate_size=96)
    published.quantize_to_mxfp4(path)
    return path


def test_mxfp4_of_gpt_oss_is_dequantized_as_transformers_does(tmp_path, caplog):
    path = make_gpt_oss(tmp_path / "m")
    plain = tf.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, quantization_config=tf.Mxfp4Config(dequantize=True)
    )
    with caplog.at_level(logging.WARNING):
        learner = TorchLearner.from_pretrained(settings(), path)
    assert "its weights in MXFP4 are dequantized" in caplog.text
    out = learner.export_weights()
    assert out.keys() == plain.state_dict().keys() == open_model_files(path).keys()
    assert all(torch.equal(out[name], tensor) for name, tensor in plain.state_dict().items())
    file = open_model_files(path)["model.layers.1.mlp.experts.down_proj"]
    taken = file.get_slice("model.layers.1.mlp.experts.down_proj")
    whole = taken[...]
    assert taken.get_shape() == list(whole.shape) == [hm.EXPERTS, 96, 64]
    assert torch.equal(taken[2:5, 3:70, 10:], whole[2:5, 3:70, 10:])
    train(learner, 3)
    learner.save_pretrained(tmp_path / "out")
    assert "quantization_config" not in read_config(tmp_path / "out")
    again = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, attn_implementation="eager")
    scores = score(again)[:-1].gather(1, torch.arange(1, 20)[:, None])[:, 0]
    np.testing.assert_allclose(learner.score_sequence(np.arange(20)), scores.numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({"quant_method": "gptq"}, "`quant_method` = 'gptq'"),
        ({"quant_method": "mxfp4"}, "'mxfp4' of `model_type` = 'qwen3_moe'"),
        ({"quant_method": "fp8"}, "'fp8' with `weight_block_size` = None"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, r"`weight_block_size` = \[128, 0\]"),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"},
            "'fp8' with `activation_scheme` = 'static'",
        ),
        ("fp8", "`quant_method` = None"),
    ],
)
def test_other_quantized_weights_are_refused_by_name(described, message):
    for config in ({"quantization_config": described}, {"text_config": {"compression_config": described}}):
        with pytest.raises(CheckpointFormError, match=message.replace("'qwen3_moe'", "(None|'qwen3_moe')")):
            read_quantized_form({"model_type": "qwen3_moe"} | config)


def test_scales_of_another_grid_are_refused(tmp_path):
    path = ha.make_model(tmp_path / "m", "qwen3_moe", **FP8)
    published.quantize_to_fp8(path)
    name = "model.layers.0.self_attn.q_proj.weight_scale_inv"
    published.rewrite(path, lambda tensors: tensors | {name: torch.ones(7, 7)})
    with pytest.raises(LearnerError, match=r"q_proj\.weight: \(7, 7\) scales for a shape of \(64, 192\)"):
        TorchLearner.from_pretrained(settings(), path)


def test_tensors_of_several_dtypes_are_read_as_one(tmp_path):
    path = ha.make_model(tmp_path / "m", "qwen3_moe")
    kinds = [torch.float32, torch.bfloat16, torch.float16]
    published.rewrite(
        path, lambda tensors: {name: t.to(kinds[i % 3]) for i, (name, t) in enumerate(sorted(tensors.items()))}
    )
    out = TorchLearner.from_pretrained(settings(), path).export_weights()
    before = published.read(path)
    assert {tensor.dtype for tensor in before.values()} == set(kinds)
    assert out.keys() == before.keys()
    assert all(torch.equal(out[name], t.float()) for name, t in before.items())


@pytest.mark.parametrize(
    ("name", "is_predicting"),
    [
        ("mtp.fc.weight", True),
        ("model.layers.4.mlp.gate.weight", True),
        ("model.language_model.layers.4.mlp.gate.weight", True),
        ("model.language_model.layers.3.mlp.gate.weight", False),
        ("model.visual.layers.30.mlp.fc.weight", False),
        ("lm_head.weight", False),
    ],
)
def test_layers_behind_the_decoders_last_one_predict_and_those_of_a_vision_tower_do_not(name, is_predicting):
    assert is_prediction_tensor(name, 4) == is_predicting


NEEDED = {
    "kimi_linear": ("mla_use_nope", "first_k_dense_replace", "linear_attn_config"),
    "minimax_m2": ("rotary_dim", "scoring_func", "use_routing_bias"),
}


@pytest.mark.parametrize("kind", NEEDED)
def test_keys_that_engines_need_and_transformers_does_not_write_are_exported(tmp_path, kind):
    """And a model that has them comes out with the same ones."""
    path = ha.make_model(tmp_path / "m", kind)
    made = read_config(path)
    assert not set(NEEDED[kind]) & made.keys()
    TorchLearner.from_pretrained(settings(), path).save_pretrained(tmp_path / "out")
    written = read_config(tmp_path / "out")
    assert list_needed_config(made) == {key: written[key] for key in NEEDED[kind]}
    assert {key: value for key, value in written.items() if key not in NEEDED[kind]} == made
    TorchLearner.from_pretrained(settings(), tmp_path / "out").save_pretrained(tmp_path / "again")
    assert read_config(tmp_path / "again") == written
    again = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(score(again), score(tf.AutoModelForCausalLM.from_pretrained(path)))
