"""Tiny random models of every declared architecture, and plain transformers with forced routes beside them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.core_model_loading import revert_weight_conversion

from r3async.data.model_shape import parse_model_shape
from tests.helpers.models import EXPERTS, TOP_K, VOCAB, save_random

SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
MIXTURE = {"moe_intermediate_size": 48, "num_experts": EXPERTS}
ROUTED = {"moe_intermediate_size": 48, "n_routed_experts": EXPERTS, "routed_scaling_factor": 2.5}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
SAID = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
"""Settings of DeepSeek's own files that vLLM reads, and transformers does not."""
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
STATES = ["linear_attention", "full_attention", "linear_attention"]
DELTA = {
    **{"head_dim": 16, "layer_types": STATES, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4},
}
CHANNELS = {
    **{"q_lora_rank": None, "num_local_experts": EXPERTS, "moe_intermediate_size": 48, "n_shared_experts": 1},
    **{"n_group": 1, "topk_group": 1, "linear_head_dim": 16, "linear_num_heads": 4, "linear_conv_kernel_dim": 4},
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}
MAMBA2 = {
    **{"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_d_conv": 4},
    **{"mamba_expand": 2, "mamba_chunk_size": 8},
}

VARIANTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [1], **MIXTURE},
    "qwen2_moe": {"shared_expert_intermediate_size": 40, "norm_topk_prob": False, **MIXTURE},
    "olmoe": {"num_experts": EXPERTS, "norm_topk_prob": False},
    "mixtral": {"num_local_experts": EXPERTS, "sliding_window": None, "router_jitter_noise": 0.1},
    "deepseek_v3": {
        **ROUTED,
        **LATENT,
        **SAID,
        "q_lora_rank": 20,
        "n_group": 4,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "n_shared_experts": 2,
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    },
    "deepseek_v3/moonlight": {
        **ROUTED,
        **LATENT,
        **SAID,
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
    "glm4_moe": {**ROUTED, "head_dim": 16, "attention_bias": True, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "glm4_moe/norms": {
        **ROUTED,
        "head_dim": 32,
        "use_qk_norm": True,
        "first_k_dense_replace": 2,
        "n_group": 2,
        "topk_group": 1,
    },
    "qwen3": {"head_dim": 24},
    "qwen2": {"tie_word_embeddings": True},
    "llama": {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 64}},
    "llama/linear": {
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    },
}
"""Settings of a `config.json`, by `model_type`; a slash introduces what is special about some."""
TORCH_ONLY: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": EXPERTS,
        "sliding_window": 8,
        "rope_parameters": YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    },
    "qwen3_next": {**DELTA, **MIXTURE, "shared_expert_intermediate_size": 40},
    "qwen3_5_moe_text": {**DELTA, **MIXTURE, "shared_expert_intermediate_size": 40},
    "qwen3_5_text": DELTA,
    "nemotron_h": {
        "num_hidden_layers": None,
        "layers_block_type": ["mamba", "moe", "attention", "mlp", "moe"],
        **{
            "ssm_state_size": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "chunk_size": 8,
            "conv_kernel": 4,
        },
        **{"moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 40, "n_routed_experts": EXPERTS},
        **{"n_shared_experts": 1, "head_dim": 16},
    },
    "kimi_linear": {**LATENT, **CHANNELS, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "bailing_hybrid": {**LATENT, **CHANNELS, "layer_group_size": 3, "num_mtp_layers": 0, "first_k_dense_replace": 1},
    "minimax": {"head_dim": 16, "num_local_experts": EXPERTS, "block_size": 8, "layer_types": STATES},
    "lfm2_moe": {
        **MIXTURE,
        "num_dense_layers": 1,
        "conv_L_cache": 3,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "granitemoehybrid": {
        **MAMBA2,
        **{
            "num_local_experts": EXPERTS,
            "shared_intermediate_size": 40,
            "layer_types": ["mamba", "attention", "mamba"],
        },
        **{"logits_scaling": 6.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2},
    },
    "jamba": {
        **{"num_experts": EXPERTS, "expert_layer_period": 2, "expert_layer_offset": 1},
        **{"attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_d_conv": 3, "mamba_expand": 2},
    },
    "olmo_hybrid": {key: value for key, value in DELTA.items() if key != "head_dim"},
    "bamba": {**MAMBA2, "attn_layer_indices": [1]},
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 128, "head_dim": 16, "lm_head_multiplier": 0.4, "ssm_in_multiplier": 0.7},
    "minimax_m2": {"head_dim": 16, "num_local_experts": EXPERTS},
    "ernie4_5_moe": {
        **{"moe_k": TOP_K, "moe_num_experts": EXPERTS, "moe_intermediate_size": 48, "moe_num_shared_experts": 1},
        "moe_layer_start_index": 1,
    },
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": EXPERTS, "moe_topk": TOP_K, "num_shared_expert": 1},
}
ALL = VARIANTS | TORCH_ONLY


def make_model(directory: Path, variant: str, **changes: Any) -> Path:
    """Save a random float32 model with random expert biases, and return `directory`."""
    kind = variant.partition("/")[0]
    save_random(directory, AutoConfig.for_model(kind, **(SHARED | ALL[variant] | changes)))
    file = directory / "model.safetensors"
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(5)
    for name, tensor in tensors.items():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


def mixtures(directory: Path) -> int:
    """Return the number of the model's layers that are mixtures of experts."""
    return len(parse_model_shape(json.loads((directory / "config.json").read_text())).moe_layers)


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients under the names of the checkpoint."""
    return dict(revert_weight_conversion(model, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
