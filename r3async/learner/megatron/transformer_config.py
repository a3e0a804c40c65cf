"""Megatron's configuration of a model."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from r3async.config import LearnerConfig
from r3async.learner.model import MegatronModelShape

RECOMPUTE_SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}
"""Megatron's settings for `learner.recompute`."""


def build_transformer_config(
    shape: MegatronModelShape, learner: LearnerConfig
) -> TransformerConfig:
    """Return Megatron's configuration of that model.

    Gates that are normalised over the chosen experts are Megatron's softmax *after* top-k, and
    their opposite is `moe_router_pre_softmax`: softmax over all experts, then top-k. Megatron
    always normalises sigmoids.
    """
    parallel = learner.parallel
    dtype = getattr(torch, learner.dtype)
    groups, chosen = shape.expert_groups or (None, None)
    return TransformerConfig(
        tensor_model_parallel_size=parallel.tp,
        sequence_parallel=parallel.tp > 1,
        pipeline_model_parallel_size=parallel.pp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=1,
        # Micro-batches are packed by tokens: each has a different length, which stages send on.
        variable_seq_lengths=parallel.pp > 1,
        # Losses are already divided by global denominators, not by the number of micro-batches.
        calculate_per_token_loss=True,
        **RECOMPUTE_SETTINGS[learner.recompute],
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.mlp_width,
        moe_ffn_hidden_size=shape.expert_width or None,
        num_moe_experts=shape.num_experts or None,
        moe_layer_freq=[int(moe) for moe in shape.moe_pattern] if shape.moe_layers else 1,
        moe_router_topk=shape.top_k or 1,
        moe_router_pre_softmax=not shape.normalizes_gates,
        moe_router_score_function=shape.architecture.router_score,
        moe_router_enable_expert_bias=shape.has_expert_biases,
        moe_router_num_groups=groups,
        moe_router_group_topk=chosen,
        moe_router_topk_scaling_factor=shape.gate_scale if shape.gate_scale != 1 else None,
        moe_shared_expert_intermediate_size=shape.shared_width or None,
        moe_shared_expert_gate=shape.has_shared_gate,
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_router_dtype="fp32",
        # A fused router returns before it looks at recorded routes.
        moe_router_fusion=False,
        # With one rank the all-gather dispatcher gathers nothing; the all-to-all one keeps its
        # bookkeeping. With several, only the all-to-all one allows ranks to have different
        # numbers of tokens.
        moe_token_dispatcher_type="allgather" if parallel.world_size == 1 else "alltoall",
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=bool(shape.query_norm),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        cuda_graph_scope=[],  # its default is deprecated, with a warning
        # Weights are made on the host, uninitialised, and then loaded.
        use_cpu_initialization=True,
        perform_initialization=False,
    )
