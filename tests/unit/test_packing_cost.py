"""FLOPs from config.json, against counts made by hand and against a model's own matrices."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen3MoeConfig

from dev.bench.packing import read_model_shape
from r3async.learner.batch import CostModel, build_cost_model

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}


def test_qwen3_30b_a3b_by_hand():
    per_layer = 2048 * 4096 * 2 + 2048 * 512 * 2 + 8 * 3 * 2048 * 768 + 2048 * 128
    cost = build_cost_model(read_model_shape("Qwen3-30B-A3B"))
    assert cost.linear == 2 * (48 * per_layer + 2048 * 151936)
    assert cost.quadratic == 48 * 32 * (128 + 128)
    assert cost.linear / 2 == pytest.approx(3.04e9, rel=0.01)  # the name says 3 B active


def by_matrices(config):
    """Twice the weights that one token meets, from the shapes of a model's own matrices."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    total = 0
    for name, p in model.named_parameters():
        if p.dim() < 2 or "embed_tokens" in name:
            continue
        share = config.num_experts_per_tok / p.shape[0] if ".experts." in name else 1
        total += int(p.numel() * share)
    return 2 * total


def test_mixture_with_a_dense_layer_is_what_its_matrices_say():
    config = Qwen3MoeConfig(**SMALL, head_dim=16, num_local_experts=8, mlp_only_layers=[1])
    assert build_cost_model(config.to_dict()).linear == by_matrices(config)
    assert build_cost_model(config.to_dict()).quadratic == 3 * 4 * 32


@pytest.mark.parametrize("q_rank", [12, None])
def test_latent_attention_and_a_shared_expert_are_what_their_matrices_say(q_rank):
    small = {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}
    config = DeepseekV3Config(
        **small,
        n_routed_experts=8,
        n_shared_experts=2,
        first_k_dense_replace=1,
        q_lora_rank=q_rank,
        kv_lora_rank=10,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        n_group=1,
        topk_group=1,
    )
    assert build_cost_model(config.to_dict()).linear == by_matrices(config)
    assert build_cost_model(config.to_dict()).quadratic == 3 * 4 * (12 + 6)


def test_a_sliding_window_costs_its_width_and_linear_attention_nothing_quadratic():
    kinds = ["full_attention", "sliding_attention", "linear_attention"]
    plain = SMALL | {"num_experts": 8}
    mixed = build_cost_model(plain | {"layer_types": kinds, "sliding_window": 10})
    assert mixed.quadratic == build_cost_model(plain).quadratic / 3
    assert mixed.linear == build_cost_model(plain).linear + 2 * 4 * 16 * 10


def test_dense_models_and_nested_configurations_are_counted_too():
    dense = build_cost_model(SMALL)
    assert dense.linear == 2 * (3 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48) + 32 * 64)
    assert build_cost_model({"text_config": SMALL}) == dense
    assert build_cost_model({"d_model": 32, "n_layers": 3}) == CostModel()
    assert np.isfinite(dense.estimate_costs(np.asarray([1, 10**6]))).all()
