"""vLLM reads in an exported `config.json` what transformers computes, also where transformers made the model."""

import json

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from vllm.transformers_utils.config import get_config

from r3async.learner.model_directory import describe_written_model
from tests.helpers import architectures as ha


@pytest.mark.parametrize("kind", ["kimi_linear", "minimax_m2"])
def test_vllm_takes_an_exported_config_for_the_model_that_it_is(tmp_path, monkeypatch, kind):
    # vLLM registers its own classes with transformers, for the whole process: later tests would get them.
    monkeypatch.setattr(CONFIG_MAPPING, "_extra_content", {})
    changes = {}
    if kind == "minimax_m2":
        changes["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    path = ha.make_model(tmp_path / "m", kind, **changes)
    made = json.loads((path / "config.json").read_text())
    read = get_config(str(path), trust_remote_code=False)
    assert not getattr(read, "mla_use_nope", False)
    assert not hasattr(read, "rotary_dim")

    (path / "config.json").write_text(json.dumps(describe_written_model(made, "bfloat16", [])))
    read = get_config(str(path), trust_remote_code=False)
    if kind == "minimax_m2":
        assert (read.rotary_dim, read.head_dim, read.scoring_func, read.use_routing_bias) == (8, 16, "sigmoid", True)
        return
    layers = range(read.num_hidden_layers)
    kinds = ["linear_attention" if read.is_kda_layer(layer) else "full_attention" for layer in layers]
    assert kinds == made["layer_types"]
    assert ["dense" if layer < read.first_k_dense_replace else "sparse" for layer in layers] == made["mlp_layer_types"]
    assert (read.mla_use_nope, read.is_mla, read.is_linear_attn) == (True, True, True)
    sizes = [read.linear_attn_config[key] for key in ("num_heads", "head_dim", "short_conv_kernel_size")]
    assert sizes == [made[f"linear_{key}"] for key in ("num_heads", "head_dim", "conv_kernel_dim")]
