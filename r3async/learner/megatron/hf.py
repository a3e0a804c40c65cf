"""What a Qwen3-MoE checkpoint's `config.json` says, and Megatron's configuration of the same model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from r3async.config import LearnerConfig
from r3async.data.model_shape import ModelShape, read_shape
from r3async.learner import LearnerError


class Qwen3Shape(ModelShape, frozen=True, kw_only=True):
    """And what this backend needs besides. `padding`: the token whose embedding is never trained, or None."""

    normalize_gates: bool
    norm_eps: float
    rope_theta: float
    padding: int | None

    @property
    def moe_pattern(self) -> list[bool]:
        """Per layer: whether its MLP is a mixture of experts."""
        return [i in self.moe_layers for i in range(self.layers)]

    def tensor_names(self) -> set[str]:
        """Names of all tensors of a checkpoint of this model."""
        names = {"model.embed_tokens.weight", "model.norm.weight"} | (set() if self.tied else {"lm_head.weight"})
        attention = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
        projections = ("gate_proj", "up_proj", "down_proj")
        for i, moe in enumerate(self.moe_pattern):
            inside = ["input_layernorm", "post_attention_layernorm", *(f"self_attn.{x}" for x in attention)]
            if moe:
                inside += ["mlp.gate", *(f"mlp.experts.{e}.{x}" for e in range(self.experts) for x in projections)]
            else:
                inside += [f"mlp.{x}" for x in projections]
            names |= {f"model.layers.{i}.{name}.weight" for name in inside}
        return names


def read_qwen3(directory: Path) -> Qwen3Shape:
    """Read `config.json`. Raises `LearnerError` naming what this backend does not support."""
    path = directory / "config.json"
    if not path.is_file():
        raise LearnerError(f"{directory} has no config.json: `model.path` must be a Hugging Face model directory")
    model_type = json.loads(path.read_text()).get("model_type")
    if model_type != "qwen3_moe":
        raise LearnerError(
            f"{directory}: model type {model_type!r} is not supported by learner.backend=megatron, only 'qwen3_moe'"
        )
    from transformers.models.qwen3_moe import Qwen3MoeConfig

    c = Qwen3MoeConfig.from_pretrained(directory)
    rope = dict(c.rope_parameters or {})
    supported = {
        "attention_bias": (c.attention_bias, False),
        "use_sliding_window": (c.use_sliding_window, False),
        "attention_dropout": (c.attention_dropout, 0),
        "hidden_act": (c.hidden_act, "silu"),
        "rope_type": (rope.get("rope_type", "default"), "default"),
        "partial_rotary_factor": (rope.get("partial_rotary_factor", 1), 1),
    }
    for key, (value, only) in supported.items():
        if value != only:
            raise LearnerError(
                f"{directory}: `{key}` = {value!r} is not supported by learner.backend=megatron, only {only!r}"
            )
    return Qwen3Shape(
        **msgspec.structs.asdict(read_shape(c.to_dict())),
        normalize_gates=c.norm_topk_prob,
        norm_eps=c.rms_norm_eps,
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        # transformers' own modules: a negative one counts from the end, as `torch.nn.Embedding` has it.
        padding=None if c.pad_token_id is None else c.pad_token_id % c.vocab_size,
    )


RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
"""Megatron's settings for `learner.recompute`."""


def transformer_config(shape: Qwen3Shape, learner: LearnerConfig) -> TransformerConfig:
    """Megatron's configuration of that model.

    `norm_topk_prob` (gates normalised over the chosen experts) is Megatron's softmax *after* top-k, and its opposite is
    `moe_router_pre_softmax`: softmax over all experts, then top-k.
    """
    parallel, dtype = learner.parallel, getattr(torch, learner.dtype)
    return TransformerConfig(
        tensor_model_parallel_size=parallel.tp,
        sequence_parallel=parallel.tp > 1,
        pipeline_model_parallel_size=parallel.pp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=1,
        # Micro-batches are packed by tokens: each has its own length, and stages send it on.
        variable_seq_lengths=parallel.pp > 1,
        # Losses are divided by global denominators already, and not by the number of micro-batches.
        calculate_per_token_loss=True,
        **RECOMPUTE[learner.recompute],
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.width,
        moe_ffn_hidden_size=shape.expert_width or None,
        num_moe_experts=shape.experts or None,
        moe_layer_freq=[int(moe) for moe in shape.moe_pattern],
        moe_router_topk=shape.top_k or 1,
        moe_router_pre_softmax=not shape.normalize_gates,
        moe_router_score_function="softmax",
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_router_dtype="fp32",
        # A fused router returns before it looks at recorded routes.
        moe_router_fusion=False,
        # With one rank the all-gather dispatcher gathers nothing; the all-to-all one keeps its bookkeeping. With several,
        # only the all-to-all one allows ranks to have different numbers of tokens.
        moe_token_dispatcher_type="allgather" if parallel.world == 1 else "alltoall",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=True,
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
